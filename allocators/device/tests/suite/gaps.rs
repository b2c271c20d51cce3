//! Tests of the gaps that moves leave in the addresses, and of their end.
#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use crate::support::{MIB, Rig};
use aquifer_device::{Block, Request};
use aquifer_driver::{Call, sim::Sim};
use aquifer_stream::Stream;

/// All that the pool may hold, in MiB: eight handles.
const LIMIT: u64 = 16;

fn rig() -> Rig {
    Rig::on(Sim::h200(1).symbolic(), LIMIT, |_| ())
}

fn take(rig: &Rig, stream: &Stream, mib: u64) -> Block {
    rig.pool.alloc(stream, Request::bytes(mib * MIB)).unwrap()
}

/// Fills the limit so that four handles have to move from between live blocks. Frees all, and
/// returns the addresses.
fn round(rig: &Rig, stream: &Stream) -> Vec<u64> {
    let mut blocks: Vec<_> = (0..4).map(|_| take(rig, stream, 4)).collect();
    let mut addresses: Vec<_> = blocks.iter().map(|block| block.address()).collect();
    drop((blocks.remove(2), blocks.remove(0)));
    stream.synchronize().unwrap();
    let large = take(rig, stream, 8);
    addresses.push(large.address());
    drop((large, blocks));
    stream.synchronize().unwrap();
    addresses
}

#[test]
fn gaps_are_closed_once_much_is_free() {
    let rig = rig();
    let stream = rig.stream();
    let addresses = round(&rig, &stream);
    assert_eq!(rig.pool.stats().moves, 4);
    let first = take(&rig, &stream, 4);
    assert_eq!(rig.pool.stats().moves, 8, "as many move back");
    let rest = take(&rig, &stream, 12);
    assert_eq!(rig.pool.stats().moves, 8, "what is free is in one piece");
    let end = addresses[0] + LIMIT * MIB;
    assert!([&first, &rest].iter().all(|block| (addresses[0]..end).contains(&block.address())));
    rig.assert_silent();
}

#[test]
fn a_loop_near_its_limit_has_the_same_addresses_in_each_round() {
    let rig = rig();
    let stream = rig.stream();
    let first = round(&rig, &stream);
    for number in 2..20 {
        assert_eq!(round(&rig, &stream), first, "round {number}");
    }
    rig.assert_silent();
}

#[test]
fn gaps_stay_where_the_limit_leaves_room() {
    let rig = rig();
    let stream = rig.stream();
    round(&rig, &stream);
    rig.budget.set_limit(2 * LIMIT * MIB);
    let _block = take(&rig, &stream, 4);
    assert_eq!(rig.pool.stats().moves, 4);
}

#[test]
fn gaps_stay_while_little_is_free() {
    let rig = rig();
    let stream = rig.stream();
    let blocks: Vec<_> = (0..7).map(|_| take(&rig, &stream, 2)).collect();
    let mut blocks: Vec<_> = blocks.into_iter().map(Some).collect();
    blocks[0] = None;
    stream.synchronize().unwrap();
    let _large = take(&rig, &stream, 4);
    let moves = rig.pool.stats().moves;
    assert!(moves > 0);
    blocks[3] = None;
    stream.synchronize().unwrap();
    let _small = rig.pool.alloc(&stream, Request::bytes(3 * MIB / 2)).unwrap();
    assert_eq!(rig.pool.stats().moves, moves, "less than two of sixteen MiB are free");
}

#[test]
fn a_refused_close_of_a_gap_costs_no_memory_and_no_block() {
    for call in [Call::Unmap, Call::Map, Call::SetAccess] {
        let rig = rig();
        let stream = rig.stream();
        round(&rig, &stream);
        rig.sim.fail(call, 1, 999);
        let block = take(&rig, &stream, 4);
        assert_eq!(rig.pool.stats().physical, LIMIT * MIB, "{call:?}");
        drop(block);
        stream.synchronize().unwrap();
        for _ in 0..3 {
            round(&rig, &stream);
        }
        assert_eq!(rig.budget.used(), rig.pool.stats().physical, "{call:?}");
        rig.assert_silent();
    }
}
