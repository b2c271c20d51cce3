//! Programs that run under a plan: a random program is recorded and planned, and then runs several
//! times with some of its operations left out, resized, joined by others, or late.
//!
//! Invariants after every operation: live blocks do not overlap, each is its stream's at once, the
//! pool's account agrees with a model, held bytes with charged bytes, hits and strays with
//! allocations. The oracle reports nothing. At the end everything is returned.
#![expect(clippy::expect_used, reason = "a broken promise is told by a panic")]

use crate::{
    program::{Bytes, MAX_OPS, not_beside_alone},
    rig::{IDLE, Open, Rig, access, assert_apart, assert_returned, assert_within, simulated, went},
};
use aquifer_core::{Budget, random::SplitMix64};
use aquifer_device::{Adoption, Block, PoolConfig, Request};
use aquifer_driver::{Access, Call, Operand};
use aquifer_formats::plan::{NEVER, Plan, PlanBlock, PlanOptions};
use std::{collections::BTreeMap, sync::Arc, time::Duration};

/// The device's memory.
const CAPACITY: u64 = 256 << 20;
/// Most operations of a recorded program.
const MOST: usize = 400;
/// Calls that may fail during a program, of those that can be retried.
const FAULTS: [Call; 7] = [
    Call::HandleCreate,
    Call::Map,
    Call::EventCreate,
    Call::EventRecord,
    Call::EventQuery,
    Call::StreamWaitEvent,
    Call::StreamIsCapturing,
];

/// An operation of the recorded program, about one of its blocks.
#[derive(Clone, Copy)]
enum Act {
    Allocate { id: usize, bytes: u64, stream: usize },
    Use { id: usize, stream: usize },
    Free { id: usize },
}

struct World {
    rig: Rig,
    /// Blocks by number, with their streams.
    live: BTreeMap<usize, (Block, usize)>,
    /// Allocations, and those of blocks that have been freed.
    allocations: u64,
}

/// Runs the program that `bytes` encodes.
pub(crate) fn run(bytes: &[u8]) {
    let _not_beside_alone = not_beside_alone();
    let mut bytes = Bytes::new(bytes);
    let streams = usize::from(bytes.choice(4)) + 1;
    let (rounds, per_cent) = (bytes.choice(5) + 1, bytes.pick([0, 1, 5, 20]));
    let setup = bytes.clone();
    (0..8).for_each(|_| _ = bytes.u8());
    let acts = record(&mut bytes, streams);
    let Some(plan) = plan(&acts) else { return };
    let mut world = World::new(&mut setup.clone(), streams, plan);
    let mut numbers = Numbers(SplitMix64::new(setup.clone().u64()));
    let mut left = MAX_OPS;
    for round in 0..usize::from(rounds) {
        for act in changed(&acts, per_cent, &mut numbers) {
            if left == 0 {
                break;
            }
            left -= 1;
            world.act(act, round, &mut numbers);
            if per_cent > 0 && numbers.below(16) == 0 {
                world.disturb(&mut numbers);
            }
            world.check();
        }
    }
    world.finish();
}

struct Numbers(SplitMix64);

impl Numbers {
    fn below(&mut self, end: u64) -> u64 {
        self.0.next_u64() % end
    }

    fn index(&mut self, len: usize) -> usize {
        self.below(len.max(1) as u64) as usize
    }
}

/// Reads the recorded program.
fn record(bytes: &mut Bytes<'_>, streams: usize) -> Vec<Act> {
    let (mut acts, mut live, mut next) = (Vec::new(), Vec::new(), 0);
    bytes.steps(MOST, |bytes| match bytes.choice(8) {
        0..=3 => {
            let size = u64::from(bytes.small()) * 16 + 1;
            let stream = usize::from(bytes.choice(streams as u8));
            acts.push(Act::Allocate { id: next, bytes: size, stream });
            live.push(next);
            next += 1;
        }
        4 if !live.is_empty() => {
            let id = live[usize::from(bytes.u8()) % live.len()];
            acts.push(Act::Use { id, stream: usize::from(bytes.choice(streams as u8)) });
        }
        5..=7 if !live.is_empty() => {
            let id = live.swap_remove(usize::from(bytes.u8()) % live.len());
            acts.push(Act::Free { id });
        }
        _ => {}
    });
    acts
}

fn plan(acts: &[Act]) -> Option<Arc<Plan>> {
    let mut blocks: Vec<PlanBlock> = Vec::new();
    for (step, act) in (0..).zip(acts) {
        match *act {
            Act::Allocate { bytes, stream, .. } => blocks.push(PlanBlock {
                bytes,
                first: step,
                end: NEVER,
                stream: stream as u32,
                shared: false,
            }),
            Act::Use { id, stream } => blocks[id].shared |= blocks[id].stream != stream as u32,
            Act::Free { id } => blocks[id].end = step,
        }
    }
    let mut options = PlanOptions::default();
    options.tries = 2;
    let plan = (!blocks.is_empty()).then(|| Plan::make(&blocks, &options))?;
    Some(Arc::new(plan.expect("blocks of a program")))
}

/// Changes some of the operations.
fn changed(acts: &[Act], per_cent: u64, numbers: &mut Numbers) -> Vec<Act> {
    let mut result: Vec<Act> = Vec::with_capacity(acts.len());
    let mut later = Vec::new();
    for &act in acts {
        let changes = numbers.below(100) < per_cent;
        match act {
            Act::Allocate { id, bytes, stream } if changes => match numbers.below(4) {
                0 => {
                    // A number of its own, under which nothing frees it.
                    let more = Act::Allocate { id: acts.len() + id, bytes, stream };
                    result.extend([more, act]);
                }
                1 => {}
                2 => {
                    let bytes = bytes + numbers.below(1 << 16);
                    result.push(Act::Allocate { id, bytes, stream });
                }
                _ => later.push(act),
            },
            Act::Free { .. } if changes => later.push(act),
            _ => result.push(act),
        }
        if !later.is_empty() && numbers.below(4) == 0 {
            result.append(&mut later);
        }
    }
    result.append(&mut later);
    result
}

impl World {
    fn new(bytes: &mut Bytes<'_>, streams: usize, plan: Arc<Plan>) -> Self {
        let sim = simulated(bytes.choice(8) != 0).capacity(CAPACITY).symbolic();
        let sim = if bytes.flag() { sim.seeded(bytes.u64()) } else { sim.stepped() };
        // Sometimes hardly more than the plan.
        let more = (u64::from(bytes.choice(8)) + 1) << (19 + u64::from(bytes.choice(4)));
        let limit = plan.top().next_multiple_of(2 << 20) + more;
        let budget = Budget::new("the fuzzed device", limit);
        let mut config = PoolConfig::with_budget(budget).with_plan(plan);
        config.wait = Duration::from_micros(300);
        config.adoption =
            bytes.pick([Adoption::Wait, Adoption::Wait, Adoption::DoneOnly, Adoption::Never]);
        Self { rig: Rig::open(sim, config, streams), live: BTreeMap::new(), allocations: 0 }
    }

    fn act(&mut self, act: Act, round: usize, numbers: &mut Numbers) {
        match act {
            Act::Allocate { id, bytes, stream } => {
                if !self.live.contains_key(&id) {
                    self.allocate(id, bytes, stream);
                }
            }
            Act::Use { id, stream } => self.use_block(id, stream, round, numbers),
            Act::Free { id } => {
                let Some((block, stream)) = self.live.remove(&id) else { return };
                let on = &self.rig.streams[stream];
                // Not while another stream's use is open.
                if let Ok(used) = block.prepare(on, Access::Read) {
                    access(&self.rig.sim, on, &block, Access::Read);
                    let _ = used.finish();
                }
            }
        }
    }

    fn allocate(&mut self, id: usize, bytes: u64, stream: usize) {
        let on = &self.rig.streams[stream];
        let Some(block) = went(self.rig.pool.alloc(on, Request::bytes(bytes))) else { return };
        self.allocations += 1;
        // The block is its stream's at once.
        access(&self.rig.sim, on, &block, Access::Write);
        self.live.insert(id, (block, stream));
        assert_apart(self.live.values().map(|(block, _)| block.range()));
    }

    /// Uses a block on any stream. Now and then the use stays open for a while.
    fn use_block(&mut self, id: usize, stream: usize, round: usize, numbers: &mut Numbers) {
        let Some((block, _)) = self.live.get(&id) else { return };
        let on = &self.rig.streams[stream];
        let Ok(used) = block.prepare(on, Access::Write) else { return };
        if round > 0 && numbers.below(16) == 0 {
            self.rig.open.push(Open::of(used, block, on, Access::Write));
        } else {
            access(&self.rig.sim, on, block, Access::Write);
            let _ = used.finish();
        }
    }

    /// Does what the record does not have.
    fn disturb(&mut self, numbers: &mut Numbers) {
        match numbers.below(8) {
            0 => {
                let keep = numbers.below(CAPACITY);
                let _ = self.rig.pool.trim(keep);
            }
            1 => _ = self.rig.pool.poll(),
            2 => {
                let call = FAULTS[numbers.index(FAULTS.len())];
                let code = if numbers.below(2) == 0 { 2 } else { 999 };
                self.rig.sim.fail(call, numbers.below(5) + 1, code);
            }
            3 => {
                let stream = numbers.index(self.rig.streams.len());
                self.rig.sim.step(self.rig.streams[stream].raw());
            }
            4 => {
                let stream = numbers.index(self.rig.streams.len());
                let _ = self.rig.streams[stream].synchronize();
            }
            5 if !self.rig.open.is_empty() => {
                let at = numbers.index(self.rig.open.len());
                let _ = self.rig.open.swap_remove(at).work(&self.rig.sim);
            }
            6 => {
                // A stream of the program ends, and another one does its work.
                let stream = numbers.index(self.rig.streams.len());
                let raw = self.rig.streams[stream].raw();
                let holds = self.live.values().any(|(_, of)| *of == stream)
                    || self.rig.open.iter().any(|open| open.stream.raw() == raw);
                if !holds && let Some(new) = went(self.rig.pool.stream()) {
                    self.rig.streams[stream] = new;
                }
            }
            _ => {
                // A use of the record's streams that it does not have.
                let stream = numbers.index(self.rig.streams.len());
                if let Some(&id) = self.live.keys().nth(numbers.index(self.live.len())) {
                    self.use_block(id, stream, 1, numbers);
                }
            }
        }
    }

    fn check(&self) {
        let requested = self.live.values().map(|(block, _)| block.bytes()).sum();
        // The plan counts as one more stream.
        let streams = self.rig.streams.len() + 1;
        let stats = self.rig.check_on(streams, None, Some(requested));
        assert_eq!(stats.blocks, self.live.len() as u64, "{stats:?}");
        assert!(stats.physical <= self.rig.budget.limit(), "{stats:?}");
        assert_within(&stats);
        assert!(stats.plan_hits <= self.allocations, "{stats:?}");
        assert!(stats.plan_overlaps <= stats.plan_strays, "{stats:?}");
    }

    fn finish(mut self) {
        self.rig.sim.clear_failures();
        self.live.clear();
        self.rig.work_all();
        self.rig.streams.iter().for_each(|stream| stream.synchronize().expect(IDLE));
        // Work of streams that have ended.
        self.rig.sim.run_all();
        self.rig.pool.poll().expect(IDLE);
        self.rig.pool.trim(0).expect(IDLE);
        let stats = self.rig.pool.stats();
        assert_eq!((stats.live, stats.pending), (0, 0), "{stats:?}");
        assert_eq!(stats.cached, stats.physical, "only the range of the plan is left: {stats:?}");
        let Rig { sim, budget, pool, streams, .. } = self.rig;
        drop((pool, streams));
        assert_eq!(budget.used(), 0, "a charge was lost");
        assert_returned(&sim);
    }
}
