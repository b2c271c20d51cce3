//! Tests that the figures of a pool add up: in what is recorded, in errors and in the statistics.
//!
//! Invariants:
//! 1. The physical memory that the events add up to is never above the limit, and what the pool
//!    holds once its operations are done.
//! 2. Live, cached and pending bytes are never more than physical ones in one answer.

use crate::support::{MIB, Random, Rig};
use aquifer_core::{Action, Event, EventSink, MemoryError, PoolStats, Recorder, Tag};
use aquifer_device::{Block, DevicePool, Park, Request};
use aquifer_driver::{Call, sim::Sim};
use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::Duration,
};

/// The code of the driver's refusals.
const OUT_OF_MEMORY: u32 = 2;

/// Adds up the physical memory that is recorded.
#[derive(Debug, Default)]
struct HeldTally {
    held: AtomicU64,
    most: AtomicU64,
    /// The number of releases of more than was there.
    wrong: AtomicU64,
}

impl EventSink for HeldTally {
    fn record(&self, event: &Event) {
        let held = self.held.load(Ordering::Relaxed);
        let held = match event.action {
            Action::Grow => held + event.bytes,
            Action::Reap if event.bytes > held => {
                self.wrong.fetch_add(1, Ordering::Relaxed);
                0
            }
            Action::Reap => held - event.bytes,
            _ => return,
        };
        self.held.store(held, Ordering::Relaxed);
        self.most.fetch_max(held, Ordering::Relaxed);
    }
}

impl HeldTally {
    fn rig(sim: Sim, limit_mib: u64) -> (Arc<Self>, Rig) {
        let tally = Arc::new(Self::default());
        let recorder = Arc::new(Recorder::new(tally.clone()));
        let rig = Rig::on(sim, limit_mib, |config| {
            config.recorder = Some(recorder);
            config.wait = Duration::ZERO;
        });
        (tally, rig)
    }

    #[track_caller]
    fn check(&self, rig: &Rig) {
        let get = |figure: &AtomicU64| figure.load(Ordering::Relaxed);
        assert_eq!(get(&self.wrong), 0, "more is released than was there");
        assert!(get(&self.most) <= rig.budget.limit(), "{} recorded", get(&self.most));
        assert_eq!(get(&self.held), rig.pool.stats().physical, "recorded, and held");
    }
}

fn add_up(stats: &PoolStats) -> bool {
    stats.live + stats.cached + stats.pending <= stats.physical
}

#[track_caller]
fn check_error(error: &MemoryError) {
    if let MemoryError::OutOfMemory(error) = error {
        assert!(error.live + error.cached + error.pending <= error.physical, "{error}");
    }
}

#[test]
fn recorded_memory_is_held_memory_after_every_operation_of_random_programs() {
    for seed in 0..16 {
        let sim = Sim::h200(1).symbolic();
        let (tally, rig) = HeldTally::rig(sim.clone(), 64);
        let mut random = Random::new(seed);
        let streams = [rig.stream(), rig.stream()];
        let (tag, mut blocks) = (Tag::named("parked figures"), Vec::<Block>::new());
        let parkable = rig.pool.parkable(tag).unwrap();
        let (mut stable, mut lodged) = (Vec::new(), Vec::new());
        let mut room = rig.pool.reserve::<u8>(&streams[0], 64 << 20).unwrap();
        for _ in 0..300 {
            let s = &streams[random.index(2)];
            let most = [4096, MIB, 8 * MIB, 24 * MIB][random.index(4)];
            let bytes = 1 + random.below(most);
            let failed = match random.below(12) {
                0..4 => rig.pool.alloc(s, Request::bytes(bytes)).map(|b| blocks.push(b)).err(),
                4 => rig.pool.alloc_stable(s, Request::bytes(bytes)).map(|b| stable.push(b)).err(),
                5 => parkable.alloc(s, Request::bytes(bytes)).map(|b| lodged.push(b)).err(),
                6 => room.commit_to(bytes as usize).err(),
                7 => room.decommit(random.index(64 << 20)..64 << 20).err(),
                8 => rig.pool.trim(random.below(64 * MIB)).err(),
                9 if !parkable.is_parked() => {
                    #[expect(unsafe_code, reason = "parks what nothing uses")]
                    // SAFETY: 1. and 2. nothing uses the blocks.
                    let parked = unsafe { rig.pool.park(tag, Park::discard()) };
                    parked.err()
                }
                9 => rig.pool.resume(tag, None).err(),
                10 => {
                    let call = [Call::HandleCreate, Call::Map][random.index(2)];
                    sim.fail(call, 1 + random.below(3), OUT_OF_MEMORY);
                    None
                }
                _ => {
                    let gone = random.index(blocks.len().max(1));
                    drop(blocks.drain(..).skip(gone).collect::<Vec<_>>());
                    stable.pop();
                    lodged.pop();
                    None
                }
            };
            failed.iter().for_each(check_error);
            assert!(add_up(&rig.pool.stats()), "{:?}", rig.pool.stats());
            tally.check(&rig);
        }
    }
}

#[test]
fn figures_add_up_at_every_moment_while_threads_trade_memory() {
    const THREADS: u64 = 8;
    let (tally, rig) = HeldTally::rig(Sim::h200(1).symbolic(), 64);
    let work = |pool: &DevicePool, seed: u64| {
        let (mut random, s) = (Random::new(seed), pool.stream().unwrap());
        let mut held: Vec<Block> = Vec::new();
        for round in 0..1500 {
            let most = [4096, MIB, 24 * MIB][random.index(3)];
            let bytes = 1 + random.below(most);
            match pool.alloc(&s, Request::bytes(bytes)) {
                Ok(block) => held.push(block),
                Err(error) => check_error(&error),
            }
            if random.below(3) > 0 {
                held.clear();
            }
            if round % 16 == 0 {
                drop(pool.alloc_stable(&s, Request::bytes(bytes)));
            }
            if round % 8 == 0 {
                pool.trim(random.below(64 * MIB)).unwrap();
            }
            let stats = pool.stats();
            assert!(add_up(&stats), "{stats:?}");
        }
    };
    thread::scope(|scope| {
        for seed in 0..THREADS {
            let pool = rig.pool.clone();
            scope.spawn(move || work(&pool, seed));
        }
    });
    rig.pool.trim(0).unwrap();
    tally.check(&rig);
}
