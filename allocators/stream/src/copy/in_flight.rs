//! Copies that own their host side.
#![expect(unsafe_code, reason = "declares an unsafe trait, and queues copies of what it owns")]

use super::{CopyPlan, Direction};
use crate::{Point, Stream};
use allocator_api2::{boxed::Box as AllocBox, vec::Vec as AllocVec};
use aquifer_core::{DeferReuse, Gate, MemoryError, Result, wake::Opened};
use aquifer_driver::{Access, DeviceRange, OperandMut, Typed, site};
use bytemuck::Pod;
use std::{
    error, fmt,
    future::Future,
    mem::ManuallyDrop,
    pin::Pin,
    ptr::NonNull,
    sync::Arc,
    task::{Context, Poll},
    time::Instant,
};

#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot be owned by an asynchronous copy",
    label = "its memory could be freed or written while the device still uses it",
    note = "take a `vec::Vec` whose allocator can defer reuse, such as `PinnedPool::allocator`, a `PinnedBuf`, or a boxed slice of these",
    note = "a borrowed slice or a `std` vector is copied by `Stream::try_scope`, which waits before it returns"
)]
/// Host memory whose owner can be moved while a device reads or writes it.
///
/// See [`Stream::upload`](crate::Stream::upload) for an example.
///
/// # Safety
/// 1. [`HostOwned::bytes`] returns initialised memory that does not move when `self` is moved.
/// 2. After [`HostOwned::defer`] has returned `Ok`, the memory is not reused, written or unmapped
///    before the gate is open, whether `self` is dropped, freed or forgotten.
pub unsafe trait HostOwned {
    /// The type of the elements.
    type Item: Pod;

    /// Returns the elements.
    fn bytes(&mut self) -> NonNull<[Self::Item]>;

    /// Prevents reuse of the memory until `until` is open.
    ///
    /// # Errors
    /// The allocator's errors, if it did not allocate the memory.
    fn defer(&mut self, until: Arc<dyn Gate>) -> Result<()>;
}

// Implemented here for all allocators, because the orphan rule forbids their crates to implement it
// for a foreign `Vec`. SAFETY: 1. a vector's buffer does not move with the vector, and its elements
// are initialised. 2. `DeferReuse` guarantees it.
unsafe impl<T: Pod, A: DeferReuse> HostOwned for AllocVec<T, A> {
    type Item = T;
    fn bytes(&mut self) -> NonNull<[T]> {
        NonNull::from(&mut self[..])
    }
    fn defer(&mut self, until: Arc<dyn Gate>) -> Result<()> {
        if self.capacity() == 0 || size_of::<T>() == 0 {
            return Ok(());
        }
        let block = NonNull::from(&mut self[..]).cast();
        self.allocator().defer(block, until)
    }
}

// SAFETY: 1. a boxed slice does not move with its box, and its elements are initialised. 2.
// `DeferReuse` guarantees it.
unsafe impl<T: Pod, A: DeferReuse> HostOwned for AllocBox<[T], A> {
    type Item = T;
    fn bytes(&mut self) -> NonNull<[T]> {
        NonNull::from(&mut self[..])
    }
    fn defer(&mut self, until: Arc<dyn Gate>) -> Result<()> {
        if size_of_val(&self[..]) == 0 {
            return Ok(());
        }
        let block = NonNull::from(&mut self[..]).cast();
        AllocBox::allocator(self).defer(block, until)
    }
}

/// A copy that was not queued, with its host side.
///
/// `?` turns it into a [`MemoryError`] or a boxed error, and drops the host side. It implements no
/// [`Error`](error::Error) itself: a boxed error outlives the arena that a vector borrows.
///
/// ```
/// use aquifer::{OperandMut, Stream, Typed, stream::HostOwned};
/// use std::error::Error;
///
/// fn send<H: HostOwned>(s: &Stream, v: H, to: &mut (impl Typed<Item = H::Item> + OperandMut)) -> Result<(), Box<dyn Error>> {
///     drop(s.upload(v, to)?); // `v` may borrow its allocator
///     Ok(())
/// }
/// /// Returns what was not copied.
/// fn refused<H: HostOwned>(s: &Stream, v: H, to: &mut (impl Typed<Item = H::Item> + OperandMut)) -> Option<H> {
///     s.upload(v, to).err().map(|refused| refused.host)
/// }
/// ```
pub struct RefusedCopy<H> {
    /// The value that was passed in, unchanged.
    pub host: H,
    /// The reason.
    pub error: MemoryError,
}

impl<H> fmt::Debug for RefusedCopy<H> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}
impl<H> fmt::Display for RefusedCopy<H> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}
impl<H> From<RefusedCopy<H>> for MemoryError {
    fn from(refused: RefusedCopy<H>) -> Self {
        refused.error
    }
}
impl<H> From<RefusedCopy<H>> for Box<dyn error::Error> {
    fn from(refused: RefusedCopy<H>) -> Self {
        refused.error.into()
    }
}
impl<H> From<RefusedCopy<H>> for Box<dyn error::Error + Send + Sync> {
    fn from(refused: RefusedCopy<H>) -> Self {
        refused.error.into()
    }
}

/// A queued copy, which owns its host side until [`InFlight::wait`].
///
/// If it is dropped early, the host side is dropped too, and the allocator holds its block back
/// until the copy is complete. If it is forgotten, the block leaks.
///
/// ```
/// use allocator_api2::vec::Vec;
/// use aquifer::{DeferReuse, OperandMut, Stream, Typed, error::Result};
///
/// fn sum<A: DeferReuse>(s: &Stream, v: Vec<u8, A>, to: &mut (impl Typed<Item = u8> + OperandMut)) -> Result<u32> {
///     let flight = s.upload(v, to)?; // queued, the host continues
///     let v = flight.wait()?; // the same vector
///     Ok(v.iter().map(|&byte| u32::from(byte)).sum())
/// }
/// ```
///
/// The vector cannot be read during the copy, because it was moved:
///
/// ```compile_fail,E0382
/// # use allocator_api2::vec::Vec;
/// # use aquifer::{DeferReuse, OperandMut, Stream, Typed, error::Result};
/// fn sum<A: DeferReuse>(s: &Stream, v: Vec<u8, A>, to: &mut (impl Typed<Item = u8> + OperandMut)) -> Result<u32> {
///     let flight = s.upload(v, to)?;
///     Ok(v.iter().map(|&byte| u32::from(byte)).sum()) // moved into the flight
/// }
/// ```
///
/// A vector whose allocator cannot defer reuse is rejected:
///
/// ```compile_fail,E0277
/// # use allocator_api2::{alloc::Global, vec::Vec};
/// # use aquifer::{OperandMut, Stream, Typed, error::Result};
/// fn send(s: &Stream, v: Vec<u8, Global>, to: &mut (impl Typed<Item = u8> + OperandMut)) -> Result<()> {
///     drop(s.upload(v, to)?); // `Global: DeferReuse` does not hold
///     Ok(())
/// }
/// ```
///
/// It cannot be sent to another thread unless its host side can:
///
/// ```compile_fail,E0277
/// # use aquifer::stream::{HostOwned, InFlight};
/// fn wait_elsewhere<H: HostOwned + 'static>(flight: InFlight<H>) {
///     std::thread::spawn(move || flight.wait().map(drop)); // `H: Send` is not known
/// }
/// ```
#[must_use = "wait for it, or drop it on purpose"]
pub struct InFlight<H> {
    /// The device may be reading or writing it. Must not be accessed before `completed` is open.
    host: ManuallyDrop<H>,
    completed: Point,
}

impl<H> InFlight<H> {
    /// Returns whether the copy is complete. Never blocks.
    #[must_use]
    pub fn is_done(&self) -> bool {
        self.completed.is_open()
    }

    /// Waits until the copy is complete, and returns the host side. Blocks.
    ///
    /// # Errors
    /// Driver errors. The contents are unknown then, and the host side is dropped.
    #[track_caller]
    pub fn wait(self) -> Result<H> {
        let _site = site::enter();
        self.completed.wait(None)?;
        Ok(self.into_host())
    }

    /// Waits until the copy is complete or `deadline` has passed.
    ///
    /// # Errors
    /// Returns this value as the inner error if the copy is not complete by then. Driver errors as
    /// [`InFlight::wait`].
    #[track_caller]
    pub fn wait_until(self, deadline: Instant) -> Result<Result<H, Self>> {
        let _site = site::enter();
        if self.completed.wait(Some(deadline))? { Ok(Ok(self.into_host())) } else { Ok(Err(self)) }
    }

    fn into_host(self) -> H {
        let mut this = ManuallyDrop::new(self);
        // SAFETY: 1. `this` is never accessed again, so the point and the host side are each moved
        // or dropped once.
        unsafe {
            std::ptr::drop_in_place(&raw mut this.completed);
            ManuallyDrop::take(&mut this.host)
        }
    }
}

/// The future returns the host side when the copy is complete. It needs no runtime, see
/// [`aquifer_core::wake`].
///
/// ```
/// use allocator_api2::vec::Vec;
/// use aquifer::{DeferReuse, OperandMut, Stream, Typed, error::Result};
///
/// /// Other tasks run during the copy.
/// async fn send<A: DeferReuse>(s: &Stream, v: Vec<u8, A>, to: &mut (impl Typed<Item = u8> + OperandMut)) -> Result<Vec<u8, A>> {
///     s.upload(v, to)?.await
/// }
/// ```
impl<H> IntoFuture for InFlight<H> {
    type Output = Result<H>;
    type IntoFuture = Landing<H>;

    fn into_future(self) -> Landing<H> {
        let opened = self.completed.clone().into_future();
        Landing { flight: Some(self), opened }
    }
}

/// The future of an [`InFlight`] copy.
///
/// If it is dropped before it is ready, the host side returns to its allocator, which holds the
/// block back until the copy is complete. If it is forgotten, the host side leaks. Polled again
/// after it was ready, it stays pending.
#[must_use = "a future waits only while it is polled"]
pub struct Landing<H> {
    /// `None` after it was ready.
    flight: Option<InFlight<H>>,
    opened: Opened,
}

// The host side is moved out when the copy is complete, and nothing points into this value.
impl<H> Unpin for Landing<H> {}

impl<H> Future for Landing<H> {
    type Output = Result<H>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<H>> {
        let this = &mut *self;
        if this.flight.is_none() {
            return Poll::Pending;
        }
        match Pin::new(&mut this.opened).poll(context) {
            Poll::Pending => Poll::Pending,
            Poll::Ready(opened) => match this.flight.take() {
                Some(flight) => Poll::Ready(opened.map(|()| flight.into_host())),
                None => Poll::Pending,
            },
        }
    }
}

impl<H> fmt::Debug for Landing<H> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Landing").field("flight", &self.flight).finish_non_exhaustive()
    }
}

impl<H> Drop for InFlight<H> {
    fn drop(&mut self) {
        // SAFETY: 1. dropped only here: `into_host` does not run this destructor. The allocator
        // holds the memory back, and `H`'s elements are `Pod`, so dropping it reads none of them.
        unsafe { ManuallyDrop::drop(&mut self.host) }
    }
}

impl<H> fmt::Debug for InFlight<H> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("InFlight").field("completed", &self.completed).finish_non_exhaustive()
    }
}

impl Stream {
    /// Copies `from` to the device, in order on this stream (`cuMemcpyHtoDAsync`). Owns `from`
    /// until the copy is complete.
    ///
    /// # Errors
    /// [`RefusedCopy`], which contains `from`: lengths that differ, a conflicting use of `to`,
    /// [`MemoryError::Capturing`], and driver errors. Nothing is queued then.
    #[track_caller]
    pub fn upload<H, D>(&self, from: H, to: &mut D) -> Result<InFlight<H>, RefusedCopy<H>>
    where
        H: HostOwned,
        D: Typed<Item = H::Item> + OperandMut,
    {
        let _site = site::enter();
        let device_side = (to.range(), to.machine());
        let order = || to.order_mut(self.raw(), Some(self.timeline().keep_alive()), Access::Write);
        let flight = self.start_copy(from, Direction::Upload, device_side, order)?;
        Ok(flight)
    }

    /// Copies `from` into `to`, in order on this stream (`cuMemcpyDtoHAsync`). Owns `to` until the
    /// copy is complete.
    ///
    /// # Errors
    /// [`RefusedCopy`], which contains `to`: lengths that differ, a conflicting use of `from`,
    /// [`MemoryError::Capturing`], and driver errors. Nothing is queued then.
    #[track_caller]
    pub fn download<H, D>(&self, from: D, to: H) -> Result<InFlight<H>, RefusedCopy<H>>
    where
        H: HostOwned,
        D: Typed<Item = H::Item>,
    {
        let _site = site::enter();
        let order = || from.order(self.raw(), Some(self.timeline().keep_alive()), Access::Read);
        let flight =
            self.start_copy(to, Direction::Download, (from.range(), from.machine()), order)?;
        Ok(flight)
    }

    fn start_copy<H: HostOwned>(
        &self,
        mut host: H,
        direction: Direction,
        device_side: (DeviceRange, Option<u64>),
        order: impl FnOnce() -> Result<()>,
    ) -> Result<InFlight<H>, RefusedCopy<H>> {
        let completed = Point::ahead(self.timeline());
        let queue = |host: &mut H| -> Result<()> {
            let bytes = host.bytes();
            let plan = CopyPlan::new::<H::Item>(self, direction, bytes.len(), device_side)?;
            order()?;
            // The gate is passed before the copy is queued, and stays shut until then. If it were
            // passed afterwards and the allocator refused it, nothing would hold the memory of a
            // queued copy back.
            host.defer(Arc::new(completed.clone()))?;
            // SAFETY: 1. the flight owns `bytes`, which is held back until `completed` opens, and
            // the operand keeps its range for as long: their traits guarantee both. 2. `order` has
            // ordered this stream after every other use.
            unsafe { plan.queue(self, bytes.cast(), device_side.0.address) }
        };
        let queued = queue(&mut host);
        // Also if nothing was queued: the gate must not stay shut.
        completed.reached();
        match queued {
            Ok(()) => Ok(InFlight { host: ManuallyDrop::new(host), completed }),
            Err(error) => Err(RefusedCopy { host, error }),
        }
    }
}
