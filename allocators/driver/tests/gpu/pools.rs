//! Tests of single allocations, address ranges, the driver's own pools, and a second device.

use super::support::{DEVICE, OwnStream, driver, read_back, write};
use aquifer_driver::DeviceId;
use std::ptr::NonNull;

#[test]
fn an_allocation_is_aligned_and_its_own() {
    let Some(driver) = driver() else { return };
    let stream = OwnStream::new(&driver);
    let sizes = [1u64, 511, 4096, (1 << 20) + 1];
    let blocks: Vec<_> =
        sizes.iter().map(|&bytes| driver.mem_alloc(DEVICE, bytes).unwrap()).collect();
    for (i, (&at, &bytes)) in blocks.iter().zip(&sizes).enumerate() {
        assert_eq!(at % 256, 0);
        // SAFETY: 1. the block lives until the stream is synchronised. 2. one stream only.
        unsafe { driver.fill(stream.raw, at, i as u8 + 1, bytes) }.unwrap();
    }
    for (i, (&at, &bytes)) in blocks.iter().zip(&sizes).enumerate() {
        assert!(
            read_back(&driver, stream.raw, at, bytes as usize)
                .iter()
                .all(|&byte| byte == i as u8 + 1)
        );
        // SAFETY: 1. the block is this test's own. 2. the stream has been synchronised.
        unsafe { driver.mem_free(DEVICE, at) }.unwrap();
    }
}

#[test]
fn a_pool_keeps_what_is_freed_until_it_is_trimmed() {
    const BYTES: u64 = 64 << 20;
    let Some(driver) = driver() else { return };
    let (s, u) = (OwnStream::new(&driver), OwnStream::new(&driver));
    let pool = driver.pool_create(DEVICE).unwrap();
    assert_eq!(driver.pool_usage(pool).unwrap().used, 0);

    let block = driver.pool_alloc(pool, s.raw, BYTES).unwrap();
    // SAFETY: 1. allocated on this stream before. 2. one stream only.
    unsafe { driver.fill(s.raw, block, 7, BYTES) }.unwrap();
    let event = driver.event_create(DEVICE).unwrap();
    driver.event_record(event, s.raw).unwrap();
    driver.stream_wait_event(u.raw, event).unwrap();
    assert!(read_back(&driver, u.raw, block, BYTES as usize).iter().all(|&byte| byte == 7));
    let usage = driver.pool_usage(pool).unwrap();
    assert!(
        usage.used >= BYTES
            && usage.reserved >= usage.used
            && usage.reserved_high >= usage.reserved
    );

    // SAFETY: 1. the block came from the pool. 2. `u`, which used it, waited for `s`.
    unsafe { driver.pool_free(u.raw, block) }.unwrap();
    u.synchronize();
    s.synchronize();
    let usage = driver.pool_usage(pool).unwrap();
    assert!(
        usage.used == 0 && usage.reserved >= BYTES,
        "kept, though the stream was synchronised: {usage:?}"
    );
    driver.pool_trim(pool, 0).unwrap();
    let usage = driver.pool_usage(pool).unwrap();
    assert!(usage.reserved == 0 && usage.reserved_high >= BYTES, "{usage:?}");
    // SAFETY: 1. both are this test's own.
    unsafe {
        driver.event_destroy(event).unwrap();
        driver.pool_destroy(pool).unwrap();
    }
}

#[test]
fn an_alignment_that_is_asked_for_is_given() {
    let Some(driver) = driver() else { return };
    let info = driver.device_info(DEVICE).unwrap();
    if !info.virtual_memory {
        println!("skipped: {} has no virtual memory management", info.name);
        return;
    }
    let granule = info.granularity;
    let align = 64 * granule;
    let range = driver.address_reserve(DEVICE, granule, align).unwrap();
    assert_eq!(range % align, 0);
    // SAFETY: 1. nothing was mapped in it.
    unsafe { driver.address_free(DEVICE, range, granule) }.unwrap();
}

#[test]
fn bytes_go_from_one_device_to_another() {
    const BYTES: usize = 1 << 20;
    let Some(driver) = driver() else { return };
    if driver.device_count().unwrap() < 2 {
        println!("skipped: one device only");
        return;
    }
    let other = DeviceId(1);
    let stream = OwnStream::new(&driver);
    let s = stream.raw;
    let [x, y] = [0, 1].map(|_| driver.mem_alloc(DEVICE, BYTES as u64).unwrap());
    let there = driver.mem_alloc(other, BYTES as u64).unwrap();
    let counted: Vec<u8> = (0..BYTES).map(|i| (i % 249) as u8).collect();
    write(&driver, s, x, &counted);
    // SAFETY: 1. all three live until the stream is idle. 2. one stream.
    unsafe {
        driver.fill(s, y, 0, BYTES as u64).unwrap();
        driver.copy_on_device(s, there, x, BYTES as u64).unwrap();
        driver.copy_on_device(s, y, there, BYTES as u64).unwrap();
    }
    assert!(read_back(&driver, s, y, BYTES) == counted);
    let mut back = vec![0u8; BYTES];
    let far = driver.stream_create(other, 0).unwrap();
    // SAFETY: 1. the block is idle and lives on; the stream belongs to this test and is destroyed
    // once. 2. nothing else runs.
    unsafe {
        driver.copy_to_host(far, NonNull::from(&mut back[..]).cast(), there, BYTES).unwrap();
        driver.stream_synchronize(far).unwrap();
        driver.stream_destroy(far).unwrap();
        driver.mem_free(other, there).unwrap();
        driver.mem_free(DEVICE, x).unwrap();
        driver.mem_free(DEVICE, y).unwrap();
    }
    assert!(back == counted);
}
