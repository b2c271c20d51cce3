//! Driver calls in the context of a device.
#![expect(unsafe_code, reason = "calls the CUDA driver")]

use super::{
    CudaDriver,
    codes::{self, check},
    context::{ContextGuard, PrimaryContext},
    function_table::FunctionTable,
};
use crate::{Call, DeviceId, DriverError, Result};

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
