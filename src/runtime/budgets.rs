//! The budgets of a runtime's pools, and their parents.
//!
//! ```text
//!   the ledger                      where the device or pinned memory is shared with other processes
//!   the machine's memory            where a device has the host's for its own: what either takes, the other lacks
//!   └─ what the outside leaves      where neighbours or the host are watched: a ceiling that moves with them
//!      └─ the device, or pinned memory
//! ```

use crate::pressure::Ceiling;
use aquifer_core::{Budget, MemoryError, Result};
use aquifer_driver::{DeviceInfo, Driver};
use aquifer_host::topology::Topology;

/// Bytes that are assumed if the host's free memory is unknown.
const UNKNOWN_HOST: u64 = 16 << 30;

/// The parents of all pool budgets.
pub(super) struct ParentBudgets {
    /// The memory that the host shares with integrated devices.
    shared: Option<Budget>,
    /// Host memory in bytes that the process may still take. Memory that a device counts as its
    /// own is not included.
    left: u64,
}

/// What the program has set for a device's pool.
pub(super) struct DeviceLimits {
    /// The budget itself.
    pub(super) budget: Option<Budget>,
    /// The limit of a budget to be created.
    pub(super) bytes: Option<u64>,
    /// The root that claims from a ledger.
    pub(super) shared: Option<Budget>,
}

impl ParentBudgets {
    /// Reads the limits of the machine. The limit of shared memory is the larger of the host's and
    /// the device's figure, since control groups do not count a device's share on every system.
    pub(super) fn read(
        driver: Option<&dyn Driver>,
        infos: &[DeviceInfo],
        topology: &Topology,
    ) -> Result<Self> {
        let left = topology.headroom()?.value.unwrap_or(UNKNOWN_HOST);
        let mut most = None;
        if let Some(driver) = driver {
            for info in infos.iter().filter(|info| info.integrated) {
                most = most.max(Some(free(driver, info)?));
            }
        }
        let shared = most.map(|free| Budget::new("the machine's memory", free.max(left)));
        Ok(Self { shared, left })
    }

    /// Returns whether a device has the host's memory for its own.
    pub(super) fn is_shared(&self) -> bool {
        self.shared.is_some()
    }

    /// Returns the budget of a device's pool, or `None` if the pool creates its own, and the
    /// ceiling above all budgets of the device.
    pub(super) fn for_device(
        &self,
        driver: &dyn Driver,
        info: &DeviceInfo,
        limits: DeviceLimits,
        watched: bool,
    ) -> Result<(Option<Budget>, Option<Ceiling>)> {
        const CEILING_NAME: &str = "the device beside its neighbours";
        let (ledger, machine) = (limits.shared.as_ref(), self.shared.as_ref());
        let shared = ledger.or(machine.filter(|_| info.integrated));
        if let Some(own) = limits.budget {
            // An empty budget gets no ceiling, so that the pool sees it and refuses it.
            let ceiling =
                (watched && own.limit() > 0).then(|| Ceiling::new(Some(&own), CEILING_NAME));
            let budget = ceiling.as_ref().map_or(own, |ceiling| ceiling.budget().clone());
            return Ok((Some(budget), ceiling));
        }
        let ceiling = watched.then(|| Ceiling::new(shared, CEILING_NAME));
        let Some(above) = ceiling.as_ref().map(Ceiling::budget).or(shared) else {
            return Ok((
                limits.bytes.map(|bytes| Budget::new(info.device.to_string(), bytes)),
                None,
            ));
        };
        let bytes = match limits.bytes {
            Some(bytes) => bytes,
            // Its own limit is that of the share.
            None if ledger.is_some() => u64::MAX,
            None => free(driver, info)? / 5 * 4,
        };
        Ok((Some(above.child(info.device.to_string(), bytes)), ceiling))
    }

    /// Returns the budget of pinned memory, half of what is left unless set, and the ceiling above
    /// it if the host is watched.
    pub(super) fn for_pinned(
        &self,
        bytes: Option<u64>,
        watched: bool,
        ledger: Option<&Budget>,
    ) -> (Budget, Option<Ceiling>) {
        const POOL_NAME: &str = "pinned memory";
        let shared = ledger.or(self.shared.as_ref());
        let bytes = bytes.unwrap_or(self.left / 2);
        let ceiling = watched.then(|| Ceiling::new(shared, "what the host has left"));
        let budget = match ceiling.as_ref().map(Ceiling::budget).or(shared) {
            Some(above) => above.child(POOL_NAME, bytes),
            None => Budget::new(POOL_NAME, bytes),
        };
        (budget, ceiling)
    }
}

fn free(driver: &dyn Driver, info: &DeviceInfo) -> Result<u64> {
    let memory =
        driver.memory_info(info.device).map_err(|e| MemoryError::driver(info.device, e))?;
    Ok(memory.free)
}
