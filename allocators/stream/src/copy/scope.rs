//! Copies that borrow their host side.
#![expect(unsafe_code, reason = "queues copies of what is borrowed")]

use super::{Direction, Grid, Plan};
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

/// Between two looks whether a capture has ended.
const CAPTURE_PAUSE: Duration = Duration::from_micros(100);

impl Stream {
    /// Runs `work`, in which copies may borrow host memory, and returns when all of them are done,
    /// also on unwind.
    ///
    /// Blocks at its end. The host side may be pageable; the driver then stages it, at a fraction
    /// of the link's speed. If the stream has begun to capture a graph behind copies that were
    /// queued here, it blocks until that capture has ended: nothing can be waited for before.
    ///
    /// # Aborts
    /// Ends the process with a message if the driver refuses every way to wait for ten seconds, and
    /// the device is not lost: see [`Timeline::settle_or_abort`](crate::Timeline::settle_or_abort).
    ///
    /// Work that may fail returns a result in a result; [`Stream::try_scope`] makes one of them.
    ///
    /// # Errors
    /// [`MemoryError::Capturing`] if the stream captures, and so no copy was queued here; the
    /// driver's, when the device is lost. No copy of the scope runs any more.
    #[track_caller]
    pub fn scope<'env, R>(
        &'env self,
        work: impl for<'scope> FnOnce(&'scope Scope<'scope, 'env>) -> R,
    ) -> Result<R> {
        struct Settle<'a>(&'a Stream, &'a AtomicBool);
        impl Settle<'_> {
            /// Returns only when no copy can touch what is borrowed, however many waits are
            /// refused.
            fn settle(&self) -> Result<()> {
                loop {
                    match self.0.timeline().settle_or_abort() {
                        Err(MemoryError::Capturing { .. }) if self.1.load(Ordering::Relaxed) => {
                            thread::sleep(CAPTURE_PAUSE);
                        }
                        settled => return settled,
                    }
                }
            }
        }
        impl Drop for Settle<'_> {
            fn drop(&mut self) {
                // On unwind only. What was copied is done, or the device is lost and runs nothing
                // any more.
                let _ = self.settle();
            }
        }
        let copied = AtomicBool::new(false);
        let unwound = Settle(self, &copied);
        // What is called inside names its own lines.
        let result =
            work(&Scope { stream: self, copied: &copied, scope: PhantomData, env: PhantomData });
        let returned = ManuallyDrop::new(unwound);
        let site = site::enter();
        returned.settle()?;
        site.checkpoint(&**self.driver());
        Ok(result)
    }
}

impl Stream {
    /// As [`Stream::scope`], for work that may fail: one result, with the error of the work or of
    /// the wait at its end.
    ///
    /// ```
    /// use aquifer_core::Result;
    /// use aquifer_driver::{OperandMut, Typed};
    /// use aquifer_stream::Stream;
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
    /// As [`Stream::scope`]; else what `work` returned. All copies are done in either case.
    #[track_caller]
    pub fn try_scope<'env, R>(
        &'env self,
        work: impl for<'scope> FnOnce(&'scope Scope<'scope, 'env>) -> Result<R>,
    ) -> Result<R> {
        let _site = site::enter();
        self.scope(work)?
    }
}

/// Inside [`Stream::scope`]: copies here may borrow whatever outlives the scope.
///
/// ```
/// use aquifer_core::Result;
/// use aquifer_driver::{OperandMut, Typed};
/// use aquifer_stream::Stream;
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
/// What is borrowed must outlive the scope:
///
/// ```compile_fail,E0597
/// # use aquifer_core::Result;
/// # use aquifer_driver::{OperandMut, Typed};
/// # use aquifer_stream::Stream;
/// fn too_short(s: &Stream, x: &mut (impl Typed<Item = u8> + OperandMut)) -> Result<()> {
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
    /// Whether a copy may have been queued.
    copied: &'scope AtomicBool,
    // Invariant in both, so that neither can be shortened to let a borrow out.
    scope: PhantomData<&'scope mut &'scope ()>,
    env: PhantomData<&'env mut &'env ()>,
}

impl<'scope, 'env> Scope<'scope, 'env> {
    /// Copies `from` to the device, in order on the scope's stream (`cuMemcpyHtoDAsync`).
    ///
    /// # Errors
    /// Lengths that differ, a conflicting use of `to`,
    /// [`MemoryError::Capturing`], the driver's. Nothing is queued.
    #[track_caller]
    pub fn upload<T, D>(&'scope self, from: &'env [T], to: &mut D) -> Result<()>
    where
        T: Pod,
        D: Typed<Item = T> + OperandMut,
    {
        let _site = site::enter();
        self.up(from, to, None)
    }

    /// Copies `from` into `to`, in order on the scope's stream (`cuMemcpyDtoHAsync`). `to` is the
    /// scope's until it ends.
    ///
    /// # Errors
    /// Lengths that differ, a conflicting use of `from`,
    /// [`MemoryError::Capturing`], the driver's. Nothing is queued.
    #[track_caller]
    pub fn download<T: Pod, D: Typed<Item = T>>(
        &'scope self,
        from: &D,
        to: &'env mut [T],
    ) -> Result<()> {
        let _site = site::enter();
        self.down(from, to, None)
    }

    /// Copies the rows of `grid` from `from` to the device, in order on the scope's stream
    /// (`cuMemcpy2DAsync`).
    ///
    /// # Errors
    /// Rows that do not lie in one of the sides, a conflicting use of `to`,
    /// [`MemoryError::Capturing`], the driver's. Nothing is queued.
    #[track_caller]
    pub fn upload_2d<T, D>(&'scope self, from: &'env [T], to: &mut D, grid: Grid) -> Result<()>
    where
        T: Pod,
        D: Typed<Item = T> + OperandMut,
    {
        let _site = site::enter();
        self.up(from, to, Some(grid))
    }

    /// Copies the rows of `grid` from `from` into `to`, in order on the scope's stream
    /// (`cuMemcpy2DAsync`). `to` is the scope's until it ends; what lies between its rows stays as
    /// it is.
    ///
    /// # Errors
    /// Rows that do not lie in one of the sides, a conflicting use of `from`,
    /// [`MemoryError::Capturing`], the driver's. Nothing is queued.
    #[track_caller]
    pub fn download_2d<T, D>(&'scope self, from: &D, to: &'env mut [T], grid: Grid) -> Result<()>
    where
        T: Pod,
        D: Typed<Item = T>,
    {
        let _site = site::enter();
        self.down(from, to, Some(grid))
    }

    fn up<T, D>(&self, from: &'env [T], to: &mut D, grid: Option<Grid>) -> Result<()>
    where
        T: Pod,
        D: Typed<Item = T> + OperandMut,
    {
        let plan = Plan::new::<T>(
            self.stream,
            Direction::Up,
            from.len(),
            (to.range(), to.machine()),
            grid,
        )?;
        to.order_mut(self.stream.raw(), Some(self.stream.timeline().keep_alive()), Access::Write)?;
        self.copied.store(true, Ordering::Relaxed);
        // SAFETY: 1. `from` is borrowed for longer than the scope, which waits for the copy; `to`
        // keeps its range.
        // 2. it has just been ordered.
        unsafe { plan.queue(self.stream, NonNull::from(from).cast(), to.range().address) }
    }

    fn down<T, D>(&self, from: &D, to: &'env mut [T], grid: Option<Grid>) -> Result<()>
    where
        T: Pod,
        D: Typed<Item = T>,
    {
        let plan = Plan::new::<T>(
            self.stream,
            Direction::Down,
            to.len(),
            (from.range(), from.machine()),
            grid,
        )?;
        from.order(self.stream.raw(), Some(self.stream.timeline().keep_alive()), Access::Read)?;
        self.copied.store(true, Ordering::Relaxed);
        // SAFETY: 1. `to` is borrowed for longer than the scope, which waits for the copy; `from`
        // keeps its range.
        // 2. it has just been ordered.
        unsafe { plan.queue(self.stream, NonNull::from(to).cast(), from.range().address) }
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
