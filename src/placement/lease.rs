//! Bytes reserved on a device until they are used.

use super::device_set::{DeviceSet, Member};
use aquifer_core::{Budget, DeviceId, Reservation, Result};
use aquifer_device::{Block, DeviceBuffer, DevicePool, Request, Reserved, StableBlock, Tenant};
use aquifer_stream::Stream;
use bytemuck::Pod;
use std::{
    fmt,
    sync::{Arc, Mutex, PoisonError},
};

/// Bytes reserved on one device. Allocations draw from them, and the rest is released when the
/// lease is dropped.
///
/// Blocks drawn from a lease are ordinary blocks and outlive it. A lease is counted by its device's
/// budget, so no other request can take its bytes. Contiguity is not reserved.
///
/// A lease belongs to one generation of its device. After that generation is lost, every request on
/// the lease returns [`MemoryError::DeviceLost`](aquifer_core::MemoryError::DeviceLost), even if
/// the device has been restored.
pub struct Lease {
    device_set: Arc<DeviceSet>,
    index: usize,
    generation: u32,
    /// [`Reserved`] memory draws from it as it grows, and does not keep it alive.
    reservation: Arc<Mutex<Reservation>>,
}

impl Lease {
    #[inline]
    pub(super) fn new(
        device_set: Arc<DeviceSet>,
        index: usize,
        generation: u32,
        reservation: Reservation,
    ) -> Self {
        Self { device_set, index, generation, reservation: Arc::new(Mutex::new(reservation)) }
    }

    fn member(&self) -> &Member {
        self.device_set.at(self.index, self.generation)
    }

    fn usable(&self) -> Result<&DevicePool> {
        let member = self.member();
        member.check()?;
        Ok(&member.pool)
    }

    /// Returns the chosen device.
    #[must_use]
    pub fn device(&self) -> DeviceId {
        self.pool().device()
    }

    /// Returns the device's index among the runtime's devices.
    #[must_use]
    pub fn index(&self) -> usize {
        self.index
    }

    /// Returns the generation of the device that the lease belongs to.
    #[must_use]
    pub fn generation(&self) -> u32 {
        self.generation
    }

    /// Returns the pool of the device.
    #[must_use]
    pub fn pool(&self) -> &DevicePool {
        &self.member().pool
    }

    /// Returns the reserved bytes that are left.
    #[must_use]
    pub fn remaining(&self) -> u64 {
        self.reservation.lock().unwrap_or_else(PoisonError::into_inner).remaining()
    }

    /// Returns a stream of the device, leased from its stream pool.
    ///
    /// # Errors
    /// As [`DevicePool::stream`]; [`DeviceLost`](aquifer_core::MemoryError::DeviceLost).
    pub fn stream(&self) -> Result<Stream> {
        self.usable()?.stream()
    }

    /// Allocates a block from the reservation. A larger request takes the rest of the reservation
    /// and charges the budget for what is missing.
    ///
    /// # Errors
    /// As [`DevicePool::alloc`]; [`DeviceLost`](aquifer_core::MemoryError::DeviceLost).
    #[track_caller]
    pub fn alloc(&self, stream: &Stream, request: Request) -> Result<Block> {
        self.usable()?.alloc_reserved(stream, request, &self.reservation)
    }

    /// Allocates a block whose memory never moves from the reservation: whole physical handles,
    /// rounded up to the device's granularity. A larger request takes the rest of the reservation
    /// and charges the budget for what is missing.
    ///
    /// # Errors
    /// As [`DevicePool::alloc_stable`]; [`DeviceLost`](aquifer_core::MemoryError::DeviceLost).
    #[track_caller]
    pub fn alloc_stable(&self, stream: &Stream, request: Request) -> Result<StableBlock> {
        self.usable()?.alloc_stable_reserved(stream, request, &self.reservation)
    }

    /// Reserves addresses for `max_len` elements without memory, like [`DevicePool::reserve`]. Each
    /// [`commit`](Reserved::commit) draws from the reservation and charges the budget for what is
    /// missing. After the lease is dropped, commits charge the budget alone. Decommitted memory
    /// returns to the budget, not to the lease.
    ///
    /// ```
    /// use aquifer::{PlacementRequest, Policy, Runtime, sim::Sim};
    /// let rt = Runtime::on(Sim::h200(2).driver())?;
    /// let lease = rt.placer(Policy::MostFree).place(&PlacementRequest::bytes(1 << 30))?;
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
        self.usable()?.reserve_drawing(stream, max_len, None, &self.reservation)
    }

    /// Like [`Lease::reserve`], but commits in steps of `step` bytes, rounded up to the device's
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
        self.usable()?.reserve_drawing(stream, max_len, Some(step), &self.reservation)
    }

    /// Returns the device's pool for a tenant, as [`DevicePool::for_tenant`] does. Its allocations
    /// count for the tenant, and are drawn from the reservation first. After the lease is dropped,
    /// the pool's budget alone is charged.
    ///
    /// ```
    /// use aquifer::{Budget, PlacementRequest, Policy, Request, Runtime, sim::Sim};
    /// let rt = Runtime::on(Sim::h200(2).driver())?;
    /// let lease = rt.placer(Policy::MostFree).place(&PlacementRequest::bytes(1 << 30))?;
    /// let tenant = lease.for_tenant(&Budget::new("tenant a", 256 << 20))?;
    /// let block = tenant.alloc(&lease.stream()?, Request::bytes(64 << 20))?;
    /// assert_eq!((tenant.live(), lease.remaining()), (64 << 20, (1 << 30) - (64 << 20)));
    /// # Ok::<(), aquifer::MemoryError>(())
    /// ```
    ///
    /// # Errors
    /// As [`DevicePool::for_tenant`]; [`DeviceLost`](aquifer_core::MemoryError::DeviceLost).
    pub fn for_tenant(&self, tenant: &Budget) -> Result<Tenant> {
        self.usable()?.for_tenant_drawing(tenant, &self.reservation)
    }

    /// Allocates a buffer from the reservation.
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
