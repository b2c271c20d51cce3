//! The live view: its figures and sizes, and how it ends.

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
    assert!(screen.contains("PHYSICAL"), "{screen}");
    for (part, own) in parts.iter().zip(&own) {
        let line = line(&screen, part);
        // Live, cached, physical, and its peak.
        for figure in [own[0], own[2], own[4], own[8], 512 << 20] {
            assert!(line.contains(&amount(figure)), "{figure}: {line}\n{screen}");
        }
    }
    parts[0].go();
    let grown = parts[0].figures();
    assert!(grown[0] > own[0][0]);
    window.wait("growth", |screen| line(screen, &parts[0]).contains(&amount(grown[0])));

    parts[1].kill();
    window.wait("a dead process", |screen| {
        line(screen, &parts[1]).contains("[dead] ") && screen.contains("2 processes, 1 dead")
    });
    // Its file stays for a while. One that ends removes its own.
    drop(parts.pop());
    assert_eq!(folder.files(), 2);
    window.wait("one process", |screen| screen.contains("1 process, 1 dead in "));
    assert_eq!(window.ended_by(Signal::SIGTERM).signal(), Some(Signal::SIGTERM as i32));
}

#[test]
fn narrow_terminals_and_those_that_change_keep_what_matters() {
    let folder = Scratch::new("narrow");
    let mut part = Part::start("device_process", &folder, 2);
    let own = part.figures();
    let mut window = Window::open(&folder, &["--interval", "100ms"], 60, 10);
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
    assert_eq!(window.ended_by(Signal::SIGTERM).signal(), Some(Signal::SIGTERM as i32));
}
