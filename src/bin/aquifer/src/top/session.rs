//! The terminal: the live view, and its restoration at the end.
//!
//! The terminal is restored when the view ends, when the program panics, and at SIGINT, SIGTERM and
//! SIGHUP. Only SIGKILL leaves it as it is.

use super::{
    monitor::Monitor,
    screen::{self, Palette},
    table::{self, TableLayout},
    view::{KeyEffect, View},
};
use crate::error::CommandError;
use aquifer_benches::console::foreign::printable;
use ratatui::{
    DefaultTerminal,
    crossterm::{
        event::{self, Event, KeyEventKind},
        terminal,
    },
};
use signal_hook::{
    SigId,
    consts::{SIGHUP, SIGINT, SIGTERM},
    flag, low_level,
};
use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

/// How long the view waits for a key before it looks for a signal.
const LONGEST_WAIT: Duration = Duration::from_millis(100);

/// Returns the columns of the terminal, if it tells.
pub(super) fn width() -> Option<usize> {
    terminal::size().ok().map(|(columns, _)| usize::from(columns)).filter(|columns| *columns > 0)
}

/// The terminal in raw mode, on its alternate screen. Restored when it is dropped. A panic restores
/// it before it prints its message.
struct Session {
    terminal: DefaultTerminal,
    restored: bool,
}

impl Session {
    fn open() -> io::Result<Self> {
        match ratatui::try_init() {
            Ok(terminal) => Ok(Self { terminal, restored: false }),
            Err(error) => {
                // Raw mode may be on already.
                let _ = ratatui::try_restore();
                Err(error)
            }
        }
    }

    fn restore(&mut self) -> io::Result<()> {
        if self.restored {
            return Ok(());
        }
        self.restored = true;
        self.terminal.show_cursor().and(ratatui::try_restore())
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        // The error that led here says more.
        let _ = self.restore();
    }
}

/// The signals that end the view.
struct EndSignals {
    last: Arc<AtomicUsize>,
    handlers: Vec<SigId>,
}

impl EndSignals {
    fn catch() -> io::Result<Self> {
        let mut caught = Self { last: Arc::new(AtomicUsize::new(0)), handlers: Vec::new() };
        for signal in [SIGINT, SIGTERM, SIGHUP] {
            let number = signal as usize;
            caught.handlers.push(flag::register_usize(signal, caught.last.clone(), number)?);
        }
        Ok(caught)
    }

    fn last(&self) -> Option<i32> {
        match self.last.load(Ordering::Relaxed) {
            0 => None,
            signal => Some(signal as i32),
        }
    }
}

impl Drop for EndSignals {
    fn drop(&mut self) {
        for handler in self.handlers.drain(..) {
            low_level::unregister(handler);
        }
    }
}

/// Shows the live view until a key or a signal ends it. A signal then ends the program as it would
/// have without the view.
///
/// # Errors
/// [`CommandError`] if the folder cannot be read at the start, or the terminal cannot be used.
pub(super) fn run(monitor: &mut Monitor, interval: Duration) -> Result<(), CommandError> {
    // Errors are told on the screen that was there before.
    monitor.read()?;
    let signals = EndSignals::catch().map_err(CommandError::Terminal)?;
    let mut session = Session::open().map_err(CommandError::Terminal)?;
    let outcome = live(&mut session.terminal, monitor, interval, &signals);
    let restored = session.restore();
    if let Some(signal) = signals.last() {
        // Returns only if the signal cannot be raised.
        low_level::emulate_default_handler(signal).map_err(CommandError::Terminal)?;
    }
    outcome.and(restored).map_err(CommandError::Terminal)
}

fn live(
    terminal: &mut DefaultTerminal,
    monitor: &mut Monitor,
    interval: Duration,
    signals: &EndSignals,
) -> io::Result<()> {
    let palette = Palette::from_environment();
    let mut view = View::new(interval);
    let mut problem: Option<String> = None;
    let mut read_at = Instant::now();
    let (mut must_read, mut must_draw) = (false, true);
    while signals.last().is_none() {
        if must_read || read_at.elapsed() >= view.interval {
            // The folder may come back.
            problem = monitor.read().err().map(|error| printable(&error.to_string()));
            (read_at, must_read, must_draw) = (Instant::now(), false, true);
        }
        let unfolded = table::lines(monitor, view.order, |path| view.is_unfolded(path));
        if must_draw {
            terminal.draw(|frame| {
                screen::draw(frame, monitor, &mut view, &palette, &unfolded, problem.as_deref());
            })?;
            must_draw = false;
        }
        let wait = view.interval.saturating_sub(read_at.elapsed()).min(LONGEST_WAIT);
        if !event::poll(wait)? {
            continue;
        }
        must_draw = true;
        let Event::Key(key) = event::read()? else { continue };
        if key.kind == KeyEventKind::Release {
            continue;
        }
        let size = terminal.size()?;
        let layout = TableLayout::for_width(usize::from(size.width));
        let rows = screen::rows(monitor, usize::from(size.height));
        match view.key(key, &layout, &unfolded, rows) {
            KeyEffect::Quit => return Ok(()),
            KeyEffect::ReadNow => must_read = true,
            KeyEffect::Draw => {}
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::{
        pty::{Winsize, openpty},
        sys::termios::{LocalFlags, tcgetattr},
    };
    use std::{env, fs::File, io::Read, process::Command, thread};

    #[test]
    #[ignore = "a part of the next test, in a terminal of its own"]
    fn panics_on_the_screen() {
        let mut session = Session::open().unwrap();
        session.terminal.draw(|frame| frame.render_widget("drawn", frame.area())).unwrap();
        panic!("within the view");
    }

    #[test]
    fn a_panic_restores_the_terminal_and_is_read_there() {
        let size = Winsize { ws_row: 10, ws_col: 40, ws_xpixel: 0, ws_ypixel: 0 };
        let pty = openpty(Some(&size), None).unwrap();
        let is_raw = || !tcgetattr(&pty.slave).unwrap().local_flags.contains(LocalFlags::ICANON);
        assert!(!is_raw());
        let side = || std::process::Stdio::from(pty.slave.try_clone().unwrap());
        let name = "top::session::tests::panics_on_the_screen";
        let mut child = Command::new("setsid")
            .arg("--ctty")
            .arg(env::current_exe().unwrap())
            .args(["--exact", name, "--ignored", "--nocapture"])
            .stdin(side())
            .stdout(side())
            .stderr(side())
            .spawn()
            .unwrap();
        let mut master = File::from(pty.master.try_clone().unwrap());
        let reader = thread::spawn(move || {
            let (mut all, mut piece) = (Vec::new(), [0; 4096]);
            let end = b"FAILED";
            while !all.windows(end.len()).any(|part| part == end) {
                let read = master.read(&mut piece).unwrap();
                all.extend_from_slice(&piece[..read]);
            }
            String::from_utf8_lossy(&all).into_owned()
        });
        assert!(!child.wait().unwrap().success());
        let written = reader.join().unwrap();
        assert!(!is_raw());
        let (drawn, after) = written.split_once("\u{1b}[?1049l").expect("the other screen is left");
        assert!(drawn.contains("\u{1b}[?1049h") && drawn.contains("drawn"), "{written:?}");
        assert!(after.contains("within the view"), "{written:?}");
    }
}
