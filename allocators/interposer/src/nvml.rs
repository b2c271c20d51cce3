//! The driver's own memory on a device: contexts, modules, libraries. It is what NVML counts for
//! this process beyond what was allocated. And what all processes use of a device.

use nvml_wrapper::{Nvml, enums::device::UsedGpuMemory};
use std::{process, sync::OnceLock};

/// The driver's own memory on one device.
#[derive(Default)]
pub(crate) struct Own {
    /// The PCI address, if NVML counts this process there.
    address: Option<String>,
    /// Bytes before the first allocation, or 0 where they are not known.
    pub(crate) at_start: u64,
}

fn nvml() -> Option<&'static Nvml> {
    static NVML: OnceLock<Option<Nvml>> = OnceLock::new();
    NVML.get_or_init(|| Nvml::builder().lib_path("libnvidia-ml.so.1".as_ref()).init().ok()).as_ref()
}

/// Returns the bytes of a device that nothing uses, if NVML tells them.
pub(crate) fn free(address: &str) -> Option<u64> {
    Some(nvml()?.device_by_pci_bus_id(address).ok()?.memory_info().ok()?.free)
}

/// Returns the bytes that this process has on a device.
fn used(address: &str) -> Option<u64> {
    let processes = nvml()?.device_by_pci_bus_id(address).ok()?.running_compute_processes().ok()?;
    let this = processes.into_iter().find(|found| found.pid == process::id())?;
    match this.used_gpu_memory {
        UsedGpuMemory::Used(bytes) => Some(bytes),
        UsedGpuMemory::Unavailable => None,
    }
}

impl Own {
    /// Measures the device at a PCI address, before anything is allocated there.
    pub(crate) fn of(address: Option<&str>) -> Self {
        match address.and_then(|address| Some((address, used(address)?))) {
            Some((address, at_start)) => Self { address: Some(address.to_owned()), at_start },
            None => Self::default(),
        }
    }

    /// Returns the driver's own memory now, where `held` was allocated.
    pub(crate) fn now(&self, held: u64) -> u64 {
        let used = self.address.as_deref().and_then(used);
        used.map_or(self.at_start, |used| used.saturating_sub(held))
    }
}
