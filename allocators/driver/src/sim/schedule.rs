//! The execution of queued work.
//!
//! One item runs at a time, on any thread, so the simulated GPU never races in the host's own
//! terms. Items that call the program run without the simulator's lock. Meanwhile no other item
//! runs and nothing is unmapped.
#![expect(unsafe_code, reason = "touches the memory that queued work names by address")]

use super::{
    clock::Clock,
    config::Schedule,
    inside,
    kernel::KernelMemory,
    ledger::{Act, Mark},
    queue::{Item, Kind, Point, Task, Work},
    shared::{Guard, Shared},
    space::Use,
    state::{Refused, State},
};
use crate::DeviceId;
use std::{panic::Location, sync::PoisonError};

impl State {
    /// Makes work queued on a stream from now on wait for its predecessors by the legacy rule.
    pub(crate) fn after_implied(
        &mut self,
        stream: usize,
        name: &'static str,
        site: &'static Location<'static>,
    ) {
        for other in self.implied(stream) {
            let point = self.point(other);
            self.after(stream, &point, name, site);
        }
    }

    /// Makes work queued on a stream from now on wait for a point of another.
    pub(crate) fn after(
        &mut self,
        stream: usize,
        point: &Point,
        name: &'static str,
        site: &'static Location<'static>,
    ) {
        if self.oracle {
            self.streams[stream].clock.join(&point.clock);
        }
        if self.streams[point.stream].executed < point.count {
            let slot = self.streams[stream].slot;
            self.streams[stream].path = self.streams[stream].path.max(point.path);
            let work = Work::Wait { stream: point.stream, count: point.count };
            let mark = Mark { count: 0, slot, act: Act::Read, work: name, site, launch: None };
            self.push(stream, Item { work, mark });
        }
    }

    fn push(&mut self, stream: usize, item: Item) {
        let s = &mut self.streams[stream];
        s.enqueued += 1;
        s.queue.push_back(item);
        self.queued += 1;
    }

    /// Returns the current end of a stream's queue.
    pub(crate) fn point(&self, stream: usize) -> Point {
        let s = &self.streams[stream];
        Point {
            stream,
            count: s.enqueued,
            clock: if self.oracle { s.clock.clone() } else { Clock::default() },
            path: s.path,
        }
    }

    /// Records that the host had to wait until the end of a path.
    pub(crate) fn host_waited(&mut self, path: u64) {
        let agent = self.agent();
        self.hosts[agent].path = self.hosts[agent].path.max(path);
    }

    /// Adds one item to a stream's path.
    fn lengthen(&mut self, stream: usize) {
        let host = self.hosts[self.agent()].path;
        let path = &mut self.streams[stream].path;
        *path = (*path).max(host) + 1;
        self.longest_path = self.longest_path.max(*path);
    }

    /// Returns whether a point has been reached.
    pub(crate) fn reached(&self, stream: usize, count: u64) -> bool {
        self.streams[stream].executed >= count
    }

    fn can_run(&self, work: &Work) -> bool {
        match *work {
            Work::Wait { stream, count } => self.reached(stream, count),
            Work::WaitValue { address, value } => self.values.reached(address, value),
            _ => true,
        }
    }

    fn front_can_run(&self, stream: usize) -> bool {
        self.streams[stream].queue.front().is_some_and(|item| self.can_run(&item.work))
    }

    /// Returns whether all memory of some work can still be accessed. If not, reports it.
    fn reachable(&mut self, uses: &[Use], item: &Item) -> bool {
        let lost = uses.iter().find_map(|u| self.space.unreachable(u).map(|finding| (u, finding)));
        let Some((u, finding)) = lost else { return true };
        if self.oracle {
            let mark = Mark { act: u.act(), ..item.mark };
            let mut found = std::mem::take(&mut self.found);
            found.push(finding);
            self.report(found, mark, Some(u.range.device));
        }
        false
    }

    /// Runs an item that does not call the program. `fresh` means that its uses have just been
    /// checked.
    fn perform(&mut self, item: &Item, fresh: bool) {
        if !fresh && !self.reachable(item.work.uses(), item) {
            return;
        }
        let store = &self.space.store;
        match &item.work {
            Work::WriteValue { address, value } => self.values.write(*address, *value),
            Work::Fill { to, pattern } => {
                // SAFETY: 1. The range is mapped, accessible and aligned, as was checked, and only
                // the one running item accesses it.
                unsafe { store.fill(to.range.address, *pattern, to.range.bytes) }
            }
            // SAFETY: 1. Every device row is mapped and accessible, as was checked. The caller
            // promised that host rows stay valid until the work is done. 2. The caller promised
            // that there is no other access.
            Work::Rows(work) => unsafe { work.perform(store) },
            Work::FromHost { to, from } => {
                // SAFETY: 1. `to` is mapped and accessible, as was checked. The caller of the copy
                // promised that `from` is readable until the copy is done. 2. The caller promised
                // that there is no other access.
                unsafe { store.copy(to.range.address, *from, to.range.bytes) }
            }
            Work::FromStaging { to, from } => {
                // SAFETY: 1. `to` is mapped and accessible, as was checked, and as long as `from`,
                // which was created for it. 2. This item owns `from`, and one item runs at a time.
                unsafe { store.copy(to.range.address, from.as_ptr() as u64, from.len() as u64) }
            }
            Work::ToHost { to, from } => {
                // SAFETY: 1. `from` is mapped and accessible, as was checked. The caller of the
                // copy promised that `to` is writable until the copy is done. 2. The caller
                // promised that there is no other access.
                unsafe { store.copy(*to, from.range.address, from.range.bytes) }
            }
            Work::OnDevice([from, to]) => {
                // SAFETY: 1. Both are mapped and accessible, as was checked. 2. One item runs at a
                // time.
                unsafe { store.copy(to.range.address, from.range.address, from.range.bytes) }
            }
            Work::Refused
            | Work::Touch(_)
            | Work::Kernel { .. }
            | Work::Wait { .. }
            | Work::WaitValue { .. }
            | Work::Callback(_)
            | Work::Launched(_) => {}
        }
    }

    fn ran(&mut self, stream: usize) {
        let s = &mut self.streams[stream];
        s.executed = (s.executed + 1).min(s.enqueued);
        if !s.alive {
            self.retire(stream);
        }
    }

    /// Returns what must run next so that `stream` reaches `count` completed items.
    fn in_the_way(&self, stream: usize) -> Obstacle {
        let mut stream = stream;
        loop {
            match self.streams[stream].queue.front().map(|item| &item.work) {
                None => return Obstacle::Running,
                Some(&Work::Wait { stream: other, count }) if !self.reached(other, count) => {
                    stream = other;
                }
                Some(work) if self.can_run(work) => return Obstacle::Front(stream),
                Some(_) => return Obstacle::Value,
            }
        }
    }

    /// Returns the graph branch whose next item blocks a stream, or else the stream.
    pub(crate) fn in_branch(&self, stream: usize) -> usize {
        let mut stream = stream;
        while let Some(&Work::Wait { stream: other, count }) =
            self.streams[stream].queue.front().map(|item| &item.work)
            && self.streams[other].kind == Kind::Branch
            && !self.reached(other, count)
        {
            stream = other;
        }
        stream
    }

    fn next_random(&mut self) -> u64 {
        // SplitMix64.
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.random;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
}

/// The reason why a point has not been reached.
enum Obstacle {
    /// The front item of this stream, which can run.
    Front(usize),
    /// A value that has not been written yet.
    Value,
    /// An item that is running on another thread.
    Running,
}

impl State {
    /// Places work at a stream's tail, and checks its accesses there.
    fn placed(&mut self, stream: usize, task: Task, origin: Option<&Origin<'_>>) -> Item {
        let Task { name, site, host, mut work } = task;
        let mut mark = self.tail(stream, Act::Read, name, site);
        mark.launch = origin.map(|origin| origin.launch);
        let mut reached = match origin {
            None => {
                work.uses().iter().fold(true, |reached, u| reached & self.check(stream, u, mark))
            }
            Some(origin) => origin.uses.iter().fold(true, |reached, u| {
                reached & self.check_captured(stream, u, mark, origin.keepers)
            }),
        };
        for u in host {
            // For captured work: memory that was pinned at the capture may no longer be.
            reached &= origin.is_none() || !u.by_device || self.is_pinned_still(&u, mark);
            self.check_host(stream, u.address, u.bytes, u.act, mark);
        }
        match &mut work {
            Work::WriteValue { address, value } => {
                let clock = self.point(stream).clock;
                self.values.queue_write(*address, *value, clock);
            }
            Work::WaitValue { address, value } if self.oracle => {
                if let Some(clock) = self.values.comes_after(*address, *value) {
                    self.streams[stream].clock.join(clock);
                }
            }
            Work::Callback(call) => call.clock = self.point(stream).clock,
            _ => {}
        }
        self.lengthen(stream);
        Item { work: if reached { work } else { Work::Refused }, mark }
    }

    /// Places work at a stream's tail without running anything.
    pub(crate) fn append(&mut self, stream: usize, task: Task, origin: Option<&Origin<'_>>) {
        let item = self.placed(stream, task, origin);
        self.push(stream, item);
    }
}

/// The origin of captured work.
pub(crate) struct Origin<'a> {
    /// The line of the launch.
    pub(crate) launch: &'static Location<'static>,
    /// Its uses, split by the blocks that existed at the capture.
    pub(crate) uses: &'a [Use],
    /// The keepers of memory for its graph.
    pub(crate) keepers: &'a [u64],
}

impl Shared {
    /// Queues work on a stream, and runs items according to the schedule. On a stream that
    /// captures, adds it to the graph.
    pub(crate) fn submit<'a>(
        &'a self,
        mut state: Guard<'a>,
        stream: usize,
        task: Task,
    ) -> Result<Guard<'a>, Refused> {
        if state.captured(stream)? {
            state.capture(stream, task);
            return Ok(state);
        }
        state.after_implied(stream, task.name, task.site);
        let item = state.placed(stream, task, None);
        let at_once = self.config.schedule == Schedule::Eager
            && !state.running
            && state.streams[stream].queue.is_empty()
            && !item.work.calls_out()
            && state.can_run(&item.work);
        if at_once {
            state.streams[stream].enqueued += 1;
            state.perform(&item, true);
            state.ran(stream);
        } else {
            state.push(stream, item);
        }
        Ok(self.run_due(state))
    }

    /// Runs items according to the schedule, after something has been queued.
    pub(crate) fn run_due<'a>(&'a self, state: Guard<'a>) -> Guard<'a> {
        self.tell(&state);
        if self.config.schedule == Schedule::Eager && state.queued > 0 {
            self.drain(state)
        } else {
            state
        }
    }

    /// Wakes threads that wait for work to run, or for work that can run.
    fn tell(&self, state: &State) {
        if state.waiting > 0 {
            self.changed.notify_all();
        }
    }

    /// Waits until no closure runs.
    pub(crate) fn idle<'a>(&'a self, mut state: Guard<'a>) -> Guard<'a> {
        while state.running {
            state = self.wait(state);
        }
        state
    }

    /// Runs all items that can run.
    pub(crate) fn drain<'a>(&'a self, mut state: Guard<'a>) -> Guard<'a> {
        loop {
            state = self.idle(state);
            let next = (0..state.streams.len()).find(|&stream| state.front_can_run(stream));
            match next {
                Some(stream) => state = self.run_front(state, stream),
                None => return state,
            }
        }
    }

    /// Runs the front item of a stream, if it can run. Returns whether it did.
    pub(crate) fn step<'a>(&'a self, state: Guard<'a>, stream: usize) -> (Guard<'a>, bool) {
        let state = self.idle(state);
        if state.front_can_run(stream) {
            (self.run_front(state, stream), true)
        } else {
            (state, false)
        }
    }

    /// Runs the front item of a stream. No item may be running, and this one must be able to run.
    fn run_front<'a>(&'a self, mut state: Guard<'a>, stream: usize) -> Guard<'a> {
        let Some(mut item) = state.streams[stream].queue.pop_front() else { return state };
        state.queued -= 1;
        if !item.work.calls_out() {
            state.perform(&item, false);
            state.ran(stream);
            self.tell(&state);
            return state;
        }
        if !state.reachable(item.work.uses(), &item) {
            state.ran(stream);
            self.tell(&state);
            return state;
        }
        let released = match &mut item.work {
            Work::Launched(holds) => state.let_go(std::mem::take(holds)),
            _ => Vec::new(),
        };
        let running = self.leave(state, stream);
        match item.work {
            Work::Kernel { uses, body: Some(body) } => {
                // SAFETY: 1. Every range has just been checked to be mapped and accessible, and
                // stays so while `running` lives. Work with a body is queued only in bytes mode. 2.
                // One item runs at a time, and this is that item.
                let mut memory = unsafe { KernelMemory::new(&uses) };
                (body.lock().unwrap_or_else(PoisonError::into_inner))(&mut memory);
            }
            Work::Callback(call) => call.make(),
            _ => released.into_iter().for_each(|call| call()),
        }
        drop(running);
        self.lock()
    }

    /// Releases the lock to run the program's code as an item of `stream`.
    fn leave<'a>(&'a self, mut state: Guard<'a>, stream: usize) -> Running<'a> {
        state.running = true;
        drop(state);
        Running { shared: self, stream, inside: Some(inside::enter()) }
    }

    /// Runs the items needed until `stream` has completed `count` items. Other items run only if a
    /// value is waited for. Blocks while another thread must still write such a value.
    pub(crate) fn run_until<'a>(
        &'a self,
        mut state: Guard<'a>,
        stream: usize,
        count: u64,
    ) -> Guard<'a> {
        while !state.reached(stream, count) {
            state = self.idle(state);
            match state.in_the_way(stream) {
                Obstacle::Front(next) => state = self.run_front(state, next),
                Obstacle::Running if state.reached(stream, count) => {}
                Obstacle::Running => state = self.wait(state),
                Obstacle::Value => {
                    let other = (0..state.streams.len()).find(|&other| state.front_can_run(other));
                    state = match other {
                        Some(other) => self.run_front(state, other),
                        None => self.wait(state),
                    };
                }
            }
        }
        state
    }

    /// Makes the host wait until a stream of `device` reaches a point, and records that order.
    pub(crate) fn host_waits(
        &self,
        state: Guard<'_>,
        device: DeviceId,
        until: &Point,
    ) -> Result<(), u32> {
        let waits = !state.reached(until.stream, until.count);
        let mut state = self.run_until(state, until.stream, until.count);
        state.device(device)?;
        if waits {
            state.host_waited(until.path);
        }
        state.host_learns(&until.clock);
        Ok(())
    }

    /// Runs all work that has been queued on a device.
    pub(crate) fn run_device<'a>(&'a self, mut state: Guard<'a>, device: DeviceId) -> Guard<'a> {
        let until: Vec<_> =
            state.streams.iter().map(|stream| (stream.device, stream.enqueued)).collect();
        for (stream, (_, count)) in
            until.into_iter().enumerate().filter(|(_, (on, _))| *on == device)
        {
            state = self.run_until(state, stream, count);
        }
        state
    }

    /// Simulates the passage of time: runs a random number of items of random queues.
    pub(crate) fn drift<'a>(&'a self, mut state: Guard<'a>) -> Guard<'a> {
        for _ in 0..state.next_random() % 4 {
            let filled: Vec<_> =
                (0..state.streams.len()).filter(|&s| !state.streams[s].queue.is_empty()).collect();
            if filled.is_empty() {
                break;
            }
            let stream = filled[(state.next_random() % filled.len() as u64) as usize];
            let most = state.next_random() % (state.streams[stream].queue.len() as u64 + 1);
            for _ in 0..most {
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
struct Running<'a> {
    shared: &'a Shared,
    stream: usize,
    inside: Option<inside::Inside>,
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        drop(self.inside.take());
        let mut state = self.shared.lock();
        state.running = false;
        state.ran(self.stream);
        self.shared.tell(&state);
    }
}
