//! What a claim and its release cost: of one process, and of eight at once, beside an integer in
//! shared memory under `flock`, as kvcached shares memory between processes.
//!
//! The best of several rounds for one process, and the sum over processes of one round for eight;
//! without `cargo bench`'s flag it is only seen to run.
#![expect(clippy::print_stdout, reason = "that is what it is for")]
#![expect(clippy::unwrap_used, reason = "a benchmark ends with its first error")]

use aquifer_status::ledger::{Ledger, Share};
use std::{
    env, fs,
    fs::{File, OpenOptions},
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    process::{self, Command, Stdio},
    time::{Duration, Instant},
};

const CAPACITY: u64 = 80 << 30;
const BYTES: u64 = 2 << 20;
const PROCESSES: usize = 8;
const CHILD: &str = "AQUIFER_BENCH_CHILD";

/// A claim and a release of something, in one of the two ways.
trait Claims {
    fn claim(&self);
    fn release(&self);
}

impl Claims for aquifer_status::ledger::Member {
    fn claim(&self) {
        Self::claim(self, BYTES).unwrap();
    }

    fn release(&self) {
        Self::release(self, BYTES);
    }
}

/// An integer in a file, read and written under `flock`. Its pages are in memory, and the calls
/// beside those for the lock are as short as the system has any.
struct LockedInteger(File);

impl LockedInteger {
    fn open(folder: &Path) -> Self {
        let mut options = OpenOptions::new();
        let file = options.read(true).write(true).create(true).truncate(false);
        Self(file.open(folder.join("integer")).unwrap())
    }

    fn add(&self, bytes: u64) {
        self.0.lock().unwrap();
        let mut word = [0; 8];
        let _empty = self.0.read_at(&mut word, 0).unwrap();
        let next = u64::from_ne_bytes(word).wrapping_add(bytes);
        assert!(next <= CAPACITY);
        self.0.write_all_at(&next.to_ne_bytes(), 0).unwrap();
        self.0.unlock().unwrap();
    }
}

impl Claims for LockedInteger {
    fn claim(&self) {
        self.add(BYTES);
    }

    fn release(&self) {
        self.add(BYTES.wrapping_neg());
    }
}

fn open(way: &str, folder: &Path) -> Box<dyn Claims> {
    match way {
        "ledger" => {
            Box::new(Share::new().join(Ledger::open(folder, "gpu", CAPACITY).unwrap()).unwrap())
        }
        _ => Box::new(LockedInteger::open(folder)),
    }
}

/// Returns the nanoseconds of a claim and of its release, at best.
fn alone(way: &str, folder: &Path, rounds: u32) -> f64 {
    const PAIRS: u32 = 10_000;
    let claims = open(way, folder);
    let round = || {
        let start = Instant::now();
        for _ in 0..PAIRS {
            claims.claim();
            claims.release();
        }
        start.elapsed().as_secs_f64() * 1e9 / f64::from(PAIRS)
    };
    (0..rounds).map(|_| round()).fold(f64::MAX, f64::min)
}

/// Returns the claims of a second of all processes together.
fn together(way: &str, folder: &Path, time: Duration) -> f64 {
    let child = || {
        Command::new(env::current_exe().unwrap())
            .env(CHILD, format!("{way} {} {}", time.as_millis(), folder.display()))
            .stdout(Stdio::piped())
            .spawn()
            .unwrap()
    };
    let children: Vec<_> = (0..PROCESSES).map(|_| child()).collect();
    let rates = children.into_iter().map(|child| {
        let output = child.wait_with_output().unwrap();
        String::from_utf8(output.stdout).unwrap().trim().parse::<f64>().unwrap()
    });
    rates.sum()
}

fn run_child(settings: &str) {
    let mut parts = settings.splitn(3, ' ');
    let way = parts.next().unwrap();
    let time = Duration::from_millis(parts.next().unwrap().parse().unwrap());
    let claims = open(way, &PathBuf::from(parts.next().unwrap()));
    let (mut pairs, start) = (0_u32, Instant::now());
    while start.elapsed() < time {
        for _ in 0..32 {
            claims.claim();
            claims.release();
        }
        pairs += 32;
    }
    println!("{}", f64::from(pairs) / start.elapsed().as_secs_f64());
}

fn main() {
    if let Ok(settings) = env::var(CHILD) {
        return run_child(&settings);
    }
    let measured = env::args().any(|arg| arg == "--bench");
    let (rounds, time) = if measured { (100, 2000) } else { (1, 10) };
    let folder = env::temp_dir().join(format!("aquifer-claims-{}", process::id()));
    fs::create_dir(&folder).unwrap();
    let own = folder.join("ledger");
    println!("| | a claim and its release, ns | claims a second of {PROCESSES} processes |");
    println!("|---|---|---|");
    for way in ["ledger", "flock"] {
        let folder = if way == "ledger" { &own } else { &folder };
        let alone = alone(way, folder, rounds);
        let together = together(way, folder, Duration::from_millis(time));
        println!("| {way} | {alone:.0} | {together:.0} |");
    }
    fs::remove_dir_all(&folder).unwrap();
}
