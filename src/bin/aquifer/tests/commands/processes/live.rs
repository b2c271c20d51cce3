//! The live view: its figures, keys and sizes, and how it ends.

use super::{
    parts::{Part, Scratch},
    window::Window,
};
use nix::sys::signal::Signal;
use std::os::unix::process::ExitStatusExt;

/// Returns the line of a process.
fn line(screen: &str, part: &Part) -> String {
    let process = part.child.id().to_string();
    let mut lines = screen.lines();
    let line = lines.find(|line| line.trim_start().starts_with(&process));
    line.unwrap_or_default().to_owned()
}

fn amount(bytes: u64) -> String {
    let (mut value, mut unit) = (bytes as f64, "B");
    for next in ["KiB", "MiB", "GiB"] {
        if value >= 999.5 {
            (value, unit) = (value / 1024.0, next);
        }
    }
    let digits = if value < 9.995 { 2 } else { usize::from(value < 99.95) };
    format!("{value:.digits$} {unit}")
}

#[test]
fn processes_are_shown_with_their_own_figures_and_die_in_sight() {
    let folder = Scratch::new("live");
    let mut parts: Vec<Part> =
        (1..4).map(|scale| Part::start("device_process", &folder, scale)).collect();
    let own: Vec<_> = parts.iter_mut().map(Part::figures).collect();
    let mut window = Window::open(&folder, &["--interval", "100ms", "--sweep"], 160, 24);
    let screen = window.wait("three processes", |screen| screen.contains("3 processes in "));
    assert!(window.is_raw());
    assert!(screen.contains("PHYSICAL▼") && screen.contains("q end"), "{screen}");
    for (part, own) in parts.iter().zip(&own) {
        let line = line(&screen, part);
        // Live, cached, physical, and its peak.
        for figure in [own[0], own[2], own[4], own[8], 512 << 20] {
            assert!(line.contains(&amount(figure)), "{figure}: {line}\n{screen}");
        }
    }
    // Growth is seen without a key.
    parts[0].go();
    let grown = parts[0].figures();
    assert!(grown[0] > own[0][0]);
    window.wait("growth", |screen| line(screen, &parts[0]).contains(&amount(grown[0])));

    parts[1].kill();
    window.wait("a dead process", |screen| {
        line(screen, &parts[1]).contains("[dead] ") && screen.contains("2 processes, 1 dead")
    });
    // Its file is removed after a while, and then its line.
    window.wait("its removal", |screen| line(screen, &parts[1]).is_empty());
    assert_eq!(folder.files(), 2);
    // One that ends removes its own.
    drop(parts.pop());
    window.wait("one process", |screen| screen.contains("1 process in "));
    window.press("q");
    assert!(window.ended().success());
}

#[test]
fn keys_sort_unfold_and_explain() {
    let folder = Scratch::new("keys");
    let mut parts: Vec<Part> =
        (1..4).map(|scale| Part::start("device_process", &folder, scale)).collect();
    parts.iter_mut().for_each(|part| drop(part.figures()));
    let mut window = Window::open(&folder, &[], 120, 20);
    // Cut, since the column is narrow.
    let place = "device 0: NV";
    let screen = window.wait("processes", |screen| screen.contains("3 processes"));
    assert!(!screen.contains(place), "{screen}");
    window.press("a");
    window.wait("all places", |screen| screen.matches(place).count() == 3);
    window.press("a\r");
    window.wait("one place", |screen| screen.matches(place).count() == 1);
    window.press("\u{1b}[B\u{1b}[B \u{1b}[A\u{1b}[5~");
    window.wait("two places", |screen| screen.matches(place).count() == 2);
    let order = |screen: &str| {
        let mut found: Vec<_> =
            parts.iter().map(|part| screen.find(&line(screen, part)).unwrap()).collect();
        found.sort_unstable();
        let first = parts.iter().position(|p| screen.find(&line(screen, p)) == Some(found[0]));
        first.unwrap()
    };
    // By live bytes the largest is first, and the smallest when that is reversed.
    window.press("\u{1b}[C");
    let screen = window.wait("the next column", |screen| screen.contains("LIVE▼"));
    assert_eq!(order(&screen), 2);
    window.press("r");
    let screen = window.wait("the other order", |screen| screen.contains("LIVE▲"));
    assert_eq!(order(&screen), 0);
    window.press("\u{1b}[D");
    window.wait("the column before", |screen| screen.contains("PHYSICAL▼"));
    window.press("?");
    window.wait("help", |screen| screen.contains("Left Right     sort by"));
    window.press("x");
    window.wait("no help", |screen| !screen.contains("Left Right"));
    window.press("+");
    window.wait("another interval", |screen| screen.contains("every 2 s"));
    window.press("--");
    window.wait("another interval", |screen| screen.contains("every 0.5 s"));
    window.press("\u{1b}");
    assert!(window.ended().success());
}

#[test]
fn narrow_terminals_and_those_that_change_keep_what_matters() {
    let folder = Scratch::new("narrow");
    let mut part = Part::start("device_process", &folder, 2);
    let own = part.figures();
    let mut window = Window::open(&folder, &[], 60, 10);
    let screen = window.wait("a process", |screen| screen.contains("1 process in"));
    for figure in [own[0], own[2], own[4], own[8]] {
        assert!(line(&screen, &part).contains(&amount(figure)), "{screen}");
    }
    assert!(!screen.contains("WAIT/s"), "{screen}");
    window.resize(200, 30);
    window.wait("more columns", |screen| screen.contains("WAIT/s") && screen.contains("1 process"));
    for (columns, rows) in [(20, 5), (3, 2), (1, 1), (60, 10)] {
        window.resize(columns, rows);
        std::thread::sleep(std::time::Duration::from_millis(150));
    }
    window.wait("the narrow screen", |screen| {
        line(screen, &part).contains(&amount(own[4])) && !screen.contains("WAIT/s")
    });
    window.press("q");
    assert!(window.ended().success());
}

#[test]
fn every_end_restores_the_terminal() {
    let folder = Scratch::new("ends");
    let mut part = Part::start("device_process", &folder, 1);
    part.figures();
    let open = || {
        let window = Window::open(&folder, &[], 100, 20);
        window.wait("a process", |screen| screen.contains("1 process in "));
        assert!(window.is_raw());
        window
    };
    for key in ["q", "\u{3}"] {
        let mut window = open();
        window.press(key);
        assert_eq!(window.ended().code(), Some(0));
    }
    for signal in [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP] {
        let window = &mut open();
        window.signal(signal);
        assert_eq!(window.ended().signal(), Some(signal as i32));
    }
}

#[test]
fn no_color_is_used_where_none_is_wanted() {
    let folder = Scratch::new("colors");
    let mut parts = [1, 2].map(|scale| Part::start("device_process", &folder, scale));
    parts.iter_mut().for_each(|part| drop(part.figures()));
    parts[1].kill();
    for is_colored in [true, false] {
        let mut command = super::parts::program(&folder.0, &["top", "--dead"]);
        if !is_colored {
            command.env("NO_COLOR", "1");
        }
        let mut window = Window::of(command, 100, 20);
        let screen = window.wait("a dead process", |screen| screen.contains("[dead] "));
        assert!(screen.contains("1 process, 1 dead"), "{screen}");
        window.press("q");
        assert!(window.ended().success());
        let written = String::from_utf8_lossy(&window.written()).into_owned();
        // Commands that set a colour other than the terminal's own.
        let colors = written.split("\u{1b}[").skip(1).filter(|command| {
            let end = command.find(|c: char| !(c.is_ascii_digit() || c == ';'));
            let numbers = &command[..end.unwrap_or(command.len())];
            let is_style = command[numbers.len()..].starts_with('m');
            is_style
                && numbers.split(';').any(|number| {
                    matches!(number.parse(), Ok(30..=38 | 40..=48 | 90..=97 | 100..=107))
                })
        });
        assert_eq!(colors.count() > 0, is_colored, "{written:?}");
    }
}
