//! Graphs: what a capture has made, executables, and their launches.
//!
//! A graph is a list of nodes in the order of their capture, each with those that it comes after;
//! nodes that were captured on one stream are one *branch*. An executable has a stream of its own
//! for each branch but the first: a launch queues the first branch on the stream that it is
//! launched on and the others on those, with waits where one branch comes after another. So
//! branches have clocks of their own, and what nothing orders within a graph is found as between
//! streams.

use super::{
    agents::Agent,
    clock::Clock,
    codes, inside,
    queue::{Kind, Point, Task, Work},
    schedule::Origin,
    space::Use,
    state::{Refused, State},
    table::Table,
};
use crate::{DeviceId, OnRelease, RawGraph, RawGraphExec};
use std::{
    fmt,
    panic::Location,
    sync::{Arc, Mutex, PoisonError},
};

/// Every graph and every executable.
#[derive(Default, Debug)]
pub(crate) struct Graphs {
    pub(crate) graphs: Table<Graph>,
    pub(crate) execs: Table<Exec>,
    /// Executables made so far.
    made: u64,
}

/// One piece of captured work.
#[derive(Debug)]
pub(crate) struct Node {
    pub(crate) task: Task,
    /// What it touches, cut by the blocks that were there when it was captured.
    pub(crate) uses: Vec<Use>,
    pub(crate) branch: usize,
    /// The nodes that it comes after, all of which stand before it in the list.
    pub(crate) after: Vec<usize>,
}

/// What a capture has made. It does not change, so its executables share it.
#[derive(Debug)]
pub(crate) struct Graph {
    pub(crate) device: DeviceId,
    pub(crate) nodes: Arc<[Node]>,
    /// The device of each branch; the first is that of the stream that began the capture.
    branches: Vec<DeviceId>,
    /// Those who keep memory for it.
    keepers: Arc<[u64]>,
    pub(crate) holds: Vec<Hold>,
}

impl Graph {
    pub(crate) fn new(
        device: DeviceId,
        nodes: Vec<Node>,
        branches: Vec<DeviceId>,
        keepers: Vec<u64>,
    ) -> Self {
        Self { device, nodes: nodes.into(), branches, keepers: keepers.into(), holds: Vec::new() }
    }
}

/// Something that can be launched.
#[derive(Debug)]
pub(crate) struct Exec {
    pub(crate) device: DeviceId,
    nodes: Arc<[Node]>,
    keepers: Arc<[u64]>,
    /// The streams of the branches after the first, by place.
    branches: Vec<usize>,
    /// The end of its last launch.
    last: Option<Point>,
    pub(crate) holds: Vec<Hold>,
}

/// A share in what is called when a graph, its executables and their launches are done with.
#[derive(Clone)]
pub(crate) struct Hold {
    held: Arc<Mutex<Held>>,
}

struct Held {
    call: OnRelease,
    /// What comes before the call: all launches.
    after: Clock,
}

impl Hold {
    pub(crate) fn new(call: OnRelease) -> Self {
        Self { held: Arc::new(Mutex::new(Held { call, after: Clock::default() })) }
    }

    fn comes_after(&self, clock: &Clock) {
        self.held.lock().unwrap_or_else(PoisonError::into_inner).after.join(clock);
    }
}

impl fmt::Debug for Hold {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Hold").finish_non_exhaustive()
    }
}

impl State {
    /// The graph that a handle means.
    pub(crate) fn graph(&mut self, graph: RawGraph) -> Result<&mut Graph, Refused> {
        match self.graphs.graphs.get_mut(graph.handle()) {
            Some(there) if there.device == graph.device() => Ok(there),
            _ => Err(codes::INVALID_VALUE),
        }
    }

    /// The executable that a handle means.
    pub(crate) fn exec(&mut self, exec: RawGraphExec) -> Result<&mut Exec, Refused> {
        match self.graphs.execs.get_mut(exec.handle()) {
            Some(there) if there.device == exec.device() => Ok(there),
            _ => Err(codes::INVALID_VALUE),
        }
    }

    /// Makes an executable of a graph. Fills of what is not mapped now are refused.
    pub(crate) fn instantiate(&mut self, graph: RawGraph) -> Result<u64, Refused> {
        let Graph { device, nodes, branches, keepers, holds } = self.graph(graph)?;
        let (device, nodes, keepers, holds) =
            (*device, Arc::clone(nodes), Arc::clone(keepers), holds.clone());
        let branches = branches.clone();
        let mut told = nodes.iter().flat_map(|node| node.task.work.told());
        if told.any(|u| self.space.unreachable(u).is_some()) {
            return Err(codes::INVALID_VALUE);
        }
        self.graphs.made += 1;
        let agent = Agent::Graph { device, id: self.graphs.made };
        let branches = branches
            .into_iter()
            .skip(1)
            .map(|device| self.make_stream_of(device, Kind::Branch, Some(agent)));
        let branches = branches.collect();
        Ok(self.graphs.execs.insert(Exec { device, nodes, keepers, branches, last: None, holds }))
    }

    /// Ends an executable. What it held; its launches go on.
    pub(crate) fn end_exec(&mut self, exec: RawGraphExec) -> Vec<Hold> {
        let Some(exec) = self.graphs.execs.remove(exec.handle()) else { return Vec::new() };
        for branch in exec.branches {
            self.streams[branch].alive = false;
            self.retire(branch);
        }
        exec.holds
    }

    /// Queues a launch on a stream, without running anything.
    pub(crate) fn launch(
        &mut self,
        exec: RawGraphExec,
        stream: usize,
        site: &'static Location<'static>,
    ) -> Result<(), Refused> {
        let Exec { nodes, keepers, branches, last, holds, .. } = self.exec(exec)?;
        let (nodes, keepers, holds) = (Arc::clone(nodes), Arc::clone(keepers), holds.clone());
        let (branches, last) = (branches.clone(), last.clone());
        let name = "graph launch";
        self.after_implied(stream, name, site);
        match last {
            // There already, or in a stream that has gone since and whose place this one has.
            Some(last) if last.stream == stream && self.oracle => {
                self.streams[stream].clock.join(&last.clock);
            }
            Some(last) if last.stream != stream => {
                self.after(stream, &last, "graph launch before", site);
            }
            _ => {}
        }
        self.settle(stream);
        let start = self.point(stream);
        for &branch in &branches {
            self.after(branch, &start, name, site);
        }
        // Where each node stands, as far as another branch may ask.
        let mut points = Vec::new();
        for node in &*nodes {
            let place =
                |branch: usize| branch.checked_sub(1).map_or(stream, |other| branches[other]);
            let at = place(node.branch);
            for &before in node.after.iter().filter(|&&before| nodes[before].branch != node.branch)
            {
                self.after(at, &points[before], name, site);
            }
            let origin = Origin { launch: site, uses: &node.uses, keepers: &keepers };
            self.append(at, node.task.clone(), Some(&origin));
            if !branches.is_empty() {
                points.push(self.point(at));
            }
        }
        for &branch in &branches {
            let end = self.point(branch);
            self.after(stream, &end, name, site);
        }
        if !holds.is_empty() {
            let clock = self.point(stream).clock;
            holds.iter().for_each(|hold| hold.comes_after(&clock));
            self.append(stream, Task::new(name, site, Work::Launched(holds)), None);
        }
        let end = self.point(stream);
        self.exec(exec)?.last = Some(end);
        Ok(())
    }

    /// Lets go of shares. What is to be called now, without the simulator's lock: the host knows
    /// then that all launches are done.
    pub(crate) fn let_go(&mut self, holds: Vec<Hold>) -> Vec<OnRelease> {
        let mut calls = Vec::new();
        for held in holds.into_iter().filter_map(|hold| Arc::into_inner(hold.held)) {
            let Held { call, after } = held.into_inner().unwrap_or_else(PoisonError::into_inner);
            self.host_learns(&after);
            calls.push(call);
        }
        calls
    }
}

/// Makes calls that were waiting for a release. The simulator's lock must not be held.
pub(crate) fn make(calls: Vec<OnRelease>) {
    for call in calls {
        let _inside = inside::enter();
        call();
    }
}
