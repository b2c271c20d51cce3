//! Helpers that the tests of the facade share.
#![allow(dead_code, reason = "each test binary uses some of it")]
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a support function that fails is a failed test"
)]

pub(crate) mod woken;

use aquifer::{
    DeviceBuffer, PinnedAllocator, PinnedConfig, Runtime, Stream, host::PageTier, sim::Sim,
    vec::Vec as PinnedVec,
};
use aquifer_host::pool;
use std::{
    sync::mpsc,
    thread,
    time::{Duration, Instant},
};

pub(crate) const MIB: usize = 1 << 20;
/// Longer than any operation takes on any machine, unless it hangs.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// Returns settings of pinned pools that take little memory and do not wait.
pub(crate) fn small() -> PinnedConfig {
    let mut config = PinnedConfig::default();
    config.chunk = 4 * MIB;
    config.pages = PageTier::Transparent;
    config.patience = Duration::ZERO;
    config
}

/// Builds a complete runtime on a simulated machine.
pub(crate) fn runtime(sim: &Sim) -> Runtime {
    let builder = Runtime::builder().driver(sim.driver()).pinned(small());
    builder.pinned_budget(64 << 20).device_budget(256 << 20).build().unwrap()
}

/// Reads a buffer on the device by a copy.
pub(crate) fn read(stream: &Stream, buffer: &DeviceBuffer<u8>) -> Vec<u8> {
    let mut back = vec![0; buffer.len()];
    stream.scope(|c| c.download(buffer, &mut back)).unwrap().unwrap();
    back
}

/// Asserts that the machine has everything back. A sweep returns what closed pools of pinned memory
/// have left: this thread's, or that of another test, which may be processing it.
#[track_caller]
pub(crate) fn assert_all_given_back(sim: &Sim) {
    let begun = Instant::now();
    while !sim.outstanding().is_empty() {
        assert!(begun.elapsed() < PATIENCE, "{}", sim.outstanding());
        pool::sweep();
        thread::yield_now();
    }
}

#[track_caller]
pub(crate) fn assert_silent(sim: &Sim) {
    let violations = sim.violations();
    assert!(violations.is_empty(), "{}", violations[0]);
}

/// Runs `work` on a separate thread, and fails the test instead of hanging with it.
#[track_caller]
pub(crate) fn within<R: Send + 'static>(work: impl FnOnce() -> R + Send + 'static) -> R {
    let (tell, told) = mpsc::channel();
    thread::spawn(move || tell.send(work()));
    told.recv_timeout(PATIENCE).expect("this should have come back by now, with an answer")
}

/// Bytes in pinned memory.
pub(crate) type Bytes = PinnedVec<u8, PinnedAllocator>;

/// A runtime on one device, with a stream and a buffer on it.
pub(crate) struct Rig {
    pub(crate) sim: Sim,
    pub(crate) rt: Runtime,
    pub(crate) s: Stream,
    pub(crate) x: DeviceBuffer<u8>,
}

impl Rig {
    pub(crate) fn new(sim: Sim) -> Self {
        let rt = runtime(&sim);
        let pool = rt.devices()[0].clone();
        let made = pool.stream().and_then(|s| Ok((pool.buffer(&s, MIB)?, s)));
        let Ok((x, s)) = made else { unreachable!("a fresh device has a mebibyte") };
        Self { sim, rt, s, x }
    }

    pub(crate) fn stepped() -> Self {
        Self::new(Sim::h200(1).stepped())
    }

    /// Returns a pinned vector of one MiB filled with one value.
    pub(crate) fn bytes(&self, value: u8) -> Bytes {
        let mut bytes = PinnedVec::with_capacity_in(MIB, self.rt.pinned_near(0).allocator());
        bytes.resize(MIB, value);
        assert_eq!(
            self.rt.pinned_near(0).is_pinned(std::ptr::NonNull::from(&bytes[0])),
            Some(true)
        );
        bytes
    }

    /// Returns the address of the next such vector.
    pub(crate) fn next_address(&self) -> usize {
        self.bytes(0).as_ptr().addr()
    }
}
