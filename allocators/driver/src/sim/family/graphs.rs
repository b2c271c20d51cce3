//! Captures and graphs of the simulated machine.
#![expect(unsafe_code, reason = "creates handles, and implements calls that destroy them")]

use crate::{
    Call, CaptureMode, CaptureStatus, Graphs, RawGraph, RawGraphExec, RawStream, Result,
    sim::machine::{Machine, caller_site, error_of},
};

// SAFETY: 1. Graphs are stored under numbers that are not reused. 2. Captured tasks stay in their
// graph until a launch queues them. 3. Captures are numbered.
unsafe impl Graphs for Machine {
    fn capture_begin(&self, stream: RawStream, mode: CaptureMode) -> Result<()> {
        let call = Call::CaptureBegin;
        let mut state = self.enter(call, Some(stream.device()))?;
        state.begin_capture(stream, mode).map_err(error_of(call))?;
        Ok(())
    }

    fn capture_end(&self, stream: RawStream) -> Result<RawGraph> {
        let call = Call::CaptureEnd;
        let mut state = self.enter(call, Some(stream.device()))?;
        let graph = state.end_capture(stream).map_err(error_of(call))?;
        let handle = state.graphs.graphs.insert(graph);
        // SAFETY: 1. The handle belongs to the graph that was just created.
        Ok(unsafe { RawGraph::from_raw(stream.device(), handle) })
    }

    fn capture_status(&self, stream: RawStream) -> Result<CaptureStatus> {
        let call = Call::CaptureStatus;
        let mut state = self.enter(call, Some(stream.device()))?;
        let status = state.capture_status(stream).map_err(error_of(call))?;
        Ok(status)
    }

    fn graph_instantiate(&self, graph: RawGraph) -> Result<RawGraphExec> {
        let call = Call::GraphInstantiate;
        let mut state = self.enter(call, Some(graph.device()))?;
        state.captures.reject_unsafe_call().map_err(error_of(call))?;
        let handle = state.instantiate(graph).map_err(error_of(call))?;
        // SAFETY: 1. The handle belongs to the executable that was just created.
        Ok(unsafe { RawGraphExec::from_raw(graph.device(), handle) })
    }

    unsafe fn graph_launch(&self, exec: RawGraphExec, stream: RawStream) -> Result<()> {
        let site = caller_site();
        let call = Call::GraphLaunch;
        let mut state = self.enter(call, Some(stream.device()))?;
        let index = state.stream(stream).map_err(error_of(call))?;
        state.exec(exec).map_err(error_of(call))?;
        state.refuse_capturing_stream(index).map_err(error_of(call))?;
        state.is_captured(index).map_err(error_of(call))?;
        state.launch(exec, index, site).map_err(error_of(call))?;
        drop(self.run_by_schedule(state));
        Ok(())
    }

    unsafe fn graph_destroy(&self, graph: RawGraph) -> Result<()> {
        let call = Call::GraphDestroy;
        let mut state = self.enter(call, Some(graph.device()))?;
        state.graph(graph).map_err(error_of(call))?;
        state.graphs.graphs.remove(graph.handle());
        Ok(())
    }

    unsafe fn graph_exec_destroy(&self, exec: RawGraphExec) -> Result<()> {
        let call = Call::GraphExecDestroy;
        let mut state = self.enter(call, Some(exec.device()))?;
        state.captures.reject_unsafe_call().map_err(error_of(call))?;
        state.exec(exec).map_err(error_of(call))?;
        state.destroy_exec(exec);
        Ok(())
    }
}
