//! Transfers that own.
#![expect(
    unsafe_code,
    reason = "declares an unsafe trait, and moves bytes of what is owned on other threads"
)]

use super::{
    Failed, Progress, Sink, Source, StageError, Staged, Stager,
    parts::{Parts, place},
    permit::Permit,
    plan::Way,
    scope::{from_source, to_sink},
    transfer::{Keep, Transfer},
};
use allocator_api2::{alloc::Allocator, boxed::Box as AllocBox, vec::Vec as AllocVec};
use aquifer_driver::{Access, OperandMut, Typed, site};
use bytemuck::Pod;
use std::{
    fmt,
    future::Future,
    iter,
    ops::Range,
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
/// Host memory with an owner that can be moved while other threads read or write it.
///
/// Its example is that of [`Stager::upload`](crate::Stager::upload), which takes any.
///
/// # Safety
/// 1. [`HostBuffer::elements`] answers with initialised memory that is the owner's alone, and stays
///    where it is when the owner is moved.
pub unsafe trait HostBuffer: Send + 'static {
    /// The elements' type.
    type Item: Pod;

    /// The elements.
    fn elements(&mut self) -> NonNull<[Self::Item]>;
}

// SAFETY: 1. a vector's elements are initialised, its own, and do not move with it.
unsafe impl<T: Pod + Send> HostBuffer for Vec<T> {
    type Item = T;
    fn elements(&mut self) -> NonNull<[T]> {
        NonNull::from(&mut self[..])
    }
}

// SAFETY: 1. a boxed slice's elements are initialised, its own, and do not move with it.
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

/// Where what a transfer owns lies until it is finished. Nobody looks at it before.
struct Shelf<T>(Mutex<Option<T>>);

impl<T> Shelf<T> {
    fn take(&self) -> Option<T> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

/// A transfer that owns both its sides, and gives them back when it is waited for.
///
/// Dropped early it is cancelled, and what it owns is dropped by the last worker that is at it;
/// [`Ticket::detach`] lets it come to its end first. Forgotten, what it owns is leaked. Workers
/// move it on whether somebody waits or not.
///
/// As a future it needs no particular runtime. It is cancel-safe: poll `&mut ticket`, and nothing
/// is lost when that is dropped.
///
/// ```
/// use aquifer_driver::{OperandMut, Typed};
/// use aquifer_host::{StageError, Stager};
///
/// async fn send<D>(stager: &Stager, rows: Vec<f32>, to: D) -> Result<(Vec<f32>, D), StageError>
/// where
///     D: Typed<Item = f32> + OperandMut + Send + 'static,
/// {
///     let permit = stager.ready().await; // back-pressure
///     let ticket = permit.upload(rows, to)?;
///     Ok(ticket.await?) // both again
/// }
/// ```
#[must_use = "a ticket that is dropped cancels its transfer"]
pub struct Ticket<T> {
    staged: Staged,
    shelf: Arc<Shelf<T>>,
    detached: bool,
}

impl<T> Ticket<T> {
    /// How far it is.
    #[must_use]
    pub fn progress(&self) -> Progress {
        self.staged.progress()
    }

    /// Whether it has come to its end, a good one or not. Never blocks.
    #[must_use]
    pub fn is_done(&self) -> bool {
        self.staged.is_done()
    }

    /// Claims no further chunk, as [`Staged::cancel`]. Wait for it to have both sides back.
    pub fn cancel(&self) {
        self.staged.cancel();
    }

    /// The transfer without what it owns, for those who only watch it.
    #[must_use]
    pub fn watch(&self) -> Staged {
        self.staged.clone()
    }

    /// Lets it come to its end with nobody waiting. What it owns is dropped then, by a worker.
    pub fn detach(mut self) {
        self.detached = true;
    }

    /// Takes part in it, waits for its end, and gives both sides back. Blocks.
    ///
    /// # Errors
    /// What ended it early, with both sides.
    pub fn wait(self) -> Result<T, Failed<T>> {
        let outcome = self.staged.wait();
        self.give(outcome)
    }

    /// Both sides, if it has come to its end. Never blocks.
    ///
    /// # Errors
    /// This ticket again, if it has not; what ended it early, with both sides.
    pub fn try_wait(self) -> Result<Result<T, Failed<T>>, Self> {
        match self.staged.try_wait() {
            Some(outcome) => Ok(self.give(outcome)),
            None => Err(self),
        }
    }

    /// Waits until `deadline`.
    ///
    /// # Errors
    /// This ticket again, if the transfer has not come to its end by then; what ended it early,
    /// with both sides.
    pub fn wait_until(self, deadline: Instant) -> Result<Result<T, Failed<T>>, Self> {
        match self.staged.wait_until(deadline) {
            Some(outcome) => Ok(self.give(outcome)),
            None => Err(self),
        }
    }

    /// What a transfer that is finished gives back.
    fn give(&self, outcome: Result<(), StageError>) -> Result<T, Failed<T>> {
        match (self.shelf.take(), outcome) {
            (Some(sides), Ok(())) => Ok(sides),
            (Some(sides), Err(error)) => Err(Failed { back: Some(sides), error }),
            (None, _) => Err(Failed { back: None, error: StageError::Taken }),
        }
    }
}

impl<T> Future for Ticket<T> {
    type Output = Result<T, Failed<T>>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let outcome = ready!(Pin::new(&mut self.staged).poll(context));
        Poll::Ready(self.give(outcome))
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

/// A ticket, or what was handed in and why nothing was begun.
pub type Begun<T> = Result<Ticket<T>, Failed<T>>;

impl Permit {
    /// Copies `from` to the device and owns both until that is done. Does not block, but for pinned
    /// memory when it is the first.
    ///
    /// # Errors
    /// [`Failed`] with both sides: lengths that differ, a conflicting use of `to`, the driver's.
    /// Nothing is begun.
    #[track_caller]
    pub fn upload<H, D>(self, mut from: H, mut to: D) -> Begun<(H, D)>
    where
        H: HostBuffer,
        D: Typed<Item = H::Item> + OperandMut + Send + 'static,
    {
        let _site = site::enter();
        let mut parts = Parts::new(Way::Up);
        let made = parts.slices([from.elements()], place(&to)).map_err(Into::into).and_then(|()| {
            let shared = self.shared.clone();
            // SAFETY: 1. both sides go on the shelf, which the transfer keeps, untouched, until it
            // is finished.
            unsafe {
                shared.transfer(parts, None, self, to.home_stream(), |front| {
                    to.order_mut(front.raw(), Some(front.keep_alive()), Access::Write)
                })
            }
        });
        ticket(made, (from, to), |shelf| shelf)
    }

    /// Copies `from` into `to` and owns both until that is done. Does not block, but for pinned
    /// memory when it is the first.
    ///
    /// # Errors
    /// [`Failed`] with both sides: lengths that differ, a conflicting use of `from`, the driver's.
    /// Nothing is begun.
    #[track_caller]
    pub fn download<H, D>(self, from: D, mut to: H) -> Begun<(D, H)>
    where
        H: HostBuffer,
        D: Typed<Item = H::Item> + Send + 'static,
    {
        let _site = site::enter();
        let mut parts = Parts::new(Way::Down);
        let made = parts.slices([to.elements()], place(&from)).map_err(Into::into).and_then(|()| {
            let shared = self.shared.clone();
            // SAFETY: 1. both sides go on the shelf, which the transfer keeps, untouched, until it
            // is finished.
            unsafe {
                shared.transfer(parts, None, self, from.home_stream(), |front| {
                    from.order(front.raw(), Some(front.keep_alive()), Access::Read)
                })
            }
        });
        ticket(made, (from, to), |shelf| shelf)
    }

    /// Fills `to` from `source`, from `offset` on, and owns it until that is done. Does not block,
    /// but for pinned memory when it is the first.
    ///
    /// # Errors
    /// [`Failed`] with `to`: a conflicting use of it, the driver's. Nothing is begun.
    #[track_caller]
    pub fn read<D>(self, source: Arc<dyn Source>, offset: u64, to: D) -> Begun<D>
    where
        D: Typed + OperandMut + Send + 'static,
        D::Item: Pod,
    {
        let end = offset.saturating_add(to.range().bytes);
        self.read_ranges(source, iter::once(offset..end), to)
    }

    /// Fills `to` from ranges of `source`, in bytes, each right behind the one before, and owns it
    /// until that is done.
    ///
    /// # Errors
    /// [`Failed`] with `to`: ranges that are not as long as it together, a conflicting use of it,
    /// the driver's. Nothing is begun.
    #[track_caller]
    pub fn read_ranges<D>(
        self,
        source: Arc<dyn Source>,
        from: impl IntoIterator<Item = Range<u64>>,
        mut to: D,
    ) -> Begun<D>
    where
        D: Typed + OperandMut + Send + 'static,
        D::Item: Pod,
    {
        let _site = site::enter();
        let mut parts = Parts::new(Way::Up);
        let made = parts.ranges(from, place(&to)).map_err(Into::into).and_then(|()| {
            let (shared, from) = (self.shared.clone(), Some(from_source(&*source)));
            // SAFETY: 1. the operand goes on the shelf, which the transfer keeps, untouched, until
            // it is finished, and the source with it.
            unsafe {
                shared.transfer(parts, from, self, to.home_stream(), |front| {
                    to.order_mut(front.raw(), Some(front.keep_alive()), Access::Write)
                })
            }
        });
        ticket(made, to, |shelf| Arc::new((shelf, source)))
    }

    /// Writes `from` to `sink`, from `offset` on, and owns it until that is done. Does not block,
    /// but for pinned memory when it is the first.
    ///
    /// # Errors
    /// [`Failed`] with `from`: a conflicting use of it, the driver's. Nothing is begun.
    #[track_caller]
    pub fn write<D>(self, from: D, sink: Arc<dyn Sink>, offset: u64) -> Begun<D>
    where
        D: Typed + Send + 'static,
        D::Item: Pod,
    {
        let _site = site::enter();
        let (mut parts, range) = (Parts::new(Way::Down), from.range());
        let to = iter::once(offset..offset.saturating_add(range.bytes));
        let made = parts.ranges(to, place(&from)).map_err(Into::into).and_then(|()| {
            let (shared, to) = (self.shared.clone(), Some(to_sink(&*sink)));
            // SAFETY: 1. the operand goes on the shelf, which the transfer keeps, untouched, until
            // it is finished, and the sink with it.
            unsafe {
                shared.transfer(parts, to, self, from.home_stream(), |front| {
                    from.order(front.raw(), Some(front.keep_alive()), Access::Read)
                })
            }
        });
        ticket(made, from, |shelf| Arc::new((shelf, sink)))
    }
}

/// Shelves what a transfer owns, and begins it.
fn ticket<T: Send + 'static>(
    made: Result<Arc<Transfer>, StageError>,
    sides: T,
    keep: impl FnOnce(Arc<Shelf<T>>) -> Keep,
) -> Begun<T> {
    let transfer = match made {
        Ok(transfer) => transfer,
        Err(error) => return Err(Failed { back: Some(sides), error }),
    };
    let shelf = Arc::new(Shelf(Mutex::new(Some(sides))));
    transfer.keep(keep(shelf.clone()));
    transfer.begin();
    Ok(Ticket { staged: Staged::begun(transfer), shelf, detached: false })
}

impl Stager {
    /// [`Permit::upload`], with a permit that is waited for. Blocks while too many transfers are
    /// under way.
    ///
    /// # Errors
    /// As there.
    #[track_caller]
    pub fn upload<H, D>(&self, from: H, to: D) -> Begun<(H, D)>
    where
        H: HostBuffer,
        D: Typed<Item = H::Item> + OperandMut + Send + 'static,
    {
        self.permit().upload(from, to)
    }

    /// [`Permit::download`], with a permit that is waited for. Blocks while too many transfers are
    /// under way.
    ///
    /// # Errors
    /// As there.
    #[track_caller]
    pub fn download<H, D>(&self, from: D, to: H) -> Begun<(D, H)>
    where
        H: HostBuffer,
        D: Typed<Item = H::Item> + Send + 'static,
    {
        self.permit().download(from, to)
    }

    /// [`Permit::read`], with a permit that is waited for. Blocks while too many transfers are
    /// under way.
    ///
    /// # Errors
    /// As there.
    #[track_caller]
    pub fn read<D>(&self, source: Arc<dyn Source>, offset: u64, to: D) -> Begun<D>
    where
        D: Typed + OperandMut + Send + 'static,
        D::Item: Pod,
    {
        self.permit().read(source, offset, to)
    }

    /// [`Permit::write`], with a permit that is waited for. Blocks while too many transfers are
    /// under way.
    ///
    /// # Errors
    /// As there.
    #[track_caller]
    pub fn write<D>(&self, from: D, sink: Arc<dyn Sink>, offset: u64) -> Begun<D>
    where
        D: Typed + Send + 'static,
        D::Item: Pod,
    {
        self.permit().write(from, sink, offset)
    }
}
