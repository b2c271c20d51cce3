//! Device memory.
#![expect(unsafe_code, reason = "exports functions to C")]

use crate::{
    entry::{CallResult, enter, require, write_out, write_out_if_set},
    runtime::aq_runtime,
    status::{Failure, Status, aq_status},
    table::{self, SharedRuntime},
    thread_state,
};
use aquifer::{Access, DevicePool, MemoryError, Request};
use std::{ffi::c_void, sync::atomic::Ordering};

/// Work that reads.
pub const AQ_READ: u32 = 1;
/// Work that writes.
pub const AQ_WRITE: u32 = 2;

pub(crate) fn access(access: u32) -> CallResult<Access> {
    match access {
        AQ_READ => Ok(Access::Read),
        AQ_WRITE => Ok(Access::Write),
        3 => Ok(Access::ReadWrite),
        other => {
            let text = format!(
                "access is {other}; it can be AQ_READ ({AQ_READ}), AQ_WRITE ({AQ_WRITE}), or both (3)"
            );
            Err(Failure::new(Status::BadArgument, text))
        }
    }
}

/// Returns a stream's handle as a number.
#[inline]
pub(crate) fn handle(stream: *mut c_void) -> u64 {
    stream.addr() as u64
}

/// Returns the failure for an address inside a block.
#[cold]
pub(crate) fn inside_block(address: u64, start: u64, bytes: u64) -> Failure {
    let text = format!(
        "{address:#x} lies {} bytes inside the block of {bytes} bytes at {start:#x}; pass the \
         address that the allocation returned",
        address - start
    );
    Failure::new(Status::ForeignBlock, text)
}

/// Returns the failure for an address that a device's pool does not have. Another device may have
/// it, or it may lie inside a block.
#[cold]
pub(crate) fn foreign_block(shared: &SharedRuntime, device: u32, error: MemoryError) -> Failure {
    let (MemoryError::ForeignBlock { address } | MemoryError::DoubleFree { address }) = error
    else {
        return error.into();
    };
    let of_other = shared.runtime.devices().iter().find(|pool| pool.share_raw(address).is_ok());
    match (of_other, shared.pool(device)) {
        (Some(other), Ok(pool)) => {
            let (expected, actual) = (pool.device(), other.device());
            MemoryError::WrongDevice { expected, actual }.into()
        }
        _ if matches!(error, MemoryError::ForeignBlock { .. }) => {
            let ranges = shared.runtime.devices().iter().flat_map(DevicePool::raw_ranges);
            let around = ranges.map(|(range, _)| range).find(|range| {
                address.checked_sub(range.address).is_some_and(|offset| offset < range.bytes)
            });
            match around {
                Some(range) => inside_block(address, range.address, range.bytes),
                None => error.into(),
            }
        }
        _ => error.into(),
    }
}

/// Allocates a block for work on a stream.
///
/// # Safety
/// As [`aq_alloc_aligned`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_alloc(
    runtime: aq_runtime,
    device: u32,
    bytes: u64,
    stream: *mut c_void,
    address: *mut u64,
) -> aq_status {
    // SAFETY: 1. 2. Guaranteed by the caller.
    enter(|| unsafe { allocate(runtime, device, Request::bytes(bytes), stream, address) })
}

/// Allocates a block at a multiple of `align`, for work on a stream.
///
/// # Safety
/// 1. `stream` is one of the driver's default streams or a stream of the device that is alive, with
///    a lifetime as stated by the runtime's options or a registration.
/// 2. `address` is null, or points to a `uint64_t` that the caller may write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_alloc_aligned(
    runtime: aq_runtime,
    device: u32,
    bytes: u64,
    align: u64,
    stream: *mut c_void,
    address: *mut u64,
) -> aq_status {
    let request = Request::bytes(bytes).align(align);
    // SAFETY: 1. 2. Guaranteed by the caller.
    enter(|| unsafe { allocate(runtime, device, request, stream, address) })
}

/// # Safety
/// As [`aq_alloc_aligned`].
#[inline(always)]
pub(crate) unsafe fn allocate(
    runtime: aq_runtime,
    device: u32,
    request: Request,
    stream: *mut c_void,
    address: *mut u64,
) -> CallResult {
    require(address, "address")?;
    // SAFETY: 1. 2. Guaranteed by the caller.
    let allocated = unsafe {
        thread_state::with_stream(runtime, device, handle(stream), |shared, pool, stream| {
            let address = pool.alloc_raw(stream, request)?;
            // The destruction of a runtime counts live blocks after it has set `closed`, under the
            // lock that this block was allocated under. So either it counts this block, or `closed`
            // is seen here.
            if shared.closed.load(Ordering::Acquire) {
                let _ = pool.free_raw(address);
                shared.remove_if_unused();
                return Err(table::no_runtime(shared.id));
            }
            Ok(address)
        })
    }?;
    // SAFETY: 1. Guaranteed by the caller.
    unsafe { write_out(address, allocated, "address") }
}

/// Frees a block in the order of its own stream.
#[unsafe(no_mangle)]
pub extern "C" fn aq_free(runtime: aq_runtime, device: u32, address: u64) -> aq_status {
    enter(|| free(runtime, device, address))
}

#[inline(always)]
pub(crate) fn free(runtime: aq_runtime, device: u32, address: u64) -> CallResult {
    if address == 0 {
        return Ok(());
    }
    let freed = thread_state::with(runtime, |shared| {
        shared
            .pool(device)?
            .free_raw(address)
            .map_err(|error| foreign_block(shared, device, error))?;
        if shared.closed.load(Ordering::Acquire) {
            shared.remove_if_unused();
        }
        Ok(())
    });
    match freed {
        Err(failure) if failure.status() == Status::Closed => {
            free_after_close(runtime, device, address)
        }
        freed => freed,
    }
}

/// Frees a block of a destroyed runtime.
#[cold]
fn free_after_close(runtime: aq_runtime, device: u32, address: u64) -> CallResult {
    let shared = table::open_or_closing(runtime)?;
    shared
        .pool(device)?
        .free_raw(address)
        .map_err(|error| foreign_block(&shared, device, error))?;
    shared.remove_if_unused();
    Ok(())
}

/// Records that work queued on a stream uses a block.
///
/// # Safety
/// 1. As [`aq_alloc_aligned`] for `stream`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_record_use(
    runtime: aq_runtime,
    device: u32,
    address: u64,
    stream: *mut c_void,
    access: u32,
) -> aq_status {
    enter(|| {
        let access = self::access(access)?;
        // SAFETY: 1. Guaranteed by the caller.
        unsafe {
            thread_state::with_stream(runtime, device, handle(stream), |shared, pool, stream| {
                let block = pool
                    .share_raw(address)
                    .map_err(|error| foreign_block(shared, device, error))?;
                Ok(block.record_use(stream, access)?)
            })
        }
    })
}

/// Frees a block that work on a stream has used.
///
/// # Safety
/// 1. As [`aq_alloc_aligned`] for `stream`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_free_on(
    runtime: aq_runtime,
    device: u32,
    address: u64,
    stream: *mut c_void,
) -> aq_status {
    enter(|| {
        if address == 0 {
            return Ok(());
        }
        // SAFETY: 1. Guaranteed by the caller.
        unsafe {
            thread_state::with_stream(runtime, device, handle(stream), |shared, pool, stream| {
                let block = pool
                    .share_raw(address)
                    .map_err(|error| foreign_block(shared, device, error))?;
                Ok(block.record_use(stream, Access::ReadWrite)?)
            })
        }?;
        free(runtime, device, address)
    })
}

/// Returns the requested size and the capacity of a block.
///
/// # Safety
/// 1. `asked` and `capacity` are null, or point to `uint64_t`s that the caller may write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_block_size(
    runtime: aq_runtime,
    device: u32,
    address: u64,
    asked: *mut u64,
    capacity: *mut u64,
) -> aq_status {
    enter(|| {
        thread_state::with(runtime, |shared| {
            let found = shared.pool(device)?.share_raw(address);
            let block = found.map_err(|error| foreign_block(shared, device, error))?;
            // SAFETY: 1. Guaranteed by the caller.
            unsafe {
                write_out_if_set(asked, block.bytes());
                write_out_if_set(capacity, block.capacity());
            }
            Ok(())
        })
    })
}

/// Registers a stream whose owner will retire it.
///
/// # Safety
/// 1. `stream` is one of the driver's default streams or a stream of the device that is alive.
/// 2. It stays alive until `aq_stream_retire` has returned for it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_stream_register(
    runtime: aq_runtime,
    device: u32,
    stream: *mut c_void,
) -> aq_status {
    enter(|| {
        // SAFETY: 1. 2. Guaranteed by the caller.
        thread_state::with(runtime, |shared| unsafe { shared.register(device, handle(stream)) })
    })
}

/// Retires a stream.
///
/// # Safety
/// 1. `stream` is one of the driver's default streams or a stream of the device that is alive.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_stream_retire(
    runtime: aq_runtime,
    device: u32,
    stream: *mut c_void,
) -> aq_status {
    // SAFETY: 1. Guaranteed by the caller.
    enter(|| thread_state::with(runtime, |shared| unsafe { shared.retire(device, handle(stream)) }))
}
