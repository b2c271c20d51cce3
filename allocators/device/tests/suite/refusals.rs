//! Tests of mappings that the driver refuses to remove: they stay held, and they end no request and
//! no trim that could do without them.
#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use crate::support::{MIB, Rig, range};
use aquifer_core::{MemoryError, Tag};
use aquifer_device::{Block, Request};
use aquifer_driver::{Access, Call, sim::Sim};
use aquifer_stream::Stream;
use std::time::Duration;

/// Returns a pool on a device that runs no work by itself. Requests do not wait.
fn still(limit_mib: u64) -> Rig {
    Rig::on(Sim::h200(1).symbolic().stepped(), limit_mib, |config| config.wait = Duration::ZERO)
}

/// Moves two handles whose work has not run, and then runs it: their old mappings are to be removed
/// now. Returns the live blocks, all of 8 MiB.
fn two_zombies(rig: &Rig, [s, u]: [&Stream; 2]) -> [Block; 3] {
    let [a, b, c, d] = [0; 4].map(|_| rig.take(s, 2));
    for used in [&a, &c] {
        let generation = Some(used.generation());
        rig.sim.access(s.raw(), range(used), Access::Write, generation).unwrap();
    }
    drop((a, c));
    let moved = rig.take(u, 4);
    assert_eq!((rig.pool.stats().physical, rig.pool.stats().moves), (8 * MIB, 2));
    rig.sim.run_all();
    [b, d, moved]
}

#[test]
fn an_old_mapping_that_the_driver_keeps_ends_no_request() {
    let rig = still(8);
    let (s, u) = (rig.stream(), rig.stream());
    let live = two_zombies(&rig, [&s, &u]);
    rig.budget.set_limit(64 * MIB);
    rig.sim.fail_every(Call::Unmap, 1, 999);
    let before = rig.calls(Call::Unmap);
    let block = rig.pool.alloc(&u, Request::bytes(8 * MIB));
    assert!(block.is_ok(), "{block:?}");
    assert!(rig.calls(Call::Unmap) >= before + 2, "the removal of both has been tried");
    drop((block, live));
    rig.sim.clear_failures();
    rig.sim.run_all();
    rig.assert_empty();
}

#[test]
fn a_trim_releases_all_that_the_driver_takes_and_reports_the_rest() {
    // Each leaves idle memory in the caches, and beside it what the driver refuses first. Returns
    // the bytes that are refused.
    let kinds: [fn(&Rig, [&Stream; 2]) -> u64; 4] = [
        |rig, streams| {
            drop(two_zombies(rig, streams));
            // The first zombie keeps the handle, from under the block it was moved for.
            2 * MIB
        },
        |rig, [s, _]| {
            let stable = rig.stable(s, 2 * MIB);
            drop((rig.take(s, 6), stable));
            2 * MIB
        },
        |rig, [s, _]| {
            let parkable = rig.pool.parkable(Tag::named("of a trim")).unwrap();
            let block = parkable.alloc(s, Request::bytes(MIB)).unwrap();
            let slot = parkable.stats().physical;
            drop((rig.take(s, 4), block));
            slot
        },
        |rig, [s, _]| {
            // A live block between two runs of free memory, which are unmapped in two calls.
            let [a, b, c] = [0; 3].map(|_| rig.take(s, 2));
            drop((a, c));
            let _leaked = b.into_raw();
            2 * MIB
        },
    ];
    for (kind, prepare) in kinds.into_iter().enumerate() {
        let rig = still(8);
        let (s, u) = (rig.stream(), rig.stream());
        let refused = prepare(&rig, [&s, &u]);
        let live = rig.pool.stats().live;
        rig.sim.fail(Call::Unmap, 1, 999);
        let trimmed = rig.pool.trim(0);
        assert!(matches!(trimmed, Err(MemoryError::Driver(e)) if e.code == 999), "{kind}");
        let held = rig.pool.stats().physical;
        assert_eq!((held, rig.budget.used()), (refused + live, refused + live), "{kind}");
        assert_eq!(rig.pool.trim(0), Ok(refused), "{kind}");
        assert_eq!(rig.budget.used(), live, "{kind}");
    }
}

#[test]
fn memory_idle_beside_a_refused_mapping_serves_other_memory_of_the_pool() {
    let rig = Rig::on(Sim::h200(1).symbolic(), 8, |config| config.wait = Duration::ZERO);
    let s = rig.stream();
    let stable = rig.stable(&s, 2 * MIB);
    drop((rig.take(&s, 6), stable));
    // The old block's mapping is refused at the start, and when room is made. The cache's handles
    // suffice.
    (1..=2).for_each(|nth| rig.sim.fail(Call::Unmap, nth, 999));
    let block = rig.pool.alloc_stable(&s, Request::bytes(6 * MIB));
    assert!(block.is_ok(), "{block:?}");
    assert_eq!(rig.pool.stats().pending, 2 * MIB);
    drop(block);
    rig.assert_empty();
}

/// Leaves three free handles of 2 MiB, none beside another, in a pool whose limit is reached.
fn three_free(rig: &Rig, s: &Stream) -> [Block; 3] {
    let [a, b, c, d, e, f] = [0; 6].map(|_| rig.take(s, 2));
    drop((a, c, e));
    assert_eq!(rig.budget.remaining(), 0);
    rig.sim.run_all();
    [b, d, f]
}

#[test]
fn a_request_takes_another_handle_for_one_that_the_driver_keeps_mapped() {
    for nth in [1, 2] {
        let rig = still(12);
        let s = rig.stream();
        let live = three_free(&rig, &s);
        rig.sim.fail(Call::Unmap, nth, 999);
        let block = rig.pool.alloc(&s, Request::bytes(4 * MIB));
        assert!(block.is_ok(), "{block:?}");
        let stats = rig.pool.stats();
        assert_eq!((stats.moves, stats.physical, stats.cached), (2, 12 * MIB, 2 * MIB));
        drop((block, live));
        rig.sim.run_all();
        rig.assert_empty();
    }
}

#[test]
fn a_request_without_room_names_the_call_by_which_the_driver_keeps_memory() {
    let rig = still(12);
    let s = rig.stream();
    let live = three_free(&rig, &s);
    rig.sim.fail_every(Call::Unmap, 1, 999);
    let error = match rig.pool.alloc(&s, Request::bytes(4 * MIB)) {
        Err(MemoryError::OutOfMemory(error)) => error,
        other => panic!("{other:?}"),
    };
    assert_eq!(error.driver.map(|refused| (refused.call, refused.code)), Some(("cuMemUnmap", 999)));
    assert_eq!((rig.pool.stats().cached, rig.budget.used()), (6 * MIB, 12 * MIB));
    rig.sim.clear_failures();
    drop((rig.alloc(&s, 4 * MIB), live));
    rig.assert_silent();
}
