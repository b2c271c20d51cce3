//! What `torch.cuda.memory.CUDAPluggableAllocator` calls, over one runtime of the process.
//!
//! Its functions cannot answer with a code: null, and [`aq_last_error`](crate::entry::aq_last_error), stand for one.
#![expect(unsafe_code, reason = "exports functions to C")]

use crate::{
    device::{allocate, free, handle},
    entry::{Answer, enter, put},
    here,
    runtime::{self, AQ_DRIVER_MACHINE, AQ_STREAMS_RETIRED, aq_runtime, aq_runtime_options},
    status::{Failure, Status, aq_status},
};
use aquifer::{Access, device::Request};
use std::{
    collections::HashMap,
    ffi::{c_int, c_void},
    ptr::{null_mut, with_exposed_provenance_mut},
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
};

/// The process's runtime; 0 before there is one.
static RUNTIME: AtomicU64 = AtomicU64::new(0);
/// Held by whoever makes it.
static MAKING: Mutex<()> = Mutex::new(());

/// Streams that blocks have been recorded on, each block's by its address.
static RECORDED: Mutex<Option<HashMap<u64, Vec<u64>>>> = Mutex::new(None);
/// Blocks in there: mostly none, and then nobody looks.
static BLOCKS: AtomicUsize = AtomicUsize::new(0);

fn recorded() -> MutexGuard<'static, Option<HashMap<u64, Vec<u64>>>> {
    RECORDED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The runtime, made at the first call unless [`aq_torch_setup`] has.
#[inline]
fn the_runtime() -> Answer<aq_runtime> {
    match RUNTIME.load(Ordering::Acquire) {
        0 => make(None),
        made => Ok(made),
    }
}

/// Makes the runtime with these options, or with PyTorch's habits: it keeps its streams for good.
#[cold]
fn make(options: Option<aq_runtime_options>) -> Answer<aq_runtime> {
    let _making = MAKING.lock().unwrap_or_else(PoisonError::into_inner);
    let before = RUNTIME.load(Ordering::Acquire);
    if before != 0 {
        let told = options.is_some();
        if !told {
            return Ok(before);
        }
        if runtime::open(before).is_ok() {
            let text = format!("runtime {before} serves PyTorch in this process already");
            return Err(Failure::new(Status::Busy, text));
        }
    }
    let options = options.unwrap_or(aq_runtime_options {
        size: size_of::<aq_runtime_options>(),
        driver: AQ_DRIVER_MACHINE,
        streams: AQ_STREAMS_RETIRED,
        ..Default::default()
    });
    let made = options.create()?;
    RUNTIME.store(made, Ordering::Release);
    Ok(made)
}

fn device_of(device: c_int) -> Answer<u32> {
    u32::try_from(device)
        .map_err(|_| Failure::new(Status::NoDevice, format!("device {device} asked, counted from 0")))
}

/// Makes the process's runtime with these options, before PyTorch's first allocation.
///
/// # Safety
/// 1. `options` is null, or points to a struct whose first field says how many bytes of it there are.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_torch_setup(options: *const aq_runtime_options) -> aq_status {
    enter(|| {
        // SAFETY: 1. the caller's.
        let options = unsafe { aq_runtime_options::read(options) }?;
        make(Some(options)).map(drop)
    })
}

/// The process's runtime.
///
/// # Safety
/// 1. `runtime` is null, or points to an `aq_runtime` that the caller may write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_torch_runtime(runtime: *mut aq_runtime) -> aq_status {
    // SAFETY: 1. the caller's.
    enter(|| unsafe { put(runtime, the_runtime()?, "runtime") })
}

/// `init`: makes the runtime.
#[unsafe(no_mangle)]
pub extern "C" fn aq_torch_init(_device_count: c_int) {
    enter(|| the_runtime().map(drop));
}

/// `alloc`.
///
/// # Safety
/// 1. As [`aq_alloc_aligned`](crate::device::aq_alloc_aligned) for `stream`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_torch_alloc(size: isize, device: c_int, stream: *mut c_void) -> *mut c_void {
    let mut address = 0;
    enter(|| {
        let Ok(bytes) = u64::try_from(size) else {
            return Err(Failure::new(Status::TooLarge, format!("{size} bytes asked")));
        };
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: 1. the caller's. 2. a local.
        unsafe {
            allocate(the_runtime()?, device_of(device)?, Request::bytes(bytes), stream, &raw mut address)
        }
    });
    if address == 0 { null_mut() } else { with_exposed_provenance_mut(address as usize) }
}

/// `free`: behind all that is queued on the streams that the block was recorded on.
#[unsafe(no_mangle)]
pub extern "C" fn aq_torch_free(memory: *mut c_void, _size: isize, device: c_int, _stream: *mut c_void) {
    enter(|| {
        let (runtime, device, address) = (the_runtime()?, device_of(device)?, memory.addr() as u64);
        if BLOCKS.load(Ordering::Acquire) > 0 {
            note_uses(runtime, device, address)?;
        }
        free(runtime, device, address)
    });
}

/// Notes what the block's streams have been given by now. One that cannot be noted keeps the block.
#[cold]
fn note_uses(runtime: aq_runtime, device: u32, address: u64) -> Answer {
    let streams = recorded().as_mut().and_then(|recorded| recorded.remove(&address)).unwrap_or_default();
    if streams.is_empty() {
        return Ok(());
    }
    BLOCKS.fetch_sub(1, Ordering::Release);
    for stream in streams {
        // SAFETY: 1. whoever recorded the block on it keeps the stream until the block is freed.
        unsafe {
            here::with_stream(runtime, device, stream, |_, pool, stream| {
                Ok(pool.share_raw(address)?.record_use(stream, Access::ReadWrite)?)
            })
        }?;
    }
    Ok(())
}

/// `record_stream`: the block goes to nobody before what is queued on `stream` when it is freed is done.
///
/// # Safety
/// 1. As [`aq_alloc_aligned`](crate::device::aq_alloc_aligned) for `stream`, until the block is freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_torch_record_stream(memory: *mut c_void, stream: *mut c_void) {
    enter(|| {
        let (address, stream) = (memory.addr() as u64, handle(stream));
        here::with(the_runtime()?, |shared| {
            // A free of something else at this address would take the note with it.
            let pools = shared.runtime.devices();
            if !pools.iter().any(|pool| pool.share_raw(address).is_ok()) {
                return Err(aquifer::MemoryError::ForeignBlock { address }.into());
            }
            let mut recorded = recorded();
            let streams = recorded.get_or_insert_default().entry(address).or_default();
            if streams.is_empty() {
                BLOCKS.fetch_add(1, Ordering::Release);
            }
            if !streams.contains(&stream) {
                streams.push(stream);
            }
            Ok(())
        })
    });
}

/// `base_alloc`: the block that begins at `memory`, and its bytes.
///
/// # Safety
/// 1. `size` is null, or points to a `size_t` that the caller may write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_torch_base_alloc(memory: *mut c_void, size: *mut usize) -> *mut c_void {
    let mut base = null_mut();
    enter(|| {
        let address = memory.addr() as u64;
        here::with(the_runtime()?, |shared| {
            let block = shared.runtime.devices().iter().find_map(|pool| pool.share_raw(address).ok());
            let block = block.ok_or(aquifer::MemoryError::ForeignBlock { address })?;
            if !size.is_null() {
                // SAFETY: 1. the caller's.
                unsafe { put(size, block.capacity() as usize, "size") }?;
            }
            base = memory;
            Ok(())
        })
    });
    base
}

/// `memory_fraction`: this part of the device's memory at most.
#[unsafe(no_mangle)]
pub extern "C" fn aq_torch_memory_fraction(fraction: f64, device: c_int) {
    enter(|| {
        if !(0.0..=1.0).contains(&fraction) {
            let text = format!("a fraction of {fraction}; it can be 0 to 1");
            return Err(Failure::new(Status::BadArgument, text));
        }
        here::with(the_runtime()?, |shared| {
            let pool = shared.pool(device_of(device)?)?;
            let _excess = pool.budget().set_limit((pool.info().memory as f64 * fraction) as u64);
            Ok(())
        })
    });
}

/// `reset`, which is `empty_cache`: free memory of all devices back to the driver.
#[unsafe(no_mangle)]
pub extern "C" fn aq_torch_reset() {
    enter(|| {
        here::with(the_runtime()?, |shared| {
            for pool in shared.runtime.devices() {
                pool.trim(0)?;
            }
            Ok(())
        })
    });
}
