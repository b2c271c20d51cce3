//! The host: what is needed to make regions.

use crate::{kernel::Kernel, topology::Topology, workers::Workers};
use aquifer_core::DriverError;
use aquifer_driver::{DeviceId, Driver};
use std::{fmt, sync::Arc};

/// A device and its driver.
///
/// See [`Host`] for an example.
#[derive(Clone)]
pub struct Reach {
    /// The driver.
    pub driver: Arc<dyn Driver>,
    /// The device whose context registers memory. The first region creates its primary context.
    pub device: DeviceId,
}

impl Reach {
    /// Runs a driver call that pins or unpins host memory, on the device, or on another one if this
    /// device is lost.
    ///
    /// Pinned memory belongs to the process, so any context can register and unregister it. If the
    /// loss affects all contexts, as an illegal address does, the call fails for all of them.
    ///
    /// # Errors
    /// The error of the device itself, if the call succeeds on no other device.
    pub(super) fn call<T>(
        &self,
        call: impl Fn(&dyn Driver, DeviceId) -> Result<T, DriverError>,
    ) -> Result<T, DriverError> {
        let driver = &*self.driver;
        call(driver, self.device).or_else(|refused| {
            if !refused.is_device_lost() {
                return Err(refused);
            }
            let devices = (0..driver.device_count().unwrap_or(0)).map(DeviceId);
            let mut others =
                devices.filter(|&other| other != self.device && !driver.is_lost(other));
            others.find_map(|other| call(driver, other).ok()).ok_or(refused)
        })
    }
}

impl fmt::Debug for Reach {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reach")
            .field("driver", &self.driver.name())
            .field("device", &self.device)
            .finish()
    }
}

/// The resources that create regions: kernel, topology, workers and an optional driver. Cheap to
/// clone.
#[derive(Clone, Debug)]
pub struct Host {
    /// The system calls.
    #[doc(hidden)]
    pub kernel: Kernel,
    /// The topology of the machine.
    pub topology: Arc<Topology>,
    /// The threads that populate memory by first touch.
    #[doc(hidden)]
    pub workers: Arc<Workers>,
    /// The driver. With `None` all memory is pageable.
    #[doc(hidden)]
    pub reach: Option<Reach>,
}

impl Host {
    /// Creates a host without a driver.
    #[must_use]
    pub fn new(topology: Topology, kernel: Kernel) -> Self {
        let workers = Arc::new(Workers::new(&topology, kernel.clone()));
        Self { kernel, topology: Arc::new(topology), workers, reach: None }
    }

    /// Adds a driver, and the device whose context registers memory.
    #[must_use]
    pub fn with_driver(mut self, driver: Arc<dyn Driver>, device: DeviceId) -> Self {
        self.reach = Some(Reach { driver, device });
        self
    }
}
