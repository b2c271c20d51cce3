//! Tests which devices can access a pool's memory.
#![expect(clippy::unwrap_used, reason = "tests")]

use crate::support::{MIB, Rig, plain, range};
use aquifer_core::MemoryError;
use aquifer_device::{DevicePool, PoolConfig};
use aquifer_driver::{
    Access, DeviceId, DeviceRange,
    sim::{Sim, SimConfig},
};
use aquifer_stream::{Stream, StreamPool};

const OWN: DeviceId = DeviceId(0);
const OTHER: DeviceId = DeviceId(1);

/// Returns whether a kernel of the other device may access a range of `home`, when all work queued
/// before is done.
fn is_reached(rig: &Rig, home: &Stream, range: DeviceRange) -> bool {
    home.timeline().synchronize().unwrap();
    let stream = StreamPool::new(rig.sim.driver(), OTHER, 1).lease().unwrap();
    let queued = rig.sim.access(stream.raw(), range, Access::Read, None);
    let _finished = stream.timeline().synchronize();
    let found = rig.sim.violations().len();
    queued.is_ok() && found == 0
}

fn two_devices(peers: Vec<DeviceId>) -> Rig {
    Rig::on(Sim::h200(2).symbolic(), 64, |config| config.peers = peers)
}

#[test]
fn memory_of_each_kind_is_open_to_the_peers_that_were_named() {
    let rig = two_devices(vec![OTHER]);
    let s = rig.stream();
    let block = rig.alloc(&s, 4 * MIB);
    assert!(is_reached(&rig, &s, range(&block)));
    let stable = rig.stable(&s, MIB);
    assert!(is_reached(
        &rig,
        &s,
        DeviceRange { device: OWN, address: stable.address(), bytes: MIB }
    ));
    // Handles that moved are mapped again.
    drop(block);
    let larger = rig.alloc(&s, 40 * MIB);
    assert!(is_reached(&rig, &s, range(&larger)));
}

#[test]
fn memory_is_closed_to_devices_that_were_not_named() {
    let rig = two_devices(Vec::new());
    let s = rig.stream();
    let block = rig.alloc(&s, 4 * MIB);
    assert!(!is_reached(&rig, &s, range(&block)));
}

#[test]
fn impossible_peers_are_refused_before_memory_is_allocated() {
    let open = |sim: &Sim, config| DevicePool::open(sim.driver(), OWN, config).map(drop);
    let naming = |peer| {
        let mut config = PoolConfig::default();
        config.peers = vec![peer];
        config
    };
    assert!(matches!(open(&Sim::h200(2), naming(DeviceId(7))), Err(MemoryError::Driver { .. })));
    let mut config = SimConfig::h200(2);
    config.peers = false;
    let apart = Sim::new(config);
    assert!(matches!(
        open(&apart, naming(OTHER)),
        Err(MemoryError::BadSetting { name: "peers", .. })
    ));
    let old = plain();
    assert!(matches!(open(&old, naming(OWN)), Err(MemoryError::Unsupported { .. })));
    let mut bypass = naming(OTHER);
    bypass.bypass = true;
    assert!(matches!(
        open(&Sim::h200(2), bypass),
        Err(MemoryError::BadSetting { name: "peers", .. })
    ));
    // A device is not its own peer.
    assert!(open(&Sim::h200(1), naming(OWN)).is_ok());
}
