//! The operands of a call, collected for a plan.

use super::plan::{Direction, HostEnd, Part};
use aquifer_core::{MemoryError, Result as MemoryResult};
use aquifer_driver::{DeviceRange, Operand};
use smallvec::SmallVec;
use std::{ops::Range, ptr::NonNull};

/// The parts of a transfer, before they become a plan.
pub(super) struct Parts {
    pub(super) direction: Direction,
    /// Most transfers consist of one slice.
    pub(super) parts: SmallVec<[Part; 2]>,
    pub(super) total: u64,
    pub(super) range: Option<DeviceRange>,
    /// The machine of the range, if the operand reports one.
    pub(super) machine: Option<u64>,
}

/// A range of device memory, and its machine.
pub(super) type DeviceLocation = (DeviceRange, Option<u64>);

/// Returns the place of an operand.
pub(super) fn device_location<D: Operand + ?Sized>(operand: &D) -> DeviceLocation {
    (operand.range(), operand.machine())
}

impl Parts {
    /// Collects slices that are contiguous in `location`.
    pub(super) fn of_slices<T>(
        direction: Direction,
        slices: impl IntoIterator<Item = NonNull<[T]>>,
        location: DeviceLocation,
    ) -> MemoryResult<Self> {
        let sides = slices.into_iter().map(|slice| {
            let bytes = slice.len() as u64 * size_of::<T>() as u64;
            (HostEnd::Memory(slice.cast()), bytes)
        });
        Self::new(direction, sides, location)
    }

    /// Collects ranges of the source or sink that are contiguous in `location`.
    pub(super) fn of_ranges(
        direction: Direction,
        ranges: impl IntoIterator<Item = Range<u64>>,
        location: DeviceLocation,
    ) -> MemoryResult<Self> {
        let sides = ranges
            .into_iter()
            .map(|from| (HostEnd::File(from.start), from.end.saturating_sub(from.start)));
        Self::new(direction, sides, location)
    }

    fn new(
        direction: Direction,
        sides: impl Iterator<Item = (HostEnd, u64)>,
        (range, machine): DeviceLocation,
    ) -> MemoryResult<Self> {
        let mut parts = SmallVec::new();
        let (mut device, mut host_bytes) = (range.address, 0u64);
        for (host, bytes) in sides {
            host_bytes = host_bytes.saturating_add(bytes);
            if host_bytes > range.bytes {
                continue;
            }
            parts.push(Part { host, device, bytes });
            device += bytes;
        }
        if host_bytes != range.bytes {
            let (from, to) = match direction {
                Direction::Upload => (host_bytes, range.bytes),
                Direction::Download => (range.bytes, host_bytes),
            };
            return Err(MemoryError::LengthMismatch { from, to });
        }
        Ok(Self { direction, parts, total: range.bytes, range: Some(range), machine })
    }
}
