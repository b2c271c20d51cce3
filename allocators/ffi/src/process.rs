//! The one runtime of the process, which PyTorch and CuPy use, and which of its devices an address
//! belongs to.
#![expect(unsafe_code, reason = "reads the text of the options")]

use crate::{
    entry::{CallResult, lock},
    runtime::{AQ_DRIVER_MACHINE, AQ_STREAMS_RETIRED, aq_runtime, aq_runtime_options},
    status::{Failure, Status},
    table, thread_state,
};
use std::{
    ffi::c_int,
    sync::{
        Mutex,
        atomic::{AtomicU8, AtomicU64, Ordering},
    },
};

/// The process's runtime; 0 before there is one.
static RUNTIME: AtomicU64 = AtomicU64::new(0);
/// Held while the runtime is created.
static CREATE_LOCK: Mutex<()> = Mutex::new(());

/// Returns the runtime, created at the first call unless `aq_torch_setup` has created it.
#[inline]
pub(crate) fn default_runtime() -> CallResult<aq_runtime> {
    match RUNTIME.load(Ordering::Acquire) {
        // SAFETY: 1. There are no options.
        0 => unsafe { create_runtime(None) },
        runtime => Ok(runtime),
    }
}

/// Creates the runtime with these options. The defaults fit PyTorch, which never destroys its
/// streams.
///
/// # Safety
/// 1. The options' `ledger_folder` is null, or a zero-terminated text.
#[cold]
pub(crate) unsafe fn create_runtime(options: Option<aq_runtime_options>) -> CallResult<aq_runtime> {
    let _guard = lock(&CREATE_LOCK);
    let before = RUNTIME.load(Ordering::Acquire);
    if before != 0 {
        let explicit = options.is_some();
        if !explicit {
            return Ok(before);
        }
        if table::open(before).is_ok() {
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
    // SAFETY: 1. Guaranteed by the caller.
    let runtime = unsafe { options.create(true) }?;
    RUNTIME.store(runtime, Ordering::Release);
    Ok(runtime)
}

pub(crate) fn device_of(device: c_int) -> CallResult<u32> {
    u32::try_from(device).map_err(|_| {
        Failure::new(Status::NoDevice, format!("device {device} asked, counted from 0"))
    })
}

/// A hint table from address to device: the device of the last block there, plus one. Finds the
/// probable device of a raw address.
static DEVICES: [AtomicU8; 1 << 14] = [const { AtomicU8::new(0) }; 1 << 14];

#[inline]
fn device_hint(address: u64) -> &'static AtomicU8 {
    // Physical handles have 2 MiB or more, and devices' address ranges begin at much larger
    // multiples.
    &DEVICES[(address >> 21 ^ address >> 35) as usize % DEVICES.len()]
}

#[inline]
pub(crate) fn remember_device(address: u64, device: c_int) {
    let (hint, code) = (device_hint(address), (device + 1) as u8);
    // The entry is usually correct already, and a cache line that is not written stays shared.
    if hint.load(Ordering::Relaxed) != code {
        hint.store(code, Ordering::Relaxed);
    }
}

#[inline]
pub(crate) fn likely_device(address: u64) -> u32 {
    u32::from(device_hint(address).load(Ordering::Relaxed).saturating_sub(1))
}

#[cold]
pub(crate) fn find_device(runtime: aq_runtime, address: u64) -> CallResult<u32> {
    thread_state::with(runtime, |shared| {
        let found =
            shared.runtime.devices().iter().position(|pool| pool.share_raw(address).is_ok());
        found
            .map(|device| device as u32)
            .ok_or_else(|| aquifer::MemoryError::ForeignBlock { address }.into())
    })
}
