//! What a test does to the machine: lets work run, makes calls fail, loses devices, and looks.

use super::{
    Sim,
    agents::ActingAs,
    codes,
    graph::make,
    inside,
    outstanding::Outstanding,
    queue::{Item, Work},
    space::Use,
    violation::Violation,
};
use crate::{Call, DeviceId, DeviceRange, RawGraph, RawStream};
use std::sync::{Arc, atomic::Ordering};

pub use super::faults::StallGuard;

impl Sim {
    /// Returns what the oracle has found so far, in the order of finding. What has been returned is
    /// not [reported](super::OnViolation) any more.
    #[must_use]
    pub fn violations(&self) -> Vec<Violation> {
        self.shared.lock().reports.list().to_vec()
    }

    /// Returns the same, and forgets it.
    #[must_use]
    pub fn take_violations(&self) -> Vec<Violation> {
        self.shared.lock().reports.take()
    }

    /// Switches the oracle off, so that nothing is checked and pools are not asked whose is what,
    /// or on again, knowing nothing of what went before: as if the host had just waited for every
    /// device, and no pool had spoken.
    pub fn oracle(&self, on: bool) {
        let mut state = self.shared.lock();
        if on && !state.oracle {
            state.forget();
        }
        state.oracle = on;
        self.shared.watched.store(on, Ordering::Relaxed);
    }

    /// How many accesses have been checked: one for each range that work or the host touches.
    #[must_use]
    pub fn accesses_checked(&self) -> u64 {
        self.shared.lock().checked
    }

    /// What the driver's calls so far would have cost, in nanoseconds, by the [cost
    /// table](super::Costs).
    #[must_use]
    pub fn modelled_ns(&self) -> u64 {
        self.shared.modelled()
    }

    /// How many items of work follow one another on the longest chain that has been queued so far:
    /// what all of it would take if each item took one unit of time and the device ran whatever
    /// nothing holds back.
    ///
    /// An item comes after what its stream was given before, after what its stream was made to wait
    /// for by an event, and after what the host waited for before it queued the item. A wait for
    /// something that has run already holds nothing up and does not count; nor does what a query
    /// saw, since nobody waited, nor the order that a value gives.
    ///
    /// ```
    /// use aquifer_driver::{Access, DeviceId, DeviceRange, sim::Sim};
    /// # fn main() -> aquifer_driver::Result<()> {
    /// let sim = Sim::h200(1).stepped();
    /// let driver = sim.driver();
    /// let [s, u] = [driver.stream_create(DeviceId(0), 0)?, driver.stream_create(DeviceId(0), 0)?];
    /// let address = driver.mem_alloc(DeviceId(0), 512)?;
    /// let range = DeviceRange { device: DeviceId(0), address, bytes: 512 };
    /// sim.access(s, range, Access::Read, None)?;
    /// sim.access(u, range, Access::Read, None)?;
    /// assert_eq!(sim.longest_path(), 1); // side by side
    /// let event = driver.event_create(DeviceId(0))?;
    /// driver.event_record(event, s)?;
    /// driver.stream_wait_event(u, event)?;
    /// sim.access(u, range, Access::Read, None)?;
    /// assert_eq!(sim.longest_path(), 2);
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn longest_path(&self) -> u64 {
        self.shared.lock().longest_path
    }

    /// Writes violations that have been neither taken nor written before to standard error, as at
    /// the end of the machine. Returns whether there were any. Writes nothing under
    /// [`OnViolation::Quiet`](super::OnViolation::Quiet).
    pub fn report(&self) -> bool {
        self.shared.report()
    }

    /// Runs the next item of a stream, if it waits for nothing; where it waits for another branch
    /// of a graph that is launched on it, the next item of that. Whether one ran.
    #[track_caller]
    pub fn step(&self, stream: RawStream) -> bool {
        if inside::any() {
            return false;
        }
        let ran = {
            let mut state = self.shared.lock();
            match state.stream(stream) {
                Ok(place) => {
                    let place = state.in_branch(place);
                    self.shared.step(state, place).1
                }
                Err(_) => false,
            }
        };
        self.shared.checkpoint();
        ran
    }

    /// Runs everything that can run.
    #[track_caller]
    pub fn run_all(&self) {
        if !inside::any() {
            drop(self.shared.drain(self.shared.lock()));
            self.shared.checkpoint();
        }
    }

    /// How many items of a stream have not run yet.
    #[must_use]
    pub fn pending(&self, stream: RawStream) -> usize {
        let mut state = self.shared.lock();
        state.stream(stream).map_or(0, |place| {
            let stream = &state.streams[place];
            (stream.enqueued - stream.executed) as usize
        })
    }

    /// The bytes of a range as they are now, whatever is queued; a look that the oracle does not
    /// count. `None` where something cannot be reached, in
    /// [`Mode::Symbolic`](super::Mode::Symbolic), and inside kernels and callbacks.
    #[must_use]
    pub fn read_back(&self, range: DeviceRange) -> Option<Vec<u8>> {
        if inside::any() {
            return None;
        }
        let state = self.shared.idle(self.shared.lock());
        let u = Use { range, writes: false, generation: None, reach: u64::MAX };
        state.space.read(&u)
    }

    /// Makes the `nth` call from now on fail with a code, once; 1 is the next. Nothing else happens
    /// in that call.
    pub fn fail(&self, call: Call, nth: u64, code: u32) {
        self.shared.lock().faults.add(call, nth, 0, code);
    }

    /// Makes every `n`th call fail with a code; 1 is every call.
    pub fn fail_every(&self, call: Call, n: u64, code: u32) {
        self.shared.lock().faults.add(call, n, n.max(1), code);
    }

    /// Ends all failures to come. Lost devices stay lost.
    pub fn clear_failures(&self) {
        self.shared.lock().faults.clear();
    }

    /// Holds up a call: whoever makes it stays in it, holding whatever he holds, until the guard is
    /// dropped.
    pub fn stall(&self, call: Call) -> StallGuard {
        Arc::clone(&self.shared.stalls).hold(call)
    }

    /// The device has a sticky error: what is queued on it never runs, and every call for it fails
    /// with illegal address (700) from now on.
    pub fn lose_device(&self, device: DeviceId) {
        let mut state = self.shared.lock();
        let Some(there) = state.devices.get_mut(device.0 as usize) else { return };
        there.lost = Some(codes::ILLEGAL_ADDRESS);
        let mut dropped = Vec::new();
        for stream in state.streams.iter_mut().filter(|stream| stream.device == device) {
            stream.executed = stream.enqueued;
            dropped.append(&mut stream.queue.drain(..).collect());
        }
        state.queued -= dropped.len();
        // What ran has ended and the rest never runs, whoever is told: nothing there can race with
        // anything any more.
        state.all_learn_device(device);
        let holds = dropped.iter_mut().flat_map(|item: &mut Item| match &mut item.work {
            Work::Launched(holds) => std::mem::take(holds),
            _ => Vec::new(),
        });
        let released = state.let_go(holds.collect());
        drop(state);
        make(released);
        // Closures of the program's end here, without the lock.
        drop::<Vec<_>>(dropped);
        self.shared.changed.notify_all();
    }

    /// How many nodes a graph has: kernels, copies, fills and calls of the host, while events and
    /// waits are edges between them. `None` for one that is destroyed.
    #[must_use]
    pub fn graph_nodes(&self, graph: RawGraph) -> Option<u64> {
        self.shared.lock().graph(graph).ok().map(|graph| graph.nodes.len() as u64)
    }

    /// Makes this thread act as one of several [host agents](Sim::host_agents) while the answer
    /// lives. A number beyond the last means the last.
    pub fn act_as(&self, agent: u32) -> ActingAs {
        ActingAs::enter(agent)
    }

    /// One host agent has told another, by a channel, a lock or a join: what `to` does from now on
    /// comes after what `from` has done and knows.
    pub fn host_edge(&self, from: u32, to: u32) {
        let mut state = self.shared.lock();
        let last = state.hosts.len() - 1;
        let clock = state.hosts[(from as usize).min(last)].clock.clone();
        state.hosts[(to as usize).min(last)].learn(&clock);
    }

    /// What the program has not given back to the driver.
    #[must_use]
    pub fn outstanding(&self) -> Outstanding {
        let mut state = self.shared.lock();
        state.sweep_pools();
        Outstanding::of(&state)
    }
}
