//! Primary contexts, and which one a thread has current.
#![expect(unsafe_code, reason = "calls the CUDA driver")]

use super::{
    CudaDriver,
    abi::{Object, handle, object},
    codes::{self, answer},
    table::Table,
};
use crate::{Call, DeviceId, DriverError, Result, devices::count_loss};
use std::sync::{
    OnceLock,
    atomic::{AtomicBool, Ordering},
};

/// A device's primary context: the one that the CUDA runtime, cudarc and every other library of the
/// process share.
///
/// The driver counts who retains it. It is taken at the first call that needs it, since it costs
/// hundreds of megabytes of device memory and a fraction of a second, and let go of with the
/// [`CudaDriver`].
pub(super) struct Primary {
    /// The driver's number for the device.
    device: i32,
    /// The context, once retained; never 0.
    context: OnceLock<u64>,
    /// A call has answered with a sticky error.
    lost: AtomicBool,
}

impl Primary {
    pub(super) fn new(device: i32) -> Self {
        Self { device, context: OnceLock::new(), lost: AtomicBool::new(false) }
    }

    /// The driver's number for the device.
    pub(super) fn device(&self) -> i32 {
        self.device
    }

    /// Whether a call has answered with a sticky error.
    pub(super) fn is_lost(&self) -> bool {
        self.lost.load(Ordering::Acquire)
    }

    /// An error of a call: a sticky one is noted.
    #[cold]
    fn note(&self, error: &DriverError) {
        if error.is_device_lost() && !self.lost.swap(true, Ordering::AcqRel) {
            count_loss();
        }
    }

    /// Whether the context has been taken.
    pub(super) fn is_retained(&self) -> bool {
        self.context.get().is_some()
    }

    /// The context, taken now if it has not been.
    pub(super) fn retain(&self, table: &Table) -> Result<u64> {
        if let Some(&context) = self.context.get() {
            return Ok(context);
        }
        let mut context: Object = std::ptr::null_mut();
        // SAFETY: 1. `context` is writable. 2. the device is one that the driver counted.
        answer("cuDevicePrimaryCtxRetain", unsafe {
            (table.context_retain)(&raw mut context, self.device)
        })?;
        let context = handle(context);
        if self.context.set(context).is_err() {
            // Another thread was first. Both hold the same context, so the second hold is one too
            // many.
            self.let_go(table);
        }
        Ok(context)
    }

    /// Ends one hold, if this has one.
    pub(super) fn release(&mut self, table: &Table) {
        if self.context.take().is_some() {
            self.let_go(table);
        }
    }

    fn let_go(&self, table: &Table) {
        // SAFETY: 1. this value has retained the device's context, once more often than it has
        // released it. A refusal means that the driver is on its way out, and the context with it.
        let _ = unsafe { (table.context_release)(self.device) };
    }
}

/// While it lives, the thread has a given context current.
///
/// A thread without a context keeps the one it is given, since the next call will most often want
/// the same; one that another library has set is put back.
pub(super) struct Bound<'a> {
    table: &'a Table,
    before: Option<u64>,
}

impl<'a> Bound<'a> {
    fn enter(table: &'a Table, context: u64) -> Result<Self> {
        let mut current: Object = std::ptr::null_mut();
        // SAFETY: 1. `current` is writable.
        answer("cuCtxGetCurrent", unsafe { (table.context_current)(&raw mut current) })?;
        let current = handle(current);
        if current == context {
            return Ok(Self { table, before: None });
        }
        // SAFETY: 1. the context is retained while the driver that asked lives.
        answer("cuCtxSetCurrent", unsafe { (table.context_set_current)(object(context)) })?;
        Ok(Self { table, before: (current != 0).then_some(current) })
    }
}

impl Drop for Bound<'_> {
    fn drop(&mut self) {
        if let Some(context) = self.before {
            // SAFETY: 1. it was this thread's current context when the call began, and only the
            // thread itself could have let it go since.
            // A refusal leaves the primary context current, as every CUDA library may.
            let _ = unsafe { (self.table.context_set_current)(object(context)) };
        }
    }
}

impl CudaDriver {
    /// The device, or the error that the driver has for one that is not there.
    pub(super) fn primary(&self, device: DeviceId) -> Result<&Primary> {
        self.devices
            .get(device.0 as usize)
            .ok_or_else(|| codes::error("cuDeviceGet", codes::INVALID_DEVICE))
    }

    /// Makes the device's primary context current on this thread for as long as the answer lives.
    pub(super) fn bind(&self, device: DeviceId) -> Result<Bound<'_>> {
        Bound::enter(&self.table, self.primary(device)?.retain(&self.table)?)
    }

    /// Counts a call and makes it, in a device's context.
    pub(super) fn call(
        &self,
        call: Call,
        device: DeviceId,
        make: impl FnOnce(&Table) -> u32,
    ) -> Result<()> {
        self.calls.add(call);
        let _bound = self.bind(device).inspect_err(|error| self.note(device, error))?;
        answer(call.name(), make(&self.table)).inspect_err(|error| self.note(device, error))
    }

    /// The same for a call that touches another device as well, whose loss it may answer with: that
    /// is no loss of the one that it is made for.
    pub(super) fn call_between(
        &self,
        call: Call,
        device: DeviceId,
        other: DeviceId,
        make: impl FnOnce(&Table) -> u32,
    ) -> Result<()> {
        self.calls.add(call);
        let _bound = self.bind(device).inspect_err(|error| self.note(device, error))?;
        answer(call.name(), make(&self.table)).inspect_err(|error| {
            let others = error.is_device_lost() && other != device && self.answers();
            self.note(if others { other } else { device }, error);
        })
    }

    /// Whether the context that is current still answers (`cuMemGetInfo`, which touches nothing and
    /// breaks no capture).
    #[cold]
    fn answers(&self) -> bool {
        let (mut free, mut total) = (0, 0);
        // SAFETY: 1. both are writable.
        unsafe { (self.table.memory_info)(&raw mut free, &raw mut total) == 0 }
    }

    #[cold]
    fn note(&self, device: DeviceId, error: &DriverError) {
        if let Ok(primary) = self.primary(device) {
            primary.note(error);
        }
    }

    /// The same for a question whose answer may be "not yet".
    pub(super) fn ask(
        &self,
        call: Call,
        device: DeviceId,
        make: impl FnOnce(&Table) -> u32,
    ) -> Result<bool> {
        self.calls.add(call);
        let _bound = self.bind(device).inspect_err(|error| self.note(device, error))?;
        match make(&self.table) {
            codes::NOT_READY => Ok(false),
            code => answer(call.name(), code)
                .map(|()| true)
                .inspect_err(|error| self.note(device, error)),
        }
    }

    /// The same for a call that ends something. When the process exits, the driver may be torn down
    /// before its users, and has taken all of their objects with it: that is what they asked for,
    /// and no error.
    pub(super) fn end(
        &self,
        call: Call,
        device: DeviceId,
        make: impl FnOnce(&Table) -> u32,
    ) -> Result<()> {
        match self.call(call, device, make) {
            Err(e) if e.code == codes::DEINITIALIZED => Ok(()),
            other => other,
        }
    }
}
