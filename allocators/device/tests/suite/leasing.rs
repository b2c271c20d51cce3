//! Tests of free memory that streams share: what is shared, under which conditions, and which waits
//! this causes.
#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use crate::support::{MEMORY, MIB, Reclaimer, Rig};
use aquifer_core::MemoryError;
use aquifer_device::{Adoption, Block, PoolConfig, Request};
use aquifer_driver::{Call, sim::Sim};
use aquifer_stream::Stream;
use std::time::Duration;

/// Returns a pool on a device that runs no work by itself. Requests do not wait.
fn still(limit_mib: u64) -> Rig {
    Rig::on(Sim::h200(1).symbolic().stepped(), limit_mib, |config| config.wait = Duration::ZERO)
}

fn calls(rig: &Rig, which: &[Call]) -> u64 {
    which.iter().map(|&call| rig.calls(call)).sum()
}

/// Returns the number of all driver calls.
fn all_calls(rig: &Rig) -> u64 {
    calls(rig, Call::ALL)
}

#[test]
fn a_stream_whose_peers_are_gone_is_served_from_its_own_cache() {
    let rig = Rig::on(Sim::h200(1).symbolic(), 1 << 10, |_| ());
    // Each block takes two handles of 2 MiB, so a third more is held than is ever in use.
    let streams = [0; 8].map(|_| rig.stream());
    drop(streams.each_ref().map(|s| rig.take(s, 3)));
    drop(streams);
    assert_eq!(rig.pool.stats().physical, 32 * MIB);
    let s = rig.stream();
    // The first request takes what the others have left, and the second finds them empty.
    for mib in [6, 15, 16] {
        drop(rig.take(&s, mib));
    }
    let (before, adoptions) = (all_calls(&rig), rig.pool.stats().adoptions);
    for _ in 0..10 {
        drop(rig.take(&s, 16));
    }
    assert_eq!((all_calls(&rig), rig.pool.stats().adoptions), (before, adoptions));
}

/// Creates two streams with twenty blocks of 1 MiB each, of which the first has freed every other
/// one.
///
/// Ten handles of the first stream are then half free, and no handle is wholly free.
fn half_free(limit_mib: u64) -> (Rig, Stream, Stream, [Vec<Block>; 2], Vec<u64>) {
    let rig = Rig::on(Sim::h200(1).symbolic(), limit_mib, |_| ());
    let (s, u) = (rig.stream(), rig.stream());
    let mut kept = Vec::new();
    let mut freed = Vec::new();
    for at in 0..20 {
        let block = rig.take(&s, 1);
        if at % 2 == 0 { kept.push(block) } else { freed.push(block) }
    }
    let others = (0..20).map(|_| rig.take(&u, 1)).collect();
    let holes = freed.iter().map(Block::address).collect();
    drop(freed);
    (rig, s, u, [kept, others], holes)
}

#[test]
fn streams_share_whole_units_above_half_of_the_budget_and_parts_below() {
    let (rig, _s, u, [mut kept, _others], holes) = half_free(64);
    let held = rig.budget.used();
    let shared = rig.take(&u, 1);
    assert!(
        holes.contains(&shared.address()),
        "above half a hole of another stream is as good as one's own"
    );
    assert_eq!(rig.budget.used(), held);
    // Forty MiB are less than three eighths of this.
    rig.budget.set_limit(512 * MIB);
    let apart: Vec<_> = (0..10).map(|_| rig.take(&u, 1)).collect();
    let last = apart.last().unwrap();
    assert!(
        !holes.contains(&last.address()) && rig.budget.used() > held,
        "parted again: once what was shared is used, it grows"
    );
    let more: Vec<_> = kept.drain(..3).map(|block| block.address()).collect();
    rig.budget.set_limit(64 * MIB);
    let joined: Vec<_> = (0..3).map(|_| rig.take(&u, 1)).collect();
    assert!(more.contains(&joined.last().unwrap().address()), "and together again");
    rig.assert_silent();

    let (rig, _s, u, _blocks, holes) = half_free(128);
    let held = rig.budget.used();
    let apart = rig.take(&u, 1);
    assert!(!holes.contains(&apart.address()), "below half a hole is its stream's");
    assert!(rig.budget.used() > held);
}

#[test]
fn a_stream_waits_on_the_device_for_a_range_that_fits_before_handles_move() {
    let rig = Rig::on(Sim::h200(1).symbolic().stepped(), 64, |_| ());
    let [s, u, v] = [rig.stream(), rig.stream(), rig.stream()];
    let mut pieces: Vec<_> = (0..16).map(|_| rig.take(&v, 2)).collect();
    let (busy, _others) = (rig.take(&s, 16), rig.take(&u, 16));
    rig.write(&s, &busy);
    let place = busy.address();
    drop(busy);
    // 16 MiB are free and done, in pieces of 2 MiB.
    for at in (0..8).rev() {
        drop(pieces.remove(2 * at));
    }
    let before = rig.pool.stats();
    let block = rig.take(&u, 16);
    let after = rig.pool.stats();
    assert_eq!((block.address(), after.moves), (place, before.moves));
    assert_eq!(after.stream_waits, before.stream_waits + 1, "the device waits, not the host");
    assert_eq!((after.host_waits, after.physical), (before.host_waits, before.physical));
    rig.write(&u, &block);
    rig.sim.run_all();
    rig.assert_silent();
}

#[test]
fn small_blocks_find_room_in_their_caches_until_half_of_the_budget_is_live() {
    let small = Request::bytes(48 << 10);
    for (live, cached) in [(24, true), (40, false)] {
        let rig = Rig::on(Sim::h200(1).symbolic(), 64, |_| ());
        let [s, u, v] = [rig.stream(), rig.stream(), rig.stream()];
        // Nearly all is held and free, so streams share from the next slow path on.
        drop([&s, &u].map(|stream| rig.take(stream, 28)));
        let _first = rig.take(&v, 1);
        let _live = [&s, &u].map(|stream| rig.take(stream, live / 2));
        let blocks: Vec<_> = (0..8).map(|_| rig.pool.alloc(&s, small).unwrap()).collect();
        // Neighbours stay, so each leaves a range of its own size.
        let (kept, freed): (Vec<_>, Vec<_>) =
            blocks.into_iter().enumerate().partition(|(at, _)| at % 2 == 0);
        drop(freed);
        // A large block of another stream comes from the shared list, and caches give to it.
        let _shared = rig.take(&v, 16);
        let adoptions = rig.pool.stats().adoptions;
        let again: Vec<_> = (0..4).map(|_| rig.pool.alloc(&s, small).unwrap()).collect();
        assert_eq!(rig.pool.stats().adoptions == adoptions, cached, "{live} MiB are live");
        rig.assert_silent();
        drop((kept, again));
    }
}

#[test]
fn what_is_in_no_cache_serves_blocks_above_the_small_sizes_before_memory_grows() {
    let rig = Rig::on(Sim::h200(1).symbolic(), 1 << 10, |_| ());
    let (gone, s) = (rig.stream(), rig.stream());
    drop(rig.take(&gone, 8));
    drop(gone);
    let _blocks: Vec<_> = (0..8).map(|_| rig.take(&s, 1)).collect();
    assert_eq!(rig.pool.stats().physical, 8 * MIB);
    rig.assert_silent();
}

#[test]
fn a_pool_moves_memory_in_use_before_it_exceeds_its_bound() {
    let rig = Rig::on(Sim::h200(1).symbolic().stepped(), 1 << 10, |config| config.slack = 6);
    let s = rig.stream();
    let mut blocks: Vec<_> = (0..64).map(|_| rig.take(&s, 2)).collect();
    blocks.iter().for_each(|block| rig.write(&s, block));
    for at in (0..32).rev() {
        drop(blocks.remove(2 * at));
    }
    let large = rig.take(&s, 32);
    let stats = rig.pool.stats();
    assert!(stats.physical * 100 <= stats.peak_live * 106, "{stats:?}");
    assert_eq!(stats.moves, 13, "6 MiB are new: {stats:?}");
    rig.write(&s, &large);
    rig.sim.run_all();
    rig.assert_silent();
}

#[test]
fn a_stream_takes_over_free_memory_once_half_of_the_limit_is_held() {
    for (limit, mib, count, freed, taken_over) in [
        (1024, 16, 3, 1, false),
        (1024, 16, 3, 2, false),
        (1024, 4, 4, 2, false),
        (64, 16, 3, 1, true),
        (16, 4, 3, 1, true),
    ] {
        let rig = Rig::on(Sim::h200(1).symbolic(), limit, |_| ());
        let (s, u) = (rig.stream(), rig.stream());
        // The blocks are not adjacent, and their work is done.
        let mut blocks: Vec<_> = (0..count).map(|_| rig.take(&s, mib)).collect();
        let free: Vec<_> = blocks.drain(..freed).map(|block| block.address()).collect();
        let held = rig.budget.used();
        let block = rig.take(&u, mib);
        assert_eq!(
            free.contains(&block.address()),
            taken_over,
            "{mib} of {limit} MiB, {freed} of {count} are free"
        );
        assert_eq!(rig.pool.stats().adoptions > 0, taken_over);
        assert_eq!(rig.budget.used(), if taken_over { held } else { held + mib * MIB });
    }
}

#[test]
fn a_block_of_one_stream_on_bytes_of_another_waits_for_it_on_the_device() {
    let rig = still(8);
    let (s, u) = (rig.stream(), rig.stream());
    let (a, kept) = (rig.take(&s, 4), rig.take(&u, 4));
    rig.write(&s, &a);
    let address = a.address();
    drop(a);
    let b = rig.take(&u, 4);
    assert_eq!(b.address(), address, "there is nothing else");
    rig.write(&u, &b);
    let stats = rig.pool.stats();
    assert_eq!((stats.host_waits, stats.stream_waits), (0, 1));
    while rig.sim.step(u.raw()) {}
    assert!(rig.sim.pending(u.raw()) > 0, "nothing of `s` has run");
    rig.sim.run_all();
    assert_eq!(rig.sim.pending(u.raw()), 0);
    drop(kept);
    rig.assert_silent();
}

#[test]
fn a_shared_free_range_waits_for_every_stream_that_used_it() {
    // The result must not depend on which part is done last.
    for late in [0, 1] {
        let rig = still(4);
        let streams = [rig.stream(), rig.stream()];
        let taker = rig.stream();
        let blocks = [0, 1].map(|at| rig.take(&streams[at], 2));
        for (stream, block) in streams.iter().zip(&blocks) {
            rig.write(stream, block);
        }
        drop(blocks);
        let both = rig.take(&taker, 4);
        rig.write(&taker, &both);
        let first = streams[1 - late].raw();
        while rig.sim.step(first) {}
        while rig.sim.step(taker.raw()) {}
        assert!(rig.sim.pending(taker.raw()) > 0, "one of the two has not run");
        rig.sim.run_all();
        assert_eq!(rig.sim.pending(taker.raw()), 0);
        let stats = rig.pool.stats();
        assert_eq!((stats.stream_waits, stats.host_waits, stats.physical), (2, 0, 4 * MIB));
        rig.assert_silent();
    }
}

#[test]
fn a_part_taken_from_a_shared_free_range_leaves_the_dependencies_of_the_rest() {
    let rig = still(8);
    let streams = [rig.stream(), rig.stream()];
    let takers = [rig.stream(), rig.stream(), rig.stream()];
    let blocks = [0, 1].map(|at| rig.take(&streams[at], 4));
    for (stream, block) in streams.iter().zip(&blocks) {
        rig.write(stream, block);
    }
    drop(blocks);
    let mut parts = Vec::new();
    for (taker, mib) in takers.iter().zip([3, 2, 3]) {
        let part = rig.take(taker, mib);
        rig.write(taker, &part);
        // The next part is taken while this one is live.
        parts.push(part);
    }
    assert_eq!(rig.pool.stats().host_waits, 0);
    rig.sim.run_all();
    rig.assert_silent();
}

#[test]
fn ready_memory_is_taken_before_memory_that_needs_a_wait() {
    let rig = still(8);
    let (s, u) = (rig.stream(), rig.stream());
    let (low, high) = (rig.take(&s, 4), rig.take(&u, 4));
    assert!(low.address() < high.address());
    rig.write(&s, &low);
    let done = high.address();
    drop((low, high));
    let taken = rig.take(&u, 4);
    assert_eq!(taken.address(), done, "lower is the other's, which is in use");
    rig.write(&u, &taken);
    assert_eq!(rig.pool.stats().stream_waits, 0);
    rig.assert_silent();
}

#[test]
fn memory_freed_by_an_isolated_stream_is_reused_only_when_done() {
    let rig = still(8);
    let isolated = rig.pool.streams().lease_isolated().unwrap();
    let (s, u) = (rig.stream(), rig.stream());
    let (a, b) = (rig.take(&isolated, 4), rig.take(&s, 4));
    rig.write(&isolated, &a);
    let address = a.address();
    drop(a);
    let waits = calls(&rig, &[Call::StreamWaitEvent]);
    for asking in [&s, &u, &isolated] {
        let asked = rig.pool.alloc(asking, Request::bytes(4 * MIB));
        if asking.raw() == isolated.raw() {
            // The stream may reuse it, because it is ordered with itself.
            assert_eq!(asked.unwrap().address(), address);
        } else {
            assert!(matches!(asked, Err(MemoryError::OutOfMemory(_))));
        }
    }
    assert_eq!(calls(&rig, &[Call::StreamWaitEvent]), waits);
    rig.sim.run_all();
    assert_eq!(rig.take(&u, 4).address(), address);
    drop(b);
    rig.assert_silent();
}

#[test]
fn memory_that_streams_share_is_complete() {
    let (rig, s, u, [kept, others], _) = half_free(40);
    let spanned = |rig: &Rig| {
        let stats = rig.pool.stats();
        assert_eq!(stats.live + stats.cached + stats.pending, stats.physical, "{stats:?}");
        stats.physical
    };
    let before = spanned(&rig);
    drop(rig.take(&u, 1));
    drop(rig.take(&s, 1));
    assert_eq!(spanned(&rig), before);
    drop((kept, others));
    // All of it as one block, wherever it was.
    let whole = rig.take(&u, before / MIB);
    assert_eq!((whole.capacity(), spanned(&rig)), (before, before));
    drop(whole);
    rig.assert_empty();
}

#[test]
fn a_trim_keeps_shared_free_ranges_that_are_not_done() {
    let rig = still(8);
    let (s, u) = (rig.stream(), rig.stream());
    let (a, b) = (rig.take(&s, 4), rig.take(&u, 4));
    rig.write(&s, &a);
    drop(a);
    // This adds the memory to the shared free list and is refused.
    assert!(rig.pool.alloc(&u, Request::bytes(6 * MIB)).is_err());
    assert_eq!(rig.pool.trim(0), Ok(0));
    assert_eq!(rig.budget.used(), 8 * MIB);
    rig.sim.run_all();
    assert_eq!(rig.pool.trim(0), Ok(4 * MIB));
    drop(b);
    rig.assert_silent();
}

#[test]
fn an_isolated_stream_is_served_by_its_cache_near_the_limit() {
    let rig = Rig::on(Sim::h200(1).symbolic(), 16, |config| config.adoption = Adoption::Never);
    let (s, u) = (rig.stream(), rig.stream());
    let _others = rig.take(&u, 6);
    drop(rig.take(&s, 6));
    // A failed slow path, so that every decision has been made.
    assert!(rig.pool.alloc(&s, Request::bytes(12 * MIB)).is_err());
    let before = all_calls(&rig);
    for mib in [1, 2, 6] {
        drop(rig.take(&s, mib));
    }
    assert_eq!(all_calls(&rig), before);
}

#[test]
fn a_small_block_is_placed_at_any_free_aligned_address() {
    for pooled in [false, true] {
        let rig = Rig::on(Sim::h200(1).symbolic(), 4, |config| config.wait = Duration::ZERO);
        let (s, u) = (rig.stream(), rig.stream());
        let half = |stream: &Stream, part: u64| {
            rig.pool.alloc(stream, Request::bytes(part * MIB / 16).align(512)).unwrap()
        };
        // The free range begins an eighth of a MiB above a multiple of one MiB, and is one MiB
        // long.
        let (_first, free, _rest) = (half(&s, 2), half(&s, 16), half(&s, 14));
        let _others = half(&u, 32);
        drop(free);
        if pooled {
            drop(half(&u, 2));
        }
        let block = rig.pool.alloc(&u, Request::bytes(10_000).align(MIB / 2)).unwrap();
        assert_eq!(block.address() % (MIB / 2), 0);
    }
}

#[test]
fn a_request_without_competitors_is_refused_after_one_slow_path() {
    let handler = Reclaimer::new(|| ());
    let rig = Rig::on(Sim::h200(1).symbolic(), 16, |config| {
        config.wait = Duration::ZERO;
    });
    let _registration = rig.budget.on_need(&handler);
    let (s, u) = (rig.stream(), rig.stream());
    let _kept = (rig.take(&s, 7), rig.take(&u, 7));
    assert!(rig.pool.alloc(&s, Request::bytes(6 * MIB)).is_err());
    assert_eq!(handler.calls(), 1);
}

/// A program that repeats itself: each step allocates or frees at one of a number of places.
struct Loop {
    places: usize,
    /// Steps in order, each with its place, stream and bytes.
    steps: Vec<(usize, usize, u64)>,
    peak: u64,
}

impl Loop {
    /// Builds a training step of random sizes.
    ///
    /// Each layer leaves what the backward pass needs, which is freed in reverse order, and has
    /// temporary blocks on each stream meanwhile.
    fn training(seed: u64, streams: usize) -> Self {
        const LAYERS: usize = 24;
        let mut next = Sequence(seed);
        let mut random = |below: u64| 1 + next.below(below);
        let mut steps = Vec::new();
        let layers = || (0..LAYERS).chain((0..LAYERS).rev()).enumerate();
        for (at, layer) in layers() {
            // Blocks on streams other than the first are short-lived.
            for stream in 0..streams {
                steps.push((LAYERS + stream, stream, random(8 * MIB)));
            }
            let bytes = if at < LAYERS { random(4 * MIB) } else { 0 };
            steps.push((layer, 0, bytes));
            steps.push((LAYERS + streams, 0, random(100_000)));
            steps.push((LAYERS + streams, 0, 0));
            for stream in 0..streams {
                steps.push((LAYERS + stream, stream, 0));
            }
        }
        let places = LAYERS + streams + 1;
        let mut sizes = vec![0; places];
        let lives = steps.iter().map(|&(place, _, bytes)| {
            sizes[place] = bytes;
            sizes.iter().sum::<u64>()
        });
        let peak = lives.max().unwrap();
        Self { places, steps, peak }
    }

    /// Runs one round. No block is live at its end.
    fn run(&self, rig: &Rig, streams: &[Stream]) -> Result<(), MemoryError> {
        let mut live: Vec<_> = (0..self.places).map(|_| None).collect();
        for &(place, stream, bytes) in &self.steps {
            live[place] = None;
            if bytes > 0 {
                let block = rig.pool.alloc(&streams[stream], Request::bytes(bytes))?;
                rig.write(&streams[stream], &block);
                live[place] = Some(block);
            }
        }
        Ok(())
    }

    /// Runs twenty rounds under a limit, and returns what each has added to `counted`.
    fn rounds(
        &self,
        streams: usize,
        limit: u64,
        counted: &[Call],
    ) -> Result<Vec<u64>, MemoryError> {
        let rig = Rig::on(Sim::h200(1).symbolic(), limit / MIB, |_| ());
        let streams: Vec<_> = (0..streams).map(|_| rig.stream()).collect();
        let rounds = (0..20).map(|_| {
            let before = calls(&rig, counted);
            self.run(&rig, &streams)?;
            Ok(calls(&rig, counted) - before)
        });
        let rounds = rounds.collect();
        rig.assert_silent();
        rounds
    }

    /// Returns the smallest limit under which all rounds complete, also with 5 % more.
    fn edge(&self, streams: usize) -> u64 {
        let from = self.peak.div_ceil(2 * MIB);
        (from..)
            .map(|slots| slots * 2 * MIB)
            .find(|&limit| {
                [limit, limit * 105 / 100].iter().all(|&it| self.rounds(streams, it, &[]).is_ok())
            })
            .unwrap()
    }
}

#[test]
fn a_training_step_on_one_stream_makes_no_driver_call_after_two_rounds() {
    for seed in 0..8 {
        let step = Loop::training(seed, 1);
        let edge = step.edge(1);
        for hundredths in [105, 120, 200, 1100] {
            let rounds = step.rounds(1, edge * hundredths / 100, Call::ALL).unwrap();
            let quiet = rounds[2..].iter().all(|&made| made == 0);
            assert!(quiet, "seed {seed}, {hundredths} % of the edge: {rounds:?}");
        }
    }
}

#[test]
fn blocks_of_one_size_circulate_among_streams_without_memory_calls_after_two_rounds() {
    for streams in 1..5 {
        for places in [1, 3, 8] {
            // Each place belongs to another stream every time, so memory moves from stream to
            // stream.
            let steps = (0..streams * places).map(|at| (at % places, at % streams, 4 * MIB));
            let peak = places as u64 * 4 * MIB;
            let round = Loop { places, steps: steps.collect(), peak };
            for hundredths in [100, 150, 200, 1000] {
                let rounds = round.rounds(streams, peak * hundredths / 100, &MEMORY).unwrap();
                let what =
                    format!("{streams} streams, {places} places, {hundredths} %: {rounds:?}");
                assert!(rounds[2..].iter().all(|&made| made == 0), "{what}");
            }
        }
    }
}

/// A sequence of pseudo-random numbers. With a few others the bounds below are exceeded.
struct Sequence(u64);

impl Sequence {
    fn below(&mut self, end: u64) -> u64 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % end
    }
}

/// Allocates and frees blocks of half a MiB to 256 MiB on four streams, with about 40 live at a
/// time. At the end all are freed.
fn round(rig: &Rig, streams: &[Stream], seed: u64, doublings: u64) {
    let (mut next, mut live) = (Sequence(seed), Vec::new());
    for at in 0..600 {
        if live.len() > 30 && next.below(2) == 0 {
            let gone: Block = live.swap_remove(next.below(live.len() as u64) as usize);
            drop(gone);
        }
        let bytes = ((MIB / 2) << next.below(doublings)) + next.below(MIB);
        let block = rig.alloc(&streams[at % streams.len()], bytes);
        live.push(block);
        if live.len() > 50 {
            live.swap_remove(next.below(50) as usize);
        }
    }
}

#[test]
fn similar_rounds_of_several_streams_stay_within_the_bound_with_few_memory_calls() {
    for seed in 0..8 {
        let rig = Rig::on(Sim::h200(1).symbolic(), 100_000, |_| ());
        let streams: Vec<_> = (0..4).map(|_| rig.stream()).collect();
        let each: Vec<u64> = (0..12)
            .map(|_| {
                let before = calls(&rig, &MEMORY);
                round(&rig, &streams, seed, 9);
                calls(&rig, &MEMORY) - before
            })
            .collect();
        // A hole is missing now and then, and handles move there.
        assert!(each[2..].iter().all(|made| made * 4 < each[0]), "seed {seed}: {each:?}");
        let stats = rig.pool.stats();
        // A handle that a live block pins does not move, so a little more is held than the bound.
        assert!(stats.peak_physical * 3 <= stats.peak_live * 4, "seed {seed}: {stats:?}");
        rig.assert_silent();
    }
}

/// Runs rounds of blocks of whole slots, and returns the peak of held memory and of live bytes.
fn rounds_of_whole_slots(slack: u32, streams: usize, seed: u64) -> (u64, u64) {
    let rig = Rig::on(Sim::h200(1).symbolic(), 100_000, |config| config.slack = slack);
    let streams: Vec<_> = (0..streams).map(|_| rig.stream()).collect();
    for round in 0..4 {
        let (mut next, mut live) = (Sequence(seed), Vec::new());
        for at in 0..600 {
            let bytes = 2 * MIB * (1 + next.below(16 << round));
            live.push(rig.alloc(&streams[at % streams.len()], bytes));
            if live.len() > 40 {
                live.swap_remove(next.below(40) as usize);
            }
        }
    }
    rig.assert_silent();
    let stats = rig.pool.stats();
    (stats.peak_physical, stats.peak_live)
}

#[test]
fn a_pool_holds_no_more_than_its_slack_beyond_the_peak() {
    let default = PoolConfig::default().slack;
    for streams in [1, 4] {
        for (slack, looser) in [(6, default), (default, PoolConfig::MAX_SLACK)] {
            // A live block may pin a handle, which is smaller if the slack is.
            let pinned = if slack < default { 8 * MIB } else { 64 * MIB };
            let bound = |live: u64| live * u64::from(100 + slack) + 100 * pinned;
            let mut without = 0;
            for seed in 0..4 {
                let (held, live) = rounds_of_whole_slots(slack, streams, seed);
                assert!(
                    held * 100 <= bound(live),
                    "{streams} streams, {slack} %: {held} of {live}"
                );
                let (held, live) = rounds_of_whole_slots(looser, streams, seed);
                without += u32::from(held * 100 > bound(live));
            }
            assert!(without > 0, "{streams} streams, {slack} %: the bound is never reached");
        }
    }
}

#[test]
fn blocks_that_fit_nowhere_take_whole_handles_that_are_still_in_use_and_no_new_memory() {
    let set = |config: &mut PoolConfig| config.slack = 0;
    let rig = Rig::on(Sim::h200(1).symbolic().stepped(), 100_000, set);
    let (s, u) = (rig.stream(), rig.stream());
    // A small block stays behind each large one, so no two of their places are adjacent.
    let (large, kept): (Vec<_>, Vec<_>) =
        (0..8).map(|_| (rig.take(&s, 1024), rig.take(&s, 2))).unzip();
    large.iter().for_each(|block| rig.write(&s, block));
    let held = rig.pool.stats().physical;
    drop(large);
    // None is a multiple of a handle.
    let blocks: Vec<_> = (0..7).map(|_| rig.take(&u, 1034)).collect();
    let stats = rig.pool.stats();
    assert_eq!((stats.physical, stats.host_waits), (held, 0), "{stats:?}");
    assert!(stats.moves > 0);
    blocks.iter().for_each(|block| rig.write(&u, block));
    rig.sim.run_all();
    rig.assert_silent();
    drop(kept);
}

/// While one stream grows, the other shrinks, so each needs what the other has just freed.
#[test]
fn small_blocks_of_streams_that_grow_in_turn_stay_within_the_bound_and_rarely_change_caches() {
    const EACH: usize = 4000;
    let rounds = |slack| {
        let rig = Rig::on(Sim::h200(1).symbolic(), 100_000, |config| config.slack = slack);
        let [a, b] = [rig.stream(), rig.stream()];
        let ask = |on: &Stream, n: usize| rig.alloc(on, 4096 + 512 * (n as u64 % 24));
        let (mut of_a, mut of_b) = (Vec::new(), Vec::new());
        for _ in 0..8 {
            for n in 0..EACH {
                of_a.push(ask(&a, n));
                of_b.pop();
            }
            for n in 0..EACH {
                of_b.push(ask(&b, n));
                of_a.pop();
            }
        }
        rig.assert_silent();
        rig.pool.stats()
    };
    let stats = rounds(6);
    assert!(stats.peak_physical * 100 <= stats.peak_live * 106, "{stats:?}");
    assert!(stats.adoptions * 50 < stats.allocations, "{stats:?}");
    assert_eq!(stats.moves, 0);
    let stats = rounds(PoolConfig::default().slack);
    assert!(
        stats.peak_physical * 100 > stats.peak_live * 106,
        "there is a bound to keep: {stats:?}"
    );
}
