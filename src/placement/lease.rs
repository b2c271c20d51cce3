//! Bytes that are held on a device until they are used.

use super::fleet::{Fleet, Member};
use aquifer_core::{DeviceId, Reservation, Result};
use aquifer_device::{Block, DeviceBuffer, DevicePool, Request, Reserved, StableBlock};
use aquifer_stream::Stream;
use bytemuck::Pod;
use std::{
    fmt,
    sync::{Arc, Mutex, PoisonError},
};

/// Bytes reserved on one device, drawn from by allocations; the rest goes back when this is
/// dropped.
///
/// Blocks drawn from a lease are blocks like any other, and outlive it. A lease counts bytes as its
/// device's budget does, so a request beside it can never take what it holds; how the bytes lie is
/// not reserved.
///
/// It belongs to one generation of its device: when that is lost, all that is asked of the lease is
/// answered by [`MemoryError::DeviceLost`](aquifer_core::MemoryError::DeviceLost), also when the
/// device has been put back.
pub struct Lease {
    fleet: Arc<Fleet>,
    index: usize,
    generation: u32,
    /// [`Reserved`] memory draws from it as it grows, and does not keep it.
    held: Arc<Mutex<Reservation>>,
}

impl Lease {
    #[inline]
    pub(super) fn new(fleet: Arc<Fleet>, index: usize, generation: u32, held: Reservation) -> Self {
        Self { fleet, index, generation, held: Arc::new(Mutex::new(held)) }
    }

    fn member(&self) -> &Member {
        self.fleet.at(self.index, self.generation)
    }

    fn usable(&self) -> Result<&DevicePool> {
        let member = self.member();
        member.check()?;
        Ok(&member.pool)
    }

    /// The device that was picked.
    #[must_use]
    pub fn device(&self) -> DeviceId {
        self.pool().device()
    }

    /// Its place among the runtime's devices.
    #[must_use]
    pub fn index(&self) -> usize {
        self.index
    }

    /// The generation of the device that it belongs to.
    #[must_use]
    pub fn generation(&self) -> u32 {
        self.generation
    }

    /// Its pool.
    #[must_use]
    pub fn pool(&self) -> &DevicePool {
        &self.member().pool
    }

    /// Bytes that are still held.
    #[must_use]
    pub fn remaining(&self) -> u64 {
        self.held.lock().unwrap_or_else(PoisonError::into_inner).remaining()
    }

    /// Leases a stream of the device.
    ///
    /// # Errors
    /// As [`DevicePool::stream`]; [`DeviceLost`](aquifer_core::MemoryError::DeviceLost).
    pub fn stream(&self) -> Result<Stream> {
        self.usable()?.stream()
    }

    /// A block drawn from what is held. A request for more than that draws the rest and asks the
    /// budget.
    ///
    /// # Errors
    /// As [`DevicePool::alloc`]; [`DeviceLost`](aquifer_core::MemoryError::DeviceLost).
    #[track_caller]
    pub fn alloc(&self, stream: &Stream, request: Request) -> Result<Block> {
        self.usable()?.alloc_reserved(stream, request, &self.held)
    }

    /// A block whose memory never moves, drawn from what is held: a whole physical handle, rounded
    /// up to the device's granularity. A request for more than is held draws the rest and asks the
    /// budget.
    ///
    /// # Errors
    /// As [`DevicePool::alloc_stable`]; [`DeviceLost`](aquifer_core::MemoryError::DeviceLost).
    #[track_caller]
    pub fn alloc_stable(&self, stream: &Stream, request: Request) -> Result<StableBlock> {
        self.usable()?.alloc_stable_reserved(stream, request, &self.held)
    }

    /// Addresses for `max_len` elements, with no memory behind them, as [`DevicePool::reserve`]:
    /// each [`commit`](Reserved::commit) draws from what is held and asks the budget for the rest.
    /// Once the lease is dropped, commits ask the budget alone. Memory that is decommitted goes
    /// back to the budget, not to the lease.
    ///
    /// ```
    /// use aquifer::{Place, Policy, Runtime, sim::Sim};
    /// let rt = Runtime::on(Sim::h200(2).driver())?;
    /// let lease = rt.placer(Policy::MostFree).place(&Place::bytes(1 << 30))?;
    /// let mut keys = lease.reserve::<f32>(&lease.stream()?, 1 << 30)?; // addresses for 4 GiB
    /// keys.commit_to(1 << 20)?;
    /// assert_eq!(lease.remaining(), (1 << 30) - (4 << 20));
    /// # Ok::<(), aquifer::MemoryError>(())
    /// ```
    ///
    /// # Errors
    /// As [`DevicePool::reserve`]; [`DeviceLost`](aquifer_core::MemoryError::DeviceLost).
    #[track_caller]
    pub fn reserve<T: Pod>(&self, stream: &Stream, max_len: usize) -> Result<Reserved<T>> {
        self.usable()?.reserve_drawing(stream, max_len, None, &self.held)
    }

    /// As [`Lease::reserve`], committed in steps of `step` bytes, rounded up to the device's
    /// granularity.
    ///
    /// # Errors
    /// As [`Lease::reserve`].
    #[track_caller]
    pub fn reserve_in_steps<T: Pod>(
        &self,
        stream: &Stream,
        max_len: usize,
        step: u64,
    ) -> Result<Reserved<T>> {
        self.usable()?.reserve_drawing(stream, max_len, Some(step), &self.held)
    }

    /// A buffer drawn from what is held.
    ///
    /// # Errors
    /// As [`DevicePool::alloc`]; [`DeviceLost`](aquifer_core::MemoryError::DeviceLost).
    #[track_caller]
    pub fn buffer<T: Pod>(&self, stream: &Stream, len: usize) -> Result<DeviceBuffer<T>> {
        DeviceBuffer::from_alloc(len, |request| self.alloc(stream, request))
    }
}

impl fmt::Debug for Lease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lease")
            .field("device", &self.device())
            .field("generation", &self.generation)
            .field("remaining", &self.remaining())
            .finish_non_exhaustive()
    }
}
