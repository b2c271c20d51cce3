//! Methods for tests: run work, inject failures, lose devices, inspect the machine.

use super::{
    Sim, address_space::DeviceUse, codes, device_code, outstanding::Outstanding,
    violation::Violation,
};
use crate::{Call, DeviceId, DeviceRange, RawGraph, RawStream};
use std::sync::{Arc, atomic::Ordering};

pub use super::faults::StallGuard;

impl Sim {
    /// Returns the violations found so far, in the order of discovery. Returned violations are not
    /// [reported](super::OnViolation) any more.
    #[must_use]
    pub fn violations(&self) -> Vec<Violation> {
        self.machine.lock().violations.list().to_vec()
    }

    /// Returns the violations found so far, and removes them.
    #[must_use]
    pub fn take_violations(&self) -> Vec<Violation> {
        self.machine.lock().violations.take()
    }

    /// Switches the oracle off or on. While it is off, nothing is checked and notes from pools are
    /// ignored. When it is switched on again it has no history, as if the host had just waited for
    /// every device and no pool had reported an owner.
    pub fn oracle(&self, on: bool) {
        let mut state = self.machine.lock();
        if on && !state.oracle {
            state.clear_records();
        }
        state.oracle = on;
        self.machine.oracle_on.store(on, Ordering::Relaxed);
    }

    /// Returns the number of accesses that have been checked: one for each range that work or the
    /// host accesses.
    #[must_use]
    pub fn accesses_checked(&self) -> u64 {
        self.machine.lock().accesses_checked
    }

    /// Writes violations that have been neither taken nor written before to standard error, as at
    /// the end of the machine. Returns whether there were any. Writes nothing under
    /// [`OnViolation::Quiet`](super::OnViolation::Quiet).
    pub fn report(&self) -> bool {
        self.machine.report()
    }

    /// Runs the next item of a stream, if it is not blocked. If it waits for another branch of a
    /// graph launch, the next item of that branch runs instead. Returns whether an item ran.
    #[track_caller]
    pub fn step(&self, stream: RawStream) -> bool {
        if device_code::is_running() {
            return false;
        }
        let mut state = self.machine.lock();
        match state.stream(stream) {
            Ok(index) => {
                let index = state.blocking_branch(index);
                self.machine.step(state, index).1
            }
            Err(_) => false,
        }
    }

    /// Runs all items that can run.
    #[track_caller]
    pub fn run_all(&self) {
        if !device_code::is_running() {
            let state = self.machine.drain(self.machine.lock());
            state.check();
            drop(state);
        }
    }

    /// Returns a mark behind all work that is queued so far, for [`Sim::run_to`].
    ///
    /// ```
    /// use aquifer::{Access, DeviceId, DeviceRange, sim::Sim};
    /// # fn main() -> aquifer::error::Result<()> {
    /// let sim = Sim::h200(1).stepped();
    /// let driver = sim.driver();
    /// let stream = driver.stream_create(DeviceId(0), 0)?;
    /// let address = driver.mem_alloc(DeviceId(0), 512)?;
    /// let range = DeviceRange { device: DeviceId(0), address, bytes: 512 };
    /// sim.access(stream, range, Access::Write, None)?;
    /// let mark = sim.mark();
    /// sim.access(stream, range, Access::Read, None)?;
    /// sim.run_to(&mark);
    /// assert_eq!(sim.pending(stream), 1); // the read is behind the mark
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn mark(&self) -> Vec<u64> {
        self.machine.lock().streams.iter().map(|stream| stream.enqueued).collect()
    }

    /// Runs the work that was queued before a [mark](Sim::mark) was taken, and what it waits for.
    #[track_caller]
    pub fn run_to(&self, mark: &[u64]) {
        if !device_code::is_running() {
            drop(self.machine.run_to(self.machine.lock(), mark));
        }
    }

    /// Returns the number of items of a stream that have not run yet.
    #[must_use]
    pub fn pending(&self, stream: RawStream) -> usize {
        let mut state = self.machine.lock();
        state.stream(stream).map_or(0, |index| {
            let stream = &state.streams[index];
            (stream.enqueued - stream.executed) as usize
        })
    }

    /// Returns the current bytes of a range, even if work is queued. The oracle does not count this
    /// access. Returns `None` if part of the range cannot be accessed, in
    /// [`Mode::Symbolic`](super::Mode::Symbolic), and inside kernels.
    #[must_use]
    pub fn read_back(&self, range: DeviceRange) -> Option<Vec<u8>> {
        if device_code::is_running() {
            return None;
        }
        let state = self.machine.wait_until_idle(self.machine.lock());
        let u = DeviceUse { range, writes: false, generation: None, devices: u64::MAX };
        state.space.read(&u)
    }

    /// Makes the `nth` call from now on fail once with a code. 1 is the next call. The call has no
    /// other effect.
    pub fn fail(&self, call: Call, nth: u64, code: u32) {
        self.machine.lock().faults.add(call, nth, 0, code);
    }

    /// Makes every `n`th call fail with a code. 1 is every call.
    pub fn fail_every(&self, call: Call, n: u64, code: u32) {
        self.machine.lock().faults.add(call, n, n.max(1), code);
    }

    /// Removes all injected failures. Lost devices stay lost.
    pub fn clear_failures(&self) {
        self.machine.lock().faults.clear();
    }

    /// Blocks a call: threads that make it stay in it, with the locks they hold, until the guard is
    /// dropped.
    pub fn stall(&self, call: Call) -> StallGuard {
        Arc::clone(&self.machine.stalls).stall(call)
    }

    /// Gives the device a sticky error: work queued on it never runs, and every call for it fails
    /// with illegal address (700) from now on.
    pub fn lose_device(&self, device: DeviceId) {
        let mut state = self.machine.lock();
        let Some(entry) = state.devices.get_mut(device.0 as usize) else { return };
        entry.lost = Some(codes::ILLEGAL_ADDRESS);
        let mut dropped = Vec::new();
        for stream in state.streams.iter_mut().filter(|stream| stream.device == device) {
            stream.executed = stream.enqueued;
            dropped.append(&mut stream.queue.drain(..).collect());
        }
        state.queued -= dropped.len();
        // Work that ran has ended and the rest never runs. Nothing there can race any more.
        state.order_host_after_device(device);
        drop(state);
        // Drops closures of the program, so without the lock.
        drop::<Vec<_>>(dropped);
    }

    /// Returns the number of nodes of a graph: kernels, copies, fills and host calls. Events and
    /// waits are edges between them. Returns `None` for a destroyed graph.
    #[must_use]
    pub fn graph_nodes(&self, graph: RawGraph) -> Option<u64> {
        self.machine.lock().graph(graph).ok().map(|graph| graph.nodes.len() as u64)
    }

    /// Returns the driver objects that the program has not released.
    #[must_use]
    pub fn outstanding(&self) -> Outstanding {
        let mut state = self.machine.lock();
        state.release_destroyed_pools();
        state.check();
        Outstanding::count(&state)
    }
}
