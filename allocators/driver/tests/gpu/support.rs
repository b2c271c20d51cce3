//! A device to test on, or the reason why there is none.

use super::gpu::skip;
use aquifer_driver::{DeviceId, Driver, RawStream, cuda::CudaDriver};
use std::{
    alloc::{Layout, alloc_zeroed, dealloc},
    ptr::NonNull,
    sync::Arc,
};

const PAGE: usize = 4096;

/// The device that the tests run on.
pub(crate) const DEVICE: DeviceId = DeviceId(0);

/// Returns the driver, or `None` with a message that states why the test does nothing.
pub(crate) fn cuda() -> Option<Arc<CudaDriver>> {
    match CudaDriver::open() {
        Ok(driver) => Some(driver),
        Err(reason) => {
            skip(reason);
            None
        }
    }
}

/// Returns the driver as pools use it.
pub(crate) fn driver() -> Option<Arc<dyn Driver>> {
    cuda().map(|driver| driver as Arc<dyn Driver>)
}

/// A stream that is destroyed with the test.
pub(crate) struct OwnStream {
    driver: Arc<dyn Driver>,
    pub(crate) raw: RawStream,
}

impl OwnStream {
    pub(crate) fn new(driver: &Arc<dyn Driver>) -> Self {
        Self { driver: driver.clone(), raw: driver.stream_create(DEVICE, 0).unwrap() }
    }

    pub(crate) fn synchronize(&self) {
        self.driver.stream_synchronize(self.raw).unwrap();
    }
}

impl Drop for OwnStream {
    fn drop(&mut self) {
        let _ = self.driver.stream_synchronize(self.raw);
        // SAFETY: 1. the handle is this value's alone.
        let _ = unsafe { self.driver.stream_destroy(self.raw) };
    }
}

/// Reads device memory back, after all that is queued on `stream`.
pub(crate) fn read_back(
    driver: &Arc<dyn Driver>,
    stream: RawStream,
    from: u64,
    bytes: usize,
) -> Vec<u8> {
    let mut back = vec![0u8; bytes];
    // SAFETY: 1. `back` is writable and the caller's range mapped until the synchronisation below.
    // 2. nothing else uses either.
    unsafe { driver.copy_to_host(stream, NonNull::from(&mut back[..]).cast(), from, bytes) }
        .unwrap();
    driver.stream_synchronize(stream).unwrap();
    back
}

/// Writes bytes to device memory, and waits until they are there.
pub(crate) fn write(driver: &Arc<dyn Driver>, stream: RawStream, to: u64, bytes: &[u8]) {
    // SAFETY: 1. `bytes` is readable and the caller's range mapped until the synchronisation below.
    // 2. nothing else uses either.
    unsafe { driver.copy_to_device(stream, to, NonNull::from(bytes).cast(), bytes.len()) }.unwrap();
    driver.stream_synchronize(stream).unwrap();
}

/// Whole pages of ordinary memory.
pub(crate) struct Pages {
    pub(crate) at: NonNull<u8>,
    bytes: usize,
}

impl Pages {
    pub(crate) fn new(bytes: usize) -> Self {
        let layout = Layout::from_size_align(bytes, PAGE).unwrap();
        // SAFETY: 1. the layout is not empty.
        let at = NonNull::new(unsafe { alloc_zeroed(layout) }).unwrap();
        Self { at, bytes }
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
