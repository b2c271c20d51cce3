//! A line on the terminal that says how far long work has come.
//!
//! It stands on stderr, only if that is a terminal, only once the work has taken a while, and it is
//! wiped away when the work is done: nothing of it is ever in a file or behind the result.

use std::{
    fmt,
    io::{self, IsTerminal, Write},
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    thread::{self, Thread},
    time::{Duration, Instant},
};

/// How long work may take before it says anything.
const PATIENCE: Duration = Duration::from_millis(400);
/// The time between two versions of the line.
const PACE: Duration = Duration::from_millis(100);

/// Says how far work has come, or says nothing.
#[derive(Debug)]
pub(crate) struct Progress {
    shown: bool,
    /// None where nobody looks.
    next: Option<Instant>,
    /// What is being done.
    phase: String,
}

impl Progress {
    /// For whoever sits at the terminal, if anybody does.
    pub(crate) fn on_terminal() -> Self {
        Self::new(io::stderr().is_terminal())
    }

    /// For nobody.
    #[cfg(test)]
    pub(crate) fn silent() -> Self {
        Self::new(false)
    }

    fn new(seen: bool) -> Self {
        Self { shown: false, next: seen.then(|| Instant::now() + PATIENCE), phase: String::new() }
    }

    /// What is being done from now on.
    pub(crate) fn phase(&mut self, phase: impl fmt::Display) {
        if self.next.is_some() {
            self.phase = phase.to_string();
        }
    }

    /// `done` of `all` is done.
    pub(crate) fn at(&mut self, done: u64, all: u64) {
        let Some(next) = self.next else { return };
        let now = Instant::now();
        if now < next {
            return;
        }
        self.next = Some(now + PACE);
        self.shown = true;
        let percent = (done.min(all) * 100).checked_div(all).unwrap_or(100);
        // A terminal that cannot be written to shows nothing, and nothing depends on it.
        let _ = write!(io::stderr(), "\r\x1b[K{} {percent:>3} %", self.phase);
    }

    /// Does `work`, which counts in `done` what it has done of `all`, and says meanwhile how far it
    /// has come.
    pub(crate) fn during<T>(&mut self, done: &AtomicU64, all: u64, work: impl FnOnce() -> T) -> T {
        /// Ends the thread that looks, also on unwind.
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

    /// Wipes the line away.
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
