//! Runs the fuzz programs from new seeds on all cores.
//!
//! Each core runs one worker process at a time, which runs programs of one target for some seconds.
//! The target with the least time so far comes next. A worker writes its current seed to a file, so
//! that a panic, an abort or a hang is reported with its seed and length.
//!
//! ```text
//! soak [--until-found] [MINUTES] [TARGET…]     all targets for ten minutes, unless told otherwise
//! ```
//!
//! `SOAK_SEED` makes the seeds reproducible, as far as timing permits. The exit status is 1 if a
//! failure was found, and 2 for invalid arguments.
#![expect(clippy::print_stdout, clippy::print_stderr, reason = "a program for a terminal")]

use aquifer_programs::{
    program::{length, seeded},
    targets::{self, TARGETS, Target},
};
use std::{
    collections::hash_map::RandomState,
    env,
    error::Error,
    fs::{self, File},
    hash::{BuildHasher, Hasher},
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    process::{Child, Command, ExitCode, ExitStatus, Stdio},
    sync::{Mutex, MutexGuard, PoisonError},
    thread,
    time::{Duration, Instant},
};

type Failed = Box<dyn Error + Send + Sync>;

/// The time limit of a program. The longest ones take some hundred milliseconds on a loaded
/// machine.
const PATIENCE: Duration = Duration::from_secs(60);
/// The interval between polls of a child process.
const LOOK: Duration = Duration::from_millis(2);
/// Maximum length of a panic message in the output.
const MESSAGE: usize = 200;
/// The width of a worker's line, which has two numbers.
const LINE: usize = 2 * 21;

fn main() -> ExitCode {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let done = match arguments[..] {
        ["--worker", target, seed, millis, line] => work(target, seed, millis, line.as_ref()),
        _ => soak(&arguments),
    };
    match done {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(1),
        Err(error) => {
            eprintln!("soak: {error}");
            ExitCode::from(2)
        }
    }
}

fn find(name: &str) -> Result<Target, Failed> {
    let names = || TARGETS.map(|target| target.name).join(" ");
    targets::find(name).ok_or_else(|| format!("no target {name}; there are: {}", names()).into())
}

/// The progress of a worker.
#[derive(Clone, Copy, Default)]
struct Progress {
    seed: u64,
    programs: u64,
}

impl Progress {
    fn write(&self, file: &File) -> std::io::Result<()> {
        let Self { seed, programs } = self;
        let line = format!("{seed:21}{programs:21}");
        file.write_all_at(line.as_bytes(), 0)
    }

    fn read(path: &Path) -> Option<Self> {
        let line = fs::read_to_string(path).ok().filter(|line| line.len() == LINE)?;
        let mut numbers = line.split_whitespace().map_while(|number| number.parse().ok());
        Some(Self { seed: numbers.next()?, programs: numbers.next()? })
    }
}

/// Runs the programs of consecutive seeds until the time is up.
fn work(target: &str, seed: &str, millis: &str, line: &Path) -> Result<bool, Failed> {
    let (target, first) = (find(target)?, seed.parse::<u64>()?);
    let limit = Duration::from_millis(millis.parse()?);
    let file = File::create(line)?;
    let begun = Instant::now();
    let mut progress = Progress::default();
    while begun.elapsed() < limit {
        progress.seed = first.wrapping_add(progress.programs);
        progress.write(&file)?;
        (target.run)(&seeded(progress.seed, length(progress.seed)));
        progress.programs += 1;
    }
    progress.write(&file)?;
    Ok(true)
}

/// A failing program.
struct Finding {
    target: &'static str,
    seed: u64,
    length: usize,
    symptom: Symptom,
}

/// How a process failed. Programs with the same place are taken to have the same failure.
struct Symptom {
    /// The location of the panic, or how the process ended.
    place: String,
    message: String,
}

impl Symptom {
    fn of(status: ExitStatus, said: &str) -> Self {
        let mut lines = said.lines().skip_while(|line| !line.contains(" panicked at "));
        let place = lines.next().and_then(|line| line.split(" panicked at ").nth(1));
        let place = place
            .map_or_else(|| status.to_string(), |place| place.trim_end_matches(':').to_owned());
        let message = lines.next().unwrap_or_default().chars().take(MESSAGE).collect();
        Self { place, message }
    }

    fn hang(limit: Duration) -> Self {
        Self { place: format!("no end in {} s", limit.as_secs()), message: String::new() }
    }
}

fn spawn(arguments: &[&str], said: &Path) -> Result<Child, Failed> {
    let child = Command::new(env::current_exe()?)
        .args(arguments)
        .env("RUST_BACKTRACE", "0")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(File::create(said)?)
        .spawn()?;
    Ok(child)
}

/// Waits for a child while `alive` returns `true`. Returns `None` if the child had to be killed.
fn wait(mut child: Child, mut alive: impl FnMut() -> bool) -> Result<Option<ExitStatus>, Failed> {
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        if !alive() {
            child.kill()?;
            child.wait()?;
            return Ok(None);
        }
        thread::sleep(LOOK);
    }
}

/// The temporary files of this run, removed on drop.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Result<Self, Failed> {
        let path = env::temp_dir().join(format!("aquifer-soak-{}", std::process::id()));
        fs::create_dir_all(&path)?;
        Ok(Self(path))
    }

    fn file(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// The state shared by all cores.
struct Table {
    targets: Vec<Target>,
    /// The programs run of each target.
    done: Vec<u64>,
    /// The time given to each target, including running slices.
    given: Vec<Duration>,
    findings: Vec<Finding>,
    /// The seed from which the last seeds were derived.
    seed: u64,
}

impl Table {
    /// Returns the target to run next and its first seed.
    fn next(&mut self, slice: Duration) -> (usize, u64) {
        let least = (0..self.targets.len()).min_by_key(|&at| self.given[at]).unwrap_or_default();
        self.given[least] += slice;
        self.seed = self.seed.wrapping_add(1);
        let seed = u64::from_le_bytes(std::array::from_fn(|at| seeded(self.seed, 8)[at]));
        (least, seed)
    }

    fn print(&self) {
        println!("\n{:<10} {:>9} {:>9}", "target", "programs", "findings");
        for (target, done) in self.targets.iter().zip(&self.done) {
            let of = |finding: &&Finding| finding.target == target.name;
            let findings = self.findings.iter().filter(of).count();
            println!("{:<10} {done:>9} {findings:>9}", target.name);
        }
    }
}

fn lock(table: &Mutex<Table>) -> MutexGuard<'_, Table> {
    table.lock().unwrap_or_else(PoisonError::into_inner)
}

fn soak(arguments: &[&str]) -> Result<bool, Failed> {
    let (until_found, rest) = match arguments {
        ["--until-found", rest @ ..] => (true, rest),
        rest => (false, rest),
    };
    let (minutes, names) = match rest.split_first() {
        Some((first, names)) if first.parse::<f64>().is_ok() => (first.parse()?, names),
        _ => (10.0, rest),
    };
    let time = Duration::try_from_secs_f64(minutes * 60.0)?;
    let targets: Vec<Target> = match names {
        [] => TARGETS.to_vec(),
        names => names.iter().map(|name| find(name)).collect::<Result<_, _>>()?,
    };
    let seed = match env::var("SOAK_SEED") {
        Ok(seed) => seed.parse()?,
        Err(_) => RandomState::new().build_hasher().finish(),
    };
    let cores = thread::available_parallelism()?.get();
    println!("{} targets on {cores} cores for {minutes} minutes, SOAK_SEED={seed}", targets.len());
    let count = targets.len();
    let table = Mutex::new(Table {
        targets,
        done: vec![0; count],
        given: vec![Duration::ZERO; count],
        findings: Vec::new(),
        seed,
    });
    // Several slices per target, each much longer than the start of a process.
    let slice = (time * cores as u32 / count as u32 / 4)
        .clamp(Duration::from_millis(500), Duration::from_secs(10));
    let folder = Folder::new()?;
    let begun = Instant::now();
    let ended = || begun.elapsed() >= time || until_found && !lock(&table).findings.is_empty();
    thread::scope(|threads| {
        let core = |core: usize| {
            while !ended() {
                run_slice(&table, &folder, core, slice.min(time.saturating_sub(begun.elapsed())))?;
            }
            Ok(())
        };
        let cores: Vec<_> = (0..cores).map(|at| threads.spawn(move || core(at))).collect();
        let ends = cores
            .into_iter()
            .map(|core| core.join().unwrap_or_else(|_| Err("a core's thread is gone".into())));
        ends.collect::<Result<(), Failed>>()
    })?;
    let table = lock(&table);
    table.print();
    println!("{} findings", table.findings.len());
    Ok(table.findings.is_empty())
}

/// Runs one worker and records its result.
fn run_slice(
    table: &Mutex<Table>,
    folder: &Folder,
    core: usize,
    slice: Duration,
) -> Result<(), Failed> {
    let (at, seed) = lock(table).next(slice);
    let target = lock(table).targets[at].name;
    let (line, said) = (folder.file(&format!("line-{core}")), folder.file(&format!("said-{core}")));
    let _ = fs::remove_file(&line);
    let (seed, millis) = (seed.to_string(), slice.as_millis().to_string());
    let child = spawn(&["--worker", target, &seed, &millis, &line.to_string_lossy()], &said)?;
    // A hang is a worker that stays at the same program for too long.
    let (mut programs, mut since) = (0, Instant::now());
    let status = wait(child, || {
        let now = Progress::read(&line).map_or(0, |progress| progress.programs);
        if now != programs {
            (programs, since) = (now, Instant::now());
        }
        since.elapsed() < PATIENCE
    })?;
    let progress = Progress::read(&line).unwrap_or_default();
    lock(table).done[at] += progress.programs;
    let symptom = match status {
        Some(status) if status.success() => return Ok(()),
        Some(status) => Symptom::of(status, &fs::read_to_string(&said)?),
        None => Symptom::hang(PATIENCE),
    };
    let finding = Finding { target, seed: progress.seed, length: length(progress.seed), symptom };
    let Finding { seed, length, symptom, .. } = &finding;
    let mut table = lock(table);
    // The first failure of each place is printed, and the rest counted.
    if !table
        .findings
        .iter()
        .any(|other| other.target == target && other.symptom.place == symptom.place)
    {
        println!(
            "FOUND {target}, seed {seed}, {length} bytes: {}: {}",
            symptom.place, symptom.message
        );
    }
    table.findings.push(finding);
    Ok(())
}
