//! A ring of arenas, one for each step in flight.
//!
//! ```text
//!   host       step 0 │ step 1 │ step 2 │ waits │ step 3 │ …     three frames
//!   device              └──── work of step 0 ───┘
//! ```
//!
//! The host runs ahead of the device by at most as many steps as there are frames. The end of each
//! step is recorded immediately, by an event behind its work. An event recorded only when the frame
//! is reused would also cover the later steps, and the host would wait for all of them.

use crate::{Arena, ArenaSettings};
use allocator_api2::alloc::{Allocator, Global};
use aquifer_core::{Result, StepMemory, wake::Alarm};
use std::{
    future::Future,
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

/// The first and the longest pause between two polls of a frame by a future.
const POLL_PAUSES: (Duration, Duration) = (Duration::from_micros(20), Duration::from_millis(1));

/// A ring of arenas for work in steps, where earlier steps may still be in progress.
///
/// Each call of [`next`](Frames::next) returns the least recently used arena, empty. If a device
/// still uses its memory, the call waits for that step only: with three frames, for the step three
/// steps ago.
///
/// ```
/// use aquifer::Frames;
/// use allocator_api2::{alloc::Global, vec::Vec};
/// let mut frames = Frames::new_in(3, Global);
/// for step in 0..10u32 {
///     let frame = frames.next()?;
///     let mut batch = Vec::new_in(frame.arena());
///     batch.extend([step; 100]);
/// }
/// # Ok::<(), aquifer::MemoryError>(())
/// ```
///
/// For frames of device memory, create the device arenas and pass them to [`Frames::of`].
#[derive(Debug)]
pub struct Frames<M = Arena<Global>> {
    /// Never empty.
    ring: Vec<M>,
    /// The index of the next frame.
    at: usize,
}

/// One arena of a ring, for one step.
///
/// See [`Frames`] for an example.
#[derive(Debug)]
pub struct Frame<'f, M = Arena<Global>> {
    arena: &'f mut M,
}

impl<A: Allocator + Clone> Frames<Arena<A>> {
    /// Creates a ring of `count` arenas, at least one, over clones of `upstream`. Allocates nothing
    /// yet.
    pub fn new_in(count: usize, upstream: A) -> Self {
        Self::with_settings_in(count, ArenaSettings::new(), upstream)
    }

    /// Creates a ring of `count` arenas, at least one. Each takes its chunks according to
    /// `settings`.
    pub fn with_settings_in(count: usize, settings: ArenaSettings, upstream: A) -> Self {
        let first = Arena::with_settings_in(settings, upstream.clone());
        Self::of(first, (1..count).map(|_| Arena::with_settings_in(settings, upstream.clone())))
    }
}

impl<M: StepMemory> Frames<M> {
    /// Creates a ring of these arenas, in this order.
    pub fn of(first: M, others: impl IntoIterator<Item = M>) -> Self {
        let mut ring = vec![first];
        ring.extend(others);
        Self { ring, at: 0 }
    }

    /// Ends the current step, and returns the least recently used arena, empty. Waits until no
    /// device uses the memory of that arena.
    ///
    /// # Errors
    /// As the arena's `reset`, or [`StepMemory::end_step`]. The next call returns the same frame.
    #[expect(
        clippy::should_implement_trait,
        reason = "a frame borrows the ring, which no iterator can say"
    )]
    pub fn next(&mut self) -> Result<Frame<'_, M>> {
        let (count, at) = (self.ring.len(), self.at);
        self.ring[(at + count - 1) % count].end_step()?;
        self.ring[at].reset()?;
        self.at = (at + 1) % count;
        Ok(Frame { arena: &mut self.ring[at] })
    }

    /// Like [`Frames::next`], as a future: it does not block while a device uses the arena's
    /// memory. If the future is dropped before it is ready, the next call returns the same frame.
    ///
    /// ```
    /// use aquifer::Frames;
    /// use allocator_api2::{alloc::Global, vec::Vec};
    /// async fn steps() -> aquifer::error::Result<()> {
    ///     let mut frames = Frames::new_in(3, Global);
    ///     for step in 0..10u32 {
    ///         let frame = frames.next_async().await?;
    ///         let mut batch = Vec::new_in(frame.arena());
    ///         batch.extend([step; 100]);
    ///     }
    ///     Ok(())
    /// }
    /// ```
    pub fn next_async(&mut self) -> NextFrame<'_, M> {
        NextFrame { ring: Some(self), pause: POLL_PAUSES.0, alarm: Alarm::new() }
    }

    /// Returns the number of arenas in the ring.
    #[must_use]
    pub fn count(&self) -> usize {
        self.ring.len()
    }
}

/// The future of [`Frames::next_async`]. It needs no runtime. It resolves to the result of
/// [`Frames::next`], and stays pending if it is polled after that.
#[derive(Debug)]
#[must_use = "a future waits only while it is polled"]
pub struct NextFrame<'f, M = Arena<Global>> {
    /// `None` after it was ready.
    ring: Option<&'f mut Frames<M>>,
    pause: Duration,
    alarm: Alarm,
}

impl<'f, M: StepMemory> Future for NextFrame<'f, M> {
    type Output = Result<Frame<'f, M>>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let this = &mut *self;
        let Some(ring) = this.ring.take() else { return Poll::Pending };
        let (count, at) = (ring.ring.len(), ring.at);
        let ready =
            ring.ring[(at + count - 1) % count].end_step().and_then(|()| ring.ring[at].try_reset());
        match ready {
            Ok(true) => {
                ring.at = (at + 1) % count;
                Poll::Ready(Ok(Frame { arena: &mut ring.ring[at] }))
            }
            Ok(false) => {
                this.ring = Some(ring);
                this.alarm.after(this.pause, context.waker());
                this.pause = (this.pause * 2).min(POLL_PAUSES.1);
                Poll::Pending
            }
            Err(error) => Poll::Ready(Err(error)),
        }
    }
}

impl<'f, M> Frame<'f, M> {
    /// Returns the arena of this step.
    #[must_use]
    pub fn arena(&self) -> &M {
        self.arena
    }

    /// Returns the arena of this step mutably, to open a [`scope`](Arena::scope).
    pub fn arena_mut(&mut self) -> &mut M {
        self.arena
    }

    /// Returns the arena of this step for as long as the ring is borrowed.
    #[must_use]
    pub fn into_arena(self) -> &'f M {
        self.arena
    }
}
