//! Moving memory that is not pinned, and files, to the device and back at the speed of the link.
//!
//! A device reads pinned memory at 55 GB/s over `PCIe` 5 and any other through the driver at 9: the driver copies it into
//! pinned memory first, by one thread, and a thread copies that fast and no faster. A [`Stager`] does the same with many.
//!
//! ```text
//!   slice, file ──► worker ──► slot ─┐
//!   ──────────────► worker ──► slot ─┼── a stream each ──► link ──► device
//!   ──────────────► worker ──► slot ─┘
//! ```
//!
//! # Who does what
//! Each direction has workers on the pinned pool's node, and lanes: a stream and a few slots of pinned memory, which a
//! worker has to itself while it takes part in a transfer. Workers claim chunks of a transfer until none is left, so that
//! a slow one costs little. While they copy one slot, the device copies the other. A thread that waits for its transfer
//! takes part in it. Transfers of one direction are begun in the order in which they came; the two directions go on side
//! by side.
//!
//! Small transfers ([`StagerConfig::direct`]) go through the driver, by the calling thread: waking others takes longer.
//!
//! # Order
//! A transfer waits, on the device, for what has been queued for its operands before: one stream is made to wait for all
//! of that, and each lane for that stream. It is finished when the host has seen all of its copies done, so that whatever
//! is queued after it needs to wait for nothing. Until then the operands are borrowed or owned by the transfer.
//!
//! # Soundness
//! | host memory and operands are | kept until the transfer is finished by |
//! |---|---|
//! | borrowed in [`Stager::scope`] | the scope, which waits before it returns, also on unwind |
//! | owned by a [`Ticket`] | the transfer itself; the ticket gives them back, and forgetting it leaks them |
//!
//! A slot is filled again, or goes back to its pool, only when the event behind its copies has passed. If the driver
//! refuses to say whether it has, the pool keeps the slot until it does.
//!
//! # What goes wrong
//! A refusal of the driver, a source that fails or panics, a device that is lost: the transfer answers with a
//! [`StageError`], and others go on. A transfer that waits for a slow source or a busy operand holds up those of its
//! direction that came after it.

mod error;
mod file;
mod lane;
mod permit;
mod plan;
mod pump;
mod scope;
mod source;
mod stores;
mod ticket;
mod transfer;

pub use error::{Failed, StageError};
pub use file::{FileSource, ReadMode};
pub use permit::{Permit, Ready};
pub use scope::{StageScope, Staged};
pub use source::{Sink, Source};
pub use stores::Stores;
pub use ticket::{Begun, HostBuffer, Ticket};
pub use transfer::Progress;

use crate::{PinnedPool, region::Host, topology::NodeId, workers::Workers};
use aquifer_core::{DeviceId, MemoryError, Result};
use aquifer_driver::Driver;
use aquifer_stream::{Stream, StreamPool};
use lane::Lanes;
use permit::Permits;
use plan::{Grain, Way};
use std::{
    collections::VecDeque,
    fmt,
    num::NonZeroUsize,
    sync::{Arc, Mutex, PoisonError},
};

/// How a [`Stager`] works. On an H200's host with 16 CPUs more than eight threads to the device, and more than four back,
/// were no faster, with slots of 8 MiB each; `aquifer bench stage` takes all of this as flags.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct StagerConfig {
    /// Threads that fill slots for the device, at most; never more than the node has CPUs for us. 1 to 256.
    pub up_workers: usize,
    /// Threads that empty slots of the device, at most. 1 to 256.
    pub down_workers: usize,
    /// Bytes of a slot: the longest chunk. A multiple of 4096, up to 1 GiB.
    pub slot: usize,
    /// Slots of each worker. 1 to 16; with one, the CPU and the device take turns.
    pub slots: usize,
    /// Bytes of the shortest chunk, with which a transfer begins and ends. 4096 up to a slot.
    pub least_chunk: usize,
    /// Bytes up to which a transfer between memory and the device goes through the driver, by the calling thread.
    pub direct: usize,
    /// Transfers under way at most, in both directions together. Each needs a stream.
    pub depth: usize,
    /// How the CPU writes.
    pub stores: Stores,
}

impl Default for StagerConfig {
    fn default() -> Self {
        Self {
            up_workers: 8,
            down_workers: 4,
            slot: 4 << 20,
            slots: 2,
            least_chunk: 128 << 10,
            direct: 256 << 10,
            depth: 16,
            stores: Stores::default(),
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

    fn grain(&self, way: Way) -> Grain {
        let workers = match way {
            Way::Up => self.up_workers,
            Way::Down => self.down_workers,
        };
        Grain { least: self.least_chunk as u64, most: self.slot as u64, workers: workers as u64 }
    }
}

/// What a direction has of its own.
struct Side {
    workers: Workers,
    workers_most: usize,
    lanes: Lanes,
}

impl Side {
    fn new(
        host: &Host,
        pool: &PinnedPool,
        streams: &StreamPool,
        workers: usize,
        config: &StagerConfig,
    ) -> Self {
        let threads = NonZeroUsize::new(workers).unwrap_or(NonZeroUsize::MIN);
        Self {
            workers: Workers::with_threads(&host.topology, host.kernel.clone(), threads),
            workers_most: workers,
            // One more than workers, for whoever waits and takes part.
            lanes: Lanes::new(streams, pool, workers + 1, config.slots, config.slot),
        }
    }
}

/// What the stager's handles and its transfers share.
struct Shared {
    streams: StreamPool,
    device: DeviceId,
    /// Where workers run; `None` for anywhere.
    node: Option<NodeId>,
    config: StagerConfig,
    up: Side,
    down: Side,
    permits: Permits,
    /// Streams that stand for a transfer as a whole, used in turn: the operands of the last one are noted on it until
    /// somebody asks.
    fronts: Mutex<VecDeque<Stream>>,
}

impl Shared {
    fn side(&self, way: Way) -> &Side {
        match way {
            Way::Up => &self.up,
            Way::Down => &self.down,
        }
    }

    fn driver(&self) -> &Arc<dyn Driver> {
        self.streams.driver()
    }

    /// A stream that no other transfer has.
    fn take_front(&self) -> Result<Stream> {
        let idle = self.fronts.lock().unwrap_or_else(PoisonError::into_inner).pop_front();
        idle.map_or_else(|| self.streams.lease(), Ok)
    }

    /// Takes a front back; one that something went wrong with goes back to the pool of streams.
    fn give_front(&self, front: &Stream, well: bool) {
        if well {
            self.fronts.lock().unwrap_or_else(PoisonError::into_inner).push_back(front.clone());
        }
    }
}

/// Moves pageable memory and files to one device and back. Cheap to clone; transfers keep what they need of it.
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
///     stager.scope(|s| s.upload(&up, x).map(drop))??;
///     stager.scope(|s| s.download(x, &mut down).map(drop))??;
///     Ok(down[0])
/// }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct Stager {
    shared: Arc<Shared>,
}

impl Stager {
    /// A stager for the device of `streams`, whose slots come from `pool` and whose workers run on that pool's node, or
    /// anywhere where it has no CPUs for us. Starts no thread and takes no memory yet.
    ///
    /// Operands must know `streams`: for blocks of a device pool it is that pool's own. A stream is leased for each worker
    /// and for each transfer under way.
    ///
    /// # Errors
    /// [`MemoryError::BadSetting`] for a configuration that cannot be followed.
    pub fn new(host: &Host, pool: &PinnedPool, streams: &StreamPool, config: StagerConfig) -> Result<Self> {
        config.check()?;
        let nodes = host.topology.nodes();
        let has_cpus = |id: &NodeId| nodes.iter().any(|node| node.id == *id && !node.allowed_cpus.is_empty());
        let shared = Shared {
            device: streams.device(),
            node: pool.node().filter(has_cpus),
            up: Side::new(host, pool, streams, config.up_workers, &config),
            down: Side::new(host, pool, streams, config.down_workers, &config),
            permits: Permits::new(config.depth),
            fronts: Mutex::default(),
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
        [&self.shared.up, &self.shared.down]
            .into_iter()
            .try_for_each(|side| side.lanes.ensure(side.lanes.most()))
    }

    /// Gives the slots that no transfer uses now back to their pool. Answers with their bytes.
    #[must_use = "the bytes that went back"]
    pub fn trim(&self) -> u64 {
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

    /// How it works.
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
