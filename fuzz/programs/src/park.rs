//! Programs over parkable memory: blocks of two tags, and a graph of one of them, are suspended and
//! resumed, one by one, both as one, or not in the end, together with ordinary blocks under one
//! budget.
//!
//! Invariants after every operation: the pool's account agrees with a model, held bytes with
//! charged bytes and with the device's free memory, and contents with what was last written. The
//! oracle reports nothing: no mapping removed under queued work, no unordered work, no use of
//! parked memory.
#![expect(clippy::expect_used, clippy::panic, reason = "a broken promise is told by a panic")]
#![expect(unsafe_code, reason = "parks memory that nobody is about to use")]

use crate::{
    program::{Bytes, Process, Program, not_beside_alone, steps},
    rig::{IDLE, Open, Rig, assert_apart, missing, quietly, simulated, trim, went},
};
use allocator_api2::alloc::Global;
use aquifer_core::{Budget, MemoryError, Tag};
use aquifer_device::{Block, DeviceBuffer, Graph, GraphPool, Park, Parkable, PoolConfig, Request};
use aquifer_driver::{Access, Call, DeviceId, DeviceRange, Operand};
use aquifer_stream::Stream;
use std::time::Duration;

/// The device's memory.
const CAPACITY: u64 = 64 << 20;
/// Calls that may fail during a program, of those that can be retried.
const FAULTS: [Call; 15] = [
    Call::AddressReserve,
    Call::HandleCreate,
    Call::Map,
    Call::SetAccess,
    Call::Unmap,
    Call::CopyToDevice,
    Call::CopyToHost,
    Call::EventCreate,
    Call::EventRecord,
    Call::EventQuery,
    Call::StreamWaitEvent,
    Call::StreamCreate,
    Call::StreamSynchronize,
    Call::StreamQuery,
    Call::EventSynchronize,
];

struct Lodged {
    buffer: DeviceBuffer<u8>,
    generation: u64,
    of: usize,
    stream: usize,
    range: DeviceRange,
    /// `None` if unknown.
    content: Option<u8>,
}

/// A graph that fills its output. Its memory is of the first tag.
struct Captured {
    graph: Graph,
    memory: GraphPool,
    out: DeviceBuffer<u8>,
    /// Whether the output has been filled, and its contents kept since.
    is_filled: bool,
}

/// What the graph writes.
const WRITTEN: u8 = 0x5a;

impl Captured {
    fn new(rig: &Rig, tag: Tag) -> Result<Self, MemoryError> {
        let memory = rig.pool.parkable_graph_pool(tag)?;
        // SAFETY: 1. and 2. the work touches only blocks of the graph pool.
        let (graph, out) = unsafe {
            memory.capture(&rig.streams[0], |s| {
                let mut temporary: DeviceBuffer<u8> = rig.pool.buffer(s, 1 << 20)?;
                s.fill(&mut temporary, WRITTEN)?;
                let mut out: DeviceBuffer<u8> = rig.pool.buffer(s, 5000)?;
                s.copy(temporary.slice(0..5000)?, &mut out)?;
                Ok(out)
            })
        }?;
        Ok(Self { graph, memory, out, is_filled: false })
    }
}

struct World {
    rig: Rig,
    /// Whether the device keeps bytes.
    keeps: bool,
    parkable: Vec<Parkable>,
    lodged: Vec<Lodged>,
    ordinary: Vec<Block>,
    /// Prepared uses, each of memory of a tag.
    open: Vec<(usize, Open)>,
    captured: Option<Captured>,
    /// How many parks and resumes of live blocks succeeded.
    done: (usize, usize),
}

/// Runs the program that `bytes` encodes. Returns how many parks and resumes of live blocks it had.
pub fn run(bytes: &[u8]) -> (usize, usize) {
    let _not_beside_alone = not_beside_alone();
    let mut bytes = Bytes::new(bytes);
    let Some(mut world) = World::open(&mut bytes) else { return (0, 0) };
    steps(&mut world, &mut bytes);
    let done = world.done;
    world.finish();
    done
}

impl Program for World {
    const PROCESS: Process = Process::Shared;

    fn open(bytes: &mut Bytes<'_>) -> Option<Self> {
        let keeps = bytes.choice(4) == 0;
        let sim = simulated(true).capacity(CAPACITY);
        let sim = if keeps { sim } else { sim.symbolic() };
        let sim = if bytes.flag() { sim.seeded(bytes.u64()) } else { sim };
        let budget = Budget::new("the fuzzed device", (u64::from(bytes.choice(50)) + 4) << 20);
        let mut config = PoolConfig::with_budget(budget);
        config.wait = Duration::from_micros(300);
        config.handle_bytes = if bytes.flag() { 4 << 20 } else { 0 };
        let rig = Rig::open(sim, config, 3);
        let tags = [Tag::named("fuzzed weights"), Tag::named("fuzzed cache")];
        let parkable = tags.map(|tag| rig.pool.parkable(tag).expect(IDLE)).into();
        let (lodged, ordinary, open) = (Vec::new(), Vec::new(), Vec::new());
        let captured = if bytes.flag() { went(Captured::new(&rig, tags[0])) } else { None };
        Some(Self { rig, keeps, parkable, lodged, ordinary, open, captured, done: (0, 0) })
    }

    fn step(&mut self, bytes: &mut Bytes<'_>) {
        match bytes.choice(30) {
            0..=4 => self.alloc(bytes),
            5..=7 => self.free(bytes),
            8 | 9 => self.write(bytes),
            10 | 11 => self.prepare(bytes),
            12..=14 => self.finish_one(bytes),
            15 | 16 => self.park(bytes),
            17 | 18 => self.resume(bytes),
            19 => self.ordinary(bytes),
            20 => trim(&self.rig.pool, u64::from(bytes.u8()) << 18),
            21 => self.rig.fail_one(bytes, FAULTS),
            22 => self.rig.go_on(bytes),
            23 | 24 => self.undo(bytes),
            25 => self.resume_both(),
            26 | 27 => self.launch(bytes),
            _ => self.rig.limit(bytes, 60),
        }
    }

    fn check(&mut self) {
        let outputs = self.captured.iter().map(|captured| captured.out.range().bytes);
        let blocks = self.lodged.len() + self.ordinary.len() + outputs.clone().count();
        let awake = self.lodged.iter().filter(|lodged| !self.parkable[lodged.of].is_parked());
        let ordinary: u64 = self.ordinary.iter().map(Block::bytes).sum();
        let awake: u64 = awake.map(|lodged| lodged.range.bytes).sum();
        let outputs: u64 = if self.parkable[0].is_parked() { 0 } else { outputs.sum() };
        let requested = awake + ordinary + outputs;
        let stats = self.rig.check(None, Some(requested));
        let missing = missing(&self.rig.sim, DeviceId(0));
        assert_eq!(missing, stats.physical, "what is held is what the device misses");
        assert_eq!(stats.blocks, blocks as u64);
        for (of, parkable) in self.parkable.iter().enumerate() {
            assert_eq!(self.rig.pool.parkable_bytes(parkable.tag()), self.holdings(of).2);
        }
        for parkable in &self.parkable {
            let own = parkable.stats();
            assert_eq!(own.live + own.cached + own.pending, own.physical, "{own:?}");
        }
    }

    fn finish(mut self) {
        self.rig.sim.clear_failures();
        self.rig.budget.set_limit(CAPACITY);
        self.ordinary.clear();
        self.open.drain(..).for_each(|(_, open)| open.used.abort());
        for of in 0..self.parkable.len() {
            self.rig.pool.trim(0).expect(IDLE);
            let resumed = self.rig.pool.resume(self.parkable[of].tag(), None);
            resumed.expect("all of the device's memory");
            self.compare(of);
        }
        self.check();
        // The order of these drops must not matter.
        drop((self.parkable, self.captured, self.lodged));
        self.rig.finish();
    }
}

impl World {
    fn pick_lodged(&self, bytes: &mut Bytes<'_>) -> Option<usize> {
        usize::from(bytes.u8()).checked_rem(self.lodged.len())
    }

    fn alloc(&mut self, bytes: &mut Bytes<'_>) {
        let (of, stream) = (usize::from(bytes.flag()), self.rig.pick_stream(bytes));
        let len = usize::from(bytes.u16()) << bytes.choice(8) | 1;
        let parkable = &self.parkable[of];
        let made = parkable.buffer::<u8>(&self.rig.streams[stream], len);
        if parkable.is_parked() {
            assert_eq!(made.err(), Some(MemoryError::Parked { tag: parkable.tag() }));
            return;
        }
        if let Some(buffer) = went(made) {
            let (range, generation) = (buffer.range(), buffer.block().generation());
            assert!(range.bytes == len as u64, "a short block");
            self.lodged.push(Lodged { buffer, generation, of, stream, range, content: None });
            assert_apart(self.lodged.iter().map(|lodged| lodged.range));
        }
    }

    fn free(&mut self, bytes: &mut Bytes<'_>) {
        let Some(at) = self.pick_lodged(bytes) else { return };
        let lodged = self.lodged.swap_remove(at);
        quietly(&self.rig.sim, "a free", || drop(lodged));
    }

    /// Fills a block on its own stream or on another.
    fn write(&mut self, bytes: &mut Bytes<'_>) {
        let Some(at) = self.pick_lodged(bytes) else { return };
        let (byte, on) = (bytes.u8(), self.rig.pick_stream(bytes));
        let Lodged { buffer, of, content, .. } = &mut self.lodged[at];
        let parkable = &self.parkable[*of];
        match self.rig.streams[on].fill(buffer, byte) {
            Ok(()) => {
                assert!(!parkable.is_parked(), "parked memory was written");
                *content = Some(byte);
            }
            Err(MemoryError::Parked { tag }) => {
                assert!(parkable.is_parked() && tag == parkable.tag());
            }
            Err(MemoryError::Busy { .. } | MemoryError::Driver(_)) => {
                assert!(!parkable.is_parked());
            }
            Err(other) => panic!("{other:?}"),
        }
    }

    fn prepare(&mut self, bytes: &mut Bytes<'_>) {
        let Some(at) = self.pick_lodged(bytes) else { return };
        let stream = self.rig.pick_stream(bytes);
        let access = if bytes.flag() { Access::ReadWrite } else { Access::Read };
        let (stream, Lodged { buffer, of, .. }) = (&self.rig.streams[stream], &self.lodged[at]);
        let parked = self.parkable[*of].is_parked();
        match buffer.block().prepare(stream, access) {
            Ok(used) => {
                assert!(!parked, "a use of parked memory was prepared");
                self.open.push((*of, Open::of(used, buffer.block(), stream, access)));
            }
            Err(MemoryError::Parked { .. }) => assert!(parked),
            Err(MemoryError::Busy { .. } | MemoryError::Driver(_)) => assert!(!parked),
            Err(other) => panic!("{other:?}"),
        }
    }

    /// Ends a prepared use, with or without work.
    fn finish_one(&mut self, bytes: &mut Bytes<'_>) {
        let Some((_, open)) = bytes.take(&mut self.open) else { return };
        if bytes.flag() {
            return open.used.abort();
        }
        let written = open.access.writes().then_some(open.generation);
        for lodged in self.lodged.iter_mut().filter(|lodged| Some(lodged.generation) == written) {
            lodged.content = None;
        }
        open.work(&self.rig.sim).expect("no stream that is fenced at once");
    }

    /// Returns the graph, if its memory is of this tag.
    fn captured_of(&self, of: usize) -> Option<&Captured> {
        self.captured.as_ref().filter(|_| of == 0)
    }

    /// Returns the live blocks of a tag, and the bytes that they and the tag's memory have.
    fn holdings(&self, of: usize) -> (u64, u64, u64) {
        let own = self.parkable[of].stats();
        let graphs = self.captured_of(of).map(|captured| captured.memory.stats());
        let graphs = graphs.unwrap_or_default();
        let live = self.lodged.iter().filter(|lodged| lodged.of == of).count() as u64;
        (live + graphs.blocks, own.live + graphs.live, own.physical + graphs.physical)
    }

    /// Launches the graph.
    fn launch(&mut self, bytes: &mut Bytes<'_>) {
        let stream = self.rig.pick_stream(bytes);
        let parked = self.rig.pool.is_parked(self.parkable[0].tag());
        let Some(captured) = &mut self.captured else { return };
        match captured.graph.launch(&self.rig.streams[stream]) {
            Ok(()) => {
                assert!(!parked, "a graph without memory was launched");
                captured.is_filled = true;
            }
            Err(MemoryError::Parked { .. }) => assert!(parked),
            Err(MemoryError::Busy { .. } | MemoryError::Driver(_)) => assert!(!parked),
            Err(other) => panic!("{other:?}"),
        }
    }

    /// Begins a park or a resume, and does not end it.
    fn undo(&mut self, bytes: &mut Bytes<'_>) {
        let tag = self.parkable[usize::from(bytes.flag())].tag();
        let (was_parked, before) = (self.rig.pool.is_parked(tag), self.rig.pool.stats());
        if was_parked {
            drop(went(self.rig.pool.begin_resume(tag, None)));
        } else {
            // SAFETY: 1. and 2. only one thread runs here, and it queues all work at once, except
            // for prepared uses.
            match unsafe { self.rig.pool.begin_park(tag, Park::save_in(Global)) } {
                Ok(pending) => {
                    assert!(self.rig.pool.is_parked(tag));
                    drop(pending);
                }
                Err(MemoryError::Busy { .. } | MemoryError::TimedOut | MemoryError::Driver(_)) => {}
                Err(other) => panic!("{other:?}"),
            }
        }
        assert_eq!(self.rig.pool.is_parked(tag), was_parked, "what was undone has happened");
        let after = self.rig.pool.stats();
        assert_eq!((after.live, after.requested), (before.live, before.requested));
    }

    /// Resumes both tags, or none.
    fn resume_both(&mut self) {
        let tags = [self.parkable[0].tag(), self.parkable[1].tag()];
        let were = tags.map(|tag| self.rig.pool.is_parked(tag));
        let begun = tags.iter().map(|&tag| self.rig.pool.begin_resume(tag, None)).collect();
        let begun: Result<Vec<_>, MemoryError> = begun;
        match went(begun) {
            Some(pending) => {
                for pending in pending {
                    let _report = pending.commit();
                }
                assert!(tags.iter().all(|&tag| !self.rig.pool.is_parked(tag)));
                (0..2).for_each(|of| self.compare(of));
            }
            None => {
                let are = tags.map(|tag| self.rig.pool.is_parked(tag));
                assert_eq!(are, were, "a resume that failed changed something");
            }
        }
    }

    fn park(&mut self, bytes: &mut Bytes<'_>) {
        let of = usize::from(bytes.flag());
        let parkable = &self.parkable[of];
        let (tag, discards) = (parkable.tag(), bytes.choice(4) == 0);
        let (was_parked, before) = (parkable.is_parked(), self.holdings(of));
        let how = if discards { Park::discard() } else { Park::save_in(Global) };
        // SAFETY: 1. and 2. only one thread runs here, and it queues all work at once, except for
        // prepared uses.
        let answer = unsafe { self.rig.pool.park(tag, how) };
        let open = self.open.iter().any(|(tag, _)| *tag == of);
        let (live, live_bytes, physical) = before;
        match answer {
            Ok(report) => {
                assert!(
                    !was_parked && !open && parkable.is_parked(),
                    "parked what is parked or in use"
                );
                assert_eq!((report.blocks, report.parked), (live, live_bytes));
                assert_eq!(report.saved, if discards { 0 } else { live_bytes });
                assert_eq!(report.refusal.is_some(), report.refused > 0);
                assert_eq!(self.holdings(of), (live, 0, 0));
                assert!(report.released >= physical - report.refused.min(physical));
                self.done.0 += usize::from(live > 0);
                if discards {
                    self.captured.iter_mut().filter(|_| of == 0).for_each(|c| c.is_filled = false);
                    self.lodged.iter_mut().filter(|l| l.of == of).for_each(|l| l.content = None);
                }
            }
            Err(MemoryError::Parked { tag: parked }) => assert!(was_parked && parked == tag),
            Err(MemoryError::Busy { .. }) => assert!(open && !was_parked && !parkable.is_parked()),
            Err(MemoryError::TimedOut | MemoryError::Driver(_)) => {
                assert!(!was_parked && !parkable.is_parked(), "a park that failed has parked");
                assert_eq!(self.holdings(of).1, live_bytes);
            }
            Err(other) => panic!("{other:?}"),
        }
    }

    fn resume(&mut self, bytes: &mut Bytes<'_>) {
        let of = usize::from(bytes.flag());
        let parkable = &self.parkable[of];
        let was_parked = parkable.is_parked();
        let live = self.holdings(of).0;
        match went(self.rig.pool.resume(parkable.tag(), None)) {
            Some(report) => {
                assert!(!parkable.is_parked(), "resumed and not awake");
                assert_eq!(report.blocks, if was_parked { live } else { 0 });
                self.done.1 += usize::from(was_parked && live > 0);
                self.compare(of);
            }
            None => {
                assert!(was_parked && parkable.is_parked(), "a resume that failed woke somebody");
            }
        }
    }

    fn ordinary(&mut self, bytes: &mut Bytes<'_>) {
        if bytes.flag() && !self.ordinary.is_empty() {
            return drop(bytes.take(&mut self.ordinary));
        }
        let stream = self.rig.pick_stream(bytes);
        let request = Request::bytes(u64::from(bytes.u16()) << 7 | 1);
        self.ordinary.extend(went(self.rig.pool.alloc(&self.rig.streams[stream], request)));
    }

    /// Checks that the blocks of a tag contain what was last written.
    fn compare(&self, of: usize) {
        if !self.keeps {
            return;
        }
        if let Some(Captured { out, is_filled: true, .. }) = self.captured_of(of) {
            compare(out, WRITTEN, &self.rig.streams[0]);
        }
        for lodged in self.lodged.iter().filter(|lodged| lodged.of == of) {
            if let Some(byte) = lodged.content {
                compare(&lodged.buffer, byte, &self.rig.streams[lodged.stream]);
            }
        }
    }
}

fn compare(buffer: &DeviceBuffer<u8>, byte: u8, stream: &Stream) {
    let mut back = vec![!byte; buffer.len()];
    match stream.scope(|c| c.download(buffer, &mut back)).and_then(|copied| copied) {
        Ok(()) => assert!(back.iter().all(|&there| there == byte), "not what was written"),
        Err(MemoryError::Busy { .. } | MemoryError::Driver(_)) => {}
        Err(other) => panic!("{other:?}"),
    }
}
