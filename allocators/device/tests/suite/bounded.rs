//! What goes round and round comes to rest: neither memory nor the calls that are made for it grow
//! with the rounds.
#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use crate::support::{MIB, Rig, range};
use aquifer_device::{Block, Request};
use aquifer_driver::{Access, Call, sim::Sim};
use aquifer_stream::Stream;
use std::{sync::Barrier, thread};

/// Random numbers, the same each time.
struct Random(u64);

impl Random {
    /// From 1 to `most`.
    fn up_to(&mut self, most: u64) -> u64 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        1 + (self.0 >> 33) % most
    }
}

/// Rounds on a device that runs `lag` rounds behind the host: each stream takes blocks of some MiB,
/// which another one uses, and all of them go. Answers with the bytes that a round asks for at
/// once, and the most that were held.
fn lagging_rounds(streams: u64, sizes: std::ops::RangeInclusive<u64>, lag: usize) -> (u64, u64) {
    const ROUNDS: usize = 40;
    let rig = Rig::on(Sim::h200(1).symbolic().stepped(), 100 << 10, |_| ());
    let streams: Vec<Stream> = (0..streams).map(|_| rig.stream()).collect();
    let mut random = Random(7);
    let most = sizes.end() - sizes.start() + 1;
    // The same sizes in each round, in another order and on other streams.
    let sizes: Vec<u64> = (0..24).map(|_| (sizes.start() + random.up_to(most) - 1) * MIB).collect();
    let pending = || streams.iter().map(|s| rig.sim.pending(s.raw())).collect::<Vec<_>>();
    // Work that each stream was given in each round.
    let mut queued: Vec<Vec<usize>> = Vec::new();
    for round in 0..ROUNDS {
        let before = pending();
        let mut live = Vec::new();
        for (place, bytes) in sizes.iter().enumerate() {
            let (home, user) = (
                &streams[(place + round) % streams.len()],
                &streams[(place + round + 1) % streams.len()],
            );
            let block = rig.pool.alloc(home, Request::bytes(*bytes)).unwrap();
            let used = block.prepare(user, Access::Write).unwrap();
            rig.sim
                .access(user.raw(), range(&block), Access::Write, Some(block.generation()))
                .unwrap();
            used.finish().unwrap();
            live.push(block);
        }
        drop(live);
        queued.push(pending().iter().zip(before).map(|(now, before)| now - before).collect());
        // All but the work of the last rounds runs.
        let behind =
            |at: usize| queued.iter().rev().take(lag).map(|round| round[at]).sum::<usize>();
        let late = |at: usize| rig.sim.pending(streams[at].raw()) > behind(at);
        while (0..streams.len()).any(|at| late(at) && rig.sim.step(streams[at].raw())) {}
    }
    rig.assert_silent();
    (sizes.iter().sum(), rig.pool.stats().peak_physical)
}

/// What sixteen threads with a stream each have done in a round, all together.
#[derive(Clone, Copy, Debug)]
struct Counts {
    /// Ranges taken over from another stream's cache.
    taken: u64,
    moved: u64,
    /// Calls that map memory.
    mapped: u64,
}

/// Allocations in a round, of all threads.
const OPERATIONS: u64 = 16 * 500;

/// Ten rounds of sixteen threads that each hold sixteen blocks of up to 1 MiB, some 130 MiB in all,
/// and exchange them at random, under a limit in MiB.
fn sixteen_threads(limit: u64) -> Vec<Counts> {
    const THREADS: u64 = 16;
    const ROUNDS: usize = 10;
    let sim = Sim::h200(1).symbolic();
    sim.oracle(false);
    let rig = Rig::on(sim, limit, |_| ());
    let together = Barrier::new(THREADS as usize + 1);
    let round = |stream: &Stream, random: &mut Random, live: &mut Vec<Block>| {
        for _ in 0..OPERATIONS / THREADS {
            if live.len() == 16 {
                live.swap_remove(random.up_to(16) as usize - 1);
            }
            live.push(rig.pool.alloc(stream, Request::bytes(random.up_to(MIB))).unwrap());
        }
    };
    let counted: Vec<_> = thread::scope(|scope| {
        for number in 0..THREADS {
            let (stream, together, round) = (rig.stream(), &together, &round);
            scope.spawn(move || {
                let (mut random, mut live) = (Random(number), Vec::new());
                for _ in 0..ROUNDS {
                    together.wait();
                    round(&stream, &mut random, &mut live);
                    together.wait();
                }
            });
        }
        let rounds = (0..ROUNDS).map(|_| {
            together.wait();
            together.wait();
            let stats = rig.pool.stats();
            let mapped = rig.sim.driver().calls().get(Call::Map);
            Counts { taken: stats.adoptions, moved: stats.moves, mapped }
        });
        rounds.collect()
    });
    let none = Counts { taken: 0, moved: 0, mapped: 0 };
    let before = std::iter::once(&none).chain(&counted);
    let each = before.zip(&counted).map(|(before, now)| Counts {
        taken: now.taken - before.taken,
        moved: now.moved - before.moved,
        mapped: now.mapped - before.mapped,
    });
    each.collect()
}

/// What the last five of ten rounds have counted, in which nothing new is asked for.
fn late(rounds: &[Counts], of: impl Fn(&Counts) -> u64) -> u64 {
    rounds[5..].iter().map(of).sum()
}

#[test]
fn rounds_on_a_device_that_lags_behind_do_not_take_more_and_more_memory() {
    // Large blocks, for which others' idle memory is looked at early, and small ones.
    for sizes in [16..=48, 1..=8, 1..=48] {
        for streams in 2..=4 {
            for lag in [4, 40] {
                let (need, held) = lagging_rounds(streams, sizes.clone(), lag);
                // Twice what has ever been in use, and a handle or two.
                assert!(
                    held <= need / 4 * 9,
                    "{streams} streams, {sizes:?} MiB, {lag} rounds behind: {need} bytes are needed, {held} were held"
                );
            }
        }
    }
}

#[test]
fn sixteen_threads_with_a_stream_each_do_not_take_ranges_from_each_other_for_ever() {
    for limit in [1000, 4000] {
        let rounds = sixteen_threads(limit);
        assert!(
            late(&rounds, |round| round.taken) <= 5 * OPERATIONS / 1000,
            "{limit} MiB: {rounds:?}"
        );
    }
}

#[test]
fn sixteen_threads_near_the_limit_come_to_rest_with_what_they_have() {
    for limit in [200, 260] {
        let rounds = sixteen_threads(limit);
        let calls = |round: &Counts| round.mapped + round.moved;
        let all: u64 = rounds.iter().map(calls).sum();
        // Each handle is mapped once, and few of them again.
        assert!(all <= limit / 2 + 20 && late(&rounds, calls) <= 20, "{limit} MiB: {rounds:?}");
    }
}
