//! How an arena takes its chunks, and what it says about itself.

/// Bytes of the first chunk, unless set.
const FIRST_CHUNK: usize = 4 << 10;
/// Bytes up to which chunks double, unless set.
const MAX_CHUNK: usize = 16 << 20;

/// How an [`Arena`](crate::Arena) takes its chunks.
///
/// ```
/// use aquifer_adapters::{Arena, ArenaSettings};
/// use allocator_api2::alloc::Global;
/// let settings = ArenaSettings::new().first_chunk(1 << 10).max_chunk(4 << 10).limit(8 << 10);
/// let arena = Arena::with_settings_in(settings, Global);
/// assert!(arena.try_alloc([0u8; 8 << 10]).is_ok());
/// assert!(arena.try_alloc(0u8).is_err());
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ArenaSettings {
    pub(super) first_chunk: usize,
    pub(super) max_chunk: usize,
    pub(super) limit: usize,
    pub(super) on_reset: OnReset,
}

/// What a [`reset`](crate::Arena::reset) does with an arena's chunks.
///
/// Its example is that of [`ArenaSettings`].
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default, Debug)]
#[non_exhaustive]
pub enum OnReset {
    /// Keeps the largest one, returns the others to the allocator below.
    #[default]
    KeepLargest,
    /// Keeps them all: what comes next takes nothing from the allocator below until it needs more
    /// than ever before. A request that is larger than each of them takes another one all the same.
    KeepAll,
    /// Keeps a single one. Where there are several they are returned, and the next one that is
    /// taken is as large as all of them were: steps that need the same come to fit into one chunk,
    /// side by side. If so much cannot be had in one piece, smaller ones do.
    Merge,
}

impl ArenaSettings {
    /// A first chunk of 4 KiB, each further one twice as large up to 16 MiB, no limit, and the
    /// largest chunk kept by a reset.
    #[must_use]
    pub const fn new() -> Self {
        Self {
            first_chunk: FIRST_CHUNK,
            max_chunk: MAX_CHUNK,
            limit: usize::MAX,
            on_reset: OnReset::KeepLargest,
        }
    }

    /// Bytes of the first chunk. A request that is larger gets a chunk of its own size.
    #[must_use]
    pub const fn first_chunk(mut self, bytes: usize) -> Self {
        self.first_chunk = bytes;
        self
    }

    /// Bytes at which chunks stop growing. A request that is larger still gets a chunk of its own
    /// size.
    #[must_use]
    pub const fn max_chunk(mut self, bytes: usize) -> Self {
        self.max_chunk = bytes;
        self
    }

    /// Bytes that the arena asks of the allocator below at most, counted over all its chunks.
    /// Beyond it allocations fail.
    #[must_use]
    pub const fn limit(mut self, bytes: usize) -> Self {
        self.limit = bytes;
        self
    }

    /// What a reset does with the chunks.
    #[must_use]
    pub const fn on_reset(mut self, what: OnReset) -> Self {
        self.on_reset = what;
        self
    }
}

impl Default for ArenaSettings {
    fn default() -> Self {
        Self::new()
    }
}

/// What an [`Arena`](crate::Arena) holds. Bytes, unless a name says otherwise.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
#[non_exhaustive]
pub struct ArenaStats {
    /// Handed out since the last reset, with the padding between blocks and with what is held for
    /// gates.
    pub allocated: usize,
    /// In all chunks.
    pub capacity: usize,
    /// The most that `allocated` has been since the arena was made.
    pub high_water: usize,
    /// Chunks (a count).
    pub chunks: usize,
}
