//! cudarc's streams as handles of our traits.
#![expect(unsafe_code, reason = "creates the handle of a stream that another library owns")]

use crate::{DeviceId, KeepAlive, RawStream};
use cudarc::driver::CudaStream;
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
