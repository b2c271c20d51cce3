//! Copies that borrow their host side.
#![expect(unsafe_code, reason = "queues copies of what is borrowed")]

use super::{CopyPlan, Direction};
use crate::Stream;
use aquifer_core::{MemoryError, Result};
use aquifer_driver::{Access, OperandMut, Typed, site};
use bytemuck::Pod;
use std::{
    fmt,
    marker::PhantomData,
    mem::ManuallyDrop,
    ptr::NonNull,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::Duration,
};

/// The pause between two checks whether a capture has ended.
const CAPTURE_PAUSE: Duration = Duration::from_micros(100);

impl Stream {
    /// Runs `work`, in which copies may borrow host memory. Returns when all of them are complete,
    /// also on unwind.
    ///
    /// Blocks at its end. The host side may be pageable. The driver then stages it, at a fraction
    /// of the link's bandwidth. If the stream began to capture a graph after copies were queued
    /// here, this call blocks until that capture has ended, because the driver refuses all waits
    /// before.
    ///
    /// If `work` may fail, the result is nested. [`Stream::try_scope`] flattens it.
    ///
    /// # Aborts
    /// Aborts the process with a message if the driver refuses every way to wait for five seconds
    /// and the device is not lost: see
    /// [`Timeline::settle_or_abort`](crate::Timeline::settle_or_abort).
    ///
    /// # Errors
    /// [`MemoryError::Capturing`] if the stream captures, in which case no copy was queued here.
    /// Driver errors if the device is lost. In both cases no copy of the scope is running.
    #[track_caller]
    pub fn scope<'env, R>(
        &'env self,
        work: impl for<'scope> FnOnce(&'scope CopyScope<'scope, 'env>) -> R,
    ) -> Result<R> {
        struct WaitForCopies<'a>(&'a Stream, &'a AtomicBool);
        impl WaitForCopies<'_> {
            /// Returns only when no copy can access borrowed memory, no matter how many waits are
            /// refused.
            fn wait(&self) -> Result<()> {
                loop {
                    match self.0.timeline().settle_or_abort() {
                        Err(MemoryError::Capturing { .. }) if self.1.load(Ordering::Relaxed) => {
                            thread::sleep(CAPTURE_PAUSE);
                        }
                        waited => return waited,
                    }
                }
            }
        }
        impl Drop for WaitForCopies<'_> {
            fn drop(&mut self) {
                // Only on unwind. The copies are complete, or the device is lost and runs nothing
                // any more.
                let _ = self.wait();
            }
        }
        let any_copy = AtomicBool::new(false);
        let on_unwind = WaitForCopies(self, &any_copy);
        // Calls inside the scope record their own call sites.
        let result = work(&CopyScope {
            stream: self,
            any_copy: &any_copy,
            scope: PhantomData,
            env: PhantomData,
        });
        let on_return = ManuallyDrop::new(on_unwind);
        let _site = site::enter();
        on_return.wait()?;
        Ok(result)
    }
}

impl Stream {
    /// Like [`Stream::scope`], for work that may fail. Returns one result, with the error of the
    /// work or of the wait at the end.
    ///
    /// ```
    /// use aquifer::{OperandMut, Stream, Typed, error::Result};
    /// fn there_and_back(s: &Stream, x: &mut (impl Typed<Item = u8> + OperandMut)) -> Result<Vec<u8>> {
    ///     let (up, mut down) = (vec![1; x.len()], vec![0; x.len()]);
    ///     s.try_scope(|c| {
    ///         c.upload(&up, x)?;
    ///         c.download(x, &mut down)?;
    ///         Ok(())
    ///     })?;
    ///     Ok(down)
    /// }
    /// ```
    ///
    /// # Errors
    /// As [`Stream::scope`], otherwise the error of `work`. All copies are complete in either case.
    #[track_caller]
    pub fn try_scope<'env, R>(
        &'env self,
        work: impl for<'scope> FnOnce(&'scope CopyScope<'scope, 'env>) -> Result<R>,
    ) -> Result<R> {
        let _site = site::enter();
        self.scope(work)?
    }
}

/// The handle inside [`Stream::scope`]. Its copies may borrow anything that outlives the scope.
///
/// ```
/// use aquifer::{OperandMut, Stream, Typed, error::Result};
///
/// fn there_and_back(s: &Stream, x: &mut (impl Typed<Item = u8> + OperandMut)) -> Result<u8> {
///     let (up, mut down) = (vec![1; x.len()], vec![0; x.len()]);
///     s.scope(|c| {
///         c.upload(&up, x)?;
///         c.download(x, &mut down)
///     })??;
///     Ok(down[0])
/// }
/// ```
///
/// Borrowed memory must outlive the scope:
///
/// ```compile_fail,E0597
/// # use aquifer::{OperandMut, Stream, Typed, error::Result};
/// fn too_short(s: &Stream, x: &mut (impl Typed<Item = u8> + OperandMut)) -> Result<()> {
///     s.scope(|c| {
///         let up = vec![1; x.len()];
///         c.upload(&up, x) // `up` is dropped before the copy is complete
///     })?
/// }
/// ```
///
/// The destination of a download stays borrowed until the scope ends:
///
/// ```compile_fail,E0502
/// # use aquifer::{Stream, Typed, error::Result};
/// fn too_early(s: &Stream, x: &impl Typed<Item = u8>) -> Result<u8> {
///     let mut down = vec![0; x.len()];
///     s.scope(|c| {
///         c.download(x, &mut down)?;
///         Ok(down[0]) // not copied yet
///     })?
/// }
/// ```
///
/// The scope itself cannot be moved out:
///
/// ```compile_fail,E0521
/// # use aquifer::{Stream, error::Result};
/// fn smuggled(s: &Stream) -> Result<()> {
///     let mut out = None;
///     s.scope(|c| out = Some(c))
/// }
/// ```
pub struct CopyScope<'scope, 'env: 'scope> {
    stream: &'env Stream,
    /// Whether a copy may have been queued.
    any_copy: &'scope AtomicBool,
    // Invariant in both lifetimes, so that neither can be shortened to let a borrow escape.
    scope: PhantomData<&'scope mut &'scope ()>,
    env: PhantomData<&'env mut &'env ()>,
}

impl<'scope, 'env> CopyScope<'scope, 'env> {
    /// Copies `from` to the device, in order on the scope's stream (`cuMemcpyHtoDAsync`).
    ///
    /// # Errors
    /// Lengths that differ, a conflicting use of `to`, [`MemoryError::Capturing`], and driver
    /// errors. Nothing is queued then.
    #[track_caller]
    pub fn upload<T, D>(&'scope self, from: &'env [T], to: &mut D) -> Result<()>
    where
        T: Pod,
        D: Typed<Item = T> + OperandMut,
    {
        let _site = site::enter();
        let plan = CopyPlan::new::<T>(
            self.stream,
            Direction::Upload,
            from.len(),
            (to.range(), to.machine()),
        )?;
        to.order_mut(self.stream.raw(), Some(self.stream.timeline().keep_alive()), Access::Write)?;
        self.any_copy.store(true, Ordering::Relaxed);
        // SAFETY: 1. `from` is borrowed for longer than the scope, which waits for the copy, and
        // `to` keeps its range. 2. `to` was ordered just above.
        unsafe { plan.queue(self.stream, NonNull::from(from).cast(), to.range().address) }
    }

    /// Copies `from` into `to`, in order on the scope's stream (`cuMemcpyDtoHAsync`). `to` stays
    /// borrowed until the scope ends.
    ///
    /// # Errors
    /// Lengths that differ, a conflicting use of `from`, [`MemoryError::Capturing`], and driver
    /// errors. Nothing is queued then.
    #[track_caller]
    pub fn download<T: Pod, D: Typed<Item = T>>(
        &'scope self,
        from: D,
        to: &'env mut [T],
    ) -> Result<()> {
        let _site = site::enter();
        let plan = CopyPlan::new::<T>(
            self.stream,
            Direction::Download,
            to.len(),
            (from.range(), from.machine()),
        )?;
        from.order(self.stream.raw(), Some(self.stream.timeline().keep_alive()), Access::Read)?;
        self.any_copy.store(true, Ordering::Relaxed);
        // SAFETY: 1. `to` is borrowed for longer than the scope, which waits for the copy, and
        // `from` keeps its range. 2. `from` was ordered just above.
        unsafe { plan.queue(self.stream, NonNull::from(to).cast(), from.range().address) }
    }

    /// Returns the stream of the scope.
    #[must_use]
    pub fn stream(&self) -> &Stream {
        self.stream
    }
}

impl fmt::Debug for CopyScope<'_, '_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Scope").field("stream", self.stream).finish_non_exhaustive()
    }
}
