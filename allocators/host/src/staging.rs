//! Moving memory that is not pinned, and files, to the device and back at the speed of the link.
//!
//! A device reads pinned memory at 55 GB/s over `PCIe` 5 and any other through the driver at 9: the
//! driver copies it into pinned memory first, by one thread, and a thread copies that fast and no
//! faster. A [`Stager`] does the same with many.
//!
//! ```text
//!   slice, file ──► worker ──► slot ─┐
//!   ──────────────► worker ──► slot ─┼── the transfer's stream ──► link ──► device
//!   ──────────────► worker ──► slot ─┘
//! ```
//!
//! The workers of a transfer share a stream. The device takes longer to go from one stream to
//! another than to copy 512 KiB: 64 MiB in chunks of 1 MiB go at 33 GB/s with a stream for each of
//! eight workers, and at 41 with one for all.
//!
//! # Who does what
//! Each direction has workers on the pinned pool's node, and lanes: a few slots of pinned memory,
//! which a worker has to itself while it takes part in a transfer. Workers claim chunks of a
//! transfer until none is left, so that a slow one costs little. While they copy one slot, the
//! device copies the other. A thread that waits for its transfer takes part in it. Transfers of one
//! direction are begun in the order in which they came; the two directions go on side by side.
//!
//! Short transfers ([`StagerConfig::alone`]) are made by the calling thread, through a slot, or the
//! shortest to the device by the driver: waking others takes longer. It waits for them by a word
//! that the device writes where that takes less time than the driver's own wait ([`ShortWait`]).
//!
//! # Order
//! A transfer waits, on the device, for what has been queued for its operands before: its stream is
//! made to wait for their home if they have the same, and else they are ordered for it one by one.
//! It is finished when the host has seen all of its copies done, so that whatever is queued after
//! it needs to wait for nothing. Until then the operands are borrowed or owned by the transfer.
//!
//! # Soundness
//! | host memory and operands are | kept until the transfer is finished by |
//! |---|---|
//! | borrowed in [`Stager::scope`] | the scope, which waits before it returns, also on unwind |
//! | owned by a [`Ticket`] | the transfer itself; the ticket gives them back, and forgetting it leaks them |
//!
//! A slot is filled again, or goes back to its pool, only when the event behind its copies has
//! passed. If the driver refuses to say whether it has, the pool keeps the slot until it does.
//!
//! # What goes wrong
//! A refusal of the driver, a source that fails or panics, a device that is lost: the transfer
//! answers with a [`StageError`], and others go on. A transfer that waits for a slow source or a
//! busy operand holds up those of its direction that came after it.
//!
//! Where the driver refuses to say whether copies are done, it is asked again, in each of its ways,
//! until it does. One that refuses all of them for a second is taken for one that is gone, and with
//! it whatever was queued: an operand comes back then.
//!
//! A child process that was forked has neither the workers nor the slots: whatever it asks for, or
//! waits for, is answered by [`MemoryError::OtherProcess`] at once.
//!
//! Slots that no transfer uses stay with the stager, but go back to their pool where that has no
//! memory left, or is asked for some by others under its budget.

mod alone;
mod error;
mod file;
mod installed;
mod lane;
mod parts;
mod permit;
mod plan;
mod pump;
mod scope;
mod settle;
mod source;
mod stores;
mod submit;
mod ticket;
mod transfer;

pub use error::{Failed, StageError};
pub use file::{FileSource, ReadMode};
pub use installed::{install, installed};
pub use permit::{Permit, Ready};
pub use scope::{StageScope, Staged};
pub use settle::ShortWait;
pub use source::{Sink, Source};
pub use stores::Stores;
pub use ticket::{Begun, HostBuffer, Ticket};
pub use transfer::Progress;

use crate::{PinnedPool, kernel::Process, region::Host, topology::NodeId, workers::Workers};
use aquifer_core::{DeviceId, MemoryError, Result};
use aquifer_stream::{Stream, StreamPool, Timeline};
use lane::Lanes;
use permit::Permits;
use plan::{Grain, Way};
use settle::Waits;
use std::{
    collections::VecDeque,
    fmt,
    num::NonZeroUsize,
    sync::{Arc, Mutex, PoisonError},
};

/// How a [`Stager`] works. What the settings mean was measured on one H200's host, an Intel with 16
/// CPUs and 300 MiB of last-level cache, over a link that carries 55 GB/s; `aquifer bench stage`
/// takes all of them as flags.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct StagerConfig {
    /// Threads that fill slots for the device, at most. 1 to 256, and two fewer than the node has
    /// CPUs for us; with [`StagerConfig::down_workers`] they are no more than those CPUs, or each
    /// side has half of them. Eight fill slots at 68 GB/s and one at 10; twelve send no more than
    /// eight.
    pub up_workers: usize,
    /// Threads that empty slots of the device, at most, of their own. 1 to 256, as above.
    pub down_workers: usize,
    /// Bytes of a slot: the longest chunk. A multiple of 4096, up to 1 GiB. While each of eight
    /// workers called the driver for its own two slots, 1 MiB sent 37 GB/s, 2 MiB 49, 4 MiB 52.5
    /// and 8 MiB 52.7.
    pub slot: usize,
    /// Slots of each worker. 1 to 16; with one, the CPU and the device take turns. Four of 8 MiB
    /// are more than the cache holds, and send 40 GB/s.
    pub slots: usize,
    /// Bytes of the shortest chunk, with which a transfer begins and ends. 4096 up to a slot.
    pub least_chunk: usize,
    /// Bytes up to which a transfer from memory to the device goes through the driver, by the
    /// calling thread. It reads what is so short before it returns, as it would a slot: 4 and 16
    /// KiB take 6.9 and 8.8 µs, through a slot 6.9 and 9.0, and 64 KiB 16.8 and 13.5.
    pub direct: usize,
    /// The same for a transfer to memory. The driver takes 10.1 and 11.6 µs for 4 and 16 KiB, a
    /// slot 6.8 and 7.5.
    pub down_direct: usize,
    /// Bytes up to which the calling thread makes a transfer from memory to the device by itself,
    /// through a slot. Not more than a slot. 512 KiB take it 40 µs and eight workers, who have to
    /// be woken, 54; 1 MiB 74 and 84; 4 MiB some 300.
    pub alone: usize,
    /// The same for a transfer to memory. Before it came in pieces 512 KiB took it 69 µs, through
    /// its caches, and the workers 57; 1 MiB 132 and 65.
    pub down_alone: usize,
    /// Transfers under way at most, in both directions together. Each needs a stream.
    pub depth: usize,
    /// How the CPU writes into slots for the device.
    pub stores: Stores,
    /// How the CPU writes what comes from the device.
    pub down_stores: Stores,
    /// How the calling thread waits for a transfer that it makes by itself.
    pub short_wait: ShortWait,
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
            stores: Stores::Auto,
            down_stores: Stores::Auto,
            short_wait: ShortWait::Auto,
        }
    }
}

impl StagerConfig {
    fn check(&self) -> Result<()> {
        let within = |name, value: usize, least: usize, most: usize, expected| {
            if (least..=most).contains(&value) {
                Ok(())
            } else {
                Err(MemoryError::BadSetting { name, value: value.to_string(), expected })
            }
        };
        within("up_workers", self.up_workers, 1, 256, "1 to 256")?;
        within("down_workers", self.down_workers, 1, 256, "1 to 256")?;
        within("slots", self.slots, 1, 16, "1 to 16")?;
        within("depth", self.depth, 1, 1 << 16, "1 to 65536")?;
        within("slot", self.slot, 4096, 1 << 30, "4096 bytes to 1 GiB")?;
        within("slot", self.slot % 4096, 0, 0, "a multiple of 4096 bytes")?;
        within("least_chunk", self.least_chunk, 4096, self.slot, "4096 bytes up to a slot")
    }

    fn workers(&self, way: Way) -> usize {
        match way {
            Way::Up => self.up_workers,
            Way::Down => self.down_workers,
        }
    }

    /// The same with no more workers than so many CPUs are for.
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

    /// How a transfer of so many bytes is cut.
    fn grain(&self, way: Way, total: u64) -> Grain {
        let (least, slot) = (self.least_chunk as u64, self.slot as u64);
        let (least, last, most, shares) = match way {
            // What is being filled is not on its way: with long chunks, which all are filled side
            // by side, the link has nothing to do at first and too much in the end. They also touch
            // more of the slots before any of these is used again: 256 MiB go at 43 GB/s in chunks
            // of 2 MiB, and at 39 in 4.
            Way::Up => (least, None, (total / 128).max(MIB).clamp(least, slot), 1),
            // Here the link begins at once.
            Way::Down => {
                let usual = (total / 32).min(2 * MIB).clamp(least, slot);
                (usual, Some(2 * least).filter(|&last| last < usual), slot, 2)
            }
        };
        Grain { least, last, most, workers: self.workers(way) as u64, shares }
    }
}

const MIB: u64 = 1 << 20;

/// What a direction has of its own.
struct Side {
    workers: Workers,
    workers_most: usize,
    lanes: Arc<Lanes>,
    /// As it is configured.
    stores: Stores,
    /// Bytes of all its slots.
    slots: u64,
    /// Of the CPUs' last-level cache, where it is known.
    cache: Option<u64>,
}

impl Side {
    fn new(
        host: &Host,
        pool: &PinnedPool,
        way: Way,
        config: &StagerConfig,
        cache: Option<u64>,
    ) -> Self {
        let workers = config.workers(way);
        let threads = NonZeroUsize::new(workers).unwrap_or(NonZeroUsize::MIN);
        let stores = match way {
            Way::Up => config.stores,
            Way::Down => config.down_stores,
        };
        // One more than workers, for whoever waits and takes part.
        let lanes = workers + 1;
        let slots =
            (lanes as u64).saturating_mul(config.slots as u64).saturating_mul(config.slot as u64);
        let lanes = Arc::new(Lanes::new(pool, lanes, config.slots, config.slot));
        pool.keep_asking(&lanes);
        Self {
            workers: Workers::with_threads(&host.topology, host.kernel.clone(), threads),
            workers_most: workers,
            lanes,
            stores,
            slots,
            cache,
        }
    }
}

/// The stream that operands have been ordered for.
enum Front {
    /// Their home.
    Home(Arc<Timeline>),
    /// One of the stager's.
    Own(Stream),
}

impl Front {
    fn timeline(&self) -> &Arc<Timeline> {
        match self {
            Self::Home(timeline) => timeline,
            Self::Own(stream) => stream.timeline(),
        }
    }
}

/// What the stager's handles and its transfers share.
struct Shared {
    /// The process whose threads and memory these are. In a child of it a lock may be held for
    /// good.
    process: Process,
    streams: StreamPool,
    device: DeviceId,
    /// Where workers run; `None` for anywhere.
    node: Option<NodeId>,
    config: StagerConfig,
    up: Side,
    down: Side,
    permits: Permits,
    waits: Waits,
    /// Streams for transfers, used in turn: operands without a home in common are noted on theirs
    /// until somebody asks.
    roads: Mutex<VecDeque<Stream>>,
}

impl Shared {
    fn is_here(&self) -> bool {
        self.process.is_current()
    }

    /// An error in a child of the process that has the stager.
    fn here(&self) -> Result<()> {
        if self.is_here() { Ok(()) } else { Err(MemoryError::OtherProcess) }
    }

    fn side(&self, way: Way) -> &Side {
        match way {
            Way::Up => &self.up,
            Way::Down => &self.down,
        }
    }

    /// A stream that no other transfer has.
    fn take_road(&self) -> Result<Stream> {
        let idle = self.roads.lock().unwrap_or_else(PoisonError::into_inner).pop_front();
        idle.map_or_else(|| self.streams.lease(), Ok)
    }

    /// Takes a road back that nothing has gone wrong with.
    fn give_road(&self, road: &Stream) {
        self.roads.lock().unwrap_or_else(PoisonError::into_inner).push_back(road.clone());
    }
}

/// Moves pageable memory and files to one device and back. Cheap to clone; transfers keep what they
/// need of it.
///
/// ```
/// use aquifer_core::{Budget, DeviceId};
/// use aquifer_driver::sim::Sim;
/// use aquifer_host::{PinnedConfig, PinnedPool, Stager, StagerConfig, kernel::Kernel, region::Host, topology::Topology};
/// use aquifer_stream::StreamPool;
/// # use aquifer_driver::{OperandMut, Typed};
/// # use aquifer_host::StageError;
///
/// let sim = Sim::h200(1);
/// let host = Host::new(Topology::read()?, Kernel::new()).with_driver(sim.driver(), DeviceId(0));
/// let pool = PinnedPool::new(&host, &Budget::unlimited("pinned"), PinnedConfig::default())?;
/// let streams = StreamPool::new(sim.driver(), DeviceId(0), 64); // of a device pool: `pool.streams()`
/// let stager = Stager::new(&host, &pool, &streams, StagerConfig::default())?;
///
/// fn there_and_back(stager: &Stager, x: &mut (impl Typed<Item = u8> + OperandMut)) -> Result<u8, StageError> {
///     let (up, mut down) = (vec![1; x.len()], vec![0; x.len()]);
///     stager.try_scope(|s| s.upload(&up, x).map(drop))?;
///     stager.try_scope(|s| s.download(x, &mut down).map(drop))?;
///     Ok(down[0])
/// }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct Stager {
    shared: Arc<Shared>,
}

impl Stager {
    /// A stager for the device of `streams`, whose slots come from `pool` and whose workers run on
    /// that pool's node, or anywhere where it has no CPUs for us. Starts no thread and takes no
    /// memory yet.
    ///
    /// Operands must know `streams`: for blocks of a device pool it is that pool's own. A stream is
    /// leased for each transfer under way.
    ///
    /// # Errors
    /// [`MemoryError::BadSetting`] for a configuration that cannot be followed.
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
        let cpus = node.and_then(cpus_of).or(host.topology.cpus_allowed().value.as_ref());
        let config = config.bounded(cpus.map_or(1, |cpus| cpus.len()));
        // Where the kernel writes nonsense nothing is known.
        let cache = host.topology.last_level_cache(node).ok().and_then(|found| found.value);
        let side = |way| Side::new(host, pool, way, &config, cache);
        let shared = Shared {
            process: Process::current(),
            device: streams.device(),
            node,
            up: side(Way::Up),
            down: side(Way::Down),
            permits: Permits::new(config.depth),
            waits: Waits::new(config.short_wait),
            roads: Mutex::default(),
            streams: streams.clone(),
            config,
        };
        Ok(Self { shared: Arc::new(shared) })
    }

    /// Makes all lanes, so that no transfer has to wait for pinned memory later. Blocks.
    ///
    /// # Errors
    /// The pool's or the stream pool's, where there is not even one lane for a direction.
    pub fn warm(&self) -> Result<()> {
        self.shared.here()?;
        let sides = [&self.shared.up, &self.shared.down];
        // Neither direction is to get the other's.
        let _kept = sides.map(|side| side.lanes.keep());
        sides.into_iter().try_for_each(|side| side.lanes.ensure(side.lanes.most()))
    }

    /// Gives the slots that no transfer uses now back to their pool. Answers with their bytes.
    #[must_use = "the bytes that went back"]
    pub fn trim(&self) -> u64 {
        if !self.shared.is_here() {
            return 0;
        }
        self.shared.up.lanes.trim() + self.shared.down.lanes.trim()
    }

    /// The device.
    #[must_use]
    pub fn device(&self) -> DeviceId {
        self.shared.device
    }

    /// The node that its workers run on; `None` for anywhere.
    #[must_use]
    pub fn node(&self) -> Option<NodeId> {
        self.shared.node
    }

    /// How it works, with no more workers than there are CPUs for.
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
