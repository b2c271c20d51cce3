//! A pool on a simulated device, and what programs over it do beside their own: trim it, let calls
//! of the driver fail, let streams go on, move the limit.
#![expect(clippy::panic, reason = "a broken promise is told by a panic")]

use crate::program::Bytes;
use aquifer_core::{Budget, MemoryError, Result};
use aquifer_device::DevicePool;
use aquifer_driver::{Call, sim::Sim};
use aquifer_stream::Stream;

/// What a program runs on.
pub(crate) struct Rig {
    pub(crate) sim: Sim,
    pub(crate) budget: Budget,
    pub(crate) pool: DevicePool,
    pub(crate) streams: Vec<Stream>,
}

impl Rig {
    /// One of the streams, by its place.
    pub(crate) fn pick_stream(&self, bytes: &mut Bytes<'_>) -> usize {
        usize::from(bytes.choice(self.streams.len() as u8))
    }

    /// Gives free memory back, which takes no live one.
    pub(crate) fn trim(&self, bytes: &mut Bytes<'_>) {
        let before = self.pool.stats();
        if self.pool.trim(u64::from(bytes.u8()) << 18).is_ok() {
            let after = self.pool.stats();
            assert_eq!(before.live, after.live, "a trim took live memory");
            assert!(after.physical <= before.physical, "a trim took memory");
        }
    }

    /// Has one of these calls fail soon.
    pub(crate) fn fail_one(&self, bytes: &mut Bytes<'_>, of: &[Call]) {
        let call = of[usize::from(bytes.choice(of.len() as u8))];
        // Out of memory, which leads through everything that makes room, or something else, which
        // does not.
        let code = if bytes.flag() { 2 } else { 999 };
        self.sim.fail(call, u64::from(bytes.choice(5)) + 1, code);
    }

    /// Lets a stream do one thing more, or waits for all that it has to do.
    pub(crate) fn go_on(&self, bytes: &mut Bytes<'_>) {
        let stream = &self.streams[self.pick_stream(bytes)];
        if bytes.flag() {
            self.sim.step(stream.raw());
        } else {
            // A fault may be waiting for it.
            let _ = stream.synchronize();
        }
    }

    /// Moves the limit, to as many MiB at most.
    pub(crate) fn limit(&self, bytes: &mut Bytes<'_>, most: u8) {
        self.budget.set_limit((u64::from(bytes.choice(most)) + 1) << 20);
    }
}

/// Whether an operation that may be refused went through. What a failing driver or a full device
/// may answer is passed over.
pub(crate) fn went<T>(answer: Result<T>) -> Option<T> {
    match answer {
        Ok(value) => Some(value),
        Err(MemoryError::Driver(_) | MemoryError::OutOfMemory(_)) => None,
        Err(other) => panic!("{other:?}"),
    }
}
