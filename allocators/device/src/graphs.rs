//! Memory of CUDA graphs.
//!
//! A graph keeps *addresses*. What it was captured with it reads and writes at every launch, also
//! where a block was freed within the capture: the capture's later blocks lie there. So what is
//! allocated for captured work must be nobody else's for as long as the graph can be launched. A
//! [`GraphPool`] is such memory, for one graph or for several that share it:
//!
//! ```text
//!   announce ─▶ begin ─▶ alloc a, alloc b, drop a, alloc c ─▶ end ─▶ launch, launch, …   ─▶ drop the graph, the pool, b, c
//!
//!   the pool's    ┃ a ┃ b ┃ c in a's place ┃  mapped, charged, nobody else's …               … until the last launch is
//!   memory                                                                                  done: back to the driver
//! ```
//!
//! # Who draws from it
//! Captures are *announced*: from then on blocks for a stream that takes part in such a capture
//! come from the graph pool, whatever way they are asked for by, [`DevicePool::alloc`], buffers,
//! arenas, by address. Which capture a stream takes part in is the driver's own number, so streams
//! that join by an event draw as well, and the same stream's work outside of a capture is served as
//! before. Everything else goes on meanwhile: other streams' blocks, frees, trims; what the pool
//! itself asks of the driver breaks no capture.
//!
//! # What is freed
//! | freed | is had again by |
//! |---|---|
//! | within the capture that allocated it | the same stream, at once, in this capture; after it any that shares the pool |
//! | within it, used by another captured stream ([`Block::record_use`](crate::Block::record_use)) | whoever captures after its end |
//! | after it | later captures that share the pool, when eager work on it is known to be done |
//! | an ordinary block, within a capture | as ever; where another stream's use has to be proved, after the capture, since no event can be recorded before |
//!
//! **What lives on of a capture lasts until an earlier graph of the same pool runs.** A later
//! capture's blocks may lie where an earlier one's temporaries do, and launches of that write them.
//! So of graphs that share a pool an output is read, or an input written, with no earlier graph
//! launched in between; what is to last longer is allocated before the capture, as an
//! ordinary block, or the graph has a pool of its own. A capture's blocks are safe from later
//! captures as long as they live.
//!
//! Memory that was a graph's once is never an ordinary block's. It is not trimmed either while the
//! pool or a graph lives: launches write it.
//!
//! # Order
//! Several graphs that share a pool write the same bytes, so they must not run at once:
//! [`Graph::launch`] orders each launch behind all that touches the memory, other graphs' launches
//! and eager uses of blocks that are still held, and notes it with those blocks. Graphs of other
//! libraries are launched by those, who order them and tell ([`Captured::launched`]).
//!
//! # When it goes
//! With the last of: handles of the pool, graphs, announcements, blocks. And then when the host has
//! seen the last launch done on each stream: dropping calls nobody and waits for nothing, memory
//! leaves at the next slow path, trim or end of the device pool. Three ways to know about graphs of
//! others: their launches are noted; the driver tells ([`Captured::keep_until_released`]); nobody
//! knows, and then the device is waited for, as it is where the driver frees.
//!
//! # What it costs
//! A device pool without open announcements serves blocks as if there were none. While one is open
//! every allocation takes the longer way and asks the driver for its stream's capture, some tens of
//! nanoseconds; one within the capture takes a lock, a search and an account, some hundreds.
//! Debugging's guards and poison are not for blocks of graphs: every launch would write them.

mod announce;
mod graph;
mod memory;

pub use announce::Announced;
pub(crate) use announce::Announcements;
pub(crate) use graph::sweep;
pub use graph::{Captured, Graph};

use crate::DevicePool;
use announce::Whose;
use aquifer_core::{PoolStats, Result};
use aquifer_driver::{RawStream, site};
use aquifer_stream::Stream;
use memory::Memory;
use std::{fmt, sync::Arc};

/// Memory of one graph, or of several that share it. A clone is another handle, and each keeps the
/// device pool open.
///
/// Blocks for a stream come from it while the stream takes part in a capture that was
/// [announced](GraphPool::announce), or that is [ours](GraphPool::capture). What is freed of it
/// belongs to graphs until the last who holds the memory is gone, handles, graphs, announcements
/// and blocks, and the last launch is done on each stream.
///
/// Of graphs that share a pool a later one's blocks may lie where an earlier one's temporaries do,
/// and every launch writes those: an output is read, or an input written, with no earlier graph
/// launched in between. What is to last longer is an ordinary block, allocated before the capture.
///
/// ```
/// use aquifer_device::{DeviceBuffer, DevicePool, PoolConfig};
/// use aquifer_driver::{DeviceId, sim::Sim};
/// let sim = Sim::h200(1);
/// let pool = DevicePool::open(sim.driver(), DeviceId(0), PoolConfig::default())?;
/// let (s, u) = (pool.stream()?, pool.stream()?);
/// let graphs = pool.graph_pool()?;
/// # #[expect(unsafe_code, reason = "promises what the graph touches")]
/// // SAFETY: 1. and 2. the work touches blocks of the graph pool alone.
/// let (graph, out) = unsafe {
///     graphs.capture(&s, |s| {
///         let mut x: DeviceBuffer<u8> = pool.buffer(s, 4096)?;
///         s.fill(&mut x, 7)?;
///         let mut out: DeviceBuffer<u8> = pool.buffer(s, 4096)?;
///         s.copy(&x, &mut out)?;
///         Ok(out)                                  // `x` is freed, and stays the graph's
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
/// # Ok::<(), aquifer_core::MemoryError>(())
/// ```
#[derive(Clone)]
pub struct GraphPool {
    pool: DevicePool,
    memory: Arc<Memory>,
}

impl DevicePool {
    /// Memory for graphs: for one, or for several that share it. Reserves addresses, as many as the
    /// device has memory (`cuMemAddressReserve`), and takes no memory; that comes in steps of the
    /// pool's [`handle_bytes`](crate::PoolConfig::handle_bytes), 2 MiB as a rule, charged to the
    /// pool's budget.
    ///
    /// # Errors
    /// The driver's.
    #[track_caller]
    pub fn graph_pool(&self) -> Result<GraphPool> {
        let _site = site::enter();
        sweep();
        self.inner().apart.reap_quietly();
        Ok(GraphPool { pool: self.clone(), memory: Memory::new(self.inner())? })
    }
}

impl GraphPool {
    /// From now on until the answer ends, blocks for `stream` are of this memory while it captures;
    /// and so are those for streams that join the capture. To be called right before the capture
    /// begins: what has been queued on the stream by now is fenced. Never blocks.
    ///
    /// # Errors
    /// [`MemoryError::WrongDevice`](aquifer_core::MemoryError::WrongDevice);
    /// [`MemoryError::AlreadyAnnounced`](aquifer_core::MemoryError::AlreadyAnnounced) where an
    /// announcement for this stream is open, of this pool or another of the same device pool.
    #[track_caller]
    pub fn announce(&self, stream: &Stream) -> Result<Announced> {
        let _site = site::enter();
        Announced::new(&self.pool, &self.memory, Whose::Stream(stream.timeline().clone()))
    }

    /// As [`GraphPool::announce`], for whatever stream `whose` says, by its handle. It is asked
    /// whenever a block is allocated for a stream that captures, by the thread that allocates and
    /// under no lock, and must not allocate from this pool. It says yes to streams that join as
    /// well, for whom it may be the first to be asked: by the number of the capture, say.
    /// Where several announcements include a stream the oldest counts.
    ///
    /// # Errors
    /// None so far.
    #[track_caller]
    pub fn announce_where(
        &self,
        whose: impl Fn(RawStream) -> bool + Send + Sync + 'static,
    ) -> Result<Announced> {
        let _site = site::enter();
        Announced::new(&self.pool, &self.memory, Whose::Those(Box::new(whose)))
    }

    /// What it holds. `physical` is all of its memory, `cached` what later captures may draw from.
    #[must_use]
    pub fn stats(&self) -> PoolStats {
        self.memory.stats()
    }

    /// The device pool.
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
