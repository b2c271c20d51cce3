//! [`Streams`] of CUDA.
#![expect(unsafe_code, reason = "calls the CUDA driver")]

use super::{
    CudaDriver,
    abi::{self, STREAM_NON_BLOCKING, object},
    codes::{self, answer},
};
use crate::{Call, CaptureMode, DeviceId, RawEvent, RawStream, Result, Streams};
use std::{
    hint,
    ops::RangeInclusive,
    sync::atomic::{AtomicU32, Ordering},
};

/// The number of polls of a word before the caller falls back to the driver: some tens of
/// microseconds.
const LOOKS: u32 = 1000;

// SAFETY: 1. to 5. Handles come from the driver, and its results are passed on unchanged. A watched
// word has its value only after the device has written it, in stream order.
unsafe impl Streams for CudaDriver {
    fn stream_create(&self, device: DeviceId, priority: i32) -> Result<RawStream> {
        let mut stream = std::ptr::null_mut();
        self.call(Call::StreamCreate, device, |table| {
            // SAFETY: 1. `stream` is writable.
            unsafe { (table.stream_create)(&raw mut stream, STREAM_NON_BLOCKING, priority) }
        })?;
        // SAFETY: 1. The driver has just created it for this device.
        Ok(unsafe { RawStream::from_raw(device, abi::handle(stream)) })
    }

    unsafe fn stream_destroy(&self, stream: RawStream) -> Result<()> {
        self.end(Call::StreamDestroy, stream.device(), |table| {
            // SAFETY: 1. The handle is alive, and the caller does not use it afterwards.
            unsafe { (table.stream_destroy)(object(stream.handle())) }
        })
    }

    fn stream_priorities(&self, device: DeviceId) -> Result<RangeInclusive<i32>> {
        let (mut least, mut greatest) = (0, 0);
        self.call(Call::StreamPriorities, device, |table| {
            // SAFETY: 1. Both are writable.
            unsafe { (table.stream_priorities)(&raw mut least, &raw mut greatest) }
        })?;
        Ok(greatest..=least)
    }

    fn stream_id(&self, stream: RawStream) -> Result<u64> {
        let mut id = 0;
        self.call(Call::StreamId, stream.device(), |table| {
            // SAFETY: 1. The handle is alive. 2. `id` is writable.
            unsafe { (table.stream_id)(object(stream.handle()), &raw mut id) }
        })?;
        Ok(id)
    }

    fn stream_query(&self, stream: RawStream) -> Result<bool> {
        self.ask(Call::StreamQuery, stream.device(), |table| {
            // SAFETY: 1. The handle is alive.
            unsafe { (table.stream_query)(object(stream.handle())) }
        })
    }

    fn stream_synchronize(&self, stream: RawStream) -> Result<()> {
        self.call(Call::StreamSynchronize, stream.device(), |table| {
            // SAFETY: 1. The handle is alive.
            unsafe { (table.stream_synchronize)(object(stream.handle())) }
        })
    }

    unsafe fn stream_watch(&self, stream: RawStream, word: &AtomicU32, value: u32) -> Result<bool> {
        self.call(Call::StreamWriteValue, stream.device(), |table| {
            // SAFETY: 1. The handle is alive. 2. The caller promises that only the device writes
            // the word until then.
            unsafe {
                (table.stream_write_value)(object(stream.handle()), word.as_ptr() as u64, value, 0)
            }
        })?;
        for _ in 0..LOOKS {
            // Acquire: all earlier writes of the device are visible too.
            if word.load(Ordering::Acquire) == value {
                return Ok(true);
            }
            hint::spin_loop();
        }
        Ok(false)
    }

    fn stream_wait_event(&self, stream: RawStream, event: RawEvent) -> Result<()> {
        self.call_between(Call::StreamWaitEvent, stream.device(), event.device(), |table| {
            // SAFETY: 1. Both handles are alive.
            unsafe { (table.stream_wait_event)(object(stream.handle()), object(event.handle()), 0) }
        })
    }

    fn stream_is_capturing(&self, stream: RawStream) -> Result<bool> {
        let mut status = abi::CAPTURE_STATUS_NONE;
        let asked = self.call(Call::StreamIsCapturing, stream.device(), |table| {
            // SAFETY: 1. The handle is alive. 2. `status` is writable.
            unsafe { (table.stream_is_capturing)(object(stream.handle()), &raw mut status) }
        });
        match asked {
            // The legacy stream, while a stream that is ordered with it captures. The driver
            // returns no status for it.
            Err(refused) if refused.code == codes::CAPTURE_IMPLICIT => Ok(true),
            asked => asked.map(|()| status != abi::CAPTURE_STATUS_NONE),
        }
    }

    fn exchange_capture_mode(&self, mode: CaptureMode) -> Result<CaptureMode> {
        self.calls.add(Call::ExchangeCaptureMode);
        let mut exchanged = abi::capture_mode(mode);
        // SAFETY: 1. `exchanged` is readable and writable, and holds a mode. The call needs no
        // context.
        let code = unsafe { (self.table.exchange_capture_mode)(&raw mut exchanged) };
        answer(Call::ExchangeCaptureMode.name(), code)?;
        Ok(match exchanged {
            abi::CAPTURE_RELAXED => CaptureMode::Relaxed,
            abi::CAPTURE_THREAD_LOCAL => CaptureMode::ThreadLocal,
            // The initial mode of every thread, and the strictest.
            _ => CaptureMode::Global,
        })
    }
}
