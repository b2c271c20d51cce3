//! Helpers that the tests of this crate share.
#![allow(dead_code, clippy::unwrap_used, reason = "each test binary uses some of it, and in tests")]

use aquifer_core::{
    Budget,
    budget::{Offer, Reclaim},
    random::SplitMix64,
};
use aquifer_device::{Block, DeviceBuffer, DevicePool, PoolConfig, Request, StableBlock};
use aquifer_driver::{
    Access, Call, DeviceId, DeviceRange,
    sim::{DeviceConfig, Sim, SimConfig},
};
use aquifer_stream::Stream;
use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

pub(crate) const MIB: u64 = 1 << 20;
/// Longer than any operation takes on any machine, unless it hangs.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// Driver calls that concern memory. Those for events are not included.
pub(crate) const MEMORY: [Call; 6] = [
    Call::HandleCreate,
    Call::HandleRelease,
    Call::Map,
    Call::Unmap,
    Call::SetAccess,
    Call::MemAlloc,
];

/// A pool on a simulated device, under a limit in MiB.
pub(crate) struct Rig {
    pub(crate) sim: Sim,
    pub(crate) pool: DevicePool,
    pub(crate) budget: Budget,
}

impl Rig {
    /// Creates a pool on a machine that stores bytes and runs work as it is queued.
    pub(crate) fn new(limit_mib: u64) -> Self {
        Self::on(Sim::h200(1), limit_mib, |_| ())
    }

    /// Creates a pool on a machine that runs work only when the host waits for it.
    pub(crate) fn stepped(limit_mib: u64) -> Self {
        Self::on(Sim::h200(1).stepped(), limit_mib, |_| ())
    }

    pub(crate) fn on(sim: Sim, limit_mib: u64, set: impl FnOnce(&mut PoolConfig)) -> Self {
        let budget = Budget::new("the device", limit_mib * MIB);
        let mut config = PoolConfig::with_budget(budget.clone());
        set(&mut config);
        let pool = DevicePool::open(sim.driver(), DeviceId(0), config).unwrap();
        Self { sim, pool, budget }
    }

    pub(crate) fn stream(&self) -> Stream {
        self.pool.stream().unwrap()
    }

    pub(crate) fn bytes(&self, stream: &Stream, bytes: u64) -> DeviceBuffer<u8> {
        self.pool.buffer(stream, bytes as usize).unwrap()
    }

    /// Returns a block of this many bytes.
    #[track_caller]
    pub(crate) fn alloc(&self, stream: &Stream, bytes: u64) -> Block {
        self.pool.alloc(stream, Request::bytes(bytes)).unwrap()
    }

    /// Returns a block of this many MiB.
    #[track_caller]
    pub(crate) fn take(&self, stream: &Stream, mib: u64) -> Block {
        self.alloc(stream, mib * MIB)
    }

    #[track_caller]
    pub(crate) fn stable(&self, stream: &Stream, bytes: u64) -> StableBlock {
        self.pool.alloc_stable(stream, Request::bytes(bytes)).unwrap()
    }

    /// Queues a kernel on the whole block.
    #[track_caller]
    pub(crate) fn access(&self, stream: &Stream, block: &Block, access: Access) {
        let generation = Some(block.generation());
        self.sim.access(stream.raw(), range(block), access, generation).unwrap();
    }

    /// Queues a kernel that writes the whole block.
    #[track_caller]
    pub(crate) fn write(&self, stream: &Stream, block: &Block) {
        self.access(stream, block, Access::Write);
    }

    /// Uses the whole block on any stream, and tells the pool.
    #[track_caller]
    pub(crate) fn uses(&self, stream: &Stream, block: &Block, access: Access) {
        let used = block.prepare(stream, access).unwrap();
        self.access(stream, block, access);
        used.finish().unwrap();
    }

    /// Returns how often the driver was called.
    pub(crate) fn calls(&self, call: Call) -> u64 {
        self.sim.driver().calls().get(call)
    }

    /// Returns as many streams as are asked for.
    pub(crate) fn streams<const N: usize>(&self) -> [Stream; N] {
        std::array::from_fn(|_| self.stream())
    }

    /// Asserts that the oracle found no violation.
    #[track_caller]
    pub(crate) fn assert_silent(&self) {
        assert_silent(&self.sim);
    }

    /// Trims the pool, and asserts that nothing of it is left and that the oracle is silent.
    #[track_caller]
    pub(crate) fn assert_empty(&self) {
        self.pool.trim(0).unwrap();
        let stats = self.pool.stats();
        let left = [stats.live, stats.cached, stats.pending, stats.graphs, stats.physical];
        assert_eq!((left, stats.requested, stats.blocks), ([0; 5], 0, 0), "{stats:?}");
        assert_eq!(self.budget.used(), 0);
        self.assert_silent();
    }

    /// Drops the pool, and asserts that the driver has everything back.
    #[track_caller]
    pub(crate) fn close(self) {
        let Self { sim, pool, budget } = self;
        drop(pool);
        assert_returned(&sim, &budget);
    }
}

#[track_caller]
pub(crate) fn assert_silent(sim: &Sim) {
    let violations = sim.violations();
    assert!(violations.is_empty(), "{}", violations[0]);
}

/// Asserts that the driver has everything back, and that nothing is charged.
#[track_caller]
pub(crate) fn assert_returned(sim: &Sim, budget: &Budget) {
    assert_silent(sim);
    assert_eq!(budget.used(), 0);
    assert!(sim.outstanding().is_empty(), "{}", sim.outstanding());
}

/// Returns a device without virtual memory.
pub(crate) fn plain() -> Sim {
    let mut config = SimConfig::h200(1);
    config.devices = vec![DeviceConfig::without_virtual_memory()];
    Sim::new(config)
}

/// Repeatable random numbers.
pub(crate) struct Random(SplitMix64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(SplitMix64::new(seed))
    }

    pub(crate) fn below(&mut self, end: u64) -> u64 {
        self.0.next_u64() % end
    }

    pub(crate) fn index(&mut self, len: usize) -> usize {
        self.below(len as u64) as usize
    }
}

pub(crate) fn range(block: &Block) -> DeviceRange {
    DeviceRange { device: block.device(), address: block.address(), bytes: block.bytes() }
}

/// Reads a buffer on the device by a copy.
pub(crate) fn read(stream: &Stream, buffer: &DeviceBuffer<u8>) -> Vec<u8> {
    let mut back = vec![0; buffer.len()];
    stream.scope(|c| c.download(buffer, &mut back)).unwrap().unwrap();
    back
}

/// A reclaimer that offers a MiB, and does something at each call.
pub(crate) struct Reclaimer {
    calls: AtomicU64,
    act: Box<dyn Fn() + Send + Sync>,
}

impl Reclaimer {
    pub(crate) fn new(act: impl Fn() + Send + Sync + 'static) -> Arc<Self> {
        Arc::new(Self { calls: AtomicU64::new(0), act: Box::new(act) })
    }

    pub(crate) fn calls(&self) -> u64 {
        self.calls.load(Ordering::Relaxed)
    }
}

impl Reclaim for Reclaimer {
    fn name(&self) -> &'static str {
        "a reclaimer"
    }
    fn offer(&self) -> Offer {
        Offer { bytes: MIB, cost: Duration::ZERO }
    }
    fn reclaim(&self, _bytes: u64, _deadline: Option<Instant>) {
        self.calls.fetch_add(1, Ordering::Relaxed);
        (self.act)();
    }
}
