//! Tests of public sizes as large as their types allow: each is refused with a typed error, or
//! served as any large size is. Arithmetic never overflows.
#![allow(clippy::unwrap_used, reason = "a step that fails fails its test")]

use crate::support::{MIB, Rig, assert_silent, plain};
use aquifer_core::{Budget, MemoryError, Tag};
use aquifer_device::{DeviceArena, DevicePages, DevicePool, PoolConfig, Request};
use aquifer_driver::{DeviceId, sim::Sim};

/// Sizes near the ends of what 64 bits hold.
const HUGE: [u64; 6] =
    [1 << 62, (1 << 63) - 1, 1 << 63, u64::MAX - 2 * MIB, u64::MAX - 1, u64::MAX];

#[test]
fn a_reserve_beyond_the_device_is_out_of_memory_and_changes_nothing() {
    let rig = Rig::on(Sim::h200(1).symbolic(), 64, |_| ());
    rig.pool.warm(4 * MIB).unwrap();
    for bytes in HUGE {
        let refused = rig.pool.warm(bytes).unwrap_err();
        assert!(matches!(refused, MemoryError::OutOfMemory(_)), "{bytes}: {refused}");
    }
    rig.pool.trim(0).unwrap();
    assert_eq!(rig.pool.stats().physical, 4 * MIB, "the reserve is as before");
    for warm in HUGE {
        let mut config = PoolConfig::with_budget(Budget::new("no limit", u64::MAX));
        config.warm_reserve = warm;
        let refused = DevicePool::open(rig.sim.driver(), DeviceId(0), config).unwrap_err();
        assert!(matches!(refused, MemoryError::OutOfMemory(_)), "{warm}: {refused}");
    }
    assert_eq!(rig.pool.trim(u64::MAX), Ok(0));
}

#[test]
fn handles_larger_than_the_device_are_refused_when_the_pool_is_opened() {
    for handle_bytes in HUGE.into_iter().chain([1 << 40, 5 << 20]) {
        let mut config = PoolConfig::with_budget(Budget::new("the device", 64 * MIB));
        config.handle_bytes = handle_bytes;
        let sim = Sim::h200(1).symbolic();
        let refused = DevicePool::open(sim.driver(), DeviceId(0), config.clone()).unwrap_err();
        assert!(
            matches!(refused, MemoryError::BadSetting { name: "handle_bytes", .. }),
            "{handle_bytes}: {refused}"
        );
        // Without virtual memory there are no handles.
        DevicePool::open(plain().symbolic().driver(), DeviceId(0), config).unwrap();
    }
}

#[test]
fn a_device_with_any_amount_of_memory_serves_blocks_or_refuses_them_with_an_error() {
    for capacity in HUGE {
        let sim = Sim::h200(1).symbolic().capacity(capacity);
        let pool = DevicePool::open(sim.driver(), DeviceId(0), PoolConfig::default()).unwrap();
        let s = pool.stream().unwrap();
        let block = pool.alloc(&s, Request::bytes(MIB)).unwrap();
        let stable = pool.alloc_stable(&s, Request::bytes(MIB)).unwrap();
        // These need as many addresses as the device has memory, and the driver has no more.
        let tag = Tag::named("of a huge device");
        for refused in [pool.parkable(tag).map(drop), pool.graph_pool().map(drop)] {
            let refused = refused.unwrap_err();
            assert!(matches!(&refused, MemoryError::Driver(e) if e.is_out_of_memory()));
        }
        let mut reserved = pool.reserve::<u8>(&s, 8 << 20).unwrap();
        reserved.commit_to(1).unwrap();
        for bytes in [1 << 50, i64::MAX as u64] {
            let refused = pool.alloc(&s, Request::bytes(bytes)).unwrap_err();
            assert!(matches!(refused, MemoryError::OutOfMemory(_)), "{bytes}: {refused}");
        }
        drop((block, stable, reserved));
        pool.trim(0).unwrap();
        assert_eq!(pool.stats().physical, 0);
        assert_silent(&sim);
    }
}

#[test]
fn every_other_size_is_checked_before_it_is_rounded_up() {
    let rig = Rig::on(Sim::h200(1).symbolic(), 64, |config| {
        config.debug.canaries = true;
    });
    let s = rig.stream();
    let x = rig.bytes(&s, 4096);
    rig.pool.limit_tag(Tag::named("any"), u64::MAX);
    for bytes in HUGE {
        let len = bytes as usize;
        for align in [1, 512, 2 << 20] {
            assert!(rig.pool.alloc(&s, Request::bytes(bytes).align(align)).is_err());
            assert!(rig.pool.alloc_stable(&s, Request::bytes(bytes).align(align)).is_err());
        }
        assert!(rig.pool.alloc(&s, Request::bytes(1).align(bytes)).is_err());
        assert!(rig.pool.buffer::<u64>(&s, len).is_err());
        assert!(rig.pool.reserve::<u8>(&s, len).is_err());
        assert!(rig.pool.reserve_in_steps::<u8>(&s, 1, bytes).is_err());
        assert!(DeviceArena::new(&rig.pool, &s, bytes).is_err());
        assert!(DevicePages::new(&rig.pool, &s, len, 4096).is_err());
        assert!(DevicePages::new(&rig.pool, &s, 1, bytes).is_err());
        assert!(rig.pool.give_back(bytes, None).missing > 0);
        assert!(x.slice(1..len).is_err() && x.split_at(len).is_err());
    }
    rig.assert_silent();
}
