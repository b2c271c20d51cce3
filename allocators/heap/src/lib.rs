//! Allocators for address ranges whose memory they never access. Part of aquifer; promises no
//! stability.
//!
//! Device memory cannot contain free lists, since the host cannot access it. Pinned memory must
//! not, since a late DMA may still write into a freed block. So all metadata of this crate is
//! separate from the memory that it describes, addresses are plain `u64`, and nothing here is
//! `unsafe`.
//!
//! | type or file | contents |
//! |---|---|
//! | [`Heap`] | the general allocator: add ranges, allocate blocks, free by key |
//! | `classes` | size classes: steps of each doubling, of which slabs have eight |
//! | `slab` | slabs: equal slots in one extent, with a bitmap |
//! | `bins` | free extents by size: best fit in a bounded number of steps |
//! | `page_map` | the sparse map from an address to its record |
//! | `records` | extents and blocks in address order, linked to their neighbours |
//! | [`Bump`] | a bump allocator with marks |
//! | [`Runs`] | an allocator for runs of equal pages |
//!
//! # Invariants
//!
//! * **Deterministic.** The same calls return the same addresses. Nothing depends on time, on
//!   hashing or on the addresses of the metadata.
//! * **Exact.** Above [`Config::small_max`] a block has the requested size, rounded up to
//!   [`Config::unit`]. `None` means that no free extent fits, and not that the search gave up.
//! * **Bounded.** Best fit takes a number of steps that depends on the width of an address, and not
//!   on the number of holes.
//! * **Fully coalesced.** Adjacent free extents are merged unless a border lies between them. Spare
//!   slabs, which are kept for speed, are merged before they could make a request fail.
//! * **Stamps are never lost.** A free range carries the largest stamp of all frees of its bytes.
//!   See [`Extent::stamp`].
//! * **A failed call changes nothing.**
//!
//! # Notes
//!
//! The heap takes `&mut self`. Locking is up to the caller, since the lock may have to cover more.
//! Dropping a heap frees no memory, since a heap owns none.
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
//! // Until this stamp, in the caller's own numbering, the bytes may still be in use.
//! heap.free_block(&block, 7)?;
//! let extent = heap.free_extents().next().ok_or("nothing free")?;
//! assert_eq!((extent.range.len, extent.stamp), (64 << 20, 7));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

#![forbid(unsafe_code)]

mod bins;
mod bump;
mod classes;
mod config;
mod error;
mod heap;
mod page_map;
mod range;
mod records;
mod runs;
mod slab;

pub use bump::{Bump, Mark, StaleMark};
pub use classes::{size_class, units_of_class};
pub use config::Config;
pub use error::HeapError;
pub use heap::{Heap, InvariantViolation};
pub use range::{Extent, HeapBlock, Key, Range};
pub use runs::Runs;
