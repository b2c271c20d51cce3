//! Programs over graphs: announced captures, forks and joins, ended and invalidated captures,
//! launches on any stream, the library's own graphs and foreign ones, and shared graph pools,
//! announcements that also serve eager work, and pools that are brought back to an earlier state,
//! together with ordinary blocks under one budget and failing driver calls.
//!
//! - The oracle must report nothing. A launch writes the graph's memory, regardless of its current
//!   owner, and branches of a graph run concurrently.
//! - After every operation the held bytes equal the charged bytes, and no ordinary block overlaps a
//!   graph's memory.
#![expect(clippy::expect_used, clippy::panic, reason = "a broken promise is told by a panic")]
#![expect(unsafe_code, reason = "captures by hand, as other libraries do")]

use crate::{
    peaks::TruePeaks,
    program::{Bytes, MAX_OPS, alone},
};
use aquifer_core::{Budget, MemoryError, Result};
use aquifer_device::{
    Announced, Block, Captured, DevicePool, Graph, GraphPool, PoolConfig, Request,
};
use aquifer_driver::{
    Access, Call, CaptureMode, CaptureStatus, DeviceId, DeviceRange, Operand, RawGraphExec,
    RawStream, Relaxed,
    sim::{DeviceConfig, Sim, SimConfig},
};
use aquifer_stream::Stream;
use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

/// Accesses are declared for memory that the program holds, on streams of an idle device.
const OURS: &str = "an access to memory of ours";
/// Calls on an idle device for which no fault is planned.
const IDLE: &str = "no fault is waiting for this call";
/// The device's memory.
const CAPACITY: u64 = 64 << 20;
/// Calls that may fail during a program.
const FAULTS: [Call; 9] = [
    Call::AddressReserve,
    Call::HandleCreate,
    Call::Map,
    Call::SetAccess,
    Call::MemAlloc,
    Call::EventCreate,
    Call::EventRecord,
    Call::EventQuery,
    Call::StreamWaitEvent,
];

/// A live block. `of` is the capture that it was allocated in.
struct Live {
    block: Block,
    stream: usize,
    of: Option<u64>,
}

/// An open capture.
struct Open {
    /// The driver's id.
    id: u64,
    announced: Announced,
    /// The stream that began it, and those that have joined.
    streams: Vec<usize>,
}

/// A graph that can be launched.
enum Made {
    Ours(Graph),
    Theirs { exec: RawGraphExec, captured: Option<Captured> },
}

struct World {
    sim: Sim,
    budget: Budget,
    pool: DevicePool,
    streams: Vec<Stream>,
    /// Graph pools by number. `None` if the handle was dropped.
    pools: Vec<Option<GraphPool>>,
    live: Vec<Live>,
    open: Vec<Open>,
    made: Vec<Made>,
    /// Streams whose eager work a graph pool serves.
    served: Vec<(usize, Announced)>,
    /// A pool, and what was live in it.
    saved: Option<(GraphPool, Vec<(DeviceRange, RawStream)>)>,
    /// Whether each ordinary block is a driver allocation.
    bypass: bool,
    peaks: TruePeaks,
}

/// Runs the program that `bytes` encodes.
///
/// # Panics
/// If an invariant is violated.
pub fn run(bytes: &[u8]) {
    let _alone = alone();
    let mut bytes = Bytes::new(bytes);
    let mut world = World::new(&mut bytes);
    bytes.steps(MAX_OPS, |bytes| {
        world.step(bytes);
        world.check();
    });
    world.finish();
}

/// Returns the value of an operation, or `None` if it failed with a permitted error.
fn went<T>(answer: Result<T>) -> Option<T> {
    match answer {
        Ok(value) => Some(value),
        Err(
            MemoryError::Driver(_)
            | MemoryError::OutOfMemory(_)
            | MemoryError::OutOfBudget(_)
            | MemoryError::Capturing { .. },
        ) => None,
        Err(other) => panic!("{other:?}"),
    }
}

impl World {
    fn new(bytes: &mut Bytes<'_>) -> Self {
        let mapping = bytes.choice(4) != 0;
        let mut config = SimConfig::h200(1);
        config.devices = vec![if mapping {
            DeviceConfig::h200()
        } else {
            DeviceConfig::without_virtual_memory()
        }];
        let sim = Sim::new(config).symbolic().capacity(CAPACITY);
        let sim = if bytes.flag() { sim.seeded(bytes.u64()) } else { sim };
        let budget = Budget::new("the fuzzed device", (u64::from(bytes.choice(30)) + 8) << 20);
        let mut config = PoolConfig::with_budget(budget.clone());
        config.wait = Duration::from_micros(300);
        config.bypass = bytes.choice(8) == 1;
        let bypass = config.bypass;
        let pool = DevicePool::open(sim.driver(), DeviceId(0), config)
            .expect("a pool opens on an idle device");
        let streams = (0..4).map(|_| pool.stream().expect("a stream of an idle device")).collect();
        let (pools, live, open, made) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        let (served, saved) = (Vec::new(), None);
        Self {
            sim,
            budget,
            pool,
            streams,
            pools,
            live,
            open,
            made,
            served,
            saved,
            bypass,
            peaks: TruePeaks::default(),
        }
    }

    fn step(&mut self, bytes: &mut Bytes<'_>) {
        match bytes.choice(25) {
            0 => self.make_pool(bytes),
            1 => self.begin(bytes),
            2 => self.join(bytes),
            3 => self.end(bytes),
            4..=7 => self.alloc(bytes),
            8..=10 => self.free(bytes),
            11 | 12 => self.touch(bytes),
            13 => self.lend(bytes),
            14 => self.capture(bytes),
            15 | 16 => self.launch(bytes),
            17 => self.drop_graph(bytes),
            18 => {
                // A planned fault may hit it.
                let _ = self.pool.trim(u64::from(bytes.u8()) << 18);
            }
            19 => {
                let call = FAULTS[usize::from(bytes.choice(FAULTS.len() as u8))];
                let code = if bytes.flag() { 2 } else { 999 };
                self.sim.fail(call, u64::from(bytes.choice(5)) + 1, code);
            }
            20 => {
                let stream = self.pick(bytes);
                if bytes.flag() {
                    self.sim.step(self.streams[stream].raw());
                } else {
                    let _ = self.streams[stream].synchronize();
                }
            }
            21 => {
                self.budget.set_limit((u64::from(bytes.choice(40)) + 8) << 20);
            }
            22 => self.serve(bytes),
            23 => {
                self.saved = self.pick_pool(bytes).and_then(|at| {
                    let pool = self.pools[at].clone()?;
                    let live = pool.live_blocks();
                    Some((pool, live))
                });
            }
            _ => self.place(bytes),
        }
    }

    /// Begins or ends to serve a stream's eager work from a graph pool. Such a stream does not
    /// capture: two announcements would cover it.
    fn serve(&mut self, bytes: &mut Bytes<'_>) {
        let stream = self.pick(bytes);
        if let Some(at) = self.served.iter().position(|(served, _)| *served == stream) {
            drop(self.served.swap_remove(at));
        } else if self.capture_of(stream).is_none()
            && let Some(graphs) = self.pick_pool(bytes).and_then(|at| self.pools[at].as_ref())
        {
            let raw = self.streams[stream].raw();
            let announced = graphs.announce_all_where(move |other| other == raw).expect(IDLE);
            self.served.push((stream, announced));
        }
    }

    fn is_served(&self, stream: usize) -> bool {
        self.served.iter().any(|(served, _)| *served == stream)
    }

    /// Brings the saved pool back to the state that was saved, as far as its addresses are free.
    fn place(&mut self, bytes: &mut Bytes<'_>) {
        let stream = self.pick(bytes);
        let Some((pool, blocks)) = self.saved.take().filter(|_| self.capture_of(stream).is_none())
        else {
            return;
        };
        for (range, _) in blocks {
            let request = Request::bytes(range.bytes);
            match pool.alloc_at(&self.streams[stream], request, range.address) {
                Err(MemoryError::Busy { address }) => assert_eq!(address, range.address),
                placed => {
                    if let Some(block) = went(placed) {
                        assert_eq!(block.address(), range.address);
                        self.write(&block, stream);
                        self.live.push(Live { block, stream, of: None });
                    }
                }
            }
        }
    }

    fn pick(&self, bytes: &mut Bytes<'_>) -> usize {
        usize::from(bytes.choice(self.streams.len() as u8))
    }

    /// Returns the capture that a stream takes part in.
    fn capture_of(&self, stream: usize) -> Option<&Open> {
        self.open.iter().find(|open| open.streams.contains(&stream))
    }

    /// Returns a graph pool that has a handle.
    fn pick_pool(&self, bytes: &mut Bytes<'_>) -> Option<usize> {
        let at = usize::from(bytes.choice(4));
        self.pools.get(at).is_some_and(Option::is_some).then_some(at)
    }

    fn make_pool(&mut self, bytes: &mut Bytes<'_>) {
        if let Some(at) = self.pick_pool(bytes) {
            // Graphs that use the pool keep it alive.
            self.pools[at] = None;
        } else if self.pools.len() < 4 {
            let new = went(self.pool.graph_pool());
            if bytes.choice(8) == 7 {
                new.iter().for_each(GraphPool::retain_free);
            }
            self.pools.extend(new.map(Some));
        }
    }

    fn begin(&mut self, bytes: &mut Bytes<'_>) {
        let (stream, mode) = (self.pick(bytes), bytes.choice(3));
        let mode = [CaptureMode::Global, CaptureMode::ThreadLocal, CaptureMode::Relaxed]
            [usize::from(mode)];
        let free = self.capture_of(stream).is_none() && !self.is_served(stream);
        let Some(pool) = self.pick_pool(bytes).filter(|_| free) else {
            return;
        };
        let Some(graphs) = &self.pools[pool] else { return };
        let s = &self.streams[stream];
        let number = Arc::new(AtomicU64::new(0));
        let announced = if bytes.flag() {
            // By the driver's id of the capture, as other libraries do.
            let (driver, number) = (s.driver().clone(), number.clone());
            graphs.announce_where(move |other| {
                let id = number.load(Ordering::Relaxed);
                driver.capture_status(other) == Ok(CaptureStatus::Active { id })
            })
        } else {
            graphs.announce(s)
        };
        let announced = announced.expect("it is announced once");
        s.driver().capture_begin(s.raw(), mode).expect(IDLE);
        let id = s.timeline().capture().expect(IDLE).expect("it has just begun");
        number.store(id, Ordering::Relaxed);
        self.open.push(Open { id, announced, streams: vec![stream] });
    }

    fn join(&mut self, bytes: &mut Bytes<'_>) {
        let (from, to) = (self.pick(bytes), self.pick(bytes));
        if self.capture_of(to).is_some() || self.is_served(to) {
            return;
        }
        let (s, u) = (&self.streams[from], &self.streams[to]);
        let joined = u.wait_for(s);
        if let Some(open) = self.open.iter_mut().find(|open| open.streams.contains(&from))
            && joined.is_ok()
        {
            open.streams.push(to);
        }
    }

    fn end(&mut self, bytes: &mut Bytes<'_>) {
        if self.open.is_empty() {
            return;
        }
        let at = usize::from(bytes.u8()) % self.open.len();
        let open = self.open.swap_remove(at);
        self.end_one(open, bytes.choice(4));
    }

    fn end_one(&mut self, open: Open, how: u8) {
        let Open { announced, streams, .. } = open;
        let s = &self.streams[streams[0]];
        let joined = streams[1..].iter().all(|&other| s.wait_for(&self.streams[other]).is_ok());
        let driver = s.driver().clone();
        let graph = match driver.capture_end(s.raw()) {
            Ok(graph) => graph,
            Err(refused) => {
                assert!(!joined, "the pool broke a capture: {refused}");
                return;
            }
        };
        let _relaxed = Relaxed::enter(&*driver);
        let captured = announced.end();
        let captured = if how == 3 {
            captured.keep_until_released(graph).expect(IDLE);
            None
        } else {
            Some(captured)
        };
        let exec = driver.graph_instantiate(graph).expect(IDLE);
        // SAFETY: 1. created just now.
        unsafe { driver.graph_destroy(graph) }.expect(IDLE);
        self.made.push(Made::Theirs { exec, captured });
    }

    fn alloc(&mut self, bytes: &mut Bytes<'_>) {
        let stream = self.pick(bytes);
        let size = u64::from(bytes.u16()) << bytes.choice(7) | 1;
        let of = self.capture_of(stream).map(|open| open.id);
        let failures = self.pool.stats().physical;
        if let Some(block) = went(self.pool.alloc(&self.streams[stream], Request::bytes(size))) {
            self.write(&block, stream);
            self.live.push(Live { block, stream, of });
        } else {
            assert!(
                self.pool.stats().physical <= failures.max(self.budget.limit()),
                "a refusal took memory"
            );
        }
    }

    /// Declares a write on the block's stream.
    fn write(&self, block: &Block, stream: usize) {
        let generation = Some(block.generation());
        self.sim
            .access(self.streams[stream].raw(), block.range(), Access::Write, generation)
            .expect(OURS);
    }

    fn free(&mut self, bytes: &mut Bytes<'_>) {
        if self.live.is_empty() {
            return;
        }
        let at = usize::from(bytes.u8()) % self.live.len();
        let Live { block, .. } = self.live.swap_remove(at);
        let by_address = bytes.flag();
        let before = self.sim.driver().calls().made();
        if by_address {
            let out = block.into_raw();
            self.pool.free_raw(out).expect("an address that is out");
        } else {
            drop(block);
        }
        if !self.bypass {
            assert_eq!(before, self.sim.driver().calls().made(), "a free called the driver");
        }
    }

    /// Writes a block on its own stream, if the stream is in the same capture as the block.
    fn touch(&mut self, bytes: &mut Bytes<'_>) {
        if self.live.is_empty() {
            return;
        }
        let Live { block, stream, of } = &self.live[usize::from(bytes.u8()) % self.live.len()];
        if self.capture_of(*stream).map(|open| open.id) == *of
            && let Ok(used) = block.prepare(&self.streams[*stream], Access::Write)
        {
            self.write(block, *stream);
            let _ = used.finish();
        }
    }

    /// Writes a block on another stream that can be ordered with it: both are outside captures, or
    /// both take part in the block's capture.
    fn lend(&mut self, bytes: &mut Bytes<'_>) {
        if self.live.is_empty() {
            return;
        }
        let other = self.pick(bytes);
        let Live { block, stream, of } = &self.live[usize::from(bytes.u8()) % self.live.len()];
        let theirs = self.capture_of(other).map(|open| open.id);
        let home = self.capture_of(*stream).map(|open| open.id);
        let within = *of;
        // A capture that has ended does not matter to eager work.
        let over = within.is_none_or(|id| self.open.iter().all(|open| open.id != id));
        if theirs != home || !(theirs == within || (theirs.is_none() && over)) {
            return;
        }
        if let Ok(used) = block.prepare(&self.streams[other], Access::Write) {
            self.write(block, other);
            let _ = used.finish();
        }
    }

    /// Captures a graph with the library in one call.
    fn capture(&mut self, bytes: &mut Bytes<'_>) {
        let stream = self.pick(bytes);
        let free = self.capture_of(stream).is_none() && !self.is_served(stream);
        let Some(at) = self.pick_pool(bytes).filter(|_| free) else {
            return;
        };
        let Some(graphs) = &self.pools[at] else { return };
        let sizes: Vec<u64> = (0..1 + bytes.choice(5))
            .map(|_| u64::from(bytes.u16()) << bytes.choice(7) | 1)
            .collect();
        let kept = usize::from(bytes.choice(3));
        let before: u64 = self.live.iter().map(|live| live.block.capacity()).sum();
        // SAFETY: 1. and 2. the work touches blocks of the graph pool only.
        let made = unsafe {
            graphs.capture(&self.streams[stream], |s| {
                let mut blocks = Vec::new();
                for &size in &sizes {
                    let block = self.pool.alloc(s, Request::bytes(size))?;
                    self.write(&block, stream);
                    blocks.push(block);
                    self.peaks.note(before + blocks.iter().map(Block::capacity).sum::<u64>());
                    if blocks.len() > kept {
                        blocks.remove(0);
                    }
                }
                Ok((s.timeline().capture()?, blocks))
            })
        };
        if let Some((graph, (id, blocks))) = went(made) {
            let id = id.expect("it captured");
            let blocks = blocks.into_iter().map(|block| Live { block, stream, of: Some(id) });
            self.live.extend(blocks);
            self.made.push(Made::Ours(graph));
        }
    }

    fn launch(&mut self, bytes: &mut Bytes<'_>) {
        let stream = self.pick(bytes);
        if self.made.is_empty() || self.capture_of(stream).is_some() {
            return;
        }
        let s = &self.streams[stream];
        match &self.made[usize::from(bytes.u8()) % self.made.len()] {
            Made::Ours(graph) => drop(went(graph.launch(s))),
            Made::Theirs { exec, captured } => {
                // Other libraries order their launches themselves. A capturing stream cannot be
                // waited for.
                let ordered =
                    self.open.is_empty() && self.streams.iter().all(|u| s.wait_for(u).is_ok());
                if !ordered {
                    return;
                }
                // SAFETY: 1. the memory is kept alive. 2. the stream waits for all work queued on
                // any other.
                unsafe { self.sim.driver().graph_launch(*exec, s.raw()) }.expect(IDLE);
                match captured {
                    Some(captured) => captured.launched(s).expect(IDLE),
                    // The pool is not informed, so later work is ordered here.
                    None => {
                        let after = self.streams.iter().all(|u| u.wait_for(s).is_ok());
                        if !after {
                            self.sim.clear_failures();
                            s.synchronize().expect(IDLE);
                        }
                    }
                }
            }
        }
    }

    fn drop_graph(&mut self, bytes: &mut Bytes<'_>) {
        if !self.made.is_empty() {
            let at = usize::from(bytes.u8()) % self.made.len();
            let made = self.made.swap_remove(at);
            self.destroy(made);
        }
    }

    fn destroy(&self, made: Made) {
        if let Made::Theirs { exec, captured } = made {
            // In relaxed mode, as a library that must not invalidate the captures of others.
            let driver = self.sim.driver();
            let _relaxed = Relaxed::enter(&*driver);
            // SAFETY: 1. it is not launched any more.
            unsafe { driver.graph_exec_destroy(exec) }.expect(IDLE);
            drop(captured);
        }
    }

    fn check(&self) {
        let violations = self.sim.violations();
        assert!(violations.is_empty(), "{}", violations[0]);
        for open in &self.open {
            let status = self.streams[open.streams[0]].timeline().capture();
            assert_eq!(status, Ok(Some(open.id)), "somebody broke a capture");
        }
        let stats = self.pool.stats();
        assert_eq!(stats.physical, self.budget.used(), "what is charged is what is held");
        let blocks: u64 = self.live.iter().map(|live| live.block.capacity()).sum();
        assert_eq!(stats.live, blocks, "live bytes");
        self.peaks.check(&self.pool, &stats, self.streams.len(), (Some(blocks), None));
        assert!(stats.graphs <= stats.physical, "{stats:?}");
        let mut ranges: Vec<DeviceRange> =
            self.live.iter().map(|live| live.block.range()).collect();
        ranges.sort_unstable_by_key(|range| range.address);
        assert!(
            ranges.windows(2).all(|two| two[0].address + two[0].bytes <= two[1].address),
            "overlap"
        );
        for graphs in self.pools.iter().flatten() {
            let stats = graphs.stats();
            assert!(stats.live + stats.pending + stats.cached == stats.physical, "{stats:?}");
        }
    }

    fn finish(mut self) {
        self.sim.clear_failures();
        self.saved = None;
        self.served.clear();
        while let Some(open) = self.open.pop() {
            self.end_one(open, 0);
        }
        for made in std::mem::take(&mut self.made) {
            self.destroy(made);
        }
        let Self { sim, budget, pool, streams, pools, live, .. } = self;
        drop((live, pools));
        for stream in &streams {
            stream.synchronize().expect(IDLE);
        }
        pool.trim(0).expect(IDLE);
        let stats = pool.stats();
        assert_eq!(
            (stats.live, stats.pending, stats.graphs, stats.physical),
            (0, 0, 0, 0),
            "{stats:?}"
        );
        assert_eq!(budget.used(), 0, "a charge was lost");
        drop(pool);
        drop(streams);
        let violations = sim.violations();
        assert!(violations.is_empty(), "{}", violations[0]);
        assert!(sim.outstanding().is_empty(), "{}", sim.outstanding());
    }
}
