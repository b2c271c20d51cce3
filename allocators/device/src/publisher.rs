//! The slot from which other processes read the figures of a pool.

use crate::checked::CheckedPool;
use aquifer_driver::{DeviceInfo, Driver};
use aquifer_status::{PoolKind, PoolSlot, SlotDescription};
use std::sync::{Arc, OnceLock, Weak};

/// The pool's slot, and whose figures it has.
pub(crate) struct PoolPublisher {
    slot: Arc<PoolSlot>,
    /// Whether the pool's blocks are checked. The checks then count what users have, and caches
    /// and parts do not count for the pool.
    is_checked: bool,
    checked: OnceLock<Weak<CheckedPool>>,
}

impl PoolPublisher {
    pub(crate) fn new(driver: &dyn Driver, info: &DeviceInfo, is_checked: bool) -> Self {
        let description = describe(driver, info, PoolKind::Device, &info.name);
        let slot = Arc::new(PoolSlot::open(description));
        Self { slot, is_checked, checked: OnceLock::new() }
    }

    pub(crate) fn slot(&self) -> &PoolSlot {
        &self.slot
    }

    /// Returns whether the pool's blocks are checked.
    pub(crate) fn is_checked(&self) -> bool {
        self.is_checked
    }

    /// Returns the checks whose statistics are the pool's, if they exist by now.
    pub(crate) fn checked(&self) -> Option<Arc<CheckedPool>> {
        self.checked.get().and_then(Weak::upgrade)
    }

    /// Returns the slot that caches count for, or 0.
    pub(crate) fn lines_id(&self) -> u64 {
        if self.is_checked { 0 } else { self.slot.id() }
    }

    /// Returns the slot that parts of the pool belong to, or `None` if they are not shown by
    /// themselves.
    pub(crate) fn parent(&self) -> Option<&Arc<PoolSlot>> {
        (!self.is_checked).then_some(&self.slot)
    }

    /// Sets the checks whose statistics are the pool's.
    pub(crate) fn set_checked(&self, checked: &Arc<CheckedPool>) {
        let _only_once = self.checked.set(Arc::downgrade(checked));
    }
}

/// Returns the description of memory on a device. Only GPUs of this host have an address in it: a
/// simulated device is of its process alone, and its address may be that of a GPU.
pub(crate) fn describe(
    driver: &dyn Driver,
    info: &DeviceInfo,
    kind: PoolKind,
    name: &str,
) -> SlotDescription {
    let is_real = driver.machine() == 0;
    SlotDescription {
        kind,
        name: name.to_owned(),
        device: Some(info.device.0),
        address: info.pci_address.clone().filter(|_| is_real),
        node: None,
    }
}
