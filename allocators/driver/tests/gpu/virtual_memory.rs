//! Tests of address ranges and physical handles.

use super::support::{DEVICE, OwnStream, driver, read_back};
use aquifer_driver::{Driver, PhysicalHandle};
use std::sync::Arc;

/// Returns the granularity, or `None` with a message if the device has no virtual memory
/// management.
fn granularity(driver: &Arc<dyn Driver>) -> Option<u64> {
    let info = driver.device_info(DEVICE).unwrap();
    if !info.virtual_memory {
        println!("skipped: {} has no virtual memory management", info.name);
        return None;
    }
    Some(info.granularity)
}

/// Maps a handle and gives the device access.
fn map(driver: &Arc<dyn Driver>, address: u64, bytes: u64, handle: PhysicalHandle) {
    // SAFETY: 1. every test maps where it has nothing mapped.
    unsafe { driver.map(address, bytes, handle) }.unwrap();
    driver.set_access(address, bytes, &[DEVICE]).unwrap();
}

#[test]
fn memory_lives_from_map_to_unmap() {
    let Some(driver) = driver() else { return };
    let Some(granule) = granularity(&driver) else { return };
    let stream = OwnStream::new(&driver);
    let range = driver.address_reserve(DEVICE, 4 * granule, 0).unwrap();
    assert_eq!(range % granule, 0);
    let handle = driver.handle_create(DEVICE, 2 * granule).unwrap();
    assert_eq!(handle.device(), DEVICE);
    map(&driver, range + granule, 2 * granule, handle);
    // SAFETY: 1. the range is mapped until the stream is idle. 2. one stream only.
    unsafe { driver.fill(stream.raw, range + granule, 0xA5, 2 * granule) }.unwrap();
    let back = read_back(&driver, stream.raw, range + granule, 2 * granule as usize);
    assert!(back.iter().all(|&byte| byte == 0xA5));
    // SAFETY: 1. the stream has been synchronised, and everything is this test's own.
    unsafe {
        driver.unmap(DEVICE, range + granule, 2 * granule).unwrap();
        driver.handle_release(handle).unwrap();
        driver.address_free(DEVICE, range, 4 * granule).unwrap();
    }
}

#[test]
fn an_alignment_that_is_asked_for_is_given() {
    let Some(driver) = driver() else { return };
    let Some(granule) = granularity(&driver) else { return };
    let align = 64 * granule;
    let range = driver.address_reserve(DEVICE, granule, align).unwrap();
    assert_eq!(range % align, 0);
    // SAFETY: 1. nothing was mapped in it.
    unsafe { driver.address_free(DEVICE, range, granule) }.unwrap();
}

#[test]
fn one_handle_at_two_addresses_is_one_memory() {
    let Some(driver) = driver() else { return };
    let Some(granule) = granularity(&driver) else { return };
    let (s, u) = (OwnStream::new(&driver), OwnStream::new(&driver));
    let range = driver.address_reserve(DEVICE, 2 * granule, 0).unwrap();
    let handle = driver.handle_create(DEVICE, granule).unwrap();
    let event = driver.event_create(DEVICE).unwrap();
    map(&driver, range, granule, handle);
    for round in 0..20u8 {
        // SAFETY: 1. mapped until the streams are synchronised below. 2. `u` waits for `s`, and the
        // host for `u`.
        unsafe { driver.fill(s.raw, range, round, granule) }.unwrap();
        // The new mapping is made while the fill through the old one may be running.
        map(&driver, range + granule, granule, handle);
        driver.event_record(event, s.raw).unwrap();
        driver.stream_wait_event(u.raw, event).unwrap();
        // SAFETY: 1. and 2. as above.
        unsafe { driver.fill(u.raw, range + granule, round + 100, granule / 2) }.unwrap();
        u.synchronize();
        let seen = read_back(&driver, s.raw, range, granule as usize);
        let half = granule as usize / 2;
        assert!(seen[..half].iter().all(|&byte| byte == round + 100), "round {round}");
        assert!(seen[half..].iter().all(|&byte| byte == round), "round {round}");
        // SAFETY: 1. the only stream that used these addresses has been synchronised.
        unsafe { driver.unmap(DEVICE, range + granule, granule) }.unwrap();
    }
    // SAFETY: 1. both streams are idle, and everything is this test's own.
    unsafe {
        driver.event_destroy(event).unwrap();
        driver.unmap(DEVICE, range, granule).unwrap();
        driver.handle_release(handle).unwrap();
        driver.address_free(DEVICE, range, 2 * granule).unwrap();
    }
}

#[test]
fn contents_move_with_the_handle() {
    let Some(driver) = driver() else { return };
    let Some(granule) = granularity(&driver) else { return };
    let stream = OwnStream::new(&driver);
    let range = driver.address_reserve(DEVICE, 8 * granule, 0).unwrap();
    let handles: Vec<_> = (0..4).map(|_| driver.handle_create(DEVICE, granule).unwrap()).collect();
    for (i, &handle) in (0..).zip(&handles) {
        map(&driver, range + i * granule, granule, handle);
        // SAFETY: 1. mapped until the stream is synchronised. 2. one stream only.
        unsafe { driver.fill(stream.raw, range + i * granule, i as u8, granule) }.unwrap();
    }
    stream.synchronize();
    for (i, &handle) in (0..).zip(&handles) {
        // SAFETY: 1. the stream has been synchronised.
        unsafe { driver.unmap(DEVICE, range + i * granule, granule) }.unwrap();
        map(&driver, range + (7 - i) * granule, granule, handle);
    }
    for i in 0..4u8 {
        let at = range + (7 - u64::from(i)) * granule;
        assert!(read_back(&driver, stream.raw, at, granule as usize).iter().all(|&byte| byte == i));
    }
    // One call unmaps several whole mappings.
    // SAFETY: 1. the stream has been synchronised, and everything belongs to this test.
    unsafe {
        driver.unmap(DEVICE, range + 4 * granule, 4 * granule).unwrap();
        for handle in handles {
            driver.handle_release(handle).unwrap();
        }
        driver.address_free(DEVICE, range, 8 * granule).unwrap();
    }
}
