//! A progress line on the terminal.
//!
//! - It is written to stderr, and only if stderr is a terminal.
//! - It appears only after the work has taken a while, and is erased at the end, so that it is
//!   never part of a file or of the result.

use std::{
    fmt,
    io::{self, IsTerminal, Write},
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    thread::{self, Thread},
    time::{Duration, Instant},
};

/// The delay before the line appears.
const PATIENCE: Duration = Duration::from_millis(400);
/// The interval between two updates.
const PACE: Duration = Duration::from_millis(100);

/// A progress display, shown or silent.
#[derive(Debug)]
pub(crate) struct Progress {
    shown: bool,
    /// The time of the next update, or none if the display is silent.
    next: Option<Instant>,
    /// The name of the current phase.
    phase: String,
}

impl Progress {
    /// Creates a display that is shown if stderr is a terminal.
    pub(crate) fn on_terminal() -> Self {
        Self::new(io::stderr().is_terminal())
    }

    /// Creates a display that shows nothing.
    #[cfg(test)]
    pub(crate) fn silent() -> Self {
        Self::new(false)
    }

    fn new(seen: bool) -> Self {
        Self { shown: false, next: seen.then(|| Instant::now() + PATIENCE), phase: String::new() }
    }

    /// Sets the name of the current phase.
    pub(crate) fn phase(&mut self, phase: impl fmt::Display) {
        if self.next.is_some() {
            self.phase = phase.to_string();
        }
    }

    /// Updates the display: `done` of `all` is complete.
    pub(crate) fn at(&mut self, done: u64, all: u64) {
        let Some(next) = self.next else { return };
        let now = Instant::now();
        if now < next {
            return;
        }
        self.next = Some(now + PACE);
        self.shown = true;
        let percent = (done.min(all) * 100).checked_div(all).unwrap_or(100);
        // A failure to write to the terminal has no consequences.
        let _ = write!(io::stderr(), "\r\x1b[K{} {percent:>3} %", self.phase);
    }

    /// Runs `work` and displays its progress meanwhile. `work` counts in `done`, up to `all`.
    pub(crate) fn during<T>(&mut self, done: &AtomicU64, all: u64, work: impl FnOnce() -> T) -> T {
        /// Ends the display thread, also on unwind.
        struct Over<'a>(&'a AtomicBool, Thread);
        impl Drop for Over<'_> {
            fn drop(&mut self) {
                self.0.store(true, Ordering::Relaxed);
                self.1.unpark();
            }
        }
        if self.next.is_none() {
            return work();
        }
        let over = AtomicBool::new(false);
        thread::scope(|scope| {
            let looker = scope.spawn(|| {
                while !over.load(Ordering::Relaxed) {
                    self.at(done.load(Ordering::Relaxed), all);
                    thread::park_timeout(PACE);
                }
            });
            let _over = Over(&over, looker.thread().clone());
            work()
        })
    }

    /// Erases the line.
    pub(crate) fn clear(&mut self) {
        if std::mem::take(&mut self.shown) {
            let _ = write!(io::stderr(), "\r\x1b[K");
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_that_takes_a_while_is_told_of_while_it_runs() {
        let mut progress = Progress::new(true);
        let done = AtomicU64::new(0);
        let answer = progress.during(&done, 4, || {
            for _ in 0..4 {
                thread::sleep(PATIENCE / 2);
                done.fetch_add(1, Ordering::Relaxed);
            }
            7
        });
        assert!(answer == 7 && progress.shown, "a line came before the work was over");
        assert_eq!(Progress::silent().during(&done, 4, || 8), 8);
    }
}
