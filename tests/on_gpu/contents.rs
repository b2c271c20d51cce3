//! Tests of contents under load: threads that allocate, fill, copy, stage, grow and free on
//! separate streams, in one pool under a moving limit.
//!
//! - A buffer holds what was last written to it, whatever the source and whatever was freed
//!   meanwhile.
//! - The pool exceeds its limit only while the limit is being lowered, and holds nothing at the
//!   end.
//!
//! One test runs on the simulator, whose oracle checks every access, and one on the first GPU.
//! `AQUIFER_SOAK_SECONDS` sets the duration of each, by default 2, and `AQUIFER_SOAK_SEED` the seed
//! of its random numbers.
#![expect(clippy::unwrap_used, clippy::panic, clippy::print_stdout, reason = "helpers of tests")]

use crate::first_gpu;
use aquifer::{
    Budget, DeviceBuffer, DevicePool, MemoryError, PoolConfig, Request, Reserved, Runtime,
    StableBlock, Stager, StagerConfig, Stream, sim::Sim,
};
use aquifer_core::random::SplitMix64;
use std::{
    env, thread,
    time::{Duration, Instant},
};

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;
const THREADS: u64 = 6;
/// The largest number of live buffers of a thread.
const MOST: usize = 24;
/// The limits that the pool's limit moves between.
const LIMITS: [u64; 4] = [96 << 20, 128 << 20, 192 << 20, 256 << 20];
/// Bytes of a buffer that are compared at a time.
const LOOK: usize = 256 * KIB;
/// Bytes of addresses that a thread reserves for growable memory.
const GROWABLE: usize = 16 * MIB;

fn variable(name: &str, default: u64) -> u64 {
    env::var(name)
        .map_or(default, |text| text.parse().unwrap_or_else(|why| panic!("{name}={text}: {why}")))
}

struct Random(SplitMix64);

impl Random {
    fn below(&mut self, end: usize) -> usize {
        self.0.next_u64() as usize % end
    }

    /// Returns a size of 1 B to 8 MiB. Each power of two is equally likely.
    fn size(&mut self) -> usize {
        let bits = self.below(24);
        1 + self.below(1 << bits)
    }
}

/// A buffer and the byte that fills it.
struct Filled {
    buffer: DeviceBuffer<u8>,
    byte: u8,
}

struct Worker<'a> {
    pool: &'a DevicePool,
    stager: &'a Stager,
    streams: [Stream; 2],
    random: Random,
    live: Vec<Filled>,
    grown: Reserved<u8>,
    /// The byte in each committed step of the growable memory.
    steps: Vec<u8>,
    counts: Counts,
}

#[derive(Default)]
struct Counts {
    operations: u64,
    refusals: u64,
    compared: u64,
}

impl Worker<'_> {
    fn stream(&mut self) -> Stream {
        let which = self.random.below(2);
        self.streams[which].clone()
    }

    /// Propagates every error except a lack of memory, after which the thread frees some of its
    /// own.
    fn granted<T>(&mut self, answer: Result<T, MemoryError>) -> Option<T> {
        match answer {
            Ok(granted) => Some(granted),
            Err(MemoryError::OutOfMemory(_)) => {
                self.counts.refusals += 1;
                let keep = self.live.len() / 2;
                self.live.truncate(keep);
                None
            }
            Err(error) => panic!("{error}"),
        }
    }

    /// Compares a part of a buffer with its expected byte.
    fn look(&mut self, n: usize) {
        let s = self.stream();
        let Filled { buffer, byte } = &self.live[n];
        let len = buffer.len().min(LOOK);
        let from = self.random.below(buffer.len() - len + 1);
        let part = buffer.slice(from..from + len).unwrap();
        let mut back = vec![!*byte; len];
        s.try_scope(|c| c.download(part, &mut back)).unwrap();
        assert_all(&back, *byte);
        self.counts.compared += len as u64;
    }

    fn allocate(&mut self) {
        let (s, u, len) = (self.stream(), self.stream(), self.random.size());
        let byte = self.random.below(256) as u8;
        let stable = self.random.below(16) == 0;
        let made = if stable {
            let block =
                |request: Request| self.pool.alloc_stable(&s, request).map(StableBlock::into_block);
            DeviceBuffer::from_alloc(len, block)
        } else {
            self.pool.buffer(&s, len)
        };
        if let Some(mut buffer) = self.granted(made) {
            u.fill_bytes(&mut buffer, byte).unwrap();
            self.live.push(Filled { buffer, byte });
        }
    }

    fn copy(&mut self, n: usize) {
        let (s, u, len) = (self.stream(), self.stream(), self.live[n].buffer.len());
        let made = self.pool.buffer(&s, len);
        if let Some(mut buffer) = self.granted(made)
            && let Some(from) = self.live.get(n)
        {
            let byte = from.byte;
            u.copy(&from.buffer, &mut buffer).unwrap();
            self.live.push(Filled { buffer, byte });
        }
    }

    fn stage(&mut self, n: usize) {
        let Filled { buffer, byte } = &mut self.live[n];
        *byte = self.random.below(256) as u8;
        let from = vec![*byte; buffer.len()];
        self.stager.try_scope(|c| c.upload(&from, buffer).map(drop)).unwrap();
    }

    /// Commits one more step or decommits the last one, and compares the contents of one.
    fn grow(&mut self) {
        let step = self.grown.step() as usize;
        let len = self.steps.len() * step;
        if self.random.below(3) == 0 && len > 0 {
            self.steps.pop();
            self.grown.decommit(len - step..len).unwrap();
        } else if len + step <= self.grown.max_len() {
            let committed = self.grown.commit(len..len + step);
            if self.granted(committed).is_some() {
                let byte = self.random.below(256) as u8;
                let s = self.grown.stream().clone();
                s.fill_bytes(&mut self.grown.slice_mut(len..len + step).unwrap(), byte).unwrap();
                self.steps.push(byte);
            }
        }
        if !self.steps.is_empty() {
            let n = self.random.below(self.steps.len());
            let mut back = vec![!self.steps[n]; LOOK];
            let s = self.stream();
            let part = self.grown.slice(n * step..n * step + LOOK).unwrap();
            s.try_scope(|c| c.download(part, &mut back)).unwrap();
            assert_all(&back, self.steps[n]);
            self.counts.compared += LOOK as u64;
        }
    }

    fn step(&mut self) {
        self.counts.operations += 1;
        if self.live.len() >= MOST {
            self.live.swap_remove(self.random.below(MOST));
        }
        let what = self.random.below(16);
        if self.live.is_empty() || what < 5 {
            return self.allocate();
        }
        let n = self.random.below(self.live.len());
        match what {
            5..=7 => self.copy(n),
            8..=10 => self.look(n),
            11 => {
                self.look(n);
                self.live.swap_remove(n);
            }
            12 => {
                self.live.swap_remove(n);
            }
            13 => self.stage(n),
            14 => self.grow(),
            _ => match self.random.below(8) {
                0 => drop(self.pool.trim(self.random.below(256 * MIB) as u64).unwrap()),
                1 => drop(self.pool.budget().set_limit(LIMITS[self.random.below(LIMITS.len())])),
                // Drops a stream with work queued on it, and leases another.
                _ => self.streams[self.random.below(2)] = self.pool.stream().unwrap(),
            },
        }
    }
}

#[track_caller]
fn assert_all(back: &[u8], byte: u8) {
    let wrong = back.iter().position(|&read| read != byte);
    assert_eq!(wrong.map(|at| (at, back[at])), None, "all of it was {byte}");
}

/// Runs the threads for the configured time, and asserts that nothing remains.
fn soak(rt: &Runtime) {
    let (seconds, seed) = (variable("AQUIFER_SOAK_SECONDS", 2), variable("AQUIFER_SOAK_SEED", 1));
    let first = rt.device(0).unwrap();
    let budget = Budget::new("the soak", LIMITS[0]);
    let mut config = PoolConfig::with_budget(budget.clone());
    config.wait = Duration::from_millis(50);
    let pool = DevicePool::open(rt.driver().unwrap().clone(), first.device(), config).unwrap();
    let stager = rt.stager(0, StagerConfig::default()).unwrap();
    let until = Instant::now() + Duration::from_secs(seconds);
    let total = thread::scope(|scope| {
        let work = |n| {
            let (pool, stager) = (&pool, &stager);
            move || {
                let s = pool.stream().unwrap();
                let grown = pool.reserve::<u8>(&s, GROWABLE).unwrap();
                let streams = [s, pool.stream().unwrap()];
                let random = Random(SplitMix64::new(seed.wrapping_mul(1000) + n));
                let (live, steps, counts) = (Vec::new(), Vec::new(), Counts::default());
                let mut worker =
                    Worker { pool, stager, streams, random, live, grown, steps, counts };
                while Instant::now() < until {
                    worker.step();
                }
                (0..worker.live.len()).for_each(|n| worker.look(n));
                worker.counts
            }
        };
        let threads: Vec<_> = (0..THREADS).map(|n| scope.spawn(work(n))).collect();
        threads.into_iter().fold(Counts::default(), |sum, thread| {
            let counts = thread.join().unwrap();
            Counts {
                operations: sum.operations + counts.operations,
                refusals: sum.refusals + counts.refusals,
                compared: sum.compared + counts.compared,
            }
        })
    });
    println!(
        "{} operations, {} refused, {} MiB compared, in {seconds} s from seed {seed}",
        total.operations,
        total.refusals,
        total.compared >> 20
    );
    assert!(total.operations > 0 && total.compared > 0);
    assert_eq!(pool.stats().live, 0);
    pool.trim(0).unwrap();
    assert_eq!(budget.used(), 0, "{:?}", pool.stats());
}

#[test]
fn contents_stay_under_everything_at_once_on_the_simulator() {
    let sim = Sim::h200(1).capacity(1 << 30);
    let rt = Runtime::builder().driver(sim.driver()).pinned_budget(128 << 20).build().unwrap();
    soak(&rt);
    let violations = sim.violations();
    assert!(violations.is_empty(), "{}", violations[0]);
}

#[test]
fn contents_stay_under_everything_at_once_on_a_gpu() {
    if let Some(rt) = first_gpu::runtime() {
        soak(&rt);
    }
}
