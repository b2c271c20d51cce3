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
    /// The machine of the ranges, if the operands report one.
    pub(super) machine: Option<u64>,
}

/// A range of device memory, and its machine.
pub(super) type DeviceLocation = (DeviceRange, Option<u64>);

/// Returns the place of an operand.
pub(super) fn device_location<D: Operand + ?Sized>(operand: &D) -> DeviceLocation {
    (operand.range(), operand.machine())
}

impl Parts {
    pub(super) fn new(direction: Direction) -> Self {
        Self { direction, parts: SmallVec::new(), total: 0, range: None, machine: None }
    }

    /// Adds slices that are contiguous in `location`.
    pub(super) fn slices<T>(
        &mut self,
        slices: impl IntoIterator<Item = NonNull<[T]>>,
        location: DeviceLocation,
    ) -> MemoryResult<()> {
        let sides = slices.into_iter().map(|slice| {
            let bytes = slice.len() as u64 * size_of::<T>() as u64;
            (HostEnd::Memory(slice.cast()), bytes)
        });
        self.add(sides, location)
    }

    /// Adds ranges of the source or sink that are contiguous in `location`.
    pub(super) fn ranges(
        &mut self,
        ranges: impl IntoIterator<Item = Range<u64>>,
        location: DeviceLocation,
    ) -> MemoryResult<()> {
        let sides = ranges
            .into_iter()
            .map(|from| (HostEnd::File(from.start), from.end.saturating_sub(from.start)));
        self.add(sides, location)
    }

    fn add(
        &mut self,
        sides: impl Iterator<Item = (HostEnd, u64)>,
        (range, machine): DeviceLocation,
    ) -> MemoryResult<()> {
        let mut device = range.address;
        let mut host_bytes = 0u64;
        for (host, bytes) in sides {
            host_bytes = host_bytes.saturating_add(bytes);
            if host_bytes > range.bytes {
                continue;
            }
            self.parts.push(Part { host, device, bytes });
            device += bytes;
        }
        if host_bytes != range.bytes {
            let (from, to) = match self.direction {
                Direction::Upload => (host_bytes, range.bytes),
                Direction::Download => (range.bytes, host_bytes),
            };
            return Err(MemoryError::LengthMismatch { from, to });
        }
        self.total += range.bytes;
        // A range on another device is an error. Otherwise every range matches the last one.
        match self.range {
            Some(other) if other.device != range.device => {
                Err(MemoryError::WrongDevice { expected: other.device, actual: range.device })
            }
            _ => match (self.machine, machine) {
                (Some(expected), Some(actual)) if expected != actual => {
                    Err(MemoryError::OtherMachine { expected, actual })
                }
                _ => {
                    self.machine = self.machine.or(machine);
                    self.range = Some(range);
                    Ok(())
                }
            },
        }
    }
}
