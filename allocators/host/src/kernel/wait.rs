//! Waiting for another thread, for a memory stall reported by the kernel, or for a timeout.
#![expect(unsafe_code, reason = "makes system calls")]

use super::{Kernel, Result, SystemCall, last_error};
use aquifer_core::SystemError;
use nix::libc;
use std::{
    fs::OpenOptions,
    io::Write,
    os::fd::{AsRawFd, FromRawFd, OwnedFd},
    path::Path,
    time::Duration,
};

/// Ends a [`Kernel::wait`] of another thread: the current one, or else the next.
///
/// ```
/// use aquifer_host::kernel::Kernel;
/// use std::time::Duration;
/// let kernel = Kernel::new();
/// let bell = kernel.bell()?;
/// bell.ring();
/// assert!(kernel.wait(&bell, None, Duration::from_secs(60))?.rung);
/// assert!(!kernel.wait(&bell, None, Duration::ZERO)?.rung); // a ring ends one wait
/// # Ok::<(), aquifer_core::SystemError>(())
/// ```
#[derive(Debug)]
pub struct Bell(OwnedFd);

impl Bell {
    /// Rings the bell. Never blocks.
    pub fn ring(&self) {
        let one = 1u64.to_ne_bytes();
        // SAFETY: 1. the file is open. 2. exactly `one.len()` bytes are read. If the counter is
        // full, the bell has been rung already.
        unsafe { libc::write(self.0.as_raw_fd(), one.as_ptr().cast(), one.len()) };
    }

    fn clear(&self) {
        let mut count = [0u8; 8];
        // SAFETY: 1. the file is open. 2. exactly `count.len()` bytes are written. It does not
        // block.
        unsafe { libc::read(self.0.as_raw_fd(), count.as_mut_ptr().cast(), count.len()) };
    }
}

/// A trigger on a pressure (PSI) file: the kernel reports when memory has stalled some thread for
/// too long.
///
/// See [`Kernel::stall_alarm`] for an example.
#[derive(Debug)]
pub struct StallAlarm(OwnedFd);

/// Why a wait has ended. All fields are `false` after a timeout or a signal.
///
/// See [`Bell`] for an example.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Woken {
    /// The bell was rung.
    pub rung: bool,
    /// Memory has stalled some thread.
    pub stalled: bool,
    /// The alarm is dead: its control group is gone.
    pub over: bool,
}

impl Kernel {
    /// Creates a bell (`eventfd`).
    ///
    /// # Errors
    /// `EMFILE`, `ENFILE`, `ENOMEM`.
    pub fn bell(&self) -> Result<Bell> {
        self.intercept(SystemCall::Bell)?;
        // SAFETY: 1. takes two numbers.
        let file = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
        if file < 0 {
            return Err(last_error("eventfd"));
        }
        // SAFETY: 1. it was just opened, and has no other owner.
        Ok(Bell(unsafe { OwnedFd::from_raw_fd(file) }))
    }

    /// Creates an alarm on the pressure file `path` (`open`, `write`). It goes off, at most once in
    /// each window `within`, when memory has stalled some thread for `stalled` of it. Without
    /// privileges `within` must be a multiple of two seconds.
    ///
    /// ```
    /// use aquifer_host::kernel::Kernel;
    /// use std::{path::Path, time::Duration};
    /// let (stalled, within) = (Duration::from_millis(100), Duration::from_secs(2));
    /// match Kernel::new().stall_alarm(Path::new("/proc/pressure/memory"), stalled, within) {
    ///     Ok(_alarm) => println!("the kernel reports stalls"),
    ///     Err(refused) => println!("read its averages instead: {refused}"),
    /// }
    /// ```
    ///
    /// # Errors
    /// `ENOENT` if the kernel has no pressure accounting, `EOPNOTSUPP` if it is disabled, `EINVAL`,
    /// `EACCES` and `EPERM` for what the process may not request, `EROFS` in containers.
    pub fn stall_alarm(
        &self,
        path: &Path,
        stalled: Duration,
        within: Duration,
    ) -> Result<StallAlarm> {
        self.intercept(SystemCall::StallAlarm)?;
        let refused = |call| {
            move |e: std::io::Error| SystemError {
                call,
                errno: e.raw_os_error().unwrap_or(libc::EINVAL),
            }
        };
        let mut file =
            OpenOptions::new().read(true).write(true).open(path).map_err(refused("open"))?;
        // The kernel expects the terminating zero of a C string.
        let trigger = format!("some {} {}\0", stalled.as_micros(), within.as_micros());
        file.write_all(trigger.as_bytes()).map_err(refused("write"))?;
        Ok(StallAlarm(file.into()))
    }

    /// Waits until the bell rings, the alarm goes off, or `most` has passed (`poll`). A signal also
    /// ends the wait.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub fn wait(&self, bell: &Bell, alarm: Option<&StallAlarm>, most: Duration) -> Result<Woken> {
        self.intercept(SystemCall::Wait)?;
        let of = |file: &OwnedFd, events| libc::pollfd { fd: file.as_raw_fd(), events, revents: 0 };
        // `poll` ignores a negative file descriptor.
        let none = libc::pollfd { fd: -1, events: 0, revents: 0 };
        let mut files =
            [of(&bell.0, libc::POLLIN), alarm.map_or(none, |alarm| of(&alarm.0, libc::POLLPRI))];
        // Rounded up, so that a wait of less than a millisecond does not spin.
        let most = i32::try_from(most.as_micros().div_ceil(1000)).unwrap_or(i32::MAX);
        // SAFETY: 1. there are two entries, and they live until the call returns. 2. the files are
        // open.
        let answer = unsafe { libc::poll(files.as_mut_ptr(), 2, most) };
        if answer < 0 {
            let error = last_error("poll");
            return if error.errno == libc::EINTR { Ok(Woken::default()) } else { Err(error) };
        }
        let rung = files[0].revents != 0;
        if rung {
            bell.clear();
        }
        let alarm_events = files[1].revents;
        Ok(Woken {
            rung,
            stalled: alarm_events & libc::POLLPRI != 0,
            over: alarm_events & (libc::POLLERR | libc::POLLNVAL) != 0,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{fs, sync::Arc, thread, time::Instant};

    #[test]
    fn ring_ends_one_wait() {
        let (kernel, bell) = (Kernel::new(), Arc::new(Kernel::new().bell().unwrap()));
        let there = bell.clone();
        let waiter = thread::spawn(move || {
            let start = Instant::now();
            (kernel.wait(&there, None, Duration::from_secs(60)).unwrap(), start.elapsed())
        });
        thread::sleep(Duration::from_millis(20));
        bell.ring();
        let (woken, took) = waiter.join().unwrap();
        assert!(woken.rung && !woken.stalled && took < Duration::from_secs(30), "{took:?}");
        assert_eq!(Kernel::new().wait(&bell, None, Duration::ZERO).unwrap(), Woken::default());
    }

    #[test]
    fn alarm_on_a_file_without_pressure_fails_or_ends_but_never_hangs() {
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
        // The kernel reports a plain file as always ready, or not at all.
        let bell = kernel.bell().unwrap();
        kernel.wait(&bell, Some(&alarm), Duration::from_millis(1)).unwrap();
        fs::remove_file(plain).unwrap();
    }
}
