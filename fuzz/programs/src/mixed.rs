//! Programs that use everything at the same time, as a server does: three device pools on two
//! devices and a pinned pool under one tree of budgets, two tenants, an application that evicts,
//! stable memory, pending copies, streams that are created and dropped, changing limits, and driver
//! calls that fail, alone and in pairs.
//!
//! One program in four also has threads: phases in which several threads allocate, use and free
//! while limits change and a driver call stalls. All other programs are determined by their bytes,
//! and some are run twice to check that.
//!
//! The program `pressure` is this one without what holds memory for long. Where work runs as it is
//! queued and no call fails, an allocation fails there only if reclaiming all idle memory would not
//! make room for it.
//!
//! Invariants after every operation:
//! - the oracle reports nothing, and no two live blocks of a device overlap;
//! - each budget's use equals what its pools hold, and never exceeded the limit;
//! - the missing memory of each device equals what its pools hold, and each pool's account is the
//!   sum over its blocks;
//! - a tenant's live bytes are those of its blocks, and contents are what was last written.
//!
//! At the end everything is freed.
#![expect(clippy::expect_used, clippy::panic, reason = "a broken promise is told by a panic")]

mod threads;

use crate::{
    pinned::shared_host,
    program::{Bytes, Process, Program, alone, steps},
    rig::{
        self, App, IDLE, Open, access, assert_apart, assert_empty, assert_silent, assert_within,
        begin_step, check_peaks,
    },
};
use aquifer_core::{
    Budget, Charge, MemoryError, OutOfMemory, Result,
    budget::{HookRegistration, Waiting},
};
use aquifer_device::{
    Adoption, Block, DeviceBuffer, DevicePool, PoolConfig, Request, StableBlock, Tenant,
};
use aquifer_driver::{
    Access, Call, DeviceId, Operand,
    sim::{DeviceConfig, Sim, SimConfig},
};
use aquifer_host::{PinnedBuf, PinnedConfig, PinnedPool, pool, region::retry_stranded};
use aquifer_stream::{InFlight, Stream};
use std::{
    future::Future,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, Waker},
    time::{Duration, Instant},
};

const MIB: u64 = 1 << 20;
/// The memory of each device.
const CAPACITY: u64 = 64 * MIB;
/// Maximum bytes of a copy.
const COPY: u64 = 64 << 10;
/// Maximum number of live blocks, since all of them are checked after each operation.
const MOST: usize = 96;
/// Calls that may fail during a program without leaving anything behind.
const FAULTS: [Call; 15] = [
    Call::AddressReserve,
    Call::HandleCreate,
    Call::Map,
    Call::SetAccess,
    Call::Unmap,
    Call::MemAlloc,
    Call::EventCreate,
    Call::EventRecord,
    Call::EventQuery,
    Call::StreamWaitEvent,
    Call::StreamCreate,
    Call::StreamSynchronize,
    Call::CopyToDevice,
    Call::CopyToHost,
    Call::HostRegister,
];

/// The operations of `pressure`, by their numbers among all.
const CALM: [u8; 16] = [0, 0, 0, 0, 0, 9, 9, 15, 24, 25, 29, 29, 32, 33, 37, 40];

/// The indices of the budgets.
const ROOT: usize = 0;
const DEVICE: usize = 1;
const ENGINE: usize = 2;
const OTHER: usize = 3;
const HOST: usize = 4;

/// A pool, with its streams and its tenant.
struct Owner {
    pool: DevicePool,
    streams: Vec<Stream>,
    tenant: Tenant,
}

/// An ordinary block.
struct Live {
    buffer: DeviceBuffer<u8>,
    owner: usize,
    of_tenant: bool,
    /// A thread has kept it, perhaps on its default stream, whose blocks record an event when they
    /// are freed.
    of_thread: bool,
    /// The byte that fills all of it, if known.
    content: Option<u8>,
}

struct Stable {
    block: StableBlock,
    owner: usize,
}

struct World {
    sim: Sim,
    /// Whether the devices keep bytes.
    keeps: bool,
    budgets: [Budget; 5],
    /// The maximum of each budget's use since the last operation.
    most: [u64; 5],
    owners: [Owner; 3],
    live: Vec<Live>,
    stable: Vec<Stable>,
    open: Vec<Open>,
    pinned: PinnedPool,
    buffers: Vec<PinnedBuf<u8>>,
    flights: Vec<InFlight<PinnedBuf<u8>>>,
    waits: Vec<(usize, Waiting)>,
    charges: Vec<(usize, Charge)>,
    app: Arc<App<Live>>,
    /// How often a level has changed.
    registration: HookRegistration,
    with_threads: bool,
    /// Whether only the operations of `pressure` are performed.
    calm: bool,
    /// Whether all idle memory can be reclaimed at once.
    exact: bool,
    /// Whether a registration of host memory was made to fail. Memory that cannot be freed then
    /// stays charged.
    faulty_host: bool,
    /// A hash of all results so far.
    digest: u64,
}

/// Runs the program that `bytes` encodes.
pub(crate) fn run(bytes: &[u8]) {
    let _alone = alone();
    let (digest, with_threads) = run_once(bytes, false);
    if !with_threads && digest.is_multiple_of(8) {
        let (again, _) = run_once(bytes, false);
        assert_eq!(again, digest, "the same program was answered otherwise");
    }
}

/// Runs the program that `bytes` encodes with the operations of `pressure` only.
pub(crate) fn run_calm(bytes: &[u8]) {
    let _alone = alone();
    run_once(bytes, true);
}

fn run_once(bytes: &[u8], calm: bool) -> (u64, bool) {
    let bytes = &mut Bytes::new(bytes);
    let mut world = World::new(bytes, calm);
    steps(&mut world, bytes);
    let answers = (world.digest, world.with_threads);
    world.finish();
    answers
}

/// Returns the value of an operation, or `None` if it failed with a permitted error.
fn went<T>(answer: Result<T>) -> Option<T> {
    match answer {
        Ok(value) => Some(value),
        Err(
            MemoryError::Driver(_)
            | MemoryError::OutOfMemory(_)
            | MemoryError::OutOfBudget(_)
            | MemoryError::Busy { .. }
            | MemoryError::Parked { .. }
            | MemoryError::TimedOut
            // A block that a thread has left on its default stream.
            | MemoryError::OtherThread { .. }
            | MemoryError::Capturing { .. },
        ) => None,
        Err(other) => panic!("{other:?}"),
    }
}

fn pick<T>(of: &[T], bytes: &mut Bytes<'_>) -> Option<usize> {
    usize::from(bytes.u8()).checked_rem(of.len())
}

impl World {
    fn new(bytes: &mut Bytes<'_>, calm: bool) -> Self {
        let with_threads = bytes.choice(4) == 1 && !calm;
        let mut config = SimConfig::h200(2);
        if bytes.choice(4) == 1 {
            config.devices[1] = DeviceConfig::without_virtual_memory();
        }
        let keeps = bytes.choice(4) == 1;
        let sim = Sim::new(config).capacity(CAPACITY);
        let sim = if keeps { sim } else { sim.symbolic() };
        let eager = bytes.choice(3) == 0;
        let sim = match bytes.choice(2) {
            _ if eager => sim,
            0 => sim.seeded(bytes.u64()),
            _ => sim.seeded(bytes.u64()).paced(1 << (2 + bytes.choice(8))),
        };
        let mut limit = |least: u64| (u64::from(bytes.choice(24)) + least) << 21;
        let root = Budget::new("the server", limit(12));
        let device = root.child("device 0", limit(6));
        let engine = device.child("the engine", limit(4));
        let other = root.child("device 1", limit(4));
        let host = root.child("the host", limit(2));
        let tenants = Budget::new("all tenants", limit(4));
        let budgets = [root, device, engine, other, host];
        let mut open = |device: u32, budget: usize, tenant: &'static str| {
            let mut config = PoolConfig::with_budget(budgets[budget].clone());
            config.adoption = bytes.pick([Adoption::Never, Adoption::DoneOnly, Adoption::Wait]);
            // Without threads, the duration of waits must not affect a program that is run twice.
            config.wait = match calm {
                true => Duration::from_millis(u64::from(bytes.choice(3))),
                false if with_threads => Duration::from_micros(300),
                false => Duration::ZERO,
            };
            config.slack = if bytes.choice(4) == 0 { 6 } else { 17 };
            config.handle_bytes = if calm { 0 } else { bytes.pick([0, 4 << 20]) };
            let pool = DevicePool::open(sim.driver(), DeviceId(device), config).expect(IDLE);
            let streams = (0..2).map(|_| pool.stream().expect(IDLE)).collect();
            let share = tenants.child(tenant, (u64::from(bytes.choice(16)) + 1) << 20);
            let tenant = pool.for_tenant(&share).expect("a tree of its own");
            Owner { pool, streams, tenant }
        };
        let owners =
            [open(0, DEVICE, "tenant a"), open(0, ENGINE, "tenant b"), open(1, OTHER, "tenant c")];
        let mut config = PinnedConfig::default();
        config.chunk = 2 << 20;
        config.patience = Duration::ZERO;
        let shared = shared_host().clone().with_driver(sim.driver(), DeviceId(0));
        let pinned = PinnedPool::new(&shared, &budgets[HOST], config)
            .expect("a configuration that can be followed");
        let cost = Duration::from_micros(u64::from(bytes.u16()));
        let app = Arc::new(App::new(cost, |live: &Live| live.buffer.block().capacity()));
        let registration = budgets[usize::from(bytes.choice(4))].on_need(&app);
        let most = budgets.each_ref().map(Budget::limit);
        Self {
            sim,
            keeps,
            budgets,
            most,
            owners,
            live: Vec::new(),
            stable: Vec::new(),
            open: Vec::new(),
            pinned,
            buffers: Vec::new(),
            flights: Vec::new(),
            waits: Vec::new(),
            charges: Vec::new(),
            app,
            registration,
            with_threads,
            calm,
            exact: calm && eager,
            faulty_host: false,
            digest: 0,
        }
    }
}

impl Program for World {
    const PROCESS: Process = Process::Alone;

    fn open(bytes: &mut Bytes<'_>) -> Option<Self> {
        Some(Self::new(bytes, false))
    }

    fn step(&mut self, bytes: &mut Bytes<'_>) {
        begin_step(&mut self.most, &self.budgets);
        match if self.calm { bytes.pick(CALM) } else { bytes.choice(41) } {
            0..=8 => self.alloc(bytes),
            9..=14 => self.free(bytes),
            15 | 16 => self.touch(bytes),
            17 | 18 => self.fill(bytes),
            19 | 20 => self.look(bytes),
            21 => self.prepare(bytes),
            22 | 23 => self.finish_one(bytes),
            24 => self.trim(bytes),
            25 | 26 => self.fail(bytes),
            27 | 28 => self.go_on(bytes),
            29 | 30 => self.limit(bytes),
            31 => self.stream(bytes),
            32 => self.stable(bytes),
            33 => self.pin(bytes),
            34 => self.fly(bytes),
            35 => self.land(bytes),
            36 => self.wait(bytes),
            37 => self.evictable(bytes),
            38 | 39 if self.with_threads => self.phase(bytes),
            _ => self.give_back(bytes),
        }
        self.answered(self.budgets[ROOT].used());
    }

    fn check(&mut self) {
        assert_silent(&self.sim);
        self.check_budgets();
        self.check_accounts();
        self.check_ranges();
    }

    fn finish(mut self) {
        self.sim.clear_failures();
        self.waits.clear();
        self.charges.clear();
        self.app.blocks().clear();
        for budget in &self.budgets {
            budget.set_limit(4 * CAPACITY);
        }
        self.most = [4 * CAPACITY; 5];
        while let Some(open) = self.open.pop() {
            let _ = open.work(&self.sim);
        }
        self.owners.iter().for_each(|owner| owner.pool.trim(0).map(drop).expect(IDLE));
        self.check();
        for Live { buffer, owner, content, .. } in &self.live {
            self.compare(buffer, *content, &self.owners[*owner].streams[0]);
        }
        for flight in self.flights.drain(..) {
            flight.wait().expect(IDLE);
        }
        let Self { sim, budgets, owners, pinned, buffers, app, registration, .. } = self;
        drop((self.live, self.stable, buffers, registration, app));
        for Owner { pool, streams, tenant, .. } in &owners {
            streams.iter().for_each(|stream| stream.synchronize().expect(IDLE));
            sim.run_all();
            assert_empty(pool);
            assert_eq!(tenant.live(), 0, "a tenant's bytes were lost");
        }
        drop((owners, pinned));
        let patience = Instant::now() + threads::PATIENCE;
        loop {
            pool::sweep();
            let (stranded, left) = (retry_stranded(), sim.outstanding());
            // Another program of this process may have stranded memory, which is not counted here.
            if left.is_empty() && budgets[ROOT].used() == 0 {
                break;
            }
            assert!(
                Instant::now() < patience,
                "{} charged, {stranded} stranded, {left}",
                budgets[ROOT].used()
            );
            std::thread::yield_now();
        }
        assert_eq!(budgets.each_ref().map(Budget::used), [0; 5], "a charge was lost");
        assert_silent(&sim);
    }
}

impl World {
    /// Adds a result to the hash, which must be equal in another run of the same bytes.
    fn answered(&mut self, what: u64) {
        self.digest = (self.digest.rotate_left(5) ^ what).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }

    /// Adds an address to the hash. On devices that keep bytes it depends on the system, so it is
    /// left out.
    fn placed(&mut self, address: u64) {
        self.answered(if self.keeps { 0 } else { address });
    }

    fn pick_owner(bytes: &mut Bytes<'_>) -> usize {
        usize::from(bytes.choice(3))
    }

    fn pick_stream(&self, owner: usize, bytes: &mut Bytes<'_>) -> Stream {
        let streams = &self.owners[owner].streams;
        streams[bytes.below(streams.len())].clone()
    }

    /// Returns a size up to 16 MiB, small in most cases.
    fn size(bytes: &mut Bytes<'_>) -> u64 {
        match bytes.choice(4) {
            0 => u64::from(bytes.u16()) + 1,
            1 => (u64::from(bytes.u16()) + 1) << 4,
            2 => (u64::from(bytes.u8()) + 1) << 13,
            _ => (u64::from(bytes.u8()) + 1) << 16,
        }
    }

    fn alloc(&mut self, bytes: &mut Bytes<'_>) {
        let owner = Self::pick_owner(bytes);
        let (stream, size) = (self.pick_stream(owner, bytes), Self::size(bytes));
        let of_tenant = bytes.choice(4) == 0 && !self.calm;
        if self.live.len() >= MOST {
            return;
        }
        let Owner { pool, tenant, .. } = &self.owners[owner];
        let align = 1 << bytes.choice(13);
        // Without virtual memory each block is a driver allocation, aligned to no more than 256.
        let align = if pool.info().virtual_memory { align } else { align.min(256) };
        let request = Request::bytes(size).align(align);
        let answer =
            if of_tenant { tenant.alloc(&stream, request) } else { pool.alloc(&stream, request) };
        if let Err(MemoryError::OutOfMemory(refused)) = &answer {
            self.check_refusal(owner, size, refused);
        }
        let Some(block) = went(answer) else { return };
        assert!(block.bytes() == size && block.capacity() >= size, "a short block");
        // A new block can be used at once.
        access(&self.sim, &stream, &block, Access::Write);
        self.placed(block.address());
        let buffer = DeviceBuffer::from_block(block).expect("bytes are as small as elements get");
        self.live.push(Live { buffer, owner, of_tenant, of_thread: false, content: None });
    }

    /// Checks a refused allocation: with all idle memory released there is no room for it either.
    fn check_refusal(&self, owner: usize, size: u64, error: &OutOfMemory) {
        let pool = &self.owners[owner].pool;
        // Without virtual memory, what a pool has freed and not yet given back is not offered.
        if !self.exact || self.owners.iter().any(|owner| !owner.pool.info().virtual_memory) {
            return;
        }
        for Owner { pool, .. } in &self.owners {
            pool.trim(0).expect("no fault is planned");
        }
        let whole = size.next_multiple_of(2 * MIB);
        let left = pool.budget().remaining();
        let free = CAPACITY - rig::missing(&self.sim, pool.device());
        assert!(whole > left.min(free), "{left} are left of the budget, and {error}");
    }

    fn free(&mut self, bytes: &mut Bytes<'_>) {
        let Some(at) = pick(&self.live, bytes) else { return };
        let Live { buffer, owner, of_thread, .. } = self.live.swap_remove(at);
        let block = buffer.into_block();
        let before = self.sim.driver().calls().made();
        if bytes.flag() {
            let address = block.into_raw();
            self.owners[owner].pool.free_raw(address).expect("an address that is out");
        } else {
            drop(block);
        }
        let calls = self.sim.driver().calls().made();
        let may_call = of_thread || !self.owners[owner].pool.info().virtual_memory;
        assert!(may_call || calls == before, "a free called the driver");
    }

    /// Declares work on a block by any stream of its pool.
    fn touch(&mut self, bytes: &mut Bytes<'_>) {
        let Some(at) = pick(&self.live, bytes) else { return };
        let stream = self.pick_stream(self.live[at].owner, bytes);
        let kind = bytes.pick([Access::Read, Access::ReadWrite]);
        let Live { buffer, content, .. } = &mut self.live[at];
        let block = buffer.block();
        if let Some(used) = went(block.prepare(&stream, kind)) {
            access(&self.sim, &stream, block, kind);
            if kind.writes() {
                *content = None;
            }
            let _ = used.finish();
        }
    }

    /// Fills a block on any stream of its pool.
    fn fill(&mut self, bytes: &mut Bytes<'_>) {
        let Some(at) = pick(&self.live, bytes) else { return };
        let (stream, byte) = (self.pick_stream(self.live[at].owner, bytes), bytes.u8());
        let Live { buffer, content, .. } = &mut self.live[at];
        match stream.fill(buffer, byte) {
            Ok(()) => *content = Some(byte),
            Err(refused) => {
                // A failed driver call leaves the contents unknown.
                if matches!(refused, MemoryError::Driver(_)) {
                    *content = None;
                }
                let _ = went::<()>(Err(refused));
            }
        }
    }

    /// Reads the beginning of a block.
    fn look(&mut self, bytes: &mut Bytes<'_>) {
        let Some(at) = pick(&self.live, bytes) else { return };
        let stream = self.pick_stream(self.live[at].owner, bytes);
        let Live { buffer, content, .. } = &self.live[at];
        self.compare(buffer, *content, &stream);
    }

    /// Checks that a buffer begins with what was last written.
    fn compare(&self, buffer: &DeviceBuffer<u8>, content: Option<u8>, stream: &Stream) {
        let len = (buffer.len() as u64).min(COPY) as usize;
        let part = buffer.slice(0..len).expect("within its bounds");
        let mut back = vec![0; len];
        let copied = stream.scope(|c| c.download(part, &mut back)).and_then(|copied| copied);
        if let (Some(()), Some(byte), true) = (went(copied), content, self.keeps) {
            assert!(back.iter().all(|&there| there == byte), "not what was written");
        }
    }

    fn prepare(&mut self, bytes: &mut Bytes<'_>) {
        let Some(at) = pick(&self.live, bytes) else { return };
        let stream = self.pick_stream(self.live[at].owner, bytes);
        let access = bytes.pick([Access::Read, Access::Write, Access::ReadWrite]);
        let Live { buffer, content, .. } = &mut self.live[at];
        let block = buffer.block();
        if let Some(used) = went(block.prepare(&stream, access)) {
            if access.writes() {
                *content = None;
            }
            self.open.push(Open::of(used, block, &stream, access));
        }
    }

    fn finish_one(&mut self, bytes: &mut Bytes<'_>) {
        let Some(at) = pick(&self.open, bytes) else { return };
        self.open.swap_remove(at).end(&self.sim, bytes);
    }

    fn trim(&self, bytes: &mut Bytes<'_>) {
        let pool = &self.owners[Self::pick_owner(bytes)].pool;
        rig::trim(pool, u64::from(bytes.u8()) << 18);
        if bytes.choice(4) == 0 {
            let _ = self.pinned.trim(usize::from(bytes.choice(4)) << 20);
        }
    }

    /// Makes one call fail soon, or two, or one repeatedly, or cancels all planned faults.
    fn fail(&mut self, bytes: &mut Bytes<'_>) {
        let how = bytes.choice(8);
        self.exact = false;
        if how == 7 {
            return self.sim.clear_failures();
        }
        for _ in 0..1 + how % 2 {
            let call = bytes.pick(FAULTS);
            let (nth, code) = (u64::from(bytes.choice(6)) + 1, if bytes.flag() { 2 } else { 999 });
            self.faulty_host |= call == Call::HostRegister;
            if how == 6 {
                self.sim.fail_every(call, nth + 1, code);
            } else {
                self.sim.fail(call, nth, code);
            }
        }
    }

    /// Runs one item of a stream, or waits for all of them.
    fn go_on(&self, bytes: &mut Bytes<'_>) {
        let stream = self.pick_stream(Self::pick_owner(bytes), bytes);
        rig::go_on(&self.sim, &stream, bytes);
    }

    /// Sets a limit to any value or slightly above the used bytes, or shrinks a budget to it.
    fn limit(&mut self, bytes: &mut Bytes<'_>) {
        let at = usize::from(bytes.choice(6));
        let Some(budget) = self.budgets.get(at) else {
            let tenant = &self.owners[Self::pick_owner(bytes)].tenant;
            tenant.budget().set_limit((u64::from(bytes.choice(32)) + 1) << 19);
            return;
        };
        let some = u64::from(bytes.choice(32));
        let (limit, shrinks) = match bytes.choice(4) {
            0 => (budget.used() + (some << 16), false),
            1 => ((some + 1) << 21, true),
            _ => ((some + 1) << 21, false),
        };
        // Waiters are served at once under the new limit, here and in child budgets.
        for most in &mut self.most {
            *most = (*most).max(limit);
        }
        for (most, budget) in self.most.iter_mut().zip(&self.budgets) {
            *most = (*most).min(budget.limit().max(budget.used()).max(limit));
        }
        if shrinks {
            let room = budget.shrink(limit, Some(Instant::now()));
            assert_eq!(room.missing, budget.used().saturating_sub(limit));
        } else {
            budget.set_limit(limit);
        }
        self.most[at] = self.most[at].max(limit);
    }

    /// Creates a stream, or drops one while blocks of it are live.
    fn stream(&mut self, bytes: &mut Bytes<'_>) {
        let owner = &mut self.owners[Self::pick_owner(bytes)];
        let isolated = bytes.choice(8) == 0;
        if owner.streams.len() > 1 && bytes.flag() {
            bytes.take(&mut owner.streams);
        } else if owner.streams.len() < 4 {
            let stream =
                if isolated { owner.pool.streams().lease_isolated() } else { owner.pool.stream() };
            owner.streams.extend(went(stream));
        }
    }

    /// Allocates or drops a stable block, or registers one whose memory stays behind.
    fn stable(&mut self, bytes: &mut Bytes<'_>) {
        let owner = Self::pick_owner(bytes);
        if bytes.flag() && !self.stable.is_empty() {
            return drop(bytes.take(&mut self.stable));
        }
        let stream = self.pick_stream(owner, bytes);
        let request = Request::bytes(u64::from(bytes.u16()) << 6 | 1);
        if let Some(block) = went(self.owners[owner].pool.alloc_stable(&stream, request)) {
            access(&self.sim, &stream, block.block(), Access::Write);
            if self.calm || bytes.flag() {
                // The registration keeps the memory alive after the block.
                let token = block.register();
                drop((block, token));
            } else {
                self.stable.push(Stable { block, owner });
            }
        }
    }

    fn pin(&mut self, bytes: &mut Bytes<'_>) {
        let size = (usize::from(bytes.u8()) + 1) << 11;
        if bytes.flag() && !self.buffers.is_empty() {
            bytes.take(&mut self.buffers);
        } else if self.buffers.len() < 24 {
            self.buffers.extend(went(self.pinned.buffer::<u8>(size)));
        }
    }

    /// Begins a copy of a whole small block, in either direction, from or to pinned memory.
    fn fly(&mut self, bytes: &mut Bytes<'_>) {
        let Some(at) = pick(&self.live, bytes) else { return };
        let stream = self.pick_stream(self.live[at].owner, bytes);
        let (up, byte) = (bytes.flag(), bytes.u8());
        let Live { buffer, content, .. } = &mut self.live[at];
        if buffer.len() as u64 > COPY || self.flights.len() >= 16 {
            return;
        }
        let Some(mut host) = went(self.pinned.buffer::<u8>(buffer.len())) else { return };
        let flight = if up {
            host.fill(byte);
            stream.upload(host, buffer)
        } else {
            stream.download(&*buffer, host)
        };
        match flight {
            Ok(flight) => {
                self.flights.push(flight);
                if up {
                    *content = Some(byte);
                }
            }
            Err(refused) => {
                if up && matches!(refused.error, MemoryError::Driver(_)) {
                    *content = None;
                }
                let _ = went::<()>(Err(refused.error));
            }
        }
    }

    /// Waits for a copy, or detaches it.
    fn land(&mut self, bytes: &mut Bytes<'_>) {
        let Some(at) = pick(&self.flights, bytes) else { return };
        let flight = self.flights.swap_remove(at);
        if bytes.flag() {
            self.buffers.extend(went(flight.wait()));
        }
    }

    /// Starts a wait for bytes of a budget, polls one, cancels one, or releases what one was
    /// granted.
    fn wait(&mut self, bytes: &mut Bytes<'_>) {
        let (at, asked) = (usize::from(bytes.choice(5)), u64::from(bytes.u8()) << 14);
        match bytes.choice(4) {
            0 if self.waits.len() < 4 => {
                let waiting = self.budgets[at].charge_async(asked);
                self.poll(at, waiting);
            }
            1 => drop(pick(&self.waits, bytes).map(|which| self.waits.swap_remove(which))),
            2 => drop(pick(&self.charges, bytes).map(|which| self.charges.swap_remove(which))),
            _ => {
                if let Some(which) = pick(&self.waits, bytes) {
                    let (at, waiting) = self.waits.swap_remove(which);
                    self.poll(at, waiting);
                }
            }
        }
    }

    fn poll(&mut self, at: usize, mut waiting: Waiting) {
        match Pin::new(&mut waiting).poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Pending => self.waits.push((at, waiting)),
            Poll::Ready(answer) => self.charges.extend(answer.ok().map(|charge| (at, charge))),
        }
    }

    /// Moves a block to the application, which may evict it from now on.
    fn evictable(&mut self, bytes: &mut Bytes<'_>) {
        if let Some(at) = pick(&self.live, bytes)
            && !self.live[at].of_tenant
        {
            let live = self.live.swap_remove(at);
            self.app.blocks().push(live);
        }
    }

    fn give_back(&mut self, bytes: &mut Bytes<'_>) {
        let owner = Self::pick_owner(bytes);
        let wanted = u64::from(bytes.u8()) << 17;
        let before = self.budgets[ROOT].used();
        let room = self.owners[owner].pool.give_back(wanted, Some(Instant::now()));
        let gone = before.saturating_sub(self.budgets[ROOT].used());
        let waits = !self.waits.is_empty();
        assert!(
            waits || room.missing == wanted.saturating_sub(gone),
            "{room:?}: {gone} of {wanted} are gone"
        );
        self.answered(gone);
    }

    fn check_budgets(&self) {
        let [a, b, c] = self.owners.each_ref().map(|owner| owner.pool.stats().physical);
        let pinned = self.pinned.stats().memory.physical;
        let mut held = [a + b + c + pinned, a + b, b, c, pinned];
        for (at, charge) in &self.charges {
            let path: &[usize] = match *at {
                ROOT => &[ROOT],
                ENGINE => &[ROOT, DEVICE, ENGINE],
                other => &[ROOT, other],
            };
            path.iter().for_each(|&node| held[node] += charge.bytes());
        }
        for (at, (budget, held)) in self.budgets.iter().zip(held).enumerate() {
            let used = budget.used();
            // Bytes granted to a wait but not taken, and host memory that cannot be freed, are
            // charged in addition.
            let more = !self.waits.is_empty() || self.faulty_host && (at == ROOT || at == HOST);
            assert!(used == held || more && used > held, "{used} charged, {held} held: {budget:?}");
        }
        check_peaks(&self.most, &self.budgets);
        for device in [0, 1] {
            let missing = rig::missing(&self.sim, DeviceId(device));
            let held = if device == 0 { a + b } else { c };
            // Without mappings the driver rounds allocations up.
            let exact = self.owners[2 * device as usize].pool.info().virtual_memory;
            assert!(
                held == missing || !exact && held < missing,
                "{held} held, the device misses {missing}"
            );
        }
    }

    fn check_accounts(&self) {
        let evictable = self.app.blocks();
        for (at, Owner { pool, tenant, .. }) in self.owners.iter().enumerate() {
            let mine = || self.live.iter().chain(evictable.iter()).filter(|live| live.owner == at);
            let blocks: u64 = mine().map(|live| live.buffer.block().capacity()).sum();
            let stable = self.stable.iter().filter(|stable| stable.owner == at);
            let stable: u64 = stable.map(|stable| stable.block.capacity()).sum();
            let stats = pool.stats();
            assert_eq!(stats.live, blocks + stable, "live bytes of pool {at}: {stats:?}");
            assert_within(&stats);
            let of_tenant = mine().filter(|live| live.of_tenant);
            let of_tenant: u64 = of_tenant.map(|live| live.buffer.block().bytes()).sum();
            assert_eq!(tenant.live(), of_tenant, "live bytes of a tenant");
        }
        debug_assert!(
            self.with_threads || self.pinned.is_consistent(),
            "the books of the pinned pool disagree"
        );
    }

    /// Checks that no two live blocks of a device overlap.
    fn check_ranges(&self) {
        let evictable = self.app.blocks();
        let blocks = self.live.iter().chain(evictable.iter()).map(|live| live.buffer.block());
        let stable = self.stable.iter().map(|stable| stable.block.block());
        assert_apart(blocks.chain(stable).map(Block::range));
    }
}
