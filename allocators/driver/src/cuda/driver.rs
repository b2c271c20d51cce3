//! Opening and closing the CUDA driver.
#![expect(unsafe_code, reason = "calls the CUDA driver")]

use super::{
    OpenError,
    codes::{self, check},
    context::PrimaryContext,
    function_table::FunctionTable,
};
use crate::{CallCounts, DeviceId, Driver, DriverError, Result};
use std::{fmt, sync::Arc};

/// The CUDA driver of this process. See the [module](super) for its guarantees.
///
/// Several may be open at once. They share the devices' primary contexts, and each counts its own
/// calls. Releasing the last reference to a device's primary context destroys the context and
/// everything that was created in it.
pub struct CudaDriver {
    pub(super) functions: FunctionTable,
    /// Indexed by ordinal.
    pub(super) devices: Box<[PrimaryContext]>,
    pub(super) calls: CallCounts,
}

impl CudaDriver {
    /// Loads the driver and initialises it (`cuInit`), which takes a large part of a second the
    /// first time in a process. Creates no context and allocates no device memory.
    ///
    /// # Errors
    /// [`OpenError`], depending on the step that failed.
    pub fn open() -> Result<Arc<Self>, OpenError> {
        FunctionTable::load().and_then(Self::start)
    }

    /// Like [`CudaDriver::open`], for the library with this name or path instead of the one that
    /// the linker finds as `libcuda.so.1`.
    ///
    /// # Errors
    /// As [`CudaDriver::open`].
    pub fn open_library(name: &str) -> Result<Arc<Self>, OpenError> {
        FunctionTable::load_library(name).and_then(Self::start)
    }

    fn start(functions: FunctionTable) -> Result<Arc<Self>, OpenError> {
        crate::forks::hold_budgets();
        // SAFETY: 1. It takes flags, which must be 0. It may be called any number of times.
        check("cuInit", unsafe { (functions.init)(0) }).map_err(open_error)?;
        let devices = Self::devices_of(&functions).map_err(open_error)?;
        Ok(Arc::new(Self { functions, devices, calls: CallCounts::new() }))
    }

    fn devices_of(functions: &FunctionTable) -> Result<Box<[PrimaryContext]>> {
        let mut count = 0;
        // SAFETY: 1. `count` is writable.
        check("cuDeviceGetCount", unsafe { (functions.device_count)(&raw mut count) })?;
        let open = |ordinal| {
            let mut device = 0;
            // SAFETY: 1. `device` is writable.
            check("cuDeviceGet", unsafe { (functions.device_get)(&raw mut device, ordinal) })?;
            Ok(PrimaryContext::new(device))
        };
        let devices: Box<[_]> = (0..count).map(open).collect::<Result<_>>()?;
        if devices.is_empty() {
            // `cuInit` reports this itself. If it does not, the error is the same.
            return Err(codes::error("cuDeviceGetCount", codes::NO_DEVICE));
        }
        Ok(devices)
    }

    /// Returns whether the primary context of the device is retained, because a call has needed it.
    /// Makes no driver call.
    #[must_use]
    pub fn holds_context(&self, device: DeviceId) -> bool {
        self.primary(device).is_ok_and(PrimaryContext::is_retained)
    }
}

/// Converts the error of a failed start.
fn open_error(error: DriverError) -> OpenError {
    if error.code == codes::NO_DEVICE && std::env::var_os("CUDA_VISIBLE_DEVICES").is_some() {
        OpenError::Hidden
    } else {
        OpenError::Start(error)
    }
}

// SAFETY: 1. All families use one driver library, opened once.
unsafe impl Driver for CudaDriver {
    fn name(&self) -> &'static str {
        "cuda"
    }

    fn calls(&self) -> &CallCounts {
        &self.calls
    }
}

impl Drop for CudaDriver {
    fn drop(&mut self) {
        for device in &mut self.devices {
            device.release(&self.functions);
        }
    }
}

impl fmt::Debug for CudaDriver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CudaDriver")
            .field("devices", &self.devices.len())
            .field("calls", &self.calls)
            .finish_non_exhaustive()
    }
}
