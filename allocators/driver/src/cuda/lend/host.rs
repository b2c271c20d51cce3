//! Pinned memory as the host side of cudarc's copies.
#![expect(
    unsafe_code,
    reason = "cudarc's trait has unsafe methods, and declares an unsafe constructor"
)]

use super::{alive_if_home, name, recorded};
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
    home: &'a Arc<CudaStream>,
    note: N,
}

impl<'a, T, N> LentHost<'a, T, N>
where
    N: Fn(RawStream, Option<KeepAlive>, Access) -> Result<()>,
{
    /// Lends `slice` to copies, mainly on `home`. `note` is called with the stream of each copy,
    /// with a value that keeps the stream alive if it is `home`, and with the copy's access to the
    /// *host's* bytes.
    ///
    /// # Safety
    /// 1. After `note` has returned `Ok`, the bytes of `slice` are neither freed nor allocated
    ///    again, nor accessed by the host in conflict with the access, until the work that is
    ///    queued on that stream when this value ends is done. This also holds if values are dropped
    ///    or forgotten.
    pub unsafe fn new(slice: &'a mut [T], home: &'a Arc<CudaStream>, note: N) -> Self {
        Self { slice, home, note }
    }

    fn noted(&self, stream: &CudaStream, access: Access) -> bool {
        let result = (self.note)(name(stream), alive_if_home(self.home, stream), access);
        recorded(stream, result).is_some()
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
        let slice = if self.noted(stream, Access::Read) { &*self.slice } else { &[] };
        (slice, SyncOnDrop::Record(None))
    }

    unsafe fn stream_synced_mut_slice<'a>(
        &'a mut self,
        stream: &'a CudaStream,
    ) -> (&'a mut [T], SyncOnDrop<'a>) {
        let slice = if self.noted(stream, Access::Write) { &mut *self.slice } else { &mut [] };
        (slice, SyncOnDrop::Record(None))
    }
}

impl<T, N> fmt::Debug for LentHost<'_, T, N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LentHost").field("len", &self.slice.len()).finish_non_exhaustive()
    }
}
