//! Graphs, executables and their launches.
//!
//! A graph is a list of nodes in the order of their capture, each with its predecessors. Nodes that
//! were captured on one stream are one *branch*. An executable has a stream of its own for each
//! branch but the first. A launch queues the first branch on the stream of the launch and the
//! others on those streams, with waits where one branch comes after another. So branches have
//! clocks of their own, and missing order within a graph is found as between streams.

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

/// All graphs and executables.
#[derive(Default, Debug)]
pub(crate) struct Graphs {
    pub(crate) graphs: Table<Graph>,
    pub(crate) execs: Table<Exec>,
    /// The number of executables created so far.
    made: u64,
}

/// A node: one item of captured work.
#[derive(Debug)]
pub(crate) struct Node {
    pub(crate) task: Task,
    /// Its uses, split by the blocks that existed at the capture.
    pub(crate) uses: Vec<Use>,
    pub(crate) branch: usize,
    /// Its predecessors, all of which precede it in the list.
    pub(crate) after: Vec<usize>,
}

/// The result of a capture. It is immutable, so its executables share it.
#[derive(Debug)]
pub(crate) struct Graph {
    pub(crate) device: DeviceId,
    pub(crate) nodes: Arc<[Node]>,
    /// The device of each branch. The first is that of the stream that began the capture.
    branches: Vec<DeviceId>,
    /// The keepers of memory for it.
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

/// An executable graph.
#[derive(Debug)]
pub(crate) struct Exec {
    pub(crate) device: DeviceId,
    nodes: Arc<[Node]>,
    keepers: Arc<[u64]>,
    /// The streams of the branches after the first (indices).
    branches: Vec<usize>,
    /// The end of its last launch.
    last: Option<Point>,
    pub(crate) holds: Vec<Hold>,
}

/// A reference to a function that is called when a graph, its executables and their launches are
/// gone.
#[derive(Clone)]
pub(crate) struct Hold {
    held: Arc<Mutex<Held>>,
}

struct Held {
    call: OnRelease,
    /// The clock that precedes the call: that of all launches.
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
    /// Returns the graph of a handle.
    pub(crate) fn graph(&mut self, graph: RawGraph) -> Result<&mut Graph, Refused> {
        match self.graphs.graphs.get_mut(graph.handle()) {
            Some(there) if there.device == graph.device() => Ok(there),
            _ => Err(codes::INVALID_VALUE),
        }
    }

    /// Returns the executable of a handle.
    pub(crate) fn exec(&mut self, exec: RawGraphExec) -> Result<&mut Exec, Refused> {
        match self.graphs.execs.get_mut(exec.handle()) {
            Some(there) if there.device == exec.device() => Ok(there),
            _ => Err(codes::INVALID_VALUE),
        }
    }

    /// Creates an executable of a graph. Fills of memory that is not mapped now are refused.
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

    /// Destroys an executable. Returns its references. Its launches continue.
    pub(crate) fn end_exec(&mut self, exec: RawGraphExec) -> Vec<Hold> {
        let Some(exec) = self.graphs.execs.remove(exec.handle()) else { return Vec::new() };
        for branch in exec.branches {
            self.streams[branch].alive = false;
            self.retire(branch);
        }
        exec.holds
    }

    /// Queues a launch on a stream without running anything.
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
            // The last launch is on this stream already, or on a destroyed stream whose index this
            // one has.
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
        // The position of each node, for waits of other branches.
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

    /// Drops references. Returns the functions to call now, without the simulator's lock. The host
    /// then knows that all launches are done.
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

/// Calls release functions. The simulator's lock must not be held.
pub(crate) fn make(calls: Vec<OnRelease>) {
    for call in calls {
        let _inside = inside::enter();
        call();
    }
}
