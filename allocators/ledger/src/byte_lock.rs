//! Locks on byte ranges by open file description, which the kernel releases when the last process
//! that has the description open ends.

use crate::layout::{HEADER_BYTES, SLOT_BYTES};
use nix::{
    errno::Errno,
    fcntl::{FcntlArg, fcntl},
    libc,
};
use std::{fs::File, io};

/// A range of a ledger that is locked as a whole.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum LockRange {
    /// The right to join, and to change what belongs to no member.
    Membership,
    /// A slot, locked by its member.
    Slot(usize),
}

impl LockRange {
    fn lock(self, kind: i32) -> libc::flock {
        let (start, len) = match self {
            Self::Membership => (0, HEADER_BYTES),
            Self::Slot(number) => (HEADER_BYTES + number * SLOT_BYTES, SLOT_BYTES),
        };
        libc::flock {
            l_type: kind as libc::c_short,
            l_whence: libc::SEEK_SET as libc::c_short,
            l_start: start as libc::off_t,
            l_len: len as libc::off_t,
            // Required of locks by open file description.
            l_pid: 0,
        }
    }

    /// Locks the range unless another description has it. Returns whether it did.
    pub(crate) fn try_lock(self, file: &File) -> io::Result<bool> {
        match fcntl(file, FcntlArg::F_OFD_SETLK(&self.lock(libc::F_WRLCK))) {
            Ok(_) => Ok(true),
            Err(Errno::EAGAIN | Errno::EACCES) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    pub(crate) fn unlock(self, file: &File) {
        // Unlocking may need memory to split a range. The lock then ends with the description.
        let _refused = fcntl(file, FcntlArg::F_OFD_SETLK(&self.lock(libc::F_UNLCK)));
    }

    /// Returns whether another description has the range locked.
    pub(crate) fn is_locked(self, file: &File) -> io::Result<bool> {
        let mut found = self.lock(libc::F_WRLCK);
        fcntl(file, FcntlArg::F_OFD_GETLK(&mut found))?;
        Ok(i32::from(found.l_type) != libc::F_UNLCK)
    }
}
