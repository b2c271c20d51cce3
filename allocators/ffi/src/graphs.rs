//! Memory of captured graphs and of PyTorch's memory pools, by PyTorch's names for them.
//!
//! PyTorch reports when a capture begins and ends, and when its graph is destroyed. It does not
//! report which graph that was, nor its launches. So the device is synchronised before the memory
//! is given back, as PyTorch's own allocator does by `cudaFree`.
#![expect(unsafe_code, reason = "exports functions to C")]

use crate::{
    entry::{CallResult, enter, lock, require, write_out},
    process::{default_runtime, device_of, remember_device},
    region,
    runtime::aq_runtime,
    status::{Failure, Status, aq_status},
    thread_state,
};
use aquifer::{DeviceRange, GraphPool, Parkable, RawStream, Request, Tag, device::Announced};
use std::{
    collections::HashMap,
    ffi::{c_char, c_int, c_void},
    ptr::{null_mut, with_exposed_provenance_mut},
    sync::{Arc, Mutex, MutexGuard},
};

/// Returns whether work on a stream belongs to the pool.
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
    /// The filter of the last `begin`.
    filter: Option<Arc<Filter>>,
    /// Whether a program holds it (`torch.cuda.MemPool`). Its free memory stays with it: the
    /// program may have registered it with a library.
    is_held: bool,
    /// Whether its free memory serves other requests when there is no other memory.
    serves_last: bool,
}

/// Whether work is served from a pool.
#[derive(Default)]
enum CaptureState {
    #[default]
    Idle,
    /// A thread is beginning to serve it, and calls the driver for that.
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
    lock(&POOLS)
}

fn key(device: c_int, first: u64, second: u64) -> CallResult<PoolKey> {
    Ok((default_runtime()?, device_of(device)?, first, second))
}

#[cold]
fn no_pool((_, device, first, second): PoolKey, what: &str) -> Failure {
    let text = format!("pool ({first}, {second}) of device {device} {what}");
    Failure::new(Status::BadArgument, text)
}

/// Serves the work that the filter accepts from a pool from now on, captured or not.
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
    let filter = Arc::new(Filter { call: filter, data, drop });
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
            pool.filter = Some(filter.clone());
            pool.memory.clone()
        };
        let result = begin(key, known, filter);
        let mut pools = pools();
        let pool = pools.get_or_insert_default().entry(key).or_default();
        match result {
            Ok((memory, announced)) => {
                pool.users += 1;
                if pool.is_held {
                    memory.retain_free();
                }
                pool.memory = Some(memory);
                pool.state = CaptureState::Active(announced);
                Ok(())
            }
            Err(failure) => {
                pool.state = CaptureState::Idle;
                let ended = (pool.filter.take(), remove_if_unused(&mut pools, key));
                std::mem::drop(pools);
                std::mem::drop(ended);
                Err(failure)
            }
        }
    })
}

/// Makes the driver calls, without a lock.
fn begin(
    key: PoolKey,
    known: Option<GraphPool>,
    filter: Arc<Filter>,
) -> CallResult<(GraphPool, Announced)> {
    let memory = match known {
        Some(memory) => memory,
        None => thread_state::with(key.0, |shared| Ok(shared.pool(key.1)?.graph_pool()?))?,
    };
    let announced = memory.announce_all_where(move |stream| filter.includes(stream.handle()))?;
    Ok((memory, announced))
}

/// Removes a pool without users. The caller drops it outside of the lock.
fn remove_if_unused(
    pools: &mut Option<HashMap<PoolKey, TorchPool>>,
    key: PoolKey,
) -> Option<TorchPool> {
    let pools = pools.as_mut()?;
    let removed = pools.get(&key).is_some_and(TorchPool::is_unused).then(|| pools.remove(&key));
    removed.flatten()
}

/// Stops serving work from a pool.
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
            let ended = (std::mem::take(&mut pool.state), pool.filter.take());
            (ended, remove_if_unused(&mut pools, key))
        };
        // The launches of what was captured are not reported. A dropped announcement allows for
        // that.
        drop((ended, removed));
        Ok(())
    })
}

/// Adds a user of a pool, which keeps its free memory from now on.
#[unsafe(no_mangle)]
pub extern "C" fn aq_torch_pool_retain(device: c_int, first: u64, second: u64) -> aq_status {
    enter(|| {
        let key = key(device, first, second)?;
        thread_state::with(key.0, |shared| Ok(shared.pool(key.1).map(|_| ())?))?;
        let mut pools = pools();
        let pool = pools.get_or_insert_default().entry(key).or_default();
        pool.users += 1;
        pool.is_held = true;
        pool.memory.iter().for_each(GraphPool::retain_free);
        Ok(())
    })
}

/// Makes the memory of a pool, which nothing was allocated from yet, one that is parked with a tag.
///
/// # Safety
/// 1. `tag` is null, or points to a text that ends with a zero byte.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_torch_pool_tag(
    device: c_int,
    first: u64,
    second: u64,
    tag: *const c_char,
) -> aq_status {
    enter(|| {
        let key = key(device, first, second)?;
        // SAFETY: 1. Guaranteed by the caller.
        let tag = unsafe { region::read_tag(tag) }?.ok_or_else(|| crate::entry::null("tag"))?;
        if let Some(memory) = memory_of(key) {
            return match memory.tag() {
                own if own == tag => Ok(()),
                Tag::NONE => Err(no_pool(key, "has memory already, which is not to be parked")),
                own => Err(no_pool(key, &format!("is of the tag {:?} already", own.name()))),
            };
        }
        let new = thread_state::with(key.0, |shared| {
            Ok(shared.pool(key.1)?.parkable_graph_pool(tag)?)
        })?;
        let mut pools = pools();
        let pool = pools.get_or_insert_default().entry(key).or_default();
        let raced = pool.memory.is_some() || !matches!(pool.state, CaptureState::Idle);
        let refused = if raced { Some(new) } else { pool.memory.replace(new) };
        drop(pools);
        drop(refused);
        if raced {
            return Err(Failure::new(
                Status::Busy,
                format!("pool ({first}, {second}) begins elsewhere at the same time"),
            ));
        }
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

/// Makes the free memory of a pool serve other requests when there is no other memory, or ends
/// that.
#[unsafe(no_mangle)]
pub extern "C" fn aq_torch_pool_use_on_oom(
    device: c_int,
    first: u64,
    second: u64,
    serves: c_int,
) -> aq_status {
    enter(|| {
        let key = key(device, first, second)?;
        match pools().as_mut().and_then(|pools| pools.get_mut(&key)) {
            Some(pool) => pool.serves_last = serves != 0,
            None if serves == 0 => {}
            None => return Err(no_pool(key, "does not exist")),
        }
        Ok(())
    })
}

/// Allocates from the free memory of pools that serve other requests, for a request that was
/// `refused`. A request of a thread that a pool serves finds only its own pool. Returns the
/// address, or `refused`.
///
/// # Safety
/// As [`aq_alloc_aligned`](crate::device::aq_alloc_aligned) for `stream`.
#[cold]
pub(crate) unsafe fn last_resort(
    runtime: aq_runtime,
    device: u32,
    request: Request,
    stream: *mut c_void,
    refused: Failure,
) -> CallResult<u64> {
    let is_shortage = matches!(refused.status(), Status::OutOfMemory | Status::OutOfBudget);
    let handle = stream.addr() as u64;
    // The filters are foreign code and run without the lock.
    let found: Vec<_> = pools()
        .iter()
        .flatten()
        .filter(|(key, _)| (key.0, key.1) == (runtime, device))
        .map(|(_, pool)| {
            (pool.filter.clone(), pool.memory.as_ref().filter(|_| pool.serves_last).cloned())
        })
        .collect();
    if !is_shortage || found.iter().flat_map(|(own, _)| own).any(|own| own.includes(handle)) {
        return Err(refused);
    }
    // SAFETY: 1. Guaranteed by the caller.
    let served = unsafe {
        thread_state::with_stream(runtime, device, handle, |_, _, stream| {
            let memories = found.iter().flat_map(|(_, memory)| memory);
            let mut blocks =
                memories.filter_map(|memory| memory.alloc_free(stream, request).ok()?);
            Ok(blocks.next().map(aquifer::Block::into_raw))
        })
    };
    served.ok().flatten().ok_or(refused)
}

/// A live block that PyTorch holds.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct aq_torch_block {
    /// Where it begins.
    pub address: u64,
    /// The bytes that were requested.
    pub bytes: u64,
    /// The stream that it was allocated for.
    pub stream: *mut c_void,
    /// PyTorch's name of its pool, or two zeros.
    pub first: u64,
    /// The second part of the name.
    pub second: u64,
}

impl aq_torch_block {
    fn new((range, stream): (DeviceRange, RawStream), (first, second): (u64, u64)) -> Self {
        let stream = match stream.handle() {
            0 => null_mut(),
            handle => with_exposed_provenance_mut(handle as usize),
        };
        Self { address: range.address, bytes: range.bytes, stream, first, second }
    }
}

/// Writes as many blocks as there is room for, and the number of all of them.
///
/// # Safety
/// 1. `blocks` is null, or points to `room` blocks that the caller may write.
/// 2. `count` is null, or points to a `size_t` that the caller may write.
unsafe fn write_blocks(
    found: &[aq_torch_block],
    blocks: *mut aq_torch_block,
    room: usize,
    count: *mut usize,
) -> CallResult {
    require(count, "count")?;
    if room > 0 {
        require(blocks, "blocks")?;
        // SAFETY: 1. Guaranteed by the caller, for `room` blocks. 2. `found` is a list of this
        // library, so they do not overlap.
        unsafe { std::ptr::copy_nonoverlapping(found.as_ptr(), blocks, found.len().min(room)) };
    }
    // SAFETY: 1. Guaranteed by the caller.
    unsafe { write_out(count, found.len(), "count") }
}

/// Lists the live blocks of a device: those of the streams and those of all pools.
///
/// # Safety
/// 1. `blocks` is null, or points to `room` blocks that the caller may write.
/// 2. `count` is null, or points to a `size_t` that the caller may write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_torch_blocks(
    device: c_int,
    blocks: *mut aq_torch_block,
    room: usize,
    count: *mut usize,
) -> aq_status {
    enter(|| {
        let found = live_blocks(default_runtime()?, device_of(device)?)?;
        // SAFETY: 1. 2. Guaranteed by the caller.
        unsafe { write_blocks(&found, blocks, room, count) }
    })
}

/// Returns the live blocks of a device: those of the streams, of regions and of all pools.
pub(crate) fn live_blocks(runtime: aq_runtime, device: u32) -> CallResult<Vec<aq_torch_block>> {
    let named: Vec<_> = {
        let pools = pools();
        let of_device = |(key, _): &(&PoolKey, &TorchPool)| (key.0, key.1) == (runtime, device);
        let all = pools.iter().flatten().filter(of_device);
        all.filter_map(|(key, pool)| Some(((key.2, key.3), pool.memory.clone()?))).collect()
    };
    let mut found: Vec<_> = thread_state::with(runtime, |shared| {
        let cached = shared.pool(device)?.raw_ranges().into_iter();
        let regions = shared.parkables(device)?;
        let parkable = regions.iter().flat_map(Parkable::live_blocks);
        Ok(cached.chain(parkable).map(|block| aq_torch_block::new(block, (0, 0))).collect())
    })?;
    for (name, memory) in named {
        let live = memory.live_blocks().into_iter();
        found.extend(live.map(|block| aq_torch_block::new(block, name)));
    }
    Ok(found)
}

/// Returns the memory of a pool; `None` if nothing was allocated from it yet.
fn memory_of(key: PoolKey) -> Option<GraphPool> {
    pools().as_ref().and_then(|pools| pools.get(&key)?.memory.clone())
}

/// Lists the live blocks of a pool.
///
/// # Safety
/// As [`aq_torch_blocks`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_torch_pool_blocks(
    device: c_int,
    first: u64,
    second: u64,
    blocks: *mut aq_torch_block,
    room: usize,
    count: *mut usize,
) -> aq_status {
    enter(|| {
        let live = memory_of(key(device, first, second)?)
            .map_or_else(Vec::new, |memory| memory.live_blocks());
        let found: Vec<_> =
            live.into_iter().map(|block| aq_torch_block::new(block, (first, second))).collect();
        // SAFETY: 1. 2. Guaranteed by the caller.
        unsafe { write_blocks(&found, blocks, room, count) }
    })
}

/// Allocates a block of a pool at the address where it was.
///
/// # Safety
/// 1. `block` is null, or points to a block.
/// 2. As [`aq_alloc_aligned`](crate::device::aq_alloc_aligned) for its stream.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_torch_pool_place(
    device: c_int,
    block: *const aq_torch_block,
) -> aq_status {
    enter(|| {
        require(block.cast_mut(), "block")?;
        // SAFETY: 1. Guaranteed by the caller.
        let aq_torch_block { address, bytes, stream, first, second } = unsafe { block.read() };
        let key = key(device, first, second)?;
        let memory = memory_of(key).ok_or_else(|| no_pool(key, "has no memory"))?;
        // SAFETY: 1. Guaranteed by the caller.
        unsafe {
            thread_state::with_stream(key.0, key.1, stream.addr() as u64, |_, _, stream| {
                let placed = memory.alloc_at(stream, Request::bytes(bytes), address)?;
                remember_device(placed.into_raw(), device);
                Ok(())
            })
        }
    })
}
