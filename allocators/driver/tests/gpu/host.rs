//! Tests of pinned memory, and of copies from and to it.

use super::support::{DEVICE, OwnStream, driver, read_back};
use aquifer_driver::HostFlags;
use std::{
    alloc::{Layout, alloc_zeroed, dealloc},
    ptr::NonNull,
};

const PAGE: usize = 4096;

/// Whole pages of ordinary memory.
pub(crate) struct Pages {
    pub(crate) at: NonNull<u8>,
    pub(crate) bytes: usize,
}

impl Pages {
    pub(crate) fn new(bytes: usize) -> Self {
        let layout = Layout::from_size_align(bytes, PAGE).unwrap();
        // SAFETY: 1. the layout is not empty.
        let at = NonNull::new(unsafe { alloc_zeroed(layout) }).unwrap();
        Self { at, bytes }
    }

    pub(crate) fn slice(&mut self) -> &mut [u8] {
        // SAFETY: 1. allocated for `bytes`, zeroed at first, and borrowed from its owner.
        unsafe { std::slice::from_raw_parts_mut(self.at.as_ptr(), self.bytes) }
    }

    pub(crate) fn half(&self) -> NonNull<u8> {
        // SAFETY: 1. inside the allocation.
        unsafe { self.at.add(self.bytes / 2) }
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: 1. allocated with this layout.
        unsafe { dealloc(self.at.as_ptr(), Layout::from_size_align(self.bytes, PAGE).unwrap()) };
    }
}

#[test]
fn pinned_memory_of_the_driver_goes_there_and_back() {
    const BYTES: usize = 8 << 20;
    let Some(driver) = driver() else { return };
    let stream = OwnStream::new(&driver);
    let block = driver.mem_alloc(DEVICE, BYTES as u64).unwrap();
    let mut combined = HostFlags::default();
    combined.write_combined = true;
    for flags in [HostFlags::default(), combined] {
        let up = driver.host_alloc(DEVICE, BYTES, flags).unwrap();
        let down = driver.host_alloc(DEVICE, BYTES, HostFlags::default()).unwrap();
        // SAFETY: 1. both are writable for `BYTES`, and belong to this test. 2. the host waits
        // before it reads.
        unsafe {
            up.write_bytes(0x3C, BYTES);
            driver.copy_to_device(stream.raw, block, up, BYTES).unwrap();
            driver.copy_to_host(stream.raw, down, block, BYTES).unwrap();
        }
        stream.synchronize();
        // SAFETY: 1. written in full by the copy that has been waited for.
        let seen = unsafe { std::slice::from_raw_parts(down.as_ptr(), BYTES) };
        assert!(seen.iter().all(|&byte| byte == 0x3C));
        // SAFETY: 1. both came from the driver. 2. the stream is idle.
        unsafe {
            driver.host_free(DEVICE, up).unwrap();
            driver.host_free(DEVICE, down).unwrap();
        }
    }
    // SAFETY: 1. the block is this test's own. 2. the stream is idle.
    unsafe { driver.mem_free(DEVICE, block) }.unwrap();
}

#[test]
fn a_registration_is_pinned_until_it_ends() {
    const BYTES: usize = 1 << 20;
    let Some(driver) = driver() else { return };
    let stream = OwnStream::new(&driver);
    let mut pages = Pages::new(BYTES);
    pages.slice().fill(0x5D);
    // SAFETY: 1. the pages live until the registration has ended.
    unsafe { driver.host_register(DEVICE, pages.at, BYTES, HostFlags::default()) }.unwrap();
    // SAFETY: 1. as above.
    let again =
        unsafe { driver.host_register(DEVICE, pages.at, BYTES, HostFlags::default()) }.unwrap_err();
    assert_eq!((again.code, again.name), (712, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"));
    let block = driver.mem_alloc(DEVICE, BYTES as u64).unwrap();
    // SAFETY: 1. both live until the stream is idle. 2. nothing else accesses them meanwhile.
    unsafe { driver.copy_to_device(stream.raw, block, pages.at, BYTES) }.unwrap();
    assert!(read_back(&driver, stream.raw, block, BYTES).iter().all(|&byte| byte == 0x5D));
    // SAFETY: 1. it starts a registration. 2. the stream is idle.
    unsafe { driver.host_unregister(DEVICE, pages.at) }.unwrap();
    // SAFETY: 1. it starts no registration, which is what is tested.
    let gone = unsafe { driver.host_unregister(DEVICE, pages.at) }.unwrap_err();
    assert_eq!(gone.code, 713);
    // SAFETY: 1. the block is this test's own. 2. the stream is idle.
    unsafe { driver.mem_free(DEVICE, block) }.unwrap();
}

#[test]
fn a_copy_across_two_registrations_is_refused_and_breaks_nothing() {
    const BYTES: usize = 1 << 20;
    let Some(driver) = driver() else { return };
    let stream = OwnStream::new(&driver);
    let mut pages = Pages::new(BYTES);
    pages.slice().fill(0x77);
    let block = driver.mem_alloc(DEVICE, BYTES as u64).unwrap();
    for half in [pages.at, pages.half()] {
        // SAFETY: 1. the pages live until both registrations have ended.
        unsafe { driver.host_register(DEVICE, half, BYTES / 2, HostFlags::default()) }.unwrap();
    }
    // SAFETY: 1. both sides live until the stream is idle. 2. nothing else accesses them meanwhile.
    let (up, down) = unsafe {
        let up = driver.copy_to_device(stream.raw, block, pages.at, BYTES);
        (up, driver.copy_to_host(stream.raw, pages.at, block, BYTES))
    };
    assert_eq!(up.unwrap_err().code, 1);
    assert_eq!(down.unwrap_err().code, 1);
    for (i, half) in [pages.at, pages.half()].into_iter().enumerate() {
        let at = block + (i * BYTES / 2) as u64;
        // SAFETY: 1. and 2. as above.
        unsafe { driver.copy_to_device(stream.raw, at, half, BYTES / 2) }.unwrap();
    }
    assert!(read_back(&driver, stream.raw, block, BYTES).iter().all(|&byte| byte == 0x77));
    // SAFETY: 1. each starts a registration, and the block is this test's own. 2. the stream is
    // idle.
    unsafe {
        driver.host_unregister(DEVICE, pages.at).unwrap();
        driver.host_unregister(DEVICE, pages.half()).unwrap();
        driver.mem_free(DEVICE, block).unwrap();
    }
}
