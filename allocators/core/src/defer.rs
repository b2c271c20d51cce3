//! The contract of an allocator whose freed blocks a device may still read: the only unsafe
//! declaration of this crate.
#![expect(
    unsafe_code,
    reason = "declares an unsafe trait and passes its promise on; holds no unsafe block"
)]

use crate::{__api::api2::alloc::Allocator, Result};
use std::{fmt::Debug, ptr::NonNull, sync::Arc, time::Instant};

/// An allocator that can delay the reuse of a freed block until a gate opens.
///
/// This makes asynchronous copies of a `Vec` safe: the vector may be dropped or forgotten during
/// the copy, and its bytes stay unchanged until the copy is done.
///
/// # Safety
/// After `defer` has returned `Ok`, the bytes of the block that contains `address` are neither
/// allocated again, nor written by the allocator, nor unmapped before `until` is open, whatever is
/// dropped, freed or forgotten in the meantime.
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot hold a freed block back until a device is done with it",
    label = "this allocator would give the block out again while a copy is on its way",
    note = "allocators of pinned memory can, and arenas and wrappers over them: `PinnedPool::allocator`",
    note = "memory of other allocators is copied by `Stream::try_scope`, which waits before it returns"
)]
pub unsafe trait DeferReuse: Allocator {
    /// Registers `until` for the live block of this allocator that contains `address`.
    ///
    /// # Errors
    /// [`ForeignBlock`](crate::MemoryError::ForeignBlock) if this allocator has not allocated
    /// `address`.
    fn defer(&self, address: NonNull<u8>, until: Arc<dyn Gate>) -> Result<()>;
}

// SAFETY: 1. the contract is that of the allocator behind the reference, which serves the same
// blocks.
unsafe impl<A: DeferReuse + ?Sized> DeferReuse for &A {
    fn defer(&self, address: NonNull<u8>, until: Arc<dyn Gate>) -> Result<()> {
        (**self).defer(address, until)
    }
}

/// A condition that becomes true once and stays true, such as a completed event.
///
/// Arenas wait for gates before a reset, and allocators before they reuse a block.
///
/// ```
/// use aquifer::{Gate, error::Result};
/// use std::{sync::atomic::{AtomicBool, Ordering}, thread, time::Instant};
/// /// Opens when another thread sets it.
/// #[derive(Debug)]
/// struct Flag(AtomicBool);
/// impl Gate for Flag {
///     fn is_open(&self) -> bool { self.0.load(Ordering::Acquire) }
///     fn wait(&self, deadline: Option<Instant>) -> Result<bool> {
///         while !self.is_open() && deadline.is_none_or(|at| Instant::now() < at) {
///             thread::yield_now();
///         }
///         Ok(self.is_open())
///     }
/// }
/// let flag = Flag(AtomicBool::new(false));
/// assert!(!flag.wait(Some(Instant::now()))?);
/// flag.0.store(true, Ordering::Release);
/// assert!(flag.wait(None)?);
/// # Ok::<(), aquifer::MemoryError>(())
/// ```
pub trait Gate: Debug + Send + Sync {
    /// Returns whether the gate is open now. Never blocks. An error of the driver counts as not
    /// open, and is returned by [`Gate::wait`].
    fn is_open(&self) -> bool;

    /// Blocks until the gate is open or `deadline` has passed (`None`: without a limit). Returns
    /// whether it is open.
    ///
    /// # Errors
    /// The driver's error if the state is unknown because the device is lost.
    fn wait(&self, deadline: Option<Instant>) -> Result<bool>;
}

/// Memory that serves one step of a loop and is then reset for another. A ring of frames holds
/// several of them.
///
/// See the example of `Frames` in aquifer-adapters, which is a ring of such memory.
pub trait StepMemory {
    /// Ends the step: all work that uses the memory has been queued. Records the end of that work,
    /// so that [`reset`](StepMemory::reset) waits for it and not for work queued later. May call
    /// the driver (`cuEventRecord`). Never blocks. Repeated calls have no effect.
    ///
    /// # Errors
    /// The driver's error. The call can be repeated.
    fn end_step(&mut self) -> Result<()>;

    /// Frees everything after the work that uses it is done. Blocks until then.
    ///
    /// # Errors
    /// The driver's error, or that of a use that was not ended. Nothing has changed then.
    fn reset(&mut self) -> Result<()>;

    /// Like [`reset`](StepMemory::reset), but only if the work is done. Returns whether it was.
    /// Never blocks.
    ///
    /// # Errors
    /// See [`reset`](StepMemory::reset).
    fn try_reset(&mut self) -> Result<bool>;
}
