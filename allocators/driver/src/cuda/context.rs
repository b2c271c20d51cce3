//! Primary contexts, and the current context of a thread.
#![expect(unsafe_code, reason = "calls the CUDA driver")]

use super::{
    CudaDriver,
    abi::{DriverPtr, driver_ptr, handle_of},
    codes::{self, check},
    function_table::FunctionTable,
};
use crate::{Call, DeviceId, DriverError, Result, devices::count_lost_device};
use std::sync::{
    OnceLock,
    atomic::{AtomicBool, Ordering},
};

/// A device's primary context, which the CUDA runtime, cudarc and every other library of the
/// process share.
///
/// The driver counts references. The context is retained at the first call that needs it, since it
/// costs hundreds of megabytes of device memory and a fraction of a second. It is released with the
/// [`CudaDriver`].
pub(super) struct PrimaryContext {
    /// The driver's number of the device.
    device: i32,
    /// The context, once retained. Never 0.
    context: OnceLock<u64>,
    /// Whether a call has returned a sticky error.
    lost: AtomicBool,
}

impl PrimaryContext {
    pub(super) fn new(device: i32) -> Self {
        Self { device, context: OnceLock::new(), lost: AtomicBool::new(false) }
    }

    /// Returns the driver's number of the device.
    pub(super) fn device(&self) -> i32 {
        self.device
    }

    /// Returns whether a call has returned a sticky error.
    pub(super) fn is_lost(&self) -> bool {
        self.lost.load(Ordering::Acquire)
    }

    /// Marks the device as lost if the error is sticky.
    #[cold]
    fn record_loss(&self, error: &DriverError) {
        if error.is_device_lost() && !self.lost.swap(true, Ordering::AcqRel) {
            count_lost_device();
        }
    }

    /// Returns whether the context has been retained.
    pub(super) fn is_retained(&self) -> bool {
        self.context.get().is_some()
    }

    /// Returns the context, and retains it first if needed.
    pub(super) fn retain(&self, functions: &FunctionTable) -> Result<u64> {
        if let Some(&context) = self.context.get() {
            return Ok(context);
        }
        let mut context: DriverPtr = std::ptr::null_mut();
        // SAFETY: 1. `context` is writable. 2. The driver enumerated the device.
        check("cuDevicePrimaryCtxRetain", unsafe {
            (functions.context_retain)(&raw mut context, self.device)
        })?;
        let context = handle_of(context);
        if self.context.set(context).is_err() {
            // Another thread was first. Both retained the same context, so the second reference is
            // released.
            self.release_reference(functions);
        }
        Ok(context)
    }

    /// Releases the reference, if this value has one.
    pub(super) fn release(&mut self, functions: &FunctionTable) {
        if self.context.take().is_some() {
            self.release_reference(functions);
        }
    }

    fn release_reference(&self, functions: &FunctionTable) {
        // SAFETY: 1. This value has retained the device's context once more often than it has
        // released it. A refusal means that the driver is shutting down, which destroys the
        // context.
        let _ = unsafe { (functions.context_release)(self.device) };
    }
}

/// A guard that keeps a given context current on the thread.
///
/// A thread without a context keeps the given one afterwards, since the next call usually needs the
/// same. A context that another library has set is restored.
pub(super) struct ContextGuard<'a> {
    functions: &'a FunctionTable,
    previous: Option<u64>,
}

impl<'a> ContextGuard<'a> {
    fn enter(functions: &'a FunctionTable, context: u64) -> Result<Self> {
        let mut current: DriverPtr = std::ptr::null_mut();
        // SAFETY: 1. `current` is writable.
        check("cuCtxGetCurrent", unsafe { (functions.context_current)(&raw mut current) })?;
        let current = handle_of(current);
        if current == context {
            return Ok(Self { functions, previous: None });
        }
        // SAFETY: 1. The context is retained while the calling driver lives.
        check("cuCtxSetCurrent", unsafe { (functions.context_set_current)(driver_ptr(context)) })?;
        Ok(Self { functions, previous: (current != 0).then_some(current) })
    }
}

impl Drop for ContextGuard<'_> {
    fn drop(&mut self) {
        if let Some(context) = self.previous {
            // SAFETY: 1. It was this thread's current context when the call began, and only the
            // thread itself could have released it since. A refusal leaves the primary context
            // current, which any CUDA library may do.
            let _ = unsafe { (self.functions.context_set_current)(driver_ptr(context)) };
        }
    }
}

impl CudaDriver {
    /// Returns the device, or the driver's error for an ordinal that does not exist.
    pub(super) fn primary(&self, device: DeviceId) -> Result<&PrimaryContext> {
        self.devices
            .get(device.0 as usize)
            .ok_or_else(|| codes::error("cuDeviceGet", codes::INVALID_DEVICE))
    }

    /// Makes the device's primary context current on this thread while the result lives.
    pub(super) fn bind(&self, device: DeviceId) -> Result<ContextGuard<'_>> {
        ContextGuard::enter(&self.functions, self.primary(device)?.retain(&self.functions)?)
    }

    /// Counts a call and makes it in a device's context.
    pub(super) fn call(
        &self,
        call: Call,
        device: DeviceId,
        make: impl FnOnce(&FunctionTable) -> u32,
    ) -> Result<()> {
        self.calls.add(call);
        let _context = self.bind(device).inspect_err(|error| self.record_loss(device, error))?;
        check(call.name(), make(&self.functions))
            .inspect_err(|error| self.record_loss(device, error))
    }

    /// As [`CudaDriver::call`], for a call that also accesses another device. The call may return
    /// the loss of the other device, which must not mark this one as lost.
    pub(super) fn call_between(
        &self,
        call: Call,
        device: DeviceId,
        other: DeviceId,
        make: impl FnOnce(&FunctionTable) -> u32,
    ) -> Result<()> {
        self.calls.add(call);
        let _context = self.bind(device).inspect_err(|error| self.record_loss(device, error))?;
        check(call.name(), make(&self.functions)).inspect_err(|error| {
            let other_lost =
                error.is_device_lost() && other != device && self.context_accepts_calls();
            self.record_loss(if other_lost { other } else { device }, error);
        })
    }

    /// Returns whether the current context still accepts calls (`cuMemGetInfo`, which changes
    /// nothing and breaks no capture).
    #[cold]
    fn context_accepts_calls(&self) -> bool {
        let (mut free, mut total) = (0, 0);
        // SAFETY: 1. Both are writable.
        unsafe { (self.functions.memory_info)(&raw mut free, &raw mut total) == 0 }
    }

    #[cold]
    fn record_loss(&self, device: DeviceId, error: &DriverError) {
        if let Ok(primary) = self.primary(device) {
            primary.record_loss(error);
        }
    }

    /// As [`CudaDriver::call`], for a query that may return "not ready".
    pub(super) fn query(
        &self,
        call: Call,
        device: DeviceId,
        make: impl FnOnce(&FunctionTable) -> u32,
    ) -> Result<bool> {
        self.calls.add(call);
        let _context = self.bind(device).inspect_err(|error| self.record_loss(device, error))?;
        match make(&self.functions) {
            codes::NOT_READY => Ok(false),
            code => check(call.name(), code)
                .map(|()| true)
                .inspect_err(|error| self.record_loss(device, error)),
        }
    }

    /// As [`CudaDriver::call`], for a call that destroys something. When the process exits, the
    /// driver may shut down before its users and destroys all of their objects. Then the call has
    /// nothing left to do and succeeds.
    pub(super) fn destroy(
        &self,
        call: Call,
        device: DeviceId,
        make: impl FnOnce(&FunctionTable) -> u32,
    ) -> Result<()> {
        match self.call(call, device, make) {
            Err(e) if e.code == codes::DEINITIALIZED => Ok(()),
            other => other,
        }
    }
}
