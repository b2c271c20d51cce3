//! Programs over pinned pools: several owners, several threads with magazines, gates that open
//! late, pending copies, failing system and driver calls, and pools that are closed while they have
//! live blocks.
//!
//! The blocks are real memory. The GPU is simulated and runs work only when the program says so.
//! Invariants after every operation:
//!
//! - no two blocks overlap, including pending ones, and every block has the contents that its owner
//!   wrote;
//! - the pool's statistics agree with each other and with the owners';
//! - the budget's use equals what the pools hold, and exceeds it only while memory is stranded or a
//!   pool is closed.
//!
//! At the end everything is freed. A worker thread runs only while the program waits for it, so
//! programs are deterministic.
#![expect(unsafe_code, reason = "calls the allocator trait, queues copies, and looks into blocks")]
#![expect(clippy::panic, reason = "a broken promise is told by a panic")]

use crate::{
    arena::books::Latch,
    program::{Bytes, Process, Program},
    rig::assert_silent,
};
use allocator_api2::alloc::Allocator;
use aquifer_core::{Budget, DeferReuse, Gate, Result};
use aquifer_driver::{Call, DeviceId, Driver, RawEvent, RawStream, sim::Sim};
use aquifer_host::{
    Grow, PinnedAllocator, PinnedConfig, PinnedPool,
    kernel::{Faults, Kernel, SystemCall},
    pool,
    region::{Cause, Host, PageTier, Pinning, end_retired, retry_stranded},
    topology::Topology,
};
use std::{
    alloc::Layout,
    fmt,
    ptr::NonNull,
    sync::{
        Arc, OnceLock,
        mpsc::{Receiver, Sender, channel},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

/// Maximum number of live blocks, so that checking all of them after each operation is cheap.
const MAX_BLOCKS: usize = 48;
/// Owners. Each has one pool at a time, all under one budget.
const OWNERS: usize = 3;
const LIMIT: u64 = 24 << 20;
const GPU: DeviceId = DeviceId(0);

/// Returns the host that all programs share. Reading it and starting its workers would take most of
/// a short program's time.
///
/// # Panics
///
/// If the machine's topology cannot be read, since a program that runs nothing would find nothing.
pub(crate) fn shared_host() -> &'static Host {
    static HOST: OnceLock<Host> = OnceLock::new();
    HOST.get_or_init(|| match Topology::read_under("/".as_ref()) {
        Ok(topology) => Host::new(topology, Kernel::new()),
        Err(error) => panic!("these programs need a machine whose topology can be read: {error}"),
    })
}

/// Threads besides the program's own.
const THREADS: usize = 2;

type Job = Box<dyn FnOnce() + Send>;

/// A thread that runs jobs, to have its own magazines.
struct Worker {
    jobs: Option<Sender<Job>>,
    done: Receiver<()>,
    thread: Option<JoinHandle<()>>,
}

impl Worker {
    fn start() -> Self {
        let (jobs, todo) = channel::<Job>();
        let (tell, done) = channel();
        let work = move || {
            for job in todo {
                job();
                if tell.send(()).is_err() {
                    break;
                }
            }
        };
        Self { jobs: Some(jobs), done, thread: Some(thread::spawn(work)) }
    }

    fn run(&self, job: Job) {
        let sent = self.jobs.as_ref().is_some_and(|jobs| jobs.send(job).is_ok());
        assert!(sent && self.done.recv().is_ok(), "a thread is gone");
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        drop(self.jobs.take());
        if let Some(thread) = self.thread.take() {
            assert!(thread.join().is_ok() || thread::panicking(), "a thread panicked");
        }
    }
}

/// A block's address, for another thread.
struct At(NonNull<u8>);

// SAFETY: 1. the program waits while the other thread uses it.
unsafe impl Send for At {}

pub(crate) struct Machine {
    /// What a program before this one has left. It may have lost a device, whose memory stays.
    stranded_before: u64,
    workers: Vec<Worker>,
    /// The block that was freed last without a closed gate: its address, its owner and its
    /// allocator.
    freed: Option<(NonNull<u8>, usize, PinnedAllocator)>,
    sim: Sim,
    driver: Arc<dyn Driver>,
    stream: RawStream,
    /// Device memory that copies write to.
    target: u64,
    faults: Arc<Faults>,
    /// Whether a fault was planned and not cleared. Statistics may then be below the budget's use.
    faulty: bool,
    host: Host,
    /// Bytes of a base page.
    page: u64,
    budget: Budget,
    pools: Vec<Owner>,
    /// Allocators of closed pools.
    closed: Vec<PinnedAllocator>,
    blocks: Vec<Block>,
    /// Blocks that were freed with closed gates.
    pending: Vec<Block>,
    latches: Vec<Arc<Latch>>,
    next: u8,
}

struct Owner {
    pool: PinnedPool,
    /// Frees that the pool must have refused.
    refused: u64,
}

struct Block {
    at: NonNull<u8>,
    layout: Layout,
    stamp: u8,
    allocator: PinnedAllocator,
    /// Its owner. If the allocator is open, the pool is the owner's present one.
    owner: usize,
    gates: Vec<Arc<dyn Gate>>,
}

/// A gate that opens when a copy is complete.
struct Landed {
    driver: Arc<dyn Driver>,
    event: RawEvent,
}

impl Gate for Landed {
    fn is_open(&self) -> bool {
        self.driver.event_query(self.event) == Ok(true)
    }
    fn wait(&self, _deadline: Option<Instant>) -> Result<bool> {
        Ok(self.is_open())
    }
}

impl Drop for Landed {
    fn drop(&mut self) {
        // SAFETY: 1. created for this gate only.
        let _destroyed = unsafe { self.driver.event_destroy(self.event) };
    }
}

impl fmt::Debug for Landed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Landed").field(&self.event).finish()
    }
}

impl Block {
    /// Returns the parts that are written and checked: both ends, and the middle.
    fn parts(&self) -> [std::ops::Range<usize>; 3] {
        let len = self.layout.size();
        [0..len.min(48), len / 2..(len / 2 + 16).min(len), len.saturating_sub(48)..len]
    }

    fn write(&self) {
        for at in self.parts().into_iter().flatten() {
            // SAFETY: 1. inside the block, which is live and used by its owner only.
            unsafe { self.at.add(at).write(self.stamp) };
        }
    }

    fn check(&self) {
        for at in self.parts().into_iter().flatten() {
            // SAFETY: 1. inside the block, which is live, or pending and therefore still mapped.
            let byte = unsafe { self.at.add(at).read() };
            assert_eq!(
                byte, self.stamp,
                "byte {at} of {:?} at {:p} was overwritten",
                self.layout, self.at
            );
        }
    }

    fn is_held_back(&self) -> bool {
        self.gates.iter().any(|gate| !gate.is_open())
    }

    fn span(&self) -> (usize, usize) {
        let start = self.at.addr().get();
        (start, start + self.layout.size())
    }
}

impl Program for Machine {
    const PROCESS: Process = Process::Alone;

    fn open(bytes: &mut Bytes<'_>) -> Option<Self> {
        let stranded_before = retry_stranded();
        let shared = shared_host();
        let sim = Sim::h200(1).symbolic().stepped();
        let driver = sim.driver();
        let stream = driver.stream_create(GPU, 0).ok()?;
        let target = driver.mem_alloc(GPU, LIMIT).ok()?;
        let faults = Arc::new(Faults::new());
        let mut host = shared.clone().with_driver(driver.clone(), GPU);
        host.kernel = Kernel::with_faults(faults.clone());
        let budget = Budget::new("fuzz", LIMIT);
        let mut machine = Self {
            stranded_before,
            workers: (0..THREADS).map(|_| Worker::start()).collect(),
            freed: None,
            sim,
            driver,
            stream,
            target,
            faults,
            faulty: false,
            page: host.topology.page_size() as u64,
            host,
            budget,
            pools: Vec::new(),
            closed: Vec::new(),
            blocks: Vec::new(),
            pending: Vec::new(),
            latches: Vec::new(),
            next: 1,
        };
        for _ in 0..OWNERS {
            let owner = machine.open_pool(bytes.u8())?;
            machine.pools.push(owner);
        }
        Some(machine)
    }

    fn step(&mut self, bytes: &mut Bytes<'_>) {
        match bytes.choice(23) {
            20 => {
                // Ends a thread and starts another one.
                let which = bytes.below(THREADS);
                self.workers[which] = Worker::start();
            }
            21 => {
                end_retired();
            }
            22 => self.batch(bytes),
            0..=5 => self.allocate(bytes),
            6..=8 => self.free(bytes),
            9 | 10 => self.resize(bytes),
            11 | 12 => self.copy(bytes),
            13 => self.latch(bytes),
            14 => self.open_gates(bytes),
            15 => self.plan_fault(bytes),
            16 => self.trim(bytes),
            17 => self.free_wrongly(bytes),
            18 => self.replace_pool(bytes),
            _ => {
                let owner = bytes.below(OWNERS);
                let _warmed = self.pools[owner].pool.warm(usize::from(bytes.choice(8)) << 20);
            }
        }
    }

    fn check(&mut self) {
        self.pending.retain(Block::is_held_back);
        self.blocks.iter().chain(&self.pending).for_each(Block::check);
        let mut physical = 0;
        for (owner, Owner { pool, refused }) in self.pools.iter().enumerate() {
            debug_assert!(pool.is_consistent(), "the books of owner {owner} disagree");
            let stats = pool.stats();
            let mine = || self.blocks.iter().filter(|b| b.owner == owner && b.allocator.is_open());
            assert_eq!(stats.memory.blocks, mine().count() as u64);
            assert_eq!(
                stats.memory.requested,
                mine().map(|block| block.layout.size() as u64).sum()
            );
            assert_eq!(
                stats.memory.live + stats.memory.cached + stats.memory.pending,
                stats.memory.physical
            );
            assert_eq!(stats.refused_frees, *refused);
            physical += stats.memory.physical;
        }
        let used = self.budget.used();
        assert!(used <= LIMIT && physical <= used, "{physical} held, {used} charged");
        let lingers =
            self.blocks.iter().chain(&self.pending).any(|block| !block.allocator.is_open());
        if !self.faulty && !lingers {
            pool::sweep();
            assert_eq!(self.budget.used(), physical, "charged is not held");
        }
        assert_silent(&self.sim);
    }

    fn finish(mut self) {
        self.faults.clear();
        self.sim.clear_failures();
        for block in std::mem::take(&mut self.blocks) {
            block.check();
            // SAFETY: 1. live, with its own layout, by a copy of its own allocator.
            unsafe { block.allocator.deallocate(block.at, block.layout) };
            if block.is_held_back() {
                self.pending.push(block);
            }
        }
        self.check();
        self.sim.run_all();
        self.latches.iter().for_each(|latch| latch.open());
        self.pending.clear();
        let waited = self.driver.device_synchronize(GPU);
        assert!(waited.is_ok(), "{waited:?}");
        self.pools.clear();
        pool::sweep();
        let stranded = retry_stranded();
        assert!(stranded <= self.stranded_before, "{stranded} bytes would not be given back");
        assert_eq!(self.budget.used(), 0, "something is charged that nobody holds");
        let left = self.sim.outstanding();
        assert_eq!((left.registrations, left.host_allocations, left.events), (0, 0, 0), "{left}");
        assert_silent(&self.sim);
    }
}

impl Machine {
    fn open_pool(&self, settings: u8) -> Option<Owner> {
        let mut config = PinnedConfig::default();
        config.chunk = (2 << 20) << (settings & 1);
        config.registration = 2 << 20;
        config.patience = Duration::ZERO;
        config.pages = PageTier::Base;
        config.magazines = settings >> 5 & 3 != 0;
        config.grow = if settings >> 3 & 3 == 3 { Grow::WhenWarmed } else { Grow::Now };
        config.pinning = match settings >> 1 & 3 {
            0 => Pinning::Off,
            1 => Pinning::Required,
            _ => Pinning::Preferred,
        };
        let pool = PinnedPool::new(&self.host, &self.budget, config).ok()?;
        Some(Owner { pool, refused: 0 })
    }

    /// Returns a layout of up to 4 MiB, small in most cases.
    fn layout(bytes: &mut Bytes<'_>) -> Layout {
        let size = (usize::from(bytes.small()) << bytes.choice(7)).max(1);
        Layout::from_size_align(size, 1 << bytes.choice(14)).unwrap_or(Layout::new::<u64>())
    }

    fn pick(&self, bytes: &mut Bytes<'_>) -> Option<usize> {
        usize::from(bytes.u8()).checked_rem(self.blocks.len())
    }

    fn allocate(&mut self, bytes: &mut Bytes<'_>) {
        let (owner, layout) = (bytes.below(OWNERS), Self::layout(bytes));
        let thread = bytes.choice(THREADS as u8 + 1);
        self.take(owner, layout, thread, 1);
    }

    /// Runs `job` on the program's own thread, which is 0, or on another.
    fn on(&self, thread: u8, job: impl FnOnce() + Send + 'static) {
        match usize::from(thread).checked_sub(1).and_then(|which| self.workers.get(which)) {
            Some(worker) => worker.run(Box::new(job)),
            None => job(),
        }
    }

    /// Frees live blocks on a thread.
    fn give(&self, blocks: &[Block], thread: u8) {
        let blocks: Vec<_> =
            blocks.iter().map(|block| (At(block.at), block.layout, block.allocator)).collect();
        self.on(thread, move || {
            for (At(at), layout, allocator) in blocks {
                // SAFETY: 1. live, with its own layout, by a copy of its own allocator.
                unsafe { allocator.deallocate(at, layout) };
            }
        });
    }

    /// Allocates and frees many blocks of one size, more than a magazine holds.
    fn batch(&mut self, bytes: &mut Bytes<'_>) {
        let (owner, layout) = (bytes.below(OWNERS), Self::layout(bytes));
        let (taker, giver) = (bytes.choice(THREADS as u8 + 1), bytes.choice(THREADS as u8 + 1));
        let before = self.blocks.len();
        let count = match layout.size() {
            0..=0x1_0000 => 48,
            // More than the magazines keep of this size, so that some pass through the depot.
            0x1_0001..=0x10_0000 => 6,
            _ => 0,
        };
        self.take(owner, layout, taker, count);
        let blocks = self.blocks.split_off(before);
        blocks.iter().for_each(Block::check);
        self.give(&blocks, giver);
    }

    /// Allocates `count` blocks on a thread.
    fn take(&mut self, owner: usize, layout: Layout, thread: u8, count: usize) {
        let count = count.min((2 * MAX_BLOCKS).saturating_sub(self.blocks.len()));
        let allocator = self.pools[owner].pool.allocator();
        let (tell, answers) = channel();
        self.on(thread, move || {
            for block in (0..count).map_while(|_| allocator.allocate(layout).ok()) {
                let _told = tell.send((At(block.cast()), block.len()));
            }
        });
        answers.into_iter().for_each(|(At(block), len)| self.keep(owner, layout, block, len));
    }

    fn keep(&mut self, owner: usize, layout: Layout, block: NonNull<u8>, len: usize) {
        let allocator = self.pools[owner].pool.allocator();
        assert_eq!(len, layout.size());
        assert!(block.addr().get().is_multiple_of(layout.align()), "not aligned to {layout:?}");
        let stamp = self.next;
        self.next = self.next.wrapping_add(1);
        let block = Block { at: block, layout, stamp, allocator, owner, gates: Vec::new() };
        let (start, end) = block.span();
        for other in
            self.blocks.iter().chain(self.pending.iter().filter(|block| block.is_held_back()))
        {
            let (from, to) = other.span();
            assert!(to <= start || end <= from, "two blocks overlap");
        }
        block.write();
        self.blocks.push(block);
    }

    fn free(&mut self, bytes: &mut Bytes<'_>) {
        let (which, thread) = (self.pick(bytes), bytes.choice(THREADS as u8 + 1));
        let Some(which) = which else { return };
        let block = self.blocks.swap_remove(which);
        block.check();
        self.give(std::slice::from_ref(&block), thread);
        if block.gates.is_empty() {
            self.freed = Some((block.at, block.owner, block.allocator));
        } else {
            self.pending.push(block);
        }
    }

    fn resize(&mut self, bytes: &mut Bytes<'_>) {
        let (which, new) = (self.pick(bytes), Self::layout(bytes));
        let Some(block) = which.map(|which| &mut self.blocks[which]) else { return };
        let old = block.layout;
        let kept = block.parts()[0].end.min(new.size());
        // SAFETY: 1. live, with its own layout; `grow` gets a size that is no smaller, `shrink` a
        // smaller one.
        let answer = unsafe {
            if new.size() >= old.size() {
                block.allocator.grow(block.at, old, new)
            } else {
                block.allocator.shrink(block.at, old, new)
            }
        };
        let Ok(resized) = answer else { return };
        let moved = resized.cast::<u8>() != block.at;
        let before = Block {
            at: block.at,
            layout: old,
            stamp: block.stamp,
            allocator: block.allocator,
            owner: block.owner,
            gates: if moved { std::mem::take(&mut block.gates) } else { Vec::new() },
        };
        (block.at, block.layout) = (resized.cast(), new);
        for at in 0..kept {
            assert_eq!(
                // SAFETY: 1. inside the block at its new size.
                unsafe { block.at.add(at).read() },
                block.stamp,
                "the common part was not kept"
            );
        }
        if block.gates.is_empty() {
            block.stamp = block.stamp.wrapping_add(101);
        }
        // With a pending copy the bytes must not change. Writes to the rest use the same stamp.
        block.write();
        if before.is_held_back() {
            self.pending.push(before);
        }
    }

    /// Queues a copy of a block to the device and registers its end as a gate of the block.
    fn copy(&mut self, bytes: &mut Bytes<'_>) {
        let Some(which) = self.pick(bytes) else { return };
        let block = &mut self.blocks[which];
        let Ok(event) = self.driver.event_create(GPU) else { return };
        // SAFETY: 1. the block stays until the gate opens, which is what is tested; the target
        // stays until the end. 2. the block is not written meanwhile, and copies to the target are
        // ordered on one stream.
        let copied = unsafe {
            self.driver.copy_to_device(self.stream, self.target, block.at, block.layout.size())
        };
        let recorded = self.driver.event_record(event, self.stream);
        assert!(copied.is_ok() && recorded.is_ok(), "{copied:?} {recorded:?}");
        let gate: Arc<dyn Gate> = Arc::new(Landed { driver: self.driver.clone(), event });
        // Any address inside the block is valid.
        // SAFETY: 1. inside the block.
        let inside = unsafe { block.at.add(usize::from(bytes.u16()) % block.layout.size()) };
        let noted = block.allocator.defer(inside, gate.clone());
        assert!(noted.is_ok(), "{noted:?}");
        block.gates.push(gate);
    }

    fn latch(&mut self, bytes: &mut Bytes<'_>) {
        let Some(which) = self.pick(bytes) else { return };
        let block = &mut self.blocks[which];
        let latch = Arc::new(Latch::default());
        let noted = block.allocator.defer(block.at, latch.clone());
        assert!(noted.is_ok(), "{noted:?}");
        block.gates.push(latch.clone());
        self.latches.push(latch);
    }

    fn open_gates(&mut self, bytes: &mut Bytes<'_>) {
        for _ in 0..bytes.choice(4) {
            self.sim.step(self.stream);
        }
        if let Some(which) = usize::from(bytes.u8()).checked_rem(self.latches.len()) {
            self.latches.swap_remove(which).open();
        }
    }

    fn plan_fault(&mut self, bytes: &mut Bytes<'_>) {
        const CALLS: [Call; 4] =
            [Call::HostRegister, Call::HostAlloc, Call::HostUnregister, Call::HostFree];
        let nth = 1 + u64::from(bytes.choice(4));
        match bytes.choice(21) {
            0..=2 => {
                self.faults.clear();
                self.sim.clear_failures();
                return;
            }
            which @ 3..=15 => {
                let errno = [12, 22, 1, 14][usize::from(bytes.choice(4))];
                let call = SystemCall::ALL[usize::from(which) - 3];
                if bytes.flag() {
                    self.faults.fail(call, nth, errno);
                } else {
                    self.faults.fail_from(call, nth, errno);
                }
            }
            which => self.sim.fail(CALLS[usize::from(which) % CALLS.len()], nth, 2),
        }
        self.faulty = true;
    }

    fn trim(&mut self, bytes: &mut Bytes<'_>) {
        let owner = bytes.below(OWNERS);
        let pool = &self.pools[owner].pool;
        let keep = usize::from(bytes.choice(4)) << 20;
        let before = pool.stats().memory;
        if let Ok(given) = pool.trim(keep) {
            let after = pool.stats().memory;
            assert_eq!(before.physical - given, after.physical);
            assert!(given == 0 || after.cached >= keep as u64, "less is left than was to be kept");
        }
        self.check_reports();
    }

    /// Checks that the placement reports account for each page of the pools once: on the node that
    /// the kernel reports, or as unknown if it refuses.
    fn check_reports(&self) {
        for Owner { pool, .. } in &self.pools {
            let reports = pool.reports();
            let bytes: u64 = reports.iter().map(|report| report.bytes).sum();
            assert_eq!(bytes, pool.stats().memory.physical, "a region has no report");
            for report in reports {
                let placement = &report.placement;
                let pages = placement.on_node() + placement.elsewhere() + placement.unknown;
                assert_eq!(pages, report.bytes / self.page, "pages are missing in {report:?}");
                let refused = report.shortfalls.iter().any(
                    |missed| matches!(missed, Cause::System(error) if error.call == "move_pages"),
                );
                assert!(!refused || placement.unknown > 0, "an invented node in {report:?}");
            }
        }
    }

    /// Frees what is not a live block with that layout. The pool must refuse it without effect.
    fn free_wrongly(&mut self, bytes: &mut Bytes<'_>) {
        let owner = bytes.below(OWNERS);
        let allocator = self.pools[owner].pool.allocator();
        let mut stack = [0u8; 16];
        let (choice, which) = (bytes.choice(6), self.pick(bytes));
        let small = Layout::new::<[u64; 2]>();
        // Freed once and not allocated since, in a magazine or not.
        let (blocks, pending) =
            (self.blocks.iter(), self.pending.iter().filter(|block| block.is_held_back()));
        let freed = self.freed.take().filter(|(at, ..)| {
            let at = at.addr().get();
            !blocks.chain(pending).map(Block::span).any(|(start, end)| (start..end).contains(&at))
        });
        if let (5, Some((at, of, by))) = (choice, freed)
            && by.is_open()
        {
            let job = At(at);
            self.on(bytes.choice(THREADS as u8 + 1), move || {
                let At(at) = { job };
                // SAFETY: 1. violated on purpose: it is already freed, and the allocator must
                // refuse it without touching memory.
                unsafe { by.deallocate(at, Layout::new::<u8>()) };
            });
            self.pools[of].refused += 1;
            return;
        }
        let (wrong, layout) =
            match (choice, which.map(|which| &self.blocks[which]), self.pending.last()) {
                // Inside a block.
                (0, Some(block), _) if block.layout.size() > 32 => {
                    // SAFETY: 1. inside the block.
                    (unsafe { block.at.add(16) }, small)
                }
                // Already freed, in any pool.
                (1, _, Some(pending)) if pending.is_held_back() => (pending.at, small),
                // A block of another pool.
                (2, Some(block), _) if block.allocator.is_open() && block.owner != owner => {
                    (block.at, small)
                }
                // A block of this pool with a layout that is too long.
                (3, Some(block), _) if block.owner == owner && block.allocator.is_open() => {
                    (block.at, Layout::new::<[u64; 1 << 20]>())
                }
                // Memory of no pool.
                _ => (NonNull::from(&mut stack).cast(), small),
            };
        // SAFETY: 1. violated on purpose: it is not a live block of the allocator with that layout,
        // and the allocator must refuse it without touching memory.
        unsafe { allocator.deallocate(wrong, layout) };
        self.pools[owner].refused += 1;
        // A closed pool must not allocate.
        if let Some(stale) = usize::from(bytes.u8()).checked_rem(self.closed.len()) {
            let stale = self.closed[stale];
            assert!(stale.allocate(Layout::new::<u64>()).is_err());
            // The body of a closed pool may be reused by a later pool, which owns this block.
            if let Some(block) =
                which.map(|which| &self.blocks[which]).filter(|block| block.allocator.is_open())
            {
                // SAFETY: 1. violated on purpose: the block belongs to an open pool, and the closed
                // pool's allocator must refuse it.
                unsafe { stale.deallocate(block.at, block.layout) };
            }
        }
    }

    fn replace_pool(&mut self, bytes: &mut Bytes<'_>) {
        let owner = bytes.below(OWNERS);
        let Some(fresh) = self.open_pool(bytes.u8()) else { return };
        let old = std::mem::replace(&mut self.pools[owner], fresh);
        self.closed.push(old.pool.allocator());
    }
}
