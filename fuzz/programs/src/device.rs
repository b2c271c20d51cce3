//! Programs over one device pool on the simulated GPU with its oracle.
//!
//! The bytes determine the pool's configuration, the operations on several streams, which driver
//! calls fail, and when queued work runs. In one program of three, blocks are also allocated, used
//! and freed on the default streams of several threads. Invariants after every operation:
//!
//! - the pool's account agrees with a model and with the device's free memory;
//! - the reported peaks are the true ones, within the error that is promised;
//! - the budget never exceeded its limit;
//! - the oracle reports nothing: no unordered work, no block reused before its last use is
//!   complete, and no mapping removed under queued work.
//!
//! Handles are as large as the remaining budget allows. One device in three is therefore huge, with
//! blocks of up to a GiB and handles of up to 64 MiB. When the limit is then lowered, handles
//! become small, move, and are released.
#![expect(clippy::expect_used, clippy::panic, reason = "a broken promise is told by a panic")]

use crate::{
    peaks::TruePeaks,
    program::{Bytes, MAX_OPS, not_beside_alone},
};
use aquifer_core::{Budget, MemoryError};
use aquifer_device::{
    Adoption, Block, Debugging, DeviceBuffer, DevicePool, Fault, PoolConfig, Request,
};
use aquifer_driver::{
    Access, Call, DeviceId, DeviceRange, RawStream,
    sim::{DeviceConfig, Sim, SimConfig},
};
use aquifer_stream::{Stream, StreamLifetime, Use};
use std::{thread, time::Duration};

/// Accesses are declared for blocks that the program holds, on streams of an idle device.
const OURS: &str = "an access to a block of ours";
/// The memory of a small and of a huge device. All sizes of a program scale with it.
const CAPACITY: [u64; 2] = [96 << 20, 96 << 33];
/// Calls that may fail during a program. Calls that free an object are excluded: a failed one
/// leaves the object allocated in the driver, so no count could be zero at the end.
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

/// The operations, weighted by repetition.
const OPS: [Op; 26] = [
    Op::Alloc,
    Op::Alloc,
    Op::Alloc,
    Op::Alloc,
    Op::Alloc,
    Op::Free,
    Op::Free,
    Op::Free,
    Op::Free,
    Op::Touch,
    Op::Prepare,
    Op::Prepare,
    Op::Finish,
    Op::Finish,
    Op::Record,
    Op::Trim,
    Op::Fail,
    Op::Run,
    Op::Limit,
    Op::Limit,
    Op::IntoRaw,
    Op::FromRaw,
    Op::Typed,
    Op::Retire,
    Op::Thread,
    Op::Thread,
];

/// The stream of a block of another thread's default stream: none that this thread can use.
const AWAY: usize = usize::MAX;

#[derive(Clone, Copy, Debug)]
enum Op {
    Alloc,
    Free,
    Touch,
    Prepare,
    Finish,
    Record,
    Trim,
    Fail,
    Run,
    Limit,
    IntoRaw,
    FromRaw,
    Typed,
    Retire,
    Thread,
}

/// A live block whose raw address is in use.
struct Out {
    address: u64,
    bytes: u64,
    capacity: u64,
    stream: usize,
}

/// A live block and the stream it belongs to.
struct Live {
    block: Block,
    stream: usize,
}

/// A prepared use, with the range that its work will touch.
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
    /// The last stream is foreign. It is retired before it is destroyed, unless it is fenced.
    streams: Vec<Stream>,
    /// Whether the last stream may end at any time without notice.
    fenced: bool,
    /// The handle of the last stream, until it is destroyed.
    foreign: Option<RawStream>,
    live: Vec<Live>,
    out: Vec<Out>,
    open: Vec<Open>,
    /// All sizes are shifted left by this many bits.
    scale: u32,
    /// Whether every stream can get all free memory, unless a call fails.
    shares: bool,
    /// The maximum of the budget's use since the last operation.
    most: u64,
    /// Whether blocks are checked: they have guards, and freed ones return after these are read.
    checked: bool,
    /// Whether default streams of threads are used, this thread's among them.
    threaded: bool,
    /// The number of other threads so far.
    threads: usize,
    peaks: TruePeaks,
}

/// Runs the program that `bytes` encodes. Returns the number of its operations.
///
/// # Panics
/// If the pool violates an invariant.
pub fn run(bytes: &[u8]) -> usize {
    run_on(&mut Bytes::new(bytes), false, false)
}

/// Runs the program that `bytes` encodes on a pool whose retention settings are encoded in the
/// first bytes.
///
/// # Panics
/// If the pool violates an invariant.
pub fn run_retaining(bytes: &[u8]) {
    run_on(&mut Bytes::new(bytes), false, true);
}

/// Runs the program that `bytes` encodes on a pool with all debug checks, which must find nothing.
///
/// # Panics
/// If the pool violates an invariant.
pub fn run_checked(bytes: &[u8]) {
    run_on(&mut Bytes::new(bytes), true, false);
}

fn run_on(bytes: &mut Bytes<'_>, checked: bool, retaining: bool) -> usize {
    let _not_beside_alone = not_beside_alone();
    let mut world = World::new(bytes, checked, retaining);
    let steps = bytes.steps(MAX_OPS, |bytes| {
        world.step(bytes);
        world.check();
    });
    world.finish();
    steps
}

/// Returns how much idle memory is retained in the pool and per stream, and the warm reserve.
fn retention(bytes: &mut Bytes<'_>, limit: u64) -> [u64; 3] {
    let [threshold, cap] = [0; 2].map(|_| match bytes.choice(4) {
        0 => u64::MAX,
        _ => limit / 16 * u64::from(bytes.choice(17)),
    });
    let warm = limit / 16 * u64::from(bytes.choice(17));
    [threshold, cap, if bytes.flag() { warm.min(threshold) } else { 0 }]
}

impl World {
    fn new(bytes: &mut Bytes<'_>, checked: bool, retaining: bool) -> Self {
        // Read first, but interpreted when the budget is known.
        let mut told = bytes.clone();
        if retaining {
            retention(bytes, 0);
        }
        let mapping = bytes.choice(4) != 0;
        let device =
            if mapping { DeviceConfig::h200() } else { DeviceConfig::without_virtual_memory() };
        let mut config = SimConfig::h200(1);
        config.devices = vec![device];
        // Checked blocks are read in full, which takes seconds for gigabytes.
        let vast = bytes.choice(3) == 2 && !checked;
        let scale = if vast { 13 } else { 0 };
        let sim = Sim::new(config).symbolic().capacity(CAPACITY[usize::from(vast)]);
        // Work runs as it is queued, or at random at each driver call, or at few of them on a
        // device that lags.
        let sim = match bytes.choice(3) {
            0 => sim,
            1 => sim.seeded(bytes.u64()),
            _ => sim.seeded(bytes.u64()).paced(1 << (2 + bytes.choice(8))),
        };
        let budget =
            Budget::new("the fuzzed device", (u64::from(bytes.choice(40)) + 2) << (20 + scale));
        let mut config = PoolConfig::with_budget(budget.clone());
        config.adoption =
            [Adoption::Never, Adoption::DoneOnly, Adoption::Wait][usize::from(bytes.choice(3))];
        config.wait = Duration::from_millis(1);
        config.handle_bytes = if vast { 0 } else { [0, 4 << 20][usize::from(bytes.choice(2))] };
        config.slack = if bytes.choice(4) == 0 { 6 } else { 17 };
        if retaining && mapping {
            let [threshold, cap, warm] = retention(&mut told, budget.limit());
            (config.release_threshold, config.stream_cache) = (threshold, cap);
            // Rounded down to whole handles, which must be within the budget.
            config.warm_reserve = warm / (4 << 20) * (4 << 20);
        }
        if checked {
            config.debug = Debugging::all();
        }
        let waits = config.adoption == Adoption::Wait;
        let pool = DevicePool::open(sim.driver(), DeviceId(0), config)
            .expect("a pool opens on an idle device");
        let mut streams: Vec<_> =
            (0..2).map(|_| pool.stream().expect("a stream of an idle device")).collect();
        let isolated = bytes.choice(4) == 0;
        let third = if isolated { pool.streams().lease_isolated() } else { pool.stream() };
        streams.push(third.expect("a stream of an idle device"));
        // What the checks hold of ended threads goes back only after several trims.
        let threaded = bytes.choice(3) == 0 && !checked;
        if threaded {
            streams.push(pool.streams().thread_default().expect("a stream of an idle device"));
        }
        let foreign =
            sim.driver().stream_create(DeviceId(0), 0).expect("a stream of an idle device");
        let fenced = bytes.choice(3) == 0;
        let life = if fenced { StreamLifetime::Fenced } else { StreamLifetime::Retired };
        #[expect(unsafe_code, reason = "takes in another library's stream")]
        // SAFETY: 1. it is a stream of this device. 2. it is retired before it is destroyed;
        // otherwise no block of it and no use on it is live then.
        let adopted = unsafe { pool.streams().adopt(foreign, life) };
        streams.push(adopted.expect("a stream of an idle device"));
        let shares = waits && !isolated && !checked && pool.info().virtual_memory;
        let most = budget.limit();
        let (live, out, open, foreign) = (Vec::new(), Vec::new(), Vec::new(), Some(foreign));
        Self {
            sim,
            budget,
            pool,
            streams,
            fenced,
            foreign,
            live,
            out,
            open,
            scale,
            shares,
            most,
            checked,
            threaded,
            threads: 0,
            peaks: TruePeaks::default(),
        }
    }

    fn step(&mut self, bytes: &mut Bytes<'_>) {
        // A budget above a lowered limit may stay there, but must not grow.
        self.most = self.budget.limit().max(self.budget.used());
        self.budget.reset_peak();
        match OPS[usize::from(bytes.choice(OPS.len() as u8))] {
            Op::Alloc => self.alloc(bytes),
            Op::Free => self.free(bytes),
            Op::Touch => self.touch(bytes),
            Op::Prepare => self.prepare(bytes),
            Op::Finish => self.finish_one(bytes),
            Op::Record => self.record(bytes),
            Op::Trim => self.trim(bytes),
            Op::Fail => self.fail(bytes),
            Op::Run => self.run(bytes),
            Op::Limit => self.limit(bytes),
            Op::IntoRaw => self.make_raw(bytes),
            Op::FromRaw => self.take_raw(bytes),
            Op::Typed => self.typed(bytes),
            Op::Retire => self.retire(bytes),
            Op::Thread => self.thread(bytes),
        }
    }

    fn trim(&self, bytes: &mut Bytes<'_>) {
        let keep = u64::from(bytes.u8()) << (19 + self.scale);
        let before = self.pool.stats();
        if self.pool.trim(keep).is_ok() {
            let after = self.pool.stats();
            assert_eq!(before.live, after.live, "a trim took live memory");
            assert!(after.physical <= before.physical, "a trim took memory");
        }
    }

    fn fail(&mut self, bytes: &mut Bytes<'_>) {
        let call = FAULTS[usize::from(bytes.choice(FAULTS.len() as u8))];
        if (self.fenced || self.threaded) && matches!(call, Call::EventCreate | Call::EventRecord) {
            // A block that cannot be fenced when required is held back permanently.
            return;
        }
        // Out of memory: a code that each of these calls may return.
        self.sim.fail(call, u64::from(bytes.choice(6)) + 1, 2);
        self.shares = false;
    }

    fn run(&self, bytes: &mut Bytes<'_>) {
        let stream = self.pick_stream(bytes);
        if bytes.flag() {
            self.sim.step(self.streams[stream].raw());
        } else {
            // A planned fault may hit it.
            let _ = self.streams[stream].synchronize();
        }
    }

    /// Any limit; or slightly above the used bytes, so that handles get small and move; or twice
    /// the used bytes, so that streams exchange memory.
    fn limit(&self, bytes: &mut Bytes<'_>) {
        let used = self.budget.used();
        let limit = match bytes.choice(4) {
            0 => (u64::from(bytes.choice(48)) + 1) << (20 + self.scale),
            1 => used + (u64::from(bytes.choice(16)) << 20),
            2 => used * 2 + (u64::from(bytes.choice(4)) << 20),
            _ => used * 3,
        };
        self.budget.set_limit(limit.max(1 << 20));
    }

    fn make_raw(&mut self, bytes: &mut Bytes<'_>) {
        if self.live.is_empty() {
            return;
        }
        let at = usize::from(bytes.u8()) % self.live.len();
        let Live { block, stream } = self.live.swap_remove(at);
        let (bytes, capacity) = (block.bytes(), block.capacity());
        let address = block.into_raw();
        self.out.push(Out { address, bytes, capacity, stream });
    }

    fn take_raw(&mut self, bytes: &mut Bytes<'_>) {
        if self.out.is_empty() {
            return;
        }
        let at = usize::from(bytes.u8()) % self.out.len();
        let Out { address, bytes: size, capacity, stream } = self.out.swap_remove(at);
        if bytes.flag() {
            let block = self.pool.from_raw(address).expect("an address that is out");
            assert_eq!(
                (block.address(), block.bytes(), block.capacity()),
                (address, size, capacity)
            );
            self.live.push(Live { block, stream });
        } else {
            self.pool.free_raw(address).expect("an address that is out");
        }
        let again = self.pool.free_raw(address);
        assert!(
            matches!(again, Err(MemoryError::DoubleFree { .. } | MemoryError::ForeignBlock { .. })),
            "an address is out twice: {again:?}"
        );
    }

    /// Uses a block as elements, in two parts that are written on two streams.
    fn typed(&mut self, bytes: &mut Bytes<'_>) {
        if self.live.is_empty() {
            return;
        }
        let at = usize::from(bytes.u8()) % self.live.len();
        // A borrow ends without notice, so its stream must exist when the block is freed.
        let stays =
            |stream| if self.fenced && stream == self.streams.len() - 1 { 0 } else { stream };
        let (one, other) = (stays(self.pick_stream(bytes)), stays(self.pick_stream(bytes)));
        let Live { block, stream } = self.live.swap_remove(at);
        let block = match DeviceBuffer::<u32>::from_block(block) {
            Ok(mut buffer) => {
                let mid = usize::from(bytes.u16()) % (buffer.len() + 1);
                let (mut low, mut high) = buffer.split_at_mut(mid).expect("within its bounds");
                // Refused while a use of the block is open, or if a fault is planned.
                let _ = self.streams[one].fill(&mut low, 1_u32);
                let _ = self.streams[other].fill(&mut high, 2_u32);
                buffer.into_block()
            }
            Err(declined) => declined.value,
        };
        self.live.push(Live { block, stream });
    }

    /// Uses a block of ours on the default stream of a new thread, and allocates one there. The
    /// thread frees each of them or leaves it to us.
    fn thread(&mut self, bytes: &mut Bytes<'_>) {
        if !self.threaded {
            return;
        }
        self.threads += 1;
        // No other stream gets what an ended thread has used or freed, unless the device is idle.
        self.shares = false;
        let (which, size) = (usize::from(bytes.u8()), u64::from(bytes.u16()) << 4);
        let (keeps, leaves) = (bytes.flag(), bytes.flag());
        let ours = which.checked_rem(self.live.len()).map(|at| self.live.swap_remove(at));
        let (sim, pool) = (&self.sim, &self.pool);
        let work = move || {
            let own = pool.streams().thread_default().expect("a stream of an idle device");
            let ours = ours.map(|Live { block, stream }| {
                let mut buffer = DeviceBuffer::<u8>::from_block(block).expect("any length fits");
                // Refused while a use is open, if a fault is planned, or if only another thread can
                // tell when the work before it is done.
                let _ = own.fill(&mut buffer, 3);
                Live { block: buffer.into_block(), stream }
            });
            let theirs = pool.alloc(&own, Request::bytes(size)).ok().map(|block| {
                sim.access(own.raw(), range_of(&block), Access::Write, Some(block.generation()))
                    .expect(OURS);
                Live { block, stream: AWAY }
            });
            [ours.filter(|_| keeps), theirs.filter(|_| leaves)]
        };
        let left = thread::scope(|threads| threads.spawn(work).join());
        let left = left.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        self.live.extend(left.into_iter().flatten().filter(|live| live.block.bytes() > 0));
    }

    /// Ends the foreign stream. Its blocks stay live.
    fn retire(&mut self, bytes: &mut Bytes<'_>) {
        let last = self.streams.len() - 1;
        if bytes.choice(4) > 0 || self.open.iter().any(|open| open.stream == last) {
            return;
        }
        if self.fenced {
            let holds = self
                .live
                .iter()
                .map(|live| live.stream)
                .chain(self.out.iter().map(|out| out.stream));
            if !holds.into_iter().any(|stream| stream == last) {
                self.end_foreign();
            }
        } else if self.streams[last].timeline().retire().is_ok() {
            self.end_foreign();
        }
    }

    fn end_foreign(&mut self) {
        if let Some(foreign) = self.foreign.take() {
            #[expect(unsafe_code, reason = "ends a stream")]
            // SAFETY: 1. it was retired, or its lifetime is fenced; this program does not use it
            // any more.
            let ended = unsafe { self.sim.driver().stream_destroy(foreign) };
            ended.expect("it was made by this program");
        }
    }

    fn is_gone(&self, stream: usize) -> bool {
        stream == AWAY || self.foreign.is_none() && stream == self.streams.len() - 1
    }

    fn pick_stream(&self, bytes: &mut Bytes<'_>) -> usize {
        let stream = usize::from(bytes.choice(self.streams.len() as u8));
        if self.is_gone(stream) { 0 } else { stream }
    }

    fn alloc(&mut self, bytes: &mut Bytes<'_>) {
        let stream = self.pick_stream(bytes);
        let size = match bytes.choice(5) {
            0 => u64::from(bytes.u16()),
            1 => u64::from(bytes.u16()) << 4,
            2 => u64::from(bytes.u16()) << 7,
            3 => u64::from(bytes.u8()) << 17,
            _ => u64::from(bytes.u8()) << (17 + self.scale.min(4)),
        };
        let align = 1 << bytes.choice(22);
        let answer = self.pool.alloc(&self.streams[stream], Request::bytes(size).align(align));
        match answer {
            Ok(block) if size == 0 => {
                assert_eq!((block.address(), block.bytes(), block.capacity()), (0, 0, 0));
            }
            Ok(block) => {
                assert!(block.bytes() == size && block.capacity() >= size, "a short block");
                assert_eq!(block.address() % align.max(512), 0, "a misaligned block");
                let end = block.address() + block.capacity();
                for other in &self.live {
                    let other = &other.block;
                    assert!(
                        end <= other.address()
                            || other.address() + other.capacity() <= block.address(),
                        "{block:?} overlaps {other:?}"
                    );
                }
                for Out { address, capacity, .. } in &self.out {
                    let apart = end <= *address || address + capacity <= block.address();
                    assert!(apart, "{block:?} overlaps what is out at {address:#x}");
                }
                // A new block can be used at once.
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
            Err(MemoryError::OutOfMemory(error)) => {
                assert_eq!(error.requested, size);
                let fits = error.largest_free >= size.next_multiple_of(512) + align.max(512);
                assert!(!(fits && self.shares), "refused what a cache has room for: {error}");
            }
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
        if !self.checked && !self.fenced && !self.threaded {
            assert_eq!(calls, self.sim.driver().calls().made(), "a free called the driver");
        }
    }

    /// Declares work on a block's own stream.
    fn touch(&mut self, bytes: &mut Bytes<'_>) {
        if self.live.is_empty() {
            return;
        }
        let at = usize::from(bytes.u8()) % self.live.len();
        self.touch_at(at, Access::ReadWrite);
    }

    /// Declares work as a program would that knows of uses by other streams: an access that
    /// conflicts with an open use is not made.
    fn touch_at(&self, at: usize, access: Access) {
        let Live { block, stream } = &self.live[at];
        if self.is_gone(*stream) {
            return;
        }
        let stream = &self.streams[*stream];
        if let Ok(used) = block.prepare(stream, access) {
            self.sim
                .access(stream.raw(), range_of(block), access, Some(block.generation()))
                .expect(OURS);
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
            Err(MemoryError::OtherThread { .. }) => assert!(self.threads > 0, "all on one thread"),
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
            self.sim
                .access(self.streams[stream].raw(), range, access, Some(generation))
                .expect(OURS);
            let _ = used.finish();
        } else {
            used.abort();
        }
    }

    /// Declares work that the program orders itself, and records it afterwards.
    fn record(&mut self, bytes: &mut Bytes<'_>) {
        if self.live.is_empty() {
            return;
        }
        let at = usize::from(bytes.u8()) % self.live.len();
        let stream = self.pick_stream(bytes);
        let Live { block, stream: home } = &self.live[at];
        let others = self.open.iter().any(|o| o.range.address == block.address());
        if others || self.is_gone(*home) {
            return;
        }
        if self.streams[stream].wait_for(&self.streams[*home]).is_err() {
            return;
        }
        // Reads may run concurrently with other reads. A prepare would wait for earlier writes of
        // other streams.
        if let Ok(used) = block.prepare(&self.streams[stream], Access::Read) {
            self.sim
                .access(
                    self.streams[stream].raw(),
                    range_of(block),
                    Access::Read,
                    Some(block.generation()),
                )
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
        let requested = requested + self.out.iter().map(|out| out.bytes).sum::<u64>();
        let live = live + self.out.iter().map(|out| out.capacity).sum::<u64>();
        assert_eq!(stats.requested, requested, "live bytes");
        if self.checked {
            assert!(stats.live >= live, "guards are less than nothing");
            for finding in self.pool.findings() {
                assert!(matches!(finding.fault, Fault::Unchecked { .. }), "{finding}");
            }
        } else {
            assert_eq!(stats.live, live, "live bytes");
        }
        // Of checked blocks the model does not know the guards.
        let live = (!self.checked).then_some(live);
        let streams = self.streams.len() + self.threads;
        self.peaks.check(&self.pool, &stats, streams, (live, Some(requested)));
        assert_eq!(stats.blocks, (self.live.len() + self.out.len()) as u64);
        assert_eq!(stats.physical, self.budget.used(), "what is charged is what is held");
        let memory = self.sim.driver().memory_info(DeviceId(0)).expect("an idle device tells");
        assert_eq!(
            stats.physical,
            memory.total - memory.free,
            "what is held is what the device misses"
        );
        assert!(
            self.budget.peak() <= self.most,
            "{} above the limit",
            self.budget.peak() - self.most
        );
        assert!(
            stats.live + stats.pending <= stats.physical
                && stats.live + stats.cached + stats.pending <= stats.physical,
            "more is spanned than is held: {stats:?}"
        );
    }

    fn finish(mut self) {
        self.sim.clear_failures();
        for out in std::mem::take(&mut self.out) {
            self.pool.free_raw(out.address).expect("an address that is out");
        }
        let open = std::mem::take(&mut self.open);
        let streams: Vec<_> = self.streams.clone();
        let sim = self.sim.clone();
        self.live.clear();
        for Open { used, stream, range, generation, access } in open {
            sim.access(streams[stream].raw(), range, access, Some(generation)).expect(OURS);
            used.finish().expect("no fault is left");
        }
        for (at, stream) in streams.iter().enumerate().filter(|(at, _)| !self.is_gone(*at)) {
            stream.synchronize().expect("no fault is left");
            if at == streams.len() - 1 {
                stream.timeline().retire().expect("no fault is left");
            }
        }
        drop(streams);
        self.end_foreign();
        // Work of an ended stream that could not be waited for.
        self.sim.run_all();
        let Self { budget, pool, streams, .. } = self;
        pool.warm(0).expect("nothing is taken");
        pool.trim(0).expect("no fault is left");
        let stats = pool.stats();
        assert_eq!(
            (stats.live, stats.pending, stats.cached, stats.physical),
            (0, 0, 0, 0),
            "{stats:?}"
        );
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
