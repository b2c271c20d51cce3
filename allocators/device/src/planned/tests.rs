//! Pools with a plan, on a simulated device whose oracle checks every reuse.
#![allow(clippy::unwrap_used, reason = "in tests")]

use crate::{Adoption, Block, DevicePool, PoolConfig, Request};
use aquifer_core::{
    Action, Budget, MemoryError, PoolStats, Recorder, Tag, event::RingSink, random::SplitMix64,
};
use aquifer_driver::{
    Access, DeviceId, DeviceRange,
    sim::{Sim, SimKernel},
};
use aquifer_formats::plan::{NEVER, Plan, PlanBlock, PlanOptions};
use aquifer_stream::Stream;
use std::{
    collections::BTreeMap,
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

const MIB: u64 = 1 << 20;

/// A pool whose budget is the plan's range and `more`.
struct Rig {
    sim: Sim,
    budget: Budget,
    pool: DevicePool,
    streams: Vec<Stream>,
    plan: Arc<Plan>,
}

impl Rig {
    fn new(blocks: &[PlanBlock], streams: usize, more: u64) -> Self {
        Self::with(blocks, streams, more, |_| ())
    }

    fn with(
        blocks: &[PlanBlock],
        streams: usize,
        more: u64,
        set: impl FnOnce(&mut PoolConfig),
    ) -> Self {
        let plan = plan(blocks);
        let sim = Sim::h200(1).stepped();
        let budget = Budget::new("the device", plan.top().next_multiple_of(2 * MIB) + more);
        let mut config = PoolConfig::with_budget(budget.clone()).with_plan(plan.clone());
        set(&mut config);
        let pool = DevicePool::open(sim.driver(), DeviceId(0), config).unwrap();
        let streams = (0..streams).map(|_| pool.stream().unwrap()).collect();
        Self { sim, budget, pool, streams, plan }
    }

    fn range_bytes(&self) -> u64 {
        self.plan.top().next_multiple_of(2 * MIB)
    }

    /// Runs a program once. Blocks that it does not free stay in `kept`.
    fn run(&self, blocks: &[PlanBlock], kept: &mut BTreeMap<usize, Block>) {
        let mut acts: Vec<_> = (0..blocks.len()).map(|n| (blocks[n].first, n, true)).collect();
        acts.extend((0..blocks.len()).map(|n| (blocks[n].end, n, false)));
        acts.sort_unstable();
        for (step, number, is_first) in acts {
            let facts = blocks[number];
            if is_first && !kept.contains_key(&number) {
                let stream = &self.streams[facts.stream as usize];
                let block = self.pool.alloc(stream, Request::bytes(facts.bytes)).unwrap();
                self.write(stream, &block);
                if facts.shared {
                    let other = &self.streams[(facts.stream as usize + 1) % self.streams.len()];
                    let used = block.prepare(other, Access::Write).unwrap();
                    self.write(other, &block);
                    used.finish().unwrap();
                }
                kept.insert(number, block);
            } else if !is_first && step != NEVER {
                kept.remove(&number);
            }
        }
    }

    fn write(&self, stream: &Stream, block: &Block) {
        let range =
            DeviceRange { device: block.device(), address: block.address(), bytes: block.bytes() };
        self.sim.launch(stream.raw(), SimKernel::new("write").writes(range, None)).unwrap();
    }

    /// Writes a block of 1 MiB on `stream` and frees it. Returns its address.
    fn first_life(&self, stream: &Stream) -> u64 {
        let block = self.pool.alloc(stream, Request::bytes(MIB)).unwrap();
        self.write(stream, &block);
        block.address()
    }

    fn calls(&self) -> u64 {
        self.sim.driver().calls().made().iter().map(|(_, count)| count).sum()
    }

    #[track_caller]
    fn assert_silent(&self) {
        let violations = self.sim.violations();
        assert!(violations.is_empty(), "{}", violations[0]);
    }

    /// Checks what holds at any time.
    #[track_caller]
    fn assert_adds_up(&self) {
        let PoolStats { live, cached, pending, physical, .. } = self.pool.stats();
        assert_eq!(live + cached + pending, physical);
        assert_eq!(self.budget.used(), physical);
    }

    /// Drops everything, and checks that nothing is left.
    #[track_caller]
    fn end(self) {
        let Self { sim, budget, pool, streams, .. } = self;
        streams.iter().for_each(|stream| stream.synchronize().unwrap());
        drop((streams, pool));
        let violations = sim.violations();
        assert!(violations.is_empty(), "{}", violations[0]);
        assert_eq!((budget.used(), sim.outstanding().handles), (0, 0));
    }
}

fn plan(blocks: &[PlanBlock]) -> Arc<Plan> {
    let mut options = PlanOptions::default();
    options.tries = 4;
    Arc::new(Plan::make(blocks, &options).unwrap())
}

fn block(bytes: u64, first: u32, end: u32, stream: u32) -> PlanBlock {
    PlanBlock { bytes, first, end, stream, shared: false }
}

/// A random program on streams, of which some blocks are used by a second one.
fn program(seed: u64, count: u32, streams: u32) -> Vec<PlanBlock> {
    let mut random = SplitMix64::new(seed);
    let mut below = |end: u64| random.next_u64() % end;
    let block = |number| PlanBlock {
        bytes: 1 + below(100_000),
        first: number * 2,
        end: (number + below(30) as u32) * 2 + 1,
        stream: below(u64::from(streams)) as u32,
        shared: streams > 1 && below(4) == 0,
    };
    (0..count).map(block).collect()
}

#[test]
fn a_loop_on_one_stream_hits_always_and_makes_no_driver_call() {
    let mut blocks = program(1, 300, 1);
    blocks[0].end = NEVER;
    let rig = Rig::new(&blocks, 1, 2 * MIB);
    assert_eq!(rig.pool.stats().physical, rig.range_bytes());
    let mut kept = BTreeMap::new();
    rig.run(&blocks, &mut kept);
    let before = rig.calls();
    for _ in 0..3 {
        rig.run(&blocks, &mut kept);
    }
    assert_eq!(rig.calls() - before, 0);
    let stats = rig.pool.stats();
    assert_eq!((stats.plan_hits, stats.plan_strays), (300 + 3 * 299, 0));
    assert_eq!(
        (stats.stream_waits, stats.growths, stats.live),
        (0, 1, blocks[0].bytes.next_multiple_of(512))
    );
    rig.assert_adds_up();
    drop(kept);
    rig.end();
}

#[test]
fn a_place_that_a_stream_still_uses_without_a_record_is_held_until_the_use_is_over() {
    let blocks = [block(MIB, 0, 1, 0), block(MIB, 2, 3, 0), block(MIB, 4, 5, 0)];
    let rig = Rig::new(&blocks, 2, 8 * MIB);
    let [own, other] = [&rig.streams[0], &rig.streams[1]];
    let first = rig.pool.alloc(own, Request::bytes(MIB)).unwrap();
    let address = first.address();
    let used = first.prepare(other, Access::Write).unwrap();
    rig.write(other, &first);
    used.finish().unwrap();
    drop(first);
    let second = rig.pool.alloc(own, Request::bytes(MIB)).unwrap();
    assert_ne!(second.address(), address);
    let stats = rig.pool.stats();
    assert_eq!((stats.plan_hits, stats.plan_overlaps, stats.pending), (1, 1, MIB));
    rig.assert_adds_up();
    other.synchronize().unwrap();
    rig.pool.poll().unwrap();
    let third = rig.pool.alloc(own, Request::bytes(MIB)).unwrap();
    assert_eq!((third.address(), rig.pool.stats().pending), (address, 0));
    rig.write(own, &third);
    drop((second, third));
    rig.end();
}

#[test]
fn a_block_out_of_order_goes_elsewhere_rather_than_wait_for_another_stream() {
    // The third takes the place of the second, and the second that of the first.
    let blocks = [block(MIB, 0, 1, 0), block(MIB, 2, 3, 1), block(2 * MIB, 4, 5, 0)];
    let rig = Rig::new(&blocks, 2, 8 * MIB);
    let [own, other] = [&rig.streams[0], &rig.streams[1]];
    let address = rig.first_life(own);
    let second = rig.pool.alloc(other, Request::bytes(MIB)).unwrap();
    assert_eq!(second.address(), address, "the edge is recorded");
    rig.write(other, &second);
    drop(second);
    // The first again, which the plan expects only after the third.
    let again = rig.pool.alloc(own, Request::bytes(MIB)).unwrap();
    assert_ne!(again.address(), address);
    assert_eq!((rig.pool.stats().plan_hits, rig.pool.stats().plan_strays), (2, 1));
    drop(again);
    rig.end();
}

#[test]
fn streams_that_never_wait_for_each_other_take_no_place_that_another_one_uses() {
    let blocks = [block(MIB, 0, 1, 0), block(MIB, 2, 3, 1)];
    for (adoption, hits) in [(Adoption::Wait, 2), (Adoption::DoneOnly, 1), (Adoption::Never, 1)] {
        let rig = Rig::with(&blocks, 2, 8 * MIB, |config| config.adoption = adoption);
        rig.run(&blocks, &mut BTreeMap::new());
        let stats = rig.pool.stats();
        assert_eq!((stats.plan_hits, stats.plan_overlaps), (hits, 2 - hits), "{adoption:?}");
        rig.assert_adds_up();
        rig.end();
    }
}

#[test]
fn a_plan_that_is_missed_too_often_is_dropped_with_an_event_and_its_range_given_back() {
    let blocks: Vec<_> = (0..10).map(|n| block(MIB, n * 2, n * 2 + 1, 0)).collect();
    let ring = Arc::new(RingSink::new(1024));
    let rig = Rig::with(&blocks, 1, 8 * MIB, |config| {
        config.recorder = Some(Arc::new(Recorder::new(ring.clone())));
    });
    let stream = &rig.streams[0];
    let kept = rig.pool.alloc(stream, Request::bytes(MIB)).unwrap();
    for _ in 0..25 {
        drop(rig.pool.alloc(stream, Request::bytes(3000)).unwrap());
    }
    let dropped: Vec<_> =
        ring.take().into_iter().filter(|event| event.action == Action::DropPlan).collect();
    assert_eq!(dropped.iter().map(|event| event.bytes).collect::<Vec<_>>(), [rig.range_bytes()]);
    let stats = rig.pool.stats();
    assert_eq!(stats.plan_hits + stats.plan_strays, 21, "it counts no more");
    stream.synchronize().unwrap();
    assert_eq!(rig.pool.trim(0).unwrap(), 2 * MIB, "what the strays were served from");
    assert_eq!(rig.pool.stats().physical, rig.range_bytes());
    rig.assert_adds_up();
    drop(kept);
    rig.assert_adds_up();
    assert_eq!(rig.pool.trim(0).unwrap(), rig.range_bytes());
    assert_eq!((rig.pool.stats().physical, rig.budget.used()), (0, 0));
    rig.end();
}

#[test]
fn the_peak_covers_the_plan_its_strays_and_dedicated_memory_together() {
    for seed in 0..20 {
        let mut blocks = program(seed, 200, 2);
        blocks.iter_mut().for_each(|block| block.bytes *= 400);
        let rig = Rig::new(&blocks, 2, 8 << 30);
        let mut random = SplitMix64::new(seed);
        let mut below = |end: u64| random.next_u64() % end;
        let (mut strays, mut stable, mut kept) = (Vec::new(), Vec::new(), BTreeMap::new());
        let mut peak = 0;
        for step in 0..blocks.len() * 3 {
            let number = step % blocks.len();
            let stream = &rig.streams[blocks[number].stream as usize];
            let other = Request::bytes(1 + below(9 << 20));
            match below(40) {
                0 => strays.push(rig.pool.alloc(stream, other).unwrap()),
                1 => stable.push(rig.pool.alloc_stable(stream, other).unwrap()),
                2 => strays.clear(),
                3 => stable.clear(),
                _ => {}
            }
            peak = peak.max(rig.pool.stats().live);
            let block = rig.pool.alloc(stream, Request::bytes(blocks[number].bytes)).unwrap();
            peak = peak.max(rig.pool.stats().live);
            kept.insert(number, block);
            kept.retain(|_, _| below(10) > 0);
            if below(200) == 0 {
                rig.pool.reset_peaks();
                peak = rig.pool.stats().live;
            }
        }
        let told = rig.pool.stats().peak_live;
        // Two streams and the plan.
        assert!((peak..=peak + 3 * MIB).contains(&told), "seed {seed}: {told} of {peak}");
        assert!(rig.pool.stats().plan_hits > 200, "seed {seed}");
        drop((strays, stable, kept));
        assert_eq!(rig.pool.stats().peak_live, told, "frees change no peak");
        rig.assert_silent();
    }
}

#[test]
fn peaks_are_settled_and_read_while_threads_use_a_plan_that_ends() {
    let blocks: Vec<_> = (0..50).map(|n| block(MIB, n * 2, n * 2 + 1, 0)).collect();
    let rig = Rig::new(&blocks, 2, 1 << 30);
    let [planned, other] = [&rig.streams[0], &rig.streams[1]];
    let is_over = AtomicBool::new(false);
    let until_over = |work: &(dyn Fn() + Sync)| {
        while !is_over.load(Ordering::Relaxed) {
            work();
        }
    };
    std::thread::scope(|threads| {
        threads.spawn(|| {
            for round in 0..80 {
                for _ in 0..blocks.len() {
                    drop(rig.pool.alloc(planned, Request::bytes(MIB)).unwrap());
                }
                // The plan matches less and less, and is dropped.
                for _ in 0..round / 2 {
                    drop(rig.pool.alloc(planned, Request::bytes(3000)).unwrap());
                }
            }
            is_over.store(true, Ordering::Relaxed);
        });
        threads.spawn(|| {
            until_over(&|| drop(rig.pool.alloc_stable(other, Request::bytes(3 * MIB)).unwrap()));
        });
        threads.spawn(|| {
            until_over(&|| {
                let stats = rig.pool.stats();
                assert!(stats.peak_live >= stats.live);
                rig.pool.reset_peaks();
            });
        });
    });
    let stats = rig.pool.stats();
    assert!(stats.plan_strays > 0 && stats.allocations > stats.plan_hits + stats.plan_strays);
    rig.assert_silent();
}

#[test]
fn the_limit_of_a_tag_holds_after_the_plan_was_dropped() {
    let plan = plan(&[block(MIB, 0, 1, 0), block(MIB, 2, 3, 0)]);
    // Without an observer, which is a reason for the full path of its own.
    let sim = Sim::h200(1).symbolic();
    sim.oracle(false);
    let config = PoolConfig::default().with_plan(plan);
    let pool = DevicePool::open(sim.driver(), DeviceId(0), config).unwrap();
    let stream = pool.stream().unwrap();
    let miss = || drop(pool.alloc(&stream, Request::bytes(3 * MIB)).unwrap());
    (0..8).for_each(|_| miss());
    let strays = pool.stats().plan_strays;
    miss();
    assert_eq!(pool.stats().plan_strays, strays, "the plan is dropped");

    pool.limit_tag(Tag::OTHER, MIB);
    let ask = |bytes| pool.alloc(&stream, Request::bytes(bytes).tag(Tag::OTHER));
    assert!(matches!(ask(MIB + 1), Err(MemoryError::OutOfMemory(_))));
    let held = ask(MIB).unwrap();
    assert!(matches!(ask(1), Err(MemoryError::OutOfMemory(_))));
    drop(held);
    ask(MIB).unwrap();
}

#[test]
fn blocks_outlive_their_pool_and_the_last_one_gives_the_range_back() {
    let blocks = program(5, 40, 2);
    let rig = Rig::new(&blocks, 2, 2 * MIB);
    let mut kept = BTreeMap::new();
    let unfreed: Vec<_> = blocks.iter().map(|b| PlanBlock { end: NEVER, ..*b }).collect();
    let first = unfreed[..5].to_vec();
    rig.run(&first, &mut kept);
    let Rig { sim, budget, pool, streams, .. } = rig;
    drop(pool);
    assert!(budget.used() > 0);
    streams.iter().for_each(|stream| stream.synchronize().unwrap());
    drop((kept, streams));
    assert_eq!((budget.used(), sim.outstanding().handles), (0, 0));
    assert!(sim.violations().is_empty());
}

/// Freed blocks are looked at when a place is missed, so some are held when the pool closes.
#[test]
fn a_pool_that_closes_with_held_blocks_gives_the_range_back_when_their_uses_are_over() {
    for is_over_before in [true, false] {
        let blocks = [block(MIB, 0, 1, 0), block(MIB, 2, 3, 0)];
        let rig = Rig::new(&blocks, 2, 2 * MIB);
        let held = rig.pool.alloc(&rig.streams[0], Request::bytes(MIB)).unwrap();
        let used = held.prepare(&rig.streams[1], Access::Write).unwrap();
        rig.write(&rig.streams[1], &held);
        used.finish().unwrap();
        drop(held);
        assert_eq!(rig.pool.stats().pending, MIB);
        let Rig { sim, budget, pool, streams, .. } = rig;
        if is_over_before {
            sim.run_all();
        }
        drop(pool);
        sim.run_all();
        drop(streams);
        assert!(sim.violations().is_empty());
        assert_eq!((budget.used(), sim.outstanding().handles), (0, 0), "{is_over_before}");
    }
}

#[test]
fn a_held_block_of_a_dropped_plan_is_told_as_complete_when_its_use_is_over() {
    let blocks = [block(MIB, 0, 1, 0), block(MIB, 2, 3, 0)];
    let ring = Arc::new(RingSink::new(1024));
    let rig = Rig::with(&blocks, 2, 8 * MIB, |config| {
        config.recorder = Some(Arc::new(Recorder::new(ring.clone())));
    });
    let held = rig.pool.alloc(&rig.streams[0], Request::bytes(MIB)).unwrap();
    let address = held.address();
    let used = held.prepare(&rig.streams[1], Access::Write).unwrap();
    rig.write(&rig.streams[1], &held);
    used.finish().unwrap();
    drop(held);
    for _ in 0..8 {
        drop(rig.pool.alloc(&rig.streams[0], Request::bytes(3000)).unwrap());
    }
    let completed = || {
        let events = ring.take();
        events.iter().filter(|e| e.action == Action::Complete && e.address == address).count()
    };
    assert_eq!(completed(), 0);
    rig.streams.iter().for_each(|stream| stream.synchronize().unwrap());
    rig.pool.poll().unwrap();
    assert_eq!(completed(), 1);
    rig.pool.trim(0).unwrap();
    assert_eq!(rig.budget.used(), 0);
    rig.end();
}

#[test]
fn a_stream_takes_the_place_of_one_that_has_ended() {
    let blocks = [block(MIB, 0, 1, 0), block(MIB, 2, 3, 0), block(MIB, 4, 5, 0)];
    let rig = Rig::new(&blocks, 1, 8 * MIB);
    let first = rig.pool.stream().unwrap();
    let held = rig.pool.alloc(&first, Request::bytes(MIB)).unwrap();
    rig.write(&first, &held);
    drop(held);
    drop(first);
    // Nothing orders the new stream behind the old one, whose work is not done.
    let second = rig.pool.alloc(&rig.streams[0], Request::bytes(MIB)).unwrap();
    rig.write(&rig.streams[0], &second);
    rig.assert_silent();
    drop(second);
    rig.streams[0].synchronize().unwrap();
    rig.end();
}

#[test]
fn a_stream_of_another_device_or_machine_is_refused_and_is_never_one_of_the_plan() {
    let blocks = [block(MIB, 0, 1, 0), block(2 * MIB, 2, 3, 0)];
    let (sim, other) = (Sim::h200(2), Sim::h200(1));
    let open = |sim: &Sim, device, config| DevicePool::open(sim.driver(), device, config).unwrap();
    let pool = open(&sim, DeviceId(0), PoolConfig::default().with_plan(plan(&blocks)));
    let beside = open(&sim, DeviceId(1), PoolConfig::default()).stream().unwrap();
    let elsewhere = open(&other, DeviceId(0), PoolConfig::default()).stream().unwrap();
    let refused = |stream| pool.alloc(stream, Request::bytes(MIB)).unwrap_err();
    assert!(matches!(refused(&beside), MemoryError::WrongDevice { .. }));
    refused(&elsewhere);
    let own = pool.stream().unwrap();
    assert_eq!((pool.stats().plan_hits, pool.stats().plan_strays), (0, 0));
    drop(pool.alloc(&own, Request::bytes(MIB)).unwrap());
    assert_eq!((pool.stats().plan_hits, pool.stats().plan_strays), (1, 0));
}

#[test]
fn a_plan_that_cannot_be_used_is_an_error_of_the_pool_and_takes_nothing() {
    let blocks = [block(16 * MIB, 0, 1, 0)];
    let sim = Sim::h200(1);
    let open = |set: &dyn Fn(&mut PoolConfig)| {
        let mut config = PoolConfig::with_budget(Budget::new("the device", 8 * MIB));
        set(&mut config);
        DevicePool::open(sim.driver(), DeviceId(0), config).map(drop)
    };
    let bad = |set: &dyn Fn(&mut PoolConfig)| match open(set) {
        Err(MemoryError::BadSetting { name: "plan", value, .. }) => value,
        other => unreachable!("{other:?}"),
    };
    let missing = bad(&|config| config.plan = Some(PathBuf::from("/no/such.plan")));
    assert!(missing.starts_with("/no/such.plan: "), "{missing}");
    let path = std::env::temp_dir().join(format!("no-plan-{}", std::process::id()));
    std::fs::write(&path, "a trace").unwrap();
    let wrong = bad(&|config| config.plan = Some(path.clone()));
    assert!(wrong.starts_with(&path.display().to_string()), "{wrong}");
    std::fs::remove_file(&path).unwrap();
    let planned = |set: &dyn Fn(&mut PoolConfig)| {
        bad(&|config| {
            *config = config.clone().with_plan(plan(&blocks));
            set(config);
        })
    };
    planned(&|config| config.bypass = true);
    planned(&|config| config.debug.canaries = true);
    let too_large = open(&|config| *config = config.clone().with_plan(plan(&blocks)));
    assert!(
        matches!(too_large, Err(MemoryError::OutOfMemory(_) | MemoryError::TooLarge { .. })),
        "{too_large:?}"
    );
    assert_eq!(sim.outstanding().handles, 0);
}
