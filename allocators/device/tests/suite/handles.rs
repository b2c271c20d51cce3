//! Tests of handles: their sizes, where they are mapped, and what a move leaves behind.
#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use crate::support::{MIB, PATIENCE, Rig, range};
use aquifer_core::MemoryError;
use aquifer_device::{Block, Request};
use aquifer_driver::{Access, Call, sim::Sim};
use aquifer_stream::Stream;
use std::{thread, time::Duration};

const GIB: u64 = 1 << 30;

/// Returns a device of 1 TiB, on which handles have their largest size. It runs no work by itself,
/// and requests do not wait.
fn vast(limit_mib: u64) -> Rig {
    let sim = Sim::h200(1).symbolic().stepped().capacity(1 << 40);
    Rig::on(sim, limit_mib, |config| config.wait = Duration::ZERO)
}

fn take(rig: &Rig, stream: &Stream, mib: u64) -> Block {
    rig.pool.alloc(stream, Request::bytes(mib * MIB)).unwrap()
}

/// Queues a kernel that writes the whole block, on the block's stream.
fn write(rig: &Rig, stream: &Stream, block: &Block) {
    rig.sim.access(stream.raw(), range(block), Access::Write, Some(block.generation())).unwrap();
}

/// So much that it limits no handle, in MiB.
const MUCH: u64 = 4 << 10;

fn made(rig: &Rig, call: Call) -> u64 {
    rig.sim.driver().calls().get(call)
}

#[test]
fn handles_get_small_as_the_limit_comes_near() {
    let rig = vast(1 << 20);
    let s = rig.stream();
    let mut live = vec![take(&rig, &s, MUCH)];
    // The mean block is small.
    live.extend((0..1000).map(|_| rig.pool.alloc(&s, Request::bytes(1)).unwrap()));
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
        let before = made(&rig, Call::HandleCreate);
        live.push(take(&rig, &s, 128));
        assert_eq!(made(&rig, Call::HandleCreate) - before, handles, "{left} bytes are left");
    }
}

#[test]
fn handles_are_at_most_a_64th_of_what_is_held_or_a_16th_of_the_block() {
    let rig = vast(1 << 20);
    let s = rig.stream();
    // What is held before a block of 64 MiB, and the size of the handles that back it, in MiB.
    let (mut live, mut held) = (vec![], 0);
    for (more, handle) in [(0, 4), (448, 4), (512, 8), (1024, 16), (2048, 32), (4096, 64)] {
        live.extend((held..more).step_by(64).map(|_| take(&rig, &s, 64)));
        let before = made(&rig, Call::HandleCreate);
        live.push(take(&rig, &s, 64));
        assert_eq!(made(&rig, Call::HandleCreate) - before, 64 / handle, "{more} MiB are held");
        held = more + 64;
    }
}

#[test]
fn handles_of_large_blocks_stay_large_near_the_limit_unless_other_blocks_are_small() {
    let rig = Rig::on(Sim::h200(1).symbolic(), 4 << 10, |_| ());
    let s = rig.stream();
    let large = [512, 512].map(|mib| {
        let before = made(&rig, Call::HandleCreate);
        let block = take(&rig, &s, mib);
        assert_eq!(made(&rig, Call::HandleCreate) - before, 16, "of 32 MiB");
        block
    });
    let small: Vec<_> = (0..2 << 10).map(|_| take(&rig, &s, 1)).collect();
    let before = made(&rig, Call::HandleCreate);
    let block = take(&rig, &s, 512);
    assert_eq!(made(&rig, Call::HandleCreate) - before, 256, "of 2 MiB");
    drop((large, small, block));
    rig.assert_silent();
}

#[test]
fn free_memory_counts_as_left() {
    let rig = vast(1 << 20);
    let s = rig.stream();
    drop(take(&rig, &s, 64 << 10));
    // Of the 320 GiB, 256 GiB are not allocated yet and 64 GiB are free.
    rig.budget.set_limit(256 * GIB - 64 * GIB);
    rig.budget.set_limit(256 * GIB);
    let before = made(&rig, Call::HandleCreate);
    let block = take(&rig, &s, (64 << 10) + 64);
    assert_eq!(made(&rig, Call::HandleCreate) - before, 1, "one of 64 MiB");
    drop(block);
}

#[test]
fn large_handles_are_released_first_and_a_small_one_for_a_small_request() {
    let rig = vast(1 << 20);
    let s = rig.stream();
    // 16 handles of 64 MiB, followed by 16 of 8 MiB.
    let large = take(&rig, &s, 1024);
    rig.budget.set_limit(rig.budget.used() + 128 * MIB);
    let small = take(&rig, &s, 128);
    assert_eq!(made(&rig, Call::HandleCreate), 16 + 16);
    drop((large, small));
    let held = (1024 + 128) * MIB;
    for (keep, handles) in
        [(held - 128 * MIB, 2), (held - 129 * MIB, 1), (held - 200 * MIB, 1), (0, 13 + 15)]
    {
        let before = made(&rig, Call::HandleRelease);
        rig.pool.trim(keep).unwrap();
        assert_eq!(made(&rig, Call::HandleRelease) - before, handles, "down to {keep}");
    }
    assert_eq!(rig.budget.used(), 0);
}

/// Leaves two free handles of 64 MiB with a live block beside each, and `MUCH` that is live. A
/// block of 70 MiB fits only beyond the last handle, where three slots are missing.
fn two_large_ones(rig: &Rig, stream: &Stream, used: bool) -> [Block; 3] {
    let much = take(rig, stream, MUCH);
    let before = made(rig, Call::HandleCreate);
    let [a, b, c, d] = [0; 4].map(|_| take(rig, stream, 64));
    if used {
        write(rig, stream, &a);
        write(rig, stream, &c);
    }
    assert_eq!(made(rig, Call::HandleCreate) - before, 4);
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
        let asking = scope.spawn(|| take(&rig, &s, 70).capacity());
        assert!(stalled.wait_for(1, PATIENCE), "new handles are made");
        assert!(made(&rig, Call::HandleRelease) > 0, "of one that is no more");
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
    let (small, live) = (take(&rig, &s, 64), take(&rig, &s, 2));
    assert_eq!(made(&rig, Call::HandleCreate), 16 + 1, "small ones, however much is left");
    drop(small);
    // 1.06 times 68 MiB are 72.08 MiB.
    let block = take(&rig, &s, 66);
    assert_eq!((made(&rig, Call::HandleCreate), rig.pool.stats().moves), (17 + 3, 15));
    assert_eq!((rig.budget.used(), rig.budget.peak()), (72 * MIB, 72 * MIB));
    drop((block, live));
    rig.assert_silent();
}

#[test]
fn a_handle_under_queued_work_is_neither_released_nor_unmapped() {
    let rig = vast(1 << 20);
    let s = rig.stream();
    let live = two_large_ones(&rig, &s, true);
    let refused = rig.pool.alloc(&s, Request::bytes(70 * MIB));
    assert!(matches!(refused, Err(MemoryError::OutOfMemory(_))), "{refused:?}");
    assert_eq!((made(&rig, Call::HandleRelease), made(&rig, Call::Unmap)), (0, 0));
    assert_eq!(rig.pool.stats().cached, 128 * MIB);
    rig.sim.run_all();
    drop((take(&rig, &s, 70), live));
    rig.assert_silent();
}

/// Leaves two free handles among four of 2 MiB in a row, not adjacent, under work that has not run.
fn two_in_use(rig: &Rig, stream: &Stream) -> [Block; 2] {
    let [a, b, c, d] = [0; 4].map(|_| take(rig, stream, 2));
    for free in [a, c] {
        write(rig, stream, &free);
    }
    [b, d]
}

#[test]
fn a_mapping_stays_under_queued_work_after_its_handle_has_moved() {
    let rig = Rig::on(Sim::h200(1).symbolic().stepped(), 8, |config| config.wait = Duration::ZERO);
    let (s, u) = (rig.stream(), rig.stream());
    let _live = two_in_use(&rig, &s);
    let block = take(&rig, &u, 4);
    write(&rig, &u, &block);
    assert_eq!((made(&rig, Call::Map), made(&rig, Call::Unmap)), (6, 0));
    assert_eq!((rig.pool.stats().physical, rig.budget.peak()), (8 * MIB, 8 * MIB));
    rig.pool.trim(u64::MAX).unwrap();
    assert_eq!(made(&rig, Call::Unmap), 0, "the work has still not run");
    rig.sim.run_all();
    rig.pool.trim(u64::MAX).unwrap();
    assert_eq!(made(&rig, Call::Unmap), 2);
    rig.assert_silent();
}

#[test]
fn the_rest_of_a_moved_handle_waits_like_the_block_it_was_moved_for() {
    let rig = Rig::on(Sim::h200(1).symbolic().stepped(), 8, |config| config.wait = Duration::ZERO);
    let (s, u, v) = (rig.stream(), rig.stream(), rig.stream());
    let _live = two_in_use(&rig, &s);
    let block = take(&rig, &u, 3);
    let rest = take(&rig, &v, 1);
    assert_eq!(rest.address(), block.address() + 3 * MIB);
    write(&rig, &v, &rest);
    while rig.sim.step(v.raw()) {}
    assert!(rig.sim.pending(v.raw()) > 0, "the handle is in use by what `s` has queued");
    rig.sim.run_all();
    rig.assert_silent();
}

#[test]
fn one_small_block_pins_one_handle_and_no_more() {
    let rig = Rig::on(Sim::h200(1).symbolic(), 1 << 10, |config| config.handle_bytes = 2 * MIB);
    let s = rig.stream();
    let whole = take(&rig, &s, 512);
    drop(whole);
    // Each of these lies on a handle of its own.
    let (small, large) = (rig.pool.alloc(&s, Request::bytes(1)).unwrap(), take(&rig, &s, 300));
    drop(large);
    rig.pool.trim(0).unwrap();
    assert_eq!(rig.budget.used(), 2 * MIB);
    // All other handles can move to where a block needs them.
    rig.budget.set_limit(66 * MIB);
    let held = take(&rig, &s, 64);
    assert_eq!(rig.budget.used(), 66 * MIB);
    drop((held, small));
}

#[test]
fn failure_of_any_call_while_moving_loses_nothing() {
    // Calls that end a handle are left out: a handle that the driver refuses to release stays held
    // and charged for good.
    let calls = [
        Call::HandleCreate,
        Call::Map,
        Call::SetAccess,
        Call::Unmap,
        Call::EventCreate,
        Call::EventRecord,
        Call::EventQuery,
        Call::StreamWaitEvent,
        Call::StreamIsCapturing,
    ];
    for call in calls {
        for nth in 1..8 {
            for code in [2, 999] {
                fail_while_moving(call, nth, code);
            }
        }
    }
}

/// Moves handles that are done, in use, and too large for their destination, while one driver call
/// fails.
fn fail_while_moving(call: Call, nth: u64, code: u32) {
    let rig = vast(1 << 20);
    let (s, u, v) = (rig.stream(), rig.stream(), rig.stream());
    let large = two_large_ones(&rig, &s, false);
    rig.budget.set_limit((MUCH + 264) * MIB);
    let small = two_in_use(&rig, &u);
    rig.sim.fail(call, nth, code);
    let mut blocks = Vec::new();
    for mib in [70, 3, 1, 4, 60] {
        let asked = rig.pool.alloc(&v, Request::bytes(mib * MIB));
        let stats = rig.pool.stats();
        let what = format!("{call:?} fails at its {nth}. time with {code}: {stats:?}");
        assert_eq!(stats.physical, rig.budget.used(), "{what}");
        assert!(stats.live + stats.cached + stats.pending <= stats.physical, "{what}");
        assert!(rig.budget.peak() <= 1 << 40 && rig.budget.used() <= (MUCH + 264) * MIB, "{what}");
        if let Ok(block) = asked {
            write(&rig, &v, &block);
            blocks.push(block);
        }
    }
    rig.sim.clear_failures();
    rig.sim.run_all();
    rig.pool.trim(u64::MAX).unwrap();
    let stats = rig.pool.stats();
    assert_eq!(stats.live + stats.cached, stats.physical, "{call:?} at its {nth}. time: {stats:?}");
    drop((large, small, blocks));
    rig.sim.run_all();
    rig.pool.trim(0).unwrap();
    assert_eq!(rig.budget.used(), 0, "{call:?} at its {nth}. time");
    let whole = take(&rig, &v, MUCH + 264);
    write(&rig, &v, &whole);
    drop(whole);
    rig.sim.run_all();
    rig.assert_silent();
    let (sim, budget) = (rig.sim.clone(), rig.budget.clone());
    drop((s, u, v, rig));
    assert_eq!(budget.used(), 0, "{call:?} at its {nth}. time");
    assert!(sim.outstanding().is_empty(), "{:?}", sim.outstanding());
}
