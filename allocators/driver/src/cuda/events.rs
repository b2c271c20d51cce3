//! [`Events`] of CUDA.
#![expect(unsafe_code, reason = "calls the CUDA driver")]

use super::{
    CudaDriver,
    abi::{self, EVENT_DISABLE_TIMING, driver_ptr},
};
use crate::{Call, DeviceId, Events, RawEvent, RawStream, Result};

// SAFETY: 1. to 3. Handles come from the driver, and its results are passed on unchanged.
unsafe impl Events for CudaDriver {
    fn event_create(&self, device: DeviceId) -> Result<RawEvent> {
        let mut event = std::ptr::null_mut();
        self.call(Call::EventCreate, device, |functions| {
            // SAFETY: 1. `event` is writable.
            unsafe { (functions.event_create)(&raw mut event, EVENT_DISABLE_TIMING) }
        })?;
        // SAFETY: 1. The driver has just created it for this device.
        Ok(unsafe { RawEvent::from_raw(device, abi::handle_of(event)) })
    }

    unsafe fn event_destroy(&self, event: RawEvent) -> Result<()> {
        self.destroy(Call::EventDestroy, event.device(), |functions| {
            // SAFETY: 1. The handle is alive, and the caller does not use it afterwards.
            unsafe { (functions.event_destroy)(driver_ptr(event.handle())) }
        })
    }

    fn event_record(&self, event: RawEvent, stream: RawStream) -> Result<()> {
        self.call(Call::EventRecord, stream.device(), |functions| {
            // SAFETY: 1. Both handles are alive.
            unsafe {
                (functions.event_record)(driver_ptr(event.handle()), driver_ptr(stream.handle()))
            }
        })
    }

    fn event_query(&self, event: RawEvent) -> Result<bool> {
        self.query(Call::EventQuery, event.device(), |functions| {
            // SAFETY: 1. The handle is alive.
            unsafe { (functions.event_query)(driver_ptr(event.handle())) }
        })
    }

    fn event_synchronize(&self, event: RawEvent) -> Result<()> {
        self.call(Call::EventSynchronize, event.device(), |functions| {
            // SAFETY: 1. The handle is alive.
            unsafe { (functions.event_synchronize)(driver_ptr(event.handle())) }
        })
    }
}
