//! Devices and their capabilities.

use crate::{DeviceId, ExportTypes, Result};
use std::{
    fmt::Debug,
    sync::atomic::{AtomicU64, Ordering},
};

/// The number of devices found to be lost.
static LOST_DEVICES: AtomicU64 = AtomicU64::new(0);

/// Returns how many devices, of all drivers of the process, have been [found to be
/// lost](Devices::is_lost) so far. A caller that stores this count needs to query the drivers again
/// only when it has changed.
///
/// For example, a loss by [`Sim::lose_device`](crate::sim::Sim::lose_device) is counted when a call
/// reports it.
#[inline]
#[must_use]
pub fn losses() -> u64 {
    LOST_DEVICES.load(Ordering::Acquire)
}

/// Counts a device that was found to be lost. Its driver reports it as lost from now on.
pub(crate) fn count_lost_device() {
    LOST_DEVICES.fetch_add(1, Ordering::AcqRel);
}

/// The properties and capabilities of a device, read once from the driver.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct DeviceInfo {
    /// The device.
    pub device: DeviceId,
    /// The model, as named by the driver.
    pub name: String,
    /// Memory, in bytes.
    pub memory: u64,
    /// Compute capability, major and minor.
    pub compute_capability: (u32, u32),
    /// Domain, bus, device and function in lower case: `0000:1b:00.0`. `None` if the driver does
    /// not report it.
    pub pci_address: Option<String>,
    /// The identity of the device, or of the part of one (MIG) that is used as a device. It is the
    /// same in all processes, whichever devices they see. `None` if the driver does not report it.
    pub uuid: Option<[u8; 16]>,
    /// The NUMA node of the host that the driver reports as nearest. `None` if it does not report
    /// one.
    pub host_node: Option<u32>,
    /// The NUMA node of the device's own memory, if the host's kernel allocates from it (coherent
    /// links). `None` for memory behind a bus, and if the driver is too old to report it.
    pub memory_node: Option<u32>,
    /// Whether address ranges and physical handles can be allocated separately (virtual memory
    /// management).
    pub virtual_memory: bool,
    /// Size and alignment of physical handles, in bytes. 0 without virtual memory management.
    pub granularity: u64,
    /// The export types that the device supports for its physical memory. The system may still
    /// forbid some of them.
    pub export_types: ExportTypes,
    /// Whether the driver's stream-ordered pools are supported.
    pub async_pools: bool,
    /// Whether the device shares the host's memory instead of having its own.
    pub integrated: bool,
    /// The devices whose memory its kernels could access after peer access is enabled
    /// (`cuDeviceCanAccessPeer`).
    pub peers: Vec<DeviceId>,
}

impl DeviceInfo {
    /// Creates the description of a device from these properties. The others have defaults and can
    /// be set.
    #[must_use]
    pub fn new(device: DeviceId, name: String, memory: u64) -> Self {
        Self {
            device,
            name,
            memory,
            compute_capability: (0, 0),
            pci_address: None,
            uuid: None,
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

/// The driver's own count of a device's memory. It is advisory, since other programs allocate and
/// free concurrently.
///
/// See [`StallGuard`](crate::sim::StallGuard) for an example of [`Devices::memory_info`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MemoryInfo {
    /// Free bytes.
    pub free: u64,
    /// All bytes.
    pub total: u64,
}

/// Driver calls for devices.
///
/// # Safety
/// 1. After [`Devices::device_synchronize`] has returned `Ok`, all work queued on the device before
///    the call is done.
/// 2. The alignment, granularity and peers that [`Devices::device_info`] returns hold for the calls
///    of the other families.
/// 3. [`Devices::is_lost`], and a [sticky error](crate::DriverError::is_device_lost) of any call
///    for a device, are reported only if no work queued there runs any more.
#[expect(unsafe_code, reason = "declares a trait whose results are trusted; holds no unsafe block")]
pub unsafe trait Devices: Debug + Send + Sync {
    /// Returns the number of devices that are visible to this process (`cuDeviceGetCount`).
    ///
    /// # Errors
    /// Errors of the driver.
    fn device_count(&self) -> Result<u32>;

    /// Returns the properties of a device (`cuDeviceGetAttribute` and others). The first call for a
    /// device may create its primary context, which takes hundreds of megabytes on the device and a
    /// fraction of a second.
    ///
    /// # Errors
    /// Invalid device for an ordinal that does not exist.
    fn device_info(&self, device: DeviceId) -> Result<DeviceInfo>;

    /// Returns the free and total memory (`cuMemGetInfo`, about 3.6 µs).
    ///
    /// # Errors
    /// Errors of the driver.
    fn memory_info(&self, device: DeviceId) -> Result<MemoryInfo>;

    /// Returns the version of the driver's interface, such as 13000 for CUDA 13.0
    /// (`cuDriverGetVersion`).
    ///
    /// # Errors
    /// Errors of the driver.
    fn driver_version(&self) -> Result<u32>;

    /// Returns whether any call for the device has returned a [sticky
    /// error](crate::DriverError::is_device_lost) so far. Makes no call, so a loss that no call has
    /// reported yet is not known.
    fn is_lost(&self, device: DeviceId) -> bool;

    /// Returns the device whose primary context is current on the calling thread
    /// (`cuCtxGetCurrent`), if this driver has retained that context.
    fn current_device(&self) -> Option<DeviceId> {
        None
    }

    /// Waits until all work queued on the device is done (`cuCtxSynchronize`). Blocks.
    ///
    /// # Errors
    /// Errors of the driver, and those of work queued before.
    fn device_synchronize(&self, device: DeviceId) -> Result<()>;
}
