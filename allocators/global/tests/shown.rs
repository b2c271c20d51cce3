//! Another process reads the figures of a program's global allocator: those of its own report.
//!
//! A binary without a test harness: the figures are compared to the byte, so nothing else may
//! allocate. It starts itself as the program whose figures are read.
#![expect(clippy::unwrap_used, clippy::panic, reason = "a test, though not in a harness")]

use aquifer_global::{Global, Stats, is_installed, publish_status, report, set_cap, stats};
use aquifer_status::{PoolKind, PoolStatus, StatusFolder};
use std::{
    env, fs,
    hint::black_box,
    io::{self, BufRead, BufReader, Read, Write},
    os::unix::fs::DirBuilderExt,
    path::Path,
    process::{self, Child, ChildStdin, ChildStdout, Command, Stdio},
    sync::Barrier,
    thread,
};

#[global_allocator]
static GLOBAL: Global = Global::new();

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const CAP: u64 = 1 << 40;
/// Threads of the program beside its first.
const THREADS: u64 = 3;
/// How far the bytes that are shown may be from the truth.
const BOUND: u64 = MIB + 128 * KIB * (THREADS + 1);
/// What each thread holds, and how much of that it allocates unseen.
const HELD: u64 = 5 * MIB;
const UNSEEN: u64 = 3 * MIB;

fn main() {
    assert!(is_installed());
    match env::args().nth(1).as_deref() {
        Some("program") => program(),
        _ => another_process_reads_the_figures_of_the_report(),
    }
}

/// Writes figures in a line. Allocates nothing.
fn say(name: &str, figures: &Stats) {
    let mut line = [0; 200];
    let mut rest = &mut line[..];
    let Stats { live, peak, allocations, frees, refusals, .. } = figures;
    writeln!(rest, "@ {name} {live} {peak} {allocations} {frees} {refusals}").unwrap();
    let unused = rest.len();
    let mut out = io::stdout().lock();
    out.write_all(&line[..line.len() - unused]).unwrap();
    out.flush().unwrap();
}

/// Waits for a byte.
fn hear() {
    io::stdin().lock().read_exact(&mut [0]).unwrap();
}

fn program() {
    publish_status().unwrap();
    set_cap(CAP);
    // Whatever the standard library keeps for good it has after this.
    say("ready", &Stats::default());
    hear();
    let (hold, release) = (Barrier::new(THREADS as usize + 1), Barrier::new(THREADS as usize + 1));
    thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(|| {
                let mut held: Vec<Vec<u8>> = Vec::with_capacity(1000);
                let mut add = |bytes: u64| {
                    for _ in 0..bytes / (20 * KIB) {
                        held.push(black_box(vec![1; 20 * KIB as usize]));
                    }
                };
                add(HELD - UNSEEN);
                // A peak that is over.
                drop(black_box(vec![1_u8; 7 * MIB as usize]));
                hold.wait();
                hold.wait();
                add(UNSEEN);
                hold.wait();
                release.wait();
            });
        }
        hold.wait();
        assert!(black_box(Vec::<u8>::new()).try_reserve_exact(2 << 40).is_err());
        say("report", &report().stats);
        hear();
        say("stats", &stats());
        hear();
        hold.wait();
        hold.wait();
        // No figure is asked for before the other process has read.
        say("unseen", &Stats::default());
        hear();
        say("truth", &stats());
        hear();
        release.wait();
    });
    say("freed", &Stats::default());
    hear();
    say("end", &stats());
}

/// The program, which the test steers.
struct Program {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Program {
    fn start(folder: &Path) -> Self {
        let mut child = Command::new(env::current_exe().unwrap())
            .arg("program")
            .env("AQUIFER_STATUS", folder)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (input, output) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        Self { child, input, output: BufReader::new(output) }
    }

    /// Returns the figures of the next line, which has this name.
    fn told(&mut self, name: &str) -> Stats {
        let mut line = String::new();
        self.output.read_line(&mut line).unwrap();
        let mut fields = line.split_whitespace();
        assert_eq!((fields.next(), fields.next()), (Some("@"), Some(name)), "{line:?}");
        let mut number = || fields.next().unwrap().parse().unwrap();
        let mut told = Stats::default();
        (told.live, told.peak) = (number(), number());
        (told.allocations, told.frees, told.refusals) = (number(), number(), number());
        told
    }

    fn go(&mut self) {
        self.input.write_all(b"g").unwrap();
    }
}

fn is_near(shown: u64, truth: u64) -> bool {
    shown.abs_diff(truth) <= BOUND
}

fn another_process_reads_the_figures_of_the_report() {
    let path = env::temp_dir().join(format!("aquifer-shown-{}", process::id()));
    let _absent = fs::remove_dir_all(&path);
    fs::DirBuilder::new().mode(0o700).create(&path).unwrap();
    let folder = StatusFolder::at(&path).unwrap();
    let shown = || -> PoolStatus {
        let mut processes = folder.processes().unwrap();
        let process = processes.next().unwrap().unwrap();
        let [pool] = &process.pools[..] else { panic!("{process:?}") };
        assert!(processes.next().is_none() && process.faults.is_empty(), "{process:?}");
        assert_eq!((pool.kind, &*pool.name), (PoolKind::Global, "global allocator"));
        assert_eq!((pool.limit, pool.stats.requested), (Some(CAP), pool.stats.live));
        pool.clone()
    };
    let mut program = Program::start(&path);
    program.told("ready");
    program.go();

    // Its report publishes, and is itself allocated after that.
    let report = program.told("report");
    let pool = shown();
    let held = THREADS * (HELD - UNSEEN - 20 * KIB);
    assert!(report.live >= held && report.peak >= 8 * MIB, "{report:?}");
    assert!(is_near(pool.stats.live, report.live), "{} {}", pool.stats.live, report.live);
    assert!(is_near(pool.stats.peak_live, report.peak), "{} {}", pool.stats.peak_live, report.peak);
    assert_eq!((pool.stats.failures, report.refusals), (1, 1));
    program.go();

    // Nothing is allocated after `stats` has published: what is shown is what it has returned.
    let own = program.told("stats");
    let pool = shown();
    assert_eq!((pool.stats.live, pool.stats.peak_live), (own.live, own.peak));
    assert_eq!((pool.stats.allocations, pool.stats.frees), (own.allocations, own.frees));
    assert_eq!(pool.stats.blocks, own.allocations - own.frees);
    program.go();

    // What is allocated without a call of `stats` is shown within the documented bound.
    program.told("unseen");
    let pool = shown();
    program.go();
    let truth = program.told("truth");
    assert!(truth.live >= own.live + THREADS * (UNSEEN - 20 * KIB), "{truth:?} {own:?}");
    assert!(is_near(pool.stats.live, truth.live), "{} {}", pool.stats.live, truth.live);
    assert!(is_near(pool.stats.peak_live, truth.peak), "{} {}", pool.stats.peak_live, truth.peak);
    program.go();

    // The same for what is freed. The peak stays.
    program.told("freed");
    let pool = shown();
    program.go();
    let end = program.told("end");
    assert!(end.live + THREADS * (HELD - 20 * KIB) <= truth.live + BOUND, "{end:?} {truth:?}");
    assert!(is_near(pool.stats.live, end.live), "{} {}", pool.stats.live, end.live);
    assert!(is_near(pool.stats.peak_live, end.peak), "{} {}", pool.stats.peak_live, end.peak);

    assert!(program.child.wait().unwrap().success());
    assert_eq!(fs::read_dir(&path).unwrap().count(), 0, "the program removes its file");
    fs::remove_dir_all(&path).unwrap();
}
