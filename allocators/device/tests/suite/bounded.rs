//! Tests that repeated rounds reach a steady state: neither memory nor driver calls grow with the
//! number of rounds.

use crate::support::{MIB, Random, Rig};
use aquifer_device::Block;
use aquifer_driver::{Access, Call, sim::Sim};
use aquifer_stream::Stream;
use std::{sync::Barrier, thread};

/// Runs rounds on a device that lags `lag` rounds behind the host.
///
/// In each round every stream allocates blocks of some MiB, another stream uses them, and all are
/// freed. Returns the bytes that a round requests in total, and the largest number of bytes held.
fn lagging_rounds(streams: u64, sizes: std::ops::RangeInclusive<u64>, lag: usize) -> (u64, u64) {
    const ROUNDS: usize = 40;
    let rig = Rig::on(Sim::h200(1).symbolic().stepped(), 100 << 10, |_| ());
    let streams: Vec<Stream> = (0..streams).map(|_| rig.stream()).collect();
    let mut random = Random::new(7);
    let most = sizes.end() - sizes.start() + 1;
    // Each round has the same sizes in a different order and on different streams.
    let sizes: Vec<u64> = (0..24).map(|_| (sizes.start() + random.below(most)) * MIB).collect();
    let pending = || streams.iter().map(|s| rig.sim.pending(s.raw())).collect::<Vec<_>>();
    // Work queued on each stream in each round.
    let mut queued: Vec<Vec<usize>> = Vec::new();
    for round in 0..ROUNDS {
        let before = pending();
        let mut live = Vec::new();
        for (place, bytes) in sizes.iter().enumerate() {
            let (home, user) = (
                &streams[(place + round) % streams.len()],
                &streams[(place + round + 1) % streams.len()],
            );
            let block = rig.alloc(home, *bytes);
            rig.uses(user, &block, Access::Write);
            live.push(block);
        }
        drop(live);
        queued.push(pending().iter().zip(before).map(|(now, before)| now - before).collect());
        // Run all work except that of the last rounds.
        let behind =
            |at: usize| queued.iter().rev().take(lag).map(|round| round[at]).sum::<usize>();
        let late = |at: usize| rig.sim.pending(streams[at].raw()) > behind(at);
        while (0..streams.len()).any(|at| late(at) && rig.sim.step(streams[at].raw())) {}
    }
    rig.assert_silent();
    (sizes.iter().sum(), rig.pool.stats().peak_physical)
}

/// Totals of one round of sixteen threads with a stream each.
#[derive(Clone, Copy, Debug)]
struct Counts {
    moved: u64,
    /// Calls that map memory.
    mapped: u64,
}

/// Allocations in one round by all threads.
const OPERATIONS: u64 = 16 * 500;

/// Runs ten rounds of sixteen threads under a limit in MiB.
///
/// Each thread holds sixteen blocks of up to 1 MiB, about 130 MiB in all, and replaces them at
/// random.
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
                live.swap_remove(random.below(16) as usize);
            }
            live.push(rig.alloc(stream, 1 + random.below(MIB)));
        }
    };
    let counted: Vec<_> = thread::scope(|scope| {
        for number in 0..THREADS {
            let (stream, together, round) = (rig.stream(), &together, &round);
            scope.spawn(move || {
                let (mut random, mut live) = (Random::new(number), Vec::new());
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
            let mapped = rig.calls(Call::Map);
            Counts { moved: stats.moves, mapped }
        });
        rounds.collect()
    });
    let none = Counts { moved: 0, mapped: 0 };
    let before = std::iter::once(&none).chain(&counted);
    let each = before.zip(&counted).map(|(before, now)| Counts {
        moved: now.moved - before.moved,
        mapped: now.mapped - before.mapped,
    });
    each.collect()
}

/// Returns the total over the last five of ten rounds, which request nothing new.
fn late(rounds: &[Counts], of: impl Fn(&Counts) -> u64) -> u64 {
    rounds[5..].iter().map(of).sum()
}

#[test]
fn rounds_on_a_lagging_device_use_bounded_memory() {
    // Large blocks, for which idle memory of other streams is tried early, and small ones.
    for sizes in [16..=48, 1..=8, 1..=48] {
        for streams in 2..=4 {
            for lag in [4, 40] {
                let (need, held) = lagging_rounds(streams, sizes.clone(), lag);
                // Twice the largest amount ever in use, and one or two handles.
                assert!(
                    held <= need / 4 * 9,
                    "{streams} streams, {sizes:?} MiB, {lag} rounds behind: {need} bytes are needed, {held} were held"
                );
            }
        }
    }
}

#[test]
fn sixteen_threads_with_a_stream_each_stop_mapping_memory() {
    for limit in [1000, 4000] {
        let rounds = sixteen_threads(limit);
        let calls = late(&rounds, |round| round.mapped + round.moved);
        assert!(calls <= 5 * OPERATIONS / 100, "{limit} MiB: {rounds:?}");
    }
}

#[test]
fn sixteen_threads_near_the_limit_reach_a_steady_state() {
    for limit in [200, 260] {
        let rounds = sixteen_threads(limit);
        let calls = |round: &Counts| round.mapped + round.moved;
        let all: u64 = rounds.iter().map(calls).sum();
        // Each handle is mapped once, and few are mapped again: how many is up to chance.
        assert!(all <= limit / 2 + 60 && late(&rounds, calls) <= 40, "{limit} MiB: {rounds:?}");
    }
}
