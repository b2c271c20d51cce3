//! Programs over device memory through the host-memory wrappers, over rings of frames, and over
//! runs of pages.
//!
//! Up to four wrappers are stacked over a pool on a simulated device that runs work at arbitrary
//! times. Blocks, parts of frames and pages are filled, copied and read on several streams and
//! freed at any time. Invariants:
//!
//! - after every operation the oracle reports nothing, and no budget is exceeded;
//! - contents are what was last written;
//! - a reset is refused only because of an open use;
//! - at the end every wrapper's account is zero, and all device memory is freed.
#![expect(clippy::expect_used, clippy::panic, reason = "a broken promise is told by a panic")]

use crate::{
    program::{Bytes, Process, Program},
    rig::{IDLE, assert_empty, assert_returned, assert_silent},
};
use aquifer_adapters::{CountingAllocator, Fallback, Frames, Limit, Segregate, Tagged};
use aquifer_core::{Budget, MemoryError, Opaque, Result, Tag};
use aquifer_device::{
    DeviceArena, DeviceBuffer, DevicePages, DevicePool, PageRun, PoolConfig, Resource,
};
use aquifer_driver::{Access, DeviceId, sim::Sim};
use aquifer_stream::{Stream, Use};
use std::{sync::Arc, time::Duration};

/// The pool's limit.
const CAPACITY: u64 = 16 << 20;
/// Bytes of a frame.
const FRAME: u64 = 64 << 10;
/// Pages of an arena, and bytes per page.
const PAGES: (usize, u64) = (12, 1024);
const STREAMS: u8 = 3;

struct Buffer {
    memory: DeviceBuffer<u8>,
    content: Option<u8>,
}

pub(crate) struct World {
    sim: Sim,
    pool: DevicePool,
    streams: Vec<Stream>,
    /// The outermost wrapper.
    top: CountingAllocator<Arc<dyn Resource>>,
    budgets: Vec<Budget>,
    counted: Vec<CountingAllocator<Arc<dyn Resource>>>,
    /// The tag of the innermost wrapper.
    tag: Option<Tag>,
    buffers: Vec<Buffer>,
    frames: Option<Frames<DeviceArena>>,
    /// Frames used so far.
    turns: usize,
    pages: Option<DevicePages>,
    /// Live page runs and their contents.
    runs: Vec<(PageRun, Option<u8>)>,
    /// Uses that are still open, each with the index of its frame.
    open: Vec<(usize, Use)>,
}

/// Returns the value, or `None` if there was no memory. Panics on any other error.
fn went<T>(answer: Result<T>) -> Option<T> {
    match answer {
        Ok(value) => Some(value),
        Err(MemoryError::OutOfMemory(_) | MemoryError::OutOfBudget(_)) => None,
        Err(other) => panic!("{other:?}"),
    }
}

impl Program for World {
    const PROCESS: Process = Process::Shared;

    fn open(bytes: &mut Bytes<'_>) -> Option<Self> {
        let sim = Sim::h200(1).seeded(u64::from(bytes.u16()));
        let mut config = PoolConfig::with_budget(Budget::new("fuzz", CAPACITY));
        config.wait = Duration::ZERO;
        let pool = DevicePool::open(sim.driver(), DeviceId(0), config).expect(IDLE);
        let streams = (0..STREAMS).map(|_| pool.stream().expect(IDLE)).collect();
        let (mut budgets, mut counted, mut tag) = (Vec::new(), Vec::new(), None);
        let mut limit = |bytes: u64| {
            budgets.push(Budget::new("a layer", bytes));
            budgets[budgets.len() - 1].clone()
        };
        let mut below: Arc<dyn Resource> = Arc::new(pool.clone());
        for _ in 0..bytes.choice(5) {
            let setting = bytes.choice(8);
            below = match bytes.choice(5) {
                0 => Arc::new(Limit::new(below, limit(FRAME << setting))),
                1 => {
                    let layer = CountingAllocator::new(below);
                    counted.push(layer.clone());
                    Arc::new(layer)
                }
                2 => {
                    let own = Tag::named(["a", "b", "c", "d"][usize::from(setting % 4)]);
                    tag.get_or_insert(own);
                    Arc::new(Tagged::new(below, own))
                }
                3 => Arc::new(Fallback::new(
                    Limit::new(below.clone(), limit(1000 << setting)),
                    below,
                )),
                _ => {
                    let small = CountingAllocator::new(below.clone());
                    counted.push(small.clone());
                    Arc::new(Segregate::new(100 << setting, small, below))
                }
            };
        }
        let top = CountingAllocator::new(below);
        Some(Self {
            sim,
            pool,
            streams,
            top,
            budgets,
            counted,
            tag,
            buffers: Vec::new(),
            frames: None,
            turns: 0,
            pages: None,
            runs: Vec::new(),
            open: Vec::new(),
        })
    }

    fn step(&mut self, bytes: &mut Bytes<'_>) {
        let (op, stream) = (bytes.choice(12), self.stream(bytes));
        let buffer = usize::from(bytes.u8()).checked_rem(self.buffers.len());
        match (op, buffer) {
            (0 | 1, _) => {
                let size = 1 + usize::from(bytes.small());
                if let Some(memory) = went(DeviceBuffer::new_in(&self.top, &stream, size)) {
                    assert_eq!(memory.block().tag(), self.tag.unwrap_or_else(Tag::current));
                    self.buffers.push(Buffer { memory, content: None });
                }
            }
            (2 | 3, Some(at)) => {
                let (buffer, value) = (&mut self.buffers[at], bytes.u8());
                stream.fill(&mut buffer.memory, value).expect("a fill");
                buffer.content = Some(value);
            }
            (4, Some(at)) => drop(self.buffers.swap_remove(at)),
            (5, Some(at)) => self.look(at, &stream),
            (6 | 7, _) => self.turn(bytes, &stream),
            (8, _) => {
                if let Some((_, used)) = self.open.pop() {
                    used.finish().expect("the end of a use");
                }
            }
            (9, _) => stream.synchronize().expect("a wait"),
            (10, _) => drop(self.top.trim(u64::from(bytes.u8()) << 16).expect("a trim")),
            _ if bytes.choice(4) == 0 => self.leave_frames(),
            _ => self.turn_pages(bytes, &stream),
        }
    }

    fn check(&mut self) {
        assert_silent(&self.sim);
        for budget in &self.budgets {
            assert!(budget.used() <= budget.limit());
        }
        let frames =
            self.frames.as_ref().map_or(0, Frames::count) + usize::from(self.pages.is_some());
        // Blocks that wait for their uses count until they are free.
        assert!(self.top.stats().blocks >= (self.buffers.len() + frames) as u64);
    }

    fn finish(mut self) {
        (0..self.buffers.len()).for_each(|at| self.look(at, &self.streams[0]));
        self.leave_frames();
        self.pages = None;
        self.buffers.clear();
        self.streams.iter().for_each(|stream| stream.synchronize().expect(IDLE));
        assert_empty(&self.pool);
        self.check();
        for layer in self.counted.iter().chain([&self.top]) {
            let stats = layer.stats();
            assert_eq!((stats.live, stats.blocks, stats.allocations - stats.frees), (0, 0, 0));
        }
        assert!(self.budgets.iter().all(|budget| budget.used() == 0));
        let Self { sim, pool, streams, top, counted, .. } = self;
        drop((top, counted, pool, streams));
        assert_returned(&sim);
    }
}

impl World {
    fn stream(&self, bytes: &mut Bytes<'_>) -> Stream {
        self.streams[usize::from(bytes.choice(STREAMS))].clone()
    }

    /// Allocates, fills, copies or frees runs of pages, or drops the arena.
    fn turn_pages(&mut self, bytes: &mut Bytes<'_>, stream: &Stream) {
        let arena = match &self.pages {
            Some(arena) => arena,
            None => match went(DevicePages::new(&self.top, stream, PAGES.0, PAGES.1)) {
                Some(arena) => self.pages.insert(arena),
                None => return,
            },
        };
        let run = usize::from(bytes.u8()).checked_rem(self.runs.len());
        match (bytes.choice(8), run) {
            (0..=2, _) => match arena.take(u64::from(bytes.small()) % (4 * PAGES.1)) {
                Ok(taken) => self.runs.push((taken, None)),
                Err(MemoryError::TooLarge { requested, limit }) => {
                    assert!(limit < requested.max(1));
                }
                Err(other) => panic!("{other:?}"),
            },
            (3 | 4, Some(at)) => {
                let (run, content) = &mut self.runs[at];
                let (value, all) = (bytes.u8(), 0..run.bytes());
                stream
                    .fill(&mut arena.view_mut(run, all).expect("all of it"), value)
                    .expect("a fill");
                *content = Some(value);
            }
            (5, Some(at)) => {
                let (run, content) = &self.runs[at];
                let Some(value) = content else { return };
                let mut back = vec![!value; run.bytes() as usize];
                let view = arena.view(run, 0..run.bytes()).expect("all of it");
                stream.scope(|c| c.download(view, &mut back)).expect("a scope").expect("a copy");
                assert!(back.iter().all(|byte| byte == value));
                let end = run.bytes() + 1 + u64::from(bytes.u8());
                assert!(arena.view(run, u64::from(bytes.u8())..end).is_err());
            }
            (6, Some(at)) => {
                let (run, _) = self.runs.swap_remove(at);
                assert!(arena.free(run).is_ok());
            }
            (7, _) if bytes.choice(4) == 0 => {
                self.runs.clear();
                self.pages = None;
            }
            _ => {}
        }
        self.check_runs();
    }

    /// Checks that runs do not overlap and that the rest is free.
    fn check_runs(&self) {
        let Some(arena) = &self.pages else { return };
        let mut taken = [false; PAGES.0];
        for (run, _) in &self.runs {
            for page in run.offset() / PAGES.1..(run.offset() + run.bytes()) / PAGES.1 {
                assert!(
                    !std::mem::replace(&mut taken[page as usize], true),
                    "{run:?} overlaps another"
                );
            }
        }
        assert_eq!(arena.free_pages(), taken.iter().filter(|&&taken| !taken).count());
    }

    /// Checks that a buffer has the contents that were last written.
    fn look(&self, at: usize, stream: &Stream) {
        let Buffer { memory, content: Some(value) } = &self.buffers[at] else { return };
        let mut back = vec![!value; memory.len()];
        stream.scope(|c| c.download(memory, &mut back)).expect("a scope").expect("a copy");
        assert!(back.iter().all(|byte| byte == value));
    }

    /// Uses the next frame: fills parts of it on one stream and copies them to a buffer on another.
    fn turn(&mut self, bytes: &mut Bytes<'_>, stream: &Stream) {
        let frames = match &mut self.frames {
            Some(frames) => frames,
            None => {
                let arena = || went(DeviceArena::new(&self.top, stream, FRAME));
                let Some(first) = arena() else { return };
                let others: Vec<_> = (0..bytes.choice(3)).map_while(|_| arena()).collect();
                self.turns = 0;
                self.frames.insert(Frames::of(first, others))
            }
        };
        let place = self.turns % frames.count();
        let is_open = self.open.iter().any(|(of, _)| *of == place);
        let frame = match frames.next() {
            Ok(frame) => frame,
            Err(MemoryError::Busy { .. }) if is_open => return,
            Err(other) => panic!("{other:?}"),
        };
        assert!(!is_open, "a step began while a use of the one in its frame was open");
        self.turns += 1;
        let arena = frame.arena();
        assert_eq!((arena.used(), arena.bytes()), (0, FRAME));
        let (mut end, value) = (arena.block().address(), bytes.u8());
        for part in 0..bytes.choice(4) {
            let len = 1 + usize::from(bytes.small());
            match arena.alloc::<u8>(len) {
                Ok(mut memory) => {
                    let range = aquifer_driver::Operand::range(&memory);
                    assert!(
                        range.address >= end
                            && range.address.is_multiple_of(aquifer_device::BLOCK_ALIGN)
                    );
                    end = range.address + range.bytes;
                    assert!(end <= arena.block().address() + FRAME);
                    stream.fill(&mut memory, value ^ part).expect("a fill");
                    if let Some(at) = usize::from(bytes.u8()).checked_rem(self.buffers.len())
                        && self.buffers[at].memory.len() == len
                    {
                        let other = &self.streams[usize::from(bytes.choice(STREAMS))];
                        other.copy(&memory, &mut self.buffers[at].memory).expect("a copy");
                        self.buffers[at].content = Some(value ^ part);
                    }
                }
                Err(MemoryError::TooLarge { requested, limit }) => {
                    assert!(requested == len as u64 && limit < requested);
                }
                Err(other) => panic!("{other:?}"),
            }
        }
        if bytes.choice(8) == 0 {
            let used = arena.block().prepare(stream, Access::Read).expect("a use");
            self.open.push((place, used));
        }
    }

    /// Drops the ring, even with open uses.
    fn leave_frames(&mut self) {
        self.frames = None;
        for (_, used) in self.open.drain(..) {
            used.finish().expect("the end of a use");
        }
    }
}
