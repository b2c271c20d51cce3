//! Helpers that the tests of this crate share.
#![allow(dead_code, clippy::unwrap_used, reason = "each test binary uses some of it, and in tests")]

use aquifer_core::{Budget, random::SplitMix64};
use aquifer_device::{Block, DeviceBuffer, DevicePool, PoolConfig};
use aquifer_driver::{DeviceId, DeviceRange, sim::Sim};
use aquifer_stream::Stream;
use std::time::Duration;

pub(crate) const MIB: u64 = 1 << 20;
/// Longer than any operation takes on any machine, unless it hangs.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

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

    /// Asserts that the oracle found no violation.
    #[track_caller]
    pub(crate) fn assert_silent(&self) {
        let violations = self.sim.violations();
        assert!(violations.is_empty(), "{}", violations[0]);
    }
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
