//! Sixteen processes that claim at random, some of them killed at any moment.
//!
//! The children are this program. Each writes what it holds into a file of its own numbers: less
//! before it releases, more after it has claimed. So the sum over live children never exceeds what
//! the ledger has granted.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use aquifer_ledger::{Ledger, Share};
use std::{
    env, fs,
    fs::{File, OpenOptions},
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    process::{self, Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

const CHILDREN: usize = 16;
const CAPACITY: u64 = 1000;
const ROUNDS: u32 = 60;
/// No child may be without progress for so long, on a machine however slow.
const HANG: Duration = Duration::from_secs(20);
const FOLDER: &str = "AQUIFER_TEST_FOLDER";
const CHILD: &str = "AQUIFER_TEST_CHILD";

/// What the children hold and have done: two words for each, `operations` and `held`.
struct Books(File);

impl Books {
    fn open(folder: &Path) -> Self {
        let path = folder.join("books");
        let mut options = OpenOptions::new();
        Self(options.read(true).write(true).create(true).truncate(false).open(path).unwrap())
    }

    fn set(&self, child: usize, operations: u64, held: u64) {
        let mut words = [0; 16];
        words[..8].copy_from_slice(&operations.to_ne_bytes());
        words[8..].copy_from_slice(&held.to_ne_bytes());
        self.0.write_all_at(&words, child as u64 * 16).unwrap();
    }

    fn all(&self) -> Vec<(u64, u64)> {
        let mut bytes = [0; CHILDREN * 16];
        self.0.read_exact_at(&mut bytes, 0).unwrap();
        let word = |at: usize| u64::from_ne_bytes(bytes[at..at + 8].try_into().unwrap());
        (0..CHILDREN).map(|child| (word(child * 16), word(child * 16 + 8))).collect()
    }

    /// Returns what all held at one moment, if two readings agree: operations only grow.
    fn snapshot(&self) -> Option<Vec<(u64, u64)>> {
        let all = self.all();
        (self.all() == all).then_some(all)
    }
}

struct Random(u64);

impl Random {
    fn below(&mut self, most: u64) -> u64 {
        self.0 = self.0.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        (self.0 >> 33) % most
    }
}

#[test]
fn live_claims_never_exceed_the_capacity_and_end_with_their_process() {
    let folder = env::temp_dir().join(format!("aquifer-processes-{}", process::id()));
    let ledger = Ledger::open(&folder, "gpu", CAPACITY).unwrap();
    let books = Books::open(&folder);
    (0..CHILDREN).for_each(|child| books.set(child, 0, 0));
    let start = |number: usize, seed: u64| {
        Command::new(env::current_exe().unwrap())
            .args(["child_that_claims_at_random", "--exact", "--include-ignored"])
            .env(FOLDER, &folder)
            .env(CHILD, format!("{number} {seed}"))
            .stdout(Stdio::null())
            .spawn()
            .unwrap()
    };
    let mut children: Vec<Child> = (0..CHILDREN).map(|child| start(child, child as u64)).collect();
    let mut random = Random(1);
    let (mut checks, mut most, mut slowest) = (0, 0, Duration::ZERO);
    for round in 0..ROUNDS {
        let until = Instant::now() + Duration::from_millis(20);
        while Instant::now() < until || checks == 0 {
            if let Some(all) = books.snapshot() {
                let sum = all.iter().map(|(_, held)| held).sum();
                assert!(sum <= CAPACITY, "{sum} held: {all:?}");
                (checks, most) = (checks + 1, most.max(sum));
            }
        }
        let victim = random.below(CHILDREN as u64) as usize;
        let process = children[victim].id();
        // No check from here on until its figures are out of the books.
        children[victim].kill().unwrap();
        children[victim].wait().unwrap();
        let died = Instant::now();
        let shown = ledger.figures();
        slowest = slowest.max(died.elapsed());
        assert!(shown.members.iter().all(|member| member.process != process), "{shown:?}");
        books.set(victim, 0, 0);
        children[victim] = start(victim, u64::from(round) << 8 | victim as u64);
    }
    // Those that live go on, whatever the dead have left.
    let (before, begun) = (books.all(), Instant::now());
    let mut waiting: Vec<usize> = (0..CHILDREN).collect();
    while !waiting.is_empty() {
        assert!(begun.elapsed() < HANG, "no progress: {waiting:?}, {:?}", ledger.figures());
        let now = books.all();
        waiting.retain(|child| now[*child].0 == before[*child].0);
        thread::sleep(Duration::from_millis(1));
    }
    for child in &mut children {
        child.kill().unwrap();
        child.wait().unwrap();
    }
    Share::new().join(ledger).unwrap().claim(CAPACITY).unwrap();
    println!(
        "{checks} checks, at most {most} of {CAPACITY} held, {ROUNDS} deaths, the slowest seen \
         after {slowest:?}"
    );
    fs::remove_dir_all(&folder).unwrap();
}

#[test]
#[ignore = "a child of the test above"]
fn child_that_claims_at_random() {
    let Some(folder) = env::var_os(FOLDER).map(PathBuf::from) else {
        println!("skipped: it is no child");
        return;
    };
    let settings = env::var(CHILD).unwrap();
    let (number, seed) = settings.split_once(' ').unwrap();
    let (number, mut random) = (number.parse().unwrap(), Random(seed.parse().unwrap()));
    let books = Books::open(&folder);
    let share = Share::new().priority(random.below(3) as i32).guarantee(random.below(60));
    let member = share.join(Ledger::open(&folder, "gpu", CAPACITY).unwrap()).unwrap();
    let (mut held, begun) = (0, Instant::now());
    // A parent that has died kills no child.
    for operation in 1.. {
        if begun.elapsed() > 3 * HANG {
            return;
        }
        match random.below(8) {
            0 if held > 0 => {
                let bytes = 1 + random.below(held);
                held -= bytes;
                books.set(number, operation, held);
                member.release(bytes);
            }
            1 => {
                let deadline = Instant::now() + Duration::from_millis(random.below(20));
                let bytes = random.below(CAPACITY / 2);
                held += if member.claim_by(bytes, deadline).is_ok() { bytes } else { 0 };
            }
            2 => member.refresh(),
            _ => {
                let bytes = random.below(CAPACITY / 8);
                held += if member.claim(bytes).is_ok() { bytes } else { 0 };
            }
        }
        books.set(number, operation, held);
        let owed = member.owed().min(held);
        if owed > 0 {
            held -= owed;
            books.set(number, operation, held);
            member.release(owed);
        }
        assert_eq!(member.claimed(), held);
    }
}
