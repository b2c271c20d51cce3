//! What devices there are and what they can do.

use crate::{DeviceId, ExportTypes, Result};
use std::{
    fmt::Debug,
    sync::atomic::{AtomicU64, Ordering},
};

/// Devices that were seen to be lost.
static LOSSES: AtomicU64 = AtomicU64::new(0);

/// How many devices, of all drivers of the process, have been [seen to be lost](Devices::is_lost)
/// so far. Whoever has seen a count has to ask the drivers again only when it has changed.
///
/// Its example is that of [`Sim::lose_device`](crate::sim::Sim::lose_device), which it would count.
#[inline]
#[must_use]
pub fn losses() -> u64 {
    LOSSES.load(Ordering::Acquire)
}

/// A device is seen to be lost, and its driver says so from now on.
pub(crate) fn count_loss() {
    LOSSES.fetch_add(1, Ordering::AcqRel);
}

/// What a device is and can do. Read once, at the driver's word.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct DeviceInfo {
    /// Which.
    pub device: DeviceId,
    /// The model, as the driver calls it.
    pub name: String,
    /// Memory, in bytes.
    pub memory: u64,
    /// Compute capability, major and minor.
    pub compute_capability: (u32, u32),
    /// Domain, bus, device and function, lower case: `0000:1b:00.0`. `None` where the driver does
    /// not tell.
    pub pci_address: Option<String>,
    /// The NUMA node of the host that the driver names as nearest. `None` where it does not tell.
    pub host_node: Option<u32>,
    /// The NUMA node that the device's own memory is, where the host's kernel hands it out
    /// (coherent links). `None` for memory behind a bus, and where the driver is too old to tell.
    pub memory_node: Option<u32>,
    /// Whether address ranges and physical handles can be had apart (virtual memory management).
    pub virtual_memory: bool,
    /// Size and alignment of physical handles, in bytes; 0 without virtual memory management.
    pub granularity: u64,
    /// For whom its physical memory can be made, as the device tells; the system may forbid some
    /// of it all the same.
    pub export_types: ExportTypes,
    /// Whether the driver's stream-ordered pools are there.
    pub async_pools: bool,
    /// Whether the device shares the host's memory instead of having its own.
    pub integrated: bool,
    /// The devices whose memory its kernels could reach, if that were opened to it
    /// (`cuDeviceCanAccessPeer`).
    pub peers: Vec<DeviceId>,
}

impl DeviceInfo {
    /// A device about which only this is known; fill in the rest.
    #[must_use]
    pub fn new(device: DeviceId, name: String, memory: u64) -> Self {
        Self {
            device,
            name,
            memory,
            compute_capability: (0, 0),
            pci_address: None,
            host_node: None,
            memory_node: None,
            virtual_memory: false,
            granularity: 0,
            export_types: ExportTypes::NONE,
            async_pools: false,
            integrated: false,
            peers: Vec::new(),
        }
    }
}

/// The driver's own count of a device's memory: advice, since other programs take and give
/// meanwhile.
///
/// Its example is that of [`Driver`](crate::Driver).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MemoryInfo {
    /// Bytes that nobody holds.
    pub free: u64,
    /// Bytes there are.
    pub total: u64,
}

/// Devices.
///
/// # Safety
/// 1. After [`Devices::device_synchronize`] has answered `Ok`, all that was queued on the device
///    before the call is done.
/// 2. What [`Devices::device_info`] says of alignment, granularity and peers holds for the calls of
///    the other families.
/// 3. [`Devices::is_lost`], and a [sticky error](crate::DriverError::is_device_lost) of any call
///    for a device, are told only where nothing that was queued there runs any more.
#[expect(unsafe_code, reason = "declares a trait whose answers are trusted; holds no unsafe block")]
pub unsafe trait Devices: Debug + Send + Sync {
    /// How many devices the driver shows to this process (`cuDeviceGetCount`).
    ///
    /// # Errors
    /// The driver's.
    fn device_count(&self) -> Result<u32>;

    /// What a device is and can do (`cuDeviceGetAttribute` and others). The first call for a device
    /// may take its primary context, which takes hundreds of megabytes on the device and a fraction
    /// of a second.
    ///
    /// # Errors
    /// Invalid device for an ordinal that is not there.
    fn device_info(&self, device: DeviceId) -> Result<DeviceInfo>;

    /// Free and total memory (`cuMemGetInfo`, about 3.6 µs).
    ///
    /// # Errors
    /// The driver's.
    fn memory_info(&self, device: DeviceId) -> Result<MemoryInfo>;

    /// The version of the driver's interface: 13000 for CUDA 13.0 (`cuDriverGetVersion`).
    ///
    /// # Errors
    /// The driver's.
    fn driver_version(&self) -> Result<u32>;

    /// Whether any call for the device has answered with a [sticky
    /// error](crate::DriverError::is_device_lost) so far. Makes no call: a loss that nobody has met
    /// yet is not known.
    fn is_lost(&self, device: DeviceId) -> bool;

    /// Waits for everything queued on the device (`cuCtxSynchronize`). Blocks.
    ///
    /// # Errors
    /// The driver's, and those of work queued before.
    fn device_synchronize(&self, device: DeviceId) -> Result<()>;
}
