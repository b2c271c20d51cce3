//! Tests of another process that needs memory of a real GPU whose cache is full, and of the effect
//! on this process.
//!
//! Ignored tests are the other process. Run it with `--nocapture` for the figures, and with nothing
//! else on the GPU.
#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use crate::{
    first_gpu::{self, gpu},
    itself::itself,
};
use aquifer::{Bytes, DeviceBuffer, DeviceId, Request, Runtime};
use aquifer_driver::{Devices, Memory};
use std::{
    env,
    io::{self, BufRead, BufReader, Write},
    process::{Child, ChildStdin, ChildStdout, Stdio},
    sync::atomic::{AtomicU32, Ordering},
    thread,
    time::{Duration, Instant},
};

const GIB: u64 = 1 << 30;
const GPU: DeviceId = DeviceId(0);
/// The number of bytes that the other process takes.
const VARIABLE: &str = "AQUIFER_TEST_NEIGHBOUR_BYTES";
/// Longer than any operation takes, unless it hangs.
const PATIENCE: Duration = Duration::from_secs(60);

/// A process that takes memory on request and holds it until dropped.
struct Neighbour {
    process: Child,
    tell: ChildStdin,
    told: BufReader<ChildStdout>,
}

impl Neighbour {
    /// Starts a process with its own context.
    fn start(bytes: u64) -> Self {
        let mut process = itself("pressure::child_takes")
            .env(VARIABLE, bytes.to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (tell, told) =
            (process.stdin.take().unwrap(), BufReader::new(process.stdout.take().unwrap()));
        let mut neighbour = Self { process, tell, told };
        neighbour.hear("ready");
        neighbour
    }

    /// Waits for a line of output that starts with `word`, and returns the rest.
    fn hear(&mut self, word: &str) -> String {
        let mut line = String::new();
        loop {
            line.clear();
            assert!(
                self.told.read_line(&mut line).unwrap() > 0,
                "the neighbour has ended without: {word}"
            );
            if let Some((_, rest)) = line.split_once(word) {
                return rest.trim().to_owned();
            }
        }
    }

    /// Returns how long the process waited for its memory, and how often it was refused.
    fn take(&mut self) -> (Duration, u64) {
        writeln!(self.tell, "take").unwrap();
        let said = self.hear("took ");
        let mut numbers = said.split(' ').map(|number| number.parse::<u64>().unwrap());
        (Duration::from_micros(numbers.next().unwrap()), numbers.next().unwrap())
    }
}

impl Drop for Neighbour {
    fn drop(&mut self) {
        let _ = writeln!(self.tell, "go");
        let _ = self.process.wait();
    }
}

#[test]
#[ignore = "half of another test"]
fn child_takes() {
    let bytes: u64 = env::var(VARIABLE).unwrap().parse().unwrap();
    let driver = aquifer::cuda::CudaDriver::open().unwrap();
    driver.memory_info(GPU).unwrap();
    let mut lines = io::stdin().lines();
    println!("ready");
    lines.next().unwrap().unwrap();
    let (begun, mut refused) = (Instant::now(), 0u64);
    while let Err(error) = driver.mem_alloc(GPU, bytes) {
        assert!(error.is_out_of_memory() && begun.elapsed() < PATIENCE, "{error}");
        refused += 1;
        thread::sleep(Duration::from_millis(1));
    }
    println!("took {} {refused}", begun.elapsed().as_micros());
    // The memory is freed when the process ends, as that of other programs.
    lines.next().unwrap().unwrap();
}

/// Returns the longest and the median of the laps, in microseconds.
fn longest_and_median(laps: &mut [Duration]) -> (u128, u128) {
    laps.sort_unstable();
    let at = |place: usize| laps.get(place).map_or(0, Duration::as_micros);
    (at(laps.len().saturating_sub(1)), at(laps.len() / 2))
}

#[test]
fn a_neighbour_gets_a_seventh_of_the_gpu_while_the_cache_is_full_and_kernels_run_on() {
    let _turn = first_gpu::turn();
    let unwatched = Runtime::builder().build().unwrap();
    let Some(total) = unwatched.devices().first().map(|pool| pool.info().memory) else {
        gpu::skip("no GPU");
        return;
    };
    drop(unwatched);
    // 20 GiB of an H200.
    let bytes = (total / 7).min(20 * GIB);
    let keep_free = bytes + bytes / 10;
    let rt = Runtime::builder().device_budget(total).keep_free(keep_free).build().unwrap();
    let pool = rt.device(0).unwrap();
    let driver = pool.driver().clone();
    let stream = pool.stream().unwrap();
    let mut live: DeviceBuffer<u32> = pool.buffer(&stream, 16 << 20).unwrap();
    stream.fill(&mut live, 7).unwrap();
    stream.synchronize().unwrap();
    // All remaining memory is idle in the caches, in blocks of many sizes.
    let mut blocks = Vec::new();
    for size in [GIB, 256 << 20, 32 << 20, 4 << 20] {
        while let Ok(block) = pool.alloc(&stream, Request::bytes(size)) {
            blocks.push(block);
        }
    }
    drop(blocks);
    println!("cache {} of {}", Bytes(pool.stats().physical), Bytes(total));
    let mut neighbours = [Neighbour::start(bytes), Neighbour::start(bytes)];
    let begun = Instant::now();
    while driver.memory_info(GPU).unwrap().free < keep_free && begun.elapsed() < PATIENCE {
        thread::sleep(Duration::from_millis(1));
    }

    // Short kernels, each waited for, in three parts: before, while and after a neighbour needs
    // memory.
    let part = AtomicU32::new(0);
    /// Ends the kernels, also if a neighbour fails.
    struct End<'a>(&'a AtomicU32);
    impl Drop for End<'_> {
        fn drop(&mut self) {
            self.0.store(3, Ordering::Relaxed);
        }
    }
    let (mut laps, (first, second)) = thread::scope(|scope| {
        let working = scope.spawn(|| {
            let own = pool.stream().unwrap();
            let mut x: DeviceBuffer<u32> = pool.buffer(&own, 1 << 20).unwrap();
            let mut laps = [const { Vec::new() }; 3];
            loop {
                let now = part.load(Ordering::Relaxed);
                if now > 2 {
                    return laps;
                }
                let begun = Instant::now();
                own.fill(&mut x, now).unwrap();
                own.synchronize().unwrap();
                laps[now as usize].push(begun.elapsed());
            }
        });
        let wait = |part_now| {
            part.store(part_now, Ordering::Relaxed);
            thread::sleep(Duration::from_millis(500));
        };
        let end = End(&part);
        wait(0);
        part.store(1, Ordering::Relaxed);
        let first = neighbours[0].take();
        let second = neighbours[1].take();
        wait(2);
        drop(end);
        (working.join().unwrap(), (first, second))
    });
    println!("first neighbour: {} after {:?}, refused {} times", Bytes(bytes), first.0, first.1);
    println!("second neighbour: {} after {:?}, refused {} times", Bytes(bytes), second.0, second.1);
    for (name, laps) in ["before", "meanwhile", "after"].iter().zip(&mut laps) {
        let (longest, median) = longest_and_median(laps);
        println!("kernels {name}: {} laps, median {median} µs, longest {longest} µs", laps.len());
    }
    let seen = rt.pressure().devices[0].clone();
    println!("{seen:?}");
    assert!(second.1 > 0, "the second was refused until the cache gave back");
    assert!(seen.given_back >= bytes && seen.ended.is_none());
    let mut back = vec![0; live.len()];
    stream.scope(|c| c.download(&live, &mut back)).unwrap().unwrap();
    assert!(back.iter().all(|&n| n == 7), "live memory is as it was");
    // Released memory is not taken again while the neighbours run, though their memory counts as
    // theirs.
    let mut blocks = Vec::new();
    while let Ok(block) = pool.alloc(&stream, Request::bytes(GIB)) {
        blocks.push(block);
    }
    let free = driver.memory_info(GPU).unwrap().free;
    println!(
        "with all that the pool gets held, {} are free of {} to be kept",
        Bytes(free),
        Bytes(keep_free)
    );
    assert!(!blocks.is_empty() && free >= keep_free - GIB / 2);
}
