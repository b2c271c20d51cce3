//! The driver of this machine's GPUs, if it has one.

use aquifer_driver::{DeviceInfo, Driver};
use std::{fmt, sync::Arc};

/// Why there is no usable GPU.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum NoUsableGpu {
    /// The driver cannot be opened.
    #[cfg(feature = "cuda")]
    Open(aquifer_driver::cuda::OpenError),
    /// The driver returned an error.
    Driver(aquifer_driver::DriverError),
    /// This program was built without the feature.
    #[cfg(not(feature = "cuda"))]
    NotBuilt,
}

impl fmt::Display for NoUsableGpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            #[cfg(feature = "cuda")]
            Self::Open(e) => e.fmt(f),
            Self::Driver(e) => e.fmt(f),
            #[cfg(not(feature = "cuda"))]
            Self::NotBuilt => {
                f.write_str("this program was built without the CUDA driver (feature cuda)")
            }
        }
    }
}

impl std::error::Error for NoUsableGpu {}

/// The driver and its devices, at least one.
#[derive(Clone, Debug)]
pub struct Gpus {
    /// The driver.
    pub driver: Arc<dyn Driver>,
    /// The devices, by ordinal.
    pub devices: Vec<DeviceInfo>,
}

impl Gpus {
    /// Opens the driver and queries its devices. Takes part of a second if there is a driver.
    ///
    /// # Errors
    /// [`NoUsableGpu`].
    pub fn open() -> Result<Self, NoUsableGpu> {
        let driver = open_driver()?;
        let count = driver.device_count().map_err(NoUsableGpu::Driver)?;
        let devices =
            (0..count).map(|ordinal| driver.device_info(aquifer_driver::DeviceId(ordinal)));
        let devices =
            devices.collect::<aquifer_driver::Result<_>>().map_err(NoUsableGpu::Driver)?;
        Ok(Self { driver, devices })
    }
}

#[cfg(feature = "cuda")]
fn open_driver() -> Result<Arc<dyn Driver>, NoUsableGpu> {
    match aquifer_driver::cuda::CudaDriver::open() {
        Ok(driver) => Ok(driver),
        Err(e) => Err(NoUsableGpu::Open(e)),
    }
}

#[cfg(not(feature = "cuda"))]
fn open_driver() -> Result<Arc<dyn Driver>, NoUsableGpu> {
    Err(NoUsableGpu::NotBuilt)
}
