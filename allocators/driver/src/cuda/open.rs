//! Why there is no driver to talk to.

use crate::DriverError;
use std::{error, fmt};

/// Why [`CudaDriver::open`](super::CudaDriver::open) has no driver to give.
///
/// On a machine without a GPU this is the ordinary case, and `NoLibrary` the ordinary reason.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum OpenError {
    /// The driver's library, `libcuda.so.1`, is not installed or not on the loader's path.
    NoLibrary,
    /// The library lacks a function: the driver is older than CUDA 12.0, the first that has all of them.
    MissingSymbol {
        /// The function.
        symbol: &'static str,
    },
    /// The library is there and does not start. Code 100 says that there is no device, 34 that the library is the
    /// toolkit's stub for linking, 803 that the kernel module is another version.
    Start(DriverError),
}

impl fmt::Display for OpenError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoLibrary => f.write_str(
                "no CUDA driver: libcuda.so.1 is not on the loader's path; install the NVIDIA driver",
            ),
            Self::MissingSymbol { symbol } => {
                write!(f, "the CUDA driver has no {symbol}; it needs to be of CUDA 12.0 or later")
            }
            Self::Start(e) => match e.code {
                34 => write!(
                    f,
                    "{e}: this libcuda is the toolkit's stub; put the driver's own first on the path"
                ),
                100 => write!(f, "{e}: the CUDA driver is installed and sees no device"),
                803 => write!(
                    f,
                    "{e}: the driver's library and kernel module differ; a reboot loads the new one"
                ),
                _ => e.fmt(f),
            },
        }
    }
}

impl error::Error for OpenError {
    fn source(&self) -> Option<&(dyn error::Error + 'static)> {
        match self {
            Self::Start(e) => Some(e),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_reason_says_what_to_do() {
        let start = |code| OpenError::Start(super::super::codes::error("cuInit", code)).to_string();
        assert!(OpenError::NoLibrary.to_string().contains("install"));
        assert!(OpenError::MissingSymbol { symbol: "cuStreamGetId" }.to_string().contains("cuStreamGetId"));
        assert!(start(100).contains("sees no device"));
        assert!(start(803).contains("reboot"));
        assert_eq!(start(999), "cuInit: CUDA_ERROR_UNKNOWN (999)");
    }
}
