//! The driver's own allocators: allocations, and stream-ordered pools.
//!
//! A pool divides segments of 2 MiB and more into blocks. A free block records the points of the
//! streams that it was freed on. The next owner waits for them on the device, which is an order
//! that the driver knows.

use super::{
    access_history::{Action, ActionKind},
    address_space::ReservationPurpose,
    codes::{self, ErrorCode},
    handle_table::HandleTable,
    machine::caller_site,
    machine_state::{MachineState, device_bit},
    queue::StreamPoint,
};
use crate::{DeviceId, ExportTypes, PoolUsage};
use std::collections::{BTreeMap, HashMap};

/// Block sizes are multiples of this.
const UNIT: u64 = 512;
/// Sizes of segments and of large allocations are multiples of this.
const SEGMENT: u64 = 2 << 20;

/// All pools, and their allocated blocks.
#[derive(Default, Debug)]
pub(crate) struct DriverPools {
    pub(crate) pools: HandleTable<DriverPool>,
    blocks: HashMap<u64, PoolBlock>,
}

#[derive(Debug)]
struct PoolBlock {
    pool: u64,
    bytes: u64,
}

#[derive(Debug)]
pub(crate) struct DriverPool {
    pub(crate) device: DeviceId,
    usage: PoolUsage,
    /// Bytes of each segment, by address.
    segments: BTreeMap<u64, u64>,
    free: BTreeMap<u64, FreeBlock>,
    /// Whether its handle is valid. Its memory stays while blocks exist.
    pub(crate) alive: bool,
}

/// A free block.
#[derive(Debug)]
struct FreeBlock {
    bytes: u64,
    /// The points at which it was freed, one for each stream.
    freed_at: Vec<StreamPoint>,
}

impl DriverPool {
    pub(crate) fn new(device: DeviceId) -> Self {
        Self {
            device,
            usage: PoolUsage::default(),
            segments: BTreeMap::new(),
            free: BTreeMap::new(),
            alive: true,
        }
    }

    /// Checks that each byte of the segments is used or in one free block.
    fn check(&self) {
        let segments: u64 = self.segments.values().sum();
        let free: u64 = self.free.values().map(|free| free.bytes).sum();
        debug_assert_eq!(segments, self.usage.reserved, "a pool's segments and its figure differ");
        debug_assert_eq!(
            segments,
            self.usage.used + free,
            "a pool has lost bytes or has some twice"
        );
        debug_assert!(self.usage.reserved <= self.usage.reserved_high, "a pool's peak is too low");
    }

    pub(crate) fn usage(&self) -> PoolUsage {
        self.usage
    }

    /// Adds a free block, coalesced with its free neighbours in the segment.
    fn insert_coalesced(&mut self, mut address: u64, mut free: FreeBlock) {
        let segment = self.segments.range(..=address).next_back();
        let (start, end) =
            segment.map_or((address, address), |(&start, &bytes)| (start, start + bytes));
        if address + free.bytes < end
            && let Some(next) = self.free.remove(&(address + free.bytes))
        {
            free.coalesce(next);
        }
        let before = self.free.range(start..address).next_back();
        if let Some((&before, _)) =
            before.filter(|(before, other)| **before + other.bytes == address)
            && let Some(other) = self.free.remove(&before)
        {
            free.coalesce(other);
            address = before;
        }
        self.free.insert(address, free);
    }
}

impl FreeBlock {
    fn coalesce(&mut self, other: FreeBlock) {
        self.bytes += other.bytes;
        for point in other.freed_at {
            match self.freed_at.iter_mut().find(|mine| mine.stream == point.stream) {
                Some(mine) => {
                    mine.count = mine.count.max(point.count);
                    mine.clock.join(&point.clock);
                }
                None => self.freed_at.push(point),
            }
        }
    }
}

impl DriverPools {
    /// Checks every pool.
    pub(crate) fn check(&self) {
        self.pools.iter().for_each(DriverPool::check);
    }
}

impl MachineState {
    /// Allocates accessible device memory. Returns its address and its rounded size.
    pub(crate) fn allocate(
        &mut self,
        device: DeviceId,
        bytes: u64,
        pool: bool,
    ) -> Result<(u64, u64), ErrorCode> {
        let unit = if bytes >= SEGMENT { SEGMENT } else { UNIT };
        let bytes = bytes.checked_next_multiple_of(unit).ok_or(codes::OUT_OF_MEMORY)?;
        self.charge_memory(device, bytes)?;
        let placed = self.reserve_and_map(device, bytes, unit, pool);
        if placed.is_err() {
            self.refund_memory(device, bytes);
        }
        placed.map(|address| (address, bytes))
    }

    fn reserve_and_map(
        &mut self,
        device: DeviceId,
        bytes: u64,
        align: u64,
        pool: bool,
    ) -> Result<u64, ErrorCode> {
        let object = self.space.create(device, bytes, ExportTypes::NONE)?;
        let purpose = ReservationPurpose::Allocation { object, pool };
        let address = match self.space.reserve(device, bytes, align, align, purpose) {
            Ok(address) => address,
            Err(code) => {
                self.space.release(object);
                return Err(code);
            }
        };
        let devices = self.devices_with_access(device) | device_bit(device);
        let mapped = self
            .space
            .map(address, bytes, object)
            .and_then(|()| self.space.set_access(address, bytes, devices, true));
        if let Err(code) = mapped {
            self.unmap_and_release(address, object, bytes, None);
            return Err(code);
        }
        Ok(address)
    }

    /// Unmaps the memory of an allocation and frees its addresses. Without `cause`, the free is
    /// attributed to the host.
    fn unmap_and_release(
        &mut self,
        address: u64,
        object: u64,
        bytes: u64,
        cause: Option<Action>,
    ) -> u64 {
        let site = std::panic::Location::caller();
        let action =
            cause.unwrap_or_else(|| self.current_host_action(ActionKind::Free, "free", site));
        // If it cannot be unmapped, it was not mapped.
        let _ = self.space.unmap(address, bytes, action);
        let freed = self.space.release(object);
        self.space.unreserve(address, action);
        freed
    }

    /// Frees an allocation to its device.
    pub(crate) fn deallocate(&mut self, address: u64, cause: Action) {
        let Some(reservation) = self.space.reservation(address) else { return };
        let (device, bytes) = (reservation.device, reservation.bytes);
        let ReservationPurpose::Allocation { object, .. } = reservation.purpose else { return };
        let freed = self.unmap_and_release(address, object, bytes, Some(cause));
        self.refund_memory(device, freed);
        self.owners.record_free(address, bytes, cause);
    }

    /// Allocates a block of a pool. Returns its address, its bytes, and the points that its first
    /// use waits for.
    pub(crate) fn pool_alloc(
        &mut self,
        pool: u64,
        stream: usize,
        bytes: u64,
    ) -> Result<(u64, u64, Vec<StreamPoint>), ErrorCode> {
        let bytes = bytes.checked_next_multiple_of(UNIT).ok_or(codes::OUT_OF_MEMORY)?;
        let entry =
            self.pools.pools.get(pool).filter(|pool| pool.alive).ok_or(codes::INVALID_HANDLE)?;
        // Prefer a block of this stream or one that needs no wait, and of these the best fit.
        let needs_wait = |point: &StreamPoint| {
            point.stream != stream && !self.reached(point.stream, point.count)
        };
        let fitting = entry.free.iter().filter(|(_, free)| free.bytes >= bytes);
        let best = fitting
            .min_by_key(|(_, free)| (free.freed_at.iter().any(needs_wait), free.bytes))
            .map(|(&address, _)| address);
        let address = match best {
            Some(best) => best,
            None => self.grow(pool, bytes)?,
        };
        let entry = self.pools.pools.get_mut(pool).ok_or(codes::INVALID_HANDLE)?;
        let free = entry.free.remove(&address).ok_or(codes::OUT_OF_MEMORY)?;
        if free.bytes > bytes {
            let rest = FreeBlock { bytes: free.bytes - bytes, freed_at: free.freed_at.clone() };
            entry.free.insert(address + bytes, rest);
        }
        entry.usage.used += bytes;
        self.pools.blocks.insert(address, PoolBlock { pool, bytes });
        Ok((address, bytes, free.freed_at))
    }

    /// Adds a segment to a pool. Returns its address.
    fn grow(&mut self, pool: u64, bytes: u64) -> Result<u64, ErrorCode> {
        let segment = bytes.checked_next_multiple_of(SEGMENT).ok_or(codes::OUT_OF_MEMORY)?;
        let device = self.pools.pools.get(pool).ok_or(codes::INVALID_HANDLE)?.device;
        let allocated = self.allocate(device, segment, true).or_else(|_| {
            self.pool_trim(pool, 0);
            self.allocate(device, segment, true)
        });
        let (address, segment) = allocated?;
        let entry = self.pools.pools.get_mut(pool).ok_or(codes::INVALID_HANDLE)?;
        entry.usage.reserved += segment;
        entry.usage.reserved_high = entry.usage.reserved_high.max(entry.usage.reserved);
        entry.segments.insert(address, segment);
        entry.free.insert(address, FreeBlock { bytes: segment, freed_at: Vec::new() });
        Ok(address)
    }

    /// Returns the bytes of an allocated block, and the pool's device.
    pub(crate) fn pool_block(&self, address: u64) -> Option<(u64, DeviceId)> {
        let block = self.pools.blocks.get(&address)?;
        Some((block.bytes, self.pools.pools.get(block.pool)?.device))
    }

    /// Frees a block. It is ready for reuse when `point` is reached.
    pub(crate) fn pool_free(&mut self, address: u64, point: StreamPoint) {
        let Some(block) = self.pools.blocks.remove(&address) else { return };
        if let Some(pool) = self.pools.pools.get_mut(block.pool) {
            pool.usage.used -= block.bytes;
            pool.insert_coalesced(address, FreeBlock { bytes: block.bytes, freed_at: vec![point] });
            if !pool.alive {
                self.release_destroyed_pool(block.pool);
            }
        }
    }

    /// Releases segments that are completely free and whose work is done to the device.
    pub(crate) fn pool_trim(&mut self, pool: u64, keep: u64) {
        let Some(entry) = self.pools.pools.get(pool) else { return };
        let whole: Vec<_> = entry
            .segments
            .iter()
            .filter(|(address, bytes)| {
                entry.free.get(address).is_some_and(|free| free.bytes == **bytes)
            })
            .map(|(&address, &bytes)| (address, bytes))
            .collect();
        for (address, bytes) in whole.into_iter().rev() {
            let Some(entry) = self.pools.pools.get(pool) else { return };
            let done = entry.free[&address]
                .freed_at
                .iter()
                .all(|point| self.reached(point.stream, point.count));
            if entry.usage.reserved <= keep || !done {
                continue;
            }
            let cause = self.current_host_action(ActionKind::Free, "pool trim", caller_site());
            if let Some(entry) = self.pools.pools.get_mut(pool) {
                entry.free.remove(&address);
                entry.segments.remove(&address);
                entry.usage.reserved -= bytes;
            }
            self.deallocate(address, cause);
        }
    }

    /// Releases what is possible of a pool whose handle is destroyed.
    pub(crate) fn release_destroyed_pool(&mut self, pool: u64) {
        self.pool_trim(pool, 0);
        // Segments that are free but still used by queued work stay until that work is done.
        if self.pools.pools.get(pool).is_some_and(|pool| pool.segments.is_empty()) {
            self.pools.pools.remove(pool);
        }
    }

    /// Releases pools whose handles are destroyed and whose last work has run.
    pub(crate) fn release_destroyed_pools(&mut self) {
        for pool in self.pools.pools.handles_where(|pool| !pool.alive) {
            self.release_destroyed_pool(pool);
        }
    }

    /// Returns the number of pools of a device with handles, and the number of blocks allocated
    /// from them.
    pub(crate) fn count_pools(&self, device: DeviceId) -> (u64, u64) {
        let pools =
            self.pools.pools.iter().filter(|pool| pool.device == device && pool.alive).count();
        let of_device = |block: &&PoolBlock| {
            self.pools.pools.get(block.pool).is_some_and(|pool| pool.device == device)
        };
        (pools as u64, self.pools.blocks.values().filter(of_device).count() as u64)
    }
}
