//! A ring of arenas, one for each step in flight.
//!
//! ```text
//!   host       step 0 │ step 1 │ step 2 │ waits │ step 3 │ …     three frames
//!   device              └──── work of step 0 ───┘
//! ```
//!
//! The host runs ahead of the device by as many steps as there are frames, and no further. What a
//! step is waited for is noted when it ends, by an event behind its work: one that is recorded when
//! somebody waits would come after the steps that followed, and the host would wait for all of
//! them.

use crate::{Arena, ArenaSettings};
use allocator_api2::alloc::{Allocator, Global};
use aquifer_core::{Result, StepMemory, wake::Alarm};
use std::{
    future::Future,
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

/// The first pause before a future looks again whether a frame's work is done, and the longest.
const PAUSES: (Duration, Duration) = (Duration::from_micros(20), Duration::from_millis(1));

/// A ring of arenas for work that is done in steps while the steps before are still being copied or
/// computed.
///
/// Each call of [`next`](Frames::next) gives the arena that was used longest ago, empty. If a
/// device still uses what lay in it, the call waits: with three frames, for the step three ago, and
/// for nothing that came after that.
///
/// ```
/// use aquifer_adapters::Frames;
/// use allocator_api2::{alloc::Global, vec::Vec};
/// let mut frames = Frames::new_in(3, Global);
/// for step in 0..10u32 {
///     let frame = frames.next()?;
///     let mut batch = Vec::new_in(frame.arena());
///     batch.extend([step; 100]);
/// }
/// # Ok::<(), aquifer_core::MemoryError>(())
/// ```
///
/// Frames of device memory are a ring of the device's own arenas, made one by one: [`Frames::of`].
#[derive(Debug)]
pub struct Frames<M = Arena<Global>> {
    /// Never empty.
    ring: Vec<M>,
    /// The frame that is next.
    at: usize,
}

/// One arena of a ring, for one step.
///
/// Its example is that of [`Frames`].
#[derive(Debug)]
pub struct Frame<'f, M = Arena<Global>> {
    arena: &'f mut M,
}

impl<A: Allocator + Clone> Frames<Arena<A>> {
    /// A ring of `count` arenas, one at least, over clones of `upstream`. Takes no memory of it
    /// yet.
    pub fn new_in(count: usize, upstream: A) -> Self {
        Self::with_settings_in(count, ArenaSettings::new(), upstream)
    }

    /// A ring of `count` arenas, one at least, that take their chunks as `settings` say, each for
    /// itself.
    pub fn with_settings_in(count: usize, settings: ArenaSettings, upstream: A) -> Self {
        let first = Arena::with_settings_in(settings, upstream.clone());
        Self::of(first, (1..count).map(|_| Arena::with_settings_in(settings, upstream.clone())))
    }
}

impl<M: StepMemory> Frames<M> {
    /// A ring of these, in their order.
    pub fn of(first: M, others: impl IntoIterator<Item = M>) -> Self {
        let mut ring = vec![first];
        ring.extend(others);
        Self { ring, at: 0 }
    }

    /// The arena that was used longest ago, empty, and the end of the step that the last one was
    /// for. Waits until no device uses what lay in the one that it gives.
    ///
    /// # Errors
    /// As the arena's `reset`, or [`StepMemory::end_step`]; the same frame is next again.
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

    /// As [`Frames::next`], by a future: nothing blocks while a device uses what lay in the arena.
    /// A ring whose future is dropped before it is ready gives the same frame next.
    ///
    /// ```
    /// use aquifer_adapters::Frames;
    /// use allocator_api2::{alloc::Global, vec::Vec};
    /// async fn steps() -> aquifer_core::Result<()> {
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
        NextFrame { ring: Some(self), pause: PAUSES.0, alarm: Alarm::new() }
    }

    /// Arenas in the ring.
    #[must_use]
    pub fn count(&self) -> usize {
        self.ring.len()
    }
}

/// The next frame of a ring, as a future that needs no runtime: [`Frames::next_async`]. It ends
/// with [`Frames::next`]'s answer, and stays pending if it is polled after that.
#[derive(Debug)]
#[must_use = "a future waits only while it is polled"]
pub struct NextFrame<'f, M = Arena<Global>> {
    /// `None` once it has been ready.
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
                this.pause = (this.pause * 2).min(PAUSES.1);
                Poll::Pending
            }
            Err(error) => Poll::Ready(Err(error)),
        }
    }
}

impl<'f, M> Frame<'f, M> {
    /// This step's arena.
    #[must_use]
    pub fn arena(&self) -> &M {
        self.arena
    }

    /// This step's arena, for its [`scope`](Arena::scope)s.
    pub fn arena_mut(&mut self) -> &mut M {
        self.arena
    }

    /// This step's arena, for as long as the ring is borrowed.
    #[must_use]
    pub fn into_arena(self) -> &'f M {
        self.arena
    }
}
