//! Memory for CUDA graphs.
//!
//! A graph stores *addresses*. At every launch it reads and writes the memory it was captured with,
//! also where a block was freed within the capture, since later blocks of the capture lie there. So
//! memory allocated for captured work must not be used for anything else as long as the graph can
//! be launched. A [`GraphPool`] is such memory, for one graph or for several that share it:
//!
//! ```text
//!   announce ─▶ begin ─▶ alloc a, alloc b, drop a, alloc c ─▶ end ─▶ launch, launch, …   ─▶ drop the graph, the pool, b, c
//!
//!   the pool's    ┃ a ┃ b ┃ c in a's place ┃  mapped, charged, nobody else's …               … until the last launch is
//!   memory                                                                                  done: back to the driver
//! ```
//!
//! # Which allocations come from it
//! A capture must be *announced*. From then on, blocks for a stream that takes part in the capture
//! come from the graph pool, by whichever way they are requested: [`DevicePool::alloc`], buffers,
//! arenas, or by address.
//!
//! - The capture of a stream is identified by the driver's number for it. So streams that join by
//!   an event use the graph pool too.
//! - Work of the same stream outside of a capture is served as before, unless the announcement
//!   covers it too ([`GraphPool::announce_all_where`]).
//! - Allocations, frees and trims of other streams continue. The driver calls of the pool itself do
//!   not invalidate a capture.
//!
//! # When freed memory is reused, and by which captures
//! - A block that its stream frees within a capture, whether this one has allocated it or an
//!   earlier one: by the same stream at once, in this capture. After the capture, by any capture
//!   that shares the pool.
//! - The same, but used by another captured stream
//!   ([`Block::record_use`](crate::Block::record_use)): by captures after its end.
//! - A block freed after the capture: by later captures that share the pool, when eager work on it
//!   is known to be done.
//! - An ordinary block freed within a capture: as usual. If the use by another stream has to be
//!   proved, only after the capture, since no event can be recorded before.
//!
//! **Data that outlives a capture is valid until an earlier graph of the same pool is launched.** A
//! later capture's blocks may lie where an earlier capture's temporaries do, and launches of the
//! earlier graph write them. So with graphs that share a pool, read an output or write an input
//! only while no earlier graph has been launched in between. Allocate data that must last longer
//! before the capture, as an ordinary block, or give the graph its own pool. A capture's live
//! blocks are safe from later captures.
//!
//! Memory that captured work has used never becomes an ordinary block. It is not trimmed while the
//! pool or a graph lives, since launches write it. What only work outside of captures has used is
//! given back handle by handle: by a trim, when memory is short, and before the caches take new
//! memory.
//!
//! # Order
//! Graphs that share a pool write the same bytes, so they must not run concurrently.
//! [`Graph::launch`] orders each launch after all work that touches the memory: launches of other
//! graphs, and eager uses of blocks that are still live. It also records the launch as a use of
//! those blocks. The owner of another library's graph has to order its launches and report them
//! ([`Captured::launched`]).
//!
//! # When the memory is released
//! The memory is released after the last of its pool handles, graphs, announcements and blocks is
//! dropped, and after the host has seen the last launch done on each stream. Dropping makes no
//! driver call and never waits: the memory is released at the next slow path, trim or close of the
//! device pool. If the launches of another library's graph are not reported
//! ([`Captured::launched`]), the whole device is synchronised before the memory is released.
//!
//! # Cost
//! A device pool without open announcements serves blocks as if there were none. While one is open,
//! every allocation takes the full path and queries the driver for its stream's capture, which
//! takes some tens of nanoseconds. An allocation within the capture takes a lock and a search, some
//! hundreds. Guards and poison of the debug mode do not apply to blocks of graphs: every launch
//! would write them.

mod announcement;
mod graph;

pub use announcement::Announced;
pub use graph::{Captured, Graph};

use crate::{
    Block, DevicePool, Request,
    slot_memory::{SlotMemories, SlotMemory},
};
use announcement::AnnouncedStreams;
use aquifer_core::{PoolStats, Result, Tag, event::BlockKind};
use aquifer_driver::{DeviceRange, RawStream, site};
use aquifer_stream::Stream;
use std::{fmt, sync::Arc};

/// Memory of one graph, or of several that share it. A clone is another handle, and each keeps the
/// device pool open.
///
/// Blocks for a stream come from it while the stream takes part in a capture that was
/// [announced](GraphPool::announce) or started by [`GraphPool::capture`]. Freed memory that
/// captured work has used remains reserved for graphs until all handles, graphs, announcements and
/// blocks are dropped, and the last launch is done on each stream.
///
/// Among graphs that share a pool, a later one's blocks may lie where an earlier one's temporaries
/// do, and every launch writes those. So read an output or write an input only while no earlier
/// graph has been launched in between. Data that must last longer belongs in an ordinary block,
/// allocated before the capture.
///
/// ```
/// use aquifer::{DeviceBuffer, DeviceId, DevicePool, PoolConfig, sim::Sim};
/// let sim = Sim::h200(1);
/// let pool = DevicePool::open(sim.driver(), DeviceId(0), PoolConfig::default())?;
/// let (s, u) = (pool.stream()?, pool.stream()?);
/// let graphs = pool.graph_pool()?;
/// # #[expect(unsafe_code, reason = "promises what the graph touches")]
/// // SAFETY: 1. and 2. the work touches only blocks of the graph pool.
/// let (graph, out) = unsafe {
///     graphs.capture(&s, |s| {
///         let mut x: DeviceBuffer<u8> = pool.buffer(s, 4096)?;
///         s.fill(&mut x, 7)?;
///         let mut out: DeviceBuffer<u8> = pool.buffer(s, 4096)?;
///         s.copy(&x, &mut out)?;
///         Ok(out)                                  // `x` is freed, its memory stays the graph's
///     })
/// }?;
/// graph.launch(&u)?;
/// let mut back = vec![0; 4096];
/// s.try_scope(|c| c.download(&out, &mut back))?;      // waits for the launch
/// assert_eq!(back, [7; 4096]);
/// drop((graph, out, graphs));
/// u.synchronize()?;
/// pool.trim(0)?;
/// assert_eq!(pool.stats().physical, 0);
/// assert!(sim.violations().is_empty());
/// # Ok::<(), aquifer::MemoryError>(())
/// ```
#[derive(Clone)]
pub struct GraphPool {
    pool: DevicePool,
    memory: Arc<SlotMemory>,
}

impl DevicePool {
    /// Creates memory for one graph, or for several that share it. Reserves addresses for as much
    /// memory as the device has (`cuMemAddressReserve`), but no memory. Memory is added in steps of
    /// the pool's [`handle_bytes`](crate::PoolConfig::handle_bytes), usually 2 MiB, and charged to
    /// the pool's budget.
    ///
    /// # Errors
    /// [`MemoryError::Unsupported`](aquifer_core::MemoryError::Unsupported) on devices without
    /// virtual memory mapping; the driver's.
    #[track_caller]
    pub fn graph_pool(&self) -> Result<GraphPool> {
        let _site = site::enter();
        self.core().dedicated.reap_nonblocking();
        GraphPool::new(self, None)
    }

    /// Like [`DevicePool::graph_pool`], for memory that is [parked](DevicePool::park) and resumed
    /// with `tag`: graphs that were captured before can be launched after a resume. Contents are
    /// saved of live blocks only, since a graph writes its temporaries before it reads them.
    ///
    /// While an announcement is open, the tag cannot be parked. While it is parked, new blocks and
    /// [`Graph::launch`] fail with [`MemoryError::Parked`](aquifer_core::MemoryError::Parked). Other
    /// launches must not happen.
    ///
    /// ```
    /// use aquifer::{
    ///     DeviceBuffer, DeviceId, DevicePool, MemoryError, Park, PoolConfig, Tag, sim::Sim,
    /// };
    /// let sim = Sim::h200(1);
    /// let pool = DevicePool::open(sim.driver(), DeviceId(0), PoolConfig::default())?;
    /// let (stream, tag) = (pool.stream()?, Tag::named("graphs of a server"));
    /// let graphs = pool.parkable_graph_pool(tag)?;
    /// # #[expect(unsafe_code, reason = "promises what the graph touches")]
    /// // SAFETY: 1. and 2. the work touches only blocks of the graph pool.
    /// let (graph, out) = unsafe {
    ///     graphs.capture(&stream, |s| {
    ///         let mut out: DeviceBuffer<u8> = pool.buffer(s, 4096)?;
    ///         s.fill(&mut out, 7)?;
    ///         Ok(out)
    ///     })
    /// }?;
    /// # #[expect(unsafe_code, reason = "parks what nothing uses")]
    /// // SAFETY: 1. and 2. no work is about to be queued.
    /// unsafe { pool.park(tag, Park::discard()) }?;
    /// let refused = graph.launch(&stream);
    /// assert_eq!((pool.stats().physical, refused), (0, Err(MemoryError::Parked { tag })));
    /// pool.resume(tag, None)?;
    /// graph.launch(&stream)?;
    /// let mut back = vec![0; 4096];
    /// stream.try_scope(|c| c.download(&out, &mut back))?;
    /// assert_eq!(back, [7; 4096]);
    /// assert!(sim.violations().is_empty());
    /// # Ok::<(), MemoryError>(())
    /// ```
    ///
    /// # Errors
    /// [`MemoryError::Unsupported`](aquifer_core::MemoryError::Unsupported) on devices without
    /// virtual memory mapping; [`MemoryError::Parked`](aquifer_core::MemoryError::Parked) while other
    /// memory of the tag is parked; the driver's.
    #[track_caller]
    pub fn parkable_graph_pool(&self, tag: Tag) -> Result<GraphPool> {
        let _site = site::enter();
        let core = self.core();
        core.parkable_memories(tag)?;
        core.dedicated.reap_nonblocking();
        GraphPool::new(self, Some(tag))
    }
}

impl GraphPool {
    fn new(pool: &DevicePool, tag: Option<Tag>) -> Result<Self> {
        let core = pool.core();
        let (bytes, slot) = (core.info.memory, core.dedicated.step());
        let memory = SlotMemory::new(core, BlockKind::Graph, tag, bytes, slot)?;
        core.feature::<SlotMemories>().add(&memory);
        Ok(Self { pool: pool.clone(), memory })
    }

    /// Announces a capture: until the returned value is dropped, blocks for `stream` come from this
    /// memory while it captures. So do blocks for streams that join the capture.
    ///
    /// Call it right before the capture begins: work queued on the stream so far is fenced. Never
    /// blocks.
    ///
    /// # Errors
    /// [`MemoryError::WrongDevice`](aquifer_core::MemoryError::WrongDevice);
    /// [`MemoryError::AlreadyAnnounced`](aquifer_core::MemoryError::AlreadyAnnounced) if an
    /// announcement for this stream is open, of this pool or another one of the same device pool.
    #[track_caller]
    pub fn announce(&self, stream: &Stream) -> Result<Announced> {
        let _site = site::enter();
        let streams = AnnouncedStreams::Stream(stream.timeline().clone());
        Announced::new(&self.pool, &self.memory, streams)
    }

    /// Like [`GraphPool::announce`], for every stream for whose handle `whose` returns `true`, and
    /// also for its work that is not captured: until the returned value is dropped, all blocks for
    /// these streams come from this memory. For runtimes that identify captures by something else
    /// than a stream, and run work once before they capture it, with the same memory.
    ///
    /// `whose` is called whenever a block is allocated, on the allocating thread and with no lock
    /// held. It must not allocate from this pool. It must also return `true` for streams that join
    /// the capture, possibly before it is called for any other stream of it. For example, it can
    /// compare the number of the capture. If several announcements include a stream, the newest
    /// applies.
    ///
    /// A block that is freed outside of a capture is reused by its stream at once, and after the
    /// end of the announcement by later captures and announcements, as soon as its work is known to
    /// be done. Until a capture uses its memory, a trim, a shortage or a growth of the caches gives
    /// that back to the driver. The blocks that are live when a capture allocates its first count
    /// as used by it.
    ///
    /// # Errors
    /// None so far.
    #[track_caller]
    pub fn announce_all_where(
        &self,
        whose: impl Fn(RawStream) -> bool + Send + Sync + 'static,
    ) -> Result<Announced> {
        let _site = site::enter();
        let streams = AnnouncedStreams::Matching(Box::new(whose));
        Announced::new(&self.pool, &self.memory, streams)
    }

    /// Keeps the free memory of this pool from now on, also where no captured work has used it: for
    /// memory that another library has registered, or that a program holds in reserve.
    pub fn retain_free(&self) {
        self.memory.retain_free();
    }

    /// Returns the live blocks of this memory by address: where each begins, with its requested
    /// bytes, and its stream. With [`GraphPool::alloc_at`], an owner of raw addresses can bring the
    /// memory back to an earlier state.
    #[must_use]
    pub fn live_blocks(&self) -> Vec<(DeviceRange, RawStream)> {
        self.memory.live_blocks()
    }

    /// Allocates a block at `address`, where no block is live: for graphs that are captured behind
    /// launches of others, whose results lie at addresses that are free by now. Work queued on
    /// `stream` from now on is ordered on the device after the work that used the memory last. The
    /// contents stay, unless the memory has been given back to the driver: then the addresses get
    /// new memory.
    ///
    /// # Errors
    /// - [`MemoryError::ForeignBlock`](aquifer_core::MemoryError::ForeignBlock) for addresses that
    ///   are not this pool's.
    /// - [`MemoryError::Busy`](aquifer_core::MemoryError::Busy) if a part of the block is live, is
    ///   used by other streams, or was freed in an announcement that is still open.
    /// - [`MemoryError::Capturing`](aquifer_core::MemoryError::Capturing) if an order is needed and
    ///   `stream` captures.
    /// - As [`DevicePool::alloc`] for an invalid request, a limit of its tag, or new memory.
    #[track_caller]
    pub fn alloc_at(&self, stream: &Stream, request: Request, address: u64) -> Result<Block> {
        let _site = site::enter();
        let core = self.pool.core();
        let request = core.checked(request)?;
        let of_tag = core.charge_tag(stream, &request)?;
        let mut block = self.memory.allocate_at(stream, request, address)?;
        core.list_for_leaks(&mut block, None);
        block.count_for_tag(of_tag);
        Ok(block)
    }

    /// Allocates a block from the free memory of this pool, for work on `stream` that is not
    /// captured: memory of last resort, when [`DevicePool::alloc`] finds none. When it is freed,
    /// the memory is this pool's again. Never blocks.
    ///
    /// Returns `None` if no free range is large enough, if `stream` captures, or if the pool has a
    /// graph whose launches are not recorded, since every launch may write free memory.
    ///
    /// # Errors
    /// As [`GraphPool::alloc_at`], if another thread takes the range first.
    #[track_caller]
    pub fn alloc_free(&self, stream: &Stream, request: Request) -> Result<Option<Block>> {
        let request = self.pool.core().checked(request)?;
        let found = self.memory.find_free(stream, &request)?;
        found.map(|address| self.alloc_at(stream, request, address)).transpose()
    }

    /// Returns the pool's statistics. `physical` is all of its memory, `cached` what later captures
    /// may use.
    #[must_use]
    pub fn stats(&self) -> PoolStats {
        self.memory.stats()
    }

    /// Returns the tag that its memory is parked with; [`Tag::NONE`] if it is never parked.
    #[must_use]
    pub fn tag(&self) -> Tag {
        self.memory.tag()
    }

    /// Returns the device pool.
    #[must_use]
    pub fn pool(&self) -> &DevicePool {
        &self.pool
    }
}

impl fmt::Debug for GraphPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GraphPool").field("memory", &self.memory).finish_non_exhaustive()
    }
}
