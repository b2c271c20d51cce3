//! Sixteen processes that join, claim, fork and leave at random, stopped and killed at any moment.
//!
//! The children are this program. Each writes what it holds into a file of its own numbers: less
//! before it releases, more after it has claimed. So the sum over live children never exceeds what
//! the ledger has granted.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use aquifer_status::ledger::{Ledger, LedgerError, Member, Share};
use nix::{
    libc,
    sys::{
        signal::{Signal, kill},
        wait::waitpid,
    },
    unistd::Pid,
};
use std::{
    env, fs,
    fs::{File, OpenOptions},
    os::unix::{fs::FileExt, process::CommandExt},
    path::{Path, PathBuf},
    process::{self, Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

const CHILDREN: usize = 16;
const CAPACITY: u64 = 1000;
const ROUNDS: u32 = 12;
/// A wish of a stopped process counts for so long.
const LAPSES_AFTER: Duration = Duration::from_millis(100);
/// No child may be without progress for so long, on a machine however slow.
const HANG: Duration = Duration::from_secs(20);
const FOLDER: &str = "AQUIFER_TEST_FOLDER";
const CHILD: &str = "AQUIFER_TEST_CHILD";

/// What the children hold and have done: two words for each, `operations` and `held`. Forked
/// children of theirs have the second half.
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
        let mut bytes = [0; 2 * CHILDREN * 16];
        self.0.read_exact_at(&mut bytes, 0).unwrap();
        let word = |at: usize| u64::from_ne_bytes(bytes[at..at + 8].try_into().unwrap());
        (0..2 * CHILDREN).map(|child| (word(child * 16), word(child * 16 + 8))).collect()
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

/// Sends a signal to a child and to what it has forked.
fn signal(child: &Child, signal: Signal) {
    kill(Pid::from_raw(-(child.id() as i32)), signal).unwrap();
}

/// Returns the state of a process that has not ended, and its parent.
fn state(process: u32) -> Option<(char, u32)> {
    let stat = fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    let mut fields = stat.rsplit_once(") ")?.1.split(' ');
    let state = fields.next()?.chars().next().filter(|state| !matches!(state, 'Z' | 'X'))?;
    Some((state, fields.next()?.parse().ok()?))
}

fn wait_until(what: &str, is_so: impl Fn() -> bool) {
    let begun = Instant::now();
    while !is_so() {
        assert!(begun.elapsed() < HANG, "not {what}");
        thread::sleep(Duration::from_micros(100));
    }
}

#[test]
fn live_claims_never_exceed_the_capacity_and_end_with_their_process() {
    let folder = env::temp_dir().join(format!("aquifer-processes-{}", process::id()));
    let ledger = Ledger::open(&folder, "gpu", CAPACITY).unwrap();
    let books = Books::open(&folder);
    (0..2 * CHILDREN).for_each(|child| books.set(child, 0, 0));
    let start = |number: usize, seed: u64| {
        Command::new(env::current_exe().unwrap())
            .args(["child_that_claims_at_random", "--exact", "--include-ignored"])
            .env(FOLDER, &folder)
            .env(CHILD, format!("{number} {seed}"))
            .stdout(Stdio::null())
            .process_group(0)
            .spawn()
            .unwrap()
    };
    let mut children: Vec<Child> = (0..CHILDREN).map(|child| start(child, child as u64)).collect();
    let mut random = Random(1);
    let (mut checks, mut most, mut slowest) = (0, 0, Duration::ZERO);
    // It holds nothing while others run.
    let own = Share::new().priority(9).join(Ledger::open(&folder, "gpu", CAPACITY).unwrap());
    let own = own.unwrap();
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
        children.iter().for_each(|child| signal(child, Signal::SIGSTOP));
        let members = || ledger.figures().members.into_iter().map(|member| member.process);
        wait_until("stopped", || {
            let all = children.iter().map(Child::id).chain(members());
            all.filter(|member| *member != process::id())
                .all(|member| state(member).is_none_or(|(state, _)| state == 'T'))
        });
        let shown = ledger.figures();
        let rest = CAPACITY - shown.claimed();
        let begun = Instant::now();
        own.claim_by(rest, begun + HANG).unwrap();
        slowest = slowest.max(begun.elapsed());
        // 100 ms, and more for a machine that has other work.
        assert!(begun.elapsed().as_millis() < 1000, "stopped processes delay: {shown:?}");
        thread::sleep(LAPSES_AFTER);
        let process = children[victim].id();
        let held = shown.members.iter().filter(|member| member.process == process);
        let held: u64 = held.map(|member| member.claimed).sum();
        // A child may have been stopped before it has closed what it inherits of its parent.
        let all = fs::read_dir("/proc").unwrap().map(|entry| entry.unwrap().file_name());
        let forked: Vec<u32> = all
            .filter_map(|name| name.to_str()?.parse().ok())
            .filter(|other| state(*other).is_some_and(|(_, parent)| parent == process))
            .collect();
        signal(&children[victim], Signal::SIGKILL);
        children[victim].wait().unwrap();
        wait_until("dead", || forked.iter().all(|forked| state(*forked).is_none()));
        // At the next claim, without a wait.
        own.claim(held).unwrap();
        let shown = ledger.figures();
        assert!(shown.members.iter().all(|member| member.process != process), "{shown:?}");
        books.set(victim, 0, 0);
        books.set(CHILDREN + victim, 0, 0);
        own.release(CAPACITY);
        children[victim] = start(victim, u64::from(round) << 8 | victim as u64);
        children.iter().for_each(|child| signal(child, Signal::SIGCONT));
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
        signal(child, Signal::SIGKILL);
        child.wait().unwrap();
    }
    wait_until("dead", || ledger.figures().members.len() == 1);
    own.claim(CAPACITY).unwrap();
    println!(
        "{checks} checks, at most {most} of {CAPACITY} held, {ROUNDS} stops and deaths, the rest \
         claimed after at most {slowest:?}"
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
    let open = || Ledger::open(&folder, "gpu", CAPACITY).unwrap();
    let mut member = joined(&share, open);
    let (mut held, begun) = (0, Instant::now());
    // A parent that has died kills no child.
    for operation in 1.. {
        if begun.elapsed() > 3 * HANG {
            return;
        }
        match random.below(32) {
            // A child of a fork joins the ledger that its parent has opened.
            0 => fork_and_claim(open(), &books, CHILDREN + number, random.below(CAPACITY / 8)),
            1 => {
                books.set(number, operation, 0);
                held = 0;
                drop(member);
                member = joined(&share, open);
            }
            other => match other % 8 {
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
            },
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

/// Joins. The right to join may be held by a process that is stopped.
fn joined(share: &Share, open: impl Fn() -> Ledger) -> Member {
    loop {
        match share.clone().join(open()) {
            Ok(member) => return member,
            Err(error) => assert!(matches!(error, LedgerError::Busy { .. }), "{error}"),
        }
    }
}

/// Forks, and waits for the child.
#[expect(unsafe_code, reason = "forks")]
fn fork_and_claim(ledger: Ledger, books: &Books, number: usize, bytes: u64) {
    // SAFETY: 1. The child depends on no other thread of its parent.
    let child = unsafe { libc::fork() };
    if child == 0 {
        if let Ok(member) = Share::new().join(ledger)
            && member.claim(bytes).is_ok()
        {
            books.set(number, u64::from(process::id()), bytes);
            thread::sleep(Duration::from_micros(500));
            books.set(number, u64::from(process::id()), 0);
        }
        // SAFETY: 1. It ends the process.
        unsafe { libc::_exit(0) };
    }
    waitpid(Pid::from_raw(child), None).unwrap();
}
