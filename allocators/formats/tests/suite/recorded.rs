//! A test that records a program with every kind of memory on two devices, and compares the trace
//! with the pools' statistics.
#![expect(unsafe_code, reason = "captures by hand, parks, and resizes pinned blocks")]

use allocator_api2::alloc::{Allocator, Global};
use aquifer_core::{
    Budget, Recorder, Tag,
    event::{BlockKind, TraceFile},
    tagged,
};
use aquifer_device::{
    Block, Captured, Debugging, DevicePool, GraphPool, Park, PoolConfig, Request, Reserved,
    StableBlock,
};
use aquifer_driver::{Access, CaptureMode, DeviceId, sim::Sim};
use aquifer_formats::{
    history::MemoryHistory,
    trace::{Trace, TraceDevice},
};
use aquifer_host::{
    PinnedBuf, PinnedConfig, PinnedPool, kernel::Kernel, region::Host, topology::Topology,
};
use aquifer_stream::Stream;
use std::{
    alloc::Layout,
    path::{Path, PathBuf},
    ptr::NonNull,
    sync::Arc,
};

const MIB: u64 = 1 << 20;

/// The state of the program on one device.
struct Program {
    pool: DevicePool,
    bypass: bool,
    cached: Vec<Block>,
    stable: StableBlock,
    reserved: Reserved<u8>,
    parked: Vec<Block>,
    of_graph: Block,
    _captured: (Captured, GraphPool),
    _streams: [Stream; 2],
}

fn tags() -> [Tag; 3] {
    ["weights", "kv, cache 100 %", "scratch"].map(Tag::named)
}

impl Program {
    fn new(pool: &DevicePool, sim: &Sim, bypass: bool) -> Self {
        let [weights, cache, scratch] = tags();
        // Streams of both devices have the same numbers, and addresses may be equal too.
        let more = u64::from(pool.device().0) * 512;
        let (s, u) = (pool.stream().unwrap(), pool.stream().unwrap());
        let cached = vec![
            pool.alloc(&s, Request::bytes(10_000 + more).tag(weights)).unwrap(),
            pool.alloc(&u, Request::bytes(3 * MIB)).unwrap(),
        ];
        let gone = pool.alloc(&s, Request::bytes(MIB).tag(scratch)).unwrap();
        let used = gone.prepare(&u, Access::Read).unwrap();
        drop(gone);
        used.finish().unwrap();
        assert!(pool.alloc(&s, Request::bytes(8 << 30)).is_err());

        let stable = pool.alloc_stable(&s, Request::bytes(3 * MIB + more).tag(weights)).unwrap();
        drop(pool.alloc_stable(&s, Request::bytes(5)).unwrap());

        let mut reserved = tagged(cache, || pool.reserve::<u8>(&s, 64 << 20)).unwrap();
        for tokens in 1..=9 {
            reserved.commit_to(tokens << 20).unwrap();
        }
        reserved.decommit(4 << 20..8 << 20).unwrap();
        reserved.commit(4 << 20..5 << 20).unwrap();
        let mut lost = tagged(scratch, || pool.reserve::<u8>(&s, 8 << 20)).unwrap();
        lost.commit_to(3 << 20).unwrap();
        drop(lost);

        let parkable = pool.parkable(cache).unwrap();
        let parked =
            [1, 2, 3].map(|n| parkable.alloc(&s, Request::bytes(n * 700_000)).unwrap()).into();

        let graphs = pool.graph_pool().unwrap();
        let announced = graphs.announce(&s).unwrap();
        s.driver().capture_begin(s.raw(), CaptureMode::Global).unwrap();
        let of_graph = pool.alloc(&s, Request::bytes(70_000).tag(scratch)).unwrap();
        drop(pool.alloc(&s, Request::bytes(9_000)).unwrap());
        let graph = s.driver().capture_end(s.raw()).unwrap();
        // SAFETY: 1. no other code has the handle.
        unsafe { sim.driver().graph_destroy(graph) }.unwrap();
        let captured = (announced.end(), graphs);
        let pool = pool.clone();
        Self {
            pool,
            bypass,
            cached,
            stable,
            reserved,
            parked,
            of_graph,
            _captured: captured,
            _streams: [s, u],
        }
    }

    /// Compares the trace so far with the held memory.
    fn check(&self, path: &Path, parked: u64, guarded: bool) {
        let ordinal = self.pool.device().0;
        let trace = Trace::read(path, Some(ordinal)).unwrap_or_else(|e| panic!("{e}"));
        trace.check();
        assert_eq!(trace.device, Some(ordinal));
        let history = MemoryHistory::read(path, Some(TraceDevice::Gpu(ordinal))).unwrap();
        let of_kind = |kind| held(&history, |kind_of, _| kind_of == kind);
        let kinds = [
            (BlockKind::Stable, self.stable.bytes()),
            (BlockKind::Reserved, self.reserved.committed_bytes()),
            (BlockKind::Parkable, parked),
            (BlockKind::Graph, self.of_graph.bytes()),
        ];
        for (kind, expected) in kinds {
            assert_eq!(of_kind(kind), expected, "{kind:?} on device {ordinal}");
        }
        let cached = of_kind(BlockKind::Cached);
        let asked = self.cached.iter().map(Block::bytes).sum::<u64>();
        if guarded {
            // Blocks are recorded with their guards, freed ones until these are read.
            return assert!(cached >= asked, "{cached} on device {ordinal}");
        }
        assert_eq!(
            (cached, trace.live_at_end),
            (asked, self.pool.stats().requested),
            "device {ordinal}"
        );
        if self.bypass {
            // The pool does not count driver allocations by tag.
            return;
        }
        for tag in tags() {
            let held = held(&history, |_, tag_of| tag_of == tag.name());
            assert_eq!(held, self.pool.held_by(tag), "{tag} on device {ordinal}");
        }
    }
}

/// Returns the bytes of blocks that are held at the end, of a kind or with a tag.
fn held(history: &MemoryHistory, fits: impl Fn(BlockKind, &str) -> bool) -> u64 {
    let blocks = &history.blocks;
    let fits = |&at: &usize| {
        let (kind, tag) = (blocks.kind[at].unwrap(), history.names.get(blocks.tag[at]));
        blocks.freed[at].is_infinite() && fits(kind, tag)
    };
    (0..blocks.len()).filter(fits).map(|at| blocks.requested[at]).sum()
}

/// Creates a pinned pool with some blocks, one of which was shrunk in place.
fn pinned(recorder: &Arc<Recorder>) -> (PinnedPool, PinnedBuf<u64>, NonNull<u8>) {
    let mut config = PinnedConfig::default();
    config.recorder = Some(recorder.clone());
    config.chunk = 4 << 20;
    let host = Host::new(Topology::read().unwrap(), Kernel::new());
    let pool = PinnedPool::new(&host, &Budget::new("pinned", 256 << 20), config).unwrap();
    let buffer = tagged(tags()[2], || pool.buffer::<u64>(1000)).unwrap();
    drop(pool.buffer::<u8>(77).unwrap());
    let layout = |size| Layout::from_size_align(size, 64).unwrap();
    let block = pool.allocate(layout(3 << 20)).unwrap().cast::<u8>();
    // SAFETY: 1. the block was allocated here with that layout, and the new one is smaller.
    let block =
        unsafe { pool.allocator().shrink(block, layout(3 << 20), layout(1 << 20)) }.unwrap();
    (pool, buffer, block.cast())
}

fn record(name: &str, change: impl Fn(&mut PoolConfig)) {
    let path: PathBuf =
        std::env::temp_dir().join(format!("aquifer-recorded-{name}-{}.csv", std::process::id()));
    let recorder = Arc::new(Recorder::new(Arc::new(TraceFile::create(&path).unwrap())));
    let sim = Sim::h200(2);
    let mut config = PoolConfig::with_budget(Budget::new("both devices", 1 << 30));
    config.recorder = Some(recorder.clone());
    change(&mut config);
    let guarded = config.debug.is_on();
    let pools = [0, 1]
        .map(|device| DevicePool::open(sim.driver(), DeviceId(device), config.clone()).unwrap());
    let (pinned, buffer, block) = pinned(&recorder);
    let mut programs = pools.each_ref().map(|pool| Program::new(pool, &sim, config.bypass));
    let whole = 6 * 700_000;
    let check = |programs: &[Program; 2], parked: [u64; 2]| {
        programs
            .iter()
            .zip(parked)
            .for_each(|(program, parked)| program.check(&path, parked, guarded));
    };
    check(&programs, [whole; 2]);
    let cache = tags()[1];
    // SAFETY: 1. no work is queued for the blocks. 2. none of their addresses is used.
    unsafe { pools[0].park(cache, Park::save_in(Global)) }.unwrap();
    check(&programs, [0, whole]);
    // Freed while parked, which frees no memory.
    drop(programs[0].parked.remove(0));
    check(&programs, [0, whole]);
    pools[0].resume(cache, None).unwrap();
    check(&programs, [whole - 700_000, whole]);

    let trace = Trace::read(&path, None).unwrap_or_else(|e| panic!("{e}"));
    trace.check();
    let all = MemoryHistory::read_each(&path, None).unwrap();
    let on_host = all.iter().filter(|of| matches!(of.device, Some(TraceDevice::Host(_))));
    let on_host: Vec<_> = on_host.collect();
    let held = |tag: &str| {
        let is_tagged = |kind, tag_of: &str| kind == BlockKind::Pinned && tag_of == tag;
        on_host.iter().map(|history| held(history, is_tagged)).sum::<u64>()
    };
    assert_eq!(held("") + held("scratch"), pinned.stats().memory.requested);
    assert_eq!((held("scratch"), held("")), (8000, MIB));
    assert_eq!(trace.notes.len(), 2, "{:?}", trace.notes);

    // SAFETY: 1. the block was allocated here with that layout, and is not used again.
    unsafe { pinned.allocator().deallocate(block, Layout::from_size_align(1 << 20, 64).unwrap()) };
    drop((buffer, programs, pinned));
    for pool in &pools {
        pool.trim(0).unwrap();
    }
    drop((pools, recorder, config));
    for ordinal in [0, 1] {
        let trace = Trace::read(&path, Some(ordinal)).unwrap_or_else(|e| panic!("{e}"));
        assert_eq!(trace.live_at_end, 0);
    }
    std::fs::remove_file(path).unwrap();
    assert!(sim.violations().is_empty(), "{:?}", sim.violations());
}

#[test]
fn a_trace_holds_what_the_pools_hold_by_kind_device_and_tag() {
    record("plainly", |_| {});
}

#[test]
fn it_does_so_while_every_debug_mode_is_on() {
    record("guarded", |config| config.debug = Debugging::all());
}

#[test]
fn it_does_so_where_each_block_is_an_allocation_of_its_own() {
    record("bypass", |config| config.bypass = true);
}
