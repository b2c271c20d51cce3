//! Programs over two device pools and a pinned pool under a tree of budgets that is too small for
//! them, and an application that evicts, on the simulated GPU with its oracle.
//!
//! The bytes determine the limits of the tree, the allocations, which driver calls fail, and when
//! queued work runs. Invariants after every operation:
//!
//! - each budget's use equals what its pools hold, and never exceeded the limit;
//! - the missing memory of the device equals what its pools hold;
//! - the oracle reports nothing;
//! - if work runs as it is queued and no call fails, an allocation fails only if reclaiming all
//!   idle memory would not make room for it.
#![expect(clippy::expect_used, clippy::panic, reason = "a broken promise is told by a panic")]

use crate::{
    pinned::shared_host,
    program::{Bytes, Process, Program},
    rig::{
        App, IDLE, access, assert_empty, assert_returned, assert_silent, begin_step, check_peaks,
        missing, simulated,
    },
};
use aquifer_core::{Budget, MemoryError, OutOfMemory, budget::HookRegistration};
use aquifer_device::{Adoption, Block, DevicePool, PoolConfig, Request};
use aquifer_driver::{Access, Call, DeviceId, sim::Sim};
use aquifer_host::{PinnedBuf, PinnedConfig, PinnedPool, pool};
use aquifer_stream::Stream;
use std::{
    sync::Arc,
    time::{Duration, Instant},
};

const MIB: u64 = 1 << 20;
/// The device's memory.
const CAPACITY: u64 = 64 * MIB;
/// Calls that may fail during a program without leaving anything behind.
const FAULTS: [Call; 7] = [
    Call::HandleCreate,
    Call::Map,
    Call::SetAccess,
    Call::Unmap,
    Call::EventRecord,
    Call::StreamWaitEvent,
    Call::MemAlloc,
];

/// A pool, and what the program holds of it.
struct Owner {
    pool: DevicePool,
    streams: Vec<Stream>,
    live: Vec<(Block, usize)>,
}

pub(crate) struct World {
    sim: Sim,
    /// The budgets of the root, the device, the second pool below it, and the pinned pool.
    budgets: [Budget; 4],
    /// The maximum of each budget's use since the last operation.
    most: [u64; 4],
    owners: [Owner; 2],
    pinned: PinnedPool,
    buffers: Vec<PinnedBuf<u8>>,
    app: Arc<App<Block>>,
    _registration: HookRegistration,
    /// Whether all idle memory can be reclaimed at once.
    exact: bool,
}

impl Program for World {
    const PROCESS: Process = Process::Alone;

    fn open(bytes: &mut Bytes<'_>) -> Option<Self> {
        let mapping = bytes.choice(4) != 0;
        let sim = simulated(mapping).symbolic().capacity(CAPACITY);
        let eager = bytes.flag();
        let sim = if eager { sim } else { sim.seeded(bytes.u64()) };
        let mut limit = || (u64::from(bytes.choice(24)) + 4) << 21;
        let root = Budget::new("the machine", limit());
        let device = root.child("the device", limit());
        let tenant = device.child("the tenant", limit());
        let host = root.child("the host", limit());
        let budgets = [root, device, tenant, host];
        let mut open = |budget: &Budget| {
            let mut config = PoolConfig::with_budget(budget.clone());
            config.adoption = bytes.pick([Adoption::Never, Adoption::DoneOnly, Adoption::Wait]);
            config.wait = Duration::from_millis(u64::from(bytes.choice(3)));
            config.slack = if bytes.choice(4) == 0 { 6 } else { 17 };
            let pool = DevicePool::open(sim.driver(), DeviceId(0), config).expect(IDLE);
            let streams = (0..2).map(|_| pool.stream().expect(IDLE)).collect();
            Owner { pool, streams, live: Vec::new() }
        };
        let owners = [open(&budgets[1]), open(&budgets[2])];
        let mut config = PinnedConfig::default();
        config.chunk = 2 << 20;
        config.patience = Duration::from_millis(u64::from(bytes.choice(3)));
        let host = shared_host().clone().with_driver(sim.driver(), DeviceId(0));
        let pinned = PinnedPool::new(&host, &budgets[3], config)
            .expect("a configuration that can be followed");
        let cost = Duration::from_micros(u64::from(bytes.u16()));
        let app = Arc::new(App::new(cost, |block: &Block| block.capacity()));
        let registration = budgets[usize::from(bytes.choice(3))].on_need(&app);
        let most = budgets.each_ref().map(Budget::limit);
        let (buffers, exact) = (Vec::new(), eager && mapping);
        Some(Self {
            sim,
            budgets,
            most,
            owners,
            pinned,
            buffers,
            app,
            _registration: registration,
            exact,
        })
    }

    fn step(&mut self, bytes: &mut Bytes<'_>) {
        begin_step(&mut self.most, &self.budgets);
        let at = bytes.below(2);
        match bytes.choice(16) {
            0..5 => self.alloc(at, bytes),
            5 | 6 => drop(bytes.take(&mut self.owners[at].live)),
            7 => self.cross(at, bytes),
            8 => self.app.blocks().extend(self.owners[at].live.pop().map(|(block, _)| block)),
            9 => self.pin(bytes),
            10 => drop(self.buffers.pop()),
            11 => {
                let _ = self.owners[at].pool.trim(u64::from(bytes.u8()) << 19);
            }
            12 => {
                // Out of memory: a code that each of these calls may return.
                let call = bytes.pick(FAULTS);
                self.sim.fail(call, u64::from(bytes.choice(6)) + 1, 2);
                self.exact = false;
            }
            13 => {
                let deadline = bytes.pick([None, Some(Instant::now())]);
                let wanted = u64::from(bytes.u8()) << 18;
                let before = self.budgets[0].used();
                let room = self.owners[at].pool.give_back(wanted, deadline);
                assert_eq!(room.missing, wanted.saturating_sub(before - self.budgets[0].used()));
            }
            14 => {
                let budget = &self.budgets[bytes.below(4)];
                budget.set_limit((u64::from(bytes.choice(32)) + 1) << 21);
            }
            _ => {
                let budget = &self.budgets[bytes.below(4)];
                let room =
                    budget.shrink((u64::from(bytes.choice(32)) + 1) << 21, Some(Instant::now()));
                assert_eq!(room.missing, budget.used().saturating_sub(budget.limit()));
            }
        }
    }

    fn check(&mut self) {
        assert_silent(&self.sim);
        let [first, second] = self.owners.each_ref().map(|owner| owner.pool.stats().physical);
        let pinned = self.pinned.stats().memory.physical;
        let held = [first + second + pinned, first + second, second, pinned];
        assert_eq!(
            self.budgets.each_ref().map(Budget::used),
            held,
            "what is charged is what is held"
        );
        let missing = missing(&self.sim, DeviceId(0));
        // Without mappings the driver rounds allocations up.
        let exact = self.owners[0].pool.info().virtual_memory;
        assert!(first + second <= missing, "more is held than the device misses");
        assert!(!exact || first + second == missing, "what is held is what the device misses");
        check_peaks(&self.most, &self.budgets);
        assert!(self.pinned.is_consistent(), "the books of the pinned pool disagree");
    }

    fn finish(self) {
        self.sim.clear_failures();
        let Self { sim, budgets, mut owners, pinned, buffers, app, .. } = self;
        drop(buffers);
        app.blocks().clear();
        for Owner { streams, live, .. } in &mut owners {
            live.clear();
            streams.iter().for_each(|stream| stream.synchronize().expect(IDLE));
        }
        owners.iter().for_each(|owner| assert_empty(&owner.pool));
        drop((owners, pinned));
        while budgets[3].used() > 0 {
            pool::sweep();
        }
        assert_eq!(budgets.each_ref().map(Budget::used), [0; 4], "a charge was lost");
        assert_returned(&sim);
    }
}

impl World {
    fn alloc(&mut self, at: usize, bytes: &mut Bytes<'_>) {
        let Owner { pool, streams, live } = &mut self.owners[at];
        let size = (u64::from(bytes.u8()) + 1) << (10 + bytes.choice(9));
        let stream = usize::from(bytes.flag());
        let request = Request::bytes(size);
        let answer = match bytes.choice(8) {
            0 => {
                // Freed at once, and therefore about to be released.
                pool.alloc_stable(&streams[stream], request).map(|_freed| None)
            }
            _ => pool.alloc(&streams[stream], request).map(Some),
        };
        match answer {
            Ok(None) => {}
            Ok(Some(block)) => {
                // A new block can be used at once.
                access(&self.sim, &streams[stream], &block, Access::Write);
                live.push((block, stream));
            }
            Err(MemoryError::OutOfMemory(error)) => {
                if let Some(refused) = error.refused {
                    assert!(
                        self.budgets.iter().any(|budget| budget.name() == refused.budget),
                        "{refused}"
                    );
                }
                self.refused(at, size, &error);
            }
            Err(MemoryError::Driver(_)) => {}
            Err(other) => panic!("{other:?} for {size} bytes"),
        }
    }

    /// Checks a refused allocation: with all idle memory released there is no room for it either.
    fn refused(&self, at: usize, size: u64, error: &OutOfMemory) {
        if !self.exact {
            return;
        }
        for Owner { pool, .. } in &self.owners {
            pool.trim(0).expect("no fault is planned");
        }
        let whole = size.next_multiple_of(2 * MIB);
        let left = self.owners[at].pool.budget().remaining();
        let free = CAPACITY - missing(&self.sim, DeviceId(0));
        assert!(whole > left.min(free), "{left} are left of the budget, and {error}");
    }

    /// Uses a block on the other stream of the pool.
    fn cross(&mut self, at: usize, bytes: &mut Bytes<'_>) {
        let Owner { streams, live, .. } = &self.owners[at];
        let Some(at) = bytes.index(live.len()) else { return };
        let (block, home) = &live[at];
        let stream = &streams[1 - home];
        if let Ok(used) = block.prepare(stream, Access::ReadWrite) {
            access(&self.sim, stream, block, Access::ReadWrite);
            let _ = used.finish();
        }
    }

    fn pin(&mut self, bytes: &mut Bytes<'_>) {
        let size = (usize::from(bytes.u8()) + 1) << 14;
        match self.pinned.buffer::<u8>(size) {
            Ok(buffer) => self.buffers.push(buffer),
            Err(MemoryError::OutOfMemory(error)) => {
                assert!(error.refused.is_some(), "{error}");
            }
            Err(other) => panic!("{other:?} for {size} pinned bytes"),
        }
    }
}
