//! [`Graphs`] of CUDA.
#![expect(unsafe_code, reason = "calls the CUDA driver")]

use super::{
    CudaDriver,
    abi::{self, driver_ptr},
};
use crate::{Call, CaptureMode, CaptureStatus, Graphs, RawGraph, RawGraphExec, RawStream, Result};
use std::ptr;

// SAFETY: 1. to 3. Handles come from the driver, and its results are passed on unchanged.
unsafe impl Graphs for CudaDriver {
    fn capture_begin(&self, stream: RawStream, mode: CaptureMode) -> Result<()> {
        self.call(Call::CaptureBegin, stream.device(), |functions| {
            // SAFETY: 1. The handle is alive.
            unsafe {
                (functions.capture_begin)(driver_ptr(stream.handle()), abi::capture_mode(mode))
            }
        })
    }

    fn capture_end(&self, stream: RawStream) -> Result<RawGraph> {
        let mut graph = ptr::null_mut();
        self.call(Call::CaptureEnd, stream.device(), |functions| {
            // SAFETY: 1. The handle is alive. 2. `graph` is writable.
            unsafe { (functions.capture_end)(driver_ptr(stream.handle()), &raw mut graph) }
        })?;
        // SAFETY: 1. The driver has just created it for a stream of this device.
        Ok(unsafe { RawGraph::from_raw(stream.device(), abi::handle_of(graph)) })
    }

    fn capture_status(&self, stream: RawStream) -> Result<CaptureStatus> {
        let (mut status, mut id) = (abi::CAPTURE_STATUS_NONE, 0);
        self.call(Call::CaptureStatus, stream.device(), |functions| {
            // SAFETY: 1. The handle is alive. 2. `status` and `id` are writable. A null pointer
            // means that the value is not requested.
            unsafe {
                (functions.capture_status)(
                    driver_ptr(stream.handle()),
                    &raw mut status,
                    &raw mut id,
                    ptr::null_mut(),
                    ptr::null_mut(),
                    ptr::null_mut(),
                )
            }
        })?;
        Ok(match status {
            abi::CAPTURE_STATUS_NONE => CaptureStatus::None,
            abi::CAPTURE_STATUS_ACTIVE => CaptureStatus::Active { id },
            _ => CaptureStatus::Invalidated,
        })
    }

    fn graph_instantiate(&self, graph: RawGraph) -> Result<RawGraphExec> {
        let mut exec = ptr::null_mut();
        self.call(Call::GraphInstantiate, graph.device(), |functions| {
            // SAFETY: 1. The handle is alive. 2. `exec` is writable.
            unsafe { (functions.graph_instantiate)(&raw mut exec, driver_ptr(graph.handle()), 0) }
        })?;
        // SAFETY: 1. The driver has just created it for a graph of this device.
        Ok(unsafe { RawGraphExec::from_raw(graph.device(), abi::handle_of(exec)) })
    }

    unsafe fn graph_launch(&self, exec: RawGraphExec, stream: RawStream) -> Result<()> {
        self.call(Call::GraphLaunch, stream.device(), |functions| {
            // SAFETY: 1. Both handles are alive. 2. The caller is responsible for what the graph
            // accesses.
            unsafe {
                (functions.graph_launch)(driver_ptr(exec.handle()), driver_ptr(stream.handle()))
            }
        })
    }

    unsafe fn graph_destroy(&self, graph: RawGraph) -> Result<()> {
        self.destroy(Call::GraphDestroy, graph.device(), |functions| {
            // SAFETY: 1. The handle is alive, and the caller does not use it afterwards.
            unsafe { (functions.graph_destroy)(driver_ptr(graph.handle())) }
        })
    }

    unsafe fn graph_exec_destroy(&self, exec: RawGraphExec) -> Result<()> {
        self.destroy(Call::GraphExecDestroy, exec.device(), |functions| {
            // SAFETY: 1. The handle is alive, and the caller does not use it afterwards.
            unsafe { (functions.graph_exec_destroy)(driver_ptr(exec.handle())) }
        })
    }
}
