//! The budgets of a runtime's pools, and what stands above them.
//!
//! ```text
//!   the machine's memory            where a device has the host's for its own: what either takes, the other lacks
//!   └─ what the outside leaves      where neighbours or the host are watched: a ceiling that moves with them
//!      └─ the device, or pinned memory
//! ```

use crate::pressure::Ceiling;
use aquifer_core::{Budget, MemoryError, Result};
use aquifer_driver::{DeviceInfo, Driver};
use aquifer_host::topology::Topology;

/// Bytes that are assumed where nobody tells what the host has.
const UNKNOWN_HOST: u64 = 16 << 30;

/// What stands above all pools.
pub(super) struct Above {
    /// The memory that the host shares with devices.
    shared: Option<Budget>,
    /// Bytes of host memory that the process may still take: what a device counts as its own is
    /// not the host's.
    left: u64,
}

/// What a program has set for a device's pool.
pub(super) struct Limits {
    /// Its budget.
    pub(super) own: Option<Budget>,
    /// The limit of one that is made.
    pub(super) bytes: Option<u64>,
}

impl Above {
    /// What the machine says. The limit of shared memory is the larger of what host and device say,
    /// since a device's share is not everywhere counted in control groups.
    pub(super) fn read(
        driver: Option<&dyn Driver>,
        infos: &[DeviceInfo],
        topology: &Topology,
    ) -> Result<Self> {
        let left = topology.headroom()?.bytes.value.unwrap_or(UNKNOWN_HOST);
        let mut most = None;
        if let Some(driver) = driver {
            for info in infos.iter().filter(|info| info.integrated) {
                most = most.max(Some(free(driver, info)?));
            }
        }
        let shared = most.map(|free| Budget::new("the machine's memory", free.max(left)));
        Ok(Self { shared, left })
    }

    /// The budget of a device's pool, where it is not the pool that makes one, and the ceiling
    /// above everything there.
    pub(super) fn of_device(
        &self,
        driver: &dyn Driver,
        info: &DeviceInfo,
        limits: Limits,
        watched: bool,
    ) -> Result<(Option<Budget>, Option<Ceiling>)> {
        const BESIDE: &str = "the device beside its neighbours";
        let shared = self.shared.as_ref().filter(|_| info.integrated);
        if let Some(own) = limits.own {
            // One of nothing is refused by the pool, which must see it.
            let ceiling = (watched && own.limit() > 0).then(|| Ceiling::new(Some(&own), BESIDE));
            let budget = ceiling.as_ref().map_or(own, |ceiling| ceiling.budget().clone());
            return Ok((Some(budget), ceiling));
        }
        let ceiling = watched.then(|| Ceiling::new(shared, BESIDE));
        let Some(above) = ceiling.as_ref().map(Ceiling::budget).or(shared) else {
            return Ok((limits.bytes.map(|bytes| Budget::new(info.device.name(), bytes)), None));
        };
        let bytes = match limits.bytes {
            Some(bytes) => bytes,
            None => free(driver, info)? / 5 * 4,
        };
        Ok((Some(above.child(info.device.name(), bytes)), ceiling))
    }

    /// The budget of pinned memory, half of what is left unless set, and the ceiling above it where
    /// the host is watched.
    pub(super) fn of_pinned(&self, bytes: Option<u64>, watched: bool) -> (Budget, Option<Ceiling>) {
        const PINNED: &str = "pinned memory";
        let shared = self.shared.as_ref();
        let bytes = bytes.unwrap_or(self.left / 2);
        let ceiling = watched.then(|| Ceiling::new(shared, "what the host has left"));
        let budget = match ceiling.as_ref().map(Ceiling::budget).or(shared) {
            Some(above) => above.child(PINNED, bytes),
            None => Budget::new(PINNED, bytes),
        };
        (budget, ceiling)
    }
}

fn free(driver: &dyn Driver, info: &DeviceInfo) -> Result<u64> {
    let memory =
        driver.memory_info(info.device).map_err(|e| MemoryError::driver(info.device, e))?;
    Ok(memory.free)
}
