//! The figures of an out-of-memory error.

use super::DriverError;
use crate::{
    OutOfBudget,
    budget::{Holding, Raise, hooks::Tried},
};
use std::error;

/// Memory that another stream's cache holds.
///
/// See the example of [`OutOfMemory`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct Stranded {
    /// The stream's number in its pool.
    pub stream: u32,
    /// Free bytes in its cache.
    pub cached: u64,
    /// Freed bytes that are pending on other streams' work.
    pub pending: u64,
}

/// Freed memory that is still in use by the queued work of a stream.
///
/// See the example of [`OutOfMemory`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct InUse {
    /// The stream's number in its pool.
    pub stream: u32,
    /// Bytes of freed blocks. A block that several streams use counts for each of them.
    pub bytes: u64,
}

/// The live bytes of one tenant.
///
/// See the example of [`OutOfMemory`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct TenantHolding {
    /// The name of its budget.
    pub name: &'static str,
    /// Bytes in live blocks, over all pools that charge this tenant.
    pub live: u64,
    /// Its limit, in bytes.
    pub limit: u64,
}

/// Out of memory, with the figures that explain it. Its text ends with one recommended action, the
/// [`Remedy`](crate::error::Remedy). With the feature `serde` it is `Serialize`, for logs that a
/// program reads.
///
/// ```
/// use aquifer::{Budget, OutOfMemory};
/// let device = Budget::new("the device", 100);
/// let mut error = OutOfMemory::new("device 0".into(), 300);
/// error.refused = device.charge(300).err();
/// assert!(error.to_string().ends_with("raise the limit of the device to 300 B, or ask for less at a time"));
/// ```
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct OutOfMemory {
    /// The place, such as `device 0` or `node 1`.
    pub place: String,
    /// Bytes requested.
    pub requested: u64,
    /// The budget's refusal, if a budget refused.
    pub refused: Option<OutOfBudget>,
    /// Whether `refused` limits the live bytes of a tenant or a tag. Free memory of the pool does
    /// not help then. Only the reclaimers registered with that budget were called.
    pub of_live_bytes: bool,
    /// Whether the request needs whole handles or allocations of the driver, as stable, reserved,
    /// parkable and graphs' memory does. Free parts of caches do not help then, on any stream.
    pub of_whole_handles: bool,
    /// The driver's refusal, if the driver refused.
    pub driver: Option<DriverError>,
    /// The limits that are too low, starting with the one that refused. With all of them raised,
    /// no limit refuses the request. Empty if unknown.
    pub raise: Vec<Raise>,
    /// The total memory of the place, in bytes. 0 if unknown.
    pub capacity: u64,
    /// Bytes in live blocks.
    pub live: u64,
    /// Free bytes in caches.
    pub cached: u64,
    /// Freed bytes that are pending on other streams' work.
    pub pending: u64,
    /// Bytes of `physical` held for graphs, live or free. Other requests cannot use them while the
    /// graphs exist.
    pub graphs: u64,
    /// Bytes held from the driver or the kernel.
    pub physical: u64,
    /// The largest free range, in bytes.
    pub largest_free: u64,
    /// The largest request of the same kind that would succeed now, in bytes. 0 if none would, or
    /// if unknown.
    pub available: u64,
    /// The contents of every other stream's cache, largest first.
    pub stranded: Vec<Stranded>,
    /// The streams whose queued work still uses freed bytes, pending or cached, largest first.
    pub in_use: Vec<InUse>,
    /// The tags with the most live bytes, largest first. Includes memory with its own addresses.
    pub holders: Vec<Holding>,
    /// The tenants and limited tags with the most live bytes, largest first.
    pub tenants: Vec<TenantHolding>,
    /// The steps of the slow allocation path, in order.
    pub tried: Vec<Tried>,
}

impl OutOfMemory {
    /// Creates an error with the figures of the request alone. The caller fills in the rest.
    #[must_use]
    pub fn new(place: String, requested: u64) -> Self {
        Self {
            place,
            requested,
            refused: None,
            of_live_bytes: false,
            of_whole_handles: false,
            driver: None,
            raise: Vec::new(),
            capacity: 0,
            live: 0,
            cached: 0,
            pending: 0,
            physical: 0,
            graphs: 0,
            largest_free: 0,
            available: 0,
            stranded: Vec::new(),
            in_use: Vec::new(),
            holders: Vec::new(),
            tenants: Vec::new(),
            tried: Vec::new(),
        }
    }

    /// Returns whether the request exceeds the total memory of the place.
    pub(super) fn exceeds_capacity(&self) -> bool {
        self.capacity > 0 && self.requested > self.capacity
    }
}

impl error::Error for OutOfMemory {}
