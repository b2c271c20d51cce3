//! A memory barrier on every thread of the process (`membarrier`).
#![expect(unsafe_code, reason = "makes system calls")]

use super::{Kernel, Result, SystemCall};
use aquifer_core::SystemError;
use nix::libc::{self, c_int, c_long};
use std::sync::OnceLock;

const PRIVATE_EXPEDITED: c_int = 1 << 3;
const REGISTER_PRIVATE_EXPEDITED: c_int = 1 << 4;

fn membarrier(command: c_int) -> Result<()> {
    // SAFETY: 1. the call takes numbers only, and changes no memory.
    let answer: c_long = unsafe { libc::syscall(libc::SYS_membarrier, command, 0, 0) };
    if answer == 0 { Ok(()) } else { Err(super::last("membarrier")) }
}

impl Kernel {
    /// Whether [`Kernel::barrier`] is to be had: announces it to the kernel at the first call (some
    /// milliseconds where the process has several threads), and remembers the answer.
    #[must_use]
    pub fn offers_barrier(&self) -> bool {
        static OFFERED: OnceLock<bool> = OnceLock::new();
        *OFFERED.get_or_init(|| membarrier(REGISTER_PRIVATE_EXPEDITED).is_ok())
    }

    /// Makes every thread of the process that runs now pass a full memory barrier
    /// (`MEMBARRIER_CMD_PRIVATE_EXPEDITED`): of two threads of which one writes A, then reads B,
    /// with nothing but a compiler fence between, and the other writes B, calls this, then reads A,
    /// at least one sees what the other wrote. Some microseconds.
    ///
    /// # Errors
    /// `EPERM` where it has not been announced, `ENOSYS` or what a sandbox answers where it is not
    /// to be had.
    pub fn barrier(&self) -> Result<()> {
        self.ask(SystemCall::Barrier)?;
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
    fn a_barrier_is_made_where_it_is_offered_and_fails_by_plan() {
        let faults = Arc::new(Faults::new());
        let kernel = Kernel::with_faults(faults.clone());
        assert_eq!(kernel.barrier().is_ok(), kernel.offers_barrier());
        faults.fail(SystemCall::Barrier, 1, libc::EPERM);
        assert_eq!(kernel.barrier(), Err(SystemError { call: "membarrier", errno: libc::EPERM }));
    }
}
