//! Transfers that own their operands.
#![expect(
    unsafe_code,
    reason = "declares an unsafe trait, and moves bytes of what is owned on other threads"
)]

use super::{
    Failed, Progress, Sink, Source, StageError, Staged, Stager,
    parts::{Parts, device_location},
    permit::Permit,
    plan::{Direction, Endpoint},
    scope::{from_source, to_sink},
    transfer::{KeepAlive, Transfer},
};
use allocator_api2::{alloc::Allocator, boxed::Box as AllocBox, vec::Vec as AllocVec};
use aquifer_core::Result as MemoryResult;
use aquifer_driver::{Access, OperandMut, RawStream, Typed, site};
use aquifer_stream::Timeline;
use bytemuck::Pod;
use std::{
    fmt,
    future::Future,
    iter,
    pin::Pin,
    ptr::NonNull,
    sync::{Arc, Mutex, PoisonError},
    task::{Context, Poll, ready},
    time::Instant,
};

#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot be owned by a transfer",
    label = "a transfer that goes on in the background owns its host side",
    note = "hand in a vector or a boxed slice by value, or borrow a slice in `Stager::try_scope`"
)]
/// Owned host memory that can be moved while other threads read or write its elements.
///
/// See [`Stager::upload`](crate::Stager::upload), which accepts any such buffer, for an example.
///
/// # Safety
/// 1. [`HostBuffer::elements`] returns initialised memory that belongs exclusively to the owner,
///    and whose address does not change when the owner is moved.
pub unsafe trait HostBuffer: Send + 'static {
    /// The type of the elements.
    type Item: Pod;

    /// Returns the elements.
    fn elements(&mut self) -> NonNull<[Self::Item]>;
}

// SAFETY: 1. the elements of a vector are initialised, owned by it, and do not move with it.
unsafe impl<T: Pod + Send> HostBuffer for Vec<T> {
    type Item = T;
    fn elements(&mut self) -> NonNull<[T]> {
        NonNull::from(&mut self[..])
    }
}

// SAFETY: 1. the elements of a boxed slice are initialised, owned by it, and do not move with it.
unsafe impl<T: Pod + Send> HostBuffer for Box<[T]> {
    type Item = T;
    fn elements(&mut self) -> NonNull<[T]> {
        NonNull::from(&mut self[..])
    }
}

// SAFETY: 1. as for the standard vector.
unsafe impl<T: Pod + Send, A: Allocator + Send + 'static> HostBuffer for AllocVec<T, A> {
    type Item = T;
    fn elements(&mut self) -> NonNull<[T]> {
        NonNull::from(&mut self[..])
    }
}

// SAFETY: 1. as for the standard box.
unsafe impl<T: Pod + Send, A: Allocator + Send + 'static> HostBuffer for AllocBox<[T], A> {
    type Item = T;
    fn elements(&mut self) -> NonNull<[T]> {
        NonNull::from(&mut self[..])
    }
}

/// Storage for what a transfer owns. It is not accessed before the transfer is finished.
struct OwnedOperands<T>(Mutex<Option<T>>);

impl<T> OwnedOperands<T> {
    fn take(&self) -> Option<T> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

/// A transfer that owns both its sides, and returns them when it is waited for.
///
/// The workers make progress whether or not a thread waits.
///
/// - Dropping the ticket cancels the transfer. The last worker of the transfer drops what it owns.
/// - [`Ticket::detach`] lets the transfer complete first.
/// - Forgetting the ticket leaks what the transfer owns.
///
/// As a future it works with any runtime. It is cancel-safe: poll `&mut ticket`, and nothing is
/// lost when that borrow is dropped.
///
/// ```
/// use aquifer::{OperandMut, Stager, Typed, staging::StageError};
///
/// async fn send<D>(stager: &Stager, rows: Vec<f32>, to: D) -> Result<(Vec<f32>, D), StageError>
/// where
///     D: Typed<Item = f32> + OperandMut + Send + 'static,
/// {
///     let permit = stager.ready().await; // back-pressure
///     let ticket = permit.upload(rows, to)?;
///     Ok(ticket.await?) // returns both sides
/// }
/// ```
#[must_use = "a ticket that is dropped cancels its transfer"]
pub struct Ticket<T> {
    staged: Staged,
    operands: Arc<OwnedOperands<T>>,
    detached: bool,
}

impl<T> Ticket<T> {
    /// Returns the progress of the transfer.
    #[must_use]
    pub fn progress(&self) -> Progress {
        self.staged.progress()
    }

    /// Returns whether the transfer has finished, successfully or not. Never blocks.
    #[must_use]
    pub fn is_done(&self) -> bool {
        self.staged.is_done()
    }

    /// Cancels the transfer, as [`Staged::cancel`]. Wait for the ticket to get both sides back.
    pub fn cancel(&self) {
        self.staged.cancel();
    }

    /// Returns a handle that observes the transfer but does not own its operands.
    #[must_use]
    pub fn watch(&self) -> Staged {
        self.staged.clone()
    }

    /// Lets the transfer complete in the background. A worker then drops what it owns.
    pub fn detach(mut self) {
        self.detached = true;
    }

    /// Takes part in the transfer, waits until it is finished, and returns both sides. Blocks.
    ///
    /// # Errors
    /// The error that ended the transfer early, with both sides.
    pub fn wait(self) -> Result<T, Failed<T>> {
        let outcome = self.staged.wait();
        self.finish(outcome)
    }

    /// Returns both sides if the transfer has finished. Never blocks.
    ///
    /// # Errors
    /// This ticket, if the transfer has not finished. The inner error is the one that ended the
    /// transfer early, with both sides.
    pub fn try_wait(self) -> Result<Result<T, Failed<T>>, Self> {
        match self.staged.try_wait() {
            Some(outcome) => Ok(self.finish(outcome)),
            None => Err(self),
        }
    }

    /// Waits until the transfer is finished or `deadline` has passed.
    ///
    /// # Errors
    /// This ticket, if the transfer has not finished by then. The inner error is the one that ended
    /// the transfer early, with both sides.
    pub fn wait_until(self, deadline: Instant) -> Result<Result<T, Failed<T>>, Self> {
        match self.staged.wait_until(deadline) {
            Some(outcome) => Ok(self.finish(outcome)),
            None => Err(self),
        }
    }

    /// Returns the result of a finished transfer.
    fn finish(&self, outcome: Result<(), StageError>) -> Result<T, Failed<T>> {
        match (self.operands.take(), outcome) {
            (Some(operands), Ok(())) => Ok(operands),
            (Some(operands), Err(error)) => Err(Failed { back: Some(operands), error }),
            (None, _) => Err(Failed { back: None, error: StageError::Taken }),
        }
    }
}

impl<T> Future for Ticket<T> {
    type Output = Result<T, Failed<T>>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let outcome = ready!(Pin::new(&mut self.staged).poll(context));
        Poll::Ready(self.finish(outcome))
    }
}

impl<T> Drop for Ticket<T> {
    fn drop(&mut self) {
        if !self.detached {
            self.staged.cancel();
        }
    }
}

impl<T> fmt::Debug for Ticket<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Ticket").field(&self.progress()).finish()
    }
}

/// A ticket, or the operands of the call and the reason why no transfer was started.
pub type Begun<T> = Result<Ticket<T>, Failed<T>>;

impl Permit {
    /// Copies `from` to the device, and owns both sides until the copy is done.
    ///
    /// Does not block, except for pinned memory if this is the first transfer.
    ///
    /// # Errors
    /// [`Failed`] with both sides: different lengths, a conflicting use of `to`, or an error of the
    /// driver. No transfer was started.
    #[track_caller]
    pub fn upload<H, D>(self, mut from: H, mut to: D) -> Begun<(H, D)>
    where
        H: HostBuffer,
        D: Typed<Item = H::Item> + OperandMut + Send + 'static,
    {
        let _site = site::enter();
        let parts = Parts::of_slices(Direction::Upload, [from.elements()], device_location(&to));
        let owner = to.home_stream();
        let order =
            |on: &Arc<Timeline>| to.order_mut(on.raw(), Some(on.keep_alive()), Access::Write);
        // SAFETY: 1. both sides are moved to the stored operands, which the transfer keeps
        // untouched until it is finished.
        let made = unsafe { self.transfer(parts, None, owner, order) };
        start(made, (from, to), |operands| operands)
    }

    /// Copies `from` into `to`, and owns both sides until the copy is done.
    ///
    /// Does not block, except for pinned memory if this is the first transfer.
    ///
    /// # Errors
    /// [`Failed`] with both sides: different lengths, a conflicting use of `from`, or an error of
    /// the driver. No transfer was started.
    #[track_caller]
    pub fn download<H, D>(self, from: D, mut to: H) -> Begun<(D, H)>
    where
        H: HostBuffer,
        D: Typed<Item = H::Item> + Send + 'static,
    {
        let _site = site::enter();
        let parts = Parts::of_slices(Direction::Download, [to.elements()], device_location(&from));
        let order = |on: &Arc<Timeline>| from.order(on.raw(), Some(on.keep_alive()), Access::Read);
        // SAFETY: 1. both sides are moved to the stored operands, which the transfer keeps
        // untouched until it is finished.
        let made = unsafe { self.transfer(parts, None, from.home_stream(), order) };
        start(made, (from, to), |operands| operands)
    }

    /// Fills `to` from `source`, starting at `offset`, and owns `to` until that is done.
    ///
    /// Does not block, except for pinned memory if this is the first transfer.
    ///
    /// # Errors
    /// [`Failed`] with `to`: a conflicting use of it, or an error of the driver. No transfer was
    /// started.
    #[track_caller]
    pub fn read<D>(self, source: Arc<dyn Source>, offset: u64, mut to: D) -> Begun<D>
    where
        D: Typed + OperandMut + Send + 'static,
        D::Item: Pod,
    {
        let _site = site::enter();
        let range = iter::once(offset..offset.saturating_add(to.range().bytes));
        let parts = Parts::of_ranges(Direction::Upload, range, device_location(&to));
        let (from, owner) = (Some(from_source(&*source)), to.home_stream());
        let order =
            |on: &Arc<Timeline>| to.order_mut(on.raw(), Some(on.keep_alive()), Access::Write);
        // SAFETY: 1. the operand and the source are moved to the stored operands, which the
        // transfer keeps untouched until it is finished.
        let made = unsafe { self.transfer(parts, from, owner, order) };
        start(made, to, |operands| Arc::new((operands, source)))
    }

    /// Writes `from` to `sink`, starting at `offset`, and owns `from` until that is done.
    ///
    /// Does not block, except for pinned memory if this is the first transfer.
    ///
    /// # Errors
    /// [`Failed`] with `from`: a conflicting use of it, or an error of the driver. No transfer was
    /// started.
    #[track_caller]
    pub fn write<D>(self, from: D, sink: Arc<dyn Sink>, offset: u64) -> Begun<D>
    where
        D: Typed + Send + 'static,
        D::Item: Pod,
    {
        let _site = site::enter();
        let range = iter::once(offset..offset.saturating_add(from.range().bytes));
        let parts = Parts::of_ranges(Direction::Download, range, device_location(&from));
        let order = |on: &Arc<Timeline>| from.order(on.raw(), Some(on.keep_alive()), Access::Read);
        // SAFETY: 1. the operand and the sink are moved to the stored operands, which the transfer
        // keeps untouched until it is finished.
        let made =
            unsafe { self.transfer(parts, Some(to_sink(&*sink)), from.home_stream(), order) };
        start(made, from, |operands| Arc::new((operands, sink)))
    }

    /// Creates a transfer that owns its operands, but does not begin it.
    ///
    /// # Safety
    /// As [`StagerCore::transfer`](super::StagerCore).
    unsafe fn transfer(
        self,
        parts: MemoryResult<Parts>,
        endpoint: Option<Endpoint>,
        owner: Option<RawStream>,
        order: impl FnOnce(&Arc<Timeline>) -> MemoryResult<()>,
    ) -> Result<Arc<Transfer>, StageError> {
        let shared = self.shared.clone();
        // SAFETY: 1. the caller's condition.
        unsafe { shared.transfer(parts?, endpoint, self, owner, order) }
    }
}

/// Stores what a transfer owns, and starts the transfer.
fn start<T: Send + 'static>(
    made: Result<Arc<Transfer>, StageError>,
    operands: T,
    keep_alive: impl FnOnce(Arc<OwnedOperands<T>>) -> KeepAlive,
) -> Begun<T> {
    let transfer = match made {
        Ok(transfer) => transfer,
        Err(error) => return Err(Failed { back: Some(operands), error }),
    };
    let operands = Arc::new(OwnedOperands(Mutex::new(Some(operands))));
    transfer.set_keep_alive(keep_alive(operands.clone()));
    transfer.begin();
    Ok(Ticket { staged: Staged::from_transfer(transfer), operands, detached: false })
}

impl Stager {
    /// Waits for a permit, then starts [`Permit::upload`]. Blocks while too many transfers are in
    /// flight.
    ///
    /// # Errors
    /// As [`Permit::upload`].
    #[track_caller]
    pub fn upload<H, D>(&self, from: H, to: D) -> Begun<(H, D)>
    where
        H: HostBuffer,
        D: Typed<Item = H::Item> + OperandMut + Send + 'static,
    {
        self.permit().upload(from, to)
    }

    /// Waits for a permit, then starts [`Permit::download`]. Blocks while too many transfers are in
    /// flight.
    ///
    /// # Errors
    /// As [`Permit::download`].
    #[track_caller]
    pub fn download<H, D>(&self, from: D, to: H) -> Begun<(D, H)>
    where
        H: HostBuffer,
        D: Typed<Item = H::Item> + Send + 'static,
    {
        self.permit().download(from, to)
    }

    /// Waits for a permit, then starts [`Permit::read`]. Blocks while too many transfers are in
    /// flight.
    ///
    /// # Errors
    /// As [`Permit::read`].
    #[track_caller]
    pub fn read<D>(&self, source: Arc<dyn Source>, offset: u64, to: D) -> Begun<D>
    where
        D: Typed + OperandMut + Send + 'static,
        D::Item: Pod,
    {
        self.permit().read(source, offset, to)
    }

    /// Waits for a permit, then starts [`Permit::write`]. Blocks while too many transfers are in
    /// flight.
    ///
    /// # Errors
    /// As [`Permit::write`].
    #[track_caller]
    pub fn write<D>(&self, from: D, sink: Arc<dyn Sink>, offset: u64) -> Begun<D>
    where
        D: Typed + Send + 'static,
        D::Item: Pod,
    {
        self.permit().write(from, sink, offset)
    }
}
