//! Primary contexts, and the current context of a thread.
#![expect(unsafe_code, reason = "calls the CUDA driver")]

use super::{
    abi::{DriverPtr, driver_ptr, handle_of},
    codes::check,
    function_table::FunctionTable,
};
use crate::{DriverError, Result, devices::count_lost_device};
use std::sync::{
    OnceLock,
    atomic::{AtomicBool, Ordering},
};

/// A device's primary context, which the CUDA runtime, cudarc and every other library of the
/// process share.
///
/// The driver counts references. The context is retained at the first call that needs it, since it
/// costs hundreds of megabytes of device memory and a fraction of a second. It is released with the
/// [`CudaDriver`](super::CudaDriver).
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
    pub(super) fn record_loss(&self, error: &DriverError) {
        if error.is_device_lost() && !self.lost.swap(true, Ordering::AcqRel) {
            count_lost_device();
        }
    }

    /// Returns whether the context has been retained.
    pub(super) fn is_retained(&self) -> bool {
        self.context.get().is_some()
    }

    /// Returns whether this is the context, retained.
    pub(super) fn is(&self, context: u64) -> bool {
        self.context.get() == Some(&context)
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

/// Returns the calling thread's current context, or 0 if it has none.
pub(super) fn current_context(functions: &FunctionTable) -> Result<u64> {
    let mut current: DriverPtr = std::ptr::null_mut();
    // SAFETY: 1. `current` is writable.
    check("cuCtxGetCurrent", unsafe { (functions.context_current)(&raw mut current) })?;
    Ok(handle_of(current))
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
    pub(super) fn enter(functions: &'a FunctionTable, context: u64) -> Result<Self> {
        let current = current_context(functions)?;
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
