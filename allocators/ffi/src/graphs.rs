//! Memory of captured graphs and of PyTorch's memory pools, by PyTorch's names for them.
//!
//! PyTorch tells when a capture begins and ends and when its graph is gone, not which graph it was
//! nor when it is launched: so the device is waited for before the memory goes back, as PyTorch's
//! own allocator does by `cudaFree`.
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

/// Whether work on a stream belongs.
pub type aq_torch_filter =
    Option<unsafe extern "C" fn(data: *mut c_void, stream: *mut c_void) -> c_int>;
/// The end of what a filter is called with.
pub type aq_torch_drop = Option<unsafe extern "C" fn(data: *mut c_void)>;

/// A filter of the caller's, and what it is called with.
struct Filter {
    call: aq_torch_filter,
    data: *mut c_void,
    drop: aq_torch_drop,
}

// SAFETY: 1. the caller of `aq_torch_pool_begin` promises that any thread may call it, and one may
// end it.
unsafe impl Send for Filter {}
// SAFETY: 1. as above, also at once.
unsafe impl Sync for Filter {}

impl Filter {
    fn includes(&self, stream: u64) -> bool {
        // SAFETY: 1. the caller's, until `drop` is called, which is when this value ends.
        self.call.is_some_and(|call| unsafe {
            call(self.data, with_exposed_provenance_mut(stream as usize)) != 0
        })
    }
}

impl Drop for Filter {
    fn drop(&mut self) {
        if let Some(drop) = self.drop {
            // SAFETY: 1. the caller's, once: nobody calls the filter any more.
            unsafe { drop(self.data) };
        }
    }
}

/// A pool that has users.
#[derive(Default)]
struct Pool {
    users: u32,
    /// Made by the first that begins: memory pools that no graph is captured into need none.
    memory: Option<GraphPool>,
    begun: Begun,
}

/// Whether captures are served out of a pool.
#[derive(Default)]
enum Begun {
    #[default]
    No,
    /// A thread is about to, and calls the driver for it.
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

/// Serves captures out of a pool from now on.
///
/// # Safety
/// 1. `filter` may be called with `data` by any thread, by several at once, until `drop` is called
///    with it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_torch_pool_begin(
    device: c_int,
    first: u64,
    second: u64,
    filter: aq_torch_filter,
    data: *mut c_void,
    drop: aq_torch_drop,
) -> aq_status {
    // From here on it ends by itself, whatever happens.
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

/// What calls the driver, under no lock.
fn begin(name: Name, known: Option<GraphPool>, filter: Filter) -> Answer<(GraphPool, Announced)> {
    let memory = match known {
        Some(memory) => memory,
        None => here::with(name.0, |shared| Ok(shared.pool(name.1)?.graph_pool()?))?,
    };
    let announced = memory.announce_where(move |stream| filter.includes(stream.handle()))?;
    Ok((memory, announced))
}

/// A pool without users, to be dropped outside of the lock.
fn take_if_over(pools: &mut Option<HashMap<Name, Pool>>, name: Name) -> Option<Pool> {
    let pools = pools.as_mut()?;
    if pools.get(&name).is_some_and(Pool::is_over) { pools.remove(&name) } else { None }
}

/// Serves them no longer.
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
        // Nobody will say when what was captured is launched: an announcement that is dropped
        // counts on that.
        drop((ended, gone));
        Ok(())
    })
}

/// A user more.
#[unsafe(no_mangle)]
pub extern "C" fn aq_torch_pool_retain(device: c_int, first: u64, second: u64) -> aq_status {
    enter(|| {
        let name = name(device, first, second)?;
        here::with(name.0, |shared| Ok(shared.pool(name.1).map(|_| ())?))?;
        pools().get_or_insert_default().entry(name).or_default().users += 1;
        Ok(())
    })
}

/// A user less.
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
        // Its memory goes at a trim or a slow path, when the last block of it has gone too.
        drop(gone);
        Ok(())
    })
}

/// How many users there are.
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
        // SAFETY: 1. the caller's.
        unsafe { put(uses, users as c_int, "uses") }
    })
}
