//! Who serves: the pool, the driver's own allocator, the host's `malloc`.
#![expect(unsafe_code, reason = "frees memory by hand, as the peers' users do")]

use crate::place::Session;
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

/// The driver's own allocator, as rows name it.
pub(in crate::bench) const ASYNC: &str = "cuMemAllocFromPoolAsync";

/// Memory for one thread, which has a stream of its own.
pub(in crate::bench) trait Source {
    /// A block, as its user holds it.
    type Held;
    /// Why one is refused.
    type Refused: fmt::Display;

    /// Allocates.
    fn take(&self, bytes: u64) -> Result<Self::Held, Self::Refused>;

    /// Frees.
    fn give(&self, held: Self::Held) -> Result<(), Self::Refused>;

    /// Waits until nothing is queued.
    fn rest(&self) -> Result<(), Self::Refused>;
}

/// A caching pool, called as a program calls it.
#[derive(Debug)]
pub(in crate::bench) struct Pooled {
    pool: DevicePool,
    stream: Stream,
}

impl Pooled {
    /// With a stream of its own.
    pub(in crate::bench) fn on(pool: &DevicePool) -> Result<Self> {
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

    #[inline]
    fn give(&self, held: Block) -> Result<()> {
        drop(held);
        Ok(())
    }

    fn rest(&self) -> Result<()> {
        self.stream.synchronize()
    }
}

/// A pool of the driver's that keeps what is freed. It is called without this library's accounting,
/// which would make it slower than it is: what stands between is the driver's table and a look
/// whether the thread has a context.
#[derive(Debug)]
pub(in crate::bench) struct AsyncPool {
    driver: Arc<dyn Driver>,
    device: DeviceId,
    pool: PoolHandle,
    streams: StreamPool,
}

impl AsyncPool {
    /// Makes one.
    pub(in crate::bench) fn open(session: &Session) -> Result<Arc<Self>> {
        let Session { driver, device, .. } = session;
        let streams = StreamPool::new(driver.clone(), *device, DEFAULT_CAP);
        let pool = driver.pool_create(*device, 0).map_err(|e| MemoryError::driver(*device, e))?;
        Ok(Arc::new(Self { driver: driver.clone(), device: *device, pool, streams }))
    }

    /// Gives what is free back to the driver.
    pub(in crate::bench) fn trim(&self) -> Result<()> {
        self.driver.pool_trim(self.pool, 0).map_err(|e| self.refused(e))
    }

    fn refused(&self, error: aquifer_core::DriverError) -> MemoryError {
        MemoryError::driver(self.device, error)
    }
}

impl Drop for AsyncPool {
    fn drop(&mut self) {
        // SAFETY: 1. the handle is private to this value, which is going; sources hold it, so none
        // is left. A pool that the driver will not take back goes with the process.
        let _ = unsafe { self.driver.pool_destroy(self.pool) };
    }
}

/// An [`AsyncPool`] and a stream.
#[derive(Debug)]
pub(in crate::bench) struct Async {
    pool: Arc<AsyncPool>,
    stream: Stream,
}

impl Async {
    /// With a stream of its own.
    pub(in crate::bench) fn on(pool: &Arc<AsyncPool>) -> Result<Self> {
        Ok(Self { pool: pool.clone(), stream: pool.streams.lease()? })
    }
}

/// An allocation of an [`AsyncPool`], which only [`Async::give`] takes.
#[derive(Debug)]
pub(in crate::bench) struct Address(u64);

impl Source for Async {
    type Held = Address;
    type Refused = MemoryError;

    #[inline]
    fn take(&self, bytes: u64) -> Result<Address> {
        let taken = self.pool.driver.pool_alloc(self.pool.pool, self.stream.raw(), bytes);
        taken.map(Address).map_err(|e| self.pool.refused(e))
    }

    #[inline]
    fn give(&self, held: Address) -> Result<()> {
        // SAFETY: 1. an `Address` comes from `pool_alloc` in `take` only, and goes here. 2. no work
        // uses it.
        unsafe { self.pool.driver.pool_free(self.stream.raw(), held.0) }
            .map_err(|e| self.pool.refused(e))
    }

    fn rest(&self) -> Result<()> {
        self.stream.synchronize()
    }
}

/// The host's allocator, by which the others are measured.
#[derive(Clone, Copy, Debug)]
pub(in crate::bench) struct Malloc;

/// Memory of [`Malloc`], which only [`Malloc::give`] takes.
#[derive(Debug)]
pub(in crate::bench) struct Pointer(NonNull<u8>, Layout);

// SAFETY: 1. memory that its holder alone reaches, and any thread may free.
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
        // SAFETY: 1. a `Pointer` comes from `take` only, with its layout, and goes here.
        unsafe { System.dealloc(pointer.as_ptr(), layout) };
        Ok(())
    }

    fn rest(&self) -> Result<(), Self::Refused> {
        Ok(())
    }
}

/// A caching pool of `session`'s device.
pub(in crate::bench) fn pool(session: &Session) -> Result<DevicePool> {
    DevicePool::open(session.driver.clone(), session.device, PoolConfig::default())
}
