//! Tests of device pools on a real GPU.
//!
//! The two planted faults run only when `AQUIFER_PLANT` names them. They are for
//! `compute-sanitizer`, which must report them where each block is a separate allocation
//! (`AQUIFER_BYPASS=1`).
#![expect(unsafe_code, reason = "launches kernels")]
#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use crate::first_gpu::{
    Gpu,
    gpu::{SPIN, fill},
};
use aquifer::{
    Access, Block, Budget, Debugging, DeviceBuffer, DevicePool, Direct, MemoryError, PoolConfig,
    Request, Resource, Stream, StreamOrdered,
    cuda::{Lend, keep_alive, raw_stream},
    device::{Adoption, Fault, POISON_ALLOCATED},
    driver::Call,
    stream::StreamLifetime,
};
use cudarc::driver::{CudaStream, LaunchConfig, PushKernelArg};
use std::{env, sync::Arc, thread};

const MIB: usize = 1 << 20;

fn gpu() -> Option<Gpu> {
    Gpu::with("fill", fill())
}

impl Gpu {
    /// Returns a separate pool under a limit in MiB.
    fn small_pool(&self, limit: u64) -> DevicePool {
        let mut config = PoolConfig::with_budget(Budget::new("the device", limit << 20));
        config.bypass = env::var_os("AQUIFER_BYPASS").is_some_and(|v| v == "1");
        let driver = self.rt.driver().unwrap().clone();
        DevicePool::open(driver, self.pool().device(), config).unwrap()
    }

    /// Fills a buffer slowly on a stream of cudarc.
    fn fill(&self, on: &Arc<CudaStream>, x: &mut DeviceBuffer<u32>, value: u32, spin: u64) {
        let n = u32::try_from(x.len()).unwrap();
        let mut lent = x.on_mut(on).unwrap();
        let mut launch = on.launch_builder(&self.kernel);
        launch.arg(&mut lent).arg(&value).arg(&n).arg(&spin);
        // SAFETY: 1. the kernel's four arguments, in order. 2. it writes the `n` elements that are
        // lent to this stream.
        unsafe { launch.launch(LaunchConfig::for_num_elems(n)) }.unwrap();
    }
}

fn download(s: &Stream, x: &DeviceBuffer<u32>) -> Vec<u32> {
    let mut back = vec![0; x.len()];
    s.scope(|c| c.download(x, &mut back)).unwrap().unwrap();
    back
}

#[test]
fn rounds_on_one_stream_without_host_waits_read_back_the_last_pattern() {
    let Some(gpu) = gpu() else { return };
    let pool = gpu.small_pool(64);
    let s = pool.stream().unwrap();
    for round in 0..32u8 {
        let mut x: DeviceBuffer<u8> = pool.buffer(&s, MIB).unwrap();
        s.fill(&mut x, round).unwrap();
    }
    let mut last: DeviceBuffer<u8> = pool.buffer(&s, MIB).unwrap();
    s.fill(&mut last, 0xab).unwrap();
    let mut back = vec![0u8; MIB];
    s.scope(|c| c.download(&last, &mut back)).unwrap().unwrap();
    assert!(back.iter().all(|&byte| byte == 0xab));
}

#[test]
fn a_slow_kernel_on_another_stream_keeps_its_block_after_the_free() {
    let Some(gpu) = gpu() else { return };
    let pool = gpu.small_pool(256);
    let s = pool.stream().unwrap();
    let cu = gpu.cu();
    for round in 0..16u32 {
        let mut x: DeviceBuffer<u32> = pool.buffer(&s, MIB).unwrap();
        // Runs for milliseconds, while the block is freed and its stream allocates another.
        gpu.fill(&cu, &mut x, 0xdead_0000 | round, SPIN);
        drop(x);
        let mut y: DeviceBuffer<u32> = pool.buffer(&s, MIB).unwrap();
        s.fill(&mut y, 0x1111_1111).unwrap();
        assert!(download(&s, &y).iter().all(|&v| v == 0x1111_1111), "round {round}");
        cu.synchronize().unwrap();
        assert!(
            download(&s, &y).iter().all(|&v| v == 0x1111_1111),
            "the kernel wrote late, round {round}"
        );
    }
}

/// The default streams of all threads have one handle.
#[test]
fn a_threads_default_stream_is_not_taken_for_that_of_another_thread() {
    let Some(gpu) = gpu() else { return };
    // No room for a second buffer.
    let pool = gpu.small_pool(6);
    let per_thread = || gpu.cu().context().per_thread_stream();
    let slowly_filled = || {
        let own = pool.streams().thread_default().unwrap();
        let mut x: DeviceBuffer<u32> = pool.buffer(&own, MIB).unwrap();
        gpu.fill(&per_thread(), &mut x, 0xdead_0000, SPIN);
        x
    };
    let mut x = thread::scope(|scope| scope.spawn(slowly_filled).join().unwrap());
    let own = pool.streams().thread_default().unwrap();
    let refused = [own.fill(&mut x, 1), x.on_mut(&per_thread()).map(drop)];
    for refused in refused {
        assert!(matches!(refused, Err(MemoryError::OtherThread { stream: 2 })), "{refused:?}");
    }
    drop(x);
    // Waits for the kernel, since this takes the memory that it fills.
    let mut y: DeviceBuffer<u32> = pool.buffer(&own, MIB).unwrap();
    own.fill(&mut y, 0x1111_1111).unwrap();
    gpu.cu().context().synchronize().unwrap();
    assert!(download(&own, &y).iter().all(|&v| v == 0x1111_1111), "the kernel wrote late");
}

/// The control: the use is not recorded, and the pool reuses the block under the kernel.
#[test]
fn without_a_recorded_use_the_slow_kernel_overwrites_the_next_block() {
    let Some(gpu) = gpu() else { return };
    if env::var_os("AQUIFER_BYPASS").is_some() {
        // A free by the driver waits for the kernel.
        return;
    }
    let pool = gpu.small_pool(256);
    let s = pool.stream().unwrap();
    let cu = gpu.cu();
    // The driver loads the fill kernel at its first use, which can take longer than the kernel
    // below.
    let mut first = pool.buffer::<u32>(&s, 32 << 10).unwrap();
    s.fill(&mut first, 0).unwrap();
    s.synchronize().unwrap();
    drop(first);
    // So few threads that the fill below runs beside them on other multiprocessors.
    let n = 32u32 << 10;
    let x: DeviceBuffer<u32> = pool.buffer(&s, n as usize).unwrap();
    let address = x.block().address();
    let mut launch = cu.launch_builder(&gpu.kernel);
    launch.arg(&address).arg(&7u32).arg(&n).arg(&SPIN);
    // SAFETY: 1. the kernel's arguments. 2. deliberately broken: the use is not recorded, and the
    // memory stays mapped.
    unsafe { launch.launch(LaunchConfig::for_num_elems(n)) }.unwrap();
    drop(x);
    let mut y: DeviceBuffer<u32> = pool.buffer(&s, n as usize).unwrap();
    assert_eq!(y.block().address(), address);
    s.fill(&mut y, 0x1111_1111).unwrap();
    s.synchronize().unwrap();
    cu.synchronize().unwrap();
    assert!(download(&s, &y).iter().all(|&v| v == 7), "the kernel came first: make it slower");
}

#[test]
fn handles_that_move_under_queued_work_lose_no_byte_and_no_host_wait_is_needed() {
    let Some(gpu) = gpu() else { return };
    if env::var_os("AQUIFER_BYPASS").is_some() {
        return;
    }
    let pool = gpu.small_pool(96);
    let (s, u) = (pool.stream().unwrap(), pool.stream().unwrap());
    let cu = gpu.cu();
    for round in 0..20u32 {
        let mut busy: Vec<DeviceBuffer<u32>> =
            (0..6).map(|_| pool.buffer(&s, 2 * MIB).unwrap()).collect();
        for (i, x) in busy.iter_mut().enumerate() {
            gpu.fill(&cu, x, round * 100 + i as u32, SPIN / 10);
        }
        // Frees every other block with its kernel still running. A large block for `u` needs their
        // handles.
        let kept: Vec<(usize, DeviceBuffer<u32>)> =
            busy.drain(..).enumerate().filter(|(i, _)| i % 2 == 1).collect();
        let mut large = pool.buffer::<u32>(&u, 15 * MIB).unwrap();
        u.fill(&mut large, 0x2222_2222).unwrap();
        assert!(download(&u, &large).iter().all(|&v| v == 0x2222_2222), "round {round}");
        for (i, x) in &kept {
            assert!(
                download(&s, x).iter().all(|&v| v == round * 100 + *i as u32),
                "round {round}, block {i}"
            );
        }
        cu.synchronize().unwrap();
        assert!(
            download(&u, &large).iter().all(|&v| v == 0x2222_2222),
            "clobbered late, round {round}"
        );
    }
    let stats = pool.stats();
    assert!(stats.moves > 0 && stats.host_waits == 0, "{stats:?}");
    println!("{} moves, {} waits between streams", stats.moves, stats.stream_waits);
}

#[test]
fn a_warm_stream_makes_no_driver_call_for_an_allocation_and_a_free() {
    let Some(gpu) = gpu() else { return };
    if env::var_os("AQUIFER_BYPASS").is_some() {
        return;
    }
    let pool = gpu.small_pool(256);
    let s = pool.stream().unwrap();
    let round =
        || drop([1, 4096, 70_000, MIB as u64].map(|n| pool.alloc(&s, Request::bytes(n)).unwrap()));
    round();
    let before = pool.driver().calls().made();
    for _ in 0..1000 {
        round();
    }
    assert_eq!(pool.driver().calls().made(), before);
}

#[test]
fn a_foreign_stream_is_adopted_and_retired() {
    let Some(gpu) = gpu() else { return };
    let pool = gpu.small_pool(64);
    let s = pool.stream().unwrap();
    let cu = gpu.cu();
    // SAFETY: 1. a stream of this device, 2. kept alive by its own `Arc`.
    let adopted = unsafe {
        pool.streams().adopt(raw_stream(&cu), StreamLifetime::KeptAlive(keep_alive(&cu)))
    }
    .unwrap();
    let block: Block = pool.alloc(&s, Request::bytes(MIB as u64)).unwrap();
    block.prepare(&adopted, Access::Write).unwrap().finish().unwrap();
    drop(block);
    adopted.retire().unwrap();
    pool.trim(0).unwrap();
    assert_eq!(pool.stats().pending, 0);
}

#[test]
fn the_drivers_own_allocators_serve_the_same_trait() {
    let Some(gpu) = gpu() else { return };
    let driver = gpu.rt.driver().unwrap().clone();
    let streams = gpu.pool().streams().clone();
    let budget = Budget::new("the device", 1 << 30);
    let resources: [Arc<dyn Resource>; 2] = [
        Arc::new(Direct::new(driver.clone(), streams.clone(), Some(budget.clone()))),
        Arc::new(StreamOrdered::new(driver.clone(), streams.clone(), budget.clone()).unwrap()),
    ];
    let s = streams.lease().unwrap();
    for resource in resources {
        let mut x: DeviceBuffer<u32> = DeviceBuffer::new_in(&resource, &s, MIB).unwrap();
        s.fill(&mut x, 0x3333_3333).unwrap();
        assert!(download(&s, &x).iter().all(|&v| v == 0x3333_3333));
        assert!(budget.used() >= 4 << 20);
        drop(x);
        s.synchronize().unwrap();
        resource.trim(0).unwrap();
        assert_eq!(budget.used(), 0, "{resource:?}");
    }
}

#[test]
fn streams_that_do_not_share_make_no_wait_for_each_other() {
    let Some(gpu) = gpu() else { return };
    let mut config = PoolConfig::with_budget(Budget::new("the device", 64 << 20));
    config.adoption = Adoption::Never;
    let pool =
        DevicePool::open(gpu.rt.driver().unwrap().clone(), gpu.pool().device(), config).unwrap();
    let (s, u) = (pool.stream().unwrap(), pool.stream().unwrap());
    let before = pool.driver().calls().get(Call::StreamWaitEvent);
    for _ in 0..8 {
        drop(pool.alloc(&s, Request::bytes(24 << 20)).unwrap());
        drop(pool.alloc(&u, Request::bytes(24 << 20)).unwrap());
    }
    // Other tests share the driver's counters, so the test also checks this pool's own.
    assert_eq!(pool.stats().stream_waits, 0);
    assert!(pool.driver().calls().get(Call::StreamWaitEvent) >= before);
}

/// Faults that debugging finds on a real device: a kernel beyond the end of its block, and a fill
/// before its start. Correct work is not reported.
#[test]
fn writes_around_a_block_are_found_and_right_ones_are_not() {
    let Some(gpu) = gpu() else { return };
    if env::var_os("AQUIFER_BYPASS").is_some() {
        return;
    }
    let mut config = PoolConfig::with_budget(Budget::new("the device", 256 << 20));
    config.debug = Debugging::all();
    let pool =
        DevicePool::open(gpu.rt.driver().unwrap().clone(), gpu.pool().device(), config).unwrap();
    let s = pool.stream().unwrap();
    let cu = gpu.cu();
    for round in 0..64u32 {
        let mut x: DeviceBuffer<u32> = pool.buffer(&s, 1000 + 4000 * round as usize).unwrap();
        assert!(download(&s, &x).iter().all(|&v| v == u32::from_ne_bytes([POISON_ALLOCATED; 4])));
        gpu.fill(&cu, &mut x, round, SPIN / 20);
        // Freed under its kernel: debugging writes afterwards.
        drop(x);
    }
    let mut kept: DeviceBuffer<u32> = pool.buffer(&s, 1000).unwrap();
    gpu.fill(&cu, &mut kept, 7, 0);
    cu.synchronize().unwrap();
    assert!(pool.check().unwrap().is_empty());

    let launch = |address: u64, to: u32| {
        let mut launch = cu.launch_builder(&gpu.kernel);
        launch.arg(&address).arg(&0x0102_0304u32).arg(&to).arg(&0u64);
        // SAFETY: 1. the kernel's arguments. 2. deliberately broken: it writes to memory without an
        // owner, which stays mapped.
        unsafe { launch.launch(LaunchConfig::for_num_elems(to)) }.unwrap();
        cu.synchronize().unwrap();
    };
    s.synchronize().unwrap();
    launch(kept.block().address(), 1001);
    let found = pool.check().unwrap();
    assert_eq!(found.len(), 1, "{found:?}");
    assert!(matches!(found[0].fault, Fault::Overrun { offset: 4000, found: 4 }), "{}", found[0]);
    assert_eq!(found[0].block.allocated_at.file(), file!());

    let before = kept.block().address() - 3;
    // SAFETY: deliberately broken: it writes to a guard, in order on the block's own stream.
    unsafe { pool.driver().fill(s.raw(), before, 0x55, 3) }.unwrap();
    let found = pool.check().unwrap();
    assert!(matches!(found[0].fault, Fault::Underrun { offset: -3, found: 0x55 }), "{}", found[0]);

    drop(kept);
    pool.trim(0).unwrap();
    assert_eq!(pool.findings().len(), 2, "{:?}", pool.findings());
    assert_eq!((pool.stats().pending, pool.budget().used()), (0, 0));
}

/// A kernel that writes beyond the end of its block, for the sanitizer to find.
#[test]
fn planted_overrun() {
    if env::var_os("AQUIFER_PLANT").is_none_or(|v| v != "overrun") {
        return;
    }
    let Some(gpu) = gpu() else { return };
    let pool = gpu.small_pool(64);
    let s = pool.stream().unwrap();
    let cu = gpu.cu();
    // 512 bytes, which a pool does not round up: the next byte may be another block's.
    let mut x: DeviceBuffer<u32> = pool.buffer(&s, 128).unwrap();
    let mut lent = x.on_mut(&cu).unwrap();
    let mut launch = cu.launch_builder(&gpu.kernel);
    launch.arg(&mut lent).arg(&1u32).arg(&129u32).arg(&0u64);
    // SAFETY: deliberately broken: one element too many.
    unsafe { launch.launch(LaunchConfig::for_num_elems(129)) }.unwrap();
    let _ = cu.synchronize();
}

/// A kernel that writes to a block that has been freed, for the sanitizer to find.
#[test]
fn planted_use_after_free() {
    if env::var_os("AQUIFER_PLANT").is_none_or(|v| v != "use-after-free") {
        return;
    }
    let Some(gpu) = gpu() else { return };
    let pool = gpu.small_pool(64);
    let s = pool.stream().unwrap();
    let cu = gpu.cu();
    let x: DeviceBuffer<u32> = pool.buffer(&s, 1000).unwrap();
    let address = x.block().address();
    drop(x);
    let mut launch = cu.launch_builder(&gpu.kernel);
    launch.arg(&address).arg(&1u32).arg(&1000u32).arg(&0u64);
    // SAFETY: deliberately broken: the block has been freed.
    unsafe { launch.launch(LaunchConfig::for_num_elems(1000)) }.unwrap();
    let _ = cu.synchronize();
}
