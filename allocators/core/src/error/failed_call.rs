//! Calls of the driver and of the kernel that failed.

use std::{error, fmt};

/// A call of the GPU driver that returned an error code.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct DriverError {
    /// The call, as the driver's documentation spells it, such as `cuMemCreate`.
    pub call: &'static str,
    /// The driver's code, even if this build has no name for it.
    pub code: u32,
    /// The code's name, `CUDA_ERROR_…`, or `unknown`.
    pub name: &'static str,
}

impl DriverError {
    /// Returns whether the code means that the device is lost: a sticky error, after which every
    /// call fails.
    #[must_use]
    pub fn is_device_lost(&self) -> bool {
        // ECC uncorrectable, illegal address, launch timeout, assert, hardware stack error, illegal
        // instruction, misaligned address, invalid address space, invalid PC, launch failed, tensor
        // memory leak.
        matches!(self.code, 214 | 700 | 702 | 710 | 714..=719 | 721)
    }

    /// Returns whether the code means that the driver or the context of the call has been torn
    /// down, or never existed in this process. Queued work does not run any more.
    #[must_use]
    pub fn is_driver_gone(&self) -> bool {
        // Not initialised (a forked child), deinitialised (the process is exiting), context
        // destroyed (the application has reset it).
        matches!(self.code, 3 | 4 | 709)
    }

    /// Returns whether the code is the driver's out-of-memory error.
    #[must_use]
    pub fn is_out_of_memory(&self) -> bool {
        self.code == 2
    }
}

impl fmt::Display for DriverError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {} ({})", self.call, self.name, self.code)
    }
}

impl error::Error for DriverError {}

/// A system call that failed.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct SystemError {
    /// The call, such as `mmap`.
    pub call: &'static str,
    /// Its `errno`.
    pub errno: i32,
}

impl fmt::Display for SystemError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.call, std::io::Error::from_raw_os_error(self.errno))
    }
}

impl error::Error for SystemError {}

crate::__debug_as_display!(DriverError, SystemError);

/// The reason why no GPU can be used here.
///
/// On a machine without a GPU this is a normal result, usually [`NoLibrary`](Self::NoLibrary).
///
/// ```
/// use aquifer::error::NoGpu;
/// println!("no GPU: {}", NoGpu::NoLibrary);
/// ```
#[derive(Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum NoGpu {
    /// This build has no CUDA: none of its CUDA features is enabled.
    NotBuilt,
    /// The driver's library, `libcuda.so.1`, is not installed or not on the loader's path.
    NoLibrary,
    /// The library lacks a function: the driver is older than CUDA 12.0, the first version that has
    /// all of them.
    MissingSymbol {
        /// The function.
        symbol: &'static str,
    },
    /// The driver sees no device, and `CUDA_VISIBLE_DEVICES` is set but names no existing device.
    Hidden,
    /// The driver was opened and has no device.
    NoDevices,
    /// The library was found, but `cuInit` failed. The code says why: 100 for no device, 34 for the
    /// toolkit's stub, which exists only to link against, 803 for a kernel module of another
    /// version.
    Start(DriverError),
}

crate::__debug_as_display!(NoGpu);

impl fmt::Display for NoGpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotBuilt => f.write_str("this build has no CUDA; build it with one of its `cuda` features"),
            Self::NoLibrary => f.write_str(
                "the CUDA driver is missing: libcuda.so.1 is not on the loader's path; install the NVIDIA driver",
            ),
            Self::MissingSymbol { symbol } => {
                write!(f, "the CUDA driver lacks {symbol}; CUDA 12.0 or later is required")
            }
            Self::Hidden => f.write_str(
                "the CUDA driver sees no device: CUDA_VISIBLE_DEVICES names none that exists; unset it",
            ),
            Self::NoDevices => f.write_str("the CUDA driver is installed, but has no device"),
            Self::Start(e) => match e.code {
                34 => write!(
                    f,
                    "{e}: this libcuda is the toolkit's stub; put the driver's own first on the path"
                ),
                100 => write!(f, "{e}: the CUDA driver is installed, but sees no device"),
                803 => write!(
                    f,
                    "{e}: the driver's library and kernel module differ; a reboot loads the new one"
                ),
                _ => e.fmt(f),
            },
        }
    }
}

impl error::Error for NoGpu {
    fn source(&self) -> Option<&(dyn error::Error + 'static)> {
        match self {
            Self::Start(e) => Some(e),
            _ => None,
        }
    }
}

#[cfg(test)]
mod no_gpu_tests {
    use super::*;
    use crate::MemoryError;

    #[test]
    fn each_reason_names_a_remedy_or_the_driver_error() {
        let start =
            |code, name| NoGpu::Start(DriverError { call: "cuInit", code, name }).to_string();
        assert!(NoGpu::NoLibrary.to_string().contains("install"));
        assert!(
            NoGpu::MissingSymbol { symbol: "cuStreamGetId" }.to_string().contains("cuStreamGetId")
        );
        assert!(NoGpu::Hidden.to_string().contains("CUDA_VISIBLE_DEVICES"));
        assert!(NoGpu::NotBuilt.to_string().contains("feature"));
        assert!(start(100, "CUDA_ERROR_NO_DEVICE").contains("sees no device"));
        assert!(start(803, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH").contains("reboot"));
        assert_eq!(start(999, "CUDA_ERROR_UNKNOWN"), "cuInit: CUDA_ERROR_UNKNOWN (999)");
        let refused = MemoryError::NoGpu { asked: 3, why: Box::new(NoGpu::NoLibrary) }.to_string();
        assert!(refused.contains("device 3") && refused.contains("libcuda.so.1"), "{refused}");
    }
}
