//! The execution of queued work.
//!
//! One item runs at a time, on any thread, so the simulated GPU never races in the host's own
//! terms. Items that call the program run without the simulator's lock. Meanwhile no other item
//! runs and nothing is unmapped.
#![expect(unsafe_code, reason = "accesses the memory of queued work by address")]

use super::{
    access_history::{Action, ActionKind},
    address_space::DeviceUse,
    clock::Clock,
    codes::ErrorCode,
    config::Schedule,
    device_code,
    kernel::KernelMemory,
    machine::{Machine, StateGuard},
    machine_state::MachineState,
    queue::{QueueItem, Stream, StreamPoint, Task, Work},
};
use crate::{DeviceId, site::Site};
use std::sync::PoisonError;

impl MachineState {
    /// Makes work queued on a stream from now on wait for its predecessors by the legacy rule.
    pub(crate) fn wait_for_implied_streams(
        &mut self,
        stream: usize,
        name: &'static str,
        site: Site,
    ) {
        for other in self.implied_streams(stream) {
            let point = self.point(other);
            self.wait_for_point(stream, &point, name, site);
        }
    }

    /// Makes work queued on a stream from now on wait for a point of another.
    pub(crate) fn wait_for_point(
        &mut self,
        stream: usize,
        point: &StreamPoint,
        name: &'static str,
        site: Site,
    ) {
        if self.oracle {
            self.streams[stream].clock.join(&point.clock);
        }
        if self.streams[point.stream].executed < point.count {
            let component = self.streams[stream].component;
            let work = Work::Wait { stream: point.stream, count: point.count };
            let action = Action::new((component, 0), ActionKind::Read, name, site);
            self.push(stream, QueueItem { work, action });
        }
    }

    fn push(&mut self, stream: usize, item: QueueItem) {
        let s = &mut self.streams[stream];
        s.enqueued += 1;
        s.queue.push_back(item);
        self.queued += 1;
    }

    /// Returns the current end of a stream's queue.
    pub(crate) fn point(&self, stream: usize) -> StreamPoint {
        let s = &self.streams[stream];
        StreamPoint {
            stream,
            count: s.enqueued,
            clock: if self.oracle { s.clock.clone() } else { Clock::default() },
        }
    }

    /// Returns whether a point has been reached.
    pub(crate) fn reached(&self, stream: usize, count: u64) -> bool {
        self.streams[stream].executed >= count
    }

    fn can_run(&self, work: &Work) -> bool {
        match *work {
            Work::Wait { stream, count } => self.reached(stream, count),
            _ => true,
        }
    }

    fn front_can_run(&self, stream: usize) -> bool {
        self.streams[stream].queue.front().is_some_and(|item| self.can_run(&item.work))
    }

    /// Returns whether all memory of some work can still be accessed. If not, reports it, unless
    /// the work or what was done to the memory under it is reported already.
    fn check_accessible(&mut self, uses: &[DeviceUse], item: &QueueItem) -> bool {
        let inaccessible =
            uses.iter().find_map(|u| self.space.first_inaccessible(u).map(|finding| (u, finding)));
        let Some((u, finding)) = inaccessible else { return true };
        if self.oracle && !self.violations.has_named(&item.action) {
            let action = Action { kind: u.action_kind(), ..item.action };
            self.report(vec![finding], action, Some(u.range.device));
        }
        false
    }

    /// Runs an item that does not call the program. `just_checked` means that its uses have just
    /// been checked.
    fn execute(&mut self, item: &QueueItem, just_checked: bool) {
        if !just_checked && !self.check_accessible(item.work.uses(), item) {
            return;
        }
        if let Work::Copy(work) = &item.work {
            // SAFETY: 1. Device memory is mapped and accessible, as was checked. The caller
            // promised that host memory stays valid until the work is done. 2. The caller promised
            // that there is no other access.
            unsafe { work.execute(&self.space.store) }
        }
    }

    fn complete_item(&mut self, stream: usize) {
        let s = &mut self.streams[stream];
        s.executed = (s.executed + 1).min(s.enqueued);
        if !s.alive {
            self.recycle_stream(stream);
        }
    }

    /// Returns the stream whose front item must run next so that `stream` goes on. `None` if its
    /// queue is empty.
    fn next_front(&self, mut stream: usize) -> Option<usize> {
        loop {
            match self.streams[stream].queue.front()?.work {
                Work::Wait { stream: other, count } if !self.reached(other, count) => {
                    stream = other;
                }
                _ => return Some(stream),
            }
        }
    }

    /// Returns the graph branch whose next item blocks a stream, or else the stream.
    pub(crate) fn blocking_branch(&self, stream: usize) -> usize {
        let mut stream = stream;
        while let Some(&Work::Wait { stream: other, count }) =
            self.streams[stream].queue.front().map(|item| &item.work)
            && self.streams[other].kind.is_branch()
            && !self.reached(other, count)
        {
            stream = other;
        }
        stream
    }
}

impl MachineState {
    /// Places work at a stream's tail, and checks its accesses there.
    fn prepare_item(
        &mut self,
        stream: usize,
        task: Task,
        context: Option<&LaunchContext<'_>>,
    ) -> QueueItem {
        let Task { name, site, host, work } = task;
        let mut action = self.next_stream_action(stream, ActionKind::Read, name, site);
        action.launch = context.map(|context| context.launch);
        let (uses, keepers) = match context {
            None => (work.uses(), &[][..]),
            Some(context) => (context.uses, context.keepers),
        };
        let mut accessible = true;
        for u in uses {
            accessible &= self.check_use(stream, u, action, keepers);
        }
        for u in host {
            // For captured work: memory that was pinned at the capture may no longer be.
            accessible &= context.is_none() || self.check_still_pinned(&u, action);
            self.check_host_side(stream, u.address, u.bytes, u.kind, action);
        }
        QueueItem { work: if accessible { work } else { Work::Inaccessible }, action }
    }

    /// Places work at a stream's tail without running anything.
    pub(crate) fn append(
        &mut self,
        stream: usize,
        task: Task,
        context: Option<&LaunchContext<'_>>,
    ) {
        let item = self.prepare_item(stream, task, context);
        self.push(stream, item);
    }
}

/// The graph launch that captured work is queued for.
pub(crate) struct LaunchContext<'a> {
    /// The line of the launch.
    pub(crate) launch: Site,
    /// Its uses, split by the blocks that existed at the capture.
    pub(crate) uses: &'a [DeviceUse],
    /// The keepers of memory for its graph.
    pub(crate) keepers: &'a [u64],
}

impl Machine {
    /// Queues work on a stream, and runs items according to the schedule. On a stream that
    /// captures, adds it to the graph.
    pub(crate) fn submit<'a>(
        &'a self,
        mut state: StateGuard<'a>,
        stream: usize,
        task: Task,
    ) -> Result<StateGuard<'a>, ErrorCode> {
        if state.is_captured(stream)? {
            state.capture(stream, task);
            return Ok(state);
        }
        state.wait_for_implied_streams(stream, task.name, task.site);
        let item = state.prepare_item(stream, task, None);
        let runs_now = self.config.schedule == Schedule::Eager
            && !state.running
            && state.streams[stream].queue.is_empty()
            && !item.work.runs_program_code()
            && state.can_run(&item.work);
        if runs_now {
            state.streams[stream].enqueued += 1;
            state.execute(&item, true);
            state.complete_item(stream);
        } else {
            state.push(stream, item);
        }
        Ok(self.run_by_schedule(state))
    }

    /// Runs items according to the schedule, after something has been queued.
    pub(crate) fn run_by_schedule<'a>(&'a self, state: StateGuard<'a>) -> StateGuard<'a> {
        self.notify_waiters(&state);
        if self.config.schedule == Schedule::Eager && state.queued > 0 {
            self.drain(state)
        } else {
            state
        }
    }

    /// Wakes threads that wait for an item to run.
    fn notify_waiters(&self, state: &MachineState) {
        if state.waiting > 0 {
            self.changed.notify_all();
        }
    }

    /// Waits until no closure runs.
    pub(crate) fn wait_until_idle<'a>(&'a self, mut state: StateGuard<'a>) -> StateGuard<'a> {
        while state.running {
            state.waiting += 1;
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
            state.waiting -= 1;
        }
        state
    }

    /// Runs all items that can run.
    pub(crate) fn drain<'a>(&'a self, mut state: StateGuard<'a>) -> StateGuard<'a> {
        loop {
            state = self.wait_until_idle(state);
            let next = (0..state.streams.len()).find(|&stream| state.front_can_run(stream));
            match next {
                Some(stream) => state = self.run_front(state, stream),
                None => return state,
            }
        }
    }

    /// Runs the front item of a stream, if it can run. Returns whether it did.
    pub(crate) fn step<'a>(
        &'a self,
        state: StateGuard<'a>,
        stream: usize,
    ) -> (StateGuard<'a>, bool) {
        let state = self.wait_until_idle(state);
        if state.front_can_run(stream) {
            (self.run_front(state, stream), true)
        } else {
            (state, false)
        }
    }

    /// Runs the front item of a stream. No item may be running, and this one must be able to run.
    fn run_front<'a>(&'a self, mut state: StateGuard<'a>, stream: usize) -> StateGuard<'a> {
        let Some(item) = state.streams[stream].queue.pop_front() else { return state };
        state.queued -= 1;
        if !item.work.runs_program_code() {
            state.execute(&item, false);
            state.complete_item(stream);
            self.notify_waiters(&state);
            return state;
        }
        if !state.check_accessible(item.work.uses(), &item) {
            state.complete_item(stream);
            self.notify_waiters(&state);
            return state;
        }
        let running = self.begin_device_code(state, stream);
        if let Work::Kernel { uses, body: Some(body) } = item.work {
            // SAFETY: 1. Every range has just been checked to be mapped and accessible, and stays
            // so while `running` lives. Work with a body is queued only in bytes mode. 2. One item
            // runs at a time, and this is that item.
            let mut memory = unsafe { KernelMemory::new(&uses) };
            (body.lock().unwrap_or_else(PoisonError::into_inner))(&mut memory);
        }
        drop(running);
        self.lock()
    }

    /// Releases the lock to run the program's code as an item of `stream`.
    fn begin_device_code<'a>(
        &'a self,
        mut state: StateGuard<'a>,
        stream: usize,
    ) -> RunningItem<'a> {
        state.running = true;
        drop(state);
        RunningItem { machine: self, stream, guard: Some(device_code::enter()) }
    }

    /// Runs the items needed until `stream` has completed `count` items.
    pub(crate) fn run_until<'a>(
        &'a self,
        mut state: StateGuard<'a>,
        stream: usize,
        count: u64,
    ) -> StateGuard<'a> {
        while !state.reached(stream, count) {
            state = self.wait_until_idle(state);
            // No item is running, so all of an empty queue has run.
            let Some(next) = state.next_front(stream) else { break };
            state = self.run_front(state, next);
        }
        state
    }

    /// Makes the host wait until a stream of `device` reaches a point, and records that order.
    pub(crate) fn synchronize_host(
        &self,
        state: StateGuard<'_>,
        device: DeviceId,
        until: &StreamPoint,
    ) -> Result<(), ErrorCode> {
        let mut state = self.run_until(state, until.stream, until.count);
        state.device(device)?;
        state.order_host_after(&until.clock);
        Ok(())
    }

    /// Runs all work that has been queued on a device.
    pub(crate) fn run_device<'a>(
        &'a self,
        state: StateGuard<'a>,
        device: DeviceId,
    ) -> StateGuard<'a> {
        let on_device = |s: &Stream| if s.device == device { s.enqueued } else { 0 };
        let counts: Vec<_> = state.streams.iter().map(on_device).collect();
        self.run_to(state, &counts)
    }

    /// Runs the items needed until each stream has completed its count of items, by index.
    pub(crate) fn run_to<'a>(
        &'a self,
        mut state: StateGuard<'a>,
        counts: &[u64],
    ) -> StateGuard<'a> {
        for (stream, &count) in counts.iter().enumerate() {
            state = self.run_until(state, stream, count);
        }
        state
    }

    /// Simulates the passage of time: runs a random number of items of random queues.
    pub(crate) fn run_random_items<'a>(&'a self, mut state: StateGuard<'a>) -> StateGuard<'a> {
        for _ in 0..state.random.next_u64() % 4 {
            let nonempty: Vec<_> =
                (0..state.streams.len()).filter(|&s| !state.streams[s].queue.is_empty()).collect();
            if nonempty.is_empty() {
                break;
            }
            let stream = nonempty[(state.random.next_u64() % nonempty.len() as u64) as usize];
            let max_items =
                state.random.next_u64() % (state.streams[stream].queue.len() as u64 + 1);
            for _ in 0..max_items {
                let (after, ran) = self.step(state, stream);
                state = after;
                if !ran {
                    break;
                }
            }
        }
        state
    }
}

/// Marks that the program's code runs as an item. The item has completed when this is dropped, also
/// by a panic.
struct RunningItem<'a> {
    machine: &'a Machine,
    stream: usize,
    guard: Option<device_code::DeviceCodeGuard>,
}

impl Drop for RunningItem<'_> {
    fn drop(&mut self) {
        drop(self.guard.take());
        let mut state = self.machine.lock();
        state.running = false;
        state.complete_item(self.stream);
        self.machine.notify_waiters(&state);
    }
}
