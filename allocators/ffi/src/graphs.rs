//! Memory of captured graphs and of PyTorch's memory pools, by PyTorch's names for them.
//!
//! PyTorch reports when a capture begins and ends, and when its graph is destroyed. It does not
//! report which graph that was, nor its launches. So the device is synchronised before the memory
//! is given back, as PyTorch's own allocator does by `cudaFree`.
#![expect(unsafe_code, reason = "exports functions to C")]

use crate::{
    entry::{Answer, enter, put},
    here,
    runtime::aq_runtime,
    status::{Failure, Status, aq_status},
    torch::{device_of, the_runtime},
};
use aquifer::device::{Announced, GraphPool};
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
struct Pool {
    users: u32,
    /// Created by the first capture. Pools without a captured graph need none.
    memory: Option<GraphPool>,
    begun: Begun,
}

/// Whether captures are served from a pool.
#[derive(Default)]
enum Begun {
    #[default]
    No,
    /// A thread is beginning to serve captures, and calls the driver for it.
    Coming,
    Yes(#[expect(dead_code, reason = "it is open as long as it is held")] Announced),
}

impl Pool {
    fn is_over(&self) -> bool {
        self.users == 0 && matches!(self.begun, Begun::No)
    }
}

/// A runtime, a device of it, and PyTorch's name.
type Name = (aq_runtime, u32, u64, u64);

static POOLS: Mutex<Option<HashMap<Name, Pool>>> = Mutex::new(None);

fn pools() -> MutexGuard<'static, Option<HashMap<Name, Pool>>> {
    POOLS.lock().unwrap_or_else(PoisonError::into_inner)
}

fn name(device: c_int, first: u64, second: u64) -> Answer<Name> {
    Ok((the_runtime()?, device_of(device)?, first, second))
}

#[cold]
fn no_pool((_, device, first, second): Name, what: &str) -> Failure {
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
        let name = name(device, first, second)?;
        let known = {
            let mut pools = pools();
            let pool = pools.get_or_insert_default().entry(name).or_default();
            if !matches!(pool.begun, Begun::No) {
                return Err(Failure::new(
                    Status::Busy,
                    format!("pool ({first}, {second}) has begun already"),
                ));
            }
            pool.begun = Begun::Coming;
            pool.memory.clone()
        };
        let made = begin(name, known, filter);
        let mut pools = pools();
        let pool = pools.get_or_insert_default().entry(name).or_default();
        match made {
            Ok((memory, announced)) => {
                pool.users += 1;
                pool.memory = Some(memory);
                pool.begun = Begun::Yes(announced);
                Ok(())
            }
            Err(failure) => {
                pool.begun = Begun::No;
                let gone = take_if_over(&mut pools, name);
                std::mem::drop(pools);
                std::mem::drop(gone);
                Err(failure)
            }
        }
    })
}

/// Makes the driver calls, without a lock.
fn begin(name: Name, known: Option<GraphPool>, filter: Filter) -> Answer<(GraphPool, Announced)> {
    let memory = match known {
        Some(memory) => memory,
        None => here::with(name.0, |shared| Ok(shared.pool(name.1)?.graph_pool()?))?,
    };
    let announced = memory.announce_where(move |stream| filter.includes(stream.handle()))?;
    Ok((memory, announced))
}

/// Removes a pool without users. The caller drops it outside of the lock.
fn take_if_over(pools: &mut Option<HashMap<Name, Pool>>, name: Name) -> Option<Pool> {
    let pools = pools.as_mut()?;
    if pools.get(&name).is_some_and(Pool::is_over) { pools.remove(&name) } else { None }
}

/// Stops serving captures from a pool.
#[unsafe(no_mangle)]
pub extern "C" fn aq_torch_pool_end(device: c_int, first: u64, second: u64) -> aq_status {
    enter(|| {
        let name = name(device, first, second)?;
        let (ended, gone) = {
            let mut pools = pools();
            let pool = pools.as_mut().and_then(|pools| pools.get_mut(&name));
            let Some(pool) = pool.filter(|pool| matches!(pool.begun, Begun::Yes(_))) else {
                return Err(no_pool(name, "has not begun"));
            };
            let ended = std::mem::take(&mut pool.begun);
            (ended, take_if_over(&mut pools, name))
        };
        // The launches of what was captured are not reported. A dropped announcement allows for
        // that.
        drop((ended, gone));
        Ok(())
    })
}

/// Adds a user of a pool.
#[unsafe(no_mangle)]
pub extern "C" fn aq_torch_pool_retain(device: c_int, first: u64, second: u64) -> aq_status {
    enter(|| {
        let name = name(device, first, second)?;
        here::with(name.0, |shared| Ok(shared.pool(name.1).map(|_| ())?))?;
        pools().get_or_insert_default().entry(name).or_default().users += 1;
        Ok(())
    })
}

/// Removes a user of a pool.
#[unsafe(no_mangle)]
pub extern "C" fn aq_torch_pool_release(device: c_int, first: u64, second: u64) -> aq_status {
    enter(|| {
        let name = name(device, first, second)?;
        let gone = {
            let mut pools = pools();
            let pool = pools.as_mut().and_then(|pools| pools.get_mut(&name));
            let Some(pool) = pool.filter(|pool| pool.users > 0) else {
                return Err(no_pool(name, "has no users"));
            };
            pool.users -= 1;
            take_if_over(&mut pools, name)
        };
        // A trim or a slow path releases its memory, after its last block has been freed too.
        drop(gone);
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
        let name = name(device, first, second)?;
        let users =
            pools().as_ref().and_then(|pools| pools.get(&name)).map_or(0, |pool| pool.users);
        // SAFETY: 1. Guaranteed by the caller.
        unsafe { put(uses, users as c_int, "uses") }
    })
}
