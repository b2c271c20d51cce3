//! A memory barrier on every thread of the process (`membarrier`).
#![expect(unsafe_code, reason = "makes system calls")]

use super::{Kernel, Result, SystemCall};
use aquifer_core::SystemError;
use nix::libc::{self, c_int, c_long};
use std::sync::OnceLock;

const PRIVATE_EXPEDITED: c_int = 1 << 3;
const REGISTER_PRIVATE_EXPEDITED: c_int = 1 << 4;

fn membarrier(command: c_int) -> Result<()> {
    // SAFETY: 1. the call takes only numbers, and changes no memory.
    let answer: c_long = unsafe { libc::syscall(libc::SYS_membarrier, command, 0, 0) };
    if answer == 0 { Ok(()) } else { Err(super::last_error("membarrier")) }
}

impl Kernel {
    /// Returns whether [`Kernel::barrier`] is available. The first call registers the process with
    /// the kernel, which takes some milliseconds if it has several threads, and caches the result.
    #[must_use]
    pub fn offers_barrier(&self) -> bool {
        static OFFERED: OnceLock<bool> = OnceLock::new();
        *OFFERED.get_or_init(|| membarrier(REGISTER_PRIVATE_EXPEDITED).is_ok())
    }

    /// Executes a full memory barrier on every running thread of the process
    /// (`MEMBARRIER_CMD_PRIVATE_EXPEDITED`). Takes some microseconds.
    ///
    /// Assume that one thread writes A and then reads B, with only a compiler fence between, and
    /// another thread writes B, calls this, and then reads A. At least one of them sees the other's
    /// write.
    ///
    /// # Errors
    /// `EPERM` if the process is not registered, `ENOSYS` or a sandbox's error if the call is not
    /// available.
    pub fn barrier(&self) -> Result<()> {
        self.intercept(SystemCall::Barrier)?;
        if !self.offers_barrier() {
            return Err(SystemError { call: "membarrier", errno: libc::ENOSYS });
        }
        membarrier(PRIVATE_EXPEDITED)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::Faults;
    use std::sync::Arc;

    #[test]
    fn barrier_succeeds_where_offered_and_fails_as_planned() {
        let faults = Arc::new(Faults::new());
        let kernel = Kernel::with_faults(faults.clone());
        assert_eq!(kernel.barrier().is_ok(), kernel.offers_barrier());
        faults.fail(SystemCall::Barrier, 1, libc::EPERM);
        assert_eq!(kernel.barrier(), Err(SystemError { call: "membarrier", errno: libc::EPERM }));
    }
}
