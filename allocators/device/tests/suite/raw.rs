//! Tests of blocks that were turned into bare addresses.

use crate::support::{MIB, Rig, range};
use aquifer_core::{MemoryError, Tag};
use aquifer_device::Request;
use aquifer_driver::{Access, sim::Sim};

#[test]
fn only_addresses_of_released_blocks_are_accepted() {
    let rig = Rig::on(Sim::h200(1), 64, |_| ());
    let (stream, other) = (rig.stream(), rig.stream());
    for round in 0..3 {
        let address = rig.pool.alloc_raw(&stream, Request::bytes(MIB).tag(Tag::OTHER)).unwrap();
        assert_eq!(
            (rig.pool.stats().requested, rig.pool.held_by(Tag::OTHER)),
            (MIB, MIB),
            "round {round}"
        );
        other.wait_for(&stream).unwrap();
        let block = rig.pool.share_raw(address).unwrap();
        assert_eq!((block.address(), block.bytes(), block.tag()), (address, MIB, Tag::OTHER));
        block.record_use(&other, Access::Read).unwrap();
        drop(block);
        if round == 1 {
            drop(rig.pool.from_raw(address).unwrap());
        } else {
            rig.pool.free_raw(address).unwrap();
        }
        assert!(rig.pool.free_raw(address).is_err());
        assert_eq!(rig.pool.stats().requested, 0);
    }
}

#[test]
fn peaks_are_counted_from_the_last_reset() {
    let rig = Rig::on(Sim::h200(1), 64, |_| ());
    let stream = rig.stream();
    let kept = rig.alloc(&stream, 2 * MIB);
    drop(rig.alloc(&stream, 8 * MIB));
    assert_eq!(rig.pool.stats().peak_requested, 10 * MIB);
    rig.pool.trim(0).unwrap();
    rig.pool.reset_peaks();
    let after = rig.pool.stats();
    assert_eq!((after.peak_requested, after.peak_live), (2 * MIB, after.live));
    assert_eq!(after.peak_physical, after.physical);
    drop(rig.alloc(&stream, 4 * MIB));
    assert_eq!(rig.pool.stats().peak_requested, 6 * MIB);
    drop(kept);
}

#[test]
fn an_address_keeps_the_uses_recorded_for_its_block() {
    let rig = Rig::stepped(64);
    let (s, other) = (rig.stream(), rig.stream());
    let block = rig.pool.alloc(&s, Request::bytes(MIB).tag(Tag::OTHER)).unwrap();
    let generation = block.generation();
    let used = block.prepare(&other, Access::Write).unwrap();
    rig.sim.access(other.raw(), range(&block), Access::Write, Some(generation)).unwrap();
    let address = block.into_raw();
    used.finish().unwrap();
    let block = rig.pool.from_raw(address).unwrap();
    assert_eq!((block.tag(), block.generation()), (Tag::OTHER, generation));
    let address = block.into_raw();
    rig.pool.free_raw(address).unwrap();
    assert_eq!(rig.pool.stats().pending, MIB, "the other stream has not finished with it");
    assert_eq!(rig.pool.free_raw(address), Err(MemoryError::DoubleFree { address }));
    other.synchronize().unwrap();
    rig.assert_silent();
}

#[test]
fn an_address_of_another_pool_is_foreign() {
    let (one, two) = (Rig::new(64), Rig::new(64));
    let (s, t) = (one.stream(), two.stream());
    let _first = two.pool.alloc(&t, Request::bytes(512)).unwrap();
    let address = one.pool.alloc(&s, Request::bytes(9 * MIB)).unwrap().into_raw();
    assert_eq!(two.pool.from_raw(address).map(drop), Err(MemoryError::ForeignBlock { address }));
    one.pool.free_raw(address).unwrap();
}

#[test]
fn a_bypassed_block_is_recovered_from_its_address() {
    let rig = Rig::on(Sim::h200(1), 64, |config| config.bypass = true);
    let s = rig.stream();
    let address = rig.alloc(&s, MIB).into_raw();
    assert_eq!(rig.pool.from_raw(address).unwrap().into_raw(), address);
    rig.pool.free_raw(address).unwrap();
    assert_eq!(rig.pool.free_raw(address), Err(MemoryError::DoubleFree { address }));
    assert_eq!(
        rig.pool.free_raw(address + 8),
        Err(MemoryError::ForeignBlock { address: address + 8 })
    );
    assert_eq!(rig.pool.stats().live, 0);
}

#[test]
fn an_address_outlives_its_stream() {
    let rig = Rig::new(64);
    let s = rig.stream();
    let address = rig.alloc(&s, MIB).into_raw();
    drop(s);
    rig.pool.free_raw(address).unwrap();
    rig.assert_silent();
}

/// Runs the check twice for pools with their own blocks, checked blocks and driver blocks.
fn each_kind(check: impl Fn(&Rig)) {
    check(&Rig::new(64));
    check(&Rig::on(Sim::h200(1), 64, |config| config.debug.leaks = true));
    check(&Rig::on(Sim::h200(1), 64, |config| config.bypass = true));
}

#[test]
fn a_borrowed_block_ends_with_its_last_borrow() {
    each_kind(|rig| {
        let s = rig.stream();
        let address = rig.alloc(&s, MIB).into_raw();
        let (one, two) =
            (rig.pool.share_raw(address).unwrap(), rig.pool.share_raw(address).unwrap());
        assert_eq!(rig.pool.from_raw(address).map(drop), Err(MemoryError::Busy { address }));
        rig.pool.free_raw(address).unwrap();
        assert!(rig.pool.free_raw(address).is_err() && rig.pool.share_raw(address).is_err());
        drop(one);
        assert_eq!(rig.pool.stats().requested, MIB, "somebody looks at it");
        drop(two);
        assert_eq!(rig.pool.stats().requested, 0);
        let address = rig.alloc(&s, MIB).into_raw();
        drop(rig.pool.share_raw(address).unwrap());
        assert_eq!(
            rig.pool.from_raw(address).unwrap().into_raw(),
            address,
            "nobody looks at it any more"
        );
        rig.pool.free_raw(address).unwrap();
        rig.assert_silent();
    });
}

#[test]
fn threads_note_uses_of_one_address_at_once() {
    let rig = Rig::on(Sim::h200(1).symbolic(), 64, |_| ());
    let s = rig.stream();
    let address = rig.alloc(&s, MIB).into_raw();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            let (pool, other) = (&rig.pool, rig.stream());
            other.wait_for(&s).unwrap();
            scope.spawn(move || {
                for _ in 0..1000 {
                    pool.share_raw(address).unwrap().record_use(&other, Access::Read).unwrap();
                }
            });
        }
    });
    rig.pool.free_raw(address).unwrap();
    assert_eq!(rig.pool.stats().requested, 0);
}
