//! Tests of memory lent to cudarc.

use super::{
    gpu,
    support::{DEVICE, OwnStream, cuda, read_back},
};
use aquifer_core::{MemoryError, Result};
use aquifer_driver::{
    Access, DeviceRange, Driver, KeepAlive, Operand, OperandMut, RawStream, Typed,
    cuda::{Lend, raw_stream},
};
use cudarc::{
    driver::{
        CudaContext, CudaSlice, CudaStream, DevicePtr, DeviceSlice, LaunchConfig, PushKernelArg,
    },
    nvrtc::Ptx,
};
use std::sync::{Arc, Mutex};

/// A minimal operand: it has one user at a time, and the next user waits for the last one.
struct Floats {
    driver: Arc<dyn Driver>,
    address: u64,
    len: usize,
    last: Mutex<RawStream>,
    /// Whether to refuse streams without a keep-alive, as a pool does.
    strict: bool,
    kept: Mutex<Vec<KeepAlive>>,
}

// SAFETY: 1. the allocation belongs to this value alone. 2. the next user waits for the last one,
// whatever the access; streams are kept alive; Drop waits for the device.
unsafe impl Operand for Floats {
    fn range(&self) -> DeviceRange {
        DeviceRange { device: DEVICE, address: self.address, bytes: 4 * self.len as u64 }
    }

    fn order(&self, stream: RawStream, alive: Option<KeepAlive>, _: Access) -> Result<()> {
        let mut last = self.last.lock().unwrap();
        if *last == stream {
            return Ok(());
        }
        if self.strict && alive.is_none() {
            return Err(MemoryError::UnknownId);
        }
        let event = self.driver.event_create(DEVICE)?;
        self.driver.event_record(event, *last)?;
        self.driver.stream_wait_event(stream, event)?;
        // SAFETY: 1. the event is private to this call. A queued wait for it continues.
        unsafe { self.driver.event_destroy(event) }?;
        self.kept.lock().unwrap().extend(alive);
        *last = stream;
        Ok(())
    }
}

// SAFETY: 1. the allocation has no other owner.
unsafe impl OperandMut for Floats {}

impl Typed for Floats {
    type Item = f32;
    fn len(&self) -> usize {
        self.len
    }
}

impl Floats {
    fn new(driver: &Arc<dyn Driver>, stream: RawStream, len: usize, strict: bool) -> Self {
        let address = driver.mem_alloc(DEVICE, 4 * len as u64).unwrap();
        let (last, kept) = (Mutex::new(stream), Mutex::default());
        Self { driver: driver.clone(), address, len, last, strict, kept }
    }

    /// Returns the contents after all earlier work.
    fn read(&self, stream: &OwnStream) -> Vec<f32> {
        self.order(stream.raw, None, Access::Read).unwrap();
        let bytes = read_back(&self.driver, stream.raw, self.address, 4 * self.len);
        bytes.chunks_exact(4).map(|four| f32::from_ne_bytes(four.try_into().unwrap())).collect()
    }
}

impl Drop for Floats {
    fn drop(&mut self) {
        let _ = self.driver.device_synchronize(DEVICE);
        // SAFETY: 1. the allocation is this value's. 2. the device is idle.
        let _ = unsafe { self.driver.mem_free(DEVICE, self.address) };
    }
}

fn on_gpu() -> Option<(Arc<dyn Driver>, Arc<CudaStream>, OwnStream)> {
    let driver: Arc<dyn Driver> = cuda()?;
    let theirs = CudaContext::new(0).unwrap().new_stream().unwrap();
    let ours = OwnStream::new(&driver);
    Some((driver, theirs, ours))
}

#[test]
fn a_kernel_of_cudarc_runs_on_lent_memory_in_order() {
    const LEN: usize = 1 << 20;
    let Some((driver, cu, s)) = on_gpu() else { return };
    let scale = cu
        .context()
        .load_module(Ptx::from_src(gpu::scale()))
        .unwrap()
        .load_function("scale")
        .unwrap();
    let mut x = Floats::new(&driver, s.raw, LEN, false);
    let ones = vec![1.0f32; LEN];
    cu.memcpy_htod(&ones, &mut x.on_mut(&cu).unwrap()).unwrap();
    for round in 1..=10 {
        {
            let mut lent = x.on_mut(&cu).unwrap();
            assert_eq!((lent.len(), lent.stream().cu_stream()), (LEN, cu.cu_stream()));
            let config = LaunchConfig::for_num_elems(LEN as u32);
            let mut launch = cu.launch_builder(&scale);
            launch.arg(&mut lent).arg(&2.0f32).arg(&(LEN as u32)).arg(&0u64);
            // SAFETY: 1. the kernel takes a float pointer, a float, a count and a time, and
            // accesses this many elements.
            unsafe { launch.launch(config) }.unwrap();
        }
        // The owner's stream reads directly after the kernel, without a host wait.
        let expected = 2.0f32.powi(round);
        assert!(x.read(&s).iter().all(|&value| value == expected), "round {round}");
    }
}

#[test]
fn the_safe_copies_of_cudarc_take_lent_memory() {
    let Some((driver, cu, s)) = on_gpu() else { return };
    let mut x = Floats::new(&driver, s.raw, 1000, false);
    let mut y = Floats::new(&driver, s.raw, 1000, false);
    let counted: Vec<f32> = (0..1000u16).map(f32::from).collect();
    cu.memcpy_htod(&counted, &mut x.on_mut(&cu).unwrap()).unwrap();
    cu.memcpy_dtod(&x.on(&cu).unwrap(), &mut y.on_mut(&cu).unwrap()).unwrap();
    cu.memset_zeros(&mut x.on_mut(&cu).unwrap()).unwrap();
    let theirs: CudaSlice<f32> = cu.clone_dtod(&y.on(&cu).unwrap()).unwrap();
    assert_eq!(cu.clone_dtoh(&theirs).unwrap(), counted);
    assert_eq!(y.read(&s), counted);
    assert_eq!(x.read(&s), vec![0.0; 1000]);
}

#[test]
fn a_copy_that_cannot_be_ordered_is_not_made() {
    let Some((driver, cu, s)) = on_gpu() else { return };
    let stranger = cu.context().new_stream().unwrap();
    let mut x = Floats::new(&driver, s.raw, 64, true);
    cu.memset_zeros(&mut x.on_mut(&cu).unwrap()).unwrap();
    {
        let mut lent = x.on_mut(&cu).unwrap();
        assert!(stranger.memcpy_htod(&[1.0f32; 64], &mut lent).is_err());
        assert!(
            stranger.context().check_err().is_err(),
            "the reason is recorded where cudarc tells it"
        );
        let (address, _done) = lent.device_ptr(&stranger);
        assert_eq!(address, 0);
    }
    let _ = cu.context().check_err();
    // SAFETY: 1. `cu` lives to the end of this test.
    assert_eq!(*x.last.lock().unwrap(), unsafe { raw_stream(&cu) });
    x.strict = false;
    assert_eq!(x.read(&s), vec![0.0; 64]);
}
