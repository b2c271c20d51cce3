//! Tests of pinned host memory on a real GPU.
#![expect(unsafe_code, reason = "queues copies by hand, and launches a kernel")]
#![expect(clippy::unwrap_used, clippy::print_stdout, reason = "helpers of tests")]

use crate::first_gpu::{self, RuntimeInTurn};
use aquifer::{
    Budget, DeviceBuffer, DeviceId, DevicePool, Stream,
    cuda::Lend,
    host::{Host, PinnedBy, Pinning, Topology},
};
use aquifer_host::{
    kernel::{Kernel, Span},
    region::{Region, RegionRequest, end_retired},
};
use cudarc::{
    driver::{CudaContext, CudaFunction, CudaStream, LaunchConfig, PushKernelArg},
    nvrtc::Ptx,
};
use std::{ptr::NonNull, sync::Arc, time::Instant};

const MIB: usize = 1 << 20;
const GIB: usize = 1 << 30;

/// `x[0] = x[0]` after spinning for this many clock cycles.
const SPIN: &str = "
.version 7.0
.target sm_70
.address_size 64
.visible .entry spin(.param .u64 x, .param .u64 cycles)
{
    .reg .pred %p<2>;
    .reg .b32 %r<2>;
    .reg .b64 %t<6>;
    ld.param.u64 %t1, [cycles];
    ld.param.u64 %t4, [x];
    cvta.to.global.u64 %t5, %t4;
    mov.u64 %t2, %clock64;
AGAIN:
    mov.u64 %t3, %clock64;
    sub.s64 %t3, %t3, %t2;
    setp.lt.u64 %p1, %t3, %t1;
    @%p1 bra AGAIN;
    ld.global.u32 %r1, [%t5];
    st.global.u32 [%t5], %r1;
    ret;
}
";

struct Gpu {
    host: Host,
    budget: Budget,
    /// The last to be dropped: retired memory belongs to the process, so it keeps other tests from
    /// running.
    rt: RuntimeInTurn,
}

/// Returns the first GPU, or prints why there is none.
fn gpu() -> Option<Gpu> {
    let rt = first_gpu::runtime()?;
    // What earlier tests have retired is not counted.
    end_retired();
    let device: DeviceId = rt.devices()[0].device();
    let host = Host::new(Topology::read().unwrap(), Kernel::new());
    let host = host.with_driver(rt.driver().unwrap().clone(), device);
    Some(Gpu { host, budget: Budget::unlimited("pinned"), rt })
}

impl Gpu {
    fn pool(&self) -> &DevicePool {
        self.rt.device(0).unwrap()
    }

    fn stream(&self) -> Stream {
        self.pool().stream().unwrap()
    }
}

/// Writes bytes that differ by position, also at the borders of registrations.
fn pattern(bytes: &mut [u8], seed: u64) {
    for (number, word) in bytes.chunks_exact_mut(8).enumerate() {
        let value = (number as u64 ^ seed).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        word.copy_from_slice(&value.to_le_bytes());
    }
}

/// Returns the position of the first byte that differs.
fn differs(a: &[u8], b: &[u8]) -> Option<usize> {
    if a == b { None } else { a.iter().zip(b).position(|(a, b)| a != b) }
}

/// Returns the wanted size, limited to a third of the machine's free memory.
fn ample(wanted: usize) -> usize {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap();
    let line = text.lines().find(|line| line.starts_with("MemAvailable:")).unwrap();
    let kib: usize = line.split_whitespace().nth(1).unwrap().parse().unwrap();
    let spare = (kib << 10) / 3 / GIB * GIB;
    if spare < wanted {
        println!("less memory than wished for: {spare} bytes of {wanted}");
    }
    wanted.min(spare)
}

#[test]
fn eight_gibibytes_are_pinned_and_every_byte_goes_there_and_back() {
    let Some(gpu) = gpu() else { return };
    let bytes = ample(8 * GIB);
    // A virtual machine may populate its memory at the first touch.
    let mut warm = RegionRequest::bytes(bytes);
    warm.pinning = Pinning::Off;
    drop(Region::new(&gpu.host, &gpu.budget, &warm).unwrap());
    for registration in [256 * MIB, GIB] {
        let mut request = RegionRequest::bytes(bytes);
        request.pinning = Pinning::Required;
        request.registration = registration;
        let begun = Instant::now();
        let mut region = Region::new(&gpu.host, &gpu.budget, &request).unwrap();
        let took = begun.elapsed();
        println!(
            "{bytes} bytes by {registration} in {took:?}: {:.1} GB/s, {}, {:?}",
            bytes as f64 / took.as_secs_f64() / 1e9,
            region.report().pages,
            region.report().shortfalls
        );
        // The last part is registered as two quarters and a half.
        assert_eq!(region.report().pinned_by, PinnedBy::Registration(bytes / registration + 2));
        assert_eq!(gpu.budget.used(), bytes as u64);
        pattern(region.bytes_mut(), registration as u64);
        let s = gpu.stream();
        let x: DeviceBuffer<u8> = gpu.pool().buffer(&s, bytes).unwrap();
        let driver = gpu.rt.driver().unwrap();
        let parts: Vec<Span> = region.registrations().to_vec();
        let start = region.span().start;
        let at = |offset: usize| NonNull::new((start + offset) as *mut u8).unwrap();
        for part in &parts {
            let offset = part.start - start;
            let to = aquifer::Operand::range(&x).address + offset as u64;
            // SAFETY: 1. both sides live until the stream is idle, below, and lie in one
            // registration. 2. one stream.
            unsafe { driver.copy_to_device(s.raw(), to, at(offset), part.len).unwrap() };
        }
        s.synchronize().unwrap();
        // No copy crosses the border of two registrations, which is why the parts are reported.
        let to = aquifer::Operand::range(&x).address;
        // SAFETY: 1. as above, except for the registration, deliberately: the call is refused.
        let across = unsafe { driver.copy_to_device(s.raw(), to, at(parts[0].len - 4096), 8192) };
        assert_eq!(across.unwrap_err().code, 1);
        let expected = region.bytes()[..64 * MIB].to_vec();
        region.bytes_mut().fill(0);
        for part in &parts {
            let offset = part.start - start;
            let from = aquifer::Operand::range(&x).address + offset as u64;
            // SAFETY: 1. and 2. as above.
            unsafe { driver.copy_to_host(s.raw(), at(offset), from, part.len).unwrap() };
        }
        s.synchronize().unwrap();
        assert_eq!(differs(&region.bytes()[..64 * MIB], &expected), None);
        let seed = registration as u64;
        for (number, word) in region.bytes().chunks_exact(8).enumerate() {
            let value = (number as u64 ^ seed).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            assert_eq!(word, value.to_le_bytes(), "byte {}", number * 8);
        }
        drop(x);
        region.close().unwrap();
        assert_eq!(gpu.budget.used(), 0);
    }
}

fn spin(on: &Arc<CudaStream>, kernel: &CudaFunction, x: &mut DeviceBuffer<u32>, cycles: u64) {
    let mut lent = x.on_mut(on).unwrap();
    let mut launch = on.launch_builder(kernel);
    launch.arg(&mut lent).arg(&cycles);
    // SAFETY: 1. the kernel's two arguments, in order. 2. it accesses the first element, which is
    // lent.
    unsafe { launch.launch(LaunchConfig::for_num_elems(1)) }.unwrap();
}

#[test]
fn registrations_retired_while_a_kernel_runs_end_later() {
    let Some(gpu) = gpu() else { return };
    let context = CudaContext::new(0).unwrap();
    let kernel = context.load_module(Ptx::from_src(SPIN)).unwrap().load_function("spin").unwrap();
    let cu = context.new_stream().unwrap();
    let s = gpu.stream();
    let mut x: DeviceBuffer<u32> = gpu.pool().buffer(&s, 1024).unwrap();
    let mut request = RegionRequest::bytes(64 * MIB);
    request.pinning = Pinning::Required;
    let regions = [(); 2].map(|()| Region::new(&gpu.host, &gpu.budget, &request).unwrap());
    // About 0.3 s, for which the end of a registration would wait.
    spin(&cu, &kernel, &mut x, 500_000_000);
    let done = cu.record_event(None).unwrap();
    let begun = Instant::now();
    regions.into_iter().for_each(Region::retire);
    let left = begun.elapsed();
    assert!(!done.is_complete(), "the kernel is long enough to be seen running");
    assert_eq!(gpu.budget.used(), 128 * MIB as u64);
    println!("left in {left:?}");
    cu.synchronize().unwrap();
    assert_eq!(end_retired(), 128 * MIB as u64);
    assert_eq!(gpu.budget.used(), 0);
}
