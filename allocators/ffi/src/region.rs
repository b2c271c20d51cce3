//! The regions of threads. A thread's blocks for PyTorch in a region are parkable, of the region's
//! tag, except for those of captured work, which come from the capture's pool as ever.
#![expect(unsafe_code, reason = "exports functions to C")]

use crate::{
    device::handle,
    entry::{CallResult, enter},
    runtime::aq_runtime,
    status::{Failure, Status, aq_status},
    table, thread_state,
};
use aquifer::{Request, Tag};
use std::{
    cell::Cell,
    ffi::{CStr, c_char, c_void},
    sync::atomic::{AtomicUsize, Ordering},
};

thread_local! {
    /// The tag of the region that this thread is in. Const and without a destructor, so that it is
    /// accessible at any time in a thread's life.
    static REGION: Cell<Tag> = const { Cell::new(Tag::NONE) };
}

/// Number of threads in a region. Usually 0, which saves the look at the thread's own.
static REGIONS: AtomicUsize = AtomicUsize::new(0);

/// Returns the tag of the region that this thread is in.
#[inline]
pub(crate) fn current() -> Option<Tag> {
    if REGIONS.load(Ordering::Relaxed) == 0 {
        return None;
    }
    Some(REGION.get()).filter(|&tag| tag != Tag::NONE)
}

/// Allocates a block of a region's tag. Returns `None` for work that is captured.
///
/// # Safety
/// 1. As [`aq_alloc_aligned`](crate::device::aq_alloc_aligned) for `stream`.
#[cold]
pub(crate) unsafe fn allocate(
    tag: Tag,
    runtime: aq_runtime,
    device: u32,
    bytes: u64,
    stream: *mut c_void,
) -> CallResult<Option<u64>> {
    // SAFETY: 1. Guaranteed by the caller.
    unsafe {
        thread_state::with_stream(runtime, device, handle(stream), |shared, pool, stream| {
            if stream.timeline().capture()?.is_some() {
                return Ok(None);
            }
            let block = shared.parkable(device, tag)?.alloc(stream, Request::bytes(bytes))?;
            let address = block.into_raw();
            // As for any other block, see `device::allocate`.
            if shared.closed.load(Ordering::Acquire) {
                let _ = pool.free_raw(address);
                shared.remove_if_unused();
                return Err(table::no_runtime(shared.id));
            }
            Ok(Some(address))
        })
    }
}

/// Reads the name of a tag.
///
/// # Safety
/// 1. `name` is null, or points to a text that ends with a zero byte.
pub(crate) unsafe fn read_tag(name: *const c_char) -> CallResult<Option<Tag>> {
    if name.is_null() {
        return Ok(None);
    }
    // SAFETY: 1. Guaranteed by the caller.
    match unsafe { CStr::from_ptr(name) }.to_str() {
        Ok("") => Ok(None),
        Ok(name) => match Tag::named(name) {
            // Tags that share this one could not be told apart.
            Tag::OTHER => Err(Failure::new(Status::Capacity, "more than 65,534 tags")),
            tag => Ok(Some(tag)),
        },
        Err(_) => Err(Failure::new(Status::BadArgument, "the name of a tag is not UTF-8")),
    }
}

/// Sets the region of this thread.
///
/// # Safety
/// 1. `tag` is null, or points to a text that ends with a zero byte.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_torch_region(tag: *const c_char) -> aq_status {
    enter(|| {
        // SAFETY: 1. Guaranteed by the caller.
        let new = unsafe { read_tag(tag) }?.unwrap_or(Tag::NONE);
        match (REGION.replace(new) == Tag::NONE, new == Tag::NONE) {
            (true, false) => drop(REGIONS.fetch_add(1, Ordering::Relaxed)),
            (false, true) => drop(REGIONS.fetch_sub(1, Ordering::Relaxed)),
            _ => {}
        }
        Ok(())
    })
}
