//! The first GPU, and a runtime on it.
#![allow(
    dead_code,
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "each test binary uses some of it, to test"
)]

#[path = "gpu.rs"]
pub(crate) mod gpu;

use aquifer::{DevicePool, Runtime};
use cudarc::{
    driver::{CudaContext, CudaFunction, CudaStream},
    nvrtc::Ptx,
};
use std::sync::Arc;

/// Returns a runtime with a device. Without one the test is skipped.
#[track_caller]
pub(crate) fn runtime() -> Option<Runtime> {
    let rt = Runtime::builder().build().expect("a runtime, with or without a GPU");
    if rt.devices().is_empty() {
        gpu::skip("no GPU");
        return None;
    }
    Some(rt)
}

/// The first device, through this library and through cudarc, and a kernel on it.
pub(crate) struct Gpu {
    pub(crate) rt: Runtime,
    pub(crate) kernel: CudaFunction,
    pub(crate) context: Arc<CudaContext>,
}

impl Gpu {
    /// Creates it with a kernel of this name from `text`. Without a device the test is skipped.
    #[track_caller]
    pub(crate) fn with(name: &str, text: String) -> Option<Self> {
        let rt = runtime()?;
        let context = CudaContext::new(rt.devices()[0].device().0 as usize).unwrap();
        let kernel = context.load_module(Ptx::from_src(text)).unwrap().load_function(name).unwrap();
        Some(Self { rt, kernel, context })
    }

    pub(crate) fn pool(&self) -> &DevicePool {
        self.rt.device(0).unwrap()
    }

    /// Returns a stream of cudarc.
    pub(crate) fn cu(&self) -> Arc<CudaStream> {
        self.context.new_stream().unwrap()
    }
}
