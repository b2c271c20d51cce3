//! Which ways to other processes, devices and machines work for a device's memory, by trying each.
//!
//! | transport | what is tried |
//! |---|---|
//! | legacy IPC | an allocation of the driver, asked whether `cuIpcGetMemHandle` accepts it |
//! | descriptors | a handle that is created for it, exported, imported and mapped |
//! | fabric | a handle that is created for it |
//! | dma-buf | the allocation, exported for drivers of network cards |
//! | peers | what the driver says of other devices' kernels |
#![expect(unsafe_code, reason = "creates, maps and releases small driver resources")]

use aquifer_driver::{
    DeviceInfo, Driver, DriverError, ExportTypes, PhysicalHandle, Result as DriverResult,
};
use std::{os::fd::AsFd, sync::Arc};

/// A way by which memory of a device is used elsewhere.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Transport {
    LegacyIpc,
    Descriptors,
    Fabric,
    DmaBuf,
}

/// What came of trying a transport.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum TransportTrial {
    Works,
    /// The driver accepts the memory for others, but not for this.
    Refused,
    Failed(DriverError),
}

impl Transport {
    const ALL: [Self; 4] = [Self::LegacyIpc, Self::Descriptors, Self::Fabric, Self::DmaBuf];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::LegacyIpc => "legacy IPC",
            Self::Descriptors => "descriptors",
            Self::Fabric => "fabric handles",
            Self::DmaBuf => "dma-buf",
        }
    }

    /// Tries it with the smallest memory that the device has.
    fn attempt(self, driver: &Arc<dyn Driver>, info: &DeviceInfo) -> DriverResult<bool> {
        let device = info.device;
        match self {
            Self::LegacyIpc | Self::DmaBuf => {
                // Whole pages of the host, on any of its page sizes.
                let bytes = 2 << 20;
                let address = driver.mem_alloc(device, bytes)?;
                let works = match self {
                    Self::LegacyIpc => driver.is_legacy_ipc_capable(device, address),
                    _ => driver.dma_buf_export(device, address, bytes).map(|_| true),
                };
                // SAFETY: 1. It came from `mem_alloc` and is freed here only. 2. No work uses it.
                let freed = unsafe { driver.mem_free(device, address) };
                works.and_then(|works| freed.map(|()| works))
            }
            Self::Fabric => {
                let bytes = info.granularity;
                let handle = driver.handle_create(device, bytes, ExportTypes::FABRIC)?;
                release(driver, handle).map(|()| true)
            }
            Self::Descriptors => {
                let bytes = info.granularity;
                let handle = driver.handle_create(device, bytes, ExportTypes::POSIX_FD)?;
                let file = driver.handle_export(handle);
                let imported = file.and_then(|file| {
                    // SAFETY: 1. No work uses the memory.
                    unsafe { driver.handle_import(device, file.as_fd()) }
                });
                let works = imported.and_then(|imported| {
                    let works = map(driver, info, imported).map(|()| true);
                    release(driver, imported).and(works)
                });
                let released = release(driver, handle);
                works.and_then(|works| released.map(|()| works))
            }
        }
    }
}

/// Maps a handle and unmaps it.
fn map(driver: &Arc<dyn Driver>, info: &DeviceInfo, handle: PhysicalHandle) -> DriverResult<()> {
    let (device, bytes) = (info.device, info.granularity);
    let address = driver.address_reserve(device, bytes, bytes)?;
    // SAFETY: 1. The range is new, so nothing is mapped there.
    let mapped = unsafe { driver.map(address, bytes, handle) }.and_then(|()| {
        let opened = driver.set_access(address, bytes, &[device]);
        // SAFETY: 1. No work uses the range.
        unsafe { driver.unmap(device, address, bytes) }.and(opened)
    });
    // SAFETY: 1. The range was reserved here, and nothing is mapped in it if all went well. What
    // the driver refuses to free stays until the process ends soon after.
    unsafe { driver.address_free(device, address, bytes) }.and(mapped)
}

fn release(driver: &Arc<dyn Driver>, handle: PhysicalHandle) -> DriverResult<()> {
    // SAFETY: 1. The handle was created or imported here, and is not used afterwards.
    unsafe { driver.handle_release(handle) }
}

/// Tries all transports of a device. Those of mapped memory are left out without it.
pub(crate) fn attempt_all(
    driver: &Arc<dyn Driver>,
    info: &DeviceInfo,
) -> Vec<(Transport, TransportTrial)> {
    let is_mapped =
        |transport: &Transport| matches!(transport, Transport::Descriptors | Transport::Fabric);
    let transports = Transport::ALL.into_iter();
    let tried = transports.filter(|transport| info.granularity > 0 || !is_mapped(transport));
    tried
        .map(|transport| {
            let trial = match transport.attempt(driver, info) {
                Ok(true) => TransportTrial::Works,
                Ok(false) => TransportTrial::Refused,
                Err(error) => TransportTrial::Failed(error),
            };
            (transport, trial)
        })
        .collect()
}

/// Returns one line on the transports that work and one on those that do not, each if there is one.
pub(super) fn lines(
    info: &DeviceInfo,
    trials: &[(Transport, TransportTrial)],
) -> [Option<String>; 2] {
    let works = trials.iter().filter(|(_, trial)| *trial == TransportTrial::Works);
    let mut ways: Vec<String> = works.map(|(way, _)| way.name().to_owned()).collect();
    if !info.peers.is_empty() {
        ways.push(format!("kernels of {} other devices", info.peers.len()));
    }
    let refused = trials.iter().filter_map(|(way, trial)| match trial {
        TransportTrial::Works => None,
        TransportTrial::Refused => Some(format!("{} (refused)", way.name())),
        TransportTrial::Failed(error) => {
            Some(format!("{} ({} {})", way.name(), error.call, error.name))
        }
    });
    let refused: Vec<String> = refused.collect();
    let line = |head: &str, ways: &[String]| {
        (!ways.is_empty()).then(|| format!("memory of {}: {head} {}", info.device, ways.join(", ")))
    };
    [line("goes elsewhere by", &ways), line("does not go elsewhere by", &refused)]
}

#[cfg(test)]
mod tests {
    use super::*;
    use aquifer_driver::{Call, sim::Sim};

    #[test]
    fn each_transport_is_tried_and_leaves_nothing() {
        let sim = Sim::h200(1);
        let driver = sim.driver();
        let info = driver.device_info(aquifer_driver::DeviceId(0)).unwrap();
        let trials = attempt_all(&driver, &info);
        let [works, refused] = lines(&info, &trials);
        assert_eq!(
            works.as_deref(),
            Some("memory of device 0: goes elsewhere by legacy IPC, descriptors")
        );
        let refused = refused.unwrap();
        assert!(
            refused.contains("fabric handles (cuMemCreate CUDA_ERROR_NOT_SUPPORTED)"),
            "{refused}"
        );
        assert!(refused.contains("dma-buf (cuMemGetHandleForAddressRange"), "{refused}");
        // A call that fails is named, and what was created before it is released.
        for call in [Call::HandleExport, Call::HandleImport, Call::Map, Call::SetAccess] {
            sim.fail(call, 1, 999);
            let trials = attempt_all(&driver, &info);
            let failed = |(way, trial): &(Transport, TransportTrial)| match trial {
                TransportTrial::Failed(error) if *way == Transport::Descriptors => Some(error.call),
                _ => None,
            };
            assert_eq!(trials.iter().find_map(failed), Some(call.name()));
            assert!(sim.outstanding().is_empty(), "{call:?}: {}", sim.outstanding());
        }
        assert!(sim.violations().is_empty());
    }
}
