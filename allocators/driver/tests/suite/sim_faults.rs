//! Tests that each fault of a program is reported with both parties and their lines.
#![allow(unsafe_code, reason = "commits on purpose what unsafe calls forbid")]
#![allow(clippy::unwrap_used, reason = "a step that fails fails its test")]

use crate::sim_fixtures::{GPU, GRANULE, Machine, everywhere};
use aquifer_driver::{
    Access, BlockNote, DeviceRange, HostAccess, Ownership, RawStream,
    sim::{Agent, Sim, SimKernel, ViolationKind, ViolationLocation},
};
use std::ptr::NonNull;

const FILE: &str = "sim_faults.rs";

fn note(m: &Machine, range: DeviceRange, owner: Ownership<'_>) {
    m.driver.observer().unwrap().block(BlockNote { range, owner });
}

fn live(m: &Machine, range: DeviceRange, stream: RawStream, generation: u64) {
    note(m, range, Ownership::Live { stream, generation });
}

#[test]
fn unordered_writes_and_reads_race() {
    use Access::{Read, ReadWrite, Write};
    let cases = [
        (Write, Write, ViolationKind::WriteWrite),
        (Write, Read, ViolationKind::WriteRead),
        (Read, Write, ViolationKind::ReadWrite),
        (ReadWrite, Read, ViolationKind::WriteRead),
        (Read, ReadWrite, ViolationKind::ReadWrite),
    ];
    everywhere(|m| {
        for (first, second, kind) in cases {
            let (a, b, x) = (m.stream(), m.stream(), m.alloc(4096));
            let (_, earlier) = at!(m.sim.access(a, x, first, None).unwrap());
            let (_, later) = at!(m.sim.access(b, x, second, None).unwrap());
            let fault = m.only(kind, FILE, earlier, later);
            assert_eq!(fault.place, ViolationLocation::Device(x));
            let ids = [a, b].map(|s| m.driver.stream_id(s).unwrap());
            assert_eq!(fault.earlier.unwrap().agent, Agent::Stream { device: GPU, id: ids[0] });
            assert_eq!(fault.later.agent, Agent::Stream { device: GPU, id: ids[1] });
        }
    });
}

#[test]
fn a_race_of_kernels_and_copies_names_them_without_any_site_entered() {
    everywhere(|m| {
        let (a, b, x) = (m.stream(), m.stream(), m.alloc(4096));
        let earlier = line!() + 1;
        m.sim.launch(a, SimKernel::new("scale").writes(x, None)).unwrap();
        let later = line!() + 1;
        m.sim.launch(b, SimKernel::new("sum").reads(x, None)).unwrap();
        let fault = m.only(ViolationKind::WriteRead, FILE, earlier, later);
        assert_eq!((fault.earlier.unwrap().work, fault.later.work), ("scale", "sum"));
    });
}

#[test]
fn only_the_bytes_that_two_share_race() {
    everywhere(|m| {
        let (a, b, x) = (m.stream(), m.stream(), m.alloc(4096));
        m.write(a, DeviceRange { bytes: 100, ..x });
        m.write(b, DeviceRange { address: x.address + 100, bytes: 100, ..x });
        m.silent();
        m.write(b, DeviceRange { address: x.address + 99, bytes: 1, ..x });
        let found = m.sim.violations();
        assert_eq!(
            found[0].place,
            ViolationLocation::Device(DeviceRange { address: x.address + 99, bytes: 1, ..x })
        );
    });
}

#[test]
fn a_use_before_the_allocation_is_ready_is_found() {
    everywhere(|m| {
        let (a, b) = (m.stream(), m.stream());
        let (x, _) = m.granule();
        let (_, earlier) = at!(live(m, x, a, 1));
        let (_, later) = at!(m.sim.access(b, x, Access::Write, Some(1)).unwrap());
        m.only(ViolationKind::BeforeReady, FILE, earlier, later);

        let pool = m.driver.pool_create(GPU).unwrap();
        let (address, earlier) = at!(m.driver.pool_alloc(pool, a, 1000).unwrap());
        let y = DeviceRange { device: GPU, address, bytes: 1000 };
        let (_, later) = at!(m.sim.access(b, y, Access::Read, None).unwrap());
        m.only(ViolationKind::BeforeReady, FILE, earlier, later);
    });
}

#[test]
fn a_use_after_free_is_found_even_in_order() {
    everywhere(|m| {
        let a = m.stream();
        let (x, _) = m.granule();
        live(m, x, a, 1);
        m.sim.access(a, x, Access::Write, Some(1)).unwrap();
        let (_, earlier) = at!(note(m, x, Ownership::Free));
        let (_, later) = at!(m.sim.access(a, x, Access::Read, Some(1)).unwrap());
        m.only(ViolationKind::UseAfterFree, FILE, earlier, later);
    });
}

#[test]
fn the_drivers_own_allocations_are_owned_too() {
    everywhere(|m| {
        let (a, x) = (m.stream(), m.alloc(100));
        // SAFETY: 1. It was allocated. The later use is deliberate.
        let (_, earlier) = at!(unsafe { m.driver.mem_free(GPU, x.address) }.unwrap());
        let (_, later) = at!(m.sim.access(a, x, Access::Read, None).unwrap());
        m.only(ViolationKind::UseAfterFree, FILE, earlier, later);

        let pool = m.driver.pool_create(GPU).unwrap();
        let address = m.driver.pool_alloc(pool, a, 100).unwrap();
        // SAFETY: 1. It was allocated. The later use is deliberate.
        let (_, earlier) = at!(unsafe { m.driver.pool_free(a, address) }.unwrap());
        let y = DeviceRange { device: GPU, address, bytes: 100 };
        let (_, later) = at!(m.sim.access(a, y, Access::Write, None).unwrap());
        m.only(ViolationKind::UseAfterFree, FILE, earlier, later);
    });
}

#[test]
fn a_pending_block_is_accessible_only_to_its_users() {
    everywhere(|m| {
        let (a, b) = (m.stream(), m.stream());
        let (x, _) = m.granule();
        live(m, x, a, 1);
        m.order(a, b);
        let (_, earlier) = at!(note(m, x, Ownership::Pending { users: &[b] }));
        m.sim.access(b, x, Access::Read, Some(1)).unwrap();
        m.silent();
        let (_, later) = at!(m.sim.access(a, x, Access::Read, Some(1)).unwrap());
        m.only(ViolationKind::UseAfterFree, FILE, earlier, later);
    });
}

#[test]
fn a_stale_kernel_on_a_block_that_belongs_to_another_is_found_even_in_order() {
    everywhere(|m| {
        let a = m.stream();
        let (x, _) = m.granule();
        live(m, x, a, 1);
        note(m, x, Ownership::Free);
        let (_, earlier) = at!(live(m, x, a, 2));
        let stale = SimKernel::new("stale").writes(x, Some(1));
        let (_, later) = at!(m.sim.launch(a, stale).unwrap());
        m.only(ViolationKind::StaleBlock { declared: 1, live: 2 }, FILE, earlier, later);
        // The block's own work is not reported for it.
        m.sim.access(a, x, Access::ReadWrite, Some(2)).unwrap();
        m.silent();
    });
}

#[test]
fn reuse_before_the_last_use_is_done_is_found_at_the_reuse() {
    everywhere(|m| {
        let (a, b) = (m.stream(), m.stream());
        let (x, _) = m.granule();
        live(m, x, a, 1);
        m.order(a, b);
        let (_, earlier) = at!(m.sim.access(b, x, Access::Read, Some(1)).unwrap());
        note(m, x, Ownership::Free);
        let (_, later) = at!(live(m, x, a, 2));
        m.only(ViolationKind::Reuse, FILE, earlier, later);
    });
}

#[test]
fn a_use_after_unmap_names_who_unmapped() {
    everywhere(|m| {
        let a = m.stream();
        let (x, _) = m.granule();
        m.write(a, x);
        m.driver.stream_synchronize(a).unwrap();
        let (_, earlier) = at!(m.unmap(x.address));
        let (_, later) = at!(m.sim.access(a, x, Access::Read, None).unwrap());
        m.only(ViolationKind::Unmapped, FILE, earlier, later);
    });
}

#[test]
fn addresses_that_were_never_anything_are_unmapped() {
    everywhere(|m| {
        let a = m.stream();
        let x = DeviceRange { device: GPU, address: m.reserve(GRANULE), bytes: 8 };
        let (_, later) = at!(m.sim.access(a, x, Access::Read, None).unwrap());
        m.first(ViolationKind::Unmapped, FILE, None, later);
        let (y, _) = m.granule();
        let past = DeviceRange { bytes: y.bytes + 1, ..y };
        let (_, later) = at!(m.sim.access(a, past, Access::Read, None).unwrap());
        let fault = m.first(ViolationKind::Unmapped, FILE, None, later);
        assert_eq!(
            fault.place,
            ViolationLocation::Device(DeviceRange { address: y.address + y.bytes, bytes: 1, ..y })
        );
    });
}

#[test]
fn a_mapping_without_access_cannot_be_touched() {
    everywhere(|m| {
        let (a, address, handle) = (m.stream(), m.reserve(GRANULE), m.handle(GRANULE));
        // SAFETY: 1. Nothing is there.
        unsafe { m.driver.map(address, GRANULE, handle) }.unwrap();
        let x = DeviceRange { device: GPU, address, bytes: GRANULE };
        let (_, later) = at!(m.sim.access(a, x, Access::Write, None).unwrap());
        m.first(ViolationKind::NoAccess { device: GPU }, FILE, None, later);
    });
}

#[test]
fn a_host_unmap_with_only_a_gpu_side_wait_before_it_is_found() {
    everywhere(|m| {
        let (a, b) = (m.stream(), m.stream());
        let (x, _) = m.granule();
        let (_, earlier) = at!(m.sim.access(a, x, Access::Write, None).unwrap());
        m.order(a, b);
        let (_, later) = at!(m.unmap(x.address));
        m.first(ViolationKind::UnmapInFlight, FILE, Some(earlier), later);
    });
}

#[test]
fn aliases_of_one_handle_conflict() {
    everywhere(|m| {
        let (a, b) = (m.stream(), m.stream());
        let (x, handle) = m.granule();
        let y = DeviceRange { address: m.reserve(GRANULE), ..x };
        m.map(y.address, handle);
        let (_, earlier) = at!(m.sim.access(a, x, Access::Write, None).unwrap());
        let (_, later) = at!(m.sim.access(b, y, Access::Write, None).unwrap());
        m.only(ViolationKind::WriteWrite, FILE, earlier, later);
    });
}

#[test]
fn a_cpu_access_under_a_queued_copy_is_found() {
    everywhere(|m| {
        let (a, x, host) = (m.stream(), m.alloc(4096), m.pinned(4096));
        let address = host.as_ptr() as u64;
        let (_, earlier) =
            // SAFETY: 1. Both exist and are 4096 bytes long. 2. deliberately broken.
            at!(unsafe { m.driver.copy_to_device(a, x.address, host, 4096) }.unwrap());
        m.sim.host_read(address, 4096);
        m.silent();
        let later = line!() + 1;
        m.sim.host_write(address + 4000, 96);
        let fault = m.only(ViolationKind::ReadWrite, FILE, earlier, later);
        assert_eq!(fault.place, ViolationLocation::Host { address: address + 4000, bytes: 96 });
        assert_eq!(fault.later.agent, Agent::Host);

        let host = m.pinned(4096);
        let address = host.as_ptr() as u64;
        // SAFETY: as above.
        let (_, earlier) = at!(unsafe { m.driver.copy_to_host(a, host, x.address, 4096) }.unwrap());
        let later = line!() + 1;
        m.sim.host_read(address, 1);
        m.only(ViolationKind::WriteRead, FILE, earlier, later);
        let (_, later) = at!(m.driver.observer().unwrap().host(address, 1, HostAccess::Write));
        let found = m.sim.take_violations();
        let kinds: Vec<_> = found.iter().map(|fault| fault.kind).collect();
        assert_eq!(kinds, [ViolationKind::WriteWrite], "the host's own read before is in order");
        assert_eq!(found[0].later.site.line(), later);
    });
}

#[test]
fn a_free_of_pinned_memory_under_a_queued_copy_is_found() {
    everywhere(|m| {
        let (a, x, host) = (m.stream(), m.alloc(4096), m.pinned(4096));
        let (_, earlier) =
            // SAFETY: 1. Both are there, 4096 bytes long.
            at!(unsafe { m.driver.copy_to_device(a, x.address, host, 4096) }.unwrap());
        // SAFETY: 2. deliberately broken; the driver waits for the device.
        let (_, later) = at!(unsafe { m.driver.host_free(GPU, host) }.unwrap());
        m.only(ViolationKind::FreeInFlight, FILE, earlier, later);

        let mut own = vec![0_u8; 4096];
        let host = NonNull::from(own.as_mut_slice()).cast();
        // SAFETY: 1. `own` outlives the registration.
        unsafe { m.driver.host_register(GPU, host, 4096) }.unwrap();
        // SAFETY: 1. Both are there, 4096 bytes long.
        let (_, earlier) = at!(unsafe { m.driver.copy_to_host(a, host, x.address, 4096) }.unwrap());
        // SAFETY: 2. deliberately broken; the driver waits for the device.
        let (_, later) = at!(unsafe { m.driver.host_unregister(GPU, host) }.unwrap());
        m.only(ViolationKind::FreeInFlight, FILE, earlier, later);

        // A pool that takes a block back reports the same.
        let host = m.pinned(4096);
        let (_, earlier) =
            // SAFETY: 1. Both are there, 4096 bytes long.
            at!(unsafe { m.driver.copy_to_device(a, x.address, host, 4096) }.unwrap());
        let (_, later) =
            at!(m.driver.observer().unwrap().host(host.as_ptr() as u64, 64, HostAccess::Free));
        m.only(ViolationKind::FreeInFlight, FILE, earlier, later);
    });
}

#[test]
fn a_copy_across_two_registrations_fails_and_is_told() {
    everywhere(|m| {
        let (a, x) = (m.stream(), m.alloc(8192));
        let mut own = vec![0_u8; 8192];
        let host: NonNull<u8> = NonNull::from(own.as_mut_slice()).cast();
        // SAFETY: 1. Inside `own`.
        let second = unsafe { host.add(4096) };
        // SAFETY: 1. `own` outlives the registrations.
        let (_, first) = at!(unsafe { m.driver.host_register(GPU, host, 4096) }.unwrap());
        // SAFETY: as above.
        unsafe { m.driver.host_register(GPU, second, 4096) }.unwrap();
        // SAFETY: 1. Both are there, 8192 bytes long.
        let (refused, later) = at!(unsafe { m.driver.copy_to_device(a, x.address, host, 8192) });
        assert_eq!(refused.unwrap_err().code, 1);
        m.only(ViolationKind::AcrossRegistrations, FILE, first, later);
        // SAFETY: as above.
        let (refused, later) = at!(unsafe { m.driver.copy_to_host(a, host, x.address, 8192) });
        assert_eq!(refused.unwrap_err().code, 1);
        m.only(ViolationKind::AcrossRegistrations, FILE, first, later);
        // SAFETY: as above, in one registration each.
        unsafe {
            m.driver.copy_to_device(a, x.address, host, 4096).unwrap();
            m.driver.copy_to_device(a, x.address, second, 4096).unwrap();
        }
        m.driver.stream_synchronize(a).unwrap();
        for start in [host, second] {
            // SAFETY: 1. Registered above. 2. The stream is idle.
            unsafe { m.driver.host_unregister(GPU, start) }.unwrap();
        }
        m.silent();
    });
}

#[test]
fn memory_freed_under_queued_work_is_found() {
    everywhere(|m| {
        let (a, b, x) = (m.stream(), m.stream(), m.alloc(4096));
        let (_, earlier) = at!(m.sim.access(a, x, Access::Write, None).unwrap());
        // SAFETY: 2. deliberately broken.
        let (_, later) = at!(unsafe { m.driver.mem_free(GPU, x.address) }.unwrap());
        m.only(ViolationKind::FreeInFlight, FILE, earlier, later);

        let pool = m.driver.pool_create(GPU).unwrap();
        let address = m.driver.pool_alloc(pool, a, 100).unwrap();
        let y = DeviceRange { device: GPU, address, bytes: 100 };
        m.order(a, b);
        let (_, earlier) = at!(m.sim.access(b, y, Access::Read, None).unwrap());
        // SAFETY: 2. deliberately broken: `a` does not wait for `b`.
        let (_, later) = at!(unsafe { m.driver.pool_free(a, address) }.unwrap());
        m.only(ViolationKind::FreeInFlight, FILE, earlier, later);
    });
}

#[test]
fn the_same_fault_again_is_counted_not_repeated() {
    everywhere(|m| {
        let (a, b, x) = (m.stream(), m.stream(), m.alloc(4096));
        for _ in 0..5 {
            m.write(a, x);
            m.write(b, x);
        }
        let found = m.sim.violations();
        assert_eq!(found.len(), 1, "both are made on one line: {found:#?}");
        assert_eq!(found[0].count, 9);
        assert!(found[0].to_string().contains("9 times"), "{}", found[0]);
    });
}

#[test]
fn faulty_work_touches_no_memory() {
    let m = Machine::new(Sim::h200(1).capacity(64 << 20));
    let (a, x) = (m.stream(), m.alloc(4096));
    let past = DeviceRange { bytes: 64 << 20, ..x };
    let kernel = SimKernel::new("overrun").writes(past, None).run(|memory| memory.write(0).fill(9));
    m.sim.launch(a, kernel).unwrap();
    m.driver.stream_synchronize(a).unwrap();
    assert_eq!(m.sim.read_back(x), Some(vec![0; 4096]));
    assert_eq!(m.sim.violations()[0].kind, ViolationKind::Unmapped);
}

#[test]
fn work_whose_memory_goes_before_it_runs_touches_nothing() {
    let m = Machine::new(Sim::h200(1).capacity(64 << 20).stepped());
    let a = m.stream();
    let (x, _) = m.granule();
    let kernel =
        SimKernel::new("late").writes(x, None).run(|_| panic!("runs on memory that is gone"));
    let (_, queued) = at!(m.sim.launch(a, kernel).unwrap());
    let (_, unmapped) = at!(m.unmap(x.address));
    m.driver.stream_synchronize(a).unwrap();
    m.only(ViolationKind::UnmapInFlight, FILE, queued, unmapped);
}

#[test]
fn one_mistake_is_one_violation_whatever_follows_from_it() {
    everywhere(|m| {
        let (a, b) = (m.stream(), m.stream());
        let (x, handle) = m.granule();
        let (_, earlier) = at!(m.write(a, x));
        // `b` does not wait for `a`, and so the host does not know that either is done.
        let (_, later) = at!(m.read(b, x));
        m.only(ViolationKind::WriteRead, FILE, earlier, later);
        m.unmap(x.address);
        m.map(x.address, handle);
        m.unmap(x.address);
        m.sim.run_all();
        m.silent();

        let host = m.pinned(4096);
        let y = m.alloc(4096);
        let (_, earlier) =
            // SAFETY: 1. Both are there, 4096 bytes long.
            at!(unsafe { m.driver.copy_to_device(a, y.address, host, 4096) }.unwrap());
        let later = line!() + 1;
        m.sim.host_write(host.as_ptr() as u64, 1);
        m.only(ViolationKind::ReadWrite, FILE, earlier, later);
        // SAFETY: 2. deliberately broken; the driver waits for the device.
        unsafe { m.driver.host_free(GPU, host) }.unwrap();
        m.silent();

        // Another mistake is reported.
        let (z, _) = m.granule();
        let (_, earlier) = at!(m.write(b, z));
        let (_, later) = at!(m.unmap(z.address));
        m.only(ViolationKind::UnmapInFlight, FILE, earlier, later);
    });
}
