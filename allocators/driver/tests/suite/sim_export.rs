//! Tests of exported memory and of registered addresses.
#![expect(
    unsafe_code,
    reason = "makes driver calls whose conditions the tests meet, or break on purpose"
)]
#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use aquifer_driver::{
    DeviceId, DeviceRange, Driver, ExportTypes, PhysicalHandle,
    sim::{Sim, SimConfig, ViolationKind},
};
use std::{
    env,
    fs::{self, File},
    os::fd::{AsFd, AsRawFd},
    process::{self, Command},
    ptr::NonNull,
    sync::Arc,
};

const DEVICE: DeviceId = DeviceId(0);
const GRANULE: u64 = 2 << 20;

/// Returns an address at which the memory of `handle` is mapped.
fn map(driver: &Arc<dyn Driver>, handle: PhysicalHandle) -> u64 {
    let address = driver.address_reserve(DEVICE, GRANULE, 0).unwrap();
    // SAFETY: 1. nothing is mapped in a range that has just been reserved.
    unsafe { driver.map(address, GRANULE, handle) }.unwrap();
    driver.set_access(address, GRANULE, &[DEVICE]).unwrap();
    address
}

#[test]
fn exported_memory_is_the_same_bytes_where_it_is_imported_and_stays_until_both_handles_go() {
    let sim = Sim::h200(1);
    let driver = sim.driver();
    let handle = driver.handle_create(DEVICE, GRANULE, ExportTypes::POSIX_FD).unwrap();
    let fd = driver.handle_export(handle).unwrap();
    // A duplicate, as another process would have it.
    let sent = fd.try_clone().unwrap();
    drop(fd);
    // SAFETY: 1. one stream orders all work.
    let imported = unsafe { driver.handle_import(DEVICE, sent.as_fd()) }.unwrap();
    let (here, there) = (map(&driver, handle), map(&driver, imported));
    let stream = driver.stream_create(DEVICE, 0).unwrap();
    // SAFETY: 1. mapped above. 2. one stream only.
    unsafe { driver.fill(stream, here, 0x5a, GRANULE) }.unwrap();
    driver.stream_synchronize(stream).unwrap();
    // SAFETY: 1. the stream is idle. 2. the handle is not used again.
    unsafe {
        driver.unmap(DEVICE, here, GRANULE).unwrap();
        driver.handle_release(handle).unwrap();
    }
    let left = driver.memory_info(DEVICE).unwrap();
    assert_eq!(left.total - left.free, GRANULE, "the importer still holds it");
    let bytes =
        sim.read_back(DeviceRange { device: DEVICE, address: there, bytes: GRANULE }).unwrap();
    assert!(bytes.iter().all(|&byte| byte == 0x5a));
    // SAFETY: 1. the stream is idle. 2. the handle is not used again.
    unsafe {
        driver.unmap(DEVICE, there, GRANULE).unwrap();
        driver.handle_release(imported).unwrap();
    }
    let left = driver.memory_info(DEVICE).unwrap();
    assert_eq!(left.total, left.free);
    assert!(sim.violations().is_empty());
}

#[test]
fn memory_is_exported_only_as_it_was_made_to_be() {
    let sim = Sim::h200(1);
    let driver = sim.driver();
    let plain = driver.handle_create(DEVICE, GRANULE, ExportTypes::NONE).unwrap();
    assert_eq!(driver.handle_export(plain).unwrap_err().code, 1);
    assert_eq!(
        driver.handle_create(DEVICE, GRANULE, ExportTypes::FABRIC).unwrap_err().code,
        801,
        "this machine has no fabric"
    );
    let mut config = SimConfig::h200(1);
    config.devices[0].info.export_types.fabric = true;
    let driver = Sim::new(config).driver();
    let handle = driver.handle_create(DEVICE, GRANULE, ExportTypes::FABRIC).unwrap();
    assert_eq!(driver.handle_export(handle).unwrap_err().code, 1, "made for the fabric alone");
}

#[test]
fn files_and_names_of_others_are_refused() {
    let driver = Sim::h200(1).driver();
    let handle = driver.handle_create(DEVICE, GRANULE, ExportTypes::POSIX_FD).unwrap();
    let elsewhere = driver.handle_export(handle).unwrap();
    let other = Sim::h200(1).driver();
    let file = File::open("/dev/zero").unwrap();
    for fd in [file.as_fd(), elsewhere.as_fd()] {
        // SAFETY: 1. the memory is not used.
        assert_eq!(unsafe { other.handle_import(DEVICE, fd) }.unwrap_err().code, 1);
    }
}

#[test]
fn a_mapping_that_goes_or_comes_under_a_registration_is_reported_with_both_lines() {
    let sim = Sim::h200(1).symbolic();
    let driver = sim.driver();
    let handle = driver.handle_create(DEVICE, GRANULE, ExportTypes::NONE).unwrap();
    let address = map(&driver, handle);
    let range = DeviceRange { device: DEVICE, address: address + 4096, bytes: 4096 };
    let observer = driver.observer().unwrap();
    let entered = aquifer_driver::site::enter();
    let registered = line!() - 1;
    observer.registered(range);
    drop(entered);
    let entered = aquifer_driver::site::enter();
    let moved = line!() - 1;
    // SAFETY: 1. nothing is queued; the registration is deliberately broken.
    unsafe {
        driver.unmap(DEVICE, address, GRANULE).unwrap();
        driver.map(address, GRANULE, handle).unwrap();
    }
    drop(entered);
    let found = sim.take_violations();
    assert_eq!(found.len(), 1, "one fault for one pair of lines: {found:?}");
    assert_eq!((found[0].kind, found[0].count), (ViolationKind::MovedWhileRegistered, 2));
    assert_eq!(found[0].earlier.unwrap().site.line(), registered);
    assert_eq!((found[0].later.site.line(), found[0].later.work), (moved, "unmap"));
    observer.unregistered(range);
    // SAFETY: 1. nothing is queued.
    unsafe { driver.unmap(DEVICE, address, GRANULE) }.unwrap();
    assert!(sim.violations().is_empty());
}

#[test]
fn an_allocation_freed_under_a_registration_is_reported() {
    let sim = Sim::h200(1).symbolic();
    let driver = sim.driver();
    let address = driver.mem_alloc(DEVICE, 4096).unwrap();
    let range = DeviceRange { device: DEVICE, address, bytes: 4096 };
    driver.observer().unwrap().registered(range);
    // SAFETY: 1. from `mem_alloc`, and freed once. 2. nothing is queued; the registration is
    // deliberately broken.
    unsafe { driver.mem_free(DEVICE, address) }.unwrap();
    assert_eq!(sim.violations()[0].kind, ViolationKind::MovedWhileRegistered);
}

#[test]
fn a_range_with_read_access_can_be_read_and_a_write_is_a_violation() {
    let sim = Sim::h200(1);
    let driver = sim.driver();
    let handle = driver.handle_create(DEVICE, GRANULE, ExportTypes::NONE).unwrap();
    let (here, only_read) = (map(&driver, handle), map(&driver, handle));
    driver.set_read_access(only_read, GRANULE, &[DEVICE]).unwrap();
    let stream = driver.stream_create(DEVICE, 0).unwrap();
    let mut back = vec![0_u8; 16];
    // SAFETY: 1. mapped above, and `back` lives until the stream is idle. 2. one stream only.
    unsafe {
        driver.fill(stream, here, 7, GRANULE).unwrap();
        let to = NonNull::new(back.as_mut_ptr()).unwrap();
        driver.copy_to_host(stream, to, only_read, 16).unwrap();
    }
    driver.stream_synchronize(stream).unwrap();
    assert!(back.iter().all(|&byte| byte == 7) && sim.violations().is_empty());
    // SAFETY: 1. mapped above. 2. one stream only.
    let _refused = unsafe { driver.fill(stream, only_read, 8, GRANULE) };
    let _failed = driver.stream_synchronize(stream);
    let kinds: Vec<_> = sim.take_violations().iter().map(|found| found.kind).collect();
    assert_eq!(kinds, [ViolationKind::NoAccess { device: DEVICE }]);
}

/// Holds the path of exported memory for the process below.
const PATH: &str = "AQUIFER_TEST_MEMORY";

#[test]
fn another_process_maps_exported_memory_and_keeps_it_beyond_the_end_of_its_creator() {
    let sim = Sim::h200(1);
    let driver = sim.driver();
    let handle = driver.handle_create(DEVICE, GRANULE, ExportTypes::POSIX_FD).unwrap();
    let address = map(&driver, handle);
    let stream = driver.stream_create(DEVICE, 0).unwrap();
    // SAFETY: 1. mapped above. 2. one stream only.
    unsafe { driver.fill(stream, address, 0x5a, GRANULE) }.unwrap();
    driver.stream_synchronize(stream).unwrap();
    let file = driver.handle_export(handle).unwrap();
    let path = format!("/proc/{}/fd/{}", process::id(), file.as_raw_fd());
    let ended = Command::new(env::current_exe().unwrap())
        .args(["--exact", "sim_export::the_process_that_imports", "--include-ignored"])
        .env(PATH, path)
        .output()
        .unwrap();
    assert!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stdout));
    let range = DeviceRange { device: DEVICE, address, bytes: GRANULE };
    let bytes = sim.read_back(range).unwrap();
    assert_eq!((bytes[0], bytes[1]), (0x77, 0x5a), "the other process has written one byte");
}

#[test]
#[ignore = "is a process that another test starts"]
fn the_process_that_imports() {
    let Ok(path) = env::var(PATH) else { return };
    let name = fs::read_to_string(&path).unwrap();
    let file = File::open(path).unwrap();
    let sim = Sim::h200(1);
    let driver = sim.driver();
    let free = driver.memory_info(DEVICE).unwrap().free;
    // SAFETY: 1. the other process waits for this one.
    let handle = unsafe { driver.handle_import(DEVICE, file.as_fd()) }.unwrap();
    let address = map(&driver, handle);
    let range = DeviceRange { device: DEVICE, address, bytes: GRANULE };
    assert_eq!(sim.read_back(range).unwrap(), vec![0x5a; GRANULE as usize]);
    let stream = driver.stream_create(DEVICE, 0).unwrap();
    // SAFETY: 1. mapped above. 2. one stream only.
    unsafe { driver.fill(stream, address, 0x77, 1) }.unwrap();
    driver.stream_synchronize(stream).unwrap();
    assert_eq!(driver.memory_info(DEVICE).unwrap().free, free, "it takes nothing here");
    // SAFETY: 1. the stream is idle. 2. the handle is not used again.
    unsafe {
        driver.unmap(DEVICE, address, GRANULE).unwrap();
        driver.handle_release(handle).unwrap();
    }
    // Names that say anything else are refused: more bytes, another place, a process that there
    // cannot be, another kind of file.
    for (at, word) in
        [(3, "4611686018427387904"), (6, "4096"), (4, "4294967295"), (5, "0"), (0, "x")]
    {
        let mut words: Vec<_> = name.split(' ').collect();
        words[at] = word;
        let named = env::temp_dir().join(format!("aquifer-name-{}", process::id()));
        fs::write(&named, words.join(" ")).unwrap();
        let file = File::open(&named).unwrap();
        fs::remove_file(named).unwrap();
        // SAFETY: 1. nothing uses it.
        assert!(unsafe { driver.handle_import(DEVICE, file.as_fd()) }.is_err(), "{words:?}");
    }
    assert!(sim.violations().is_empty());
}
