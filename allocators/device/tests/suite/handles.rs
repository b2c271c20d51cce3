//! Tests of handles: their sizes, where they are mapped, and what a move leaves behind.

use crate::support::{MIB, PATIENCE, Rig};
use aquifer_device::Block;
use aquifer_driver::{Call, sim::Sim};
use aquifer_stream::Stream;
use std::{thread, time::Duration};

const GIB: u64 = 1 << 30;

/// Returns a device of 1 TiB, on which handles have their largest size. It runs no work by itself,
/// and requests do not wait.
fn vast(limit_mib: u64) -> Rig {
    let sim = Sim::h200(1).symbolic().stepped().capacity(1 << 40);
    Rig::on(sim, limit_mib, |config| config.wait = Duration::ZERO)
}

/// So much that it limits no handle, in MiB.
const MUCH: u64 = 4 << 10;

#[test]
fn handles_get_small_as_the_limit_comes_near() {
    let rig = vast(1 << 20);
    let s = rig.stream();
    let mut live = vec![rig.take(&s, MUCH)];
    // The mean block is small.
    live.extend((0..1000).map(|_| rig.alloc(&s, 1)));
    // What is left when a block of 128 MiB is requested, and the handles that back it.
    for (left, handles) in [
        (512 * GIB, 2),
        (64 * GIB, 2),
        (63 * GIB, 4),
        (4 * GIB, 32),
        (3 * GIB, 64),
        (128 * MIB, 64),
    ] {
        rig.budget.set_limit(rig.budget.used() + left);
        let before = rig.calls(Call::HandleCreate);
        live.push(rig.take(&s, 128));
        assert_eq!(rig.calls(Call::HandleCreate) - before, handles, "{left} bytes are left");
    }
}

#[test]
fn handles_are_at_most_a_64th_of_what_is_held_or_a_16th_of_the_block() {
    let rig = vast(1 << 20);
    let s = rig.stream();
    // What is held before a block of 64 MiB, and the size of the handles that back it, in MiB.
    let (mut live, mut held) = (vec![], 0);
    for (more, handle) in [(0, 4), (448, 4), (512, 8), (1024, 16), (2048, 32), (4096, 64)] {
        live.extend((held..more).step_by(64).map(|_| rig.take(&s, 64)));
        let before = rig.calls(Call::HandleCreate);
        live.push(rig.take(&s, 64));
        assert_eq!(rig.calls(Call::HandleCreate) - before, 64 / handle, "{more} MiB are held");
        held = more + 64;
    }
}

#[test]
fn handles_of_large_blocks_stay_large_near_the_limit_unless_other_blocks_are_small() {
    let rig = Rig::on(Sim::h200(1).symbolic(), 4 << 10, |_| ());
    let s = rig.stream();
    let large = [512, 512].map(|mib| {
        let before = rig.calls(Call::HandleCreate);
        let block = rig.take(&s, mib);
        assert_eq!(rig.calls(Call::HandleCreate) - before, 16, "of 32 MiB");
        block
    });
    let small: Vec<_> = (0..2 << 10).map(|_| rig.take(&s, 1)).collect();
    let before = rig.calls(Call::HandleCreate);
    let block = rig.take(&s, 512);
    assert_eq!(rig.calls(Call::HandleCreate) - before, 256, "of 2 MiB");
    drop((large, small, block));
    rig.assert_silent();
}

#[test]
fn free_memory_counts_as_left() {
    let rig = vast(1 << 20);
    let s = rig.stream();
    drop(rig.take(&s, 64 << 10));
    // Of the 320 GiB, 256 GiB are not allocated yet and 64 GiB are free.
    rig.budget.set_limit(256 * GIB - 64 * GIB);
    rig.budget.set_limit(256 * GIB);
    let before = rig.calls(Call::HandleCreate);
    let block = rig.take(&s, (64 << 10) + 64);
    assert_eq!(rig.calls(Call::HandleCreate) - before, 1, "one of 64 MiB");
    drop(block);
}

#[test]
fn large_handles_are_released_first_and_a_small_one_for_a_small_request() {
    let rig = vast(1 << 20);
    let s = rig.stream();
    // 16 handles of 64 MiB, followed by 16 of 8 MiB.
    let large = rig.take(&s, 1024);
    rig.budget.set_limit(rig.budget.used() + 128 * MIB);
    let small = rig.take(&s, 128);
    assert_eq!(rig.calls(Call::HandleCreate), 16 + 16);
    drop((large, small));
    let held = (1024 + 128) * MIB;
    for (keep, handles) in
        [(held - 128 * MIB, 2), (held - 129 * MIB, 1), (held - 200 * MIB, 1), (0, 13 + 15)]
    {
        let before = rig.calls(Call::HandleRelease);
        rig.pool.trim(keep).unwrap();
        assert_eq!(rig.calls(Call::HandleRelease) - before, handles, "down to {keep}");
    }
    assert_eq!(rig.budget.used(), 0);
}

/// Leaves two free handles of 64 MiB with a live block beside each, and `MUCH` that is live. A
/// block of 70 MiB fits only beyond the last handle, where three slots are missing.
fn two_large_ones(rig: &Rig, stream: &Stream, used: bool) -> [Block; 3] {
    let much = rig.take(stream, MUCH);
    let before = rig.calls(Call::HandleCreate);
    let [a, b, c, d] = [0; 4].map(|_| rig.take(stream, 64));
    if used {
        rig.write(stream, &a);
        rig.write(stream, &c);
    }
    assert_eq!(rig.calls(Call::HandleCreate) - before, 4);
    rig.budget.set_limit(rig.budget.used());
    drop((a, c));
    [much, b, d]
}

#[test]
fn a_handle_that_fits_nowhere_is_released_while_its_charge_is_kept() {
    let rig = vast(1 << 20);
    let s = rig.stream();
    let _live = two_large_ones(&rig, &s, false);
    thread::scope(|scope| {
        let stalled = rig.sim.stall(Call::HandleCreate);
        let asking = scope.spawn(|| rig.take(&s, 70).capacity());
        assert!(stalled.wait_for(1, PATIENCE), "new handles are made");
        assert!(rig.calls(Call::HandleRelease) > 0, "of one that is no more");
        assert_eq!(rig.budget.used(), (MUCH + 256) * MIB, "nobody else gets what is melted");
        drop(stalled);
        assert_eq!(asking.join().unwrap(), 70 * MIB);
    });
    let stats = rig.pool.stats();
    assert_eq!(stats.physical, rig.budget.used());
    assert!(
        stats.moves > 0 && stats.physical < (MUCH + 256) * MIB,
        "what was not needed went back: {stats:?}"
    );
    rig.assert_silent();
}

#[test]
fn a_pool_grows_to_its_bound_and_moves_handles_for_the_rest() {
    let sim = Sim::h200(1).symbolic().capacity(1 << 40);
    let rig = Rig::on(sim, 1 << 20, |config| config.slack = 6);
    let s = rig.stream();
    let (small, live) = (rig.take(&s, 64), rig.take(&s, 2));
    assert_eq!(rig.calls(Call::HandleCreate), 16 + 1, "small ones, however much is left");
    drop(small);
    // 1.06 times 68 MiB are 72.08 MiB.
    let block = rig.take(&s, 66);
    assert_eq!((rig.calls(Call::HandleCreate), rig.pool.stats().moves), (17 + 3, 15));
    assert_eq!((rig.budget.used(), rig.budget.peak()), (72 * MIB, 72 * MIB));
    drop((block, live));
    rig.assert_silent();
}

#[test]
fn one_small_block_pins_one_handle_and_no_more() {
    let rig = Rig::on(Sim::h200(1).symbolic(), 1 << 10, |config| config.handle_bytes = 2 * MIB);
    let s = rig.stream();
    let whole = rig.take(&s, 512);
    drop(whole);
    // Each of these lies on a handle of its own.
    let (small, large) = (rig.alloc(&s, 1), rig.take(&s, 300));
    drop(large);
    rig.pool.trim(0).unwrap();
    assert_eq!(rig.budget.used(), 2 * MIB);
    // All other handles can move to where a block needs them.
    rig.budget.set_limit(66 * MIB);
    let held = rig.take(&s, 64);
    assert_eq!(rig.budget.used(), 66 * MIB);
    drop((held, small));
}
