//! Tests of ranges at the end of the address space.

use aquifer_driver::{
    Access, BlockNote, Call, CaptureMode, DeviceId, DeviceRange, HostAccess, Ownership, Pattern,
    Rows,
    sim::{Sim, SimKernel, ViolationKind},
};
use std::ptr::NonNull;

const DEVICE: DeviceId = DeviceId(0);
const ENDS: [(u64, u64); 5] =
    [(u64::MAX, 1), (u64::MAX, 4096), (u64::MAX - 100, 4096), (0, u64::MAX), (1, u64::MAX)];

#[test]
fn work_on_a_range_past_the_last_address_is_reported_and_does_not_run() {
    for (address, bytes) in ENDS {
        let sim = Sim::h200(1);
        let stream = sim.driver().stream_create(DEVICE, 0).unwrap();
        let range = DeviceRange { device: DEVICE, address, bytes };
        for access in [Access::Read, Access::Write, Access::ReadWrite] {
            sim.access(stream, range, access, None).unwrap();
        }
        let kernel = SimKernel::new("past the end").writes(range, None);
        sim.launch(stream, kernel.run(|memory| memory.write(0)[0] = 1)).unwrap();
        // SAFETY: 1. the host sides are complete; memory that the device cannot reach is not
        // accessed.
        #[expect(unsafe_code, reason = "copies to addresses that are not there")]
        unsafe {
            let mut word = [0_u8; 8];
            let at = NonNull::from(&mut word).cast();
            sim.driver().copy_to_device(stream, u64::MAX, at, 8).unwrap();
            sim.driver().copy_to_host(stream, at, u64::MAX, 8).unwrap();
            sim.driver().copy_on_device(stream, address, address, bytes).unwrap();
            sim.driver().fill_with(stream, address, Pattern::Byte(1), bytes).unwrap();
            let rows = Rows { width: 8, height: 2, from_pitch: 8, to_pitch: 8 };
            sim.driver().copy_rows(stream, address, address, rows).unwrap();
        }
        sim.run_all();
        assert_eq!(sim.read_back(range), None);
        let found = sim.violations();
        assert!(
            !found.is_empty() && found.iter().all(|v| v.kind == ViolationKind::Unmapped),
            "{found:?}"
        );
    }
}

#[test]
fn a_graph_over_a_range_past_the_last_address_is_reported_at_its_launch_and_does_not_run() {
    for (address, bytes) in ENDS {
        let sim = Sim::h200(1);
        let driver = sim.driver();
        let stream = driver.stream_create(DEVICE, 0).unwrap();
        let range = DeviceRange { device: DEVICE, address, bytes };
        driver.capture_begin(stream, CaptureMode::ThreadLocal).unwrap();
        let kernel = SimKernel::new("past the end").writes(range, None);
        sim.launch(stream, kernel.run(|memory| memory.write(0)[0] = 1)).unwrap();
        let graph = driver.capture_end(stream).unwrap();
        let exec = driver.graph_instantiate(graph).unwrap();
        // SAFETY: 1. the memory of the graph does not exist and is therefore not accessed.
        #[expect(unsafe_code, reason = "launches a graph")]
        unsafe {
            driver.graph_launch(exec, stream).unwrap();
        }
        sim.run_all();
        assert!(sim.take_violations().iter().any(|v| v.kind == ViolationKind::Unmapped));
    }
}

#[test]
fn calls_with_a_range_past_the_last_address_are_refused_or_change_nothing() {
    for (address, bytes) in ENDS {
        let sim = Sim::h200(1);
        let driver = sim.driver();
        let range = DeviceRange { device: DEVICE, address, bytes };
        driver.host_alloc(DEVICE, 4096, false).unwrap();
        sim.host_read(address, bytes);
        sim.host_write(address, bytes);
        let stream = driver.stream_create(DEVICE, 0).unwrap();
        let observer = driver.observer().unwrap();
        observer.registered(range);
        observer.unregistered(range);
        observer.kept_for_graphs(range, 1);
        observer.let_go_by_graphs(range);
        observer.host(address, bytes, HostAccess::Free);
        for owner in [
            Ownership::Live { stream, generation: 1 },
            Ownership::Pending { users: &[stream] },
            Ownership::Free,
        ] {
            observer.block(BlockNote { range, owner });
        }
        let held = sim.outstanding();
        // SAFETY: 1. nothing uses these addresses.
        #[expect(unsafe_code, reason = "frees what is not there")]
        unsafe {
            assert!(driver.mem_free(DEVICE, address).is_err() || address == 0);
            assert!(driver.unmap(DEVICE, address, bytes).is_err());
            assert!(driver.address_free(DEVICE, address, bytes).is_err());
        }
        assert!(driver.set_access(address, bytes, &[DEVICE]).is_err());
        assert_eq!(sim.outstanding(), held);
        assert!(driver.calls().get(Call::Unmap) > 0);
    }
}
