//! Tests of memory that is exported and imported.

use super::support::{DEVICE, OwnStream, driver, read_back};
use aquifer_driver::{Driver, ExportTypes};
use std::{os::fd::AsFd, sync::Arc};

/// Returns the granularity, or `None` with a message if the device cannot export.
fn granularity(driver: &Arc<dyn Driver>) -> Option<u64> {
    let info = driver.device_info(DEVICE).unwrap();
    if !info.virtual_memory || !info.export_types.posix_fd {
        println!("skipped: {} exports no memory by file descriptors", info.name);
        return None;
    }
    Some(info.granularity)
}

#[test]
fn an_exported_descriptor_leads_to_the_same_bytes_and_keeps_them() {
    let Some(driver) = driver() else { return };
    let Some(granule) = granularity(&driver) else { return };
    let stream = OwnStream::new(&driver);
    let range = driver.address_reserve(DEVICE, 2 * granule, 0).unwrap();
    let handle = driver.handle_create(DEVICE, granule, ExportTypes::POSIX_FD).unwrap();
    // SAFETY: 1. nothing is mapped in a range that has just been reserved.
    unsafe { driver.map(range, granule, handle) }.unwrap();
    driver.set_access(range, granule, &[DEVICE]).unwrap();
    // SAFETY: 1. mapped above. 2. one stream only.
    unsafe { driver.fill(stream.raw, range, 0x5a, granule) }.unwrap();
    let fd = driver.handle_export(handle).unwrap();
    stream.synchronize();
    // SAFETY: 1. the stream is idle. The handle is not used again.
    unsafe {
        driver.unmap(DEVICE, range, granule).unwrap();
        driver.handle_release(handle).unwrap();
    }
    // SAFETY: 1. one stream orders all work.
    let imported = unsafe { driver.handle_import(DEVICE, fd.as_fd()) }.unwrap();
    // SAFETY: 1. nothing is mapped there.
    unsafe { driver.map(range + granule, granule, imported) }.unwrap();
    driver.set_access(range + granule, granule, &[DEVICE]).unwrap();
    let back = read_back(&driver, stream.raw, range + granule, granule as usize);
    assert!(back.iter().all(|&byte| byte == 0x5a), "the descriptor alone has kept the bytes");
    // SAFETY: 1. the stream is idle, and everything is this test's own.
    unsafe {
        driver.unmap(DEVICE, range + granule, granule).unwrap();
        driver.handle_release(imported).unwrap();
        driver.address_free(DEVICE, range, 2 * granule).unwrap();
    }
}

#[test]
fn memory_that_was_not_made_for_it_is_not_exported() {
    let Some(driver) = driver() else { return };
    let Some(granule) = granularity(&driver) else { return };
    let handle = driver.handle_create(DEVICE, granule, ExportTypes::NONE).unwrap();
    let refused = driver.handle_export(handle).unwrap_err();
    let file = std::fs::File::open("/dev/zero").unwrap();
    // SAFETY: 1. the memory is not used.
    let no_memory = unsafe { driver.handle_import(DEVICE, file.as_fd()) }.unwrap_err();
    println!("export of plain memory: {refused}; import of another file: {no_memory}");
    assert_eq!(refused.code, 1);
    // SAFETY: 1. the handle is not used again.
    unsafe { driver.handle_release(handle) }.unwrap();
}
