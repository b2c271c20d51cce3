//! A pool on a simulated device, and operations that several programs share: trim the pool, make
//! driver calls fail, run streams, change the limit.
#![expect(clippy::panic, reason = "a broken promise is told by a panic")]

use crate::program::Bytes;
use aquifer_core::{Budget, MemoryError, Result};
use aquifer_device::DevicePool;
use aquifer_driver::{Call, sim::Sim};
use aquifer_stream::Stream;

/// The pool and its simulated device.
pub(crate) struct Rig {
    pub(crate) sim: Sim,
    pub(crate) budget: Budget,
    pub(crate) pool: DevicePool,
    pub(crate) streams: Vec<Stream>,
}

impl Rig {
    /// Returns the index of one of the streams.
    pub(crate) fn pick_stream(&self, bytes: &mut Bytes<'_>) -> usize {
        usize::from(bytes.choice(self.streams.len() as u8))
    }

    /// Trims the pool and checks that no live memory is released.
    pub(crate) fn trim(&self, bytes: &mut Bytes<'_>) {
        let before = self.pool.stats();
        if self.pool.trim(u64::from(bytes.u8()) << 18).is_ok() {
            let after = self.pool.stats();
            assert_eq!(before.live, after.live, "a trim took live memory");
            assert!(after.physical <= before.physical, "a trim took memory");
        }
    }

    /// Makes one of these calls fail soon.
    pub(crate) fn fail_one(&self, bytes: &mut Bytes<'_>, of: &[Call]) {
        let call = of[usize::from(bytes.choice(of.len() as u8))];
        // Out of memory, which runs all reclaim paths, or another error, which does not.
        let code = if bytes.flag() { 2 } else { 999 };
        self.sim.fail(call, u64::from(bytes.choice(5)) + 1, code);
    }

    /// Runs one item of a stream, or waits for all of them.
    pub(crate) fn go_on(&self, bytes: &mut Bytes<'_>) {
        let stream = &self.streams[self.pick_stream(bytes)];
        if bytes.flag() {
            self.sim.step(stream.raw());
        } else {
            // A planned fault may hit it.
            let _ = stream.synchronize();
        }
    }

    /// Changes the limit, to at most `most` MiB.
    pub(crate) fn limit(&self, bytes: &mut Bytes<'_>, most: u8) {
        self.budget.set_limit((u64::from(bytes.choice(most)) + 1) << 20);
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
