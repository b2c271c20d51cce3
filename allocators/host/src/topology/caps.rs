//! Caps on memory that administrators set for this process: control groups and MPS.

use super::{
    Found, MPS_VARIABLE, Topology, TopologyError,
    devices::sysfs_address,
    files::{file, wrong_number},
    groups,
};
use aquifer_driver::DeviceInfo;
use std::path::Path;

/// The form of the values of [`MPS_VARIABLE`].
const MPS_FORM: &str = "ordinals with limits, such as 0=1G,1=512MB";
/// A folder for each GPU, named by its address, of NVIDIA's kernel driver.
const GPUS: &str = "/proc/driver/nvidia/gpus";

impl Topology {
    /// Reads the most that administrators let this process take of a device's memory: the least of
    /// `dmem.max` of its control group and the groups above it (Linux 6.14), and of
    /// `CUDA_MPS_PINNED_DEVICE_MEM_LIMIT`. Unknown if none of them limits it.
    ///
    /// ```
    /// use aquifer::{DeviceId, driver::DeviceInfo, host::Topology};
    /// let gpu = DeviceInfo::new(DeviceId(0), "a GPU".into(), 1 << 30);
    /// println!("at most {}", Topology::read()?.device_cap(&gpu)?);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`TopologyError::Number`] for a file, and [`TopologyError::Setting`] for a variable, that
    /// cannot be parsed.
    pub fn device_cap(&self, device: &DeviceInfo) -> Result<Found<u64>, TopologyError> {
        let mut least = Found::unknown("no source");
        if let Some(address) = device.pci_address.as_deref().and_then(sysfs_address) {
            for group in groups::all(&self.files)? {
                let path = group.folder.join("dmem.max");
                let Some(text) = self.files.text(&path)? else { continue };
                if let Some(cap) = region_cap(&path, &text, &address)? {
                    least.lower(cap, || file(path));
                }
            }
        }
        if let Some(text) = &self.mps_limit
            && let Some(cap) = mps_cap(text, device.device.0)?
        {
            least.lower(cap, || format!("environment variable {MPS_VARIABLE}"));
        }
        Ok(least)
    }

    /// Reads the most memory that the control groups of this process let it take: the least of
    /// `memory.max` and `memory.high` of its group and the groups above it. Unknown if none has a
    /// limit.
    ///
    /// # Errors
    /// [`TopologyError::Number`] for a file that cannot be parsed.
    pub fn host_cap(&self) -> Result<Found<u64>, TopologyError> {
        let mut least = Found::unknown(groups::MEMBERSHIP);
        for group in groups::all(&self.files)? {
            let Found { value, source } = group.limit(&self.files)?;
            if let Some(limit) = value {
                least.lower(limit, || source);
            }
        }
        Ok(least)
    }

    /// Reads the most pinned memory that this process claims of what processes share: half of what
    /// its control groups let it take, see [`Topology::host_cap`].
    ///
    /// # Errors
    /// As [`Topology::host_cap`].
    pub fn pinned_cap(&self) -> Result<Found<u64>, TopologyError> {
        let Found { value, source } = self.host_cap()?;
        Ok(Found { value: value.map(|cap| cap / 2), source })
    }

    /// Reads the PCI address of the GPU with this UUID, such as
    /// `01234567-89ab-cdef-0123-456789abcdef`. NVIDIA's kernel driver lists it without a context.
    /// Returns `None` if it lists no such GPU.
    ///
    /// # Errors
    /// [`TopologyError::Unreadable`].
    pub fn gpu_address(&self, uuid: &str) -> Result<Option<String>, TopologyError> {
        let gpus = Path::new(GPUS);
        for name in self.files.names(gpus) {
            let Some(text) = self.files.text(&gpus.join(&name).join("information"))? else {
                continue;
            };
            let mut fields = text.lines().filter_map(|line| line.split_once(':'));
            let is_it = |value: &str| {
                value.trim().strip_prefix("GPU-").is_some_and(|it| it.eq_ignore_ascii_case(uuid))
            };
            if fields.any(|(field, value)| field.trim() == "GPU UUID" && is_it(value)) {
                return Ok(Some(name));
            }
        }
        Ok(None)
    }

    /// Returns the topology as if `CUDA_MPS_PINNED_DEVICE_MEM_LIMIT` had this value.
    #[must_use]
    pub fn with_mps_limit(mut self, value: &str) -> Self {
        self.mps_limit = Some(value.to_owned());
        self
    }
}

/// Returns the least cap of the regions of a device, from lines such as `drm/0000:03:00.0/vram0
/// 1073741824`. None for regions without one, which say `max`.
fn region_cap(path: &Path, text: &str, device: &str) -> Result<Option<u64>, TopologyError> {
    let mut least: Option<u64> = None;
    for line in text.lines() {
        let Some((region, cap)) = line.rsplit_once(' ') else { continue };
        if !region.split('/').any(|part| part == device) || cap == "max" {
            continue;
        }
        let cap = cap.parse().map_err(|_| wrong_number(path, cap))?;
        least = Some(least.map_or(cap, |least| least.min(cap)));
    }
    Ok(least)
}

/// Returns the limit of a device in a list such as `0=1G,1=512MB`. Suffixes are powers of 1024.
fn mps_cap(text: &str, ordinal: u32) -> Result<Option<u64>, TopologyError> {
    let wrong = || TopologyError::Setting {
        name: MPS_VARIABLE,
        value: text.to_owned(),
        expected: MPS_FORM,
    };
    let mut found = None;
    for entry in text.split(',').map(str::trim).filter(|entry| !entry.is_empty()) {
        let (device, limit) = entry.split_once('=').ok_or_else(wrong)?;
        let device: u32 = device.trim().parse().map_err(|_| wrong())?;
        let limit = limit.trim().to_ascii_uppercase();
        let limit = limit.strip_suffix('B').unwrap_or(&limit);
        let digits = limit.trim_end_matches(['K', 'M', 'G', 'T']);
        let shift = match &limit[digits.len()..] {
            "" => 0,
            "K" => 10,
            "M" => 20,
            "G" => 30,
            "T" => 40,
            _ => return Err(wrong()),
        };
        let count: u64 = digits.trim().parse().map_err(|_| wrong())?;
        let bytes = count.checked_mul(1 << shift).ok_or_else(wrong)?;
        if device == ordinal {
            found = Some(bytes);
        }
    }
    Ok(found)
}
