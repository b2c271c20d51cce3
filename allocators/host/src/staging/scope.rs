//! Transfers that borrow their operands.
#![expect(unsafe_code, reason = "moves bytes of what is borrowed on other threads")]

use super::{
    Progress, Sink, Source, StageError, Stager, check_process,
    parts::{Parts, device_location},
    plan::{Direction, Endpoint},
    transfer::Transfer,
};
use aquifer_core::Result as MemoryResult;
use aquifer_driver::{Access, OperandMut, RawStream, Typed, site};
use aquifer_stream::Timeline;
use bytemuck::Pod;
use std::{
    fmt,
    future::Future,
    iter,
    marker::PhantomData,
    mem::ManuallyDrop,
    ops::Range,
    pin::Pin,
    ptr::NonNull,
    sync::{Arc, Mutex, PoisonError},
    task::{Context, Poll},
    time::Instant,
};

type Result<T, E = StageError> = std::result::Result<T, E>;

/// A handle to a transfer that has been accepted. Dropping it does not affect the transfer.
///
/// It is a future for any runtime: a worker wakes it. It may be polled again after it was ready,
/// and cloned with [`Clone`] at any time.
#[derive(Clone)]
pub struct Staged {
    /// `None` if the bytes were moved before the call returned.
    transfer: Option<Arc<Transfer>>,
    bytes: u64,
}

impl Staged {
    pub(super) fn from_transfer(transfer: Arc<Transfer>) -> Self {
        Self { transfer: Some(transfer), bytes: 0 }
    }

    /// Returns the progress of the transfer.
    #[must_use]
    pub fn progress(&self) -> Progress {
        let done = Progress { done: self.bytes, total: self.bytes };
        self.transfer.as_ref().map_or(done, |transfer| transfer.progress())
    }

    /// Returns whether the transfer has finished, successfully or not. Never blocks.
    #[must_use]
    pub fn is_done(&self) -> bool {
        self.transfer.as_ref().is_none_or(|transfer| transfer.is_finished())
    }

    /// Returns the outcome of the transfer, or `None` while it is in flight. Never blocks.
    #[must_use]
    pub fn try_wait(&self) -> Option<Result<()>> {
        self.transfer.as_ref().map_or(Some(Ok(())), |transfer| transfer.outcome())
    }

    /// Takes part in the transfer, and waits until it is finished. Blocks.
    ///
    /// # Errors
    /// The error that ended the transfer early.
    pub fn wait(&self) -> Result<()> {
        self.transfer.as_ref().map_or(Ok(()), |transfer| transfer.wait())
    }

    /// Waits until the transfer is finished or `deadline` has passed.
    ///
    /// Returns `None` if the deadline passed first. The transfer then continues.
    ///
    /// # Errors
    /// The error that ended the transfer early.
    pub fn wait_until(&self, deadline: Instant) -> Option<Result<()>> {
        let Some(transfer) = &self.transfer else { return Some(Ok(())) };
        transfer.wait_until(deadline).then(|| transfer.outcome())?
    }

    /// Cancels the transfer: no further chunk is claimed. Never blocks.
    ///
    /// The transfer ends with [`StageError::Cancelled`] when the workers have finished their
    /// current chunks, unless it completes first.
    pub fn cancel(&self) {
        if let Some(transfer) = &self.transfer {
            transfer.cancel();
        }
    }
}

impl Future for Staged {
    type Output = Result<()>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<()>> {
        let Some(transfer) = &self.transfer else { return Poll::Ready(Ok(())) };
        transfer.poll(context.waker())
    }
}

impl fmt::Debug for Staged {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Staged").field(&self.progress()).finish()
    }
}

impl Stager {
    /// Runs fallible `work` as [`Stager::scope`] does, and merges the errors of the work and of its
    /// transfers into one result.
    ///
    /// # Errors
    /// As [`Stager::scope`], otherwise the error of `work`. All transfers have finished in either
    /// case.
    #[track_caller]
    pub fn try_scope<'env, R>(
        &'env self,
        work: impl for<'scope> FnOnce(&'scope StageScope<'scope, 'env>) -> Result<R>,
    ) -> Result<R> {
        let _site = site::enter();
        self.scope(work)?
    }

    /// Runs `work`, whose transfers may borrow memory, operands and sources, and returns when all
    /// of them have finished.
    ///
    /// On unwind, transfers in flight are cancelled and waited for. Blocks at its end, where the
    /// calling thread takes part in the transfers.
    ///
    /// # Errors
    /// The error of the first transfer that ended early. Cancelled transfers count.
    #[track_caller]
    pub fn scope<'env, R>(
        &'env self,
        work: impl for<'scope> FnOnce(&'scope StageScope<'scope, 'env>) -> R,
    ) -> Result<R> {
        struct FinishGuard<'a>(&'a Mutex<Vec<Arc<Transfer>>>);
        impl FinishGuard<'_> {
            fn drain(&self) -> Vec<Arc<Transfer>> {
                std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner))
            }
        }
        impl Drop for FinishGuard<'_> {
            fn drop(&mut self) {
                // Runs on unwind only.
                let started = self.drain();
                started.iter().for_each(|transfer| transfer.cancel());
                // No caller is left to receive the outcomes.
                started.iter().for_each(|transfer| drop(transfer.wait()));
            }
        }
        let started = Mutex::new(Vec::new());
        let on_unwind = FinishGuard(&started);
        // The calls inside `work` record their own call sites.
        let result = work(&StageScope {
            stager: self,
            started: &started,
            scope: PhantomData,
            env: PhantomData,
        });
        let finishing = ManuallyDrop::new(on_unwind);
        let _site = site::enter();
        let outcomes: Vec<_> = finishing.drain().iter().map(|transfer| transfer.wait()).collect();
        outcomes.into_iter().collect::<Result<()>>()?;
        Ok(result)
    }
}

/// The scope of [`Stager::scope`]. Its transfers may borrow everything that outlives the scope.
///
/// Each method submits one transfer and returns when a permit is available. Short transfers between
/// host memory and the device are complete by then. The scope borrows the operands until it ends.
///
/// ```
/// use aquifer::{OperandMut, Stager, Typed, staging::StageError};
///
/// /// Both directions at once.
/// fn turn_over(
///     stager: &Stager,
///     new: &[f32],
///     x: &mut (impl Typed<Item = f32> + OperandMut),
///     y: &impl Typed<Item = f32>,
///     old: &mut [f32],
/// ) -> Result<(), StageError> {
///     stager.scope(|s| {
///         s.upload(new, x)?;
///         let down = s.download(y, old)?;
///         println!("{} of {} bytes", down.progress().done, down.progress().total);
///         Ok(())
///     })?
/// }
/// ```
///
/// What is borrowed must outlive the scope:
///
/// ```compile_fail,E0597
/// # use aquifer::{OperandMut, Stager, Typed, staging::StageError};
/// fn too_short(stager: &Stager, x: &mut (impl Typed<Item = u8> + OperandMut)) -> Result<(), StageError> {
///     let bytes = x.len();
///     stager.scope(|s| {
///         let up = vec![1; bytes];
///         s.upload(&up, x).map(drop) // `up` is dropped before the copy may have finished
///     })?
/// }
/// ```
///
/// An operand cannot be used while its transfer is in flight:
///
/// ```compile_fail,E0502
/// # use aquifer::{OperandMut, Stager, Typed, staging::StageError};
/// fn at_once(stager: &Stager, x: &mut (impl Typed<Item = u8> + OperandMut)) -> Result<(), StageError> {
///     let (up, mut down) = (vec![1; 9], vec![0; 9]);
///     stager.scope(|s| {
///         s.upload(&up, x)?;
///         s.download(x, &mut down).map(drop) // the upload may still be in flight
///     })?
/// }
/// ```
pub struct StageScope<'scope, 'env: 'scope> {
    stager: &'env Stager,
    /// The transfers that may be in flight.
    started: &'scope Mutex<Vec<Arc<Transfer>>>,
    // Invariant in both lifetimes, so that neither can be shortened and a borrow cannot escape.
    scope: PhantomData<&'scope mut &'scope ()>,
    env: PhantomData<&'env mut &'env ()>,
}

impl<'env> StageScope<'_, 'env> {
    /// Copies `from` to the device.
    ///
    /// # Errors
    /// Different lengths, a conflicting use of `to`, or an error of the driver. No transfer was
    /// started.
    #[track_caller]
    pub fn upload<T, D>(&self, from: &'env [T], to: &'env mut D) -> Result<Staged>
    where
        T: Pod,
        D: Typed<Item = T> + OperandMut,
    {
        let _site = site::enter();
        self.gather([from], to)
    }

    /// Copies `from` into `to`, which stays borrowed until the scope ends.
    ///
    /// # Errors
    /// Different lengths, a conflicting use of `from`, or an error of the driver. No transfer was
    /// started.
    #[track_caller]
    pub fn download<T: Pod, D: Typed<Item = T>>(
        &self,
        from: &'env D,
        to: &'env mut [T],
    ) -> Result<Staged> {
        let _site = site::enter();
        self.scatter(from, [to])
    }

    /// Copies several slices to the device, one after another into contiguous memory.
    ///
    /// The slices share slots, so small slices cost little.
    ///
    /// # Errors
    /// As [`StageScope::upload`].
    #[track_caller]
    pub fn gather<T, D>(
        &self,
        from: impl IntoIterator<Item = &'env [T]>,
        to: &'env mut D,
    ) -> Result<Staged>
    where
        T: Pod,
        D: Typed<Item = T> + OperandMut,
    {
        let _site = site::enter();
        let slices = from.into_iter().map(NonNull::from);
        let parts = Parts::of_slices(Direction::Upload, slices, device_location(to))?;
        self.begin(parts, None, to.home_stream(), |on| {
            to.order_mut(on.raw(), Some(on.keep_alive()), Access::Write)
        })
    }

    /// Copies contiguous device memory into several slices, one after another.
    ///
    /// The slices share slots, so small slices cost little.
    ///
    /// # Errors
    /// As [`StageScope::download`].
    #[track_caller]
    pub fn scatter<T: Pod, D: Typed<Item = T>>(
        &self,
        from: &'env D,
        to: impl IntoIterator<Item = &'env mut [T]>,
    ) -> Result<Staged> {
        let _site = site::enter();
        let slices = to.into_iter().map(NonNull::from);
        let parts = Parts::of_slices(Direction::Download, slices, device_location(from))?;
        self.begin(parts, None, from.home_stream(), |on| {
            from.order(on.raw(), Some(on.keep_alive()), Access::Read)
        })
    }

    /// Fills `to` from `source`, starting at `offset`.
    ///
    /// # Errors
    /// A conflicting use of `to`, or an error of the driver. No transfer was started.
    #[track_caller]
    pub fn read<D>(&self, source: &'env dyn Source, offset: u64, to: &'env mut D) -> Result<Staged>
    where
        D: Typed + OperandMut,
        D::Item: Pod,
    {
        let _site = site::enter();
        let end = offset.saturating_add(to.range().bytes);
        self.read_ranges(source, iter::once(offset..end), to)
    }

    /// Fills `to` from byte ranges of `source`, one after another, such as a column of a matrix.
    ///
    /// The ranges share slots, so small ranges cost little.
    ///
    /// # Errors
    /// Ranges whose total length is not that of `to`, a conflicting use of `to`, or an error of the
    /// driver. No transfer was started.
    #[track_caller]
    pub fn read_ranges<D>(
        &self,
        source: &'env dyn Source,
        from: impl IntoIterator<Item = Range<u64>>,
        to: &'env mut D,
    ) -> Result<Staged>
    where
        D: Typed + OperandMut,
        D::Item: Pod,
    {
        let _site = site::enter();
        let parts = Parts::of_ranges(Direction::Upload, from, device_location(to))?;
        self.begin(parts, Some(from_source(source)), to.home_stream(), |on| {
            to.order_mut(on.raw(), Some(on.keep_alive()), Access::Write)
        })
    }

    /// Writes `from` to `sink`, starting at `offset`, such as for a checkpoint.
    ///
    /// # Errors
    /// A conflicting use of `from`, or an error of the driver. No transfer was started.
    #[track_caller]
    pub fn write<D>(&self, from: &'env D, sink: &'env dyn Sink, offset: u64) -> Result<Staged>
    where
        D: Typed,
        D::Item: Pod,
    {
        let _site = site::enter();
        let range = iter::once(offset..offset.saturating_add(from.range().bytes));
        let parts = Parts::of_ranges(Direction::Download, range, device_location(from))?;
        self.begin(parts, Some(to_sink(sink)), from.home_stream(), |on| {
            from.order(on.raw(), Some(on.keep_alive()), Access::Read)
        })
    }

    fn begin(
        &self,
        parts: Parts,
        endpoint: Option<Endpoint>,
        owner: Option<RawStream>,
        order: impl FnOnce(&Arc<Timeline>) -> MemoryResult<()>,
    ) -> Result<Staged> {
        let shared = &self.stager.shared;
        let bytes = parts.total;
        // Checked before any lock is taken.
        check_process()?;
        // Slots that are not pinned would add a copy, and the driver would still use its own
        // staging.
        if endpoint.is_none()
            && (shared.is_short(parts.direction, bytes)
                || !shared.direction_state(parts.direction).lanes.is_pinned())
        {
            // SAFETY: 1. everything that the parts name is borrowed while this runs.
            unsafe { shared.copy_inline(&parts, owner, order) }?;
            return Ok(Staged { transfer: None, bytes });
        }
        let permit = self.stager.permit();
        // SAFETY: 1. everything that the parts name, and the source or sink, is borrowed for longer
        // than the scope, and the scope waits for the transfer.
        let transfer = unsafe { shared.transfer(parts, endpoint, permit, owner, order) }?;
        {
            let mut started = self.started.lock().unwrap_or_else(PoisonError::into_inner);
            // Transfers that succeeded need no wait.
            started.retain(|old: &Arc<Transfer>| !matches!(old.outcome(), Some(Ok(()))));
            // The scope must hold the transfer before any thread touches its memory.
            started.push(transfer.clone());
        }
        transfer.begin();
        Ok(Staged::from_transfer(transfer))
    }
}

impl fmt::Debug for StageScope<'_, '_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StageScope").field("stager", self.stager).finish_non_exhaustive()
    }
}

/// Erases the lifetime of a source. The caller must keep the source alive until its transfer is
/// finished.
pub(super) fn from_source(source: &dyn Source) -> Endpoint {
    let source = NonNull::from(source);
    // SAFETY: 1. both types are the same pointer. The `'static` lifetime promises nothing: the
    // caller of `from_source` keeps the source alive.
    Endpoint::Source(unsafe {
        std::mem::transmute::<NonNull<dyn Source + '_>, NonNull<dyn Source + 'static>>(source)
    })
}

/// Erases the lifetime of a sink. The caller must keep the sink alive until its transfer is
/// finished.
pub(super) fn to_sink(sink: &dyn Sink) -> Endpoint {
    let sink = NonNull::from(sink);
    // SAFETY: 1. both types are the same pointer. The `'static` lifetime promises nothing: the
    // caller of `to_sink` keeps the sink alive.
    Endpoint::Sink(unsafe {
        std::mem::transmute::<NonNull<dyn Sink + '_>, NonNull<dyn Sink + 'static>>(sink)
    })
}
