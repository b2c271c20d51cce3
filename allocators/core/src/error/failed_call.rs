//! Calls of the driver and of the kernel that failed.

use std::{error, fmt};

/// A call of the GPU driver that returned an error code.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
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
