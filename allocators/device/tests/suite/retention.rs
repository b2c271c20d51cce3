//! Tests of how much idle memory a pool keeps: the release threshold, the warm reserve, and the cap
//! on each stream's cache.

use crate::support::{MEMORY, MIB, Rig, assert_returned, plain, range, read};
use aquifer_core::{Budget, MemoryError, OpaqueBlock};
use aquifer_device::{Adoption, DevicePool, PoolConfig, Request};
use aquifer_driver::{Access, Call, DeviceId, sim::Sim};
use aquifer_stream::Stream;
use std::{any::Any, time::Duration};

fn memory_calls(rig: &Rig) -> u64 {
    MEMORY.iter().map(|&call| rig.calls(call)).sum()
}

fn rig(limit_mib: u64, set: impl FnOnce(&mut PoolConfig)) -> Rig {
    Rig::on(Sim::h200(1).symbolic(), limit_mib, set)
}

/// Allocates blocks of 4 MiB, all live at once, and frees them.
fn fill(rig: &Rig, stream: &Stream, blocks: u64) {
    let held: Vec<_> = (0..blocks).map(|_| rig.take(stream, 4)).collect();
    drop(held);
}

#[test]
fn idle_memory_above_the_threshold_is_released_at_the_next_slow_path() {
    for (threshold, held) in
        [(u64::MAX, 44), (40 * MIB, 44), (39 * MIB, 42), (16 * MIB, 20), (0, 4)]
    {
        let rig = rig(1024, |config| config.release_threshold = threshold);
        let (s, u) = (rig.stream(), rig.stream());
        fill(&rig, &s, 10);
        assert_eq!(rig.pool.stats().physical, 40 * MIB, "a free gives nothing back");
        let unmaps = rig.calls(Call::Unmap);
        drop(rig.take(&s, 4));
        assert_eq!(rig.calls(Call::Unmap), unmaps, "nor does what a cache serves");
        let _live = rig.take(&u, 4);
        assert_eq!(rig.pool.stats().physical, held * MIB, "of {threshold}");
        assert_eq!(rig.budget.used(), held * MIB);
        rig.assert_silent();
    }
}

#[test]
fn a_synchronisation_and_a_poll_release_idle_memory_above_the_threshold() {
    let release: [fn(&Rig, &Stream); 2] =
        [|_, s| s.synchronize().unwrap(), |rig, _| rig.pool.poll().unwrap()];
    for release in release {
        for (threshold, held) in [(u64::MAX, 44), (36 * MIB, 40), (16 * MIB, 20), (0, 4)] {
            let rig = rig(1024, |config| config.release_threshold = threshold);
            let (s, u) = (rig.stream(), rig.stream());
            let _live = rig.take(&s, 4);
            let block = rig.take(&s, 4);
            let used = block.prepare(&u, Access::Write).unwrap();
            let generation = Some(block.generation());
            rig.sim.access(u.raw(), range(&block), Access::Write, generation).unwrap();
            used.finish().unwrap();
            fill(&rig, &s, 9);
            drop(block);
            release(&rig, &s);
            assert_eq!(rig.pool.stats().physical, held * MIB, "of {threshold}");
            rig.assert_silent();
        }
    }
}

#[test]
fn a_synchronisation_releases_only_memory_whose_work_is_done() {
    let rig = Rig::on(Sim::h200(1).symbolic().stepped(), 1024, |config| {
        config.release_threshold = 0;
    });
    let (s, u) = (rig.stream(), rig.stream());
    let block = rig.take(&s, 8);
    rig.uses(&u, &block, Access::Write);
    drop(block);
    s.synchronize().unwrap();
    assert_eq!(rig.pool.stats().physical, 8 * MIB, "`u` still writes it");
    u.synchronize().unwrap();
    assert_eq!(rig.pool.stats().physical, 0);
    rig.assert_silent();
}

#[test]
fn a_trim_enforces_the_threshold_whatever_its_target() {
    let rig = rig(1024, |config| config.release_threshold = 8 * MIB);
    let s = rig.stream();
    let _live = rig.take(&s, 4);
    fill(&rig, &s, 10);
    assert_eq!(rig.pool.trim(u64::MAX), Ok(32 * MIB));
    assert_eq!(rig.pool.stats().physical, 12 * MIB);
    assert_eq!(rig.pool.trim(u64::MAX), Ok(0));
    assert_eq!(rig.pool.trim(0), Ok(8 * MIB));
}

#[test]
fn memory_above_the_threshold_is_released_only_when_its_work_is_done() {
    let rig = Rig::on(Sim::h200(1).symbolic().stepped(), 1024, |config| {
        (config.release_threshold, config.adoption) = (0, Adoption::DoneOnly);
    });
    let (s, u) = (rig.stream(), rig.stream());
    let block = rig.take(&s, 32);
    rig.write(&s, &block);
    drop(block);
    let live = [rig.take(&u, 4)];
    assert_eq!(rig.pool.stats().physical, 36 * MIB);
    rig.sim.run_all();
    let more = rig.take(&u, 4);
    assert_eq!(rig.pool.stats().physical, 8 * MIB);
    drop((live, more));
    rig.assert_silent();
}

#[test]
fn memory_no_longer_needed_stays_released_while_the_program_grows_slightly() {
    let rig = rig(1024, |config| config.release_threshold = 4 * MIB);
    let (s, u) = (rig.stream(), rig.stream());
    fill(&rig, &s, 64);
    let mut live = vec![rig.take(&u, 4)];
    assert_eq!(rig.pool.stats().physical, 8 * MIB);
    for mib in 1..10 {
        live.push(rig.take(&u, mib));
        let stats = rig.pool.stats();
        assert!(stats.physical <= stats.live + 64 * MIB, "{stats:?}");
    }
}

#[test]
fn a_warm_reserve_is_mapped_ahead_and_serves_any_stream_without_a_memory_call() {
    let rig = rig(256, |config| config.warm_reserve = 63 * MIB);
    assert_eq!((rig.pool.stats().physical, rig.budget.used()), (64 * MIB, 64 * MIB));
    let (s, u) = (rig.stream(), rig.stream());
    let before = memory_calls(&rig);
    let blocks = [rig.take(&s, 20), rig.take(&u, 20), rig.take(&s, 1), rig.take(&u, 1)];
    assert_eq!(memory_calls(&rig), before);
    assert_eq!(rig.pool.stats().physical, 64 * MIB);
    rig.assert_silent();
    drop(blocks);
    let (sim, budget) = (rig.sim.clone(), rig.budget.clone());
    drop((s, u, rig));
    assert_returned(&sim, &budget);
}

#[test]
fn neither_a_trim_nor_the_threshold_releases_the_reserve() {
    let rig =
        rig(1024, |config| (config.warm_reserve, config.release_threshold) = (32 * MIB, 32 * MIB));
    let (s, u) = (rig.stream(), rig.stream());
    fill(&rig, &s, 16);
    let live = rig.take(&u, 4);
    assert_eq!(rig.pool.stats().physical, 36 * MIB);
    assert_eq!(rig.pool.trim(0), Ok(4 * MIB));
    drop(live);
    assert_eq!(rig.pool.trim(0), Ok(0));
    assert_eq!(rig.pool.warm(0), Ok(0));
    assert_eq!(rig.pool.trim(0), Ok(32 * MIB));
    assert_eq!(rig.pool.warm(10 * MIB), Ok(10 * MIB), "and it can be had again");
    assert_eq!(rig.pool.trim(0), Ok(0));
}

#[test]
fn pressure_releases_the_reserve() {
    // A stable block, which has a handle of its own.
    let rig = rig(32, |config| config.warm_reserve = 32 * MIB);
    let s = rig.stream();
    let stable = rig.stable(&s, 24 * MIB);
    assert_eq!(rig.pool.stats().physical, 32 * MIB);
    drop(stable);
    // A block that needs the memory idle elsewhere.
    drop(rig.take(&s, 32));
    // Another pool under the same budget.
    let config = PoolConfig::with_budget(rig.budget.clone());
    let other = DevicePool::open(rig.sim.driver(), DeviceId(0), config).unwrap();
    rig.pool.warm(32 * MIB).unwrap();
    assert_eq!(rig.pool.trim(0), Ok(0));
    let theirs = other.alloc(&other.stream().unwrap(), Request::bytes(20 * MIB)).unwrap();
    assert_eq!((rig.pool.stats().physical, rig.budget.used()), (12 * MIB, 32 * MIB));
    let room = rig.pool.give_back(u64::MAX, None);
    assert_eq!((room.missing, rig.pool.stats().physical), (u64::MAX - 12 * MIB, 0));
    drop(theirs);
    rig.assert_silent();
}

#[test]
fn a_reserve_that_cannot_be_allocated_changes_nothing() {
    for call in [Call::HandleCreate, Call::Map, Call::SetAccess] {
        for code in [2, 999] {
            let rig = rig(1024, |_| ());
            let s = rig.stream();
            let _live = rig.take(&s, 4);
            // Out of memory is retried with smaller handles first.
            (1..200).for_each(|nth| rig.sim.fail(call, nth, code));
            assert!(rig.pool.warm(64 * MIB).is_err(), "{call:?}");
            assert_eq!(
                (rig.pool.stats().physical, rig.budget.used()),
                (4 * MIB, 4 * MIB),
                "{call:?}"
            );
            rig.sim.clear_failures();
            assert_eq!(rig.pool.warm(64 * MIB), Ok(60 * MIB));
            rig.assert_silent();
        }
    }
    let rig = rig(32, |_| ());
    let s = rig.stream();
    let _live = rig.take(&s, 4);
    assert!(
        matches!(rig.pool.warm(34 * MIB), Err(MemoryError::OutOfMemory(error)) if error.refused.is_some_and(|refused| refused.limit == 32 * MIB))
    );
    assert_eq!(rig.budget.used(), 4 * MIB);
}

#[test]
fn settings_that_contradict_each_other_are_refused_by_name() {
    let open = |sim: &Sim, set: &dyn Fn(&mut PoolConfig)| {
        let mut config = PoolConfig::with_budget(Budget::new("a test", 64 * MIB));
        set(&mut config);
        DevicePool::open(sim.driver(), DeviceId(0), config).map(drop)
    };
    let sim = Sim::h200(1).symbolic();
    let refused = |answer: Result<(), MemoryError>, why: &str| match answer {
        Err(MemoryError::BadSetting { name: "warm_reserve", expected, .. }) => {
            assert!(expected.contains(why));
        }
        other => panic!("{other:?}"),
    };
    assert_eq!(open(&sim, &|c| c.warm_reserve = 64 * MIB), Ok(()));
    refused(open(&sim, &|c| c.warm_reserve = 64 * MIB + 1), "budget");
    let both = |c: &mut PoolConfig| (c.warm_reserve, c.release_threshold) = (8 * MIB, 8 * MIB - 1);
    refused(open(&sim, &both), "release_threshold");
    refused(open(&sim, &|c| (c.warm_reserve, c.bypass) = (MIB, true)), "bypass");
    let plain = plain().symbolic();
    for set in
        [&|c: &mut PoolConfig| c.warm_reserve = MIB, &|c: &mut PoolConfig| c.stream_cache = MIB]
            as [&dyn Fn(&mut PoolConfig); 2]
    {
        assert!(matches!(open(&plain, set), Err(MemoryError::Unsupported { .. })));
    }
    assert_eq!(sim.outstanding().handles, 0, "nothing of a refused pool is left");
}

#[test]
fn a_slack_above_its_maximum_is_refused_and_none_at_all_is_not() {
    let open = |slack| {
        let mut config = PoolConfig::with_budget(Budget::new("a test", 64 * MIB));
        config.slack = slack;
        DevicePool::open(Sim::h200(1).symbolic().driver(), DeviceId(0), config).map(drop)
    };
    for slack in [PoolConfig::MAX_SLACK + 1, u32::MAX] {
        match open(slack) {
            Err(MemoryError::BadSetting { name: "slack", value, .. }) => {
                assert_eq!(value, slack.to_string());
            }
            other => panic!("{other:?}"),
        }
    }
    for slack in [0, PoolConfig::MAX_SLACK] {
        assert_eq!(open(slack), Ok(()), "{slack} %");
    }
}

#[test]
fn idle_memory_above_a_streams_cap_serves_other_streams() {
    for adoption in [Adoption::Wait, Adoption::Never] {
        for (cap, grown) in [(u64::MAX, 16), (40 * MIB, 16), (28 * MIB, 4), (8 * MIB, 0), (0, 0)] {
            let rig = rig(1024, |config| (config.stream_cache, config.adoption) = (cap, adoption));
            let (s, u) = (rig.stream(), rig.stream());
            fill(&rig, &s, 10);
            // This finds the memory above the cap and may take part of it.
            let mut live = vec![rig.take(&u, 4)];
            live.extend((0..3).map(|_| rig.take(&u, 4)));
            assert_eq!(
                rig.pool.stats().physical,
                (40 + grown) * MIB,
                "a cap of {cap}, {adoption:?}"
            );
            // Memory within the cap is where it was.
            let before = rig.sim.driver().calls().made();
            let own = (cap.min(40 * MIB) / (4 * MIB)).min(10);
            live.extend((0..own).map(|_| rig.take(&s, 4)));
            assert_eq!(rig.sim.driver().calls().made(), before);
            rig.assert_silent();
        }
    }
}

#[test]
fn memory_above_the_cap_stays_with_its_stream_until_its_work_is_done() {
    let rig = Rig::on(Sim::h200(1).symbolic().stepped(), 1024, |config| {
        (config.stream_cache, config.adoption) = (0, Adoption::Never);
        config.wait = Duration::ZERO;
    });
    let (s, u) = (rig.stream(), rig.stream());
    let block = rig.take(&s, 32);
    rig.write(&s, &block);
    drop(block);
    let one = rig.take(&u, 4);
    assert_eq!(rig.pool.stats().physical, 36 * MIB);
    rig.sim.run_all();
    let two = rig.take(&u, 4);
    assert_eq!(rig.pool.stats().physical, 36 * MIB);
    drop((one, two));
    rig.assert_silent();
}

#[test]
fn a_loop_over_its_cap_makes_no_memory_call_after_its_second_round() {
    for cap in [0, 3, 4, 10, 30] {
        let rig = rig(1024, |config| config.stream_cache = cap * MIB);
        let streams = [rig.stream(), rig.stream(), rig.stream()];
        let round = || {
            let before = memory_calls(&rig);
            for stream in &streams {
                fill(&rig, stream, 8);
            }
            memory_calls(&rig) - before
        };
        let rounds: Vec<u64> = (0..10).map(|_| round()).collect();
        assert!(rounds[2..].iter().all(|&made| made == 0), "{cap}: {rounds:?}");
    }
}

#[test]
fn one_trim_releases_the_memory_of_a_dropped_stream() {
    for used_by_another in [false, true] {
        let rig = rig(1024, |_| ());
        let (s, u) = (rig.stream(), rig.stream());
        let block = rig.bytes(&s, 1);
        drop(s);
        if used_by_another {
            read(&u, &block);
        }
        let held = rig.pool.stats().physical;
        assert_eq!(rig.pool.trim(0), Ok(0), "it is in use");
        drop(block);
        rig.sim.run_all();
        assert_eq!(rig.pool.trim(0), Ok(held), "used by another: {used_by_another}");
        assert_eq!((rig.pool.stats().physical, rig.budget.used()), (0, 0));
        rig.assert_silent();
    }
}

#[test]
fn one_trim_releases_blocks_kept_by_other_blocks() {
    let rig = rig(1024, |_| ());
    let (s, u) = (rig.stream(), rig.stream());
    let stable = rig.stable(&s, 4 * MIB);
    let mut kept: Box<dyn Any + Send + Sync> = Box::new(stable);
    // Each block is used by another stream, keeps the previous one, and lies in memory of its
    // own.
    for _ in 0..3 {
        let mut block = rig.take(&s, 40);
        block.keep_until_free(kept);
        block.prepare(&u, Access::Read).unwrap().finish().unwrap();
        kept = Box::new(block);
    }
    let held = rig.pool.stats().physical;
    drop(kept);
    rig.sim.run_all();
    assert_eq!(rig.pool.trim(0), Ok(held));
    assert_eq!((rig.pool.stats().physical, rig.budget.used()), (0, 0));
    rig.assert_silent();
}
