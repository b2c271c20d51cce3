//! Where memory is.

use crate::DeviceId;

/// The kind of memory, and the device or the NUMA node that it belongs to.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize), serde(rename_all = "lowercase"))]
#[non_exhaustive]
pub enum MemoryLocation {
    /// Memory of a device.
    Device(DeviceId),
    /// Pinned memory of a NUMA node, or of an unknown node.
    Host(Option<u32>),
    /// The global allocator.
    Global,
}
