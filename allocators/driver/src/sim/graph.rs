//! Graphs: work that has been captured.

use super::{
    codes, inside,
    state::{Refused, State},
    table::Table,
};
use crate::{DeviceId, OnRelease, RawGraph, RawGraphExec};
use std::{
    fmt,
    sync::{Arc, Mutex, PoisonError},
};

/// Every graph and every executable.
#[derive(Default, Debug)]
pub(crate) struct Graphs {
    pub(crate) graphs: Table<Graph>,
    pub(crate) execs: Table<Exec>,
}

/// What a capture has made.
#[derive(Debug)]
pub(crate) struct Graph {
    pub(crate) device: DeviceId,
    pub(crate) nodes: u64,
    pub(crate) holds: Vec<Hold>,
}

/// Something that can be launched.
#[derive(Debug)]
pub(crate) struct Exec {
    pub(crate) device: DeviceId,
    pub(crate) holds: Vec<Hold>,
}

/// A share in what is called when a graph, its executables and their launches are done with.
#[derive(Clone)]
pub(crate) struct Hold {
    call: Arc<Mutex<Option<OnRelease>>>,
}

impl Hold {
    pub(crate) fn new(call: OnRelease) -> Self {
        Self { call: Arc::new(Mutex::new(Some(call))) }
    }

    /// Lets go. What is to be called now, if this was the last; not under the simulator's lock.
    fn let_go(self) -> Option<OnRelease> {
        Arc::into_inner(self.call)?.into_inner().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Hold {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Hold").finish_non_exhaustive()
    }
}

/// Lets go of shares, and makes the calls that were waiting for that. The simulator's lock must not be held.
pub(crate) fn let_go(holds: Vec<Hold>) {
    for call in holds.into_iter().filter_map(Hold::let_go) {
        let _inside = inside::enter();
        call();
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
}
