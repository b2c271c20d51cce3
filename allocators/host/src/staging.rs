//! Staged transfers of pageable host memory and files to and from the device at link speed.
//!
//! The device copies pinned memory at the speed of the link. A copy of pageable memory through the
//! driver is several times slower: the driver first copies it into pinned memory with one thread. A
//! [`Stager`] does the same with several threads.
//!
//! ```text
//!   slice, file ──► worker ──► slot ─┐
//!   ──────────────► worker ──► slot ─┼── the transfer's stream ──► link ──► device
//!   ──────────────► worker ──► slot ─┘
//! ```
//!
//! The workers of a transfer share one stream, because the device switches between streams more
//! slowly than it copies a small chunk.
//!
//! # Structure
//! - Each direction has its own workers, on the NUMA node of the pinned pool.
//! - Each direction has its own lanes. A lane is a few slots of pinned memory. One worker at a time
//!   uses it.
//! - The workers claim chunks of a transfer until none is left, so a slow worker costs little.
//!   While a worker copies one slot, the device copies another.
//! - A thread that waits for its transfer takes part in it.
//! - Transfers of one direction begin in the order of submission. The two directions run
//!   concurrently.
//!
//! The calling thread makes short transfers ([`StagerConfig::alone`]) itself, through a slot,
//! because waking workers takes longer. The shortest transfers to the device go through the driver.
//!
//! # Order
//! Before a transfer starts, its stream waits on the device for all earlier work on its operands.
//! If the operands share an owner stream, the transfer's stream waits for that stream. Otherwise
//! each operand is ordered individually. A transfer is finished when the host has observed the end
//! of all its copies, so work queued later needs no dependency on it. Until then the transfer
//! borrows or owns its operands.
//!
//! # Soundness
//! | host memory and operands are | kept until the transfer is finished by |
//! |---|---|
//! | borrowed in [`Stager::scope`] | the scope, which waits before it returns, also on unwind |
//! | owned by a [`Ticket`] | the transfer; the ticket returns them, and leaks them if forgotten |
//!
//! A slot is reused, or returned to its pool, only after the event behind its copies has completed.
//! If the driver cannot report the state of the event, the pool keeps the slot until it can.
//!
//! # Failures
//! - If the driver returns an error, a source fails or panics, or the device is lost, the transfer
//!   ends with a [`StageError`]. Other transfers continue.
//! - A transfer that waits for a slow source or a busy operand delays the later transfers of its
//!   direction.
//! - If the driver cannot report whether copies are done, the stager retries with every method of
//!   the driver. A driver that fails all of them for one second is considered gone, and all queued
//!   work with it. The operands are then returned.
//! - A forked child process has neither the workers nor the slots. Every request and every wait
//!   there returns [`MemoryError::OtherProcess`] at once.
//! - The stager keeps unused slots. They return to the pool when the pool has no memory left, or
//!   when its budget reclaims memory for another pool.

mod error;
mod inline_copy;
mod installed;
mod lane;
mod parts;
mod permit;
mod plan;
mod pump;
mod scope;
mod source;
mod stores;
mod submit;
mod ticket;
mod transfer;

pub use error::{Failed, StageError};
pub use installed::{install, installed};
pub use permit::Permit;
pub use scope::{StageScope, Staged};
pub use source::{FileSource, ReadMode, Sink, Source};
pub use ticket::{Begun, HostBuffer, Ticket};
pub use transfer::Progress;

use crate::{
    PinnedPool, kernel::is_forked_child, region::Host, topology::NodeId, workers::Workers,
};
use aquifer_core::{DeviceId, MemoryError, Result};
use aquifer_stream::{Stream, StreamPool, Timeline};
use lane::Lanes;
use plan::{ChunkSizing, Direction};
use std::{
    collections::VecDeque,
    fmt,
    num::NonZeroUsize,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    task::Waker,
};

/// Configuration of a [`Stager`].
///
/// `aquifer bench stage` has a flag for each setting.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct StagerConfig {
    /// Maximum number of threads that fill slots for the device, 1 to 256.
    ///
    /// It is at most two less than the CPUs of the node that this process may use. If the sum with
    /// [`StagerConfig::down_workers`] exceeds those CPUs, each direction gets at most half of
    /// them. The default of eight saturates the link.
    pub up_workers: usize,
    /// Maximum number of threads that empty slots of the device, 1 to 256. The same bounds apply.
    /// These threads are separate from those of the other direction.
    pub down_workers: usize,
    /// Bytes of a slot, which is also the size of the longest chunk. A multiple of 4096, up to 1
    /// GiB.
    pub slot: usize,
    /// Slots of each worker, 1 to 16. With one slot, the CPU and the device alternate. The slots
    /// of a direction should fit into the last-level cache.
    pub slots: usize,
    /// Bytes of the shortest chunk, used at the beginning and the end of a transfer. 4096 up to
    /// [`StagerConfig::slot`].
    pub least_chunk: usize,
    /// Transfers from host memory to the device of at most this many bytes are copied by the
    /// driver, called by the calling thread. The driver reads memory of this size before the call
    /// returns, so this is as fast as a slot.
    pub direct: usize,
    /// The same limit for transfers to host memory. The default is 0, because a slot is faster in
    /// this direction.
    pub down_direct: usize,
    /// Transfers from host memory to the device of at most this many bytes are made by the calling
    /// thread itself, through a slot. Values above [`StagerConfig::slot`] have the effect of a
    /// slot. For short transfers, waking the workers takes longer than the copy.
    pub alone: usize,
    /// The same limit for transfers to host memory.
    pub down_alone: usize,
    /// Maximum number of transfers in flight, both directions together. Each needs a stream.
    pub depth: usize,
}

impl Default for StagerConfig {
    fn default() -> Self {
        Self {
            up_workers: 8,
            down_workers: 8,
            slot: 4 << 20,
            slots: 2,
            least_chunk: 256 << 10,
            direct: 16 << 10,
            down_direct: 0,
            alone: 4 << 20,
            down_alone: 512 << 10,
            depth: 16,
        }
    }
}

impl StagerConfig {
    fn check(&self) -> Result<()> {
        let check = |name, value: usize, least: usize, most: usize, expected| {
            if (least..=most).contains(&value) {
                Ok(())
            } else {
                Err(MemoryError::BadSetting { name, value: value.to_string(), expected })
            }
        };
        check("up_workers", self.up_workers, 1, 256, "1 to 256")?;
        check("down_workers", self.down_workers, 1, 256, "1 to 256")?;
        check("slots", self.slots, 1, 16, "1 to 16")?;
        check("depth", self.depth, 1, 1 << 16, "1 to 65536")?;
        check("slot", self.slot, 4096, 1 << 30, "4096 bytes to 1 GiB")?;
        check("slot", self.slot % 4096, 0, 0, "a multiple of 4096 bytes")?;
        check("least_chunk", self.least_chunk, 4096, self.slot, "4096 bytes up to a slot")
    }

    fn workers(&self, direction: Direction) -> usize {
        match direction {
            Direction::Upload => self.up_workers,
            Direction::Download => self.down_workers,
        }
    }

    /// Returns the configuration with the numbers of workers limited to what `cpus` CPUs can run.
    fn bounded(mut self, cpus: usize) -> Self {
        let most = cpus.saturating_sub(2).max(1);
        let half = (cpus / 2).max(1);
        let most = if self.up_workers.min(most) + self.down_workers.min(most) > cpus {
            half
        } else {
            most
        };
        self.up_workers = self.up_workers.min(most);
        self.down_workers = self.down_workers.min(most);
        self
    }

    /// Returns how a transfer of `total` bytes is cut into chunks.
    fn chunk_sizing(&self, direction: Direction, total: u64) -> ChunkSizing {
        let (least, slot) = (self.least_chunk as u64, self.slot as u64);
        let (least, last, most, shares) = match direction {
            // The link cannot copy a chunk while it is being filled. With long chunks, all filled
            // in parallel, the link idles at first and is the bottleneck at the end. Long chunks
            // also touch more of the slots before any is reused. So chunks stay short.
            Direction::Upload => (least, None, (total / 128).max(MIB).clamp(least, slot), 1),
            // In this direction the link starts immediately.
            Direction::Download => {
                let usual = (total / 32).min(2 * MIB).clamp(least, slot);
                (usual, Some(2 * least).filter(|&last| last < usual), slot, 2)
            }
        };
        ChunkSizing { least, last, most, workers: self.workers(direction) as u64, shares }
    }
}

const MIB: u64 = 1 << 20;

/// The resources of one direction.
struct DirectionState {
    workers: Workers,
    workers_most: usize,
    lanes: Arc<Lanes>,
    /// Total bytes of the slots of this direction.
    slots: u64,
    /// Size of the CPUs' last-level cache in bytes, if known.
    cache: Option<u64>,
}

impl DirectionState {
    fn new(
        host: &Host,
        pool: &PinnedPool,
        direction: Direction,
        config: &StagerConfig,
        cache: Option<u64>,
    ) -> Self {
        let workers = config.workers(direction);
        let threads = NonZeroUsize::new(workers).unwrap_or(NonZeroUsize::MIN);
        // One more than the workers, for a waiting thread that takes part.
        let lanes = workers + 1;
        let slots =
            (lanes as u64).saturating_mul(config.slots as u64).saturating_mul(config.slot as u64);
        let lanes = Arc::new(Lanes::new(pool, lanes, config.slots, config.slot));
        pool.register_idle_holder(&lanes);
        Self {
            workers: Workers::with_threads(&host.topology, host.kernel.clone(), threads),
            workers_most: workers,
            lanes,
            slots,
            cache,
        }
    }
}

/// The stream on which the operands have been ordered.
enum OrderingStream {
    /// The owner stream of the operands.
    Owner(Arc<Timeline>),
    /// A stream of the stager.
    Leased(Stream),
}

impl OrderingStream {
    fn timeline(&self) -> &Arc<Timeline> {
        match self {
            Self::Owner(timeline) => timeline,
            Self::Leased(stream) => stream.timeline(),
        }
    }
}

/// The permits of one stager.
struct Permits {
    state: Mutex<PermitState>,
    /// Signalled when a permit is returned.
    changed: Condvar,
}

/// The permits that are free, and the tasks that wait for one.
struct PermitState {
    free: usize,
    wakers: Vec<Waker>,
}

impl Permits {
    fn new(depth: usize) -> Self {
        Self {
            state: Mutex::new(PermitState { free: depth, wakers: Vec::new() }),
            changed: Condvar::new(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, PermitState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns an error in a forked child of the process that owns the threads and the memory. There,
/// locks may be held forever.
fn check_process() -> Result<()> {
    if is_forked_child() { Err(MemoryError::OtherProcess) } else { Ok(()) }
}

/// State that is shared by the stager's handles and its transfers.
struct StagerCore {
    streams: StreamPool,
    device: DeviceId,
    /// The NUMA node of the workers, `None` for any node.
    node: Option<NodeId>,
    config: StagerConfig,
    up: DirectionState,
    down: DirectionState,
    permits: Permits,
    /// Idle transfer streams, reused in FIFO order. Operands without a common owner stream record
    /// their uses on them until the next query.
    idle_streams: Mutex<VecDeque<Stream>>,
}

impl StagerCore {
    fn direction_state(&self, direction: Direction) -> &DirectionState {
        match direction {
            Direction::Upload => &self.up,
            Direction::Download => &self.down,
        }
    }

    /// Returns a stream that no other transfer uses.
    fn acquire_stream(&self) -> Result<Stream> {
        let idle = self.idle_streams.lock().unwrap_or_else(PoisonError::into_inner).pop_front();
        idle.map_or_else(|| self.streams.lease(), Ok)
    }

    /// Puts a transfer stream back for reuse. It must be free of errors.
    fn release_stream(&self, transfer_stream: &Stream) {
        self.idle_streams
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push_back(transfer_stream.clone());
    }
}

/// Transfers pageable memory and files to and from one device.
///
/// Cloning is cheap. Transfers keep the parts that they need alive.
///
/// ```
/// use aquifer::{DeviceBuffer, Runtime, StagerConfig};
///
/// let rt = Runtime::builder().or_sim_quietly().build()?;
/// let stager = rt.stager(0, StagerConfig::default())?;
/// let s = rt.device(0)?.stream()?;
/// let mut x: DeviceBuffer<u8> = rt.device(0)?.buffer(&s, 4096)?;
///
/// let (up, mut down) = (vec![1; x.len()], vec![0; x.len()]);
/// stager.try_scope(|s| s.upload(&up, &mut x).map(drop))?;
/// stager.try_scope(|s| s.download(&x, &mut down).map(drop))?;
/// assert_eq!(down, up);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct Stager {
    shared: Arc<StagerCore>,
}

impl Stager {
    /// Creates a stager for the device of `streams`, with slots from `pool`.
    ///
    /// The workers run on the NUMA node of that pool, or on any node if this process may not use
    /// the node's CPUs. Starts no thread and allocates no memory yet.
    ///
    /// Operands must belong to `streams`. For blocks of a device pool, pass that pool's own
    /// streams. Each transfer in flight leases a stream.
    ///
    /// # Errors
    /// [`MemoryError::BadSetting`] for an invalid configuration.
    pub fn new(
        host: &Host,
        pool: &PinnedPool,
        streams: &StreamPool,
        config: StagerConfig,
    ) -> Result<Self> {
        config.check()?;
        let nodes = host.topology.nodes();
        let cpus_of = |id| nodes.iter().find(|node| node.id == id).map(|node| &node.allowed_cpus);
        let node = pool.node().filter(|&id| cpus_of(id).is_some_and(|cpus| !cpus.is_empty()));
        let cpus = node.and_then(cpus_of).or(host.topology.cpus_allowed());
        let config = config.bounded(cpus.map_or(1, |cpus| cpus.len()));
        let cache = host.topology.last_level_cache(node);
        let state = |direction| DirectionState::new(host, pool, direction, &config, cache);
        let shared = StagerCore {
            device: streams.device(),
            node,
            up: state(Direction::Upload),
            down: state(Direction::Download),
            permits: Permits::new(config.depth),
            idle_streams: Mutex::default(),
            streams: streams.clone(),
            config,
        };
        Ok(Self { shared: Arc::new(shared) })
    }

    /// Creates all lanes now, so that later transfers do not wait for pinned memory. Blocks.
    ///
    /// # Errors
    /// Those of the pool or of the stream pool, if a direction cannot get a single lane.
    pub fn warm(&self) -> Result<()> {
        check_process()?;
        let both = [&self.shared.up, &self.shared.down];
        // One direction must not reclaim the lanes of the other.
        let _held = both.map(|state| state.lanes.hold_reclaim());
        both.into_iter().try_for_each(|state| state.lanes.ensure(state.lanes.limit()))
    }

    /// Gives all unused slots back to their pool, and returns the number of their bytes.
    #[must_use = "the bytes that went back"]
    pub fn trim(&self) -> u64 {
        if is_forked_child() {
            return 0;
        }
        self.shared.up.lanes.trim() + self.shared.down.lanes.trim()
    }

    /// Returns the device.
    #[must_use]
    pub fn device(&self) -> DeviceId {
        self.shared.device
    }

    /// Returns the NUMA node of the workers, `None` for any node.
    #[must_use]
    pub fn node(&self) -> Option<NodeId> {
        self.shared.node
    }

    /// Returns the configuration, with the numbers of workers limited to the available CPUs.
    #[must_use]
    pub fn config(&self) -> &StagerConfig {
        &self.shared.config
    }
}

impl fmt::Debug for Stager {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Stager")
            .field("device", &self.device())
            .field("node", &self.node())
            .field("config", self.config())
            .finish_non_exhaustive()
    }
}
