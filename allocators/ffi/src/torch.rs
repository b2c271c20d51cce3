//! The functions for `torch.cuda.memory.CUDAPluggableAllocator`, over one runtime of the process.
//!
//! By default the C++ companion in `python/` is the allocator: its subclass calls
//! [`aq_torch_malloc`]. Memory pools are in [`graphs`].
//!
//! PyTorch's own class ignores status codes. It takes null as a failure, with the text in
//! [`aq_last_error`](crate::entry::aq_last_error). A caller that reads the codes can raise them as
//! exceptions, as the C++ companion in `python/` does.
#![expect(unsafe_code, reason = "exports functions to C")]

use crate::{
    device::{allocate, free, handle},
    entry::{CallResult, enter, lock, require, write_out},
    graphs,
    process::{
        create_runtime, default_runtime, device_of, find_device, likely_device, remember_device,
    },
    region,
    runtime::{aq_runtime, aq_runtime_options},
    sharing,
    status::{Failure, Status, aq_status},
    thread_state,
};
use aquifer::{Access, MemoryError, Request, Stream};
use std::{
    collections::HashMap,
    ffi::{c_int, c_void},
    ptr::{null_mut, with_exposed_provenance_mut},
    sync::{
        Mutex, MutexGuard,
        atomic::{AtomicUsize, Ordering},
    },
};

/// Blocks that were recorded on other streams, by address.
static RECORDED: Mutex<Option<HashMap<u64, RecordedUses>>> = Mutex::new(None);
/// Number of blocks in `RECORDED`. Usually 0, which saves the lock.
static BLOCKS: AtomicUsize = AtomicUsize::new(0);

/// The device of a block, and the streams that it was recorded on.
struct RecordedUses {
    device: u32,
    /// As the recording thread means them: another thread's handle 2 is another stream.
    streams: Vec<Stream>,
}

fn recorded() -> MutexGuard<'static, Option<HashMap<u64, RecordedUses>>> {
    lock(&RECORDED)
}

/// Creates the process's runtime with these options, before PyTorch's first allocation.
///
/// # Safety
/// 1. `options` is null, or points to a struct whose first field is its size in bytes, with a text
///    that is null or ends with a zero byte.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_torch_setup(options: *const aq_runtime_options) -> aq_status {
    enter(|| {
        // SAFETY: 1. Guaranteed by the caller.
        let options = unsafe { aq_runtime_options::read(options) }?;
        // SAFETY: 1. Guaranteed by the caller.
        unsafe { create_runtime(Some(options)) }.map(drop)
    })
}

/// Returns the process's runtime.
///
/// # Safety
/// 1. `runtime` is null, or points to an `aq_runtime` that the caller may write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_torch_runtime(runtime: *mut aq_runtime) -> aq_status {
    // SAFETY: 1. Guaranteed by the caller.
    enter(|| unsafe { write_out(runtime, default_runtime()?, "runtime") })
}

/// `init`: creates the runtime.
#[unsafe(no_mangle)]
pub extern "C" fn aq_torch_init(_device_count: c_int) -> aq_status {
    enter(|| default_runtime().map(drop))
}

/// Allocates a block of `size` bytes, or returns null for 0 bytes.
///
/// # Safety
/// 1. As [`aq_alloc_aligned`](crate::device::aq_alloc_aligned) for `stream`.
#[inline(always)]
unsafe fn allocate_bytes(
    size: isize,
    device: c_int,
    stream: *mut c_void,
) -> CallResult<*mut c_void> {
    let Ok(bytes) = u64::try_from(size) else {
        return Err(Failure::new(Status::TooLarge, format!("{size} bytes asked")));
    };
    if bytes == 0 {
        return Ok(null_mut());
    }
    if let Some(tag) = region::current() {
        let (runtime, number) = (default_runtime()?, device_of(device)?);
        // SAFETY: 1. Guaranteed by the caller.
        let parkable = unsafe { region::allocate(tag, runtime, number, bytes, stream) }?;
        if let Some(address) = parkable {
            remember_device(address, device);
            return Ok(with_exposed_provenance_mut(address as usize));
        }
    }
    let mut address = 0;
    let (runtime, known, request) = (default_runtime()?, device_of(device)?, Request::bytes(bytes));
    // SAFETY: 1. Guaranteed by the caller. 2. A local.
    let allocated = unsafe { allocate(runtime, known, request, stream, &raw mut address) };
    if let Err(refused) = allocated {
        // SAFETY: 1. Guaranteed by the caller.
        address = unsafe { graphs::last_resort(runtime, known, request, stream, refused) }?;
    }
    remember_device(address, device);
    Ok(with_exposed_provenance_mut(address as usize))
}

/// `alloc`.
///
/// # Safety
/// 1. As [`aq_alloc_aligned`](crate::device::aq_alloc_aligned) for `stream`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_torch_alloc(
    size: isize,
    device: c_int,
    stream: *mut c_void,
) -> *mut c_void {
    let mut memory = null_mut();
    enter(|| {
        // SAFETY: 1. Guaranteed by the caller.
        memory = unsafe { allocate_bytes(size, device, stream) }?;
        Ok(())
    });
    memory
}

/// `alloc`, with a status code.
///
/// # Safety
/// 1. As [`aq_alloc_aligned`](crate::device::aq_alloc_aligned) for `stream`.
/// 2. `memory` is null, or points to a `void *` that the caller may write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_torch_malloc(
    size: isize,
    device: c_int,
    stream: *mut c_void,
    memory: *mut *mut c_void,
) -> aq_status {
    enter(|| {
        require(memory, "memory")?;
        // SAFETY: 1. Guaranteed by the caller.
        let address = unsafe { allocate_bytes(size, device, stream) }?;
        // SAFETY: 1. Guaranteed by the caller.
        unsafe { write_out(memory, address, "memory") }
    })
}

/// `free`: frees the block behind all work queued on the streams that it was recorded on. With a
/// device of -1 the block may be of any device.
#[unsafe(no_mangle)]
pub extern "C" fn aq_torch_free(
    memory: *mut c_void,
    _size: isize,
    device: c_int,
    _stream: *mut c_void,
) -> aq_status {
    enter(|| {
        let (runtime, address) = (default_runtime()?, memory.addr() as u64);
        if address == 0 {
            // An empty block, whose free PyTorch does not report.
            return Ok(());
        }
        if sharing::any() {
            sharing::forget(address);
        }
        let known = if device == -1 { likely_device(address) } else { device_of(device)? };
        if BLOCKS.load(Ordering::Acquire) > 0 {
            apply_recorded_uses(runtime, address)?;
        }
        match free(runtime, known, address) {
            Err(failure) if device == -1 && failure.status() == Status::WrongDevice => {
                free(runtime, find_device(runtime, address)?, address)
            }
            freed => freed,
        }
    })
}

/// Records the work queued by now on the streams that the block was recorded on. If a use cannot be
/// recorded, the block is not freed. For a parked block there is nothing to record: the whole
/// device was waited for when it was parked, and nothing has used it since.
#[cold]
fn apply_recorded_uses(runtime: aq_runtime, address: u64) -> CallResult {
    let found = recorded().as_mut().and_then(|recorded| recorded.remove(&address));
    let Some(RecordedUses { device, streams }) = found else {
        return Ok(());
    };
    BLOCKS.fetch_sub(1, Ordering::Release);
    thread_state::with(runtime, |shared| {
        let block = shared.pool(device)?.share_raw(address)?;
        for stream in &streams {
            match block.record_use(stream, Access::ReadWrite) {
                // Of another thread's default stream the use is recorded, and its memory is held
                // back until that thread fences the stream again.
                Ok(()) | Err(MemoryError::Parked { .. } | MemoryError::OtherThread { .. }) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    })
}

/// `record_stream`: the block is not reused before the work queued on `stream` at its free is done.
///
/// # Safety
/// 1. As [`aq_alloc_aligned`](crate::device::aq_alloc_aligned) for `stream`, until the block is
///    freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_torch_record_stream(
    memory: *mut c_void,
    stream: *mut c_void,
) -> aq_status {
    enter(|| {
        let (runtime, address) = (default_runtime()?, memory.addr() as u64);
        let device = thread_state::with(runtime, |shared| {
            // Only live blocks are recorded: the free of a later block at this address would take
            // the record.
            let found =
                shared.runtime.devices().iter().position(|pool| pool.share_raw(address).is_ok());
            Ok(found.ok_or(MemoryError::ForeignBlock { address })? as u32)
        })?;
        let record = |stream: &Stream| {
            let mut recorded = recorded();
            let block = recorded.get_or_insert_default().entry(address).or_insert_with(|| {
                BLOCKS.fetch_add(1, Ordering::Release);
                RecordedUses { device, streams: Vec::new() }
            });
            if !block.streams.contains(stream) {
                block.streams.push(stream.clone());
            }
            Ok(())
        };
        // SAFETY: 1. Guaranteed by the caller.
        unsafe {
            thread_state::with_stream(runtime, device, handle(stream), |_, _, stream| {
                record(stream)
            })
        }
    })
}

/// `base_alloc`: returns the block that begins at `memory`, and its capacity.
///
/// # Safety
/// 1. `size` is null, or points to a `size_t` that the caller may write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_torch_base_alloc(memory: *mut c_void, size: *mut usize) -> *mut c_void {
    let mut base = null_mut();
    enter(|| {
        let address = memory.addr() as u64;
        thread_state::with(default_runtime()?, |shared| {
            let block =
                shared.runtime.devices().iter().find_map(|pool| pool.share_raw(address).ok());
            let block = block.ok_or(MemoryError::ForeignBlock { address })?;
            if !size.is_null() {
                // SAFETY: 1. Guaranteed by the caller.
                unsafe { write_out(size, block.capacity() as usize, "size") }?;
            }
            base = memory;
            Ok(())
        })
    });
    base
}

/// `memory_fraction`: limits the device to this part of its memory.
#[unsafe(no_mangle)]
pub extern "C" fn aq_torch_memory_fraction(fraction: f64, device: c_int) -> aq_status {
    enter(|| {
        if !(0.0..=1.0).contains(&fraction) {
            let text = format!("a fraction of {fraction}; it can be 0 to 1");
            return Err(Failure::new(Status::BadArgument, text));
        }
        thread_state::with(default_runtime()?, |shared| {
            let pool = shared.pool(device_of(device)?)?;
            let _excess = pool.budget().set_limit((pool.info().memory as f64 * fraction) as u64);
            Ok(())
        })
    })
}

/// `reset`, which is `empty_cache`: gives free memory of all devices back to the driver.
#[unsafe(no_mangle)]
pub extern "C" fn aq_torch_reset() -> aq_status {
    enter(|| {
        thread_state::with(default_runtime()?, |shared| {
            for pool in shared.runtime.devices() {
                pool.trim(0)?;
                if pool.stats().cached > 0 {
                    // The first trim has recorded events for work that none covered. On an idle
                    // device they are complete now.
                    pool.trim(0)?;
                }
            }
            Ok(())
        })
    })
}
