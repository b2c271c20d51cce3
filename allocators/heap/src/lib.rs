//! Places blocks in an address range it never touches.
//!
//! Device memory cannot hold its allocator's free lists: the host does not see it. Pinned memory
//! must not, since a late DMA may still write into a block that was freed. So all bookkeeping of
//! this crate lies apart from the memory it describes, addresses are plain `u64`, and nothing
//! here is `unsafe`.
//!
//! | file | idea |
//! |---|---|
//! | [`Heap`] | the engine: free ranges go in, blocks come out, a bare address frees |
//! | `classes` | which size a small request is rounded to: eight steps a doubling |
//! | `slab` | equal slots cut from one extent, a bit for each |
//! | `bins` | free extents by size: the best fit in a bounded number of steps |
//! | `pages` | the sparse map from an address to the record that owns it |
//! | `records` | extents and blocks in address order, so that neighbours are one link away |
//! | [`Bump`] | another engine: one pointer that only goes up, with marks to come back to |
//! | [`Runs`] | a third one: equal pages, given out in runs |
//!
//! # What it promises
//!
//! * **Deterministic.** The same calls give the same addresses: nothing depends on time, on hashing
//!   or on where the bookkeeping happens to lie.
//! * **Exact.** Above [`Config::small_max`] a block is as long as asked, rounded up to
//!   [`Config::unit`]. `None` means that no free extent holds the request, not that the search gave
//!   up.
//! * **Bounded.** The best fit is found in a number of steps that depends on the width of an
//!   address, never on how many holes there are.
//! * **Fully merged.** Two free extents that touch are one, unless a border lies between them: what
//!   is kept back for speed, spare slabs, is merged as soon as it makes a difference.
//! * **Stamps are never lost.** A free range carries the largest stamp that any free of any of its
//!   bytes came with. See [`Extent::stamp`].
//! * **A failed call changes nothing.**
//!
//! # What surprises
//!
//! The heap takes `&mut self`: locking is the caller's, who knows what else the lock must cover.
//! There is no `Drop` that gives anything back either, since a heap owns no memory.
//!
//! ```
//! use aquifer_heap::{Config, Heap, Range};
//!
//! let mut heap = Heap::new(Config::device());
//! heap.add(Range::new(0x7f12_3440_0000, 64 << 20), 0)?;
//!
//! let block = heap.alloc(5 << 20, 512).ok_or("no room")?;
//! assert_eq!(block.address % 512, 0);
//!
//! // The stamp says until when these bytes may still be in use, in the caller's own count.
//! heap.free(block.address, 7)?;
//! let extent = heap.free_extents().next().ok_or("nothing free")?;
//! assert_eq!((extent.range.len, extent.stamp), (64 << 20, 7));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

#![forbid(unsafe_code)]

mod bins;
mod broken;
mod bump;
mod classes;
mod config;
mod error;
mod heap;
mod pages;
mod range;
mod records;
mod runs;
mod slab;
mod stats;

pub use broken::Broken;
pub use bump::{Bump, Mark, StaleMark};
pub use config::{Config, ConfigError};
pub use error::HeapError;
pub use heap::{FreeExtents, Heap};
pub use range::{Block, Extent, Freed, Key, Range};
pub use runs::Runs;
pub use stats::HeapStats;
