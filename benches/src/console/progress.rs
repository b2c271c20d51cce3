//! A progress line on the terminal, drawn by `indicatif`.
//!
//! - It is written to stderr, and only if stderr is a terminal.
//! - It has text only after the work has taken a while, and is erased at the end, so that it is
//!   never part of a file or of the result.
//! - A thread draws it ten times a second, so work that counts nothing is displayed too, and
//!   [`ProgressLine::at`] costs two stores. The cursor stays visible, so a signal that ends the
//!   program leaves the terminal as it was.

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressFinish, ProgressState, ProgressStyle};
use std::{
    fmt::{self, Write},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

/// The delay before the line has text.
const PATIENCE: Duration = Duration::from_millis(400);
/// The interval between two updates.
const PACE: Duration = Duration::from_millis(100);

/// The line, shown or silent.
#[derive(Debug)]
pub struct ProgressLine {
    bar: ProgressBar,
    /// How much of the current phase is complete.
    done: Arc<AtomicU64>,
    /// Zero if the phase has not counted anything yet.
    all: Arc<AtomicU64>,
    name: Arc<Mutex<String>>,
}

impl ProgressLine {
    /// Creates a display that is shown if stderr is a terminal.
    pub fn on_terminal() -> Self {
        Self::new(ProgressDrawTarget::stderr())
    }

    /// Creates a display that shows nothing.
    pub fn silent() -> Self {
        Self::new(ProgressDrawTarget::hidden())
    }

    fn new(target: ProgressDrawTarget) -> Self {
        let (done, all) = (Arc::<AtomicU64>::default(), Arc::<AtomicU64>::default());
        let name = Arc::<Mutex<String>>::default();
        let shown = (done.clone(), all.clone(), name.clone());
        let from = Instant::now() + PATIENCE;
        let line = move |_: &ProgressState, to: &mut dyn Write| {
            if Instant::now() < from {
                return;
            }
            let all = shown.1.load(Ordering::Relaxed);
            let done = shown.0.load(Ordering::Relaxed).min(all);
            // A line that cannot be formatted is not drawn.
            let _ = to.write_str(&shown.2.lock().unwrap_or_else(PoisonError::into_inner));
            if let Some(percent) = (u128::from(done) * 100).checked_div(u128::from(all)) {
                let _ = write!(to, " {percent:>3} %");
            }
        };
        let style = ProgressStyle::with_template("{line}")
            .unwrap_or_else(|_| ProgressStyle::default_spinner())
            .with_key("line", line);
        let bar = ProgressBar::with_draw_target(None, target)
            .with_finish(ProgressFinish::AndClear)
            .with_style(style);
        Self { bar, done, all, name }
    }

    /// Sets the name of the current phase, of which nothing is counted yet.
    pub fn phase(&mut self, phase: impl fmt::Display) {
        self.all.store(0, Ordering::Relaxed);
        if self.bar.is_hidden() {
            return;
        }
        if self.bar.is_finished() {
            self.bar.reset();
        }
        *self.name.lock().unwrap_or_else(PoisonError::into_inner) = phase.to_string();
        self.bar.enable_steady_tick(PACE);
    }

    /// Updates the display: `done` of `all` is complete.
    pub fn at(&mut self, done: u64, all: u64) {
        // A frame between the two stores may show a wrong share, and the next one is right.
        self.done.store(done, Ordering::Relaxed);
        self.all.store(all, Ordering::Relaxed);
    }

    /// Returns a counter of what is complete in the current phase, up to `all`. Any thread may
    /// add to it.
    pub fn count_to(&mut self, all: u64) -> Arc<AtomicU64> {
        self.at(0, all);
        self.done.clone()
    }

    /// Erases the line, until the next phase.
    pub fn clear(&mut self) {
        self.bar.finish_and_clear();
    }
}

impl Drop for ProgressLine {
    fn drop(&mut self) {
        self.clear();
    }
}
