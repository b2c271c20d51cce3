//! Captures and graphs.
#![expect(unsafe_code, reason = "makes handles, and implements calls that end them")]

use crate::{
    Call, CaptureMode, CaptureStatus, Graphs, OnRelease, RawGraph, RawGraphExec, RawStream, Result,
    sim::{
        codes,
        graph::{Exec, Graph, Hold, let_go},
        shared::{Shared, at},
    },
};

impl Graphs for Shared {
    fn capture_begin(&self, stream: RawStream, mode: CaptureMode) -> Result<()> {
        let call = Call::CaptureBegin;
        let mut state = self.enter(call, Some(stream.device()))?;
        state.begin_capture(stream, mode).map_err(at(call))?;
        self.cost(call, 0);
        Ok(())
    }

    fn capture_end(&self, stream: RawStream) -> Result<RawGraph> {
        let call = Call::CaptureEnd;
        let mut state = self.enter(call, Some(stream.device()))?;
        let nodes = state.end_capture(stream).map_err(at(call))?;
        self.cost(call, 0);
        let device = stream.device();
        let handle = state.graphs.graphs.insert(Graph { device, nodes, holds: Vec::new() });
        // SAFETY: 1. The handle is that of the graph just made.
        Ok(unsafe { RawGraph::from_raw(device, handle) })
    }

    fn capture_status(&self, stream: RawStream) -> Result<CaptureStatus> {
        let call = Call::CaptureStatus;
        let mut state = self.enter(call, Some(stream.device()))?;
        let status = state.capture_status(stream).map_err(at(call))?;
        self.cost(call, 0);
        Ok(status)
    }

    fn graph_instantiate(&self, graph: RawGraph) -> Result<RawGraphExec> {
        let call = Call::GraphInstantiate;
        let mut state = self.enter(call, Some(graph.device()))?;
        let holds = state.graph(graph).map_err(at(call))?.holds.clone();
        self.cost(call, 0);
        let handle = state.graphs.execs.insert(Exec { device: graph.device(), holds });
        // SAFETY: 1. The handle is that of the executable just made.
        Ok(unsafe { RawGraphExec::from_raw(graph.device(), handle) })
    }

    unsafe fn graph_launch(&self, exec: RawGraphExec, stream: RawStream) -> Result<()> {
        let call = Call::GraphLaunch;
        let mut state = self.enter(call, Some(stream.device()))?;
        let place = state.stream(stream).map_err(at(call))?;
        if state.streams[place].capture.is_some() {
            return Err(at(call)(codes::CAPTURE_UNSUPPORTED));
        }
        state.exec(exec).map_err(at(call))?;
        self.cost(call, 0);
        Ok(())
    }

    unsafe fn graph_destroy(&self, graph: RawGraph) -> Result<()> {
        let call = Call::GraphDestroy;
        let mut state = self.enter(call, Some(graph.device()))?;
        state.graph(graph).map_err(at(call))?;
        self.cost(call, 0);
        let gone = state.graphs.graphs.remove(graph.handle());
        drop(state);
        let_go(gone.map(|graph| graph.holds).unwrap_or_default());
        Ok(())
    }

    unsafe fn graph_exec_destroy(&self, exec: RawGraphExec) -> Result<()> {
        let call = Call::GraphExecDestroy;
        let mut state = self.enter(call, Some(exec.device()))?;
        state.exec(exec).map_err(at(call))?;
        self.cost(call, 0);
        let gone = state.graphs.execs.remove(exec.handle());
        drop(state);
        let_go(gone.map(|exec| exec.holds).unwrap_or_default());
        Ok(())
    }

    fn graph_on_release(&self, graph: RawGraph, call: OnRelease) -> Result<()> {
        let mut state = self.enter(Call::GraphRetain, Some(graph.device()))?;
        state.graph(graph).map_err(at(Call::GraphRetain))?.holds.push(Hold::new(call));
        self.cost(Call::GraphRetain, 0);
        Ok(())
    }
}
