//! Memory of captured graphs and of PyTorch's memory pools, by PyTorch's names for them.
//!
//! PyTorch reports when a capture begins and ends, and when its graph is destroyed. It does not
//! report which graph that was, nor its launches. So the device is synchronised before the memory
//! is given back, as PyTorch's own allocator does by `cudaFree`.
#![expect(unsafe_code, reason = "exports functions to C")]

use crate::{
    entry::{CallResult, enter, write_out},
    runtime::aq_runtime,
    status::{Failure, Status, aq_status},
    thread_state,
    torch::{default_runtime, device_of},
};
use aquifer::{GraphPool, device::Announced};
use std::{
    collections::HashMap,
    ffi::{c_int, c_void},
    ptr::with_exposed_provenance_mut,
    sync::{Mutex, MutexGuard, PoisonError},
};

/// Returns whether work on a stream is a part of the capture.
pub type aq_torch_filter =
    Option<unsafe extern "C" fn(data: *mut c_void, stream: *mut c_void) -> c_int>;
/// Frees the data of a filter.
pub type aq_torch_drop = Option<unsafe extern "C" fn(data: *mut c_void)>;

/// A filter of the caller, with its data.
struct Filter {
    call: aq_torch_filter,
    data: *mut c_void,
    drop: aq_torch_drop,
}

// SAFETY: 1. The caller of `aq_torch_pool_begin` guarantees that any thread may call it, and any
// one thread may drop it.
unsafe impl Send for Filter {}
// SAFETY: 1. As above, also concurrently.
unsafe impl Sync for Filter {}

impl Filter {
    fn includes(&self, stream: u64) -> bool {
        // SAFETY: 1. Guaranteed by the caller until `drop` is called, which is at the end of this
        // value.
        self.call.is_some_and(|call| unsafe {
            call(self.data, with_exposed_provenance_mut(stream as usize)) != 0
        })
    }
}

impl Drop for Filter {
    fn drop(&mut self) {
        if let Some(drop) = self.drop {
            // SAFETY: 1. Guaranteed by the caller, once: the filter is not called any more.
            unsafe { drop(self.data) };
        }
    }
}

/// A pool with its users.
#[derive(Default)]
struct TorchPool {
    users: u32,
    /// Created by the first capture. Pools without a captured graph need none.
    memory: Option<GraphPool>,
    state: CaptureState,
}

/// Whether captures are served from a pool.
#[derive(Default)]
enum CaptureState {
    #[default]
    Idle,
    /// A thread is beginning to serve captures, and calls the driver for it.
    Starting,
    Active(#[expect(dead_code, reason = "it is open as long as it is held")] Announced),
}

impl TorchPool {
    fn is_unused(&self) -> bool {
        self.users == 0 && matches!(self.state, CaptureState::Idle)
    }
}

/// A runtime, a device of it, and PyTorch's name.
type PoolKey = (aq_runtime, u32, u64, u64);

static POOLS: Mutex<Option<HashMap<PoolKey, TorchPool>>> = Mutex::new(None);

fn pools() -> MutexGuard<'static, Option<HashMap<PoolKey, TorchPool>>> {
    POOLS.lock().unwrap_or_else(PoisonError::into_inner)
}

fn key(device: c_int, first: u64, second: u64) -> CallResult<PoolKey> {
    Ok((default_runtime()?, device_of(device)?, first, second))
}

#[cold]
fn no_pool((_, device, first, second): PoolKey, what: &str) -> Failure {
    let text = format!("pool ({first}, {second}) of device {device} {what}");
    Failure::new(Status::BadArgument, text)
}

/// Serves captures from a pool from now on.
///
/// # Safety
/// 1. `filter` may be called with `data` by any thread, concurrently, until `drop` is called with
///    it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_torch_pool_begin(
    device: c_int,
    first: u64,
    second: u64,
    filter: aq_torch_filter,
    data: *mut c_void,
    drop: aq_torch_drop,
) -> aq_status {
    // From here on `drop` is called in any case.
    let filter = Filter { call: filter, data, drop };
    enter(|| {
        if filter.call.is_none() {
            return Err(crate::entry::null("filter"));
        }
        let key = key(device, first, second)?;
        let known = {
            let mut pools = pools();
            let pool = pools.get_or_insert_default().entry(key).or_default();
            if !matches!(pool.state, CaptureState::Idle) {
                return Err(Failure::new(
                    Status::Busy,
                    format!("pool ({first}, {second}) has begun already"),
                ));
            }
            pool.state = CaptureState::Starting;
            pool.memory.clone()
        };
        let result = begin(key, known, filter);
        let mut pools = pools();
        let pool = pools.get_or_insert_default().entry(key).or_default();
        match result {
            Ok((memory, announced)) => {
                pool.users += 1;
                pool.memory = Some(memory);
                pool.state = CaptureState::Active(announced);
                Ok(())
            }
            Err(failure) => {
                pool.state = CaptureState::Idle;
                let removed = remove_if_unused(&mut pools, key);
                std::mem::drop(pools);
                std::mem::drop(removed);
                Err(failure)
            }
        }
    })
}

/// Makes the driver calls, without a lock.
fn begin(
    key: PoolKey,
    known: Option<GraphPool>,
    filter: Filter,
) -> CallResult<(GraphPool, Announced)> {
    let memory = match known {
        Some(memory) => memory,
        None => thread_state::with(key.0, |shared| Ok(shared.pool(key.1)?.graph_pool()?))?,
    };
    let announced = memory.announce_where(move |stream| filter.includes(stream.handle()))?;
    Ok((memory, announced))
}

/// Removes a pool without users. The caller drops it outside of the lock.
fn remove_if_unused(
    pools: &mut Option<HashMap<PoolKey, TorchPool>>,
    key: PoolKey,
) -> Option<TorchPool> {
    let pools = pools.as_mut()?;
    if pools.get(&key).is_some_and(TorchPool::is_unused) { pools.remove(&key) } else { None }
}

/// Stops serving captures from a pool.
#[unsafe(no_mangle)]
pub extern "C" fn aq_torch_pool_end(device: c_int, first: u64, second: u64) -> aq_status {
    enter(|| {
        let key = key(device, first, second)?;
        let (ended, removed) = {
            let mut pools = pools();
            let pool = pools.as_mut().and_then(|pools| pools.get_mut(&key));
            let Some(pool) = pool.filter(|pool| matches!(pool.state, CaptureState::Active(_)))
            else {
                return Err(no_pool(key, "has not begun"));
            };
            let ended = std::mem::take(&mut pool.state);
            (ended, remove_if_unused(&mut pools, key))
        };
        // The launches of what was captured are not reported. A dropped announcement allows for
        // that.
        drop((ended, removed));
        Ok(())
    })
}

/// Adds a user of a pool.
#[unsafe(no_mangle)]
pub extern "C" fn aq_torch_pool_retain(device: c_int, first: u64, second: u64) -> aq_status {
    enter(|| {
        let key = key(device, first, second)?;
        thread_state::with(key.0, |shared| Ok(shared.pool(key.1).map(|_| ())?))?;
        pools().get_or_insert_default().entry(key).or_default().users += 1;
        Ok(())
    })
}

/// Removes a user of a pool.
#[unsafe(no_mangle)]
pub extern "C" fn aq_torch_pool_release(device: c_int, first: u64, second: u64) -> aq_status {
    enter(|| {
        let key = key(device, first, second)?;
        let removed = {
            let mut pools = pools();
            let pool = pools.as_mut().and_then(|pools| pools.get_mut(&key));
            let Some(pool) = pool.filter(|pool| pool.users > 0) else {
                return Err(no_pool(key, "has no users"));
            };
            pool.users -= 1;
            remove_if_unused(&mut pools, key)
        };
        // A trim or a slow path releases its memory, after its last block has been freed too.
        drop(removed);
        Ok(())
    })
}

/// Returns the number of users.
///
/// # Safety
/// 1. `uses` is null, or points to an `int` that the caller may write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_torch_pool_uses(
    device: c_int,
    first: u64,
    second: u64,
    uses: *mut c_int,
) -> aq_status {
    enter(|| {
        let key = key(device, first, second)?;
        let users = pools().as_ref().and_then(|pools| pools.get(&key)).map_or(0, |pool| pool.users);
        // SAFETY: 1. Guaranteed by the caller.
        unsafe { write_out(uses, users as c_int, "uses") }
    })
}
