//! [`Streams`] of CUDA.
#![expect(unsafe_code, reason = "calls the CUDA driver")]

use super::{
    CudaDriver,
    abi::{self, EVENT_DISABLE_TIMING, STREAM_NON_BLOCKING, driver_ptr},
    codes::{self, check},
};
use crate::{Call, CaptureMode, DeviceId, Events, RawEvent, RawStream, Result, Streams};

// SAFETY: 1. to 5. Handles come from the driver, and its results are passed on unchanged.
unsafe impl Streams for CudaDriver {
    fn stream_create(&self, device: DeviceId, priority: i32) -> Result<RawStream> {
        let mut stream = std::ptr::null_mut();
        self.call(Call::StreamCreate, device, |functions| {
            // SAFETY: 1. `stream` is writable.
            unsafe { (functions.stream_create)(&raw mut stream, STREAM_NON_BLOCKING, priority) }
        })?;
        // SAFETY: 1. The driver has just created it for this device.
        Ok(unsafe { RawStream::from_raw(device, abi::handle_of(stream)) })
    }

    unsafe fn stream_destroy(&self, stream: RawStream) -> Result<()> {
        self.destroy(Call::StreamDestroy, stream.device(), |functions| {
            // SAFETY: 1. The handle is alive, and the caller does not use it afterwards.
            unsafe { (functions.stream_destroy)(driver_ptr(stream.handle())) }
        })
    }

    fn stream_id(&self, stream: RawStream) -> Result<u64> {
        let mut id = 0;
        self.call(Call::StreamId, stream.device(), |functions| {
            // SAFETY: 1. The handle is alive. 2. `id` is writable.
            unsafe { (functions.stream_id)(driver_ptr(stream.handle()), &raw mut id) }
        })?;
        Ok(id)
    }

    fn stream_query(&self, stream: RawStream) -> Result<bool> {
        self.query(Call::StreamQuery, stream.device(), |functions| {
            // SAFETY: 1. The handle is alive.
            unsafe { (functions.stream_query)(driver_ptr(stream.handle())) }
        })
    }

    fn stream_synchronize(&self, stream: RawStream) -> Result<()> {
        self.call(Call::StreamSynchronize, stream.device(), |functions| {
            // SAFETY: 1. The handle is alive.
            unsafe { (functions.stream_synchronize)(driver_ptr(stream.handle())) }
        })
    }

    fn stream_wait_event(&self, stream: RawStream, event: RawEvent) -> Result<()> {
        self.call_between(Call::StreamWaitEvent, stream.device(), event.device(), |functions| {
            // SAFETY: 1. Both handles are alive.
            unsafe {
                (functions.stream_wait_event)(
                    driver_ptr(stream.handle()),
                    driver_ptr(event.handle()),
                    0,
                )
            }
        })
    }

    fn stream_is_capturing(&self, stream: RawStream) -> Result<bool> {
        let mut status = abi::CAPTURE_STATUS_NONE;
        let queried = self.call(Call::StreamIsCapturing, stream.device(), |functions| {
            // SAFETY: 1. The handle is alive. 2. `status` is writable.
            unsafe { (functions.stream_is_capturing)(driver_ptr(stream.handle()), &raw mut status) }
        });
        match queried {
            // The legacy stream, while a stream that is ordered with it captures. The driver
            // returns no status for it.
            Err(refused) if refused.code == codes::CAPTURE_IMPLICIT => Ok(true),
            queried => queried.map(|()| status != abi::CAPTURE_STATUS_NONE),
        }
    }

    fn exchange_capture_mode(&self, mode: CaptureMode) -> Result<CaptureMode> {
        self.calls.add(Call::ExchangeCaptureMode);
        let mut exchanged = abi::capture_mode(mode);
        // SAFETY: 1. `exchanged` is readable and writable, and holds a mode. The call needs no
        // context.
        let code = unsafe { (self.functions.exchange_capture_mode)(&raw mut exchanged) };
        check(Call::ExchangeCaptureMode.name(), code)?;
        Ok(match exchanged {
            abi::CAPTURE_RELAXED => CaptureMode::Relaxed,
            abi::CAPTURE_THREAD_LOCAL => CaptureMode::ThreadLocal,
            // The initial mode of every thread, and the strictest.
            _ => CaptureMode::Global,
        })
    }
}

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
