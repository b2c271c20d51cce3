//! [`Graphs`] of CUDA.
#![expect(unsafe_code, reason = "calls the CUDA driver")]

use super::{
    CudaDriver,
    abi::{self, driver_ptr},
    codes::check,
};
use crate::{
    Call, CaptureMode, CaptureStatus, Graphs, OnRelease, RawGraph, RawGraphExec, RawStream, Result,
};
use std::{ffi::c_void, ptr};

// SAFETY: 1. to 4. Handles come from the driver, and its results are passed on unchanged. A
// function to call on release is the destructor of a user object.
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

    fn graph_on_release(&self, graph: RawGraph, call: OnRelease) -> Result<()> {
        let data: *mut ReleaseFunction =
            Box::into_raw(Box::new(ReleaseFunction { call: Some(call) }));
        let mut user_object = ptr::null_mut();
        let created = self.bind(graph.device()).and_then(|_context| {
            // SAFETY: 1. `user_object` is writable. 2. `call_release_function` takes ownership of
            // `data`, and is called at most once.
            let code = unsafe {
                (self.functions.user_object_create)(
                    &raw mut user_object,
                    data.cast(),
                    call_release_function,
                    1,
                    abi::USER_OBJECT_NO_DESTRUCTOR_SYNC,
                )
            };
            check("cuUserObjectCreate", code)
        });
        if let Err(refused) = created {
            self.calls.add(Call::GraphRetain);
            // SAFETY: 1. It comes from `into_raw` above. 2. The driver has created nothing that
            // could call `call_release_function`.
            drop(unsafe { Box::from_raw(data) });
            return Err(refused);
        }
        self.call(Call::GraphRetain, graph.device(), |functions| {
            // SAFETY: 1. The graph and the object are alive. The object's one reference is owned
            // here and is moved to the graph.
            unsafe {
                (functions.graph_retain)(
                    driver_ptr(graph.handle()),
                    user_object,
                    1,
                    abi::GRAPH_USER_OBJECT_MOVE,
                )
            }
        })
        .inspect_err(|_| {
            // Releasing the object calls `call_release_function`, which must find no function to
            // call. SAFETY: 1. `data` lives until `call_release_function` is called. 2. There is no
            // other access to it: the reference is still owned here.
            drop(unsafe { (*data).call.take() });
            // SAFETY: 1. The object is alive, and its one reference is owned here. A refusal leaks
            // an empty box.
            let _ = unsafe { (self.functions.user_object_release)(user_object, 1) };
        })
    }
}

/// The data that the driver stores for [`call_release_function`].
struct ReleaseFunction {
    call: Option<OnRelease>,
}

/// Called by the driver, on one of its threads, when the last reference to a user object is gone.
unsafe extern "C" fn call_release_function(data: *mut c_void) {
    // SAFETY: 1. The driver passes the pointer to a `ReleaseFunction` that it was given, once, and
    // does not use it afterwards.
    let data = unsafe { Box::from_raw(data.cast::<ReleaseFunction>()) };
    if let Some(call) = data.call {
        call();
    }
}
