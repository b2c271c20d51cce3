//! Tests of parts and adopted memory on a real GPU.
#![expect(unsafe_code, reason = "launches kernels, and names memory by its address")]
#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use crate::first_gpu::{
    Gpu,
    gpu::{SPIN, add},
};
use aquifer::{
    Adopted, DeviceBuffer, DeviceRange, Operand, Stream, Typed,
    cuda::{Lend, keep_alive, raw_stream},
    driver::External,
    stream::Grid,
};
use cudarc::driver::{CudaSlice, CudaStream, DevicePtr, LaunchConfig, PushKernelArg};
use std::sync::Arc;

const LEN: usize = 1 << 20;

fn gpu() -> Option<Gpu> {
    Gpu::with("add", add())
}

impl Gpu {
    /// Adds from one operand to another on a stream of cudarc.
    fn add<A: Typed<Item = u32>, B: Typed<Item = u32> + aquifer::OperandMut>(
        &self,
        cu: &Arc<CudaStream>,
        from: &A,
        more: u32,
        to: &mut B,
    ) {
        let n = u32::try_from(from.len().min(to.len())).unwrap();
        let lent_from = from.on(cu).unwrap();
        let mut lent_to = to.on_mut(cu).unwrap();
        let mut launch = cu.launch_builder(&self.kernel);
        launch.arg(&SPIN).arg(&lent_from).arg(&n).arg(&more).arg(&mut lent_to);
        // SAFETY: 1. the kernel's five arguments, in order. 2. it accesses `n` elements of either,
        // lent to this stream.
        unsafe { launch.launch(LaunchConfig::for_num_elems(n)) }.unwrap();
    }
}

fn download<D: Typed<Item = u32>>(s: &Stream, x: &D) -> Vec<u32> {
    let mut back = vec![0; x.len()];
    s.scope(|c| c.download(x, &mut back)).unwrap().unwrap();
    back
}

#[test]
fn kernels_take_parts_at_any_position_and_what_follows_waits_for_them() {
    let Some(gpu) = gpu() else { return };
    let s = gpu.pool().stream().unwrap();
    let cu = gpu.cu();
    for round in 0..8u32 {
        let mut x: DeviceBuffer<u32> = gpu.pool().buffer(&s, LEN).unwrap();
        let mut y: DeviceBuffer<u32> = gpu.pool().buffer(&s, LEN).unwrap();
        s.fill(&mut x, round).unwrap();
        s.fill(&mut y, 100).unwrap();
        gpu.add(&cu, &x.slice(10..1010).unwrap(), 1, &mut y.slice_mut(500..1500).unwrap());
        drop(x);
        let back = download(&s, &y);
        assert!(back[500..1500].iter().all(|&n| n == round + 1), "round {round}");
        assert!(back[..500].iter().chain(&back[1500..]).all(|&n| n == 100), "round {round}");
    }
}

#[test]
fn a_lent_buffer_that_a_copy_reads_elsewhere_is_not_written_before_it() {
    let Some(gpu) = gpu() else { return };
    let s = gpu.pool().stream().unwrap();
    let (cu, other) = (gpu.cu(), gpu.cu());
    let ones: DeviceBuffer<u32> = {
        let mut ones = gpu.pool().buffer(&s, LEN).unwrap();
        s.fill(&mut ones, 1).unwrap();
        ones
    };
    let mut slow: DeviceBuffer<u32> = gpu.pool().buffer(&s, LEN).unwrap();
    let mut x: DeviceBuffer<u32> = gpu.pool().buffer(&s, LEN).unwrap();
    s.fill(&mut x, 7).unwrap();
    let mut copied: CudaSlice<u32> = other.alloc_zeros(LEN).unwrap();
    // Keeps the other stream busy, so that its copy runs late.
    gpu.add(&other, &ones, 0, &mut slow);
    {
        let lent_ones = ones.on(&cu).unwrap();
        let mut lent = x.on_mut(&cu).unwrap();
        other.memcpy_dtod(&lent, &mut copied).unwrap();
        let mut launch = cu.launch_builder(&gpu.kernel);
        launch.arg(&0u64).arg(&lent_ones).arg(&(LEN as u32)).arg(&1u32).arg(&mut lent);
        // SAFETY: 1. the kernel's arguments. 2. both are lent to this stream.
        unsafe { launch.launch(LaunchConfig::for_num_elems(LEN as u32)) }.unwrap();
    }
    assert!(other.clone_dtoh(&copied).unwrap().iter().all(|&n| n == 7));
    assert!(download(&s, &x).iter().all(|&n| n == 2));
}

#[test]
fn a_slice_of_cudarc_is_adopted_used_and_given_back_in_order() {
    let Some(gpu) = gpu() else { return };
    let (s, u) = (gpu.pool().stream().unwrap(), gpu.pool().stream().unwrap());
    let (cu, other) = (gpu.cu(), gpu.cu());
    let counted: Vec<u32> = (0..LEN as u32).collect();
    for round in 0..8u32 {
        let mut theirs: CudaSlice<u32> = cu.clone_htod(&counted).unwrap();
        // Read and written on another of cudarc's streams before it is handed over.
        other.memset_zeros(&mut theirs.slice_mut(0..100)).unwrap();
        let address = {
            let (address, _done) = theirs.device_ptr(&cu);
            address
        };
        let mut x = Adopted::new(gpu.pool().streams(), theirs).unwrap();
        assert_eq!((x.range().address, x.len()), (address, LEN));
        let mut y: DeviceBuffer<u32> = gpu.pool().buffer(&s, LEN).unwrap();
        s.copy(&x, &mut y).unwrap();
        u.fill(&mut x.slice_mut(0..1000).unwrap(), round).unwrap();
        // A kernel of cudarc on it, in this library's order.
        gpu.add(&other, &x.slice(0..500).unwrap(), 1, &mut y.slice_mut(0..500).unwrap());
        let theirs = x.into_inner().unwrap();
        // A third stream, which is ordered with this library only by cudarc's own events.
        let third = gpu.cu();
        let back = third.clone_dtoh(&theirs).unwrap();
        assert!(
            back[..1000].iter().all(|&n| n == round) && back[1000..] == counted[1000..],
            "{round}"
        );
        let y = download(&s, &y);
        assert!(y[..500].iter().all(|&n| n == round + 1) && y[500..] == counted[500..], "{round}");
    }
    // When dropped it is freed after its uses: the next owner in cudarc is not overwritten late.
    for round in 0..8u32 {
        let theirs: CudaSlice<u32> = cu.alloc_zeros(LEN).unwrap();
        let mut x = Adopted::new(gpu.pool().streams(), theirs).unwrap();
        let mut ones: DeviceBuffer<u32> = gpu.pool().buffer(&s, LEN).unwrap();
        s.fill(&mut ones, 1).unwrap();
        gpu.add(&other, &ones, round, &mut x);
        drop(x);
        let next: CudaSlice<u32> = cu.alloc_zeros(LEN).unwrap();
        other.synchronize().unwrap();
        assert!(cu.clone_dtoh(&next).unwrap().iter().all(|&n| n == 0), "round {round}");
    }
}

#[test]
fn memory_of_an_unknown_library_is_adopted_by_its_address() {
    let Some(gpu) = gpu() else { return };
    let s = gpu.pool().stream().unwrap();
    let cu = gpu.cu();
    let theirs: CudaSlice<u32> = cu.alloc_zeros(LEN).unwrap();
    let (address, done) = theirs.device_ptr(&cu);
    drop(done);
    let range = DeviceRange { device: gpu.pool().device(), address, bytes: 4 * LEN as u64 };
    // SAFETY: 1. the slice owns the range. 2. it was zeroed on `cu`. 3. it is freed there. 4. the
    // stream is kept alive.
    let external =
        unsafe { External::<u32, _>::new(range, raw_stream(&cu), Some(keep_alive(&cu)), theirs) };
    let mut x = Adopted::new(gpu.pool().streams(), external).unwrap();
    s.fill(&mut x, 5).unwrap();
    let theirs = x.into_inner().unwrap().into_guard();
    assert!(cu.clone_dtoh(&theirs).unwrap().iter().all(|&n| n == 5));

    let legacy: CudaSlice<u32> = gpu.context.default_stream().alloc_zeros(16).unwrap();
    let mut x = Adopted::new(gpu.pool().streams(), legacy).map_err(|d| d.error).unwrap();
    s.fill(&mut x, 7).unwrap();
    let back = x.into_inner().unwrap();
    assert_eq!(gpu.context.default_stream().clone_dtoh(&back).unwrap(), vec![7; 16]);
}

#[test]
fn rows_and_values_of_every_size_reach_the_gpu() {
    let Some(gpu) = gpu() else { return };
    let s = gpu.pool().stream().unwrap();
    let image: Vec<u32> = (0..1920 * 100).collect();
    let mut x: DeviceBuffer<u32> = gpu.pool().buffer(&s, image.len()).unwrap();
    let mut tile: DeviceBuffer<u32> = gpu.pool().buffer(&s, 64 * 16).unwrap();
    let grid = Grid { width: 64, height: 16, from_pitch: 1920, to_pitch: 64 };
    s.scope(|c| c.upload(&image, &mut x)).unwrap().unwrap();
    s.copy_2d(x.slice(1920 * 7 + 30..image.len()).unwrap(), &mut tile, grid).unwrap();
    let expected: Vec<u32> =
        (0..16).flat_map(|row| (0..64).map(move |i| (7 + row) * 1920 + 30 + i)).collect();
    assert_eq!(download(&s, &tile), expected);

    let mut y: DeviceBuffer<[f64; 3]> = gpu.pool().buffer(&s, 100_003).unwrap();
    s.fill(&mut y, [1.0, -2.5, 1e300]).unwrap();
    let mut back = vec![[0.0; 3]; y.len()];
    s.scope(|c| c.download(&y, &mut back)).unwrap().unwrap();
    assert!(back.iter().all(|value| *value == [1.0, -2.5, 1e300]));
}
