//! Tests of copies and fills by rows, fills with elements of several bytes, and copies between two
//! devices.

use super::{
    host::Pages,
    support::{DEVICE, OwnStream, driver, read_back, write},
};
use aquifer_driver::{DeviceId, Driver, HostFlags, Pattern, Pitched, Rows};
use std::{ptr::NonNull, sync::Arc};

const BYTES: usize = 1 << 20;

fn at(start: u64, pitch: u64) -> Pitched<u64> {
    Pitched { start, pitch }
}

/// Returns `to` with the rows of `from` copied into it.
fn expected(
    mut to: Vec<u8>,
    to_pitch: usize,
    from: &[u8],
    from_pitch: usize,
    rows: Rows,
) -> Vec<u8> {
    for row in 0..rows.height as usize {
        let width = rows.width as usize;
        to[row * to_pitch..][..width].copy_from_slice(&from[row * from_pitch..][..width]);
    }
    to
}

/// Two blocks of one MiB, which are freed with the test.
struct Blocks {
    driver: Arc<dyn Driver>,
    stream: OwnStream,
    x: u64,
    y: u64,
}

impl Blocks {
    fn new(driver: &Arc<dyn Driver>) -> Self {
        let [x, y] = [0, 1].map(|_| driver.mem_alloc(DEVICE, BYTES as u64).unwrap());
        Self { driver: driver.clone(), stream: OwnStream::new(driver), x, y }
    }

    fn read(&self, from: u64) -> Vec<u8> {
        read_back(&self.driver, self.stream.raw, from, BYTES)
    }
}

impl Drop for Blocks {
    fn drop(&mut self) {
        self.stream.synchronize();
        for block in [self.x, self.y] {
            // SAFETY: 1. the block is this value's. 2. its stream is idle.
            let _ = unsafe { self.driver.mem_free(DEVICE, block) };
        }
    }
}

#[test]
fn rows_go_up_across_and_down_from_pinned_and_pageable_memory() {
    let Some(driver) = driver() else { return };
    let blocks = Blocks::new(&driver);
    let (s, x, y) = (blocks.stream.raw, blocks.x, blocks.y);
    let counted: Vec<u8> = (0..BYTES).map(|i| (i % 251) as u8).collect();
    for pinned in [false, true] {
        let mut pages = Pages::new(BYTES);
        if pinned {
            // SAFETY: 1. the pages live until they are unregistered below.
            unsafe { driver.host_register(DEVICE, pages.at, BYTES, HostFlags::default()) }.unwrap();
        }
        pages.slice().copy_from_slice(&counted);
        let rows = Rows { width: 300, height: 700 };
        // SAFETY: 1. 700 rows at a pitch of at most 1024 lie in each MiB, all of which live on. 2.
        // one stream, and the host waits before it reads.
        unsafe {
            driver.fill(s, x, 0xaa, BYTES as u64).unwrap();
            driver.fill(s, y, 0xbb, BYTES as u64).unwrap();
            let from = Pitched { start: pages.at, pitch: 1000 };
            driver.copy_2d_to_device(s, at(x + 3, 777), from, rows).unwrap();
            driver.copy_2d_on_device(s, at(y, 301), at(x + 3, 777), rows).unwrap();
        }
        let mut on_x = vec![0xaa; BYTES];
        on_x[3..].copy_from_slice(&expected(vec![0xaa; BYTES - 3], 777, &counted, 1000, rows));
        assert!(blocks.read(x) == on_x, "pinned {pinned}: up");
        let on_y = expected(vec![0xbb; BYTES], 301, &on_x[3..], 777, rows);
        assert!(blocks.read(y) == on_y, "pinned {pinned}: across");
        pages.slice().fill(0xcc);
        let to = Pitched { start: pages.at, pitch: 512 };
        // SAFETY: as above.
        unsafe { driver.copy_2d_to_host(s, to, at(y, 301), rows) }.unwrap();
        blocks.stream.synchronize();
        assert!(
            pages.slice() == expected(vec![0xcc; BYTES], 512, &on_y, 301, rows),
            "pinned {pinned}: down"
        );
        if pinned {
            // SAFETY: 1. nothing is queued any more.
            unsafe { driver.host_unregister(DEVICE, pages.at) }.unwrap();
        }
    }
}

#[test]
fn fills_write_elements_of_one_two_and_four_bytes_also_in_rows() {
    let Some(driver) = driver() else { return };
    let blocks = Blocks::new(&driver);
    let (s, x) = (blocks.stream.raw, blocks.x);
    for (pattern, element) in [
        (Pattern::Byte(0x12), vec![0x12]),
        (Pattern::Half(0x1234), 0x1234_u16.to_ne_bytes().to_vec()),
        (Pattern::Word(0x1234_5678), 0x1234_5678_u32.to_ne_bytes().to_vec()),
    ] {
        let size = element.len() as u64;
        // SAFETY: 1. all of it lies in the mebibyte. 2. one stream.
        unsafe {
            driver.fill(s, x, 0xee, BYTES as u64).unwrap();
            driver.fill_with(s, x + 8, pattern, 1000).unwrap();
        }
        let mut all = vec![0xee; BYTES];
        all[8..][..1000 * element.len()].copy_from_slice(&element.repeat(1000));
        assert!(blocks.read(x) == all, "{pattern:?}");

        let rows = Rows { width: 10, height: 500 };
        // SAFETY: as above.
        unsafe { driver.fill_2d(s, at(x + 8, 64 * size), pattern, rows) }.unwrap();
        for row in 0..500 {
            all[8 + row * 64 * element.len()..][..10 * element.len()]
                .copy_from_slice(&element.repeat(10));
        }
        assert!(blocks.read(x) == all, "{pattern:?} in rows");
    }
}

#[test]
fn bytes_go_from_one_device_to_another() {
    let Some(driver) = driver() else { return };
    if driver.device_count().unwrap() < 2 {
        println!("skipped: one device only");
        return;
    }
    let other = DeviceId(1);
    let blocks = Blocks::new(&driver);
    let (s, x, y) = (blocks.stream.raw, blocks.x, blocks.y);
    let there = driver.mem_alloc(other, BYTES as u64).unwrap();
    let counted: Vec<u8> = (0..BYTES).map(|i| (i % 249) as u8).collect();
    write(&driver, s, x, &counted);
    // SAFETY: 1. all three live until the stream is idle. 2. one stream.
    unsafe {
        driver.fill(s, y, 0, BYTES as u64).unwrap();
        driver.copy_on_device(s, there, x, BYTES as u64).unwrap();
        driver.copy_on_device(s, y, there, BYTES as u64).unwrap();
    }
    assert!(blocks.read(y) == counted);
    let mut back = vec![0u8; BYTES];
    let far = driver.stream_create(other, 0).unwrap();
    // SAFETY: 1. the block is idle and lives on; the stream belongs to this test and is destroyed
    // once. 2. nothing else runs.
    unsafe {
        driver.copy_to_host(far, NonNull::from(&mut back[..]).cast(), there, BYTES).unwrap();
        driver.stream_synchronize(far).unwrap();
        driver.stream_destroy(far).unwrap();
        driver.mem_free(other, there).unwrap();
    }
    assert!(back == counted);
}
