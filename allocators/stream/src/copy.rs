//! Copies in safe code.
//!
//! A copy is queued and runs later, while Rust would let the host side be freed or written. So the host side is either
//! *owned* by the copy or *borrowed in a scope* that waits:
//!
//! - [`Stream::upload`] and [`Stream::download`] take it by value and answer with an [`InFlight`] that gives it back.
//!   Its allocator has promised ([`DeferReuse`]) to hold the block back until the copy is done, so the flight may be
//!   dropped, and the block goes home by itself; or forgotten, and the block is leaked. Neither is a race.
//! - [`Stream::scope`] lets copies borrow, and waits for them before it returns, also on unwind. A guard that waits when
//!   it is dropped would not do: it can be forgotten.
//!
//! The device side needs neither: its pool knows which streams use it.
#![expect(unsafe_code, reason = "calls the driver's asynchronous copies")]

use crate::{Point, Stream};
use allocator_api2::{boxed::Box as AllocBox, vec::Vec as AllocVec};
use aquifer_core::{DeferReuse, Gate, MemoryError, Result};
use aquifer_driver::{Access, Typed, site};
use bytemuck::Pod;
use std::{error, fmt, marker::PhantomData, mem::ManuallyDrop, ptr::NonNull, sync::Arc, time::Instant};

/// Host bytes with an owner that can be moved while a device reads or writes them.
///
/// # Safety
/// 1. [`HostOwned::bytes`] answers with initialised memory that stays where it is when `self` is moved.
/// 2. After [`HostOwned::defer`] has answered `Ok`, the memory is neither given out again, nor written, nor unmapped
///    before the gate is open, however `self` is dropped, freed or forgotten.
pub unsafe trait HostOwned {
    /// The elements' type.
    type Item: Pod;

    /// The elements.
    fn bytes(&mut self) -> NonNull<[Self::Item]>;

    /// Holds the memory back until `until` is open.
    ///
    /// # Errors
    /// The allocator's, when the memory is not its own.
    fn defer(&mut self, until: Arc<dyn Gate>) -> Result<()>;
}

// The orphan rule forbids the crate of an allocator to do this for a foreign `Vec`, so it is done here for all of them.
// SAFETY: 1. a vector's buffer does not move with the vector, and its elements are initialised.
// 2. `DeferReuse` promises it.
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

// SAFETY: 1. a boxed slice does not move with its box, and its elements are initialised.
// 2. `DeferReuse` promises it.
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

/// A copy that was not queued, with the host side it would have used.
pub struct Refused<H> {
    /// What was handed in, untouched.
    pub host: H,
    /// Why.
    pub error: MemoryError,
}

impl<H> fmt::Debug for Refused<H> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Refused").field("error", &self.error).finish_non_exhaustive()
    }
}
impl<H> fmt::Display for Refused<H> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}
impl<H> error::Error for Refused<H> {}
impl<H> From<Refused<H>> for MemoryError {
    fn from(refused: Refused<H>) -> Self {
        refused.error
    }
}

/// A copy on its way, which owns its host side until [`InFlight::wait`].
///
/// Dropped early, the host side is dropped too, and its allocator keeps the block until the copy is done. Forgotten, it
/// is leaked.
///
/// ```
/// use allocator_api2::vec::Vec;
/// use aquifer_core::{DeferReuse, Result};
/// use aquifer_driver::Typed;
/// use aquifer_stream::Stream;
///
/// fn sum<A: DeferReuse>(s: &Stream, v: Vec<u8, A>, to: &mut impl Typed<Item = u8>) -> Result<u32> {
///     let flight = s.upload(v, to)?; // queued; the host goes on
///     let v = flight.wait()?; // the vector again
///     Ok(v.iter().map(|&byte| u32::from(byte)).sum())
/// }
/// ```
///
/// While it is on its way the vector cannot be looked at, since it is not there:
///
/// ```compile_fail,E0382
/// # use allocator_api2::vec::Vec;
/// # use aquifer_core::{DeferReuse, Result};
/// # use aquifer_driver::Typed;
/// # use aquifer_stream::Stream;
/// fn sum<A: DeferReuse>(s: &Stream, v: Vec<u8, A>, to: &mut impl Typed<Item = u8>) -> Result<u32> {
///     let flight = s.upload(v, to)?;
///     Ok(v.iter().map(|&byte| u32::from(byte)).sum()) // moved into the flight
/// }
/// ```
///
/// And a vector whose allocator could not hold its block back does not fly:
///
/// ```compile_fail,E0277
/// # use allocator_api2::{alloc::Global, vec::Vec};
/// # use aquifer_core::Result;
/// # use aquifer_driver::Typed;
/// # use aquifer_stream::Stream;
/// fn send(s: &Stream, v: Vec<u8, Global>, to: &mut impl Typed<Item = u8>) -> Result<()> {
///     drop(s.upload(v, to)?); // `Global: DeferReuse` does not hold
///     Ok(())
/// }
/// ```
#[must_use = "wait for it, or drop it on purpose"]
pub struct InFlight<H> {
    /// The device may be reading or writing it: not to be looked at before the point is reached.
    host: ManuallyDrop<H>,
    landed: Point,
}

impl<H> InFlight<H> {
    /// Whether the copy is done. Never blocks.
    #[must_use]
    pub fn is_done(&self) -> bool {
        self.landed.is_open()
    }

    /// Waits for the copy and gives the host side back. Blocks.
    ///
    /// # Errors
    /// The driver's: what the bytes are is not known then, and the host side is dropped.
    #[track_caller]
    pub fn wait(self) -> Result<H> {
        let _site = site::enter();
        self.landed.wait(None)?;
        Ok(self.into_host())
    }

    /// Waits until `deadline`.
    ///
    /// # Errors
    /// This flight again, if the copy is not done by then; the driver's as [`InFlight::wait`].
    #[track_caller]
    pub fn wait_until(self, deadline: Instant) -> Result<Result<H, Self>> {
        let _site = site::enter();
        if self.landed.wait(Some(deadline))? { Ok(Ok(self.into_host())) } else { Ok(Err(self)) }
    }

    fn into_host(self) -> H {
        let mut this = ManuallyDrop::new(self);
        // SAFETY: 1. `this` is never touched again, so the point and the host side are each moved or dropped once.
        unsafe {
            std::ptr::drop_in_place(&raw mut this.landed);
            ManuallyDrop::take(&mut this.host)
        }
    }
}

impl<H> Drop for InFlight<H> {
    fn drop(&mut self) {
        // SAFETY: 1. dropped here and nowhere else: `into_host` does not run this. Its memory is held back by its
        // allocator, and `H`'s elements are `Pod`, so dropping it reads none of them.
        unsafe { ManuallyDrop::drop(&mut self.host) }
    }
}

impl<H> fmt::Debug for InFlight<H> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("InFlight").field("landed", &self.landed).finish_non_exhaustive()
    }
}

#[derive(Clone, Copy, PartialEq)]
enum Direction {
    Up,
    Down,
}

impl Stream {
    /// Copies `from` to the device, in order on this stream. Owns `from` until the copy is done.
    ///
    /// # Errors
    /// [`Refused`] with `from` in it: lengths that differ, a conflicting use of `to`, the driver's. Nothing is queued.
    #[track_caller]
    pub fn upload<H, D>(&self, from: H, to: &mut D) -> Result<InFlight<H>, Refused<H>>
    where
        H: HostOwned,
        D: Typed<Item = H::Item>,
    {
        let _site = site::enter();
        self.fly(from, to, Direction::Up)
    }

    /// Copies `from` into `to`, in order on this stream. Owns `to` until the copy is done.
    ///
    /// # Errors
    /// [`Refused`] with `to` in it: lengths that differ, a conflicting use of `from`, the driver's. Nothing is queued.
    #[track_caller]
    pub fn download<H, D>(&self, from: &D, to: H) -> Result<InFlight<H>, Refused<H>>
    where
        H: HostOwned,
        D: Typed<Item = H::Item>,
    {
        let _site = site::enter();
        self.fly(to, from, Direction::Down)
    }

    fn fly<H, D>(&self, mut host: H, device: &D, way: Direction) -> Result<InFlight<H>, Refused<H>>
    where
        H: HostOwned,
        D: Typed<Item = H::Item>,
    {
        let landed = Point::ahead(self.timeline());
        let queue = |host: &mut H| -> Result<()> {
            let bytes = host.bytes();
            self.check(device, size_of::<H::Item>() * bytes.len(), way)?;
            // The gate is given before the copy is queued, and stays shut until it is: a gate made after would leave a
            // copy on its way with nobody to wait for it, should the allocator refuse.
            host.defer(Arc::new(landed.clone()))?;
            // SAFETY: 1. `bytes` is the flight's, and held back until `landed` opens; `device` keeps its range for as
            // long, both by the promises of their traits. 2. `order` has put this stream behind every other use.
            unsafe { self.copy_now(device, bytes.cast(), size_of::<H::Item>() * bytes.len(), way) }
        };
        let queued = queue(&mut host);
        // Also where nothing was queued: the gate must not stay shut.
        landed.reached();
        match queued {
            Ok(()) => Ok(InFlight { host: ManuallyDrop::new(host), landed }),
            Err(error) => Err(Refused { host, error }),
        }
    }

    /// Orders `device` for a copy of `bytes` on this stream.
    fn check<D: Typed + ?Sized>(&self, device: &D, bytes: usize, way: Direction) -> Result<()> {
        let range = device.range();
        if range.device != self.device() {
            return Err(MemoryError::WrongDevice { expected: self.device(), actual: range.device });
        }
        if range.bytes != bytes as u64 {
            let (from, to) =
                if way == Direction::Up { (bytes as u64, range.bytes) } else { (range.bytes, bytes as u64) };
            return Err(MemoryError::LengthMismatch { from, to });
        }
        device.order(self.raw(), None, if way == Direction::Up { Access::Write } else { Access::Read })
    }

    /// # Safety
    /// 1. `host` and `device`'s range are valid until the copy is done. 2. The operand has been ordered for it.
    unsafe fn copy_now<D: Typed + ?Sized>(
        &self,
        device: &D,
        host: NonNull<u8>,
        bytes: usize,
        way: Direction,
    ) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        let address = device.range().address;
        let _calling = self.timeline().calling()?;
        let copied = match way {
            // SAFETY: 1. and 2. the caller's.
            Direction::Up => unsafe { self.driver().copy_to_device(self.raw(), address, host, bytes) },
            // SAFETY: 1. and 2. the caller's.
            Direction::Down => unsafe { self.driver().copy_to_host(self.raw(), host, address, bytes) },
        };
        copied.map_err(|e| MemoryError::driver(self.device(), e))
    }

    /// Copies between two operands of this device, in order on this stream, whichever streams they were used on before.
    ///
    /// # Errors
    /// Lengths that differ, a conflicting use, the driver's. Nothing is queued.
    #[track_caller]
    pub fn copy<T: Pod, S: Typed<Item = T>, D: Typed<Item = T>>(&self, from: &S, to: &mut D) -> Result<()> {
        let _site = site::enter();
        let (source, target) = (from.range(), to.range());
        for side in [source, target] {
            if side.device != self.device() {
                return Err(MemoryError::WrongDevice { expected: self.device(), actual: side.device });
            }
        }
        if source.bytes != target.bytes {
            return Err(MemoryError::LengthMismatch { from: source.bytes, to: target.bytes });
        }
        from.order(self.raw(), None, Access::Read)?;
        to.order(self.raw(), None, Access::Write)?;
        if source.bytes == 0 {
            return Ok(());
        }
        let _calling = self.timeline().calling()?;
        // SAFETY: 1. and 2. the operands keep their ranges, and have been ordered for this access on this stream.
        let copied =
            unsafe { self.driver().copy_on_device(self.raw(), target.address, source.address, source.bytes) };
        copied.map_err(|e| MemoryError::driver(self.device(), e))
    }

    /// Fills `to` with one byte, in order on this stream.
    ///
    /// # Errors
    /// A conflicting use, the driver's. Nothing is queued.
    #[track_caller]
    pub fn fill<D: Typed + ?Sized>(&self, to: &mut D, byte: u8) -> Result<()>
    where
        D::Item: Pod,
    {
        let _site = site::enter();
        let range = to.range();
        if range.device != self.device() {
            return Err(MemoryError::WrongDevice { expected: self.device(), actual: range.device });
        }
        to.order(self.raw(), None, Access::Write)?;
        if range.bytes == 0 {
            return Ok(());
        }
        let _calling = self.timeline().calling()?;
        // SAFETY: 1. and 2. the operand keeps its range, and has been ordered for this access on this stream.
        let filled = unsafe { self.driver().fill(self.raw(), range.address, byte, range.bytes) };
        filled.map_err(|e| MemoryError::driver(self.device(), e))
    }

    /// Runs `work`, in which copies may borrow host memory, and returns when all of them are done, also on unwind.
    ///
    /// Blocks at its end. The host side may be pageable; the driver then stages it, at a fraction of the link's speed.
    ///
    /// # Errors
    /// The driver's, when the stream cannot be waited for: the device is lost.
    #[track_caller]
    pub fn scope<'env, R>(
        &'env self,
        work: impl for<'scope> FnOnce(&'scope Scope<'scope, 'env>) -> R,
    ) -> Result<R> {
        struct Settle<'a>(&'a Stream);
        impl Drop for Settle<'_> {
            fn drop(&mut self) {
                // On unwind only. A refusal means a lost device, on which nothing runs any more.
                let _ = self.0.timeline().settle();
            }
        }
        let _site = site::enter();
        let unwound = Settle(self);
        let result = work(&Scope { stream: self, scope: PhantomData, env: PhantomData });
        let _returned = ManuallyDrop::new(unwound);
        // By every means: what is borrowed must not be left to a copy because one wait was refused.
        self.timeline().settle()?;
        Ok(result)
    }
}

/// Inside [`Stream::scope`]: copies here may borrow whatever outlives the scope.
///
/// ```
/// use aquifer_core::Result;
/// use aquifer_driver::Typed;
/// use aquifer_stream::Stream;
///
/// fn there_and_back(s: &Stream, x: &mut impl Typed<Item = u8>) -> Result<u8> {
///     let (up, mut down) = (vec![1; x.len()], vec![0; x.len()]);
///     s.scope(|c| {
///         c.upload(&up, x)?;
///         c.download(x, &mut down)
///     })??;
///     Ok(down[0])
/// }
/// ```
///
/// What is borrowed must outlive the scope:
///
/// ```compile_fail,E0597
/// # use aquifer_core::Result;
/// # use aquifer_driver::Typed;
/// # use aquifer_stream::Stream;
/// fn too_short(s: &Stream, x: &mut impl Typed<Item = u8>) -> Result<()> {
///     s.scope(|c| {
///         let up = vec![1; x.len()];
///         c.upload(&up, x) // `up` ends before the copy may have
///     })?
/// }
/// ```
///
/// What a download writes is the download's until the scope has ended:
///
/// ```compile_fail,E0502
/// # use aquifer_core::Result;
/// # use aquifer_driver::Typed;
/// # use aquifer_stream::Stream;
/// fn too_early(s: &Stream, x: &impl Typed<Item = u8>) -> Result<u8> {
///     let mut down = vec![0; x.len()];
///     s.scope(|c| {
///         c.download(x, &mut down)?;
///         Ok(down[0]) // not there yet
///     })?
/// }
/// ```
///
/// And the scope itself stays inside:
///
/// ```compile_fail,E0521
/// # use aquifer_core::Result;
/// # use aquifer_stream::Stream;
/// fn smuggled(s: &Stream) -> Result<()> {
///     let mut out = None;
///     s.scope(|c| out = Some(c))
/// }
/// ```
pub struct Scope<'scope, 'env: 'scope> {
    stream: &'env Stream,
    // Invariant in both, so that neither can be shortened to let a borrow out.
    scope: PhantomData<&'scope mut &'scope ()>,
    env: PhantomData<&'env mut &'env ()>,
}

impl<'scope, 'env> Scope<'scope, 'env> {
    /// Copies `from` to the device, in order on the scope's stream.
    ///
    /// # Errors
    /// Lengths that differ, a conflicting use of `to`, the driver's. Nothing is queued.
    pub fn upload<T: Pod, D: Typed<Item = T>>(&'scope self, from: &'env [T], to: &mut D) -> Result<()> {
        let bytes = size_of_val(from);
        self.stream.check(to, bytes, Direction::Up)?;
        // SAFETY: 1. `from` is borrowed for longer than the scope, which waits for the copy; `to` keeps its range.
        // 2. it has just been ordered.
        unsafe { self.stream.copy_now(to, NonNull::from(from).cast(), bytes, Direction::Up) }
    }

    /// Copies `from` into `to`, in order on the scope's stream. `to` is the scope's until it ends.
    ///
    /// # Errors
    /// Lengths that differ, a conflicting use of `from`, the driver's. Nothing is queued.
    pub fn download<T: Pod, D: Typed<Item = T>>(&'scope self, from: &D, to: &'env mut [T]) -> Result<()> {
        let bytes = size_of_val(to);
        self.stream.check(from, bytes, Direction::Down)?;
        // SAFETY: 1. `to` is borrowed for longer than the scope, which waits for the copy; `from` keeps its range.
        // 2. it has just been ordered.
        unsafe { self.stream.copy_now(from, NonNull::from(to).cast(), bytes, Direction::Down) }
    }

    /// The stream that copies are queued on.
    #[must_use]
    pub fn stream(&self) -> &Stream {
        self.stream
    }
}

impl fmt::Debug for Scope<'_, '_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Scope").field("stream", self.stream).finish_non_exhaustive()
    }
}
