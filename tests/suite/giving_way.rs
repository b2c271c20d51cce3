//! Tests of device memory and pinned memory under one budget, as on an integrated GPU: each is
//! reclaimed for the other.

use crate::support::assert_silent;
use aquifer::{
    Budget, DeviceId, DevicePool, PinnedConfig, PinnedPool, PoolConfig, Request, Runtime,
    host::{Host, Topology},
    sim::{DeviceConfig, Sim, SimConfig},
};
use aquifer_host::kernel::Kernel;
use std::{path::Path, time::Duration};

const MIB: u64 = 1 << 20;

fn integrated() -> Sim {
    let mut config = SimConfig::h200(1);
    config.devices = vec![DeviceConfig::integrated()];
    Sim::new(config)
}

#[test]
fn device_memory_and_pinned_memory_under_one_budget_reclaim_from_each_other() {
    let sim = integrated();
    let machine = Budget::new("the machine's memory", 16 * MIB);
    let device = machine.child("the device", 16 * MIB);
    let pinned = machine.child("pinned memory", 16 * MIB);
    let pool =
        DevicePool::open(sim.driver(), DeviceId(0), PoolConfig::with_budget(device)).unwrap();
    let topology = Topology::read_under(Path::new("/")).unwrap();
    let host = Host::new(topology, Kernel::new()).with_driver(sim.driver(), DeviceId(0));
    let mut config = PinnedConfig::default();
    config.chunk = 2 * MIB as usize;
    config.patience = Duration::from_secs(60);
    let pinned = PinnedPool::new(&host, &pinned, config).unwrap();
    let s = pool.stream().unwrap();
    for _ in 0..3 {
        drop(pool.alloc(&s, Request::bytes(12 * MIB)).unwrap());
        drop(pinned.buffer::<u8>(12 << 20).unwrap());
        assert!(pinned.stats().memory.physical >= 12 * MIB && pool.stats().physical <= 4 * MIB);
        assert_eq!(machine.used(), pinned.stats().memory.physical + pool.stats().physical);
    }
    drop(pool.alloc(&s, Request::bytes(12 * MIB)).unwrap());
    assert_eq!(pinned.stats().memory.physical, 0);
    assert!(machine.peak() <= 16 * MIB);
    drop((pool, pinned, s));
    assert_silent(&sim);
}

#[test]
fn an_integrated_device_of_a_runtime_and_its_host_have_one_budget_and_others_have_not() {
    let rt = Runtime::on(integrated().driver()).unwrap();
    let (device, pinned) = (rt.device(0).unwrap().budget(), rt.pinned_near(0).budget());
    assert!(device.root().is(&pinned.root()) && !device.is(pinned));
    let rt = Runtime::on(Sim::h200(1).driver()).unwrap();
    let (device, pinned) = (rt.device(0).unwrap().budget(), rt.pinned_near(0).budget());
    assert!(!device.root().is(&pinned.root()));
}
