//! The allocators: the pool, the driver's allocator, and the host's `malloc`.
#![expect(unsafe_code, reason = "frees memory by hand, as the peers' users do")]

use crate::console::place::Session;
use aquifer_core::{DeviceId, MemoryError, Result};
use aquifer_device::{Block, DevicePool, PoolConfig, Request};
use aquifer_driver::{Driver, PoolHandle};
use aquifer_stream::{DEFAULT_CAP, Stream, StreamPool};
use std::{
    alloc::{GlobalAlloc, Layout, System},
    fmt,
    ptr::NonNull,
    sync::Arc,
};

/// The driver's allocator, as named in rows.
pub(crate) const ASYNC: &str = "cuMemAllocFromPoolAsync";

/// An allocator for one thread, with a stream of its own.
pub(crate) trait Source {
    /// A block, as its user holds it.
    type Held;
    /// The error of a failed call.
    type Refused: fmt::Display;

    /// Allocates.
    fn take(&self, bytes: u64) -> Result<Self::Held, Self::Refused>;

    /// Frees. What frees itself is dropped.
    #[inline]
    fn give(&self, held: Self::Held) -> Result<(), Self::Refused> {
        drop(held);
        Ok(())
    }

    /// Waits until no work is queued.
    fn rest(&self) -> Result<(), Self::Refused> {
        Ok(())
    }
}

/// A call that returns what frees itself.
pub(crate) struct CallSource<F>(pub(crate) F);

impl<H, R: fmt::Display, F: Fn(u64) -> Result<H, R>> Source for CallSource<F> {
    type Held = H;
    type Refused = R;

    #[inline]
    fn take(&self, bytes: u64) -> Result<H, R> {
        self.0(bytes)
    }
}

/// A caching pool, called as a program calls it.
#[derive(Debug)]
pub(crate) struct Pooled {
    pool: DevicePool,
    stream: Stream,
}

impl Pooled {
    /// Opens it on a new stream.
    pub(crate) fn on(pool: &DevicePool) -> Result<Self> {
        Ok(Self { pool: pool.clone(), stream: pool.stream()? })
    }
}

impl Source for Pooled {
    type Held = Block;
    type Refused = MemoryError;

    #[inline]
    fn take(&self, bytes: u64) -> Result<Block> {
        self.pool.alloc(&self.stream, Request::bytes(bytes))
    }

    fn rest(&self) -> Result<()> {
        self.stream.synchronize()
    }
}

/// A pool of the driver that keeps freed memory. It is called without this library's accounting,
/// which would slow it down. Only the driver's function table and a check of the thread's context
/// are in between.
#[derive(Debug)]
pub(crate) struct AsyncPool {
    driver: Arc<dyn Driver>,
    device: DeviceId,
    pool: PoolHandle,
    streams: StreamPool,
}

impl AsyncPool {
    /// Creates one.
    pub(crate) fn open(session: &Session) -> Result<Arc<Self>> {
        let Session { driver, device, .. } = session;
        let streams = StreamPool::new(driver.clone(), *device, DEFAULT_CAP);
        let pool = driver.pool_create(*device).map_err(|e| MemoryError::driver(*device, e))?;
        Ok(Arc::new(Self { driver: driver.clone(), device: *device, pool, streams }))
    }

    /// Releases free memory to the driver.
    pub(crate) fn trim(&self) -> Result<()> {
        self.driver.pool_trim(self.pool, 0).map_err(|e| self.refused(e))
    }

    fn refused(&self, error: aquifer_core::DriverError) -> MemoryError {
        MemoryError::driver(self.device, error)
    }
}

impl Drop for AsyncPool {
    fn drop(&mut self) {
        // SAFETY: 1. the handle is private to this value, which is being dropped; sources hold a
        // reference to it, so none is left. A pool that the driver does not destroy is freed when
        // the process ends.
        let _ = unsafe { self.driver.pool_destroy(self.pool) };
    }
}

/// An [`AsyncPool`] and a stream.
#[derive(Debug)]
pub(crate) struct Async {
    pool: Arc<AsyncPool>,
    stream: Stream,
}

impl Async {
    /// Opens it on a new stream.
    pub(crate) fn on(pool: &Arc<AsyncPool>) -> Result<Self> {
        Ok(Self { pool: pool.clone(), stream: pool.streams.lease()? })
    }
}

/// An allocation of an [`AsyncPool`], accepted only by [`Async::give`].
#[derive(Debug)]
pub(crate) struct AsyncAddress(u64);

impl Source for Async {
    type Held = AsyncAddress;
    type Refused = MemoryError;

    #[inline]
    fn take(&self, bytes: u64) -> Result<AsyncAddress> {
        let taken = self.pool.driver.pool_alloc(self.pool.pool, self.stream.raw(), bytes);
        taken.map(AsyncAddress).map_err(|e| self.pool.refused(e))
    }

    #[inline]
    fn give(&self, held: AsyncAddress) -> Result<()> {
        // SAFETY: 1. an `Address` comes from `pool_alloc` in `take` only, and is consumed here. 2.
        // no work uses it.
        unsafe { self.pool.driver.pool_free(self.stream.raw(), held.0) }
            .map_err(|e| self.pool.refused(e))
    }

    fn rest(&self) -> Result<()> {
        self.stream.synchronize()
    }
}

/// The host's allocator, the reference of the others.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Malloc;

/// Memory of [`Malloc`], accepted only by [`Malloc::give`].
#[derive(Debug)]
pub(crate) struct Pointer(NonNull<u8>, Layout);

// SAFETY: 1. only the owner accesses the memory, and any thread may free it.
unsafe impl Send for Pointer {}

impl Source for Malloc {
    type Held = Pointer;
    type Refused = &'static str;

    #[inline]
    fn take(&self, bytes: u64) -> Result<Pointer, Self::Refused> {
        let layout = Layout::from_size_align(bytes as usize, 8).map_err(|_| "no such size")?;
        if layout.size() == 0 {
            return Err("a block of nothing");
        }
        // SAFETY: 1. the layout has a size.
        let pointer = unsafe { System.alloc(layout) };
        NonNull::new(pointer).map(|pointer| Pointer(pointer, layout)).ok_or("out of memory")
    }

    #[inline]
    fn give(&self, held: Pointer) -> Result<(), Self::Refused> {
        let Pointer(pointer, layout) = held;
        // SAFETY: 1. a `Pointer` comes from `take` only, with its layout, and is consumed here.
        unsafe { System.dealloc(pointer.as_ptr(), layout) };
        Ok(())
    }
}

/// Opens a caching pool on the device of `session`.
pub(crate) fn pool(session: &Session) -> Result<DevicePool> {
    DevicePool::open(session.driver.clone(), session.device, PoolConfig::default())
}
