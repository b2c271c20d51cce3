//! [`Devices`] of CUDA.
#![expect(unsafe_code, reason = "calls the CUDA driver")]

use super::{
    CudaDriver,
    abi::{AllocationProperties, Attribute, GRANULARITY_MINIMUM},
    codes::check,
    context::{PrimaryContext, current_context},
};
use crate::{Call, DeviceId, DeviceInfo, Devices, MemoryInfo, Result};
use std::ffi::{CStr, c_char, c_int};

/// The size of a buffer for a name or address from the driver.
const TEXT_SIZE: usize = 256;

/// Returns the text that the driver wrote into a zeroed buffer. The driver may have filled the
/// buffer without a terminating zero.
fn text_from(buffer: &[u8; TEXT_SIZE]) -> String {
    CStr::from_bytes_until_nul(buffer).map_or_else(
        |_| String::from_utf8_lossy(buffer).into_owned(),
        |text| text.to_string_lossy().into_owned(),
    )
}

impl CudaDriver {
    fn attribute(&self, device: i32, attribute: Attribute) -> Result<i32> {
        let mut value = 0;
        // SAFETY: 1. `value` is writable. 2. The driver enumerated the device. An unknown attribute
        // is refused.
        let code =
            unsafe { (self.functions.device_attribute)(&raw mut value, attribute as u32, device) };
        check("cuDeviceGetAttribute", code).map(|()| value)
    }

    /// Returns whether a device has a feature. The driver returns 0 for a missing feature, and an
    /// error for an attribute that it is too old to know. Both count as missing.
    fn has_attribute(&self, device: i32, attribute: Attribute) -> bool {
        self.attribute(device, attribute).is_ok_and(|value| value > 0)
    }

    fn name_of(&self, device: i32) -> Result<String> {
        let mut buffer = [0u8; TEXT_SIZE];
        // SAFETY: 1. The buffer is writable for the given length. 2. The driver enumerated the
        // device.
        let code = unsafe {
            (self.functions.device_name)(
                buffer.as_mut_ptr().cast::<c_char>(),
                buffer.len() as c_int,
                device,
            )
        };
        check("cuDeviceGetName", code).map(|()| text_from(&buffer))
    }

    fn pci_address(&self, device: i32) -> Option<String> {
        let mut buffer = [0u8; TEXT_SIZE];
        // SAFETY: 1. The buffer is writable for the given length. 2. The driver enumerated the
        // device.
        let code = unsafe {
            (self.functions.device_pci_address)(
                buffer.as_mut_ptr().cast::<c_char>(),
                buffer.len() as c_int,
                device,
            )
        };
        check("cuDeviceGetPCIBusId", code).ok()?;
        // sysfs uses lower case.
        Some(text_from(&buffer).to_ascii_lowercase()).filter(|address| !address.is_empty())
    }

    fn uuid(&self, device: i32) -> Option<[u8; 16]> {
        let mut uuid = [0_u8; 16];
        // SAFETY: 1. The buffer is writable, and a UUID has 16 bytes. 2. The driver enumerated the
        // device.
        let code = unsafe { (self.functions.device_uuid)(uuid.as_mut_ptr(), device) };
        check("cuDeviceGetUuid", code).ok()?;
        Some(uuid)
    }

    /// Returns whether kernels of one device could access another's memory.
    fn can_access_peer(&self, device: i32, other: i32) -> bool {
        let mut result = 0;
        // SAFETY: 1. `result` is writable. 2. The driver enumerated both devices.
        let code =
            unsafe { (self.functions.device_can_access_peer)(&raw mut result, device, other) };
        check("cuDeviceCanAccessPeer", code).is_ok() && result > 0
    }

    fn granularity(&self, device: DeviceId) -> Result<u64> {
        let properties = AllocationProperties::pinned_on(device);
        let mut granularity = 0;
        // SAFETY: 1. `granularity` is writable. 2. `properties` are laid out as the driver expects,
        // and only read.
        let code = unsafe {
            (self.functions.granularity)(
                &raw mut granularity,
                &raw const properties,
                GRANULARITY_MINIMUM,
            )
        };
        check("cuMemGetAllocationGranularity", code).map(|()| granularity as u64)
    }
}

// SAFETY: 1. and 2. are guaranteed by the CUDA driver. 3. A context with a sticky error runs
// nothing any more, and only such devices are reported as lost.
unsafe impl Devices for CudaDriver {
    fn device_count(&self) -> Result<u32> {
        self.calls.add(Call::DeviceCount);
        // The driver counts once, when it starts, and so does this type.
        Ok(u32::try_from(self.devices.len()).unwrap_or(u32::MAX))
    }

    fn device_info(&self, device: DeviceId) -> Result<DeviceInfo> {
        self.calls.add(Call::DeviceInfo);
        let number = self.primary(device)?.device();
        let mut memory = 0usize;
        // SAFETY: 1. `memory` is writable. 2. The driver enumerated the device.
        check("cuDeviceTotalMem", unsafe {
            (self.functions.device_memory)(&raw mut memory, number)
        })?;

        let mut info = DeviceInfo::new(device, self.name_of(number)?, memory as u64);
        let capability = |attribute| self.attribute(number, attribute).map(i32::unsigned_abs);
        info.compute_capability =
            (capability(Attribute::CapabilityMajor)?, capability(Attribute::CapabilityMinor)?);
        info.pci_address = self.pci_address(number);
        info.uuid = self.uuid(number);
        let node = |attribute| {
            self.attribute(number, attribute).ok().and_then(|node| u32::try_from(node).ok())
        };
        info.host_node = node(Attribute::HostNumaId);
        // `NumaId` is meaningless for a device without a node of its own.
        info.memory_node = if self.has_attribute(number, Attribute::NumaConfig) {
            node(Attribute::NumaId)
        } else {
            None
        };
        info.virtual_memory = self.has_attribute(number, Attribute::VirtualMemory);
        if info.virtual_memory {
            info.granularity = self.granularity(device)?;
            info.export_types.posix_fd = self.has_attribute(number, Attribute::ExportPosixFd);
            info.export_types.fabric = self.has_attribute(number, Attribute::ExportFabric);
            info.export_types.rdma = self.has_attribute(number, Attribute::RdmaCapable);
        }
        info.async_pools = self.has_attribute(number, Attribute::MemoryPools);
        info.integrated = self.has_attribute(number, Attribute::Integrated);
        let others = self.devices.iter().map(PrimaryContext::device).zip((0..).map(DeviceId));
        info.peers = others
            .filter(|(other, _)| *other != number && self.can_access_peer(number, *other))
            .map(|(_, id)| id)
            .collect();
        Ok(info)
    }

    fn memory_info(&self, device: DeviceId) -> Result<MemoryInfo> {
        let (mut free, mut total) = (0usize, 0usize);
        self.call(Call::MemoryInfo, device, |functions| {
            // SAFETY: 1. Both are writable.
            unsafe { (functions.memory_info)(&raw mut free, &raw mut total) }
        })?;
        Ok(MemoryInfo { free: free as u64, total: total as u64 })
    }

    fn driver_version(&self) -> Result<u32> {
        self.calls.add(Call::DriverVersion);
        let mut version = 0;
        // SAFETY: 1. `version` is writable.
        check(Call::DriverVersion.name(), unsafe {
            (self.functions.driver_version)(&raw mut version)
        })?;
        Ok(version.unsigned_abs())
    }

    fn is_lost(&self, device: DeviceId) -> bool {
        self.primary(device).is_ok_and(PrimaryContext::is_lost)
    }

    fn current_device(&self) -> Option<DeviceId> {
        let current = current_context(&self.functions).ok()?;
        (0..).map(DeviceId).zip(&self.devices).find_map(|(id, at)| at.is(current).then_some(id))
    }

    fn device_synchronize(&self, device: DeviceId) -> Result<()> {
        self.call(Call::DeviceSynchronize, device, |functions| {
            // SAFETY: 1. It takes no arguments and waits for the current context.
            unsafe { (functions.context_synchronize)() }
        })
    }
}
