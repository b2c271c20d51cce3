//! What a caller hands in, on its way into a plan.

use super::plan::{HostSide, Part, Way};
use aquifer_core::{MemoryError, Result as MemoryResult};
use aquifer_driver::{DeviceRange, Operand};
use smallvec::SmallVec;
use std::{ops::Range, ptr::NonNull};

/// Parts on their way into a plan.
pub(super) struct Parts {
    pub(super) way: Way,
    /// Most transfers are of one slice.
    pub(super) parts: SmallVec<[Part; 2]>,
    pub(super) total: u64,
    pub(super) range: Option<DeviceRange>,
    /// The machine that the ranges lie on, as far as the operands know.
    pub(super) machine: Option<u64>,
}

/// A range of the device's, and the machine that it lies on.
pub(super) type Place = (DeviceRange, Option<u64>);

/// Where an operand lies.
pub(super) fn place<D: Operand + ?Sized>(operand: &D) -> Place {
    (operand.range(), operand.machine())
}

impl Parts {
    pub(super) fn new(way: Way) -> Self {
        Self { way, parts: SmallVec::new(), total: 0, range: None, machine: None }
    }

    /// Adds slices that follow one another in `place`.
    pub(super) fn slices<T>(
        &mut self,
        slices: impl IntoIterator<Item = NonNull<[T]>>,
        place: Place,
    ) -> MemoryResult<()> {
        let sides = slices.into_iter().map(|slice| {
            let bytes = slice.len() as u64 * size_of::<T>() as u64;
            (HostSide::Memory(slice.cast()), bytes)
        });
        self.add(sides, place)
    }

    /// Adds ranges of the source or sink that follow one another in `place`.
    pub(super) fn ranges(
        &mut self,
        ranges: impl IntoIterator<Item = Range<u64>>,
        place: Place,
    ) -> MemoryResult<()> {
        let sides = ranges
            .into_iter()
            .map(|from| (HostSide::File(from.start), from.end.saturating_sub(from.start)));
        self.add(sides, place)
    }

    fn add(
        &mut self,
        sides: impl Iterator<Item = (HostSide, u64)>,
        (range, machine): Place,
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
            let (from, to) = match self.way {
                Way::Up => (host_bytes, range.bytes),
                Way::Down => (range.bytes, host_bytes),
            };
            return Err(MemoryError::LengthMismatch { from, to });
        }
        self.total += range.bytes;
        // One that lies elsewhere is told of; all others are as the last.
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
