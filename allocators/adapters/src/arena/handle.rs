//! The arena itself.
#![expect(unsafe_code, reason = "makes references to its blocks; declares `rewind`")]

use super::{
    ArenaSettings, ArenaStats, Mark, Scope, bump::Bump, scope, typed, typed::allocating_methods,
};
use allocator_api2::alloc::{AllocError, Allocator, Global, handle_alloc_error};
use aquifer_core::{MemoryError, Result as MemoryResult, StepMemory};
use std::{alloc::Layout, fmt, ptr::NonNull, time::Instant};

/// A bump allocator over `A`: the fastest way to allocate many things that go away together.
///
/// # No `Drop`s
/// What is put into an arena by [`alloc`](Arena::alloc) and its kin is **never dropped**, neither
/// at a reset nor when the arena goes. Put plain data there, or use the arena as the allocator of
/// collections that drop what they hold: `&Arena` implements the allocator traits.
///
/// # What it promises
/// - A block is taken in constant time and without a call of the allocator below, until a chunk is
///   full. Chunks double in size up to [`ArenaSettings::max_chunk`].
/// - Of blocks given back only the last one makes room; it also grows and shrinks in place. The
///   rest comes back at [`reset`](Arena::reset), at the end of a [`scope`](Arena::scope), or when
///   the arena is dropped.
/// - Nothing is written into chunks but what the user writes: no headers, no free lists.
/// - Where `A` can hold blocks back for a gate ([`DeferReuse`](aquifer_core::DeferReuse)), so can
///   `&Arena<A>`: bytes that a device may still read are handed out again only when the gate is
///   open. `reset` waits for that; a drop does not, since `A` itself keeps the chunk back.
///
/// # What surprises
/// It is not `Sync`: one thread at a time allocates from it. It does not know where its blocks
/// begin, so a deferral of one block holds all earlier ones in the same chunk too.
///
/// ```
/// use aquifer_adapters::Arena;
/// use allocator_api2::vec::Vec;
/// let mut arena = Arena::new();
/// let point = arena.alloc((1.0, 2.0));
/// point.0 += 1.0;
/// let mut list = Vec::new_in(&arena);
/// list.push(arena.alloc_str("one"));
/// assert_eq!((point.0, &*list[0]), (2.0, "one"));
/// drop(list);
/// arena.reset()?;
/// assert_eq!(arena.stats().allocated, 0);
/// # Ok::<(), aquifer_core::MemoryError>(())
/// ```
pub struct Arena<A: Allocator = Global> {
    bump: Bump<A>,
}

impl Arena {
    /// An arena over the global allocator. Takes no memory before the first allocation.
    #[must_use]
    pub const fn new() -> Self {
        Self::new_in(Global)
    }
}

impl Default for Arena {
    fn default() -> Self {
        Self::new()
    }
}

impl<A: Allocator> Arena<A> {
    /// An arena over `upstream`. Takes no memory before the first allocation.
    pub const fn new_in(upstream: A) -> Self {
        Self::with_settings_in(ArenaSettings::new(), upstream)
    }

    /// An arena over `upstream` that takes its chunks as `settings` say.
    pub const fn with_settings_in(settings: ArenaSettings, upstream: A) -> Self {
        Self { bump: Bump::new(settings, upstream) }
    }

    pub(super) fn bump(&self) -> &Bump<A> {
        &self.bump
    }

    /// Runs `work` with a scope of this arena. At its end, also on unwind, the arena is where it
    /// was, and what the scope filled can be filled again.
    ///
    /// Chunks taken meanwhile stay with the arena as spares, so that a loop of scopes settles and
    /// then takes nothing. Memory that is held for a gate is not handed out again before the gate
    /// is open; nothing waits for it here.
    #[inline]
    pub fn scope<R>(&mut self, work: impl FnOnce(&mut Scope<'_, A>) -> R) -> R {
        scope::run(&self.bump, work)
    }

    /// Where the arena stands, for [`rewind`](Arena::rewind).
    #[inline]
    #[must_use]
    pub fn mark(&self) -> Mark {
        self.bump.mark()
    }

    /// Goes back to where the arena stood at `mark`. [`scope`](Arena::scope) is the safe way to do
    /// so.
    ///
    /// Bytes that are held for a gate which is not open are passed over.
    ///
    /// # Safety
    /// 1. `mark` is one of this arena's. 2. Since it was taken the arena has been neither reset nor
    ///    rewound to an earlier mark. 3. Nobody uses what was handed out since.
    #[inline]
    pub unsafe fn rewind(&self, mark: Mark) {
        // SAFETY: the caller's promise.
        unsafe { self.bump.rewind(mark) };
    }

    /// Takes everything back, keeps the largest chunk and returns the others to the allocator
    /// below; or what [`ArenaSettings::on_reset`] says.
    ///
    /// Waits for the gates of deferred blocks, as long as that takes; without any it does not
    /// block.
    ///
    /// # Errors
    /// A gate's, if it can no longer tell: the device is lost. Nothing has changed then, and the
    /// arena can still be dropped.
    #[inline]
    pub fn reset(&mut self) -> MemoryResult<()> {
        self.bump.reset(None)
    }

    /// As [`reset`](Arena::reset), but waits until `deadline` at most.
    ///
    /// # Errors
    /// [`TimedOut`](aquifer_core::MemoryError::TimedOut) if a gate is still closed then, or a
    /// gate's own error. Nothing has changed.
    pub fn reset_before(&mut self, deadline: Instant) -> MemoryResult<()> {
        self.bump.reset(Some(deadline))
    }

    /// What the arena holds. In time linear in the chunks.
    #[must_use]
    pub fn stats(&self) -> ArenaStats {
        self.bump.stats()
    }

    /// The allocator that chunks come from.
    pub fn upstream(&self) -> &A {
        self.bump.upstream()
    }
}

#[expect(clippy::mut_from_ref, reason = "each call hands out a block of its own")]
impl<A: Allocator> Arena<A> {
    allocating_methods!('a, ['a]);
}

impl<A: Allocator> StepMemory for Arena<A> {
    fn end_step(&mut self) -> MemoryResult<()> {
        self.bump.look_at_gates();
        Ok(())
    }

    fn reset(&mut self) -> MemoryResult<()> {
        self.reset()
    }

    fn try_reset(&mut self) -> MemoryResult<bool> {
        match self.reset_before(Instant::now()) {
            Err(MemoryError::TimedOut) => Ok(false),
            reset => reset.map(|()| true),
        }
    }
}

impl<A: Allocator> fmt::Debug for Arena<A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Arena").field("stats", &self.stats()).finish_non_exhaustive()
    }
}
