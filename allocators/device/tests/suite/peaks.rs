//! The reported peaks are those of all streams together: never below the truth, and above it by at
//! most 1 MiB a stream.

use crate::support::{MIB, Random, Rig};
use aquifer_device::{Block, Debugging, PoolConfig, Request, StableBlock};
use aquifer_driver::sim::Sim;
use aquifer_stream::Stream;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

fn rig(streams: usize, change: impl FnOnce(&mut PoolConfig)) -> (Rig, Vec<Stream>) {
    let rig = Rig::on(Sim::h200(1).symbolic(), 64 << 10, change);
    let streams = (0..streams).map(|_| rig.stream()).collect();
    (rig, streams)
}

/// The true peaks of a pool with this many streams: live bytes, and requested bytes.
struct Truth {
    now: [u64; 2],
    peak: [u64; 2],
    slack: u64,
}

impl Truth {
    fn of(streams: usize) -> Self {
        Self { now: [0; 2], peak: [0; 2], slack: streams as u64 * MIB }
    }

    fn add(&mut self, bytes: [u64; 2]) {
        for ((now, peak), by) in self.now.iter_mut().zip(&mut self.peak).zip(bytes) {
            *now += by;
            *peak = (*peak).max(*now);
        }
    }

    fn remove(&mut self, bytes: [u64; 2]) {
        self.now.iter_mut().zip(bytes).for_each(|(now, by)| *now -= by);
    }

    fn check(&self, rig: &Rig, what: &str) {
        let stats = rig.pool.stats();
        assert_eq!([stats.live, stats.requested], self.now, "{what}");
        for (told, truth) in [stats.peak_live, stats.peak_requested].into_iter().zip(self.peak) {
            let bounds = truth..=truth + self.slack;
            assert!(bounds.contains(&told), "{what}: {told} was told, {truth} is true");
        }
    }
}

fn bytes_of(block: &Block) -> [u64; 2] {
    [block.capacity(), block.bytes()]
}

#[test]
fn peaks_that_fall_at_different_times_are_not_added() {
    for count in [2, 8] {
        let (rig, streams) = rig(count, |_| ());
        for round in 0..3 {
            for stream in &streams {
                let blocks: Vec<_> = (0..16)
                    .map(|_| rig.pool.alloc(stream, Request::bytes(4 * MIB)).unwrap())
                    .collect();
                drop(blocks);
            }
            let (stats, truth) = (rig.pool.stats(), 64 * MIB);
            let bounds = truth..=truth + count as u64 * MIB;
            assert!(bounds.contains(&stats.peak_live), "round {round}: {stats:?}");
            assert!(bounds.contains(&stats.peak_requested), "round {round}: {stats:?}");
        }
    }
}

#[test]
fn physical_memory_that_parts_of_a_pool_hold_at_different_times_is_not_added() {
    let rig = Rig::new(16);
    let s = rig.stream();
    drop(rig.pool.alloc_stable(&s, Request::bytes(12 * MIB)).unwrap());
    s.synchronize().unwrap();
    let block = rig.pool.alloc(&s, Request::bytes(10 * MIB)).unwrap();
    let stats = rig.pool.stats();
    assert_eq!((stats.physical, stats.peak_physical), (10 * MIB, 12 * MIB));
    let stable = rig.pool.alloc_stable(&s, Request::bytes(4 * MIB)).unwrap();
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
    let (mut truth, mut next, mut live) = (Truth::of(0), Random::new(1), Vec::new());
    for step in 0..3000 {
        if live.is_empty() || next.below(100) < 51 {
            let bits = next.below(22);
            let size = 1 + next.below(1 << bits);
            live.push(rig.pool.alloc(&streams[0], Request::bytes(size)).unwrap());
            truth.add(live.last().map(bytes_of).unwrap());
        } else {
            let block = live.swap_remove(next.index(live.len()));
            truth.remove(bytes_of(&block));
        }
        truth.check(&rig, &format!("step {step}"));
    }
}

#[test]
fn peaks_of_any_program_are_within_their_bound_also_after_a_reset() {
    for seed in 0..24 {
        let count = 1 + (seed % 6) as usize;
        let (rig, streams) = rig(count, |_| ());
        let (mut truth, mut next) = (Truth::of(count), Random::new(seed));
        let (mut live, mut stable) = (Vec::new(), Vec::<(StableBlock, u64)>::new());
        let largest = 14 + next.below(12);
        for step in 0..1500 {
            let stream = &streams[next.below(count as u64) as usize];
            let bits = 9 + next.below(largest - 9);
            let size = 1 + next.below(1 << bits);
            match next.below(100) {
                0 => {
                    rig.pool.reset_peaks();
                    truth.peak = truth.now;
                }
                1 if stable.len() < 4 => {
                    let block = rig.pool.alloc_stable(stream, Request::bytes(size)).unwrap();
                    truth.add([block.capacity(), size]);
                    stable.push((block, size));
                }
                2 => {
                    if let Some((block, size)) = stable.pop() {
                        truth.remove([block.capacity(), size]);
                    }
                }
                3..50 => {
                    live.push(rig.pool.alloc(stream, Request::bytes(size)).unwrap());
                    truth.add(live.last().map(bytes_of).unwrap());
                }
                50..53 => {
                    let address = rig.pool.alloc_raw(stream, Request::bytes(size)).unwrap();
                    live.push(rig.pool.from_raw(address).unwrap());
                    truth.add(live.last().map(bytes_of).unwrap());
                }
                _ if live.len() > 20 || next.below(3) == 0 && !live.is_empty() => {
                    // Now and then many of them, so that the streams move far from the peak.
                    let many = if next.below(40) == 0 { live.len() } else { 1 };
                    for _ in 0..many {
                        let block = live.swap_remove(next.index(live.len()));
                        truth.remove(bytes_of(&block));
                    }
                }
                _ => {}
            }
            truth.check(&rig, &format!("seed {seed}, step {step}"));
        }
    }
}

#[test]
fn blocks_that_other_streams_use_and_streams_that_come_and_go_keep_the_bound() {
    let (rig, streams) = rig(1, |_| ());
    let mut truth = Truth::of(3);
    for round in 0..40 {
        let (mine, theirs) = (&streams[0], rig.stream());
        let block = rig.pool.alloc(&theirs, Request::bytes(24 * MIB)).unwrap();
        let of_block = bytes_of(&block);
        truth.add(of_block);
        truth.check(&rig, "one block");
        mine.wait_for(&theirs).unwrap();
        block.record_use(mine, aquifer_driver::Access::Read).unwrap();
        drop(block);
        truth.remove(of_block);
        let block = rig.pool.alloc(mine, Request::bytes((20 + round) * MIB)).unwrap();
        truth.add(bytes_of(&block));
        truth.check(&rig, "the other block");
        truth.remove(bytes_of(&block));
        drop((block, theirs));
        mine.synchronize().unwrap();
        rig.pool.trim(0).unwrap();
    }
}

#[test]
fn peaks_without_caches_are_exact() {
    let bypass = |config: &mut PoolConfig| config.bypass = true;
    let checked = |config: &mut PoolConfig| config.debug = Debugging::all();
    for (bypassed, (rig, streams)) in [(true, rig(3, bypass)), (false, rig(3, checked))] {
        for round in 0..3 {
            for stream in &streams {
                drop(rig.pool.alloc(stream, Request::bytes(4 * MIB)).unwrap());
                drop(rig.pool.alloc_stable(stream, Request::bytes(6 * MIB)).unwrap());
            }
            let stats = rig.pool.stats();
            assert_eq!(stats.peak_requested, 6 * MIB, "bypass {bypassed}, round {round}");
            assert_eq!(stats.peak_live, 6 * MIB, "bypass {bypassed}, round {round}");
        }
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
                    live.push(rig.pool.alloc(stream, Request::bytes(size)).unwrap());
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
