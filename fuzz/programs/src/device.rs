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
    program::{Bytes, Process, Program, not_beside_alone, steps},
    rig::{
        IDLE, Open, Rig, access, assert_apart, assert_empty, assert_returned, assert_within,
        begin_step, check_peaks, go_on, missing, quietly, simulated, trim,
    },
};
use aquifer_core::{Budget, MemoryError};
use aquifer_device::{Adoption, Block, Debugging, DeviceBuffer, Fault, PoolConfig, Request};
use aquifer_driver::{Access, Call, DeviceId, DeviceRange, RawStream};
use aquifer_stream::StreamLifetime;
use std::{thread, time::Duration};

/// The memory of a small and of a huge device. All sizes of a program scale with it.
const CAPACITY: [u64; 2] = [96 << 20, 96 << 33];
/// The alignment that the driver guarantees for its allocations.
const DRIVER_ALIGN: u64 = 256;
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
/// Further calls that may fail while blocks are filled and read by the debug checks.
const CHECKED_FAULTS: [Call; 4] =
    [Call::Fill, Call::CopyToHost, Call::StreamSynchronize, Call::EventSynchronize];

/// The stream of a block of another thread's default stream: none that this thread can use.
const AWAY: usize = usize::MAX;

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

pub(crate) struct World {
    /// The last stream is foreign. It is retired before it is destroyed, unless it is fenced.
    rig: Rig,
    /// Whether the last stream may end at any time without notice.
    fenced: bool,
    /// The handle of the last stream, until it is destroyed.
    foreign: Option<RawStream>,
    live: Vec<Live>,
    out: Vec<Out>,
    /// All sizes are shifted left by this many bits.
    scale: u32,
    /// Whether every stream can get all free memory, unless a call fails.
    shares: bool,
    /// The maximum of the budget's use since the last operation.
    most: [u64; 1],
    /// Whether the device has virtual memory. Without it each block is a driver allocation.
    mapping: bool,
    /// Whether blocks are checked: they have guards, and freed ones return after these are read.
    checked: bool,
    /// Whether default streams of threads are used, this thread's among them.
    threaded: bool,
    /// The number of other threads so far.
    threads: usize,
}

/// Runs the program that `bytes` encodes on a pool with all debug checks, which must find nothing,
/// or on one whose retention settings are encoded in the first bytes.
pub(crate) fn run_as(bytes: &[u8], checked: bool, retaining: bool) {
    let _not_beside_alone = not_beside_alone();
    let bytes = &mut Bytes::new(bytes);
    let mut world = World::new(bytes, checked, retaining);
    steps(&mut world, bytes);
    world.finish();
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
        // Checked blocks are read in full, which takes seconds for gigabytes.
        let vast = bytes.choice(3) == 2 && !checked;
        let scale = if vast { 13 } else { 0 };
        let sim = simulated(mapping).symbolic().capacity(CAPACITY[usize::from(vast)]);
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
        config.adoption = bytes.pick([Adoption::Never, Adoption::DoneOnly, Adoption::Wait]);
        config.wait = Duration::from_millis(1);
        config.handle_bytes = if vast { 0 } else { bytes.pick([0, 4 << 20]) };
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
        let mut rig = Rig::open(sim, config, 2);
        let Rig { sim, pool, streams, .. } = &mut rig;
        let isolated = bytes.choice(4) == 0;
        let third = if isolated { pool.streams().lease_isolated() } else { pool.stream() };
        streams.push(third.expect(IDLE));
        // What the checks hold of ended threads goes back only after several trims.
        let threaded = bytes.choice(3) == 0 && !checked;
        if threaded {
            streams.push(pool.streams().thread_default().expect(IDLE));
        }
        let foreign = sim.driver().stream_create(DeviceId(0), 0).expect(IDLE);
        let fenced = bytes.choice(3) == 0;
        let life = if fenced { StreamLifetime::Fenced } else { StreamLifetime::Retired };
        #[expect(unsafe_code, reason = "takes in another library's stream")]
        // SAFETY: 1. it is a stream of this device. 2. it is retired before it is destroyed;
        // otherwise no block of it and no use on it is live then.
        let adopted = unsafe { pool.streams().adopt(foreign, life) };
        streams.push(adopted.expect(IDLE));
        let shares = waits && !isolated && !checked && pool.info().virtual_memory;
        Self {
            rig,
            fenced,
            foreign: Some(foreign),
            live: Vec::new(),
            out: Vec::new(),
            scale,
            shares,
            most: [budget.limit()],
            mapping,
            checked,
            threaded,
            threads: 0,
        }
    }
}

impl Program for World {
    const PROCESS: Process = Process::Shared;

    fn open(bytes: &mut Bytes<'_>) -> Option<Self> {
        Some(Self::new(bytes, false, false))
    }

    fn step(&mut self, bytes: &mut Bytes<'_>) {
        begin_step(&mut self.most, std::slice::from_ref(&self.rig.budget));
        match bytes.choice(26) {
            0..=4 => self.alloc(bytes),
            5..=8 => self.free(bytes),
            9 => self.touch(bytes),
            10 | 11 => self.prepare(bytes),
            12 | 13 => self.rig.end_one(bytes),
            14 => self.record(bytes),
            15 => trim(&self.rig.pool, u64::from(bytes.u8()) << (19 + self.scale)),
            16 => self.fail(bytes),
            17 => go_on(&self.rig.sim, &self.rig.streams[self.pick_stream(bytes)], bytes),
            18 | 19 => self.limit(bytes),
            20 => self.make_raw(bytes),
            21 => self.take_raw(bytes),
            22 => self.typed(bytes),
            23 => self.retire(bytes),
            _ => self.thread(bytes),
        }
    }

    fn check(&mut self) {
        let requested: u64 = self.live.iter().map(|l| l.block.bytes()).sum();
        let live: u64 = self.live.iter().map(|l| l.block.capacity()).sum();
        let requested = requested + self.out.iter().map(|out| out.bytes).sum::<u64>();
        let live = live + self.out.iter().map(|out| out.capacity).sum::<u64>();
        // Of checked blocks the model does not know the guards.
        let known = |bytes| (!self.checked).then_some(bytes);
        let streams = self.rig.streams.len() + self.threads;
        let stats = self.rig.check_on(streams, known(live), known(requested));
        if self.checked {
            assert!(stats.live >= live, "guards are less than nothing");
            for finding in self.rig.pool.findings() {
                assert!(matches!(finding.fault, Fault::Unchecked { .. }), "{finding}");
            }
        }
        assert_eq!(stats.blocks, (self.live.len() + self.out.len()) as u64);
        let missing = missing(&self.rig.sim, DeviceId(0));
        // The driver rounds its allocations up.
        let exact = self.mapping || stats.physical > missing;
        assert!(!exact || stats.physical == missing, "{missing} are missing: {stats:?}");
        check_peaks(&self.most, std::slice::from_ref(&self.rig.budget));
        assert_within(&stats);
    }

    fn finish(mut self) {
        let last = self.rig.streams.len() - 1;
        self.rig.sim.clear_failures();
        for out in self.out.drain(..) {
            self.rig.pool.free_raw(out.address).expect("an address that is out");
        }
        self.live.clear();
        for open in self.rig.open.drain(..) {
            open.work(&self.rig.sim).expect(IDLE);
        }
        for (at, stream) in self.rig.streams.iter().enumerate() {
            if !self.is_gone(at) {
                stream.synchronize().expect(IDLE);
                if at == last {
                    stream.timeline().retire().expect(IDLE);
                }
            }
        }
        self.end_foreign();
        // Work of an ended stream that could not be waited for.
        self.rig.sim.run_all();
        let Rig { sim, budget, pool, streams, .. } = self.rig;
        pool.warm(0).expect("nothing is taken");
        assert_empty(&pool);
        assert_eq!(budget.used(), 0, "a charge was lost");
        drop((pool, streams));
        assert_returned(&sim);
    }
}

impl World {
    fn fail(&mut self, bytes: &mut Bytes<'_>) {
        let of_checks = self.checked && bytes.choice(3) == 0;
        let call = if of_checks { bytes.pick(CHECKED_FAULTS) } else { bytes.pick(FAULTS) };
        // A block that cannot be fenced when required is held back permanently, and so is a checked
        // one whose stream ends before it could be read.
        let fences = matches!(call, Call::EventCreate | Call::EventRecord);
        if (self.fenced || self.threaded) && (fences || of_checks) {
            return;
        }
        // Out of memory: a code that each of these calls may return.
        self.rig.sim.fail(call, u64::from(bytes.choice(6)) + 1, 2);
        self.shares = false;
    }

    /// Any limit; or slightly above the used bytes, so that handles get small and move; or twice
    /// the used bytes, so that streams exchange memory.
    fn limit(&self, bytes: &mut Bytes<'_>) {
        let used = self.rig.budget.used();
        let limit = match bytes.choice(4) {
            0 => (u64::from(bytes.choice(48)) + 1) << (20 + self.scale),
            1 => used + (u64::from(bytes.choice(16)) << 20),
            2 => used * 2 + (u64::from(bytes.choice(4)) << 20),
            _ => used * 3,
        };
        self.rig.budget.set_limit(limit.max(1 << 20));
    }

    fn make_raw(&mut self, bytes: &mut Bytes<'_>) {
        let Some(Live { block, stream }) = bytes.take(&mut self.live) else { return };
        let (bytes, capacity) = (block.bytes(), block.capacity());
        let address = block.into_raw();
        self.out.push(Out { address, bytes, capacity, stream });
    }

    fn take_raw(&mut self, bytes: &mut Bytes<'_>) {
        let Some(out) = bytes.take(&mut self.out) else { return };
        let Out { address, bytes: size, capacity, stream } = out;
        if bytes.flag() {
            let block = self.rig.pool.from_raw(address).expect("an address that is out");
            assert_eq!(
                (block.address(), block.bytes(), block.capacity()),
                (address, size, capacity)
            );
            self.live.push(Live { block, stream });
        } else {
            self.rig.pool.free_raw(address).expect("an address that is out");
        }
        // Once back, an address is not accepted again, unless it is that of another block.
        let stats = self.rig.pool.stats();
        for wrong in [address, address + 1, address + 512, u64::MAX] {
            if self.out.iter().any(|out| out.address == wrong) {
                continue;
            }
            let again = self.rig.pool.free_raw(wrong);
            let refused = |error: &MemoryError| {
                matches!(error, MemoryError::DoubleFree { .. } | MemoryError::ForeignBlock { .. })
            };
            assert!(again.as_ref().is_err_and(refused), "an address is out twice: {again:?}");
        }
        assert_eq!(self.rig.pool.stats(), stats, "a refused address changed the account");
    }

    /// Uses a block as elements, in two parts that are written on two streams.
    fn typed(&mut self, bytes: &mut Bytes<'_>) {
        let Some(at) = bytes.index(self.live.len()) else { return };
        // A borrow ends without notice, so its stream must exist when the block is freed.
        let stays =
            |stream| if self.fenced && stream == self.rig.streams.len() - 1 { 0 } else { stream };
        let (one, other) = (stays(self.pick_stream(bytes)), stays(self.pick_stream(bytes)));
        let Live { block, stream } = self.live.swap_remove(at);
        let block = match DeviceBuffer::<u32>::from_block(block) {
            Ok(mut buffer) => {
                let mid = usize::from(bytes.u16()) % (buffer.len() + 1);
                let (mut low, mut high) = buffer.split_at_mut(mid).expect("within its bounds");
                // Refused while a use of the block is open, or if a fault is planned.
                let _ = self.rig.streams[one].fill(&mut low, 1_u32);
                let _ = self.rig.streams[other].fill(&mut high, 2_u32);
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
        let Rig { sim, pool, .. } = &self.rig;
        let work = move || {
            let own = pool.streams().thread_default().expect(IDLE);
            let ours = ours.map(|Live { block, stream }| {
                let mut buffer = DeviceBuffer::<u8>::from_block(block).expect("any length fits");
                // Refused while a use is open, if a fault is planned, or if only another thread can
                // tell when the work before it is done.
                let _ = own.fill(&mut buffer, 3);
                Live { block: buffer.into_block(), stream }
            });
            let theirs = pool.alloc(&own, Request::bytes(size)).ok().map(|block| {
                access(sim, &own, &block, Access::Write);
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
        let last = self.rig.streams.len() - 1;
        let own = self.rig.streams[last].raw();
        if bytes.choice(4) > 0 || self.rig.open.iter().any(|open| open.stream.raw() == own) {
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
        } else if self.rig.streams[last].timeline().retire().is_ok() {
            self.end_foreign();
        }
    }

    fn end_foreign(&mut self) {
        if let Some(foreign) = self.foreign.take() {
            #[expect(unsafe_code, reason = "ends a stream")]
            // SAFETY: 1. it was retired, or its lifetime is fenced; this program does not use it
            // any more.
            let ended = unsafe { self.rig.sim.driver().stream_destroy(foreign) };
            ended.expect("it was made by this program");
        }
    }

    fn is_gone(&self, stream: usize) -> bool {
        stream == AWAY || self.foreign.is_none() && stream == self.rig.streams.len() - 1
    }

    fn pick_stream(&self, bytes: &mut Bytes<'_>) -> usize {
        let stream = usize::from(bytes.choice(self.rig.streams.len() as u8));
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
        // The driver aligns its allocations to no more.
        let align = if self.mapping { align } else { align.min(DRIVER_ALIGN) };
        let answer =
            self.rig.pool.alloc(&self.rig.streams[stream], Request::bytes(size).align(align));
        match answer {
            Ok(block) if size == 0 => {
                assert_eq!((block.address(), block.bytes(), block.capacity()), (0, 0, 0));
            }
            Ok(block) => {
                assert!(block.bytes() == size && block.capacity() >= size, "a short block");
                let least = if self.mapping { 512 } else { DRIVER_ALIGN };
                assert_eq!(block.address() % align.max(least), 0, "a misaligned block");
                // A new block can be used at once.
                access(&self.rig.sim, &self.rig.streams[stream], &block, Access::Write);
                self.live.push(Live { block, stream });
                self.check_apart();
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

    /// Checks that no two live blocks overlap, with all of their capacity.
    fn check_apart(&self) {
        let live = self.live.iter().map(|live| (live.block.address(), live.block.capacity()));
        let out = self.out.iter().map(|out| (out.address, out.capacity));
        let device = DeviceId(0);
        assert_apart(live.chain(out).map(|(address, bytes)| DeviceRange {
            device,
            address,
            bytes,
        }));
    }

    fn free(&mut self, bytes: &mut Bytes<'_>) {
        let Some(at) = bytes.index(self.live.len()) else { return };
        self.touch_at(at, Access::Read);
        let Live { block, .. } = self.live.swap_remove(at);
        if self.checked || self.fenced || self.threaded || !self.mapping {
            drop(block);
        } else {
            quietly(&self.rig.sim, "a free", || drop(block));
        }
    }

    /// Declares work on a block's own stream.
    fn touch(&mut self, bytes: &mut Bytes<'_>) {
        let Some(at) = bytes.index(self.live.len()) else { return };
        self.touch_at(at, Access::ReadWrite);
    }

    /// Declares work as a program would that knows of uses by other streams: an access that
    /// conflicts with an open use is not made.
    fn touch_at(&self, at: usize, access: Access) {
        let Live { block, stream } = &self.live[at];
        if self.is_gone(*stream) {
            return;
        }
        let stream = &self.rig.streams[*stream];
        if let Ok(used) = block.prepare(stream, access) {
            self::access(&self.rig.sim, stream, block, access);
            drop(used);
        }
    }

    fn prepare(&mut self, bytes: &mut Bytes<'_>) {
        let Some(at) = bytes.index(self.live.len()) else { return };
        let stream = self.pick_stream(bytes);
        let access = bytes.pick([Access::Read, Access::Write, Access::ReadWrite]);
        let (block, stream) = (&self.live[at].block, &self.rig.streams[stream]);
        match block.prepare(stream, access) {
            Ok(used) => self.rig.open.push(Open::of(used, block, stream, access)),
            Err(MemoryError::Busy { address }) => assert!(
                self.rig
                    .open
                    .iter()
                    .any(|o| o.ranges[0].address == address && o.access.conflicts(access)),
                "busy with nothing open"
            ),
            Err(MemoryError::Driver(_)) => {}
            Err(MemoryError::OtherThread { .. }) => assert!(self.threads > 0, "all on one thread"),
            Err(other) => panic!("{other:?}"),
        }
    }

    /// Declares work that the program orders itself, and records it afterwards.
    fn record(&mut self, bytes: &mut Bytes<'_>) {
        let Some(at) = bytes.index(self.live.len()) else { return };
        let stream = self.pick_stream(bytes);
        let Live { block, stream: home } = &self.live[at];
        let others = self.rig.open.iter().any(|o| o.ranges[0].address == block.address());
        if others || self.is_gone(*home) {
            return;
        }
        if self.rig.streams[stream].wait_for(&self.rig.streams[*home]).is_err() {
            return;
        }
        // Reads may run concurrently with other reads. A prepare would wait for earlier writes of
        // other streams.
        if let Ok(used) = block.prepare(&self.rig.streams[stream], Access::Read) {
            access(&self.rig.sim, &self.rig.streams[stream], block, Access::Read);
            used.abort();
            let _ = block.record_use(&self.rig.streams[stream], Access::Read);
        }
    }
}
