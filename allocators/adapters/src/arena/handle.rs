//! The arena type.
#![expect(unsafe_code, reason = "makes references to its blocks; declares `rewind`")]

use super::{
    ArenaMark, ArenaScope, ArenaSettings, ArenaStats, bump::Bump, scope, typed,
    typed::allocating_methods,
};
use allocator_api2::alloc::{AllocError, Allocator, Global, handle_alloc_error};
use aquifer_core::{MemoryError, Result as MemoryResult, StepMemory};
use std::{alloc::Layout, fmt, ptr::NonNull, time::Instant};

/// A bump allocator over `A`, for many allocations that are freed together.
///
/// # No destructors
/// Values that [`alloc`](Arena::alloc) and related methods store in an arena are **never dropped**,
/// neither at a reset nor when the arena is dropped. Store plain data, or use the arena as the
/// allocator of collections, which drop their elements: `&Arena` implements the allocator traits.
///
/// # Guarantees
/// - Allocation takes constant time and does not call the upstream allocator until a chunk is full.
///   Chunks double in size up to [`ArenaSettings::max_chunk`].
/// - Only the last block can be freed individually, or grown and shrunk in place. All others are
///   freed by [`reset`](Arena::reset), at the end of a [`scope`](Arena::scope), or when the arena
///   is dropped.
/// - Chunks contain only user data: no headers and no free lists.
/// - If `A` can hold back blocks until a gate opens ([`DeferReuse`](aquifer_core::DeferReuse)), so
///   can `&Arena<A>`: bytes that a device may still read are reused only when the gate is open.
///   `reset` waits for the gate. Dropping the arena does not wait, because `A` itself holds back
///   the chunk.
///
/// # Limitations
/// - It is not `Sync`: only one thread at a time allocates from it.
/// - It does not record where its blocks begin, so deferring one block also holds back all earlier
///   blocks in the same chunk.
///
/// ```
/// use aquifer::Arena;
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
/// # Ok::<(), aquifer::MemoryError>(())
/// ```
pub struct Arena<A: Allocator = Global> {
    bump: Bump<A>,
}

impl Arena {
    /// Creates an arena over the global allocator. Takes no memory before the first allocation.
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
    /// Creates an arena over `upstream`. Takes no memory before the first allocation.
    pub const fn new_in(upstream: A) -> Self {
        Self::with_settings_in(ArenaSettings::new(), upstream)
    }

    /// Creates an arena over `upstream` that takes its chunks according to `settings`.
    pub const fn with_settings_in(settings: ArenaSettings, upstream: A) -> Self {
        Self { bump: Bump::new(settings, upstream) }
    }

    pub(super) fn bump(&self) -> &Bump<A> {
        &self.bump
    }

    /// Runs `work` with a scope of this arena. At the end, also on unwind, everything allocated in
    /// the scope is freed.
    ///
    /// Chunks taken in the scope stay with the arena as spares, so a loop of scopes soon takes no
    /// more chunks. Memory that is held back for a gate is not reused before the gate is open. This
    /// call does not wait for gates.
    #[inline]
    pub fn scope<R>(&mut self, work: impl FnOnce(&mut ArenaScope<'_, A>) -> R) -> R {
        scope::run_scope(&self.bump, work)
    }

    /// Returns the current position, for [`rewind`](Arena::rewind).
    #[inline]
    #[must_use]
    pub fn mark(&self) -> ArenaMark {
        self.bump.mark()
    }

    /// Frees everything allocated since `mark`. [`scope`](Arena::scope) is the safe alternative.
    ///
    /// Bytes that are held back for a gate that is not open are skipped.
    ///
    /// # Safety
    /// 1. `mark` was taken from this arena.
    /// 2. Since then the arena has been neither reset nor rewound to an earlier mark.
    /// 3. Nothing allocated since then is used any more.
    #[inline]
    pub unsafe fn rewind(&self, mark: ArenaMark) {
        // SAFETY: guaranteed by the caller.
        unsafe { self.bump.rewind(mark) };
    }

    /// Frees everything, keeps the largest chunk and returns the others to the upstream allocator.
    /// [`ArenaSettings::on_reset`] can change this.
    ///
    /// Blocks until the gates of deferred blocks are open. Never blocks without such gates.
    ///
    /// # Errors
    /// The error of a gate that can no longer report completion, because the device is lost.
    /// Nothing changes then, and the arena can still be dropped.
    #[inline]
    pub fn reset(&mut self) -> MemoryResult<()> {
        self.bump.reset(None)
    }

    /// Like [`reset`](Arena::reset), but waits at most until `deadline`.
    ///
    /// # Errors
    /// [`TimedOut`](aquifer_core::MemoryError::TimedOut) if a gate is still closed then, or the
    /// error of a gate. Nothing changes then.
    pub fn reset_before(&mut self, deadline: Instant) -> MemoryResult<()> {
        self.bump.reset(Some(deadline))
    }

    /// Returns the statistics of the arena. Takes time linear in the number of chunks.
    #[must_use]
    pub fn stats(&self) -> ArenaStats {
        self.bump.stats()
    }

    /// Returns the upstream allocator.
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
        self.bump.poll_gates();
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
