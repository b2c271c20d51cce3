//! A line on the terminal that says how far long work has come.
//!
//! It stands on stderr, only if that is a terminal, only once the work has taken a while, and it is wiped away when the
//! work is done: nothing of it is ever in a file or behind the result.

use std::{
    fmt,
    io::{self, IsTerminal, Write},
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
