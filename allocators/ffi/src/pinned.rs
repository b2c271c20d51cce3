//! Pinned host memory.
//!
//! A free has no size, and blocks outlive their runtime. So this table holds every live block of
//! all runtimes.
#![expect(unsafe_code, reason = "exports functions to C, and frees host memory")]

use crate::{
    device::{handle, inside_block},
    entry::{CallResult, enter, lock, null, require, write_out, write_out_if_set},
    runtime::aq_runtime,
    status::{Failure, aq_status},
    thread_state,
};
use allocator_api2::alloc::Allocator;
use aquifer::{DeferReuse, MemoryError, PinnedAllocator};
use std::{
    alloc::Layout,
    collections::HashMap,
    ffi::c_void,
    ptr::NonNull,
    sync::{Arc, Mutex, MutexGuard, OnceLock},
};

/// A live block.
#[derive(Clone, Copy)]
struct PinnedBlock {
    allocator: PinnedAllocator,
    layout: Layout,
    is_pinned: bool,
}

static BLOCKS: OnceLock<Mutex<HashMap<usize, PinnedBlock>>> = OnceLock::new();

fn blocks() -> MutexGuard<'static, HashMap<usize, PinnedBlock>> {
    lock(BLOCKS.get_or_init(Mutex::default))
}

/// Returns the failure for an address at which no block begins.
#[cold]
fn foreign(blocks: &HashMap<usize, PinnedBlock>, memory: *mut c_void) -> Failure {
    let address = memory.addr();
    let around = blocks.iter().find(|(start, block)| {
        address.checked_sub(**start).is_some_and(|offset| offset < block.layout.size())
    });
    match around {
        Some((&start, block)) => {
            inside_block(address as u64, start as u64, block.layout.size() as u64)
        }
        None => MemoryError::ForeignBlock { address: address as u64 }.into(),
    }
}

fn find(memory: *mut c_void) -> CallResult<PinnedBlock> {
    let blocks = blocks();
    blocks.get(&memory.addr()).copied().ok_or_else(|| foreign(&blocks, memory))
}

/// Allocates a block of pinned memory near a device.
///
/// # Safety
/// 1. `memory` is null, or points to a `void *` that the caller may write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_pinned_alloc(
    runtime: aq_runtime,
    device: u32,
    bytes: u64,
    align: u64,
    memory: *mut *mut c_void,
) -> aq_status {
    enter(|| {
        require(memory, "memory")?;
        if bytes == 0 {
            return Err(MemoryError::ZeroSize.into());
        }
        let limit = isize::MAX as u64 / 2;
        if bytes > limit {
            return Err(MemoryError::TooLarge { requested: bytes, limit }.into());
        }
        let alignment = if align == 0 { 64 } else { align };
        let layout =
            Layout::from_size_align(bytes as usize, usize::try_from(alignment).unwrap_or(0))
                .map_err(|_| MemoryError::BadAlignment { align })?;
        let block = thread_state::with(runtime, |shared| {
            let pool = shared.runtime.pinned_near(device as usize);
            let block = pool.allocate(layout)?.cast::<u8>();
            let is_pinned = pool.is_pinned(block).unwrap_or(false);
            blocks().insert(
                block.addr().get(),
                PinnedBlock { allocator: pool.allocator(), layout, is_pinned },
            );
            Ok(block)
        })?;
        // SAFETY: 1. Guaranteed by the caller.
        unsafe { write_out(memory, block.as_ptr().cast(), "memory") }
    })
}

/// Frees a block of pinned memory.
///
/// # Safety
/// 1. If `memory` is a live block, nothing uses it any more, except for work that was recorded by
///    [`aq_pinned_record_use`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_pinned_free(memory: *mut c_void) -> aq_status {
    enter(|| {
        let Some(block) = NonNull::new(memory.cast::<u8>()) else { return Ok(()) };
        let PinnedBlock { allocator, layout, .. } = {
            let mut blocks = blocks();
            let found = blocks.remove(&memory.addr());
            found.ok_or_else(|| foreign(&blocks, memory))?
        };
        // SAFETY: 1. The block was allocated by this allocator with this layout, and was removed
        // from the table, so it is freed only here. 2. Guaranteed by the caller.
        unsafe { allocator.deallocate(block, layout) };
        Ok(())
    })
}

/// Returns whether the device can access a block without staging.
///
/// # Safety
/// 1. `pinned` is null, or points to an `int` that the caller may write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_pinned_is_pinned(memory: *mut c_void, pinned: *mut i32) -> aq_status {
    enter(|| {
        let found = find(memory)?;
        // SAFETY: 1. Guaranteed by the caller.
        unsafe { write_out(pinned, i32::from(found.is_pinned), "pinned") }
    })
}

/// Records that work queued on a stream uses a block of pinned memory.
///
/// # Safety
/// 1. As [`aq_alloc_aligned`](crate::device::aq_alloc_aligned) for `stream`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_pinned_record_use(
    memory: *mut c_void,
    runtime: aq_runtime,
    device: u32,
    stream: *mut c_void,
) -> aq_status {
    enter(|| {
        let found = find(memory)?;
        let block = NonNull::new(memory.cast::<u8>()).ok_or_else(|| null("memory"))?;
        // SAFETY: 1. Guaranteed by the caller.
        unsafe {
            thread_state::with_stream(runtime, device, handle(stream), |_, _, stream| {
                let point = stream.point();
                // Fenced now, since the handle may be invalid when the gate is polled.
                let timeline = stream.timeline();
                timeline.fence_at_once(timeline.open())?;
                Ok(found.allocator.defer(block, Arc::new(point))?)
            })
        }
    })
}

/// Gives free pinned memory back.
///
/// # Safety
/// 1. `given` is null, or points to a `uint64_t` that the caller may write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_pinned_trim(
    runtime: aq_runtime,
    device: u32,
    keep: u64,
    given: *mut u64,
) -> aq_status {
    enter(|| {
        let keep = usize::try_from(keep).unwrap_or(usize::MAX);
        let bytes = thread_state::with(runtime, |shared| {
            Ok(shared.runtime.pinned_near(device as usize).trim(keep)?)
        })?;
        // SAFETY: 1. Guaranteed by the caller.
        unsafe { write_out_if_set(given, bytes) };
        Ok(())
    })
}
