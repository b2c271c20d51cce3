//! The reported peaks are those of all streams together: never below the truth, and above it by at
//! most 1 MiB a stream.

use crate::support::{MIB, Random, Rig};
use aquifer_device::{Block, PoolConfig};
use aquifer_driver::sim::Sim;
use aquifer_stream::Stream;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

fn rig(streams: usize, change: impl FnOnce(&mut PoolConfig)) -> (Rig, Vec<Stream>) {
    let rig = Rig::on(Sim::h200(1).symbolic(), 64 << 10, change);
    let streams = (0..streams).map(|_| rig.stream()).collect();
    (rig, streams)
}

#[test]
fn physical_memory_that_parts_of_a_pool_hold_at_different_times_is_not_added() {
    let rig = Rig::new(16);
    let s = rig.stream();
    drop(rig.stable(&s, 12 * MIB));
    s.synchronize().unwrap();
    let block = rig.alloc(&s, 10 * MIB);
    let stats = rig.pool.stats();
    assert_eq!((stats.physical, stats.peak_physical), (10 * MIB, 12 * MIB));
    let stable = rig.stable(&s, 4 * MIB);
    assert_eq!(rig.pool.stats().peak_physical, 14 * MIB);
    drop(block);
    rig.pool.trim(0).unwrap();
    rig.pool.reset_peaks();
    assert_eq!(rig.pool.stats().peak_physical, 4 * MIB);
    drop(stable);
}

#[test]
fn the_peak_of_a_single_stream_is_exact() {
    let (rig, streams) = rig(1, |_| ());
    let (mut next, mut live, mut peaks) = (Random::new(1), Vec::<Block>::new(), (0, 0));
    for step in 0..3000 {
        if live.is_empty() || next.below(100) < 51 {
            let bits = next.below(22);
            live.push(rig.alloc(&streams[0], 1 + next.below(1 << bits)));
        } else {
            drop(live.swap_remove(next.index(live.len())));
        }
        let now = |of: fn(&Block) -> u64| live.iter().map(of).sum::<u64>();
        peaks = (now(Block::capacity).max(peaks.0), now(Block::bytes).max(peaks.1));
        let stats = rig.pool.stats();
        assert_eq!((stats.peak_live, stats.peak_requested), peaks, "step {step}");
    }
}

#[test]
fn peaks_without_caches_are_exact() {
    let (rig, streams) = rig(3, |config| config.bypass = true);
    for round in 0..3 {
        for stream in &streams {
            drop(rig.alloc(stream, 4 * MIB));
            drop(rig.stable(stream, 6 * MIB));
        }
        let stats = rig.pool.stats();
        assert_eq!((stats.peak_requested, stats.peak_live), (6 * MIB, 6 * MIB), "round {round}");
    }
}

/// Each thread has a stream of its own, and may have all that the others leave. So each stream's
/// own peak comes close to the whole.
#[test]
fn the_peak_of_threads_is_within_its_bound_at_every_time() {
    const THREADS: usize = 6;
    const WHOLE: u64 = 96 * MIB;
    let (rig, streams) = rig(THREADS, |_| ());
    let room = AtomicU64::new(WHOLE);
    let take =
        |bytes| room.fetch_update(SeqCst, SeqCst, |left: u64| left.checked_sub(bytes)).is_ok();
    // What is live for certain: from after an allocation to before the free.
    let (certain, certain_peak) = (AtomicU64::new(0), AtomicU64::new(0));
    std::thread::scope(|threads| {
        for (seed, stream) in streams.iter().enumerate() {
            let (rig, room, certain, certain_peak) = (&rig, &room, &certain, &certain_peak);
            let take = &take;
            threads.spawn(move || {
                let (mut next, mut live) = (Random::new(seed as u64), Vec::<Block>::new());
                for _ in 0..3000 {
                    let size = (1 + next.below(8)) * MIB;
                    let full = live.len() > 8 && next.below(4) > 0 || next.below(16) == 0;
                    if full || !take(size) {
                        // All of it, so that another stream can rise.
                        let bytes: u64 = live.iter().map(Block::bytes).sum();
                        certain.fetch_sub(bytes, SeqCst);
                        live.clear();
                        room.fetch_add(bytes, SeqCst);
                        continue;
                    }
                    live.push(rig.alloc(stream, size));
                    let now = certain.fetch_add(size, SeqCst) + size;
                    certain_peak.fetch_max(now, SeqCst);
                    if next.below(50) == 0 {
                        let known = certain_peak.load(SeqCst);
                        let told = rig.pool.stats().peak_requested;
                        let bounds = known..=WHOLE + THREADS as u64 * MIB;
                        assert!(bounds.contains(&told), "{told} was told, {known} is known");
                    }
                }
                let bytes: u64 = live.iter().map(Block::bytes).sum();
                certain.fetch_sub(bytes, SeqCst);
                live.clear();
            });
        }
    });
    let told = rig.pool.stats().peak_requested;
    let bounds = certain_peak.load(SeqCst)..=WHOLE + THREADS as u64 * MIB;
    assert!(bounds.contains(&told), "{told} was told, {bounds:?} is true");
    rig.assert_silent();
}
