//! Tests of CUDA graphs over this library's memory on a real GPU, replayed while other streams
//! allocate, free and trim: no byte is wrong.
//!
//! `AQUIFER_REPLAYS` sets how often each graph is replayed, by default 20,000 times.
#![expect(unsafe_code, reason = "launches kernels")]
#![expect(clippy::unwrap_used, clippy::print_stdout, reason = "helpers of tests")]

use crate::first_gpu::{
    Gpu,
    gpu::{add, fill, kernel},
};
use aquifer::{
    Budget, DeviceBuffer, DevicePool, PoolConfig, Stream,
    cuda::{keep_alive, raw_stream},
    device::Captured,
    stream::StreamLifetime,
};
use cudarc::{
    driver::{
        CudaFunction, CudaStream, LaunchConfig, PushKernelArg,
        sys::{CUgraphInstantiate_flags, CUstreamCaptureMode},
    },
    nvrtc::Ptx,
};
use std::{
    env,
    sync::{
        Arc, PoisonError, RwLock, RwLockReadGuard,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::Instant,
};

/// Elements of each piece of captured work: 64 KiB.
const LEN: u32 = 16 << 10;

/// The end of kernels that count mismatches in `bad`.
const COUNT_UNLESS_EARLY: &str = "
    @%early bra DONE;
    ld.param.u64 %a3, [bad];
    cvta.to.global.u64 %a3, %a3;
    mov.u32 %r1, 1;
    red.global.add.u32 [%a3], %r1;";

/// `differs(a, b, more, n, bad, spin)`: counts in `bad` where `b[i]` is not `a[i] + more`.
fn differs() -> String {
    let params = ".param .u64 a, .param .u64 b, .param .u32 more, .param .u32 n, .param .u64 bad, .param .u64 spin";
    let body = "
    ld.param.u64 %a1, [a];
    cvta.to.global.u64 %a1, %a1;
    add.s64 %a1, %a1, %at;
    ld.param.u64 %a2, [b];
    cvta.to.global.u64 %a2, %a2;
    add.s64 %a2, %a2, %at;
    ld.param.u32 %r1, [more];
    ld.global.u32 %r2, [%a1];
    add.u32 %r1, %r1, %r2;
    ld.global.u32 %r2, [%a2];
    setp.eq.u32 %early, %r1, %r2;";
    kernel("differs", params, &(body.to_owned() + COUNT_UNLESS_EARLY))
}

/// `is_not(x, value, n, bad, spin)`: counts in `bad` where `x[i]` is not `value`.
fn is_not() -> String {
    let params =
        ".param .u64 x, .param .u32 value, .param .u32 n, .param .u64 bad, .param .u64 spin";
    let body = "
    ld.param.u64 %a1, [x];
    cvta.to.global.u64 %a1, %a1;
    add.s64 %a1, %a1, %at;
    ld.param.u32 %r1, [value];
    ld.global.u32 %r2, [%a1];
    setp.eq.u32 %early, %r1, %r2;";
    kernel("is_not", params, &(body.to_owned() + COUNT_UNLESS_EARLY))
}

struct Rig {
    pool: DevicePool,
    add: CudaFunction,
    differs: CudaFunction,
    is_not: CudaFunction,
    /// The last to be dropped: it keeps the GPU for this test.
    gpu: Gpu,
}

/// A stream of cudarc, and the same stream adopted by this library.
struct Both {
    cu: Arc<CudaStream>,
    s: Stream,
}

/// Buffers of a capture that the host checks.
struct Kept {
    /// How often the graph has run, in each element.
    runs: DeviceBuffer<u32>,
    /// Elements that were wrong so far.
    bad: DeviceBuffer<u32>,
}

/// Held during a capture in the strictest mode. Other threads of the test may create no context,
/// module or stream then.
static STRICT: RwLock<()> = RwLock::new(());

/// Held while a context, module or stream is created.
fn making() -> RwLockReadGuard<'static, ()> {
    STRICT.read().unwrap_or_else(PoisonError::into_inner)
}

impl Rig {
    #[track_caller]
    fn new() -> Option<Self> {
        let gpu = Gpu::with("fill", fill())?;
        let _making = making();
        let load = |name, text| {
            gpu.context.load_module(Ptx::from_src(text)).unwrap().load_function(name).unwrap()
        };
        let (add, differs, is_not) =
            (load("add", add()), load("differs", differs()), load("is_not", is_not()));
        let config = PoolConfig::with_budget(Budget::new("the device", 512 << 20));
        let pool = DevicePool::open(gpu.rt.driver().unwrap().clone(), gpu.pool().device(), config)
            .unwrap();
        Some(Self { pool, add, differs, is_not, gpu })
    }

    fn stream(&self) -> Both {
        let _making = making();
        let cu = self.gpu.cu();
        // SAFETY: 1. a stream of this device, 2. kept alive by its own `Arc`.
        let s = unsafe {
            self.pool.streams().adopt(raw_stream(&cu), StreamLifetime::KeptAlive(keep_alive(&cu)))
        };
        Both { cu, s: s.unwrap() }
    }

    fn buffer(&self, on: &Both, len: u32) -> DeviceBuffer<u32> {
        self.pool.buffer(&on.s, len as usize).unwrap()
    }

    /// Queues `to[i] = from[i] + more` on the owner stream of both.
    fn add(&self, on: &Both, from: u64, to: u64, more: u32) {
        let mut launch = on.cu.launch_builder(&self.add);
        launch.arg(&0u64).arg(&from).arg(&LEN).arg(&more).arg(&to);
        // SAFETY: 1. the kernel's five arguments, in order. 2. both are `LEN` elements of the
        // stream's own.
        unsafe { launch.launch(LaunchConfig::for_num_elems(LEN)) }.unwrap();
    }

    fn kept(&self, on: &Both) -> Kept {
        Kept { runs: self.buffer(on, LEN), bad: self.buffer(on, 1) }
    }

    /// Queues work for a graph: counts a run, and passes the count on through blocks that are freed
    /// within the graph.
    fn work(&self, on: &Both, kept: Kept) -> Kept {
        let Kept { runs, bad } = &kept;
        let at = |x: &DeviceBuffer<u32>| x.block().address();
        self.add(on, at(runs), at(runs), 1);
        let a = self.buffer(on, LEN);
        self.add(on, at(runs), at(&a), 1);
        let b = self.buffer(on, LEN);
        self.add(on, at(&a), at(&b), 1);
        let place = at(&a);
        drop(a);
        let c = self.buffer(on, LEN);
        assert_eq!(at(&c), place, "freed within the capture, and had again by its stream");
        self.add(on, at(&b), at(&c), 1);
        drop(b);
        let mut d = self.buffer(on, LEN);
        on.s.copy(&c, &mut d).unwrap();
        drop(c);
        let mut launch = on.cu.launch_builder(&self.differs);
        let (from, to, counts) = (at(runs), at(&d), at(bad));
        launch.arg(&from).arg(&to).arg(&3u32).arg(&LEN).arg(&counts).arg(&0u64);
        // SAFETY: 1. the kernel's arguments. 2. it reads `LEN` elements of both, and writes the one
        // of `bad`.
        unsafe { launch.launch(LaunchConfig::for_num_elems(LEN)) }.unwrap();
        kept
    }

    /// Allocates, writes, checks and frees on a separate stream until stopped. Returns the number
    /// of wrong elements.
    fn traffic(&self, seed: u32, stop: &AtomicBool, blocks: &AtomicU64) -> u32 {
        let on = self.stream();
        let mut bad: DeviceBuffer<u32> = self.buffer(&on, 1);
        on.s.fill(&mut bad, 0).unwrap();
        let (mut round, mut held) = (0u32, Vec::new());
        let counts = bad.block().address();
        while !stop.load(Ordering::Relaxed) {
            round += 1;
            let value = seed ^ round.wrapping_mul(0x9e37_79b9);
            let len = 1 << (8 + value % 11);
            let x = self.buffer(&on, len);
            let address = x.block().address();
            let mut launch = on.cu.launch_builder(&self.gpu.kernel);
            launch.arg(&address).arg(&value).arg(&len).arg(&0u64);
            // SAFETY: 1. the kernel's arguments. 2. it writes the block's `len` elements on its own
            // stream.
            unsafe { launch.launch(LaunchConfig::for_num_elems(len)) }.unwrap();
            held.push((x, value));
            if held.len() == 8 {
                let (x, value) = held.swap_remove(round as usize % 8);
                let (address, len) = (x.block().address(), x.len() as u32);
                let mut launch = on.cu.launch_builder(&self.is_not);
                launch.arg(&address).arg(&value).arg(&len).arg(&counts).arg(&0u64);
                // SAFETY: 1. the kernel's arguments. 2. it reads the block's elements on its own
                // stream, and writes `bad`.
                unsafe { launch.launch(LaunchConfig::for_num_elems(len)) }.unwrap();
            }
            if round % 64 == 0 {
                on.s.synchronize().unwrap();
            }
            if round % 1024 == 0 {
                self.pool.trim(0).unwrap();
            }
        }
        blocks.fetch_add(round.into(), Ordering::Relaxed);
        download(&on.s, &bad)[0]
    }

    /// Calls `replay` beside two streams of traffic as often as configured.
    fn beside_traffic(&self, kept: &mut Kept, on: &Both, mut replay: impl FnMut(u64)) {
        on.s.fill(&mut kept.runs, 0).unwrap();
        on.s.fill(&mut kept.bad, 0).unwrap();
        let replays = replays();
        let (stop, blocks) = (AtomicBool::new(false), AtomicU64::new(0));
        let begun = Instant::now();
        let took = thread::scope(|scope| {
            let traffic: Vec<_> = [0x1111_1111, 0x2222_2222]
                .map(|seed| {
                    let (stop, blocks) = (&stop, &blocks);
                    scope.spawn(move || self.traffic(seed, stop, blocks))
                })
                .into();
            /// Ends the traffic also if a replay fails.
            struct Stop<'a>(&'a AtomicBool);
            impl Drop for Stop<'_> {
                fn drop(&mut self) {
                    self.0.store(true, Ordering::Relaxed);
                }
            }
            let stopping = Stop(&stop);
            (0..replays).for_each(&mut replay);
            on.s.synchronize().unwrap();
            let took = begun.elapsed();
            drop(stopping);
            for other in traffic {
                assert_eq!(
                    other.join().unwrap(),
                    0,
                    "elements of ordinary blocks were written by a replay"
                );
            }
            took
        });
        assert_eq!(
            download(&on.s, &kept.bad),
            [0],
            "elements of the graph's were written by others"
        );
        let runs = download(&on.s, &kept.runs);
        assert!(runs.iter().all(|&runs| u64::from(runs) == replays), "{} of {replays}", runs[0]);
        println!(
            "{replays} replays in {:.1} s, beside {} other blocks",
            took.as_secs_f64(),
            blocks.into_inner()
        );
    }

    /// Asserts that the driver got the memory of the graph back.
    fn assert_all_gone(&self) {
        self.gpu.context.synchronize().unwrap();
        self.pool.trim(0).unwrap();
        assert_eq!((self.pool.stats().graphs, self.pool.stats().pending), (0, 0));
    }
}

fn replays() -> u64 {
    env::var("AQUIFER_REPLAYS").map_or(20_000, |text| text.parse().unwrap())
}

fn download(s: &Stream, x: &DeviceBuffer<u32>) -> Vec<u32> {
    let mut back = vec![0; x.len()];
    s.scope(|c| c.download(x, &mut back)).unwrap().unwrap();
    back
}

#[test]
fn a_graph_of_this_library_replays_on_two_streams_beside_other_traffic() {
    let Some(rig) = Rig::new() else { return };
    let (on, other) = (rig.stream(), rig.stream());
    let graphs = rig.pool.graph_pool().unwrap();
    // SAFETY: 1. and 2. the work touches blocks of the graph pool alone.
    let (graph, mut kept) =
        unsafe { graphs.capture(&on.s, |_| Ok(rig.work(&on, rig.kept(&on)))) }.unwrap();
    let physical = graphs.stats().physical;
    rig.beside_traffic(&mut kept, &on, |round| {
        graph.launch(if round / 16 % 2 == 0 { &on.s } else { &other.s }).unwrap();
    });
    assert_eq!(graphs.stats().physical, physical);
    drop((graph, kept, graphs));
    rig.assert_all_gone();
}

#[test]
fn two_graphs_share_a_pool_and_their_launches_follow_each_other() {
    let Some(rig) = Rig::new() else { return };
    let (on, other) = (rig.stream(), rig.stream());
    let graphs = rig.pool.graph_pool().unwrap();
    // Memory that must last lies outside: blocks of the second capture lie where temporaries of the
    // first one lie.
    let (kept, too) = (rig.kept(&on), rig.kept(&other));
    // SAFETY: 1. memory outside of the pool lives longer than the graphs. 2. each graph runs on its
    // own stream.
    let (first, mut kept) = unsafe { graphs.capture(&on.s, |_| Ok(rig.work(&on, kept))) }.unwrap();
    let physical = graphs.stats().physical;
    // SAFETY: as above.
    let (second, mut too) =
        unsafe { graphs.capture(&other.s, |_| Ok(rig.work(&other, too))) }.unwrap();
    assert_eq!(graphs.stats().physical, physical, "they share what is freed on the way");
    other.s.fill(&mut too.runs, 0).unwrap();
    other.s.fill(&mut too.bad, 0).unwrap();
    rig.beside_traffic(&mut kept, &on, |_| {
        first.launch(&on.s).unwrap();
        second.launch(&other.s).unwrap();
    });
    assert_eq!(download(&other.s, &too.bad), [0]);
    assert!(download(&other.s, &too.runs).iter().all(|&runs| u64::from(runs) == replays()));
    drop((first, second, kept, too, graphs));
    rig.assert_all_gone();
}

/// Captures a graph by cudarc's own calls, in its strictest mode, over this library's memory.
fn by_cudarc(rig: &Rig, on: &Both) -> (cudarc::driver::CudaGraph, Captured, Kept) {
    let graphs = rig.pool.graph_pool().unwrap();
    let announced = graphs.announce(&on.s).unwrap();
    let _strict = STRICT.write().unwrap_or_else(PoisonError::into_inner);
    on.cu.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL).unwrap();
    let kept = rig.work(on, rig.kept(on));
    // Operations of the pool for other streams break nothing meanwhile.
    rig.pool.trim(0).unwrap();
    let graph = on.cu.end_capture(CUgraphInstantiate_flags(0)).unwrap().unwrap();
    (graph, announced.end(), kept)
}

#[test]
fn a_graph_of_cudarc_replays_beside_other_traffic_with_no_wrong_byte() {
    let Some(rig) = Rig::new() else { return };
    let on = rig.stream();
    let (graph, captured, mut kept) = by_cudarc(&rig, &on);
    rig.beside_traffic(&mut kept, &on, |_| {
        graph.launch().unwrap();
        captured.launched(&on.s).unwrap();
    });
    assert!(rig.pool.stats().graphs > 0);
    drop((graph, captured, kept));
    rig.assert_all_gone();
}

/// The control: without an announcement the capture's block is an ordinary one, and a replay
/// overwrites its next owner.
#[test]
fn a_capture_that_was_not_announced_writes_ordinary_blocks() {
    let Some(rig) = Rig::new() else { return };
    let on = rig.stream();
    drop(rig.buffer(&on, LEN));
    on.cu.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED).unwrap();
    let temporary = rig.buffer(&on, LEN);
    let address = temporary.block().address();
    rig.add(&on, address, address, 1);
    drop(temporary);
    let graph = on.cu.end_capture(CUgraphInstantiate_flags(0)).unwrap().unwrap();
    let mut theirs = rig.buffer(&on, LEN);
    assert_eq!(theirs.block().address(), address);
    on.s.fill(&mut theirs, 7).unwrap();
    graph.launch().unwrap();
    assert!(download(&on.s, &theirs).iter().all(|&v| v == 8), "the replay wrote elsewhere");
}
