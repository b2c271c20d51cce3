//! cudarc's streams as handles of our traits, and its slices as foreign memory.
#![expect(
    unsafe_code,
    reason = "creates the handle of a stream that another library owns, and implements an unsafe trait"
)]

use super::super::codes;
use crate::{DeviceId, DeviceRange, Foreign, KeepAlive, RawStream};
use aquifer_core::{MemoryError, Result};
use cudarc::driver::{CudaSlice, CudaStream, DevicePtr, DevicePtrMut, DriverError};
use std::sync::Arc;

/// Returns the handle of a stream of cudarc, on the device of its context.
///
/// [`Lend`](super::Lend) calls it. See the [module](super) for an example.
///
/// # Safety
/// 1. The stream is kept alive for as long as the handle is used in a call. [`keep_alive`] returns
///    a value that does so.
#[must_use]
pub unsafe fn raw_stream(stream: &CudaStream) -> RawStream {
    raw_handle(stream)
}

/// Returns a value that keeps a stream of cudarc alive and its handle valid, for code that does not
/// use cudarc.
///
/// [`Lend`](super::Lend) calls it. See the [module](super) for an example.
#[must_use]
pub fn keep_alive(stream: &Arc<CudaStream>) -> KeepAlive {
    stream.clone()
}

/// As [`raw_stream`], for calls made while the stream is borrowed or kept alive.
pub(super) fn raw_handle(stream: &CudaStream) -> RawStream {
    // SAFETY: 1. cudarc's stream is a stream of the driver, and alive while it is borrowed. Code
    // that receives the handle also receives the value that keeps the stream alive, or knows the
    // stream and is responsible for its lifetime.
    unsafe { RawStream::from_raw(device_of(stream), stream.cu_stream().expose_provenance() as u64) }
}

/// Returns the device of a stream's context.
pub(super) fn device_of(stream: &CudaStream) -> DeviceId {
    DeviceId(u32::try_from(stream.context().ordinal()).unwrap_or(u32::MAX))
}

// SAFETY: 1. The slice owns its allocation, which ends when the slice is dropped. 2. cudarc makes
// the stream that it passes an address for wait for the slice's reads and writes elsewhere, if the
// context tracks them. A context that does not track them has one stream, or its owner has promised
// the order. 3. cudarc frees on the slice's stream. With the address it also records the slice's
// events there, and its other streams wait for those events.
unsafe impl<T: 'static> Foreign for CudaSlice<T> {
    type Item = T;

    fn range(&self) -> DeviceRange {
        // On the slice's own stream, so that nothing has to wait.
        let (address, _done) = self.device_ptr(self.stream());
        DeviceRange { device: device_of(self.stream()), address, bytes: self.num_bytes() as u64 }
    }

    fn stream(&self) -> (RawStream, Option<KeepAlive>) {
        (raw_handle(self.stream()), Some(keep_alive(self.stream())))
    }

    fn enter(&mut self) -> Result<()> {
        order_and_record_write(self)
    }

    fn leave(&mut self) -> Result<()> {
        order_and_record_write(self)
    }
}

/// Makes the slice's stream wait for the slice's uses elsewhere, and records a write on it.
fn order_and_record_write<T>(slice: &mut CudaSlice<T>) -> Result<()> {
    let stream = CudaSlice::stream(slice).clone();
    drop(slice.device_ptr_mut(&stream));
    // cudarc cannot return an error there and stores it in the context.
    stream.context().check_err().map_err(|e| memory_error(&e, device_of(&stream)))
}

/// Converts an error of cudarc.
fn memory_error(error: &DriverError, device: DeviceId) -> MemoryError {
    MemoryError::driver(device, codes::error("cudarc", error.0 as u32))
}
