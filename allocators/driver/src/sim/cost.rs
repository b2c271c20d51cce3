//! A model of the driver time of calls, so that a program with fewer calls can be recognised as
//! better without a GPU.

use crate::Call;
use std::fmt;

/// The measured cost of one call by the size it works on: bytes and nanoseconds, ascending.
type CostCurve = &'static [(u64, u64)];

/// A table of call costs.
///
/// Costs are interpolated between two sizes of the table, and extrapolated beyond its ends. Waiting
/// for work is not included.
///
/// ```
/// use aquifer_driver::{Call, sim::Costs};
/// let (h200, a100) = (Costs::h200(), Costs::a100());
/// assert_eq!(h200.of(Call::HandleCreate, 2 << 20), 6_000);
/// assert!(a100.of(Call::HandleCreate, 2 << 20) > 30 * h200.of(Call::HandleCreate, 2 << 20));
/// ```
#[derive(Clone, Copy, PartialEq)]
pub struct Costs {
    create: CostCurve,
    release: CostCurve,
    map: CostCurve,
    unmap: CostCurve,
    set_access: CostCurve,
    /// For each device other than the memory's own, for any size.
    peer_access: u64,
    reserve: CostCurve,
    alloc: CostCurve,
    host_alloc: CostCurve,
    host_free: CostCurve,
    register: CostCurve,
    unregister: CostCurve,
    free_calls: bool,
}

impl fmt::Debug for Costs {
    /// Prints one value, to distinguish tables.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Costs")
            .field("create", &self.of(Call::HandleCreate, 2 * MIB))
            .finish_non_exhaustive()
    }
}

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

impl Costs {
    /// Returns the costs measured on an H200 with driver 580.
    #[must_use]
    pub const fn h200() -> Self {
        Self {
            create: &[(2 * MIB, 6_000), (32 * MIB, 11_600), (512 * MIB, 12_000), (8 * GIB, 53_000)],
            release: &[
                (2 * MIB, 7_900),
                (32 * MIB, 14_500),
                (512 * MIB, 115_000),
                (8 * GIB, 1_861_000),
            ],
            map: &[(2 * MIB, 500), (512 * MIB, 600), (8 * GIB, 800)],
            unmap: &[(2 * MIB, 12_000), (32 * MIB, 19_400), (512 * MIB, 23_300), (8 * GIB, 85_000)],
            set_access: &[
                (2 * MIB, 17_300),
                (32 * MIB, 37_200),
                (512 * MIB, 47_900),
                (8 * GIB, 221_000),
            ],
            peer_access: 1_000_000,
            reserve: &[(2 * MIB, 800), (32 * MIB, 1_600), (8 * GIB, 2_100)],
            // Half the cost of an allocation and a free.
            alloc: &[(256, 27_000), (MIB, 27_000), (64 * MIB, 40_000), (GIB, 205_000)],
            host_alloc: &[
                (4 * KIB, 450_000),
                (MIB, 470_000),
                (64 * MIB, 19_500_000),
                (GIB, 311_000_000),
                (8 * GIB, 4_397_000_000),
            ],
            host_free: &[
                (MIB, 200_000),
                (64 * MIB, 5_000_000),
                (GIB, 80_000_000),
                (8 * GIB, 729_000_000),
            ],
            register: &[
                (4 * KIB, 20_000),
                (256 * MIB, 5_000_000),
                (GIB, 20_000_000),
                (8 * GIB, 160_000_000),
            ],
            unregister: &[(4 * KIB, 15_000), (GIB, 16_000_000), (8 * GIB, 130_000_000)],
            free_calls: false,
        }
    }

    /// Returns the costs reported for an A100, where physical memory is much more expensive to
    /// allocate.
    #[must_use]
    pub const fn a100() -> Self {
        Self {
            create: &[(2 * MIB, 193_000), (32 * MIB, 370_000), (8 * GIB, 1_700_000)],
            map: &[(2 * MIB, 1_450), (8 * GIB, 2_300)],
            set_access: &[(2 * MIB, 36_000), (32 * MIB, 77_000), (8 * GIB, 460_000)],
            unmap: &[(2 * MIB, 25_600), (32 * MIB, 41_000), (8 * GIB, 180_000)],
            ..Self::h200()
        }
    }

    /// Returns the costs of a driver whose calls cost nothing.
    #[must_use]
    pub const fn nothing() -> Self {
        Self { free_calls: true, ..Self::h200() }
    }

    /// Returns the cost of setting access to one mapping of `bytes` for its own device and `peers`
    /// others, in nanoseconds.
    #[must_use]
    pub fn opening(&self, bytes: u64, peers: u32) -> u64 {
        let peers = if self.free_calls { 0 } else { u64::from(peers) };
        self.of(Call::SetAccess, bytes) + peers * self.peer_access
    }

    /// Returns the cost of a call on `bytes`, in nanoseconds. A call on several mappings costs the
    /// sum over the mappings.
    #[must_use]
    pub fn of(&self, call: Call, bytes: u64) -> u64 {
        if self.free_calls {
            return 0;
        }
        match call {
            Call::HandleCreate => interpolate(self.create, bytes),
            Call::HandleExport | Call::HandleImport | Call::DmaBufExport => 10_000,
            Call::HandleRelease => interpolate(self.release, bytes),
            Call::Map => interpolate(self.map, bytes),
            Call::Unmap => interpolate(self.unmap, bytes),
            Call::SetAccess => interpolate(self.set_access, bytes),
            Call::AddressReserve | Call::AddressFree => interpolate(self.reserve, bytes),
            Call::MemAlloc | Call::MemFree => interpolate(self.alloc, bytes),
            Call::HostAlloc => interpolate(self.host_alloc, bytes),
            Call::HostFree => interpolate(self.host_free, bytes),
            Call::HostRegister => interpolate(self.register, bytes),
            Call::HostUnregister => interpolate(self.unregister, bytes),
            Call::PoolAlloc | Call::PoolFree => 280,
            Call::EventCreate | Call::EventDestroy => 73,
            Call::EventRecord => 174,
            Call::EventQuery => 121,
            Call::StreamWaitEvent => 178,
            Call::StreamQuery => 130,
            Call::HostDeviceAddress => 100,
            Call::StreamId | Call::StreamIsCapturing | Call::ExchangeCaptureMode => 15,
            Call::MemoryInfo => 3_560,
            Call::CaptureStatus => 15,
            Call::CaptureBegin | Call::CaptureEnd | Call::GraphRetain => 1_000,
            Call::GraphLaunch => 2_800,
            Call::GraphInstantiate | Call::GraphDestroy | Call::GraphExecDestroy => 10_000,
            Call::CopyToDevice
            | Call::CopyToHost
            | Call::CopyOnDevice
            | Call::Copy2d
            | Call::Fill
            | Call::Fill16
            | Call::Fill32
            | Call::Fill2d
            | Call::Fill2d16
            | Call::Fill2d32 => 1_800,
            Call::StreamCreate
            | Call::StreamDestroy
            | Call::PoolCreate
            | Call::PoolDestroy
            | Call::PoolTrim => 10_000,
            Call::DeviceCount
            | Call::DeviceInfo
            | Call::PointerAttribute
            | Call::DriverVersion
            | Call::StreamPriorities
            | Call::PoolUsage
            | Call::DeviceSynchronize
            | Call::StreamSynchronize
            | Call::EventSynchronize => 100,
        }
    }
}

/// Returns the curve's value at a size.
fn interpolate(curve: CostCurve, bytes: u64) -> u64 {
    let after = curve.partition_point(|&(size, _)| size < bytes);
    let (Some(&(low, low_cost)), Some(&(high, high_cost))) =
        (curve.get(after.saturating_sub(1)), curve.get(after))
    else {
        // Beyond the last size, the cost per byte is constant.
        return curve.last().map_or(0, |&(size, cost)| {
            if bytes > size {
                (u128::from(cost) * u128::from(bytes) / u128::from(size)) as u64
            } else {
                cost
            }
        });
    };
    if after == 0 || high == low {
        return high_cost;
    }
    let share = u128::from(bytes - low) * u128::from(high_cost - low_cost) / u128::from(high - low);
    low_cost + share as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn costs_match_the_measurements_and_are_interpolated() {
        let costs = Costs::h200();
        assert_eq!(costs.of(Call::SetAccess, 2 * MIB), 17_300);
        assert_eq!(costs.of(Call::SetAccess, 8 * GIB), 221_000);
        assert_eq!(costs.opening(2 * MIB, 3), 3_017_300, "a peer costs the same at any size");
        assert_eq!(Costs::nothing().opening(2 * MIB, 3), 0);
        assert_eq!(costs.of(Call::MemAlloc, 1), 27_000);
        let between = costs.of(Call::Unmap, 64 * MIB);
        assert!((19_400..23_300).contains(&between));
        assert_eq!(costs.of(Call::HandleRelease, 16 * GIB), 2 * 1_861_000);
        assert_eq!(Costs::nothing().of(Call::HostAlloc, GIB), 0);
    }
}
