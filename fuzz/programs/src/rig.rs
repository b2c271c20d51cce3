//! What programs over device pools share: a pool on a simulated device with its streams and open
//! uses, operations on them, and the checks of all.
#![expect(clippy::expect_used, clippy::panic, reason = "a broken promise is told by a panic")]

use crate::{peaks::TruePeaks, program::Bytes};
use aquifer_core::{
    Budget, MemoryError, PoolStats, Result,
    budget::{Offer, Reclaim},
};
use aquifer_device::{Block, DevicePool, PoolConfig};
use aquifer_driver::{
    Access, Call, DeviceId, DeviceRange, Operand,
    sim::{DeviceConfig, Sim, SimConfig},
};
use aquifer_stream::{Stream, Use};
use std::{
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

/// Accesses are declared for memory that the program holds, on streams of an idle device.
const OURS: &str = "an access to memory of ours";
/// Calls on an idle device for which no fault is planned.
pub(crate) const IDLE: &str = "no fault is left, and the device is idle";

/// Returns a simulated machine with one device, which has virtual memory or not.
pub(crate) fn simulated(mapping: bool) -> Sim {
    let mut config = SimConfig::h200(1);
    if !mapping {
        config.devices = vec![DeviceConfig::without_virtual_memory()];
    }
    Sim::new(config)
}

/// A prepared use whose work is not queued yet.
pub(crate) struct Open {
    pub(crate) used: Use,
    pub(crate) stream: Stream,
    /// What its work will touch.
    pub(crate) ranges: Vec<DeviceRange>,
    pub(crate) generation: u64,
    pub(crate) access: Access,
}

impl Open {
    /// Returns a use of all of a block.
    pub(crate) fn of(used: Use, block: &Block, stream: &Stream, access: Access) -> Self {
        let (ranges, generation) = (vec![block.range()], block.generation());
        Self { used, stream: stream.clone(), ranges, generation, access }
    }

    /// Queues the work, and ends the use.
    pub(crate) fn work(self, sim: &Sim) -> Result<()> {
        for range in self.ranges {
            declare(sim, &self.stream, range, self.access, self.generation);
        }
        self.used.finish()
    }

    /// Ends the use as the next byte says: after its work, or without it.
    pub(crate) fn end(self, sim: &Sim, bytes: &mut Bytes<'_>) {
        if bytes.flag() {
            // A planned fault may hit it.
            let _ = self.work(sim);
        } else {
            self.used.abort();
        }
    }
}

/// Declares work on memory that is ordered with the stream.
pub(crate) fn declare(
    sim: &Sim,
    stream: &Stream,
    range: DeviceRange,
    access: Access,
    generation: u64,
) {
    sim.access(stream.raw(), range, access, Some(generation)).expect(OURS);
}

/// Declares work on a block that is ordered with the stream.
pub(crate) fn access(sim: &Sim, stream: &Stream, block: &Block, access: Access) {
    declare(sim, stream, block.range(), access, block.generation());
}

/// Runs work that must not call the driver.
pub(crate) fn quietly<T>(sim: &Sim, what: &str, work: impl FnOnce() -> T) -> T {
    let before = sim.driver().calls().made();
    let answer = work();
    assert_eq!(before, sim.driver().calls().made(), "{what} called the driver");
    answer
}

/// Trims a pool and checks that no live memory is released.
pub(crate) fn trim(pool: &DevicePool, keep: u64) {
    let before = pool.stats();
    if pool.trim(keep).is_ok() {
        let after = pool.stats();
        assert_eq!(before.live, after.live, "a trim took live memory");
        assert!(after.physical <= before.physical, "a trim took memory");
    }
}

/// Runs one item of a stream, or waits for all of them.
pub(crate) fn go_on(sim: &Sim, stream: &Stream, bytes: &mut Bytes<'_>) {
    if bytes.flag() {
        sim.step(stream.raw());
    } else {
        // A planned fault may hit it.
        let _ = stream.synchronize();
    }
}

/// Returns the value of an operation, or `None` after a driver error or without memory. Panics on
/// other errors.
pub(crate) fn went<T>(answer: Result<T>) -> Option<T> {
    match answer {
        Ok(value) => Some(value),
        Err(MemoryError::Driver(_) | MemoryError::OutOfMemory(_)) => None,
        Err(other) => panic!("{other:?}"),
    }
}

/// Returns the bytes of the device that are in use.
pub(crate) fn missing(sim: &Sim, device: DeviceId) -> u64 {
    let memory = sim.driver().memory_info(device).expect("an idle device tells");
    memory.total - memory.free
}

/// Checks that the oracle has nothing to report.
pub(crate) fn assert_silent(sim: &Sim) {
    let violations = sim.violations();
    assert!(violations.is_empty(), "{}", violations[0]);
}

/// Checks that no two of these overlap.
pub(crate) fn assert_apart(ranges: impl IntoIterator<Item = DeviceRange>) {
    let mut ranges: Vec<_> = ranges.into_iter().collect();
    ranges.sort_unstable_by_key(|range| (range.device.0, range.address));
    for two in ranges.windows(2) {
        let apart =
            two[0].device != two[1].device || two[0].address + two[0].bytes <= two[1].address;
        assert!(apart, "{two:?} overlap");
    }
}

/// Checks that no memory is more than what is held.
pub(crate) fn assert_within(stats: &PoolStats) {
    let spanned = stats.live + stats.cached + stats.pending;
    assert!(spanned <= stats.physical, "more is spanned than is held: {stats:?}");
}

/// Trims a pool without blocks and work, and checks that nothing is left of it.
pub(crate) fn assert_empty(pool: &DevicePool) {
    pool.trim(0).expect(IDLE);
    let stats = pool.stats();
    let left = [stats.live, stats.pending, stats.cached, stats.graphs, stats.physical];
    assert_eq!(left, [0; 5], "{stats:?}");
}

/// Checks that the oracle has nothing to report, and that the device has everything back.
pub(crate) fn assert_returned(sim: &Sim) {
    assert_silent(sim);
    assert!(sim.outstanding().is_empty(), "{}", sim.outstanding());
}

/// The pool and its simulated device.
pub(crate) struct Rig {
    pub(crate) sim: Sim,
    pub(crate) budget: Budget,
    pub(crate) pool: DevicePool,
    pub(crate) streams: Vec<Stream>,
    pub(crate) open: Vec<Open>,
    pub(crate) peaks: TruePeaks,
}

impl Rig {
    /// Opens a pool of the machine's first device, and streams of it.
    pub(crate) fn open(sim: Sim, config: PoolConfig, streams: usize) -> Self {
        let pool = DevicePool::open(sim.driver(), DeviceId(0), config).expect(IDLE);
        let streams = (0..streams).map(|_| pool.stream().expect(IDLE)).collect();
        let budget = pool.budget().clone();
        Self { sim, budget, pool, streams, open: Vec::new(), peaks: TruePeaks::default() }
    }

    /// Returns the index of one of the streams.
    pub(crate) fn pick_stream(&self, bytes: &mut Bytes<'_>) -> usize {
        bytes.below(self.streams.len())
    }

    /// Makes one of these calls fail soon.
    pub(crate) fn fail_one<const N: usize>(&self, bytes: &mut Bytes<'_>, of: [Call; N]) {
        let call = bytes.pick(of);
        // Out of memory, which runs all reclaim paths, or another error, which does not.
        let code = if bytes.flag() { 2 } else { 999 };
        self.sim.fail(call, u64::from(bytes.choice(5)) + 1, code);
    }

    /// Runs one item of a stream, or waits for all of them.
    pub(crate) fn go_on(&self, bytes: &mut Bytes<'_>) {
        go_on(&self.sim, &self.streams[self.pick_stream(bytes)], bytes);
    }

    /// Changes the limit, to at most `most` MiB.
    pub(crate) fn limit(&self, bytes: &mut Bytes<'_>, most: u8) {
        self.budget.set_limit((u64::from(bytes.choice(most)) + 1) << 20);
    }

    /// Ends one of the prepared uses.
    pub(crate) fn end_one(&mut self, bytes: &mut Bytes<'_>) {
        if let Some(open) = bytes.take(&mut self.open) {
            open.end(&self.sim, bytes);
        }
    }

    /// Checks that the oracle is silent, that what is charged is what is held, and the peaks.
    /// Returns the figures of the pool.
    pub(crate) fn check(&self, live: Option<u64>, requested: Option<u64>) -> PoolStats {
        self.check_on(self.streams.len(), live, requested)
    }

    /// Does so for a pool that other streams than these have used, too.
    pub(crate) fn check_on(
        &self,
        streams: usize,
        live: Option<u64>,
        requested: Option<u64>,
    ) -> PoolStats {
        assert_silent(&self.sim);
        if cfg!(debug_assertions) {
            self.pool.check_invariants();
        }
        let stats = self.pool.stats();
        assert_eq!(stats.physical, self.budget.used(), "what is charged is what is held");
        if let Some(live) = live {
            assert_eq!(stats.live, live, "live bytes: {stats:?}");
        }
        if let Some(requested) = requested {
            assert_eq!(stats.requested, requested, "requested bytes: {stats:?}");
        }
        self.peaks.check(&self.pool, &stats, streams, (live, requested));
        stats
    }

    /// Queues the work of all prepared uses.
    pub(crate) fn work_all(&mut self) {
        for open in self.open.drain(..) {
            let _ = open.work(&self.sim);
        }
    }

    /// Waits for all streams, closes the pool, which has no blocks any more, and checks that
    /// nothing is left.
    pub(crate) fn finish(self) {
        let Self { sim, budget, pool, streams, .. } = self;
        streams.iter().for_each(|stream| stream.synchronize().expect(IDLE));
        assert_empty(&pool);
        assert_eq!(budget.used(), 0, "a charge was lost");
        drop((pool, streams));
        assert_returned(&sim);
    }
}

/// Blocks that an application can evict.
pub(crate) struct App<T> {
    blocks: Mutex<Vec<T>>,
    cost: Duration,
    capacity: fn(&T) -> u64,
}

impl<T> App<T> {
    /// Returns an application without blocks, each of whose evictions costs that much.
    pub(crate) fn new(cost: Duration, capacity: fn(&T) -> u64) -> Self {
        Self { blocks: Mutex::default(), cost, capacity }
    }

    pub(crate) fn blocks(&self) -> MutexGuard<'_, Vec<T>> {
        self.blocks.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T: Send> Reclaim for App<T> {
    fn name(&self) -> &'static str {
        "an application"
    }

    fn offer(&self) -> Offer {
        Offer { bytes: self.blocks().iter().map(self.capacity).sum(), cost: self.cost }
    }

    fn reclaim(&self, bytes: u64, _: Option<Instant>) {
        let mut gave = 0;
        while gave < bytes {
            let Some(block) = self.blocks().pop() else { break };
            gave += (self.capacity)(&block);
        }
    }
}

/// Notes how much each budget may have used at the end of a step. Use above a lowered limit may
/// stay, but must not grow.
pub(crate) fn begin_step(most: &mut [u64], budgets: &[Budget]) {
    for (most, budget) in most.iter_mut().zip(budgets) {
        *most = budget.limit().max(budget.used());
        budget.reset_peak();
    }
}

/// Checks that no budget has used more than noted in this step.
pub(crate) fn check_peaks(most: &[u64], budgets: &[Budget]) {
    for (budget, most) in budgets.iter().zip(most) {
        assert!(budget.peak() <= *most, "{} above the limit: {budget:?}", budget.peak() - most);
        assert_eq!(budget.panics(), 0);
    }
}
