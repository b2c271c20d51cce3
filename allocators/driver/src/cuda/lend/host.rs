//! Pinned memory as the host side of cudarc's copies.
#![expect(
    unsafe_code,
    reason = "cudarc's trait has unsafe methods, and declares an unsafe constructor"
)]

use super::{keep_alive_if_same, raw_handle, record_error};
use crate::{Access, KeepAlive, RawStream};
use aquifer_core::Result;
use cudarc::driver::{CudaStream, HostSlice, SyncOnDrop};
use std::{fmt, sync::Arc};

/// Pinned memory lent to cudarc's copies.
///
/// cudarc assumes that plain slices are pageable: the driver stages those, so they may change as
/// soon as the copy has been queued. Pinned memory is read by the device later. While this value
/// lives, the host cannot access the bytes. Its creator is notified of each stream that will access
/// them *before* the copy is queued, and is responsible for them afterwards.
///
/// If the notification returns an error, nothing is copied. The error is recorded in cudarc's
/// context, which returns it from its next safe call.
///
/// See the [module](super) for an example of lending memory by [`Lend`](super::Lend).
pub struct LentHost<'a, T, N> {
    slice: &'a mut [T],
    stream: &'a Arc<CudaStream>,
    notify: N,
}

impl<'a, T, N> LentHost<'a, T, N>
where
    N: Fn(RawStream, Option<KeepAlive>, Access) -> Result<()>,
{
    /// Lends `slice` to copies, mainly on `stream`. `notify` is called with the stream of each
    /// copy, with a value that keeps the stream alive if it is `stream`, and with the copy's access
    /// to the *host's* bytes.
    ///
    /// # Safety
    /// 1. After `notify` has returned `Ok`, the bytes of `slice` are neither freed nor allocated
    ///    again, nor accessed by the host in conflict with the access, until the work that is
    ///    queued on that stream when this value ends is done. This also holds if values are dropped
    ///    or forgotten.
    pub unsafe fn new(slice: &'a mut [T], stream: &'a Arc<CudaStream>, notify: N) -> Self {
        Self { slice, stream, notify }
    }

    fn notify_use(&self, stream: &CudaStream, access: Access) -> bool {
        let result =
            (self.notify)(raw_handle(stream), keep_alive_if_same(self.stream, stream), access);
        record_error(stream, result).is_some()
    }
}

impl<T, N> HostSlice<T> for LentHost<'_, T, N>
where
    N: Fn(RawStream, Option<KeepAlive>, Access) -> Result<()>,
{
    fn len(&self) -> usize {
        self.slice.len()
    }

    unsafe fn stream_synced_slice<'a>(
        &'a self,
        stream: &'a CudaStream,
    ) -> (&'a [T], SyncOnDrop<'a>) {
        let slice = if self.notify_use(stream, Access::Read) { &*self.slice } else { &[] };
        (slice, SyncOnDrop::Record(None))
    }

    unsafe fn stream_synced_mut_slice<'a>(
        &'a mut self,
        stream: &'a CudaStream,
    ) -> (&'a mut [T], SyncOnDrop<'a>) {
        let slice = if self.notify_use(stream, Access::Write) { &mut *self.slice } else { &mut [] };
        (slice, SyncOnDrop::Record(None))
    }
}

impl<T, N> fmt::Debug for LentHost<'_, T, N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LentHost").field("len", &self.slice.len()).finish_non_exhaustive()
    }
}
