//! Tests that a burst of requests from many threads spreads as the policy defines.

use super::*;

const THREADS: usize = 16;
const EACH: usize = 1000;
const DEVICES: usize = 8;

/// Returns how many leases of a burst lie on each device, all held at once.
fn burst(policy: Policy, limits: [u64; DEVICES]) -> [usize; DEVICES] {
    let (_, rt) = machine(DEVICES as u32, 1);
    for (pool, mib) in rt.devices().iter().zip(limits) {
        pool.budget().set_limit(mib * MIB);
    }
    let placer = rt.placer(policy);
    let start = Barrier::new(THREADS);
    let all: Vec<Lease> = thread::scope(|scope| {
        let work = || {
            start.wait();
            (0..EACH).map(|_| place(&placer, 1).unwrap()).collect::<Vec<_>>()
        };
        let threads: Vec<_> = (0..THREADS).map(|_| scope.spawn(work)).collect();
        threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
    });
    let mut counts = [0; DEVICES];
    for lease in &all {
        counts[lease.index()] += 1;
    }
    let room: u64 = limits.iter().sum();
    assert!(all.len() < room as usize || place(&placer, 1).is_err(), "beyond every limit");
    for (pool, count) in rt.devices().iter().zip(counts) {
        assert_eq!(pool.budget().used(), count as u64 * MIB);
    }
    counts
}

#[test]
fn round_robin_gives_each_device_exactly_its_share() {
    assert_eq!(burst(Policy::RoundRobin, [16_000; DEVICES]), [THREADS * EACH / DEVICES; DEVICES]);
}

#[test]
fn by_free_bytes_and_by_load_no_device_is_ahead_by_more_than_the_threads_that_looked_at_once() {
    let share = THREADS * EACH / DEVICES;
    for policy in [Policy::MostFree, Policy::LeastLoaded, Policy::BestCompute, Policy::Affinity] {
        let counts = burst(policy.clone(), [16_000; DEVICES]);
        assert!(
            counts.iter().all(|&count| count.abs_diff(share) <= THREADS),
            "{policy:?}: {counts:?}"
        );
    }
    // Loads are parts of each device's own limit.
    let limits = [1, 1, 1, 1, 2, 2, 4, 4].map(|weight| weight * 2000);
    let counts = burst(Policy::LeastLoaded, limits);
    for (count, limit) in counts.into_iter().zip(limits) {
        let share = THREADS * EACH * limit as usize / limits.iter().sum::<u64>() as usize;
        assert!(count.abs_diff(share) <= THREADS, "{counts:?}");
    }
}

#[test]
fn weights_are_kept() {
    let weights = [1, 2, 3, 4, 1, 2, 3, 0];
    let counts = burst(Policy::weighted((0..).map(DeviceId).zip(weights)), [16_000; DEVICES]);
    for (count, weight) in counts.into_iter().zip(weights) {
        let share = THREADS * EACH * weight as usize / 16;
        assert!(count.abs_diff(share) <= DEVICES, "{counts:?}");
    }
}

#[test]
fn the_best_fit_fills_one_device_after_another() {
    let limits = [3000, 1000, 2000, 16_000, 16_000, 16_000, 16_000, 16_000];
    let counts = burst(Policy::BestFit, limits);
    assert_eq!(counts, [3000, 1000, 2000, 10_000, 0, 0, 0, 0]);
}

#[test]
fn a_burst_for_the_last_bytes_takes_exactly_all_of_them() {
    let counts = burst(Policy::MostFree, [2000; DEVICES]);
    assert_eq!(counts, [2000; DEVICES]);
}
