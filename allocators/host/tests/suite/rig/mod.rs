//! A stager on a simulated device, and operands for it.
#![allow(dead_code, reason = "each test binary uses a part of it")]
#![allow(clippy::unwrap_used, reason = "a support function that fails is a failed test")]
#![allow(unsafe_code, reason = "implements operands")]

#[path = "../../../../../tests/support/woken.rs"]
mod woken;

use aquifer_core::{Budget, DeviceId, Result};
use aquifer_driver::{
    Access, DeviceRange, KeepAlive, Operand, OperandMut, RawStream, Typed,
    sim::{Sim, SimKernel},
};
use aquifer_host::{
    PinnedConfig, PinnedPool, Stager, StagerConfig,
    kernel::Kernel as System,
    region::{Host, PageTier},
};
use aquifer_stream::{Stream, StreamPool, UseList};
use std::{thread, time::Duration};
pub(crate) use woken::block_on;

pub(crate) const GPU: DeviceId = DeviceId(0);
/// Longer than any operation takes, unless it hangs.
pub(crate) const PATIENCE: Duration = Duration::from_secs(120);
pub(crate) const KIB: usize = 1 << 10;
pub(crate) const SLOT: usize = 64 * KIB;

/// Returns settings with slots so small that little data fills many.
pub(crate) fn config() -> StagerConfig {
    let mut config = StagerConfig::default();
    (config.up_workers, config.down_workers) = (3, 2);
    (config.slot, config.least_chunk) = (SLOT, 8 * KIB);
    (config.direct, config.down_direct) = (KIB, KIB);
    (config.alone, config.down_alone) = (8 * KIB, 8 * KIB);
    config.depth = 8;
    config
}

pub(crate) fn pinned() -> PinnedConfig {
    let mut config = PinnedConfig::default();
    config.chunk = 2 << 20;
    config.pages = PageTier::Base;
    config.patience = Duration::ZERO;
    config
}

pub(crate) struct Rig {
    pub(crate) sim: Sim,
    pub(crate) budget: Budget,
    pub(crate) pool: PinnedPool,
    pub(crate) streams: StreamPool,
    pub(crate) stager: Stager,
    pub(crate) home: Stream,
}

impl Rig {
    pub(crate) fn new() -> Self {
        Self::on(Sim::h200(1).stepped(), GPU, config(), pinned())
    }

    pub(crate) fn with(config: StagerConfig) -> Self {
        Self::on(Sim::h200(1).stepped(), GPU, config, pinned())
    }

    pub(crate) fn on(
        sim: Sim,
        device: DeviceId,
        config: StagerConfig,
        pinned: PinnedConfig,
    ) -> Self {
        let host =
            Host::new(crate::support::topology(), System::new()).with_driver(sim.driver(), device);
        let budget = Budget::new("pinned", 64 << 20);
        let pool = PinnedPool::new(&host, &budget, pinned).unwrap();
        let streams = StreamPool::new(sim.driver(), device, 64);
        let stager = Stager::new(&host, &pool, &streams, config).unwrap();
        let home = streams.lease().unwrap();
        Self { sim, budget, pool, streams, stager, home }
    }

    pub(crate) fn operand(&self, bytes: usize) -> Plain {
        Plain::new(self, bytes)
    }

    /// Queues a kernel on the operand's owner stream that fills it with a byte.
    pub(crate) fn fill(&self, x: &mut Plain, byte: u8) {
        x.order_mut(self.home.raw(), None, Access::Write).unwrap();
        let fill = SimKernel::new("fill")
            .writes(x.range, None)
            .run(move |memory| memory.write(0).fill(byte));
        self.sim.launch(self.home.raw(), fill).unwrap();
    }

    /// Queues a kernel on the operand's owner stream that reads it.
    pub(crate) fn look(&self, x: &Plain) {
        x.order(self.home.raw(), None, Access::Read).unwrap();
        self.sim.launch(self.home.raw(), SimKernel::new("look").reads(x.range, None)).unwrap();
    }

    /// Returns the current bytes on the device.
    pub(crate) fn bytes(&self, x: &Plain) -> Vec<u8> {
        self.sim.read_back(x.range).unwrap()
    }

    #[track_caller]
    pub(crate) fn assert_silent(&self) {
        let violations = self.sim.violations();
        assert!(violations.is_empty(), "{}", violations[0]);
    }

    /// Drops everything and asserts that nothing remains with the driver or the budget.
    #[track_caller]
    pub(crate) fn assert_all_given_back(self) {
        self.assert_silent();
        let Self { sim, budget, pool, streams, stager, home } = self;
        drop((stager, home, streams));
        // A worker may be about to drop the last transfer.
        let deadline = std::time::Instant::now() + PATIENCE;
        drop(pool);
        while budget.used() > 0 || !sim.outstanding().is_empty() {
            aquifer_host::pool::sweep();
            assert!(
                std::time::Instant::now() < deadline,
                "{} bytes are charged still, and {}",
                budget.used(),
                sim.outstanding()
            );
            thread::yield_now();
        }
        let violations = sim.violations();
        assert!(violations.is_empty(), "{}", violations[0]);
    }
}

/// Returns bytes that differ from their neighbours and from those of another seed.
pub(crate) fn pattern(bytes: usize, seed: u8) -> Vec<u8> {
    (0..bytes).map(|at| (at * 7 + at / 251) as u8 ^ seed).collect()
}

/// A device allocation whose uses are recorded.
#[derive(Debug)]
pub(crate) struct Plain {
    pub(crate) range: DeviceRange,
    streams: StreamPool,
    home: Stream,
    uses: UseList,
    /// Whether the operand orders its uses.
    pub(crate) ordered: bool,
    /// Whether the operand names its owner stream.
    pub(crate) homely: bool,
    sim: Sim,
}

impl Plain {
    pub(crate) fn new(rig: &Rig, bytes: usize) -> Self {
        let device = rig.home.device();
        let address = rig.sim.driver().mem_alloc(device, bytes.max(1) as u64).unwrap();
        let range = DeviceRange { device, address, bytes: bytes as u64 };
        let (streams, home) = (rig.streams.clone(), rig.home.clone());
        Self {
            range,
            streams,
            home,
            uses: UseList::new(),
            ordered: true,
            homely: true,
            sim: rig.sim.clone(),
        }
    }
}

impl Drop for Plain {
    fn drop(&mut self) {
        self.sim.clear_failures();
        let driver = self.sim.driver();
        // A lost device has nothing left to wait for or to free.
        if driver.device_synchronize(self.range.device).is_ok() {
            // SAFETY: 1. allocated by `new`. 2. nothing uses it: the device is idle.
            unsafe { driver.mem_free(self.range.device, self.range.address) }.unwrap();
        }
    }
}

// SAFETY: 1. its own allocation until the drop, which waits for the device. 2. the list orders
// uses, and the memory has no other user; deliberately broken where a test omits the order. 3. the
// owner stream is leased while the operand lives.
unsafe impl Operand for Plain {
    fn range(&self) -> DeviceRange {
        self.range
    }

    fn machine(&self) -> Option<u64> {
        Some(self.sim.driver().machine())
    }

    fn home_stream(&self) -> Option<RawStream> {
        self.homely.then(|| self.home.raw())
    }

    fn order(&self, stream: RawStream, alive: Option<KeepAlive>, access: Access) -> Result<()> {
        if !self.ordered {
            return Ok(());
        }
        let on = self.streams.timeline(stream, alive)?;
        self.uses.lend(self.range.address, self.home.timeline(), &on, access)
    }
}

// SAFETY: 1. the allocation has no other owner.
unsafe impl OperandMut for Plain {}

impl Typed for Plain {
    type Item = u8;
    fn len(&self) -> usize {
        self.range.bytes as usize
    }
}
