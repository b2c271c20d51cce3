//! What the driver says is in use on each GPU, by NVML, whose library is loaded at run time.

use nvml_wrapper::{Nvml, error::NvmlError};

/// A PCI address: domain, bus, device and function.
///
/// The CUDA driver writes `0000:1b:00.0`, and NVML `00000000:1B:00.0`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(super) struct GpuAddress(u32, u8, u8, u8);

impl GpuAddress {
    pub(super) fn parse(text: &str) -> Option<Self> {
        let (domain, rest) = text.split_once(':')?;
        let (bus, rest) = rest.split_once(':')?;
        let (device, function) = rest.split_once('.')?;
        let byte = |text: &str| u8::from_str_radix(text, 16).ok();
        let domain = u32::from_str_radix(domain, 16).ok()?;
        Some(Self(domain, byte(bus)?, byte(device)?, byte(function)?))
    }
}

/// The driver's own count of one GPU, over all processes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct DriverCount {
    pub(super) address: GpuAddress,
    /// The address as the CUDA driver writes it.
    pub(super) address_text: String,
    pub(super) name: String,
    /// Bytes in use, without what the driver reserves for itself. `None` if it does not tell.
    pub(super) used: Option<u64>,
    /// All bytes of its memory.
    pub(super) total: Option<u64>,
}

/// NVML, or why there is none.
pub(super) struct DriverCounts {
    nvml: Result<Nvml, NvmlError>,
}

impl DriverCounts {
    /// Loads the library. A machine without it has no counts.
    pub(super) fn load() -> Self {
        // The name without a version belongs to packages for developers.
        let versioned = Nvml::builder().lib_path("libnvidia-ml.so.1".as_ref()).init();
        Self { nvml: versioned.or_else(|_| Nvml::init()) }
    }

    /// Returns why there are no counts at all.
    pub(super) fn missing(&self) -> Option<String> {
        self.nvml.as_ref().err().map(|error| format!("NVML: {error}"))
    }

    /// Returns the counts of all GPUs that the driver shows.
    pub(super) fn read(&self) -> Vec<DriverCount> {
        let Ok(nvml) = &self.nvml else { return Vec::new() };
        let count = nvml.device_count().unwrap_or(0);
        let devices = (0..count).filter_map(|index| {
            let device = nvml.device_by_index(index).ok()?;
            let address = GpuAddress::parse(&device.pci_info().ok()?.bus_id)?;
            let memory = device.memory_info().ok();
            let GpuAddress(domain, bus, slot, function) = address;
            Some(DriverCount {
                address,
                address_text: format!("{domain:04x}:{bus:02x}:{slot:02x}.{function:x}"),
                name: device.name().unwrap_or_default(),
                used: memory.as_ref().map(|memory| memory.used),
                total: memory.as_ref().map(|memory| memory.total),
            })
        });
        devices.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_gpu_has_one_address_however_it_is_written() {
        let address = GpuAddress::parse("0000:1b:00.0");
        assert_eq!(address, Some(GpuAddress(0, 0x1b, 0, 0)));
        assert_eq!(GpuAddress::parse("00000000:1B:00.0"), address);
        for none in ["", "gpu", "0000:1b:00", "0000:1b.0", "0:100:0.0", "0000:1b:00.g"] {
            assert_eq!(GpuAddress::parse(none), None, "{none}");
        }
    }
}
