//! A ring of arenas, one for each step in flight.

use crate::{Arena, ArenaSettings};
use allocator_api2::alloc::{Allocator, Global};
use aquifer_core::Result;
use std::{fmt, num::NonZero};

/// A ring of arenas for work that is done in steps while the steps before are still being copied or computed.
///
/// Each call of [`next`](Frames::next) gives the arena that was used longest ago, empty. If a device still reads what
/// lay in it, the call waits: with three frames, for the step three ago.
///
/// ```
/// use aquifer_adapters::Frames;
/// use allocator_api2::{alloc::Global, vec::Vec};
/// use std::num::NonZero;
/// let mut frames = Frames::new_in(NonZero::new(3).ok_or("no frames")?, Global);
/// for step in 0..10u32 {
///     let frame = frames.next()?;
///     let mut batch = Vec::new_in(frame.arena());
///     batch.extend([step; 100]);
/// }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Frames<A: Allocator = Global> {
    /// Never empty.
    ring: Vec<Arena<A>>,
    /// The frame that is next.
    at: usize,
}

/// One arena of a ring, for one step.
#[derive(Debug)]
pub struct Frame<'f, A: Allocator = Global> {
    arena: &'f mut Arena<A>,
}

impl<A: Allocator + Clone> Frames<A> {
    /// A ring of `count` arenas over clones of `upstream`. Takes no memory of it yet.
    pub fn new_in(count: NonZero<usize>, upstream: A) -> Self {
        Self::with_settings_in(count, ArenaSettings::new(), upstream)
    }

    /// A ring of `count` arenas that take their chunks as `settings` say, each for itself.
    pub fn with_settings_in(count: NonZero<usize>, settings: ArenaSettings, upstream: A) -> Self {
        let ring = (0..count.get()).map(|_| Arena::with_settings_in(settings, upstream.clone())).collect();
        Self { ring, at: 0 }
    }
}

impl<A: Allocator> Frames<A> {
    /// The arena that was used longest ago, empty. Waits until no device reads it any more.
    ///
    /// # Errors
    /// As [`Arena::reset`]; the same frame is next again.
    #[expect(clippy::should_implement_trait, reason = "a frame borrows the ring, which no iterator can say")]
    pub fn next(&mut self) -> Result<Frame<'_, A>> {
        let at = self.at % self.ring.len();
        self.ring[at].reset()?;
        self.at = at + 1;
        Ok(Frame { arena: &mut self.ring[at] })
    }

    /// Arenas in the ring.
    #[must_use]
    pub fn count(&self) -> usize {
        self.ring.len()
    }
}

impl<'f, A: Allocator> Frame<'f, A> {
    /// This step's arena.
    #[must_use]
    pub fn arena(&self) -> &Arena<A> {
        self.arena
    }

    /// This step's arena, for its [`scope`](Arena::scope)s.
    pub fn arena_mut(&mut self) -> &mut Arena<A> {
        self.arena
    }

    /// This step's arena, for as long as the ring is borrowed.
    #[must_use]
    pub fn into_arena(self) -> &'f Arena<A> {
        self.arena
    }
}

impl<A: Allocator> fmt::Debug for Frames<A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Frames").field("ring", &self.ring).field("at", &self.at).finish()
    }
}
