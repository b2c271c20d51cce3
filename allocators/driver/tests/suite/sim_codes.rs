//! Tests that the simulated driver refuses and accepts the same calls as the real one, with the
//! same codes.
#![allow(unsafe_code, reason = "plays the caller of unsafe calls")]
#![allow(clippy::unwrap_used, reason = "a step that fails fails its test")]

use crate::sim_fixtures::{GPU, GRANULE, everywhere};
use aquifer_driver::{
    DeviceId, DeviceRange, ExportTypes, PoolUsage, RawEvent, RawStream, sim::ViolationKind,
};
use std::ptr::NonNull;

const FILE: &str = "sim_codes.rs";

fn code<T: std::fmt::Debug>(answer: Result<T, aquifer_driver::DriverError>) -> u32 {
    answer.unwrap_err().code
}

#[test]
fn wrong_arguments_are_refused_with_the_drivers_codes_and_change_nothing() {
    everywhere(|m| {
        let d = &m.driver;
        let (a, nowhere) = (m.stream(), DeviceId(7));
        let error = d.mem_alloc(nowhere, 1).unwrap_err();
        assert_eq!(
            (error.call, error.code, error.name),
            ("cuMemAlloc", 101, "CUDA_ERROR_INVALID_DEVICE")
        );
        assert_eq!(code(d.device_info(nowhere)), 101);
        assert_eq!(code(d.mem_alloc(GPU, 0)), 1);
        assert_eq!(code(d.host_alloc(GPU, 0, false)), 2);
        assert_eq!(code(d.address_reserve(GPU, GRANULE + 1, 0)), 1);
        assert_eq!(code(d.address_reserve(GPU, 0, 0)), 1);
        assert_eq!(code(d.address_reserve(GPU, GRANULE, 3)), 1);
        assert_eq!(code(d.handle_create(GPU, GRANULE / 2, ExportTypes::NONE)), 1);
        // SAFETY: none of these calls is valid; the simulator must refuse without crashing.
        unsafe {
            assert_eq!(code(d.mem_free(GPU, 0x1000)), 1);
            assert_eq!(code(d.pool_free(a, 0x1000)), 1);
            assert_eq!(code(d.stream_query(RawStream::from_raw(GPU, 0x777))), 400);
            assert_eq!(code(d.event_query(RawEvent::from_raw(GPU, 12))), 400);
            assert_eq!(code(d.stream_destroy(m.sim.legacy_stream(GPU))), 400);
            let mut own = [0_u8; 16];
            let own = NonNull::from(&mut own).cast();
            assert_eq!(code(d.host_unregister(GPU, own)), 713);
            assert_eq!(code(d.host_free(GPU, own)), 1);
            d.host_register(GPU, own, 16).unwrap();
            assert_eq!(code(d.host_register(GPU, own.add(8), 16)), 712);
            d.host_unregister(GPU, own).unwrap();
            // SAFETY: as above.
            d.stream_destroy(a).unwrap();
            assert_eq!(code(d.stream_destroy(a)), 400);
        }
        assert!(m.sim.outstanding().is_empty(), "{}", m.sim.outstanding());
        m.silent();
    });
}

#[test]
fn mapping_follows_the_rules_of_the_driver() {
    everywhere(|m| {
        let d = &m.driver;
        let (range, small, large) =
            (m.reserve(4 * GRANULE), m.handle(GRANULE), m.handle(2 * GRANULE));
        // SAFETY: invalid calls are refused, and no work accesses the memory of valid ones.
        unsafe {
            assert_eq!(code(d.map(range, GRANULE, large)), 801, "a handle is mapped whole");
            assert_eq!(code(d.map(range, 2 * GRANULE, small)), 801, "and no more than it");
            assert_eq!(code(d.map(range, GRANULE / 2, small)), 801, "nor half a granule");
            assert_eq!(code(d.map(range, 0, small)), 1, "nor nothing");
            assert_eq!(
                code(d.map(range + 512, GRANULE, small)),
                1,
                "at a multiple of the granularity"
            );
            assert_eq!(code(d.map(range + 3 * GRANULE, 2 * GRANULE, large)), 1, "inside its range");
            d.map(range, GRANULE, small).unwrap();
            assert_eq!(code(d.map(range, GRANULE, small)), 1, "where nothing is");
            d.map(range + GRANULE, 2 * GRANULE, large).unwrap();
            assert_eq!(
                code(d.set_access(range + 3 * GRANULE, GRANULE, &[GPU])),
                1,
                "where something is mapped"
            );
            assert_eq!(code(d.set_access(range, 2 * GRANULE, &[GPU])), 1, "of whole mappings");
            assert_eq!(code(d.set_access(range, 5 * GRANULE, &[GPU])), 1, "inside the range");
            d.set_access(range, 3 * GRANULE, &[GPU]).unwrap();
            assert_eq!(code(d.unmap(GPU, range + GRANULE, GRANULE)), 1, "and unmapped whole");
            assert_eq!(code(d.unmap(GPU, range + 2 * GRANULE, 2 * GRANULE)), 1, "at either end");
            assert_eq!(code(d.unmap(GPU, range, 5 * GRANULE)), 1, "inside the range");
            assert_eq!(
                code(d.address_free(GPU, range, 4 * GRANULE)),
                1,
                "an empty range is freed, and no other"
            );
            d.unmap(GPU, range, 3 * GRANULE).unwrap();
            assert_eq!(code(d.address_free(GPU, range, GRANULE)), 1, "whole");
            d.address_free(GPU, range, 4 * GRANULE).unwrap();
            d.handle_release(small).unwrap();
            assert_eq!(code(d.handle_release(small)), 400);
            assert_eq!(code(d.map(range, GRANULE, small)), 400);
            d.handle_release(large).unwrap();
        }
        assert!(m.sim.outstanding().is_empty(), "{}", m.sim.outstanding());
        m.silent();
    });
}

#[test]
fn an_unmap_passes_over_holes() {
    everywhere(|m| {
        let (d, range, one, two) =
            (&m.driver, m.reserve(6 * GRANULE), m.handle(GRANULE), m.handle(2 * GRANULE));
        // SAFETY: no work accesses any of it.
        unsafe {
            d.unmap(GPU, range, 6 * GRANULE).unwrap();
            d.map(range + GRANULE, GRANULE, one).unwrap();
            d.map(range + 3 * GRANULE, 2 * GRANULE, two).unwrap();
            d.unmap(GPU, range, 3 * GRANULE).unwrap();
            assert_eq!(m.sim.outstanding().mappings, 1, "what lies behind stays");
            d.map(range, GRANULE, one).unwrap();
            d.unmap(GPU, range, 6 * GRANULE).unwrap();
            assert_eq!(m.sim.outstanding().mappings, 0);
            d.unmap(GPU, range, 6 * GRANULE).unwrap();
            d.address_free(GPU, range, 6 * GRANULE).unwrap();
            d.handle_release(one).unwrap();
            d.handle_release(two).unwrap();
            assert_eq!(code(d.unmap(GPU, range, GRANULE)), 1, "nobody's addresses");
        }
        assert!(m.sim.outstanding().is_empty(), "{}", m.sim.outstanding());
        m.silent();
    });
}

#[test]
fn access_is_given_up_to_the_first_hole() {
    everywhere(|m| {
        let (d, a, range) = (&m.driver, m.stream(), m.reserve(6 * GRANULE));
        let granule = |i| DeviceRange { device: GPU, address: range + i * GRANULE, bytes: GRANULE };
        for i in [0, 1, 3] {
            let handle = m.handle(GRANULE);
            // SAFETY: 1. Nothing is there.
            unsafe { d.map(granule(i).address, GRANULE, handle) }.unwrap();
        }
        assert_eq!(code(d.set_access(range, 3 * GRANULE, &[GPU])), 1, "it ends in a hole");
        assert_eq!(
            code(d.set_access(range + 2 * GRANULE, 2 * GRANULE, &[GPU])),
            1,
            "it begins in one"
        );
        let no_access = |i| {
            let (_, later) = at!(m.write(a, granule(i)));
            m.first(ViolationKind::NoAccess { device: GPU }, FILE, None, later);
        };
        [0, 1, 3].into_iter().for_each(no_access);
        d.set_access(range, 4 * GRANULE, &[GPU]).unwrap();
        m.write(a, granule(0));
        m.write(a, granule(1));
        m.silent();
        no_access(3);
    });
}

#[test]
fn an_unmap_across_a_hole_finds_the_work_behind_it() {
    everywhere(|m| {
        let (a, range, handle) = (m.stream(), m.reserve(3 * GRANULE), m.handle(GRANULE));
        m.map(range + 2 * GRANULE, handle);
        let (_, earlier) =
            at!(m.write(a, DeviceRange { device: GPU, address: range + 2 * GRANULE, bytes: 1 }));
        // SAFETY: 1. Deliberately broken; the simulator reports it.
        let (_, later) = at!(unsafe { m.driver.unmap(GPU, range, 3 * GRANULE) }.unwrap());
        m.first(ViolationKind::UnmapInFlight, FILE, Some(earlier), later);
    });
}

#[test]
fn a_pool_gives_no_bytes_at_address_0_and_frees_of_that_do_nothing() {
    everywhere(|m| {
        let (d, a) = (&m.driver, m.stream());
        let pool = d.pool_create(GPU).unwrap();
        assert_eq!(d.pool_alloc(pool, a, 0), Ok(0));
        assert_eq!(d.pool_usage(pool), Ok(PoolUsage::default()));
        // SAFETY: 1. It came from the pool, twice. 2. It has no bytes.
        unsafe {
            d.pool_free(a, 0).unwrap();
            d.pool_free(a, 0).unwrap();
            d.mem_free(GPU, 0).unwrap();
            d.pool_destroy(pool).unwrap();
        }
        assert_eq!(code(d.pool_alloc(pool, a, 0)), 400, "but only from a pool that is there");
        m.silent();
    });
}

#[test]
fn pinned_memory_ends_as_it_began_and_where_it_began() {
    everywhere(|m| {
        let d = &m.driver;
        let mut own = [0_u8; 64];
        let own = NonNull::from(&mut own).cast::<u8>();
        let pinned = m.pinned(4096);
        // SAFETY: none of it is accessed; invalid calls are refused.
        unsafe {
            d.host_register(GPU, own, 32).unwrap();
            assert_eq!(code(d.host_unregister(GPU, own.add(8))), 1, "inside a registration");
            assert_eq!(code(d.host_unregister(GPU, own.add(32))), 713, "behind it");
            d.host_unregister(GPU, own).unwrap();
            assert_eq!(code(d.host_unregister(GPU, pinned)), 1, "the driver's own");
            assert_eq!(code(d.host_unregister(GPU, pinned.add(64))), 1);
            assert_eq!(code(d.host_register(GPU, pinned, 4096)), 1);
            assert_eq!(code(d.host_register(GPU, pinned.add(64), 8)), 1);
            d.host_free(GPU, pinned).unwrap();
            assert_eq!(code(d.host_unregister(GPU, pinned)), 713);
        }
        assert!(m.sim.outstanding().is_empty(), "{}", m.sim.outstanding());
        m.silent();
    });
}
