//! The most that administrators let this process claim of a memory: what a runtime that shares it
//! applies, for memberships of the program's own.

use crate::{entry::CallResult, table};
use aquifer::{DeviceId, MemoryError, driver::DeviceInfo, host::Topology};
use aquifer_ledger::LedgerMemory;

/// Returns the cap of the memory that the ledger of this name is for, or `None` if there is none.
/// The memories of a program's own have none.
pub(crate) fn cap_of(name: &str) -> CallResult<Option<u64>> {
    let memory = LedgerMemory::of(name);
    if let LedgerMemory::Other(_) = memory {
        return Ok(None);
    }
    let topology = Topology::read().map_err(MemoryError::from)?;
    let cap = match memory {
        LedgerMemory::Pinned => topology.pinned_cap(),
        _ => topology.device_cap(&device_of(&memory, name, &topology)?),
    };
    Ok(cap.map_err(MemoryError::from)?.value)
}

/// Returns a device as one of this process's runtimes knows it, else with the ordinal and the
/// address that are known without one.
fn device_of(memory: &LedgerMemory, name: &str, topology: &Topology) -> CallResult<DeviceInfo> {
    for shared in table::all_open() {
        for (index, pool) in shared.runtime.devices().iter().enumerate() {
            if shared.runtime.ledger_of_device(index).is_ok_and(|(known, _)| known == name) {
                return Ok(pool.info().clone());
            }
        }
    }
    // No device has this ordinal.
    let ordinal = memory.ordinal().unwrap_or(u32::MAX);
    let mut info = DeviceInfo::new(DeviceId(ordinal), name.to_owned(), 0);
    info.pci_address = match memory.uuid() {
        Some(uuid) => {
            topology.gpu_address(&uuid).map_err(MemoryError::from)?.map(|a| a.to_string())
        }
        None => memory.address().map(str::to_owned),
    };
    Ok(info)
}
