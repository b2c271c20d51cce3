//! What the tests of the whole share.
#![allow(dead_code, reason = "each test binary uses some of it")]
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a support function that fails is a failed test"
)]

use aquifer::{
    DeviceBuffer, PinnedConfig, Runtime, Stream, host::pool, host::region::PageTier, sim::Sim,
};
use std::{
    sync::mpsc,
    thread,
    time::{Duration, Instant},
};

pub(crate) const MIB: usize = 1 << 20;
/// Longer than anything takes that does not hang, on whatever machine.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// Pinned pools that take little, and do not wait.
pub(crate) fn small() -> PinnedConfig {
    let mut config = PinnedConfig::default();
    config.chunk = 4 * MIB;
    config.pages = PageTier::Transparent;
    config.patience = Duration::ZERO;
    config
}

/// Everything, on a simulated machine.
pub(crate) fn runtime(sim: &Sim) -> Runtime {
    let builder = Runtime::builder().driver(sim.driver()).pinned(small());
    builder.pinned_budget(64 << 20).device_budget(256 << 20).build().unwrap()
}

/// What is on the device, by way of a copy.
pub(crate) fn read(stream: &Stream, buffer: &DeviceBuffer<u8>) -> Vec<u8> {
    let mut back = vec![0; buffer.len()];
    stream.scope(|c| c.download(buffer, &mut back)).unwrap().unwrap();
    back
}

/// The machine has everything back. What closed pools of pinned memory have left comes back by a
/// sweep: this thread's, or that of another test, which may have it in hand just now.
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

/// Runs `work` on a thread of its own, and fails the test instead of hanging with it.
#[track_caller]
pub(crate) fn within<R: Send + 'static>(work: impl FnOnce() -> R + Send + 'static) -> R {
    let (tell, told) = mpsc::channel();
    thread::spawn(move || tell.send(work()));
    told.recv_timeout(PATIENCE).expect("this should have come back by now, with an answer")
}
