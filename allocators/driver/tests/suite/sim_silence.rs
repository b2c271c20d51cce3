//! Tests that every ordering operation orders, that no other operation does, and that correct
//! programs cause no violation. What streams, events and the waits of the host order is compared
//! with a plain search in `sim_model.rs`.
#![allow(unsafe_code, reason = "plays the caller of unsafe calls")]
#![allow(clippy::unwrap_used, reason = "a step that fails fails its test")]

use crate::sim_fixtures::{GPU, GRANULE, Machine, everywhere};
use aquifer_driver::{
    Access, BlockNote, DeviceRange, Ownership, RawStream,
    sim::{SimKernel, ViolationKind},
};
use std::ptr::NonNull;

/// Streams, a block that the first one writes, and pinned and pageable memory.
struct Scene<'a> {
    m: &'a Machine,
    a: RawStream,
    b: RawStream,
    x: DeviceRange,
    y: DeviceRange,
    pinned: NonNull<u8>,
    pageable: NonNull<u8>,
}

/// Asserts in every mode whether `order` orders a write on stream `a` before a read on stream `b`.
#[track_caller]
fn orders(expected: bool, order: impl Fn(&Scene<'_>)) {
    everywhere(|m| {
        let mut own = vec![0_u8; 4096];
        let scene = Scene {
            m,
            a: m.stream(),
            b: m.stream(),
            x: m.alloc(4096),
            y: m.alloc(4096),
            pinned: m.pinned(4096),
            pageable: NonNull::from(own.as_mut_slice()).cast(),
        };
        m.write(scene.a, scene.x);
        order(&scene);
        let before = m.sim.take_violations();
        assert!(before.iter().all(|fault| fault.kind == ViolationKind::FreeInFlight), "{before:?}");
        m.read(scene.b, scene.x);
        let found = m.sim.take_violations();
        assert_eq!(found.is_empty(), expected, "{:?}: {found:?}", m.sim.config());
        assert!(found.iter().all(|fault| fault.kind == ViolationKind::WriteRead), "{found:?}");
        // No queued work may outlive `own`.
        m.driver.device_synchronize(GPU).unwrap();
    });
}

#[test]
fn nothing_orders_nothing() {
    orders(false, |_| {});
}

#[test]
fn an_event_orders_after_its_handle_is_gone() {
    orders(true, |s| {
        let event = s.m.fence(s.a);
        s.m.driver.stream_wait_event(s.b, event).unwrap();
        // SAFETY: 1. It is not used any more.
        unsafe { s.m.driver.event_destroy(event) }.unwrap();
    });
}

#[test]
fn a_device_synchronisation_orders_even_a_stream_that_is_gone() {
    orders(true, |s| {
        // SAFETY: 1. It is not used afterwards.
        unsafe { s.m.driver.stream_destroy(s.a) }.unwrap();
        s.m.driver.device_synchronize(GPU).unwrap();
    });
}

#[test]
fn a_successful_query_orders() {
    orders(true, |s| {
        let event = s.m.fence(s.a);
        while !s.m.driver.event_query(event).unwrap() {
            s.m.sim.step(s.a);
        }
    });
    orders(true, |s| {
        while !s.m.driver.stream_query(s.a).unwrap() {
            s.m.sim.step(s.a);
        }
    });
}

#[test]
fn a_free_and_an_allocation_do_not_order_whatever_they_wait_for() {
    orders(false, |s| {
        // SAFETY: 1. and 2. It was allocated and never used.
        unsafe { s.m.driver.mem_free(GPU, s.y.address) }.unwrap();
    });
    orders(false, |s| {
        s.m.alloc(1 << 20);
    });
}

#[test]
fn host_memory_calls_do_not_order() {
    orders(false, |s| {
        s.m.pinned(4096);
    });
    orders(false, |s| {
        // SAFETY: 1. and 2. It was allocated and never used.
        unsafe { s.m.driver.host_free(GPU, s.pinned) }.unwrap();
    });
    orders(false, |s| {
        // SAFETY: 1. The memory outlives the registration. 2. Nothing uses it.
        unsafe {
            s.m.driver.host_register(GPU, s.pageable, 4096).unwrap();
            s.m.driver.host_unregister(GPU, s.pageable).unwrap();
        }
    });
}

#[test]
fn mapping_calls_do_not_order() {
    orders(false, |s| {
        let (range, handle) = s.m.granule();
        s.m.unmap(range.address);
        // SAFETY: 1. It is not used any more.
        unsafe { s.m.driver.handle_release(handle) }.unwrap();
    });
}

#[test]
fn an_asynchronous_copy_into_pageable_memory_orders_and_into_pinned_does_not() {
    orders(true, |s| {
        // SAFETY: 1. Both are 4096 bytes long. 2. Nothing else accesses them meanwhile.
        unsafe { s.m.driver.copy_to_host(s.a, s.pageable, s.y.address, 4096) }.unwrap();
    });
    orders(false, |s| {
        // SAFETY: as above.
        unsafe { s.m.driver.copy_to_host(s.a, s.pinned, s.y.address, 4096) }.unwrap();
    });
}

#[test]
fn a_copy_from_pageable_memory_is_staged_and_does_not_order() {
    orders(false, |s| {
        // SAFETY: 1. Both are 4096 bytes long. 2. Nothing else accesses them meanwhile.
        unsafe { s.m.driver.copy_to_device(s.a, s.y.address, s.pageable, 4096) }.unwrap();
        s.m.sim.host_write(s.pageable.as_ptr() as u64, 4096);
    });
}

#[test]
fn legacy_and_blocking_streams_order_each_other() {
    everywhere(|m| {
        let (a, b) = (m.sim.blocking_stream(GPU).unwrap(), m.sim.blocking_stream(GPU).unwrap());
        let (legacy, x) = (m.sim.legacy_stream(GPU), m.alloc(4096));
        m.write(a, x);
        m.write(legacy, x);
        m.write(b, x);
        m.silent();
        m.write(a, x);
        assert_eq!(
            m.sim.violations().len(),
            1,
            "two blocking streams are not ordered with each other"
        );
    });
}

#[test]
fn a_non_blocking_stream_is_not_ordered_with_the_legacy_stream() {
    everywhere(|m| {
        let (a, legacy, x) = (m.stream(), m.sim.legacy_stream(GPU), m.alloc(4096));
        m.write(a, x);
        m.write(legacy, x);
        assert_eq!(m.sim.take_violations().len(), 1);
        m.write(a, x);
        assert_eq!(m.sim.take_violations().len(), 1);
    });
}

#[test]
fn the_drivers_pool_orders_its_own_reuse() {
    everywhere(|m| {
        let (a, b) = (m.stream(), m.stream());
        let pool = m.driver.pool_create(GPU).unwrap();
        for round in 0..20 {
            let stream = if round % 2 == 0 { a } else { b };
            let address = m.driver.pool_alloc(pool, stream, GRANULE).unwrap();
            m.write(stream, DeviceRange { device: GPU, address, bytes: GRANULE });
            // SAFETY: 1. Allocated above. 2. All work on it is on this stream.
            unsafe { m.driver.pool_free(stream, address) }.unwrap();
        }
        m.silent();
    });
}

#[test]
fn fresh_memory_is_ready_for_whatever_is_queued_after_it() {
    everywhere(|m| {
        let (a, b, x) = (m.stream(), m.stream(), m.alloc(4096));
        m.write(a, x);
        m.order(a, b);
        m.write(b, x);
        m.silent();
    });
}

#[test]
fn a_block_moves_from_stream_to_stream_in_order() {
    everywhere(|m| {
        let (a, b) = (m.stream(), m.stream());
        let (x, _) = m.granule();
        let note = |owner| m.driver.observer().unwrap().block(BlockNote { range: x, owner });
        note(Ownership::Free);
        for round in 0..10 {
            let (home, user) = if round % 2 == 0 { (a, b) } else { (b, a) };
            note(Ownership::Live { stream: home, generation: round });
            m.sim.launch(home, SimKernel::new("fill").writes(x, Some(round))).unwrap();
            m.order(home, user);
            m.sim.access(user, x, Access::Read, Some(round)).unwrap();
            let users = [user];
            m.driver
                .observer()
                .unwrap()
                .block(BlockNote { range: x, owner: Ownership::Pending { users: &users } });
            m.order(user, home);
            note(Ownership::Free);
            m.order(home, user);
        }
        m.silent();
    });
}

#[test]
fn a_block_that_grows_in_place_keeps_its_users() {
    everywhere(|m| {
        let (a, b) = (m.stream(), m.stream());
        let (x, _) = m.granule();
        let half = DeviceRange { bytes: GRANULE / 2, ..x };
        let note = |range, owner| m.driver.observer().unwrap().block(BlockNote { range, owner });
        note(half, Ownership::Live { stream: a, generation: 1 });
        m.order(a, b);
        m.sim.access(b, half, Access::Read, Some(1)).unwrap();
        note(x, Ownership::Live { stream: a, generation: 1 });
        m.sim.access(a, x, Access::Read, Some(1)).unwrap();
        m.silent();
    });
}

#[test]
fn a_handle_may_be_mapped_anew_before_its_old_mapping_goes() {
    everywhere(|m| {
        let (a, b) = (m.stream(), m.stream());
        let (x, handle) = m.granule();
        m.write(a, x);
        let y = DeviceRange { address: m.reserve(GRANULE), ..x };
        m.map(y.address, handle);
        let done = m.fence(a);
        m.driver.stream_wait_event(b, done).unwrap();
        m.write(b, y);
        m.driver.event_synchronize(done).unwrap();
        m.unmap(x.address);
        m.silent();
    });
}

#[test]
fn an_unmap_after_the_host_has_seen_the_work_done_is_silent() {
    everywhere(|m| {
        let a = m.stream();
        let (x, handle) = m.granule();
        for _ in 0..3 {
            m.write(a, x);
            m.driver.stream_synchronize(a).unwrap();
            m.unmap(x.address);
            m.map(x.address, handle);
        }
        m.silent();
    });
}

#[test]
fn a_stream_that_takes_over_a_place_is_not_taken_for_the_one_before() {
    everywhere(|m| {
        let (a, b, x) = (m.stream(), m.stream(), m.alloc(4096));
        let id = m.driver.stream_id(a).unwrap();
        m.write(a, x);
        // SAFETY: 1. It is not used afterwards.
        unsafe { m.driver.stream_destroy(a) }.unwrap();
        m.sim.run_all();
        let again = m.stream();
        assert_ne!(m.driver.stream_id(again).unwrap(), id);
        m.order(again, b);
        m.read(b, x);
        let found = m.sim.violations();
        assert_eq!(found.len(), 1, "nobody has waited for the first stream");
        assert!(found[0].to_string().contains(&format!("stream {id} ")), "{}", found[0]);
    });
}
