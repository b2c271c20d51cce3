//! Tests of what `AQUIFER_NVTX=1` announces, with a tool that is compiled against NVIDIA's headers.
//!
//! The tool, `tool.c`, writes each call to a file and checks it. Ignored tests are the programs
//! that the others run in processes of their own, since a process has one tool.
#![expect(unsafe_code, reason = "parks, and captures a graph")]
#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use aquifer_core::{Budget, DeviceId, MemoryError, Request, Tag};
use aquifer_device::{Debugging, DevicePool, Park, PoolConfig};
use aquifer_driver::{
    Access,
    sim::{DeviceConfig, Sim, SimConfig},
};
use aquifer_stream::Stream;
use std::{
    collections::BTreeSet,
    env, fs,
    path::{Path, PathBuf},
    process::{self, Command, Output},
    sync::{Barrier, OnceLock},
    thread,
};

const MIB: u64 = 1 << 20;

/// Compiles the tool once, and returns the path of its library.
fn tool() -> &'static Path {
    static TOOL: OnceLock<PathBuf> = OnceLock::new();
    TOOL.get_or_init(|| {
        let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/nvtx");
        let library = scratch("tool.so");
        let compiled = Command::new(env::var_os("CC").unwrap_or("cc".into()))
            .args(["-std=gnu11", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"])
            .arg("-I")
            .arg(&sources)
            .arg(sources.join("tool.c"))
            .arg("-o")
            .arg(&library)
            .output()
            .unwrap();
        assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
        library
    })
}

/// Returns a file name of this process.
fn scratch(name: &str) -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("nvtx-{}-{name}", process::id()))
}

/// Runs an ignored test in a process of its own.
fn run(name: &str, environment: &[(&str, &Path)]) -> Output {
    let mut command = Command::new(env::current_exe().unwrap());
    command.args(["--exact", name, "--ignored", "--nocapture", "--test-threads=1"]);
    for variable in ["AQUIFER_NVTX", "AQUIFER_TRACE", "AQUIFER_BYPASS", "AQUIFER_DEBUG"] {
        command.env_remove(variable);
    }
    command.env_remove("NVTX_INJECTION64_PATH");
    let output = command.envs(environment.iter().copied()).output().unwrap();
    let told = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success() && told.contains("1 passed"),
        "{told}{}",
        String::from_utf8_lossy(&output.stderr)
    );
    output
}

/// Runs an ignored test with the tool, and returns the tool's record, which has no violation.
fn recorded(name: &str, more: &[(&str, &Path)]) -> Vec<Line> {
    let path = scratch(&format!("{name}-{}.txt", more.len()));
    let _ = fs::remove_file(&path);
    let mut environment = vec![
        ("AQUIFER_NVTX", Path::new("1")),
        ("NVTX_INJECTION64_PATH", tool()),
        ("NVTX_TEST_RECORD", &path),
    ];
    environment.extend_from_slice(more);
    run(name, &environment);
    let lines = read(&path);
    fs::remove_file(&path).unwrap();
    lines
}

/// A call of the tool.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Line {
    operation: String,
    address: u64,
    bytes: u64,
    name: String,
}

fn read(path: &Path) -> Vec<Line> {
    let text = fs::read_to_string(path).unwrap();
    let line = |line: &str| {
        assert!(!line.starts_with("violation"), "{line}, in:\n{text}");
        let mut fields = line.splitn(4, ' ');
        let mut field = || fields.next().unwrap_or_default().to_owned();
        let (operation, address, bytes) = (field(), field(), field());
        let address = address.strip_prefix("0x").unwrap_or("0").to_owned();
        Line {
            operation,
            address: u64::from_str_radix(&address, 16).unwrap(),
            bytes: bytes.parse().unwrap(),
            name: field(),
        }
    };
    text.lines().map(line).collect()
}

/// Returns what the tool of this process has recorded.
fn record() -> Vec<Line> {
    read(Path::new(&env::var_os("NVTX_TEST_RECORD").unwrap()))
}

fn last(operation: &str) -> Line {
    record().into_iter().rfind(|line| line.operation == operation).unwrap()
}

fn count(lines: &[Line], operation: &str) -> usize {
    lines.iter().filter(|line| line.operation == operation).count()
}

/// A machine with a device of each kind: with and without virtual memory.
fn machine() -> Sim {
    let mut config = SimConfig::h200(1);
    config.devices.push(DeviceConfig::without_virtual_memory());
    Sim::new(config)
}

fn pool(sim: &Sim, device: u32, change: impl FnOnce(&mut PoolConfig)) -> DevicePool {
    let mut config = PoolConfig::with_budget(Budget::new("the device", 256 * MIB));
    change(&mut config);
    DevicePool::open(sim.driver(), DeviceId(device), config).unwrap()
}

#[test]
#[ignore = "a program of another test"]
fn uses_one_block() {
    let sim = machine();
    for device in [0, 1] {
        let pool = pool(&sim, device, |_| ());
        let (s, u) = (pool.stream().unwrap(), pool.stream().unwrap());
        let name = format!("model, \u{e9}{}", "long".repeat(20));
        let tagged = Request::bytes(1000).tag(Tag::named(&name));
        let block = pool.alloc(&s, tagged).unwrap();
        let address = block.address();

        // The call has returned, and the tool knows the heap, the block and its name.
        let region = last("region");
        assert_eq!((region.address, region.bytes), (address, 1000));
        let heap = last("heap");
        assert!(heap.address <= address && address + 1000 <= heap.address + heap.bytes);
        let named = last("name");
        let short: String = name.replace('\u{e9}', "_").chars().take(49).collect();
        assert_eq!((named.address, named.name), (address, short));

        // In use by another stream: freed, but not over.
        let used = block.prepare(&u, Access::Read).unwrap();
        drop(block);
        let ended = |lines: &[Line]| {
            lines.iter().any(|line| line.operation == "region-end" && line.address == address)
        };
        assert_eq!(count(&record(), "region-end"), count(&record(), "region") - 1);
        used.finish().unwrap();
        u.synchronize().unwrap();
        pool.poll().unwrap();
        assert!(ended(&record()));

        // The same address for another block, and its end at once.
        let again = pool.alloc(&s, Request::bytes(1000)).unwrap();
        assert_eq!((last("region").address, again.address()), (address, address));
        drop(again);
        let record = record();
        assert_eq!(count(&record, "region"), count(&record, "region-end"));

        s.synchronize().unwrap();
        assert!(pool.trim(0).unwrap() > 0);
        assert_eq!(count(&self::record(), "heap"), count(&self::record(), "heap-end"));
    }
}

#[test]
fn each_block_is_announced_before_its_allocation_returns_and_ends_before_its_address_is_reused() {
    let lines = recorded("uses_one_block", &[]);
    let starts: Vec<_> = lines[..3].iter().map(|line| line.operation.as_str()).collect();
    assert_eq!(starts, ["start", "extension", "domain"]);
    assert_eq!(lines[2].name, "aquifer");
}

#[test]
fn heaps_that_the_tool_refuses_have_no_regions() {
    let lines = recorded("uses_blocks", &[("NVTX_TEST_REFUSE", Path::new("1"))]);
    assert!(count(&lines, "refused") > 0, "{lines:?}");
    assert_eq!(count(&lines, "region") + count(&lines, "heap-end"), 0, "{lines:?}");
}

/// A generator of numbers, the same in every run.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (self.0 >> 33) % bound
    }
}

/// Returns the memory, or `None` if the pool has no room: a live block may lie in each of its
/// segments.
fn where_it_fits<T>(answer: Result<T, MemoryError>) -> Option<T> {
    match answer {
        Err(MemoryError::OutOfMemory(_)) => None,
        other => Some(other.unwrap()),
    }
}

/// Allocates and frees on a stream of its own, at times used by another stream as well.
fn churn(pool: &DevicePool, seed: u64, rounds: u64) {
    let (s, u) = (pool.stream().unwrap(), pool.stream().unwrap());
    let mut numbers = Numbers(seed);
    let mut held = Vec::new();
    for round in 0..rounds {
        // Odd, so that no block ends where a heap does.
        let half = if numbers.below(8) == 0 { 5 * MIB / 2 } else { 5000 };
        let bytes = 1 + 2 * numbers.below(half);
        if let Some(block) = where_it_fits(pool.alloc(&s, Request::bytes(bytes))) {
            held.push(block);
        }
        if held.len() > 12 || numbers.below(3) == 0 && !held.is_empty() {
            let block = held.swap_remove(numbers.below(held.len() as u64) as usize);
            if numbers.below(2) == 0 {
                let used = block.prepare(&u, Access::Write).unwrap();
                drop(block);
                used.finish().unwrap();
            }
        }
        match numbers.below(40) {
            0 => drop(pool.trim(0).unwrap()),
            1 => pool.poll().unwrap(),
            2 => u.synchronize().unwrap(),
            3 => drop(where_it_fits(pool.alloc_stable(&s, Request::bytes(513 + 2 * round)))),
            _ => {}
        }
    }
    if pool.streams().device() == DeviceId(0) {
        where_it_fits(uses_mapped_memory(pool, &s, seed));
    }
    drop(held);
    s.synchronize().unwrap();
    u.synchronize().unwrap();
}

/// Uses reserved and parkable memory.
fn uses_mapped_memory(pool: &DevicePool, s: &Stream, seed: u64) -> Result<(), MemoryError> {
    let mut reserved = pool.reserve::<u8>(s, 16 << 20)?;
    reserved.commit_to(5 << 20)?;
    reserved.decommit(2 << 20..16 << 20)?;
    reserved.commit_to(8 << 20)?;
    let tag = Tag::named(&format!("parkable {seed}"));
    let block = pool.parkable(tag)?.alloc(s, Request::bytes(3 * MIB + 1))?;
    s.synchronize()?;
    // SAFETY: 1. no work of the block is left, and no view of it exists.
    unsafe { pool.park(tag, Park::discard()) }?;
    pool.resume(tag, None)?;
    drop(block);
    Ok(())
}

#[test]
#[ignore = "a program of another test"]
fn uses_every_kind_of_memory() {
    const THREADS: u64 = 6;
    let sim = machine();
    let checked = |config: &mut PoolConfig| config.debug = Debugging::all();
    for pool in [
        pool(&sim, 0, |_| ()),
        pool(&sim, 0, |config| config.handle_bytes = 2 << 20),
        pool(&sim, 1, |_| ()),
        pool(&sim, 0, checked),
    ] {
        let together = Barrier::new(THREADS as usize);
        thread::scope(|scope| {
            for seed in 0..THREADS {
                let (pool, together) = (&pool, &together);
                scope.spawn(move || {
                    together.wait();
                    churn(pool, seed, 400);
                });
            }
        });
    }
    let violations = sim.violations();
    assert!(violations.is_empty(), "{}", violations[0]);
    assert!(sim.outstanding().is_empty(), "{}", sim.outstanding());
}

/// Bytes of the blocks in a trace whose memory is announced, and how many of them are odd. Mapped
/// memory is not announced.
fn traced(path: &Path) -> (u64, usize) {
    let text = fs::read_to_string(path).unwrap();
    let mut kinds = BTreeSet::new();
    let blocks = text.lines().skip(1).filter_map(|line| {
        let fields: Vec<_> = line.split(',').collect();
        let bytes = fields[3].parse::<u64>().unwrap();
        if fields[1] != "a" {
            return None;
        }
        kinds.insert(fields[5]);
        matches!(fields[5], "cached" | "stable").then_some(bytes)
    });
    let blocks: Vec<_> = blocks.collect();
    assert_eq!(kinds, BTreeSet::from(["cached", "parkable", "reserved", "stable"]));
    (blocks.iter().sum(), blocks.iter().filter(|&&bytes| bytes % 2 == 1).count())
}

#[test]
fn every_block_of_the_trace_is_announced_whole_and_everything_ends() {
    let trace = scratch("trace.csv");
    let lines = recorded("uses_every_kind_of_memory", &[("AQUIFER_TRACE", &trace)]);
    let regions = || lines.iter().filter(|line| line.operation == "region");
    // Only the last piece of an odd block ends at an odd address.
    let odd = regions().filter(|line| (line.address + line.bytes) % 2 == 1).count();
    let announced = (regions().map(|line| line.bytes).sum::<u64>(), odd);
    assert!(odd > 6000, "{odd}");
    assert_eq!(announced, traced(&trace));
    fs::remove_file(trace).unwrap();
    assert_eq!(count(&lines, "region"), count(&lines, "region-end"));
    assert_eq!(count(&lines, "heap"), count(&lines, "heap-end"));
}

#[test]
fn every_block_is_announced_without_a_trace_or_a_recorder_of_the_pool() {
    let lines = recorded("uses_every_kind_of_memory", &[]);
    assert!(count(&lines, "region") > 6000, "{}", lines.len());
    assert_eq!(count(&lines, "region"), count(&lines, "region-end"));
    assert_eq!(count(&lines, "heap"), count(&lines, "heap-end"));
}

#[test]
#[ignore = "a program of another test"]
fn captures_a_graph() {
    let sim = machine();
    for device in [0, 1] {
        let pool = pool(&sim, device, |_| ());
        let s = pool.stream().unwrap();
        let graphs = pool.graph_pool().unwrap();
        let begun = record().len();
        let work = |s: &Stream| {
            let first = pool.alloc(s, Request::bytes(1000))?;
            let second = pool.alloc(s, Request::bytes(1000))?;
            let at = first.address();
            assert_eq!(second.address(), at + 1024);
            drop((first, second));
            // Within the range of the first, and over the ranges of both.
            let inner = pool.alloc(s, Request::bytes(300).tag(Tag::named("inner")))?;
            assert_eq!(inner.address(), at);
            drop(inner);
            let longer = pool.alloc(s, Request::bytes(1700))?;
            assert_eq!(longer.address(), at);
            Ok(longer)
        };
        // SAFETY: 1. and 2. nothing is queued, and the blocks are of the graph pool alone.
        let (graph, block) = unsafe { graphs.capture(&s, work) }.unwrap();
        let at = block.address();
        let regions = |lines: &[Line]| -> Vec<(u64, u64)> {
            let of =
                |line: &Line| (line.operation == "region").then_some((line.address, line.bytes));
            lines[begun..].iter().filter_map(of).collect()
        };
        // Each byte that a block has occupied is in one region.
        let announced = [(at, 1000), (at + 1024, 1000), (at + 1000, 24)];
        assert_eq!(regions(&record()), announced);
        graph.launch(&s).unwrap();
        drop(block);
        s.synchronize().unwrap();
        pool.poll().unwrap();
        graph.launch(&s).unwrap();
        s.synchronize().unwrap();
        assert_eq!(count(&record()[begun..], "region-end"), 0, "launches still access it");
        drop((graph, graphs));
        pool.trim(0).unwrap();
        let record = &record()[begun..];
        assert_eq!((count(record, "region"), count(record, "region-end")), (3, 3));
        assert_eq!(count(record, "heap"), count(record, "heap-end"));
    }
    assert!(sim.violations().is_empty());
}

#[test]
fn what_a_graph_has_allocated_stays_announced_until_its_memory_returns_to_the_driver() {
    recorded("captures_a_graph", &[]);
}

#[test]
#[ignore = "a program of another test"]
fn opens_a_pool_with_a_wrong_setting() {
    let opened = DevicePool::open(machine().driver(), DeviceId(0), PoolConfig::default());
    let Err(MemoryError::BadSetting { name, value, expected }) = opened else {
        panic!("{opened:?}")
    };
    assert_eq!((name, &*value, expected), ("AQUIFER_NVTX", "yes", "0 or 1"));
}

#[test]
fn a_wrong_setting_is_an_error_of_the_call_that_opens_a_pool_and_loads_no_tool() {
    let path = scratch("wrong.txt");
    let environment = [
        ("AQUIFER_NVTX", Path::new("yes")),
        ("NVTX_INJECTION64_PATH", tool()),
        ("NVTX_TEST_RECORD", &path),
    ];
    run("opens_a_pool_with_a_wrong_setting", &environment);
    assert!(!path.exists());
}

#[test]
fn a_block_that_is_an_allocation_of_the_driver_is_left_to_the_tool() {
    let bypass = ("AQUIFER_BYPASS", Path::new("1"));
    let lines = recorded("uses_blocks", &[bypass]);
    assert_eq!(count(&lines, "heap") + count(&lines, "region"), 0, "{lines:?}");
}

#[test]
#[ignore = "a program of another test"]
fn uses_blocks() {
    let pool = pool(&machine(), 0, |_| ());
    let s = pool.stream().unwrap();
    drop(pool.alloc(&s, Request::bytes(1000)).unwrap());
    s.synchronize().unwrap();
    pool.trim(0).unwrap();
}

#[test]
fn without_a_tool_pools_work_as_before() {
    let on = ("AQUIFER_NVTX", Path::new("1"));
    run("uses_blocks", &[on]);
    let no_extension = scratch("empty.so");
    let compiled = Command::new(env::var_os("CC").unwrap_or("cc".into()))
        .args(["-shared", "-x", "c", "/dev/null", "-o"])
        .arg(&no_extension)
        .status();
    assert!(compiled.unwrap().success());
    for library in [Path::new("./."), Path::new("/nonexistent/tool.so"), &no_extension] {
        run("uses_blocks", &[on, ("NVTX_INJECTION64_PATH", library)]);
    }
}

#[test]
fn nothing_is_loaded_unless_it_is_asked_for() {
    for value in ["", "0", "off"] {
        let path = scratch("none.txt");
        let more = [
            ("AQUIFER_NVTX", Path::new(value)),
            ("NVTX_INJECTION64_PATH", tool()),
            ("NVTX_TEST_RECORD", &path),
        ];
        run("uses_blocks", &more);
        assert!(!path.exists(), "{value:?}");
    }
}
