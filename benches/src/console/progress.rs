//! A progress line on the terminal, drawn by `indicatif`.
//!
//! - It is written to stderr, and only if stderr is a terminal.
//! - It appears only after the work has taken a while, and is erased at the end, so that it is
//!   never part of a file or of the result.
//! - A thread draws it ten times a second, so work that counts nothing is displayed too, and
//!   [`ProgressLine::at`] costs two stores. The cursor stays visible, so a signal that ends the
//!   program leaves the terminal as it was.

use console::Term;
use indicatif::{
    ProgressBar, ProgressDrawTarget, ProgressFinish, ProgressState, ProgressStyle, TermLike,
};
use std::{
    fmt::{self, Write},
    io::{self, IsTerminal},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::{self, Thread},
    time::{Duration, Instant},
};

/// The delay before the line appears.
const PATIENCE: Duration = Duration::from_millis(400);
/// The interval between two updates.
const PACE: Duration = Duration::from_millis(100);

/// The line, shown or silent.
#[derive(Debug)]
pub struct ProgressLine {
    bar: ProgressBar,
    share: Arc<Share>,
}

/// How much of the current phase is complete.
#[derive(Debug, Default)]
struct Share {
    done: AtomicU64,
    /// Zero if the phase has not counted anything yet.
    all: AtomicU64,
}

impl ProgressLine {
    /// Creates a display that is shown if stderr is a terminal.
    pub fn on_terminal() -> Self {
        if io::stderr().is_terminal() {
            Self::new(Box::new(LateTerminal::new(Term::buffered_stderr())))
        } else {
            Self::silent()
        }
    }

    /// Creates a display that shows nothing.
    pub fn silent() -> Self {
        Self { bar: ProgressBar::hidden(), share: Arc::default() }
    }

    fn new(terminal: Box<dyn TermLike>) -> Self {
        let share = Arc::<Share>::default();
        let style = ProgressStyle::with_template("{msg}{share}")
            .unwrap_or_else(|_| ProgressStyle::default_spinner());
        let counted = share.clone();
        let style = style.with_key("share", move |_: &ProgressState, to: &mut dyn Write| {
            let all = counted.all.load(Ordering::Relaxed);
            let done = counted.done.load(Ordering::Relaxed).min(all);
            if let Some(percent) = (u128::from(done) * 100).checked_div(u128::from(all)) {
                // A line that cannot be formatted is not drawn.
                let _ = write!(to, " {percent:>3} %");
            }
        });
        let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::term_like(terminal))
            .with_finish(ProgressFinish::AndClear)
            .with_style(style);
        bar.enable_steady_tick(PACE);
        Self { bar, share }
    }

    /// Sets the name of the current phase, of which nothing is counted yet.
    pub fn phase(&mut self, phase: impl fmt::Display) {
        self.share.all.store(0, Ordering::Relaxed);
        if self.bar.is_hidden() {
            return;
        }
        if self.bar.is_finished() {
            self.bar.reset();
            self.bar.enable_steady_tick(PACE);
        }
        self.bar.set_message(phase.to_string());
    }

    /// Updates the display: `done` of `all` is complete.
    pub fn at(&mut self, done: u64, all: u64) {
        // A frame between the two stores may show a wrong share, and the next one is right.
        self.share.done.store(done, Ordering::Relaxed);
        self.share.all.store(all, Ordering::Relaxed);
    }

    /// Runs `work` and displays its progress meanwhile. `work` counts in `done`, up to `all`.
    pub fn during<T>(&mut self, done: &AtomicU64, all: u64, work: impl FnOnce() -> T) -> T {
        /// Ends the display thread, also on unwind.
        struct Over<'a>(&'a AtomicBool, Thread);
        impl Drop for Over<'_> {
            fn drop(&mut self) {
                self.0.store(true, Ordering::Relaxed);
                self.1.unpark();
            }
        }
        if self.bar.is_hidden() {
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

/// A terminal that ignores what is drawn before the work has taken a while, and that erases only
/// what it has shown.
#[derive(Debug)]
struct LateTerminal<T> {
    terminal: T,
    /// When drawing begins.
    from: Instant,
    shown: AtomicBool,
}

impl<T: TermLike> LateTerminal<T> {
    fn new(terminal: T) -> Self {
        Self { terminal, from: Instant::now() + PATIENCE, shown: AtomicBool::new(false) }
    }

    fn once_shown(&self, draw: impl FnOnce(&T) -> io::Result<()>) -> io::Result<()> {
        if self.shown.load(Ordering::Relaxed) { draw(&self.terminal) } else { Ok(()) }
    }

    fn moved(&self, by: usize, go: fn(&T, usize) -> io::Result<()>) -> io::Result<()> {
        if by == 0 { Ok(()) } else { self.once_shown(|terminal| go(terminal, by)) }
    }
}

impl<T: TermLike> TermLike for LateTerminal<T> {
    fn width(&self) -> u16 {
        self.terminal.width()
    }

    fn height(&self) -> u16 {
        self.terminal.height()
    }

    fn move_cursor_up(&self, n: usize) -> io::Result<()> {
        self.moved(n, T::move_cursor_up)
    }

    fn move_cursor_down(&self, n: usize) -> io::Result<()> {
        self.moved(n, T::move_cursor_down)
    }

    fn move_cursor_right(&self, n: usize) -> io::Result<()> {
        self.moved(n, T::move_cursor_right)
    }

    fn move_cursor_left(&self, n: usize) -> io::Result<()> {
        self.moved(n, T::move_cursor_left)
    }

    fn write_line(&self, s: &str) -> io::Result<()> {
        self.once_shown(|terminal| terminal.write_line(s))
    }

    fn write_str(&self, s: &str) -> io::Result<()> {
        if !s.trim().is_empty() && Instant::now() >= self.from {
            self.shown.store(true, Ordering::Relaxed);
        }
        self.once_shown(|terminal| terminal.write_str(s))
    }

    /// Erases to the end of the line only, which is enough at its beginning.
    fn clear_line(&self) -> io::Result<()> {
        self.once_shown(|terminal| terminal.write_str("\r\x1b[K"))
    }

    fn flush(&self) -> io::Result<()> {
        self.terminal.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Mutex;

    /// A terminal of 40 columns that keeps what is written to it.
    #[derive(Clone, Debug, Default)]
    struct Kept(Arc<Mutex<String>>);

    impl Kept {
        fn text(&self) -> String {
            self.0.lock().unwrap().clone()
        }
    }

    impl TermLike for Kept {
        fn width(&self) -> u16 {
            40
        }
        fn move_cursor_up(&self, n: usize) -> io::Result<()> {
            self.write_str(&format!("\x1b[{n}A"))
        }
        fn move_cursor_down(&self, n: usize) -> io::Result<()> {
            self.write_str(&format!("\x1b[{n}B"))
        }
        fn move_cursor_right(&self, n: usize) -> io::Result<()> {
            self.write_str(&format!("\x1b[{n}C"))
        }
        fn move_cursor_left(&self, n: usize) -> io::Result<()> {
            self.write_str(&format!("\x1b[{n}D"))
        }
        fn write_line(&self, s: &str) -> io::Result<()> {
            self.write_str(&format!("{s}\n"))
        }
        fn write_str(&self, s: &str) -> io::Result<()> {
            self.0.lock().unwrap().push_str(s);
            Ok(())
        }
        fn clear_line(&self) -> io::Result<()> {
            self.write_str("\r\x1b[2K")
        }
        fn flush(&self) -> io::Result<()> {
            Ok(())
        }
    }

    fn line() -> (ProgressLine, Kept) {
        let kept = Kept::default();
        (ProgressLine::new(Box::new(LateTerminal::new(kept.clone()))), kept)
    }

    #[test]
    fn work_that_takes_a_while_is_told_of_while_it_runs() {
        let (mut progress, terminal) = line();
        progress.phase("copying:");
        let done = AtomicU64::new(0);
        let answer = progress.during(&done, 4, || {
            for _ in 0..4 {
                thread::sleep(PATIENCE / 2);
                done.fetch_add(1, Ordering::Relaxed);
            }
            7
        });
        let told = terminal.text();
        assert!(answer == 7 && told.contains("copying:  50 %"), "{told:?}");
        drop(progress);
        assert!(terminal.text().ends_with("\r\x1b[K"), "{:?}", terminal.text());
        assert_eq!(ProgressLine::silent().during(&done, 4, || 8), 8);
    }

    #[test]
    fn a_phase_that_counts_nothing_is_displayed_without_a_share() {
        let (mut progress, terminal) = line();
        progress.at(1, 2);
        progress.phase("opening the device");
        thread::sleep(PATIENCE * 2);
        let told = terminal.text();
        assert!(told.contains("opening the device") && !told.contains('%'), "{told:?}");
    }

    #[test]
    fn a_line_that_was_erased_is_displayed_again_by_the_next_phase() {
        let (mut progress, terminal) = line();
        progress.phase("one");
        thread::sleep(PATIENCE * 2);
        progress.clear();
        let erased = terminal.text();
        assert!(erased.contains("one") && erased.ends_with("\r\x1b[K"), "{erased:?}");
        thread::sleep(PACE * 3);
        assert_eq!(terminal.text(), erased);
        progress.phase("two");
        thread::sleep(PACE * 3);
        assert!(terminal.text().contains("two"), "{:?}", terminal.text());
    }

    #[test]
    fn short_work_writes_nothing_at_all() {
        let (mut progress, terminal) = line();
        progress.phase("copying:");
        progress.at(1, 2);
        thread::sleep(PATIENCE / 2);
        drop(progress);
        // The drawing thread is over, and nothing comes later.
        thread::sleep(PATIENCE);
        assert_eq!(terminal.text(), "");
    }

    #[test]
    fn a_line_that_wraps_is_erased_whole() {
        let (mut progress, terminal) = line();
        progress.phase("a phase whose name is longer than the line of this terminal is wide:");
        thread::sleep(PATIENCE * 2);
        drop(progress);
        let told = terminal.text();
        assert!(told.ends_with("\r\x1b[K\x1b[1B\r\x1b[K\x1b[1A"), "{told:?}");
    }
}
