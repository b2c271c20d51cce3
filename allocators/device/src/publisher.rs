//! The slot from which other processes read the figures of a pool.

use aquifer_driver::{DeviceInfo, Driver};
use aquifer_status::{PoolKind, PoolSlot, PublishTimer, SlotDescription};
use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

/// The pool's slot, and when it was last written.
pub(crate) struct PoolPublisher {
    slot: Arc<PoolSlot>,
    /// When the figures were last published, and the physical bytes then.
    timer: PublishTimer,
    published_bytes: AtomicU64,
}

impl PoolPublisher {
    pub(crate) fn new(driver: &dyn Driver, info: &DeviceInfo) -> Self {
        let description = describe(driver, info, PoolKind::Device, &info.name);
        let slot = Arc::new(PoolSlot::open(description));
        let (timer, published_bytes) = (PublishTimer::new(), AtomicU64::new(0));
        Self { slot, timer, published_bytes }
    }

    /// Records that the figures are published with these physical bytes.
    pub(crate) fn record_published(&self, physical: u64) {
        self.timer.restart();
        self.published_bytes.store(physical, Ordering::Relaxed);
    }

    /// Returns whether figures with these physical bytes are to be published: the bytes have
    /// changed, or it is long enough ago.
    pub(crate) fn is_due(&self, physical: u64) -> bool {
        self.published_bytes.load(Ordering::Relaxed) != physical || self.timer.is_due()
    }

    pub(crate) fn slot(&self) -> &Arc<PoolSlot> {
        &self.slot
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

#[cfg(test)]
mod tests {
    use super::*;
    use aquifer_driver::{DeviceId, sim::Sim};
    use std::{thread, time::Duration};

    const INTERVAL_MS: u64 = 10;

    #[test]
    fn figures_are_due_when_held_memory_has_changed_or_after_the_interval() {
        let driver = Sim::h200(1).driver();
        let info = driver.device_info(DeviceId(0)).unwrap();
        let publisher = PoolPublisher::new(&*driver, &info);
        publisher.record_published(4096);
        assert!(publisher.is_due(8192) && publisher.is_due(0), "the bytes have changed");
        let begun = std::time::Instant::now();
        let is_due = publisher.is_due(4096);
        // A thread that was stopped for long has nothing to say.
        assert!(!is_due || begun.elapsed() > Duration::from_millis(INTERVAL_MS / 2));
        thread::sleep(Duration::from_millis(3 * INTERVAL_MS));
        assert!(publisher.is_due(4096));
    }
}
