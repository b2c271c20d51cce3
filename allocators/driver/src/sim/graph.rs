//! Graphs, executables and their launches.
//!
//! A graph is a list of nodes in the order of their capture, each with its predecessors. Nodes that
//! were captured on one stream are one *branch*. An executable has a stream of its own for each
//! branch but the first. A launch queues the first branch on the stream of the launch and the
//! others on those streams, with waits where one branch comes after another. So branches have
//! clocks of their own, and missing order within a graph is found as between streams.

use super::{
    address_space::DeviceUse,
    codes::{self, ErrorCode},
    handle_table::HandleTable,
    machine_state::MachineState,
    queue::{StreamKind, StreamPoint, Task},
    schedule::LaunchContext,
};
use crate::{DeviceId, RawGraph, RawGraphExec, site::Site};
use std::sync::Arc;

/// All graphs and executables.
#[derive(Default, Debug)]
pub(crate) struct GraphTables {
    pub(crate) graphs: HandleTable<Graph>,
    pub(crate) execs: HandleTable<GraphExec>,
    /// The number of executables created so far.
    execs_created: u64,
}

/// A node: one item of captured work.
#[derive(Debug)]
pub(crate) struct GraphNode {
    pub(crate) task: Task,
    /// Its uses, split by the blocks that existed at the capture.
    pub(crate) uses: Vec<DeviceUse>,
    pub(crate) branch: usize,
    /// Its predecessors, all of which precede it in the list.
    pub(crate) predecessors: Vec<usize>,
}

/// The result of a capture. It is immutable, so its executables share it.
#[derive(Debug)]
pub(crate) struct Graph {
    pub(crate) device: DeviceId,
    pub(crate) nodes: Arc<[GraphNode]>,
    /// The device of each branch. The first is that of the stream that began the capture.
    branches: Vec<DeviceId>,
    /// The keepers of memory for it.
    keepers: Arc<[u64]>,
}

impl Graph {
    pub(crate) fn new(
        device: DeviceId,
        nodes: Vec<GraphNode>,
        branches: Vec<DeviceId>,
        keepers: Vec<u64>,
    ) -> Self {
        Self { device, nodes: nodes.into(), branches, keepers: keepers.into() }
    }
}

/// An executable graph.
#[derive(Debug)]
pub(crate) struct GraphExec {
    pub(crate) device: DeviceId,
    nodes: Arc<[GraphNode]>,
    keepers: Arc<[u64]>,
    /// The streams of the branches after the first (indices).
    branches: Vec<usize>,
    /// The end of its last launch.
    last: Option<StreamPoint>,
}

impl MachineState {
    /// Returns the graph of a handle.
    pub(crate) fn graph(&mut self, graph: RawGraph) -> Result<&mut Graph, ErrorCode> {
        match self.graphs.graphs.get_mut(graph.handle()) {
            Some(entry) if entry.device == graph.device() => Ok(entry),
            _ => Err(codes::INVALID_VALUE),
        }
    }

    /// Returns the executable of a handle.
    pub(crate) fn exec(&mut self, exec: RawGraphExec) -> Result<&mut GraphExec, ErrorCode> {
        match self.graphs.execs.get_mut(exec.handle()) {
            Some(entry) if entry.device == exec.device() => Ok(entry),
            _ => Err(codes::INVALID_VALUE),
        }
    }

    /// Creates an executable of a graph. Fills of memory that is not mapped now are refused.
    pub(crate) fn instantiate(&mut self, graph: RawGraph) -> Result<u64, ErrorCode> {
        let Graph { device, nodes, branches, keepers } = self.graph(graph)?;
        let (device, nodes, keepers) = (*device, Arc::clone(nodes), Arc::clone(keepers));
        let branches = branches.clone();
        let mut checked =
            nodes.iter().flat_map(|node| node.task.work.uses_checked_at_instantiation());
        if checked.any(|u| self.space.first_inaccessible(u).is_some()) {
            return Err(codes::INVALID_VALUE);
        }
        self.graphs.execs_created += 1;
        let kind = StreamKind::Branch { exec: self.graphs.execs_created };
        let others = branches.into_iter().skip(1);
        let branches = others.map(|device| self.create_stream(device, kind)).collect();
        Ok(self.graphs.execs.insert(GraphExec { device, nodes, keepers, branches, last: None }))
    }

    /// Destroys an executable. Its launches continue.
    pub(crate) fn destroy_exec(&mut self, exec: RawGraphExec) {
        let Some(exec) = self.graphs.execs.remove(exec.handle()) else { return };
        for branch in exec.branches {
            self.streams[branch].alive = false;
            self.recycle_stream(branch);
        }
    }

    /// Queues a launch on a stream without running anything.
    pub(crate) fn launch(
        &mut self,
        exec: RawGraphExec,
        stream: usize,
        site: Site,
    ) -> Result<(), ErrorCode> {
        let GraphExec { nodes, keepers, branches, last, .. } = self.exec(exec)?;
        let (nodes, keepers) = (Arc::clone(nodes), Arc::clone(keepers));
        let (branches, last) = (branches.clone(), last.clone());
        let name = "graph launch";
        self.wait_for_implied_streams(stream, name, site);
        match last {
            // The last launch is on this stream already, or on a destroyed stream whose index this
            // one has.
            Some(last) if last.stream == stream && self.oracle => {
                self.streams[stream].clock.join(&last.clock);
            }
            Some(last) if last.stream != stream => {
                self.wait_for_point(stream, &last, "graph launch before", site);
            }
            _ => {}
        }
        self.join_host_clock(stream);
        let start = self.point(stream);
        for &branch in &branches {
            self.wait_for_point(branch, &start, name, site);
        }
        // The position of each node, for waits of other branches.
        let mut points = Vec::new();
        for node in &*nodes {
            let index =
                |branch: usize| branch.checked_sub(1).map_or(stream, |other| branches[other]);
            let at = index(node.branch);
            for &before in
                node.predecessors.iter().filter(|&&before| nodes[before].branch != node.branch)
            {
                self.wait_for_point(at, &points[before], name, site);
            }
            let context = LaunchContext { launch: site, uses: &node.uses, keepers: &keepers };
            self.append(at, node.task.clone(), Some(&context));
            if !branches.is_empty() {
                points.push(self.point(at));
            }
        }
        for &branch in &branches {
            let end = self.point(branch);
            self.wait_for_point(stream, &end, name, site);
        }
        let end = self.point(stream);
        self.exec(exec)?.last = Some(end);
        Ok(())
    }
}
