//! Programs over one device pool on the simulated GPU, whose oracle watches.
//!
//! Bytes say how the pool is set up, what several streams do with it, which driver calls fail and when queued work runs.
//! After every operation the pool's account is compared with a model, and the oracle must have nothing to report: work
//! that is not ordered, a block given out before its last use is done, a mapping taken away under queued work.
#![expect(clippy::expect_used, clippy::panic, reason = "a broken promise is told by a panic")]

use crate::program::Bytes;
use aquifer_core::{Budget, MemoryError};
use aquifer_device::{Adoption, Block, Debugging, DevicePool, Fault, PoolConfig, Request};
use aquifer_driver::{
    Access, Call, DeviceId, DeviceRange,
    sim::{DeviceConfig, Sim, SimConfig},
};
use aquifer_stream::{Stream, Use};
use std::time::Duration;

/// Operations of one program at most.
const MAX_OPS: usize = 300;
/// Accesses are declared for blocks that the program holds, on streams of an idle device.
const OURS: &str = "an access to a block of ours";
/// The device's memory.
const CAPACITY: u64 = 96 << 20;
/// Calls that may fail in the middle of a program. Those that end an object are left out: what they leave behind is
/// still held, by the driver's own word, so that no count could be zero at the end.
const FAULTS: [Call; 10] = [
    Call::HandleCreate,
    Call::Map,
    Call::SetAccess,
    Call::Unmap,
    Call::EventCreate,
    Call::EventRecord,
    Call::EventQuery,
    Call::StreamWaitEvent,
    Call::MemAlloc,
    Call::StreamCreate,
];

/// A live block and the stream it belongs to.
struct Live {
    block: Block,
    stream: usize,
}

/// A use that has been prepared, with what its work will touch.
struct Open {
    used: Use,
    stream: usize,
    range: DeviceRange,
    generation: u64,
    access: Access,
}

struct World {
    sim: Sim,
    budget: Budget,
    pool: DevicePool,
    streams: Vec<Stream>,
    live: Vec<Live>,
    open: Vec<Open>,
    /// Blocks are checked: they have guards, and what is freed is kept for a while.
    checked: bool,
}

/// Runs the program that `bytes` spell.
///
/// # Panics
/// When the pool breaks a promise.
pub fn run(bytes: &[u8]) {
    run_on(bytes, false);
}

/// Runs the program that `bytes` spell on a pool that checks its blocks in every way, and must find nothing.
///
/// # Panics
/// When the pool breaks a promise.
pub fn run_checked(bytes: &[u8]) {
    run_on(bytes, true);
}

fn run_on(bytes: &[u8], checked: bool) {
    let mut bytes = Bytes::new(bytes);
    let mut world = World::new(&mut bytes, checked);
    for _ in 0..MAX_OPS {
        if bytes.is_empty() {
            break;
        }
        world.step(&mut bytes);
        world.check();
    }
    world.finish();
}

impl World {
    fn new(bytes: &mut Bytes<'_>, checked: bool) -> Self {
        let device =
            if bytes.choice(4) == 0 { DeviceConfig::without_virtual_memory() } else { DeviceConfig::h200() };
        let mut config = SimConfig::h200(1);
        config.devices = vec![device];
        let sim = Sim::new(config).symbolic().capacity(CAPACITY);
        let sim = if bytes.flag() { sim.seeded(bytes.u64()) } else { sim };
        let budget = Budget::new("the fuzzed device", (u64::from(bytes.choice(40)) + 2) << 20);
        let mut config = PoolConfig::with_budget(budget.clone());
        config.adoption = [Adoption::Never, Adoption::DoneOnly, Adoption::Wait][usize::from(bytes.choice(3))];
        config.wait = Duration::from_millis(1);
        config.handle_bytes = [0, 4 << 20][usize::from(bytes.choice(2))];
        config.compact = bytes.choice(4) == 0;
        if checked {
            config.debug = Debugging::all();
            config.debug.quarantine = u64::from(bytes.choice(8)) << 19;
        }
        let pool =
            DevicePool::open(sim.driver(), DeviceId(0), config).expect("a pool opens on an idle device");
        let streams = (0..3).map(|_| pool.stream().expect("a stream of an idle device")).collect();
        Self { sim, budget, pool, streams, live: Vec::new(), open: Vec::new(), checked }
    }

    fn step(&mut self, bytes: &mut Bytes<'_>) {
        match bytes.choice(18) {
            0..=4 => self.alloc(bytes),
            5..=7 => self.free(bytes),
            8 => self.touch(bytes),
            9 | 10 => self.prepare(bytes),
            11 | 12 => self.finish_one(bytes),
            13 => self.record(bytes),
            14 => {
                let keep = u64::from(bytes.u8()) << 19;
                let before = self.pool.stats();
                if self.pool.trim(keep).is_ok() {
                    let after = self.pool.stats();
                    assert_eq!(before.live, after.live, "a trim took live memory");
                    assert!(after.physical <= before.physical, "a trim took memory");
                }
            }
            15 => {
                let call = FAULTS[usize::from(bytes.choice(FAULTS.len() as u8))];
                // Out of memory: a code that every one of these calls may answer with.
                self.sim.fail(call, u64::from(bytes.choice(6)) + 1, 2);
            }
            16 => {
                let stream = self.pick_stream(bytes);
                let raw = self.streams[stream].raw();
                if bytes.flag() {
                    self.sim.step(raw);
                } else {
                    // A fault may be waiting for it.
                    let _ = self.streams[stream].synchronize();
                }
            }
            _ => {
                self.budget.set_limit((u64::from(bytes.choice(48)) + 1) << 20);
            }
        }
    }

    fn pick_stream(&self, bytes: &mut Bytes<'_>) -> usize {
        usize::from(bytes.choice(self.streams.len() as u8))
    }

    fn alloc(&mut self, bytes: &mut Bytes<'_>) {
        let stream = self.pick_stream(bytes);
        let size = match bytes.choice(4) {
            0 => u64::from(bytes.u16()),
            1 => u64::from(bytes.u16()) << 4,
            2 => u64::from(bytes.u16()) << 7,
            _ => u64::from(bytes.u8()) << 17,
        };
        let align = 1 << bytes.choice(22);
        let answer = self.pool.alloc(&self.streams[stream], Request::bytes(size).align(align));
        match answer {
            Ok(block) => {
                assert!(block.bytes() == size && block.capacity() >= size, "a short block");
                assert_eq!(block.address() % align.max(512), 0, "a misaligned block");
                let end = block.address() + block.capacity();
                for other in &self.live {
                    let other = &other.block;
                    assert!(
                        end <= other.address() || other.address() + other.capacity() <= block.address(),
                        "{block:?} overlaps {other:?}"
                    );
                }
                // A block is for use at once.
                self.sim
                    .access(
                        self.streams[stream].raw(),
                        range_of(&block),
                        Access::Write,
                        Some(block.generation()),
                    )
                    .expect(OURS);
                self.live.push(Live { block, stream });
            }
            Err(MemoryError::ZeroSize) => assert_eq!(size, 0),
            Err(MemoryError::OutOfMemory(error)) => assert_eq!(error.requested, size),
            Err(MemoryError::Driver(_)) => {}
            Err(other) => panic!("{other:?} for {size} bytes"),
        }
    }

    fn free(&mut self, bytes: &mut Bytes<'_>) {
        if self.live.is_empty() {
            return;
        }
        let at = usize::from(bytes.u8()) % self.live.len();
        self.touch_at(at, Access::Read);
        let Live { block, .. } = self.live.swap_remove(at);
        let calls = self.sim.driver().calls().made();
        drop(block);
        if !self.checked {
            assert_eq!(calls, self.sim.driver().calls().made(), "a free called the driver");
        }
    }

    /// Work on a block's own stream.
    fn touch(&mut self, bytes: &mut Bytes<'_>) {
        if self.live.is_empty() {
            return;
        }
        let at = usize::from(bytes.u8()) % self.live.len();
        self.touch_at(at, Access::ReadWrite);
    }

    /// As a program does that knows of other streams' uses: a use that conflicts with an open one is not made.
    fn touch_at(&self, at: usize, access: Access) {
        let Live { block, stream } = &self.live[at];
        let stream = &self.streams[*stream];
        if let Ok(used) = block.prepare(stream, access) {
            self.sim.access(stream.raw(), range_of(block), access, Some(block.generation())).expect(OURS);
            drop(used);
        }
    }

    fn prepare(&mut self, bytes: &mut Bytes<'_>) {
        if self.live.is_empty() {
            return;
        }
        let at = usize::from(bytes.u8()) % self.live.len();
        let stream = self.pick_stream(bytes);
        let access = [Access::Read, Access::Write, Access::ReadWrite][usize::from(bytes.choice(3))];
        let block = &self.live[at].block;
        match block.prepare(&self.streams[stream], access) {
            Ok(used) => {
                let (range, generation) = (range_of(block), block.generation());
                self.open.push(Open { used, stream, range, generation, access });
            }
            Err(MemoryError::Busy { address }) => assert!(
                self.open.iter().any(|o| o.range.address == address && o.access.conflicts(access)),
                "busy with nothing open"
            ),
            Err(MemoryError::Driver(_)) => {}
            Err(other) => panic!("{other:?}"),
        }
    }

    fn finish_one(&mut self, bytes: &mut Bytes<'_>) {
        if self.open.is_empty() {
            return;
        }
        let at = usize::from(bytes.u8()) % self.open.len();
        let Open { used, stream, range, generation, access } = self.open.swap_remove(at);
        if bytes.flag() {
            self.sim.access(self.streams[stream].raw(), range, access, Some(generation)).expect(OURS);
            let _ = used.finish();
        } else {
            used.abort();
        }
    }

    /// Work that the program orders itself, noted afterwards.
    fn record(&mut self, bytes: &mut Bytes<'_>) {
        if self.live.is_empty() {
            return;
        }
        let at = usize::from(bytes.u8()) % self.live.len();
        let stream = self.pick_stream(bytes);
        let Live { block, stream: home } = &self.live[at];
        let others = self.open.iter().any(|o| o.range.address == block.address());
        if others || self.streams[stream].wait_for(&self.streams[*home]).is_err() {
            return;
        }
        // Reads may go side by side with other reads; earlier writes of others are what a prepare would wait for.
        if let Ok(used) = block.prepare(&self.streams[stream], Access::Read) {
            self.sim
                .access(self.streams[stream].raw(), range_of(block), Access::Read, Some(block.generation()))
                .expect(OURS);
            used.abort();
            let _ = block.record_use(&self.streams[stream], Access::Read);
        }
    }

    fn check(&self) {
        let violations = self.sim.violations();
        assert!(violations.is_empty(), "{}", violations[0]);
        let stats = self.pool.stats();
        let requested: u64 = self.live.iter().map(|l| l.block.bytes()).sum();
        let live: u64 = self.live.iter().map(|l| l.block.capacity()).sum();
        assert_eq!(stats.requested, requested, "live bytes");
        if self.checked {
            assert!(stats.live >= live, "guards are less than nothing");
            for finding in self.pool.findings() {
                assert!(matches!(finding.fault, Fault::Unchecked { .. }), "{finding}");
            }
        } else {
            assert_eq!(stats.live, live, "live bytes");
        }
        assert_eq!(stats.blocks, self.live.len() as u64);
        assert_eq!(stats.physical, self.budget.used(), "what is charged is what is held");
        assert!(
            stats.live + stats.pending <= stats.physical
                && stats.live + stats.cached + stats.pending <= stats.physical,
            "more is spanned than is held: {stats:?}"
        );
    }

    fn finish(self) {
        let Self { sim, budget, pool, streams, live, open, .. } = self;
        sim.clear_failures();
        drop(live);
        for Open { used, stream, range, generation, access } in open {
            sim.access(streams[stream].raw(), range, access, Some(generation)).expect(OURS);
            used.finish().expect("no fault is left");
        }
        for stream in &streams {
            stream.synchronize().expect("no fault is left");
        }
        pool.trim(0).expect("no fault is left");
        let stats = pool.stats();
        assert_eq!((stats.live, stats.pending, stats.cached, stats.physical), (0, 0, 0, 0), "{stats:?}");
        assert_eq!(budget.used(), 0, "a charge was lost");
        drop(pool);
        drop(streams);
        let violations = sim.violations();
        assert!(violations.is_empty(), "{}", violations[0]);
        assert!(sim.outstanding().is_empty(), "{:?}", sim.outstanding());
    }
}

fn range_of(block: &Block) -> DeviceRange {
    DeviceRange { device: DeviceId(0), address: block.address(), bytes: block.bytes() }
}
