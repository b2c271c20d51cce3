//! Other processes read the figures that a process's own pools return.
//!
//! The test starts processes with different pools, each of which is an ignored test of this file.
//! They write lines that begin with `@`, and wait for a line before each further step.
#![expect(unsafe_code, reason = "forks, and kills a process")]
#![expect(clippy::unwrap_used, reason = "helpers of tests")]

#[path = "support/itself.rs"]
mod itself;

use aquifer::{
    Access, Budget, DeviceId, DevicePool, Direct, MemoryError, Opaque, PinnedConfig, PinnedPool,
    PoolConfig, PoolStats, Request, Runtime, StreamOrdered, StreamPool,
    host::{Host, Topology},
    sim::Sim,
    vec::Vec as PinnedVec,
};
use aquifer_status::{PoolKind, ProcessStatus, StatusFolder};
use itself::itself;
use nix::{libc, unistd};
use std::{
    collections::BTreeMap,
    env, fs,
    io::{self, BufRead, BufReader, Read, Write},
    os::{fd::AsFd, unix::fs::PermissionsExt},
    path::{Path, PathBuf},
    process::{self, Child, ChildStdin, ChildStdout, Stdio},
};

const MIB: u64 = 1 << 20;

/// Writes a line without a lock, which another thread of a forked process may have held.
fn say(text: &str) {
    let line = format!("\n@ {text}\n");
    assert_eq!(unistd::write(io::stdout().as_fd(), line.as_bytes()), Ok(line.len()));
}

fn hear() {
    let mut line = String::new();
    io::stdin().lock().read_line(&mut line).unwrap();
}

/// A pool as the test compares it.
fn figures(kind: PoolKind, stats: &PoolStats) -> String {
    format!("{kind:?} {stats:?}")
}

fn device_pool(sim: &Sim, limit: u64) -> DevicePool {
    let config = PoolConfig::with_budget(Budget::new("device", limit));
    DevicePool::open(sim.driver(), DeviceId(0), config).unwrap()
}

#[test]
#[ignore = "a part of the other tests, in a process of its own"]
fn device_process() {
    let sim = Sim::h200(1);
    let pool = device_pool(&sim, 256 * MIB);
    let (s, u) = (pool.stream().unwrap(), pool.stream().unwrap());
    let stable = pool.alloc_stable(&s, Request::bytes(3 * MIB)).unwrap();
    let (mut on_s, mut on_u) = (Vec::new(), Vec::new());
    for nth in 1..50 {
        on_s.push(pool.alloc(&s, Request::bytes(nth * 1000)).unwrap());
        on_u.push(pool.alloc(&u, Request::bytes(nth * 3000)).unwrap());
    }
    // Freed while another stream may use it.
    let used = pool.alloc(&s, Request::bytes(100_000)).unwrap();
    let launch = used.prepare(&u, Access::Read).unwrap();
    drop(used);
    let refused = pool.alloc(&s, Request::bytes(1 << 40)).unwrap_err();
    assert!(matches!(refused, MemoryError::OutOfMemory(_)));
    // From here on no slow path runs: only the streams' caches change. They end at their peaks,
    // which are published by slow paths, and never shown below what is held.
    let before = pool.budget().used();
    for (stream, held) in [(&s, &mut on_s), (&u, &mut on_u)] {
        drop(held.swap_remove(3));
        held.extend((0..20).map(|_| pool.alloc(stream, Request::bytes(700)).unwrap()));
        for _ in 0..1000 {
            drop(pool.alloc(stream, Request::bytes(512)).unwrap());
        }
        held.push(pool.alloc(stream, Request::bytes(512)).unwrap());
    }
    assert_eq!(pool.budget().used(), before);
    say("ready");
    hear();
    say(&figures(PoolKind::Device, &pool.stats()));
    say("end");
    hear();
    launch.finish().unwrap();
    drop(stable);
}

#[test]
#[ignore = "a part of the other tests, in a process of its own"]
fn sources_process() {
    let sim = Sim::h200(1);
    let streams = StreamPool::new(sim.driver(), DeviceId(0), 4);
    let stream = streams.lease().unwrap();
    let direct = Direct::new(sim.driver(), streams.clone(), None);
    let ordered =
        StreamOrdered::new(sim.driver(), streams, Budget::new("ordered", 1 << 30)).unwrap();
    let host = Host::new(Topology::read().unwrap(), aquifer_host::kernel::Kernel::new());
    let budget = Budget::new("pinned", 64 * MIB);
    let pinned = PinnedPool::new(&host, &budget, PinnedConfig::default()).unwrap();
    let held = [
        direct.allocate(&stream, Request::bytes(5000)).unwrap(),
        ordered.allocate(&stream, Request::bytes(70_000)).unwrap(),
    ];
    drop(direct.allocate(&stream, Request::bytes(100)).unwrap());
    let mut vectors = Vec::new();
    for nth in 1..100 {
        vectors.push(PinnedVec::<u8, _>::with_capacity_in(nth * 321, pinned.allocator()));
    }
    vectors.truncate(70);
    let mut all = vec![
        figures(PoolKind::Source, &direct.stats()),
        figures(PoolKind::Source, &ordered.stats()),
        figures(PoolKind::Pinned, &pinned.stats().memory),
    ];
    say("ready");
    hear();
    all.drain(..).for_each(|line| say(&line));
    say("end");
    hear();
    drop(held);
}

#[test]
#[ignore = "a part of the other tests, in a process of its own"]
fn forking_process() {
    let sim = Sim::h200(1);
    let pool = device_pool(&sim, 512 * MIB);
    let stream = pool.stream().unwrap();
    let held: Vec<_> =
        (1..20).map(|n| pool.alloc(&stream, Request::bytes(n * 5000)).unwrap()).collect();
    let (mut wait, mut go) = io::pipe().unwrap();
    // SAFETY: 1. The other threads of this process are idle, and hold no lock that the child needs.
    let child = match unsafe { libc::fork() } {
        0 => {
            drop(go);
            // By the caches alone, then by slow paths of both pools.
            drop(pool.alloc(&stream, Request::bytes(5000)).unwrap());
            let more = pool.alloc(&stream, Request::bytes(80 * MIB)).unwrap();
            let own = device_pool(&sim, 128 * MIB);
            let other = own.alloc(&own.stream().unwrap(), Request::bytes(9 * MIB)).unwrap();
            say(&format!("child {}", process::id()));
            let mut byte = [0];
            wait.read_exact(&mut byte).unwrap();
            for pool in [&pool, &own] {
                say(&format!("child {}", figures(PoolKind::Device, &pool.stats())));
            }
            say("child end");
            wait.read_exact(&mut byte).unwrap();
            drop((more, other));
            // Removes the file.
            process::exit(0)
        }
        child => child,
    };
    say("ready");
    hear();
    say(&figures(PoolKind::Device, &pool.stats()));
    say("end");
    for _ in 0..2 {
        hear();
        go.write_all(b"g").unwrap();
    }
    let mut status = 0;
    // SAFETY: 1. The status is written to a local.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert_eq!(status, 0);
    drop(held);
    hear();
}

#[test]
#[ignore = "a part of the other tests, in a process of its own"]
fn quiet_process() {
    let runtime = Runtime::builder().driver(Sim::h200(1).driver());
    let disabled = env::var_os("AQUIFER_STATUS").is_some_and(|value| value != "off");
    let runtime = if disabled { runtime.publish_status(false) } else { runtime };
    let runtime = runtime.build().unwrap();
    let pool = runtime.device(0).unwrap();
    drop(pool.alloc(&pool.stream().unwrap(), Request::bytes(5 * MIB)).unwrap());
    assert_eq!(pool.stats().allocations, 1);
    assert!(!aquifer::status::is_published());
    say("ready");
}

#[test]
#[ignore = "a part of the other tests, in a process of its own"]
fn unsafe_process() {
    let pool = device_pool(&Sim::h200(1), 256 * MIB);
    let other = device_pool(&Sim::h200(1), 256 * MIB);
    drop(pool.alloc(&pool.stream().unwrap(), Request::bytes(5 * MIB)).unwrap());
    assert_eq!((pool.stats().allocations, other.stats().allocations), (1, 0));
    say("ready");
}

#[test]
#[ignore = "a part of the other tests, in a process of its own"]
fn mistaken_process() {
    let opened = DevicePool::open(Sim::h200(1).driver(), DeviceId(0), PoolConfig::default());
    let Err(MemoryError::BadSetting { name, value, .. }) = opened else { panic!("{opened:?}") };
    assert_eq!((name, &*value), ("AQUIFER_STATUS", "of"));
    say("ready");
}

/// A process that runs one of the tests above.
struct Part {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Part {
    fn start(role: &str, variables: &[(&str, &Path)]) -> Self {
        let mut child = itself(role)
            .env_remove("AQUIFER_STATUS")
            .envs(variables.iter().copied())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let (input, output) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        Self { child, input, output: BufReader::new(output) }
    }

    /// Returns the next line that begins with `@`.
    fn line(&mut self) -> String {
        loop {
            let mut line = String::new();
            let read = self.output.read_line(&mut line).unwrap();
            assert!(read > 0, "the process has ended: {:?}", self.errors());
            if let Some(line) = line.strip_prefix("@ ") {
                return line.trim_end().to_owned();
            }
        }
    }

    fn lines_until(&mut self, end: &str) -> Vec<String> {
        let mut lines = Vec::new();
        loop {
            let line = self.line();
            if line == end {
                lines.sort();
                return lines;
            }
            lines.push(line);
        }
    }

    fn go(&mut self) {
        self.input.write_all(b"go\n").unwrap();
    }

    fn errors(&mut self) -> String {
        let mut errors = String::new();
        self.child.stderr.take().unwrap().read_to_string(&mut errors).unwrap();
        errors
    }

    fn end(mut self) -> String {
        let errors = self.errors();
        assert!(self.child.wait().unwrap().success(), "{errors}");
        errors
    }
}

/// A folder that is removed at the end.
struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> Self {
        let path = env::temp_dir().join(format!("aquifer-status-{name}-{}", process::id()));
        let _absent = fs::remove_dir_all(&path);
        fs::create_dir(&path).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o700)).unwrap();
        Self(path)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _left = fs::remove_dir_all(&self.0);
    }
}

fn processes(folder: &StatusFolder) -> BTreeMap<u32, ProcessStatus> {
    let processes = folder.processes().unwrap().map(Result::unwrap);
    processes.map(|process| (process.process, process)).collect()
}

fn shown(process: &ProcessStatus) -> Vec<String> {
    assert!(process.faults.is_empty(), "{process:?}");
    let mut lines: Vec<_> =
        process.pools.iter().map(|pool| figures(pool.kind, &pool.stats)).collect();
    lines.sort();
    lines
}

/// Returns figures without those that the next slow path publishes, such as a call of `stats`: the
/// peaks of live bytes, and the counts of allocations and frees, in which a block may be missing
/// that was freed last and allocated again.
fn without_late(lines: &[String]) -> Vec<String> {
    let cut = |line: &String| {
        let (before, rest) = line.split_once("peak_requested: ").unwrap();
        let (between, rest) =
            rest.split_once("peak_physical: ").unwrap().1.split_once("allocations: ").unwrap();
        format!("{before}{between}{}", rest.split_once("failures: ").unwrap().1)
    };
    lines.iter().map(cut).collect()
}

#[test]
fn figures_of_other_processes_are_those_of_their_own_pools() {
    let scratch = Scratch::new("figures");
    let variables: &[(&str, &Path)] = &[("AQUIFER_STATUS", &scratch.0)];
    let mut device = Part::start("device_process", variables);
    let mut sources = Part::start("sources_process", variables);
    let mut forking = Part::start("forking_process", variables);
    assert_eq!(device.line(), "ready");
    assert_eq!(sources.line(), "ready");
    // The fork and its parent may be ready in any order.
    let mut both = [forking.line(), forking.line()];
    both.sort();
    let forked: u32 = both[0].strip_prefix("child ").unwrap().parse().unwrap();
    assert_eq!(both[1], "ready");

    let folder = StatusFolder::at(&scratch.0).unwrap();
    let all = processes(&folder);
    assert_eq!(all.len(), 4, "{all:?}");
    assert!(all.values().all(ProcessStatus::is_alive));
    for part in [&mut device, &mut sources, &mut forking] {
        part.go();
        let own = part.lines_until("end");
        let id = part.child.id();
        assert_eq!(without_late(&shown(&all[&id])), without_late(&own));
        assert_eq!(shown(&processes(&folder)[&id]), own, "after its own call of `stats`");
        assert!(!own.is_empty());
    }
    forking.go();
    let own: Vec<_> = forking.lines_until("child end");
    let own: Vec<_> = own.iter().map(|line| line.strip_prefix("child ").unwrap()).collect();
    let own: Vec<_> = own.into_iter().map(str::to_owned).collect();
    assert_eq!(without_late(&shown(&all[&forked])), without_late(&own));
    assert_eq!(own.len(), 2);

    let pool = &all[&device.child.id()].pools[0];
    assert_eq!((pool.device, pool.limit, pool.caches), (Some(0), Some(256 * MIB), 2));
    assert!(pool.stats.pending > 0 && pool.stats.failures == 1 && pool.stats.blocks > 100);
    let command = &all[&device.child.id()].command;
    assert!(command.contains("device_process"), "{command}");

    // A process that is killed leaves its file, and is known to be dead.
    let dead = device.child.id();
    device.child.kill().unwrap();
    device.child.wait().unwrap();
    let after = processes(&folder);
    assert_eq!((after.len(), after[&dead].is_alive()), (4, false));
    assert_eq!(shown(&after[&dead]), shown(&processes(&folder)[&dead]));
    assert_eq!(folder.sweep().unwrap(), 1);
    assert_eq!(processes(&folder).len(), 3);

    // The others remove theirs, the fork before its parent.
    sources.go();
    sources.end();
    forking.go();
    forking.go();
    forking.end();
    assert_eq!(processes(&folder).len(), 0);
    assert_eq!(fs::read_dir(&scratch.0).unwrap().count(), 0);
}

#[test]
fn a_process_that_does_not_publish_leaves_no_file() {
    let scratch = Scratch::new("off");
    let off = [("XDG_RUNTIME_DIR", &*scratch.0), ("AQUIFER_STATUS", Path::new("off"))];
    let disabled = [("AQUIFER_STATUS", &*scratch.0)];
    for variables in [&off[..], &disabled[..]] {
        let mut part = Part::start("quiet_process", variables);
        assert_eq!(part.line(), "ready");
        part.end();
        assert_eq!(fs::read_dir(&scratch.0).unwrap().count(), 0);
    }
    // In the default folder, which the runtime's folder decides.
    let variables: [(&str, &Path); 1] = [("XDG_RUNTIME_DIR", &scratch.0)];
    let mut part = Part::start("device_process", &variables);
    assert_eq!(part.line(), "ready");
    let folder = StatusFolder::at(scratch.0.join("aquifer")).unwrap();
    assert_eq!(processes(&folder).len(), 1);
    part.child.kill().unwrap();
    part.child.wait().unwrap();
}

#[test]
fn an_unsafe_folder_is_reported_once_and_a_wrong_setting_is_an_error() {
    let scratch = Scratch::new("unsafe");
    fs::set_permissions(&scratch.0, fs::Permissions::from_mode(0o755)).unwrap();
    let mut part = Part::start("unsafe_process", &[("AQUIFER_STATUS", &scratch.0)]);
    assert_eq!(part.line(), "ready");
    let errors = part.end();
    assert_eq!(errors.matches("no status is published").count(), 1, "{errors}");
    assert!(errors.contains("0700"), "{errors}");
    assert_eq!(fs::read_dir(&scratch.0).unwrap().count(), 0);

    let mut part = Part::start("mistaken_process", &[("AQUIFER_STATUS", Path::new("of"))]);
    assert_eq!(part.line(), "ready");
    part.end();
}
