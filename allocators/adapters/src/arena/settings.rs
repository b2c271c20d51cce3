//! The settings and statistics of an arena.

/// The default size of the first chunk, in bytes.
const FIRST_CHUNK: usize = 4 << 10;
/// The default size at which chunks stop doubling, in bytes.
const MAX_CHUNK: usize = 16 << 20;

/// The settings that determine how an [`Arena`](crate::Arena) takes its chunks.
///
/// ```
/// use aquifer::{Arena, adapters::ArenaSettings};
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

/// What a [`reset`](crate::Arena::reset) does with the chunks of an arena.
///
/// See [`ArenaSettings`] for an example.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default, Debug)]
#[non_exhaustive]
pub enum OnReset {
    /// Keeps the largest chunk and returns the others to the upstream allocator.
    #[default]
    KeepLargest,
    /// Keeps all chunks. The next step takes nothing from the upstream allocator until it needs
    /// more memory than any step before. A request larger than every chunk still takes another one.
    KeepAll,
    /// Keeps a single chunk. If there are several, all are returned, and the next chunk is as large
    /// as all of them together. So steps of the same size soon fit into one contiguous chunk. If
    /// the upstream allocator refuses that size, smaller chunks are used.
    Merge,
}

impl ArenaSettings {
    /// Returns the defaults: a first chunk of 4 KiB, doubling up to 16 MiB, no limit, and the
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

    /// Sets the size of the first chunk in bytes. A larger request gets a chunk of its own size.
    #[must_use]
    pub const fn first_chunk(mut self, bytes: usize) -> Self {
        self.first_chunk = bytes;
        self
    }

    /// Sets the size in bytes at which chunks stop growing. A larger request still gets a chunk of
    /// its own size.
    #[must_use]
    pub const fn max_chunk(mut self, bytes: usize) -> Self {
        self.max_chunk = bytes;
        self
    }

    /// Sets the maximum number of bytes taken from the upstream allocator, summed over all chunks.
    /// Allocations beyond it fail.
    #[must_use]
    pub const fn limit(mut self, bytes: usize) -> Self {
        self.limit = bytes;
        self
    }

    /// Sets what a reset does with the chunks.
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

/// The statistics of an [`Arena`](crate::Arena), in bytes unless stated otherwise.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct ArenaStats {
    /// Allocated since the last reset, including alignment padding and memory held back for gates.
    pub allocated: usize,
    /// The size of all chunks.
    pub capacity: usize,
    /// The maximum of `allocated` since the arena was created.
    pub high_water: usize,
    /// The number of chunks.
    pub chunks: usize,
}
