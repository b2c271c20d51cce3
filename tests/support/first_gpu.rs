//! The first GPU, and a runtime on it, for one test at a time.
#![allow(
    dead_code,
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "each test binary uses some of it, to test"
)]

#[path = "gpu.rs"]
pub(crate) mod gpu;

use aquifer::{DevicePool, Runtime, RuntimeBuilder};
use cudarc::{
    driver::{CudaContext, CudaFunction, CudaStream},
    nvrtc::Ptx,
};
use std::{
    ops::Deref,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

/// Waits until no other test uses a GPU, and keeps the GPUs for this one.
///
/// Some tests take all the memory of a GPU, measure what is free, capture in a mode that forbids
/// calls of other threads, or count what the process has retired.
pub(crate) fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A runtime with a device, and the turn of its test.
pub(crate) struct RuntimeInTurn {
    rt: Runtime,
    _turn: MutexGuard<'static, ()>,
}

impl RuntimeInTurn {
    /// Waits for the turn of this test, and opens the devices.
    pub(crate) fn new(builder: RuntimeBuilder) -> Self {
        let turn = turn();
        Self { rt: builder.build().expect("a runtime, with or without a GPU"), _turn: turn }
    }
}

impl Deref for RuntimeInTurn {
    type Target = Runtime;

    fn deref(&self) -> &Runtime {
        &self.rt
    }
}

/// Returns a runtime with a device. Without one the test is skipped.
#[track_caller]
pub(crate) fn runtime() -> Option<RuntimeInTurn> {
    let rt = RuntimeInTurn::new(Runtime::builder());
    if rt.devices().is_empty() {
        gpu::skip("no GPU");
        return None;
    }
    Some(rt)
}

/// The first device, through this library and through cudarc, and a kernel on it.
pub(crate) struct Gpu {
    pub(crate) kernel: CudaFunction,
    pub(crate) context: Arc<CudaContext>,
    pub(crate) rt: RuntimeInTurn,
}

impl Gpu {
    /// Creates it with a kernel of this name from `text`. Without a device the test is skipped.
    #[track_caller]
    pub(crate) fn with(name: &str, text: String) -> Option<Self> {
        let rt = runtime()?;
        let context = CudaContext::new(rt.devices()[0].device().0 as usize).unwrap();
        let kernel = context.load_module(Ptx::from_src(text)).unwrap().load_function(name).unwrap();
        Some(Self { kernel, context, rt })
    }

    pub(crate) fn pool(&self) -> &DevicePool {
        self.rt.device(0).unwrap()
    }

    /// Returns a stream of cudarc.
    pub(crate) fn cu(&self) -> Arc<CudaStream> {
        self.context.new_stream().unwrap()
    }
}
