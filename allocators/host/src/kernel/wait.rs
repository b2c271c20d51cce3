//! Waiting for another thread, for the kernel's word that memory stalls, or for time to pass:
//! whichever is first.
#![expect(unsafe_code, reason = "makes system calls")]

use super::{Kernel, Result, SystemCall, last};
use aquifer_core::SystemError;
use nix::libc;
use std::{
    fs::OpenOptions,
    io::Write,
    os::fd::{AsRawFd, FromRawFd, OwnedFd},
    path::Path,
    time::Duration,
};

/// Ends another thread's [`Kernel::wait`], the one under way or the next.
///
/// ```
/// use aquifer_host::kernel::Kernel;
/// use std::time::Duration;
/// let kernel = Kernel::new();
/// let bell = kernel.bell()?;
/// bell.ring();
/// assert!(kernel.wait(&bell, None, Duration::from_secs(60))?.rung);
/// assert!(!kernel.wait(&bell, None, Duration::ZERO)?.rung); // heard once
/// # Ok::<(), aquifer_core::SystemError>(())
/// ```
#[derive(Debug)]
pub struct Bell(OwnedFd);

impl Bell {
    /// Rings. Never blocks.
    pub fn ring(&self) {
        let one = 1u64.to_ne_bytes();
        // SAFETY: 1. the file is open. 2. as many bytes are read as are told. A full counter has
        // been rung already.
        unsafe { libc::write(self.0.as_raw_fd(), one.as_ptr().cast(), one.len()) };
    }

    fn hear(&self) {
        let mut count = [0u8; 8];
        // SAFETY: 1. the file is open. 2. as many bytes are written as are told. It does not block.
        unsafe { libc::read(self.0.as_raw_fd(), count.as_mut_ptr().cast(), count.len()) };
    }
}

/// The kernel's promise to tell when memory has kept some thread waiting for too long: a trigger on
/// a PSI file.
///
/// Its example is that of [`Kernel`].
#[derive(Debug)]
pub struct StallAlarm(OwnedFd);

/// Why a wait has ended; time has passed, or a signal came, if for nothing of this.
///
/// Its example is that of [`Kernel`].
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Woken {
    /// The bell was rung.
    pub rung: bool,
    /// Memory has kept somebody waiting.
    pub stalled: bool,
    /// The alarm will never tell again: its control group is gone.
    pub over: bool,
}

impl Kernel {
    /// A bell (`eventfd`).
    ///
    /// # Errors
    /// `EMFILE`, `ENFILE`, `ENOMEM`.
    pub fn bell(&self) -> Result<Bell> {
        self.ask(SystemCall::Bell)?;
        // SAFETY: 1. takes two numbers.
        let file = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
        if file < 0 {
            return Err(last("eventfd"));
        }
        // SAFETY: 1. it was opened just now and is nobody else's.
        Ok(Bell(unsafe { OwnedFd::from_raw_fd(file) }))
    }

    /// Has the kernel tell, once in each span `within`, when some thread was kept waiting by memory
    /// for `stalled` of it, at the pressure file `path` (`open`, `write`). Without privileges
    /// `within` has to be a multiple of two seconds.
    ///
    /// ```
    /// use aquifer_host::kernel::Kernel;
    /// use std::{path::Path, time::Duration};
    /// let (stalled, within) = (Duration::from_millis(100), Duration::from_secs(2));
    /// match Kernel::new().stall_alarm(Path::new("/proc/pressure/memory"), stalled, within) {
    ///     Ok(_alarm) => println!("the kernel tells"),
    ///     Err(refused) => println!("read its averages instead: {refused}"),
    /// }
    /// ```
    ///
    /// # Errors
    /// `ENOENT` where the kernel keeps no such account, `EOPNOTSUPP` where it was told not to,
    /// `EINVAL`, `EACCES` and `EPERM` for what the process may not ask, `EROFS` in containers.
    pub fn stall_alarm(
        &self,
        path: &Path,
        stalled: Duration,
        within: Duration,
    ) -> Result<StallAlarm> {
        self.ask(SystemCall::StallAlarm)?;
        let refused = |call| {
            move |e: std::io::Error| SystemError {
                call,
                errno: e.raw_os_error().unwrap_or(libc::EINVAL),
            }
        };
        let mut file =
            OpenOptions::new().read(true).write(true).open(path).map_err(refused("open"))?;
        // The kernel wants the zero that ends a text of C's.
        let trigger = format!("some {} {}\0", stalled.as_micros(), within.as_micros());
        file.write_all(trigger.as_bytes()).map_err(refused("write"))?;
        Ok(StallAlarm(file.into()))
    }

    /// Waits until the bell rings, the alarm goes off, or `most` has passed (`poll`). A signal ends
    /// it early.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub fn wait(&self, bell: &Bell, alarm: Option<&StallAlarm>, most: Duration) -> Result<Woken> {
        self.ask(SystemCall::Wait)?;
        let of = |file: &OwnedFd, events| libc::pollfd { fd: file.as_raw_fd(), events, revents: 0 };
        // A file below zero is passed over.
        let none = libc::pollfd { fd: -1, events: 0, revents: 0 };
        let mut files =
            [of(&bell.0, libc::POLLIN), alarm.map_or(none, |alarm| of(&alarm.0, libc::POLLPRI))];
        // Rounded up: a wait of less than a millisecond must not spin.
        let most = i32::try_from(most.as_micros().div_ceil(1000)).unwrap_or(i32::MAX);
        // SAFETY: 1. there are two of them, and they live until it returns. 2. the files are open.
        let answer = unsafe { libc::poll(files.as_mut_ptr(), 2, most) };
        if answer < 0 {
            let error = last("poll");
            return if error.errno == libc::EINTR { Ok(Woken::default()) } else { Err(error) };
        }
        let rung = files[0].revents != 0;
        if rung {
            bell.hear();
        }
        let told = files[1].revents;
        Ok(Woken {
            rung,
            stalled: told & libc::POLLPRI != 0,
            over: told & (libc::POLLERR | libc::POLLNVAL) != 0,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{fs, sync::Arc, thread, time::Instant};

    #[test]
    fn a_ring_ends_the_wait_under_way_and_is_heard_once() {
        let (kernel, bell) = (Kernel::new(), Arc::new(Kernel::new().bell().unwrap()));
        let there = bell.clone();
        let waiter = thread::spawn(move || {
            let begun = Instant::now();
            (kernel.wait(&there, None, Duration::from_secs(60)).unwrap(), begun.elapsed())
        });
        thread::sleep(Duration::from_millis(20));
        bell.ring();
        let (woken, took) = waiter.join().unwrap();
        assert!(woken.rung && !woken.stalled && took < Duration::from_secs(30), "{took:?}");
        assert_eq!(Kernel::new().wait(&bell, None, Duration::ZERO).unwrap(), Woken::default());
    }

    #[test]
    fn what_is_no_pressure_file_is_an_error_or_an_alarm_that_is_over_and_never_a_hang() {
        let kernel = Kernel::new();
        let (stalled, within) = (Duration::from_millis(100), Duration::from_secs(2));
        let missing =
            kernel.stall_alarm(Path::new("/nonexistent/memory.pressure"), stalled, within);
        assert_eq!(missing.unwrap_err().errno, libc::ENOENT);
        let plain =
            std::env::temp_dir().join(format!("aquifer-no-pressure-{}", std::process::id()));
        fs::write(&plain, "").unwrap();
        let alarm = kernel.stall_alarm(&plain, stalled, within).unwrap();
        assert_eq!(fs::read_to_string(&plain).unwrap(), "some 100000 2000000\0");
        // The kernel calls a plain file ready at any time, or not at all.
        let bell = kernel.bell().unwrap();
        kernel.wait(&bell, Some(&alarm), Duration::from_millis(1)).unwrap();
        fs::remove_file(plain).unwrap();
    }
}
