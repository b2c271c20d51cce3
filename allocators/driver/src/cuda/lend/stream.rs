//! cudarc's streams by the names that our traits use.
#![expect(unsafe_code, reason = "names a handle that another library owns")]

use super::device_of;
use crate::{KeepAlive, RawStream};
use cudarc::driver::CudaStream;
use std::sync::Arc;

/// The name of a stream of cudarc, on the device of its context.
///
/// Its example is that of [`Lend`](super::Lend), which calls it.
///
/// # Safety
/// 1. The stream is kept alive for as long as the name is used in a call: [`keep_alive`] gives
///    something that does.
#[must_use]
pub unsafe fn raw_stream(stream: &CudaStream) -> RawStream {
    name(stream)
}

/// Something that keeps a stream of cudarc alive, and its handle valid, for those who do not know
/// cudarc.
///
/// Its example is that of [`Lend`](super::Lend), which calls it.
#[must_use]
pub fn keep_alive(stream: &Arc<CudaStream>) -> KeepAlive {
    stream.clone()
}

/// As [`raw_stream`], for calls made while the stream is borrowed, or with what keeps it alive
/// beside it.
pub(super) fn name(stream: &CudaStream) -> RawStream {
    // SAFETY: 1. cudarc's stream is the driver's, and alive while it is borrowed; whoever the name
    // is passed to gets what keeps it alive along with it, or knows the stream and answers for its
    // life.
    unsafe { RawStream::from_raw(device_of(stream), stream.cu_stream().expose_provenance() as u64) }
}
