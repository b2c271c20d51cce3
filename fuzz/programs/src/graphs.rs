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
    program::{Bytes, Process, Program},
    rig::{IDLE, Rig, access, assert_apart, quietly, simulated},
};
use aquifer_core::{Budget, MemoryError, Result};
use aquifer_device::{Announced, Block, Captured, Graph, GraphPool, PoolConfig, Request};
use aquifer_driver::{
    Access, Call, CaptureMode, CaptureStatus, DeviceRange, Operand, RawGraphExec, RawStream,
    Relaxed,
};
use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

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
    Theirs { exec: RawGraphExec, captured: Captured },
}

pub(crate) struct World {
    rig: Rig,
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

impl Program for World {
    const PROCESS: Process = Process::Alone;

    fn open(bytes: &mut Bytes<'_>) -> Option<Self> {
        let sim = simulated(true).symbolic().capacity(CAPACITY);
        let sim = if bytes.flag() { sim.seeded(bytes.u64()) } else { sim };
        let budget = Budget::new("the fuzzed device", (u64::from(bytes.choice(30)) + 8) << 20);
        let mut config = PoolConfig::with_budget(budget);
        config.wait = Duration::from_micros(300);
        config.bypass = bytes.choice(8) == 1;
        let bypass = config.bypass;
        Some(Self {
            rig: Rig::open(sim, config, 4),
            pools: Vec::new(),
            live: Vec::new(),
            open: Vec::new(),
            made: Vec::new(),
            served: Vec::new(),
            saved: None,
            bypass,
        })
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
                let _ = self.rig.pool.trim(u64::from(bytes.u8()) << 18);
            }
            19 => self.rig.fail_one(bytes, FAULTS),
            20 => self.rig.go_on(bytes),
            21 => {
                self.rig.budget.set_limit((u64::from(bytes.choice(40)) + 8) << 20);
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

    fn check(&mut self) {
        for open in &self.open {
            let status = self.rig.streams[open.streams[0]].timeline().capture();
            assert_eq!(status, Ok(Some(open.id)), "somebody broke a capture");
        }
        let blocks = self.live.iter().map(|live| live.block.capacity()).sum();
        let stats = self.rig.check(Some(blocks), None);
        assert!(stats.graphs <= stats.physical, "{stats:?}");
        assert_apart(self.live.iter().map(|live| live.block.range()));
        for graphs in self.pools.iter().flatten() {
            let stats = graphs.stats();
            assert!(stats.live + stats.pending + stats.cached == stats.physical, "{stats:?}");
        }
    }

    fn finish(mut self) {
        self.rig.sim.clear_failures();
        self.saved = None;
        self.served.clear();
        while let Some(open) = self.open.pop() {
            self.end_one(open);
        }
        for made in std::mem::take(&mut self.made) {
            self.destroy(made);
        }
        drop((self.live, self.pools));
        self.rig.finish();
    }
}

impl World {
    /// Begins or ends to serve a stream's eager work from a graph pool. Such a stream does not
    /// capture: two announcements would cover it.
    fn serve(&mut self, bytes: &mut Bytes<'_>) {
        let stream = self.rig.pick_stream(bytes);
        if let Some(at) = self.served.iter().position(|(served, _)| *served == stream) {
            drop(self.served.swap_remove(at));
        } else if self.capture_of(stream).is_none()
            && let Some(graphs) = self.pick_pool(bytes).and_then(|at| self.pools[at].as_ref())
        {
            let raw = self.rig.streams[stream].raw();
            let announced = graphs.announce_all_where(move |other| other == raw).expect(IDLE);
            self.served.push((stream, announced));
        }
    }

    fn is_served(&self, stream: usize) -> bool {
        self.served.iter().any(|(served, _)| *served == stream)
    }

    /// Brings the saved pool back to the state that was saved, as far as its addresses are free.
    fn place(&mut self, bytes: &mut Bytes<'_>) {
        let stream = self.rig.pick_stream(bytes);
        let Some((pool, blocks)) = self.saved.take().filter(|_| self.capture_of(stream).is_none())
        else {
            return;
        };
        for (range, _) in blocks {
            let request = Request::bytes(range.bytes);
            match pool.alloc_at(&self.rig.streams[stream], request, range.address) {
                Err(MemoryError::Busy { address }) => assert_eq!(address, range.address),
                placed => {
                    if let Some(block) = went(placed) {
                        assert_eq!(block.address(), range.address);
                        access(&self.rig.sim, &self.rig.streams[stream], &block, Access::Write);
                        self.live.push(Live { block, stream, of: None });
                    }
                }
            }
        }
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
            let new = went(self.rig.pool.graph_pool());
            if bytes.choice(8) == 7 {
                new.iter().for_each(GraphPool::retain_free);
            }
            self.pools.extend(new.map(Some));
        }
    }

    fn begin(&mut self, bytes: &mut Bytes<'_>) {
        let stream = self.rig.pick_stream(bytes);
        let mode =
            bytes.pick([CaptureMode::Global, CaptureMode::ThreadLocal, CaptureMode::Relaxed]);
        let free = self.capture_of(stream).is_none() && !self.is_served(stream);
        let Some(pool) = self.pick_pool(bytes).filter(|_| free) else {
            return;
        };
        let Some(graphs) = &self.pools[pool] else { return };
        let s = &self.rig.streams[stream];
        let number = Arc::new(AtomicU64::new(0));
        let announced = if bytes.flag() {
            // By the driver's id of the capture, as other libraries do.
            let (driver, number) = (s.driver().clone(), number.clone());
            graphs.announce_all_where(move |other| {
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
        let (from, to) = (self.rig.pick_stream(bytes), self.rig.pick_stream(bytes));
        if self.capture_of(to).is_some() || self.is_served(to) {
            return;
        }
        let (s, u) = (&self.rig.streams[from], &self.rig.streams[to]);
        let joined = u.wait_for(s);
        if let Some(open) = self.open.iter_mut().find(|open| open.streams.contains(&from))
            && joined.is_ok()
        {
            open.streams.push(to);
        }
    }

    fn end(&mut self, bytes: &mut Bytes<'_>) {
        if let Some(open) = bytes.take(&mut self.open) {
            self.end_one(open);
        }
    }

    fn end_one(&mut self, open: Open) {
        let Open { announced, streams, .. } = open;
        let s = &self.rig.streams[streams[0]];
        let joined = streams[1..].iter().all(|&other| s.wait_for(&self.rig.streams[other]).is_ok());
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
        let exec = driver.graph_instantiate(graph).expect(IDLE);
        // SAFETY: 1. created just now.
        unsafe { driver.graph_destroy(graph) }.expect(IDLE);
        self.made.push(Made::Theirs { exec, captured });
    }

    fn alloc(&mut self, bytes: &mut Bytes<'_>) {
        let stream = self.rig.pick_stream(bytes);
        let size = u64::from(bytes.u16()) << bytes.choice(7) | 1;
        let of = self.capture_of(stream).map(|open| open.id);
        let failures = self.rig.pool.stats().physical;
        if let Some(block) =
            went(self.rig.pool.alloc(&self.rig.streams[stream], Request::bytes(size)))
        {
            access(&self.rig.sim, &self.rig.streams[stream], &block, Access::Write);
            self.live.push(Live { block, stream, of });
        } else {
            assert!(
                self.rig.pool.stats().physical <= failures.max(self.rig.budget.limit()),
                "a refusal took memory"
            );
        }
    }

    fn free(&mut self, bytes: &mut Bytes<'_>) {
        let Some(Live { block, .. }) = bytes.take(&mut self.live) else { return };
        let by_address = bytes.flag();
        let free = || {
            if by_address {
                let out = block.into_raw();
                self.rig.pool.free_raw(out).expect("an address that is out");
            } else {
                drop(block);
            }
        };
        if self.bypass { free() } else { quietly(&self.rig.sim, "a free", free) }
    }

    /// Writes a block on its own stream, if the stream is in the same capture as the block.
    fn touch(&mut self, bytes: &mut Bytes<'_>) {
        let Some(at) = bytes.index(self.live.len()) else { return };
        let Live { block, stream, of } = &self.live[at];
        if self.capture_of(*stream).map(|open| open.id) == *of
            && let Ok(used) = block.prepare(&self.rig.streams[*stream], Access::Write)
        {
            access(&self.rig.sim, &self.rig.streams[*stream], block, Access::Write);
            let _ = used.finish();
        }
    }

    /// Writes a block on another stream that can be ordered with it: both are outside captures, or
    /// both take part in the block's capture.
    fn lend(&mut self, bytes: &mut Bytes<'_>) {
        if self.live.is_empty() {
            return;
        }
        let other = self.rig.pick_stream(bytes);
        let Live { block, stream, of } = &self.live[usize::from(bytes.u8()) % self.live.len()];
        let theirs = self.capture_of(other).map(|open| open.id);
        let home = self.capture_of(*stream).map(|open| open.id);
        let within = *of;
        // A capture that has ended does not matter to eager work.
        let over = within.is_none_or(|id| self.open.iter().all(|open| open.id != id));
        if theirs != home || !(theirs == within || (theirs.is_none() && over)) {
            return;
        }
        if let Ok(used) = block.prepare(&self.rig.streams[other], Access::Write) {
            access(&self.rig.sim, &self.rig.streams[other], block, Access::Write);
            let _ = used.finish();
        }
    }

    /// Captures a graph with the library in one call.
    fn capture(&mut self, bytes: &mut Bytes<'_>) {
        let stream = self.rig.pick_stream(bytes);
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
            graphs.capture(&self.rig.streams[stream], |s| {
                let mut blocks = Vec::new();
                for &size in &sizes {
                    let block = self.rig.pool.alloc(s, Request::bytes(size))?;
                    access(&self.rig.sim, &self.rig.streams[stream], &block, Access::Write);
                    blocks.push(block);
                    self.rig.peaks.note(before + blocks.iter().map(Block::capacity).sum::<u64>());
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
        let stream = self.rig.pick_stream(bytes);
        if self.made.is_empty() || self.capture_of(stream).is_some() {
            return;
        }
        let s = &self.rig.streams[stream];
        match &self.made[usize::from(bytes.u8()) % self.made.len()] {
            Made::Ours(graph) => drop(went(graph.launch(s))),
            Made::Theirs { exec, captured } => {
                // Other libraries order their launches themselves. A capturing stream cannot be
                // waited for.
                let ordered =
                    self.open.is_empty() && self.rig.streams.iter().all(|u| s.wait_for(u).is_ok());
                if !ordered {
                    return;
                }
                // SAFETY: 1. the memory is kept alive. 2. the stream waits for all work queued on
                // any other.
                unsafe { self.rig.sim.driver().graph_launch(*exec, s.raw()) }.expect(IDLE);
                captured.launched(s).expect(IDLE);
            }
        }
    }

    fn drop_graph(&mut self, bytes: &mut Bytes<'_>) {
        if let Some(made) = bytes.take(&mut self.made) {
            self.destroy(made);
        }
    }

    fn destroy(&self, made: Made) {
        if let Made::Theirs { exec, captured } = made {
            // In relaxed mode, as a library that must not invalidate the captures of others.
            let driver = self.rig.sim.driver();
            let _relaxed = Relaxed::enter(&*driver);
            // SAFETY: 1. it is not launched any more.
            unsafe { driver.graph_exec_destroy(exec) }.expect(IDLE);
            drop(captured);
        }
    }
}
