//! Tests of empty blocks and buffers: an allocator of device memory gives one for no bytes. It
//! takes no memory, and everything that takes a block takes it.
#![allow(clippy::unwrap_used, reason = "a step that fails fails its test")]

use crate::support::{MIB, Rig};
use aquifer_core::{Budget, MemoryError, OpaqueBlock, Recorder, Tag, event::RingSink};
use aquifer_device::{
    Adopted, Debugging, DeviceArena, DeviceBuffer, DevicePool, Direct, Log, PoolConfig, Request,
    Resource, StreamOrdered,
};
use aquifer_driver::{Access, DeviceId, DeviceRange, External, sim::Sim};
use aquifer_stream::{Launch, Stream, StreamPool};
use std::sync::{Arc, Mutex};

/// Uses an empty buffer of each kind of allocator in every way.
#[track_caller]
fn use_empty(rig: &Rig, resource: &dyn Resource, s: &Stream, u: &Stream) {
    let before = (resource.stats(), rig.budget.used());
    let mut x: DeviceBuffer<f32> = DeviceBuffer::new_in(resource, s, 0).unwrap();
    assert_eq!((x.len(), x.is_empty(), x.block().bytes(), x.block().capacity()), (0, true, 0, 0));
    let mut y: DeviceBuffer<f32> = DeviceBuffer::new_in(resource, u, 0).unwrap();
    s.fill(&mut x, 1.5).unwrap();
    u.copy(&x, &mut y).unwrap();
    u.copy(x.slice(0..0).unwrap(), &mut y.slice_mut(0..0).unwrap()).unwrap();
    s.try_scope(|c| {
        c.upload(&[], &mut x)?;
        c.download(x.slice(0..0)?, &mut [])
    })
    .unwrap();
    assert_eq!(x.slice(0..1).unwrap_err(), MemoryError::OutOfRange { start: 0, end: 1, len: 0 });
    Launch::on(u).reads(&x).updates(&y).preflight().unwrap().commit().unwrap();
    let open = x.block().prepare(u, Access::Write).unwrap();
    let mut block = x.cast::<u8>().unwrap().into_block();
    let kept = Arc::new(());
    block.keep_until_free(Box::new(kept.clone()));
    drop(block);
    assert_eq!(Arc::strong_count(&kept), 1, "no memory is held back");
    open.finish().unwrap();
    drop(y);
    assert_eq!((resource.stats(), rig.budget.used()), before);
    rig.assert_silent();
}

#[test]
fn every_allocator_of_device_memory_gives_an_empty_block_that_takes_no_memory() {
    let rig = Rig::stepped(16);
    let (s, u) = (rig.stream(), rig.stream());
    let held = rig.bytes(&s, 16 * MIB);
    let driver = rig.sim.driver();
    use_empty(&rig, &rig.pool, &s, &u);
    use_empty(&rig, &rig.pool.for_tenant(&Budget::new("a tenant", 0)).unwrap(), &s, &u);
    use_empty(&rig, &rig.pool.parkable(Tag::named("of nothing")).unwrap(), &s, &u);
    use_empty(&rig, &Direct::new(driver.clone(), rig.pool.streams().clone(), None), &s, &u);
    let none = Budget::new("no bytes", 0);
    let ordered = StreamOrdered::new(driver, rig.pool.streams().clone(), none).unwrap();
    use_empty(&rig, &ordered, &s, &u);
    let ring = Arc::new(RingSink::new(16));
    let recorder = Arc::new(Recorder::new(ring.clone()));
    use_empty(&rig, &Log::new(rig.pool.clone(), recorder), &s, &u);
    assert!(ring.take().is_empty(), "an empty block is no event");
    let none = Mutex::new(rig.budget.reserve(0).unwrap());
    drop(rig.pool.alloc_reserved(&s, Request::bytes(0), &none).unwrap());
    let arena = DeviceArena::new(&rig.pool, &s, 0).unwrap();
    assert_eq!(arena.alloc::<u32>(0).unwrap().as_slice().split_at(0).map(drop), Ok(()));
    drop(held);
}

#[test]
fn pools_that_bypass_or_check_give_empty_blocks_too() {
    let sets: [fn(&mut PoolConfig); 2] =
        [|config| config.bypass = true, |config| config.debug = Debugging::all()];
    for set in sets {
        let rig = Rig::on(Sim::h200(1), 16, set);
        let (s, u) = (rig.stream(), rig.stream());
        use_empty(&rig, &rig.pool, &s, &u);
        assert_eq!(rig.pool.alloc_raw(&s, Request::bytes(0)), Ok(0));
        assert_eq!(rig.pool.free_raw(0), Ok(()));
    }
}

#[test]
fn the_raw_address_of_an_empty_block_is_zero_and_may_be_shared_and_freed() {
    let rig = Rig::new(8);
    let s = rig.stream();
    assert_eq!(rig.pool.alloc_raw(&s, Request::bytes(0)), Ok(0));
    assert_eq!(rig.alloc(&s, 0).into_raw(), 0);
    rig.pool.share_raw(0).unwrap().record_use(&s, Access::Write).unwrap();
    assert_eq!(rig.pool.from_raw(0).unwrap().bytes(), 0);
    for _ in 0..3 {
        rig.pool.free_raw(0).unwrap();
    }
    assert_eq!(rig.pool.stats(), DevicePool::stats(&Rig::new(8).pool));
    rig.assert_silent();
}

#[test]
fn an_empty_block_is_refused_for_a_stream_of_another_device_or_machine() {
    let rig = Rig::on(Sim::h200(2), 8, |_| ());
    let far = StreamPool::new(rig.sim.driver(), DeviceId(1), 1).lease().unwrap();
    assert!(matches!(
        rig.pool.alloc(&far, Request::bytes(0)),
        Err(MemoryError::WrongDevice { .. })
    ));
    let foreign = StreamPool::new(Sim::h200(1).driver(), DeviceId(0), 1).lease().unwrap();
    assert!(matches!(
        rig.pool.alloc(&foreign, Request::bytes(0)),
        Err(MemoryError::OtherMachine { .. })
    ));
}

#[test]
fn elements_of_no_size_are_refused() {
    let rig = Rig::new(8);
    let s = rig.stream();
    for len in [0, 5] {
        assert_eq!(rig.pool.buffer::<()>(&s, len).unwrap_err(), MemoryError::ZeroSize);
    }
}

#[test]
#[expect(unsafe_code, reason = "plays another library")]
fn empty_memory_of_another_library_is_adopted_and_returned() {
    let rig = Rig::new(8);
    let s = rig.stream();
    let range = DeviceRange { device: DeviceId(0), address: 0, bytes: 0 };
    // SAFETY: 1. to 4. there is no memory, and the stream outlives the value.
    let external = unsafe { External::<u32, _>::new(range, s.raw(), None, "theirs") };
    let mut x = Adopted::new(rig.pool.streams(), external).map_err(|d| d.error).unwrap();
    s.fill(&mut x, 1).unwrap();
    assert_eq!(x.into_inner().map_err(|d| d.error).unwrap().into_guard(), "theirs");
}

#[test]
fn a_request_beyond_every_device_is_out_of_memory_and_only_impossible_ones_are_too_large() {
    let rig = Rig::new(8);
    let s = rig.stream();
    let direct = Direct::new(rig.sim.driver(), rig.pool.streams().clone(), None);
    let tenant = rig.pool.for_tenant(&Budget::new("a tenant", u64::MAX)).unwrap();
    let parkable = rig.pool.parkable(Tag::named("too much")).unwrap();
    let resources: [&dyn Resource; 4] = [&rig.pool, &direct, &tenant, &parkable];
    for resource in resources {
        for bytes in [1 << 40, 1 << 46, (1 << 46) + 1, 1 << 50, 1 << 62, i64::MAX as u64] {
            let refused = resource.allocate(&s, Request::bytes(bytes)).unwrap_err();
            assert!(
                matches!(&refused, MemoryError::OutOfMemory(error) if error.requested == bytes),
                "{bytes}: {refused}"
            );
        }
        for requested in [1 << 63, u64::MAX] {
            let refused = resource.allocate(&s, Request::bytes(requested)).unwrap_err();
            assert_eq!(refused, MemoryError::TooLarge { requested, limit: i64::MAX as u64 });
        }
    }
    let stable = rig.pool.alloc_stable(&s, Request::bytes(1 << 50)).unwrap_err();
    assert!(matches!(stable, MemoryError::OutOfMemory(_)), "{stable}");
    assert_eq!((rig.pool.stats().failures, rig.budget.used()), (19, 0));
}
