//! Which memory a runtime shares with other processes, and by which ledgers.

use crate::placement::memory_of;
use aquifer_core::{Bytes, MemoryError, Result};
use aquifer_driver::{DeviceInfo, Driver};
use aquifer_host::topology::{Found, Topology};
use aquifer_status::ledger::{
    Ledger, LedgerError, LedgerMemory, Share, SharedBudget, folder_of_environment,
};
use std::{path::PathBuf, sync::Arc};

/// What the program has set.
#[derive(Clone, Debug, Default)]
pub(super) struct Sharing {
    /// The guarantee of each device, in bytes, if they are shared.
    pub(super) devices: Option<u64>,
    /// The guarantee of pinned memory, in bytes, if it is shared.
    pub(super) pinned: Option<u64>,
    pub(super) priority: i32,
    /// Whether guarantees are kept free instead of lent.
    pub(super) reserve: bool,
    pub(super) folder: Option<PathBuf>,
}

/// A refusal to share memory, as an error of the builder. `cap` is what an administrator lets the
/// process take, and names the file or the variable that does.
fn refused(error: &LedgerError, cap: &Found<u64>) -> MemoryError {
    match error {
        LedgerError::BadSetting { value } => MemoryError::BadSetting {
            name: "AQUIFER_LEDGER",
            value: value.clone(),
            expected: "off, or the path of a folder with a /",
        },
        LedgerError::GuaranteeAboveLimit { guarantee, limit } => {
            let source = match &cap.source {
                source if cap.value == Some(*limit) => source,
                _ => "the program's budget",
            };
            let (guarantee, limit) = (Bytes(*guarantee), Bytes(*limit));
            MemoryError::BadSetting {
                name: "the guarantee of a shared memory",
                value: format!("{guarantee}, above the limit of {limit} by {source}"),
                expected: "at most that limit",
            }
        }
        _ => MemoryError::BadSetting {
            name: "a shared memory",
            value: error.to_string(),
            expected: "a ledger that this process can join",
        },
    }
}

/// Returns the capacity of pinned memory: the same in all processes, unlike what is free now. So
/// memory of GPUs is left out where the kernel reports it, which it does to all of them. The driver
/// reports that of the devices that a process uses.
pub(super) fn pinned_capacity(topology: &Topology) -> u64 {
    topology.memory_by_kernel() / 2
}

impl Sharing {
    /// Reads the folder from the environment if it is not set. Nothing is shared if that says
    /// `off`.
    pub(super) fn resolve(mut self) -> Result<Self> {
        if self.folder.is_none() && (self.devices.is_some() || self.pinned.is_some()) {
            let uncapped = Found::unknown("no source");
            self.folder = folder_of_environment().map_err(|error| refused(&error, &uncapped))?;
        }
        Ok(self)
    }

    fn share(&self, guarantee: u64) -> Share {
        let share = Share::new().guarantee(guarantee).priority(self.priority);
        if self.reserve { share.reserve() } else { share }
    }

    /// Joins the ledger of a device, if devices are shared. `limit` is the most that this process
    /// claims, unless an administrator lets it take less.
    pub(super) fn device(
        &self,
        driver: &Arc<dyn Driver>,
        info: &DeviceInfo,
        topology: &Topology,
        has_budget: bool,
        limit: Option<u64>,
    ) -> Result<Option<SharedBudget>> {
        let (Some(guarantee), Some(folder)) = (self.devices, &self.folder) else { return Ok(None) };
        if has_budget || info.integrated {
            return Err(MemoryError::BadSetting {
                name: "a shared memory",
                value: info.name.clone(),
                expected: "a device with memory of its own, and no budget in the pools' settings",
            });
        }
        let (driver, device) = (driver.clone(), info.device);
        let ledger = Ledger::open(folder, &memory_of(&driver, info).to_string(), info.memory);
        let in_use = move || {
            let memory = driver.memory_info(device).ok()?;
            Some(memory.total.saturating_sub(memory.free))
        };
        let cap = topology.device_cap(info)?;
        let most = limit.into_iter().chain(cap.value).min().unwrap_or(u64::MAX);
        let share = self.share(guarantee).limit(most);
        ledger
            .and_then(|ledger| share.join(ledger))
            .and_then(|member| member.budget("the device of all processes", in_use))
            .map(Some)
            .map_err(|error| refused(&error, &cap))
    }

    /// Joins the ledger of pinned memory, if that is shared. `is_device_memory` is set if the
    /// host's memory is also that of a device.
    pub(super) fn pinned(
        &self,
        topology: &Topology,
        is_device_memory: bool,
    ) -> Result<Option<SharedBudget>> {
        let (Some(guarantee), Some(folder)) = (self.pinned, &self.folder) else { return Ok(None) };
        if is_device_memory {
            return Err(MemoryError::BadSetting {
                name: "a shared memory",
                value: "pinned memory".to_owned(),
                expected: "host memory that no device has for its own",
            });
        }
        let cap = topology.pinned_cap()?;
        let most = cap.value.unwrap_or(u64::MAX);
        Ledger::open(folder, &LedgerMemory::Pinned.to_string(), pinned_capacity(topology))
            .and_then(|ledger| self.share(guarantee).limit(most).join(ledger))
            .and_then(|member| member.budget("pinned memory of all processes", || None))
            .map(Some)
            .map_err(|error| refused(&error, &cap))
    }
}
