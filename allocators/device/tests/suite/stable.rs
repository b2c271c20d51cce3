//! Tests of stable blocks: their memory stays in place until the last holder of the address is
//! dropped, and is then released as a whole.
#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use crate::support::{self, MIB, Reclaimer, Rig, assert_returned, plain};
use aquifer_core::{Action, MemoryError, Recorder, event::RingSink};
use aquifer_device::{DeviceBuffer, DevicePool, PoolConfig, Request, StableBlock};
use aquifer_driver::{
    Access, Call, DeviceId, ExportTypes,
    sim::{Sim, ViolationKind},
};
use aquifer_stream::Stream;
use std::{sync::Arc, time::Duration};

fn exporting(limit_mib: u64) -> Rig {
    Rig::on(Sim::h200(1), limit_mib, |config| config.export = ExportTypes::POSIX_FD)
}

fn fill(stream: &Stream, block: &mut StableBlock, byte: u8) {
    let len = block.bytes() as usize;
    stream.fill(&mut block.slice_mut::<u8>(0..len).unwrap(), byte).unwrap();
}

fn read(stream: &Stream, block: &StableBlock) -> Vec<u8> {
    let len = block.bytes() as usize;
    let mut back = vec![0; len];
    stream.scope(|c| c.download(block.slice::<u8>(0..len).unwrap(), &mut back)).unwrap().unwrap();
    back
}

#[test]
fn a_stable_block_is_one_handle_charged_whole_and_goes_at_the_next_trim() {
    let rig = Rig::new(64);
    let s = rig.stream();
    let before = rig.calls(Call::HandleCreate);
    let block = rig.stable(&s, 9 * MIB + 1);
    assert_eq!(rig.calls(Call::HandleCreate), before + 1);
    assert_eq!((block.bytes(), block.capacity()), (9 * MIB + 1, 10 * MIB));
    let stats = rig.pool.stats();
    assert_eq!((stats.live, stats.requested, stats.blocks), (10 * MIB, 9 * MIB + 1, 1));
    assert_eq!((stats.physical, rig.budget.used()), (10 * MIB, 10 * MIB));
    let calls = rig.sim.driver().calls().made();
    drop(block);
    assert_eq!(rig.sim.driver().calls().made(), calls, "a drop calls no driver");
    let stats = rig.pool.stats();
    assert_eq!((stats.live, stats.pending, stats.blocks), (0, 10 * MIB, 0));
    assert_eq!(rig.budget.used(), 10 * MIB, "still held, still charged");
    s.synchronize().unwrap();
    assert_eq!(rig.pool.trim(0), Ok(10 * MIB));
    let stats = rig.pool.stats();
    assert_eq!((stats.pending, stats.physical, rig.budget.used()), (0, 0, 0));
    rig.assert_silent();
}

/// The control for the tests above, for a pool that does not wait: both lines are reported.
#[test]
#[expect(unsafe_code, reason = "breaks the promise on purpose")]
fn an_unmap_under_a_token_is_reported_with_both_lines() {
    let rig = Rig::new(32);
    let s = rig.stream();
    let block = rig.stable(&s, 4 * MIB);
    let token = block.register();
    let registered = line!() - 1;
    let entered = aquifer_driver::site::enter();
    let unmapped = line!() - 1;
    // SAFETY: 1. nothing is queued, so only the registration is broken, on purpose.
    unsafe { rig.sim.driver().unmap(DeviceId(0), block.address(), 4 * MIB) }.unwrap();
    drop(entered);
    let found = rig.sim.take_violations();
    let [found] = &found[..] else { panic!("{found:?}") };
    assert_eq!(found.kind, ViolationKind::MovedWhileRegistered);
    let earlier = found.earlier.unwrap().site;
    assert_eq!((earlier.file(), earlier.line()), (file!(), registered));
    assert_eq!((found.later.site.file(), found.later.site.line()), (file!(), unmapped));
    drop(token);
}

#[test]
fn departed_memory_is_waited_for_where_each_block_is_the_drivers_and_blocks_may_be_checked() {
    for leaks in [false, true] {
        let rig = Rig::on(plain().seeded(1), 8, |config| config.debug.leaks = leaks);
        let s = rig.stream();
        let mut block = rig.stable(&s, 8 * MIB);
        fill(&s, &mut block, 1);
        drop(block);
        assert!(rig.pool.alloc(&s, Request::bytes(8 * MIB)).is_ok(), "leaks: {leaks}");
        rig.assert_silent();
    }
}

#[test]
fn a_stable_block_takes_free_memory_of_the_caches() {
    let rig = Rig::new(16);
    let s = rig.stream();
    drop(rig.alloc(&s, 16 * MIB));
    s.synchronize().unwrap();
    assert_eq!(rig.budget.used(), 16 * MIB);
    let block = rig.stable(&s, 12 * MIB);
    assert_eq!(rig.budget.used(), 16 * MIB);
    let refused = rig.pool.alloc_stable(&s, Request::bytes(12 * MIB)).unwrap_err();
    let MemoryError::OutOfMemory(refused) = refused else { panic!("{refused:?}") };
    assert_eq!((refused.requested, refused.live), (12 * MIB, 12 * MIB));
    drop(block);
    rig.assert_silent();
}

#[test]
fn without_virtual_memory_or_with_bypass_stable_blocks_are_driver_allocations() {
    let without = Rig::on(plain(), 16, |_| ());
    let bypass = Rig::on(Sim::h200(1), 16, |config| config.bypass = true);
    for rig in [without, bypass] {
        let s = rig.stream();
        let mut block = rig.stable(&s, MIB + 1);
        fill(&s, &mut block, 3);
        assert!(read(&s, &block).iter().all(|&byte| byte == 3));
        assert_eq!((rig.budget.used(), rig.pool.stats().physical), (MIB + 512, MIB + 512));
        assert_eq!(rig.sim.outstanding().allocations, 1);
        assert!(matches!(
            rig.pool.alloc_stable(&s, Request::bytes(MIB).align(4096)),
            Err(MemoryError::BadAlignment { align: 4096 })
        ));
        let token = block.register();
        drop(block);
        s.synchronize().unwrap();
        assert_eq!(rig.pool.trim(0), Ok(0));
        drop(token);
        // The allocation itself does not do this, since the free waits for the device.
        drop(rig.alloc(&s, MIB));
        assert!(rig.pool.trim(0).unwrap() >= MIB + 512);
        assert_eq!(rig.budget.used(), 0);
        rig.assert_silent();
    }
}

#[test]
fn a_legacy_block_is_one_allocation_beside_mapped_ones_under_the_same_budget() {
    let rig = exporting(16);
    let s = rig.stream();
    let mut mapped = rig.stable(&s, 3 * MIB);
    let mut legacy = rig.pool.alloc_stable_legacy(&s, Request::bytes(3 * MIB + 1)).unwrap();
    assert_eq!(mapped.is_legacy_ipc_capable(), Ok(false));
    assert_eq!(legacy.is_legacy_ipc_capable(), Ok(true));
    assert_eq!(rig.budget.used(), 4 * MIB + 3 * MIB + 512);
    assert_eq!((rig.pool.stats().physical, rig.sim.outstanding().allocations), (7 * MIB + 512, 1));
    fill(&s, &mut mapped, 1);
    fill(&s, &mut legacy, 2);
    assert!(read(&s, &mapped).iter().all(|&byte| byte == 1));
    assert!(read(&s, &legacy).iter().all(|&byte| byte == 2));
    assert!(rig.pool.share(legacy.block(), "").is_err());
    let aligned = Request::bytes(MIB).align(4096);
    assert!(matches!(
        rig.pool.alloc_stable_legacy(&s, aligned),
        Err(MemoryError::BadAlignment { align: 4096 })
    ));
    // A registration keeps it in place beyond its free, and beyond others' need.
    let token = legacy.register();
    drop(legacy);
    s.synchronize().unwrap();
    assert_eq!(rig.pool.trim(0), Ok(0));
    assert!(rig.pool.alloc_stable_legacy(&s, Request::bytes(10 * MIB)).is_err());
    drop(token);
    // Free memory of caches and freed allocations make room, as for mapped blocks.
    drop(rig.alloc(&s, 4 * MIB));
    drop(rig.pool.alloc_stable_legacy(&s, Request::bytes(12 * MIB)).unwrap());
    drop(mapped);
    s.synchronize().unwrap();
    rig.pool.trim(0).unwrap();
    assert_eq!((rig.budget.used(), rig.sim.outstanding().allocations), (0, 0));
    rig.assert_silent();
}

#[test]
fn a_legacy_block_whose_allocation_or_free_fails_changes_nothing_and_is_retried() {
    let rig = Rig::on(Sim::h200(1), 16, |config| config.wait = Duration::ZERO);
    let s = rig.stream();
    let before = rig.sim.outstanding();
    rig.sim.fail(Call::MemAlloc, 1, 999);
    let refused = rig.pool.alloc_stable_legacy(&s, Request::bytes(MIB)).unwrap_err();
    assert!(matches!(refused, MemoryError::Driver(e) if e.code == 999), "{refused:?}");
    assert_eq!((rig.budget.used(), rig.sim.outstanding()), (0, before));
    drop(rig.pool.alloc_stable_legacy(&s, Request::bytes(MIB)).unwrap());
    s.synchronize().unwrap();
    rig.sim.fail(Call::MemFree, 1, 999);
    assert!(rig.pool.trim(0).is_err());
    assert_eq!(rig.budget.used(), MIB);
    rig.assert_empty();
}

#[test]
fn the_last_of_pool_block_and_token_releases_everything() {
    for order in 0..3 {
        let rig = exporting(32);
        let (sim, budget) = (rig.sim.clone(), rig.budget.clone());
        let s = rig.stream();
        let mut block = Some(rig.stable(&s, 2 * MIB));
        fill(&s, block.as_mut().unwrap(), 1);
        let mut token = Some(block.as_ref().unwrap().register());
        let mut rig = Some(rig);
        drop(s);
        for step in 0..3 {
            assert_eq!(budget.used(), 2 * MIB, "order {order}, step {step}");
            match (order + step) % 3 {
                0 => drop(rig.take()),
                1 => drop(block.take()),
                _ => drop(token.take()),
            }
        }
        if let Some(rig) = rig.take() {
            drop(rig);
        }
        assert_returned(&sim, &budget);
    }
}

#[test]
fn a_lost_device_takes_stable_memory_with_it() {
    let rig = Rig::stepped(16);
    let s = rig.stream();
    let mut block = rig.stable(&s, 2 * MIB);
    fill(&s, &mut block, 1);
    let token = block.register();
    rig.sim.lose_device(DeviceId(0));
    assert!(matches!(
        rig.pool.alloc_stable(&s, Request::bytes(MIB)),
        Err(MemoryError::DeviceLost { .. })
    ));
    drop(block);
    drop(token);
    let _ = rig.pool.trim(0);
    assert_eq!(rig.budget.used(), 0);
}

#[test]
fn a_stable_block_becomes_a_buffer_and_is_reported_like_any_other() {
    let ring = Arc::new(RingSink::new(16));
    let rig = Rig::on(Sim::h200(1), 16, |config| {
        config.recorder = Some(Arc::new(Recorder::new(ring.clone())));
    });
    let s = rig.stream();
    let block = rig.stable(&s, 1024);
    let address = block.address();
    let mut buffer: DeviceBuffer<f32> =
        DeviceBuffer::from_alloc(256, |_| Ok(block.into_block())).unwrap();
    s.scope(|c| c.upload(&[1.5; 256], &mut buffer)).unwrap().unwrap();
    drop(buffer);
    rig.pool.trim(0).unwrap();
    let events: Vec<_> =
        ring.take().iter().filter(|e| e.address == address).map(|e| (e.action, e.bytes)).collect();
    assert_eq!(events, [(Action::Allocate, 1024), (Action::Free, 1024), (Action::Complete, 1024)]);
    rig.assert_silent();
}

#[test]
fn a_stream_of_another_device_is_refused() {
    let rig = Rig::on(Sim::h200(2), 16, |config| config.export = ExportTypes::POSIX_FD);
    let other = DevicePool::open(rig.sim.driver(), DeviceId(1), PoolConfig::default()).unwrap();
    let t = other.stream().unwrap();
    let wrong = MemoryError::WrongDevice { expected: DeviceId(0), actual: DeviceId(1) };
    assert_eq!(rig.pool.alloc_stable(&t, Request::bytes(MIB)).unwrap_err(), wrong);
}

/// No wait can be made for a capturing stream. The pool still waits for memory that other streams
/// have freed.
#[test]
fn a_stable_block_and_reserved_elements_wait_for_others_where_one_stream_captures() {
    for reserved in [false, true] {
        for left in [false, true] {
            let rig = Rig::on(Sim::h200(1).symbolic().seeded(7), 16, |_| ());
            let (s, u) = (rig.stream(), rig.stream());
            let write = |stream: &Stream, block: &aquifer_device::Block| {
                let range = support::range(block);
                rig.sim
                    .access(stream.raw(), range, Access::Write, Some(block.generation()))
                    .unwrap();
            };
            // A block of the capturing stream: one of the caches, or one that has left them.
            let theirs =
                if left { rig.stable(&s, 4 * MIB).into_block() } else { rig.alloc(&s, 4 * MIB) };
            let ours = rig.alloc(&u, 12 * MIB);
            write(&s, &theirs);
            write(&u, &ours);
            rig.sim.driver().capture_begin(s.raw(), aquifer_driver::CaptureMode::Relaxed).unwrap();
            drop((theirs, ours));
            if reserved {
                let mut room = rig.pool.reserve::<u8>(&u, 12 << 20).unwrap();
                room.commit_to(12 << 20).unwrap();
            } else {
                rig.stable(&u, 12 * MIB);
            }
            // Memory that cannot be waited for is reported as no room.
            let refused = rig.pool.alloc_stable(&u, Request::bytes(16 * MIB)).map(drop);
            assert!(matches!(refused, Err(MemoryError::OutOfMemory(_))), "{refused:?}");
            rig.sim.driver().capture_end(s.raw()).unwrap();
            rig.assert_silent();
        }
    }
}

#[test]
fn departed_memory_is_waited_for_in_one_slow_path_after_the_handlers() {
    for mapping in [true, false] {
        let asked = Reclaimer::new(|| ());
        let sim = if mapping { Sim::h200(1) } else { plain() };
        let rig = Rig::on(sim.seeded(1), 32, |_| ());
        let _registration = rig.budget.on_need(&asked);
        let s = rig.stream();
        let mut block = rig.stable(&s, 24 * MIB);
        fill(&s, &mut block, 1);
        drop(block);
        rig.alloc(&s, 20 * MIB);
        assert!(asked.calls() <= 1, "the chain ran more than once");
        rig.assert_silent();
    }
}

#[test]
fn a_refusal_names_the_holders_of_stable_and_reserved_memory() {
    let rig = Rig::on(Sim::h200(1), 64, |config| config.wait = Duration::ZERO);
    let s = rig.stream();
    let (net, cache) = (aquifer_core::Tag::named("network"), aquifer_core::Tag::named("kv-cache"));
    let stable = rig.pool.alloc_stable(&s, Request::bytes(30 * MIB).tag(net)).unwrap();
    let _block = rig.pool.alloc(&s, Request::bytes(4 * MIB).tag(net)).unwrap();
    let mut room = aquifer_core::tagged(cache, || rig.pool.reserve::<u8>(&s, 64 << 20)).unwrap();
    room.commit_to(20 << 20).unwrap();
    let holders = |refused: Result<(), MemoryError>| {
        let Err(MemoryError::OutOfMemory(refused)) = refused else { panic!("{refused:?}") };
        let told = refused.to_string();
        assert!(told.contains("holder      34.00 MiB in 2 blocks: \"network\""), "{told}");
        refused.holders.iter().map(|h| (h.tag, h.bytes, h.blocks)).collect::<Vec<_>>()
    };
    let expected = [(net, 34 * MIB, 2), (cache, 20 * MIB, 1)];
    assert_eq!(holders(rig.pool.alloc(&s, Request::bytes(20 * MIB)).map(drop)), expected);
    assert_eq!(holders(rig.pool.alloc_stable(&s, Request::bytes(20 * MIB)).map(drop)), expected);
    assert_eq!(holders(room.commit_to(40 << 20)), expected);
    room.decommit(0..10 << 20).unwrap();
    drop(stable);
    s.synchronize().unwrap();
    rig.pool.trim(0).unwrap();
    let refused = rig.pool.alloc(&s, Request::bytes(60 * MIB)).map(drop).unwrap_err();
    let MemoryError::OutOfMemory(refused) = refused else { panic!("{refused:?}") };
    let left: Vec<_> = refused.holders.iter().map(|h| (h.tag, h.bytes, h.blocks)).collect();
    assert_eq!(left, [(cache, 10 * MIB, 1), (net, 4 * MIB, 1)]);
    drop(room);
}
