//! Errors of placement: why no device was found.

use aquifer_core::{Bytes, DeviceId, MemoryError, OutOfBudget};
use std::{error, fmt, time::Duration};

/// Why a device was not taken.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum RejectReason {
    /// It is excluded, or not among the allowed devices.
    Excluded,
    /// Its compute capability is too low.
    Compute {
        /// The capability of the device.
        has: (u32, u32),
        /// The required capability.
        needs: (u32, u32),
    },
    /// It cannot reach a required device.
    Unreachable {
        /// The device that it cannot reach.
        peer: DeviceId,
    },
    /// Too little is free.
    Free {
        /// Bytes that must be free.
        needs: u64,
    },
    /// It receives no new requests.
    Draining,
    /// It is lost.
    Lost,
    /// Its budget refused the reservation.
    Budget(OutOfBudget),
    /// Its pool could not make room.
    Pool(MemoryError),
    /// The policy did not return it.
    NotNamed,
    /// No group with it exists: too few other devices, or they are not peers.
    Alone,
}

/// A device that was not taken, its figures and the reason.
///
/// [`NoFit`] has an example.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RejectedDevice {
    /// The device.
    pub device: DeviceId,
    /// Its generation.
    pub generation: u32,
    /// Its free bytes.
    pub free: u64,
    /// The age of the driver's part of `free`.
    pub age: Duration,
    /// The reason.
    pub why: RejectReason,
}

/// No device was found. Lists each device with the reason; the text has one line for each.
///
/// See [`PlaceError`] for an example.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct NoFit {
    /// The requested bytes per shard.
    pub requested: u64,
    /// The number of shards.
    pub shards: usize,
    /// Every device, in order.
    pub devices: Vec<RejectedDevice>,
}

/// Why nothing was placed. Nothing is reserved.
///
/// ```
/// use aquifer::{PlacementRequest, PlaceError, Policy, Runtime, placement::RejectReason, sim::Sim};
/// let rt = Runtime::builder().driver(Sim::h200(1).driver()).device_budget(1 << 30).build()?;
/// let Err(PlaceError::Nowhere(nowhere)) = rt.placer(Policy::MostFree).place(&PlacementRequest::bytes(2 << 30)) else {
///     panic!("there is no room")
/// };
/// assert_eq!(nowhere.devices[0].why, RejectReason::Free { needs: 2 << 30 });
/// # Ok::<(), aquifer::MemoryError>(())
/// ```
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum PlaceError {
    /// A request for zero bytes or zero shards.
    ZeroSize,
    /// No device satisfies the hints and has room.
    Nowhere(Box<NoFit>),
    /// A custom policy panicked.
    PolicyPanicked {
        /// The name of the policy.
        policy: &'static str,
    },
}

impl From<MemoryError> for RejectReason {
    fn from(error: MemoryError) -> Self {
        match error {
            MemoryError::OutOfBudget(refused) => Self::Budget(refused),
            MemoryError::DeviceLost { .. } => Self::Lost,
            other => Self::Pool(other),
        }
    }
}

impl fmt::Display for RejectReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Excluded => f.write_str("excluded"),
            Self::Compute { has, needs } => {
                write!(f, "compute capability {}.{}, {}.{} asked", has.0, has.1, needs.0, needs.1)
            }
            Self::Unreachable { peer } => write!(f, "cannot reach {peer}"),
            Self::Free { needs } => write!(f, "{} needed", Bytes(*needs)),
            Self::Draining => f.write_str("draining"),
            Self::Lost => f.write_str("lost"),
            Self::Budget(refused) => refused.fmt(f),
            Self::Pool(error) => error.fmt(f),
            Self::NotNamed => f.write_str("not named by the policy"),
            Self::Alone => f.write_str("too few others to go with it"),
        }
    }
}

impl fmt::Display for NoFit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.shards {
            1 => write!(f, "no device for {}", Bytes(self.requested))?,
            shards => write!(f, "no devices for {shards} times {}", Bytes(self.requested))?,
        }
        for passed in &self.devices {
            let RejectedDevice { device, free, age, why, .. } = passed;
            write!(f, "\n  {device}: {} free, {} ms ago: {why}", Bytes(*free), age.as_millis())?;
        }
        Ok(())
    }
}

aquifer_core::__debug_as_display!(PlaceError);

impl fmt::Display for PlaceError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::ZeroSize => f.write_str("a request for nothing"),
            Self::Nowhere(nowhere) => nowhere.fmt(f),
            Self::PolicyPanicked { policy } => {
                write!(f, "the placement policy {policy} has panicked")
            }
        }
    }
}

impl error::Error for PlaceError {}

impl From<PlaceError> for MemoryError {
    /// Converts to the closest library error: the budget's or pool's refusal if there was one, the
    /// loss if all devices are lost, otherwise that there is no such device. The list of devices is
    /// dropped.
    fn from(error: PlaceError) -> Self {
        let devices = match error {
            PlaceError::ZeroSize => return Self::ZeroSize,
            PlaceError::PolicyPanicked { policy } => {
                let expected = "a placement policy that does not panic";
                return Self::BadSetting { name: "policy", value: policy.to_owned(), expected };
            }
            PlaceError::Nowhere(nowhere) => nowhere.devices,
        };
        let refused = devices.iter().find_map(|passed| match &passed.why {
            RejectReason::Budget(refused) => Some(Self::OutOfBudget(*refused)),
            RejectReason::Pool(error) => Some(error.clone()),
            _ => None,
        });
        if let Some(refused) = refused {
            return refused;
        }
        match devices.first() {
            Some(first) if devices.iter().all(|passed| passed.why == RejectReason::Lost) => {
                Self::DeviceLost { device: first.device }
            }
            _ => {
                Self::NoDevice { asked: 0, count: u32::try_from(devices.len()).unwrap_or(u32::MAX) }
            }
        }
    }
}
