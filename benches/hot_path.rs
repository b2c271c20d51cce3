//! The cost of the device pool's hot path on this machine, compared with `malloc`.
//!
//! ```text
//! cargo bench -p aquifer-benches --bench hot_path                          every row, with a malloc pair of the same run beside it
//! cargo bench -p aquifer-benches --bench hot_path -- --count pair 1048576  one row, briefly, to be counted by callgrind:
//! valgrind --tool=callgrind --toggle-collect='*::measured' target/release/deps/hot_path-* --count pair 1048576
//! ```
//!
//! The driver is the simulator without its checks, so that only the pool is measured. A *pair* is
//! one allocation and one free. A *batch* is 64 allocations, then their frees in the same order.
//! *Random* draws sizes up to a bound and frees in random order, by the rules of RMM's own
//! benchmark. *On a plan* plays the same operations under a plan made of them, in a loop. *Swing*
//! is the worst case of a pool's peak: the live bytes of each of 8 streams rise and fall, and their
//! sum stays at the peak, or in the other row at half of it.
#![expect(clippy::print_stdout, reason = "a benchmark shows what it found")]

use aquifer::{
    Block, Budget, DeviceId, DevicePool, Driver, PoolConfig, Request, Stream, Tenant, sim::Sim,
};
use aquifer_core::random::SplitMix64;
use aquifer_formats::plan::{Plan, PlanBlock, PlanOptions};
use std::{error::Error, hint::black_box, sync::Arc, time::Instant};

type Outcome<T> = Result<T, Box<dyn Error>>;

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
/// Rounds per row. The result is their median.
const ROUNDS: usize = 15;
/// Blocks per batch.
const BATCH: usize = 64;
/// Allocations of a random row, which it repeats.
const STEPS: usize = 1000;
/// The limit of live bytes in a random row, as in RMM's benchmark.
const LIVE: u64 = 16_000 * MIB;

/// A row of the benchmark.
#[derive(Clone, Copy)]
enum Row {
    Pair(u64),
    /// Pairs of blocks that are charged to a tenant.
    Tenant(u64),
    Batch(u64),
    Random(u64),
    /// The operations of a random row under a plan made of them.
    Planned(u64),
    /// Operations of streams whose sum is at the peak.
    Swing(u64),
    /// The same operations below the peak.
    Below(u64),
}

impl Row {
    fn name(self) -> String {
        let size = |bytes: u64| match bytes {
            GIB.. => format!("{} GiB", bytes / GIB),
            MIB.. => format!("{} MiB", bytes / MIB),
            KIB.. => format!("{} KiB", bytes / KIB),
            _ => format!("{bytes} B"),
        };
        match self {
            Self::Pair(bytes) => format!("pair {}", size(bytes)),
            Self::Tenant(bytes) => format!("pair {} of a tenant's", size(bytes)),
            Self::Batch(bytes) => format!("batch of {BATCH} of {}, a pair of it", size(bytes)),
            Self::Random(most) => format!("random up to {}, one operation", size(most)),
            Self::Planned(most) => format!("the same up to {}, on a plan", size(most)),
            Self::Swing(bytes) => format!("swing of {}, at the peak", size(bytes)),
            Self::Below(bytes) => format!("swing of {}, below it", size(bytes)),
        }
    }
}

/// One step of a random row.
enum Step {
    /// Allocates this many bytes.
    Allocate(u64),
    /// Frees the block at this index. The last one takes its index.
    Free(usize),
}

/// Returns `2 * count` steps. Each draws a size, and allocates it in 73 of 100 cases if that is
/// allowed.
fn steps(count: usize, most: u64) -> Vec<Step> {
    let mut random = SplitMix64::new(1);
    let mut next = move || random.next_u64();
    let (mut live, mut bytes, mut allocated) = (Vec::<u64>::new(), 0, 0);
    let mut steps = Vec::new();
    for _ in 0..2 * count {
        let size = 1 + next() % most;
        let wanted = live.is_empty() || next() % 100 < 73 && bytes + size < LIVE;
        if wanted && allocated < count {
            live.push(size);
            bytes += size;
            allocated += 1;
            steps.push(Step::Allocate(size));
        } else if !live.is_empty() {
            let at = (next() % count as u64) as usize % live.len();
            bytes -= live.swap_remove(at);
            steps.push(Step::Free(at));
        }
    }
    steps.extend((0..live.len()).rev().map(Step::Free));
    steps
}

/// Returns a plan of steps on one stream.
fn plan(steps: &[Step]) -> Outcome<Plan> {
    let (mut blocks, mut held) = (Vec::<PlanBlock>::new(), Vec::new());
    for (number, step) in (0..).zip(steps) {
        match *step {
            Step::Allocate(bytes) => {
                held.push(blocks.len());
                let end = aquifer_formats::plan::NEVER;
                blocks.push(PlanBlock { bytes, first: number, end, stream: 0, shared: false });
            }
            Step::Free(at) => blocks[held.swap_remove(at)].end = number,
        }
    }
    Ok(Plan::make(&blocks, &PlanOptions::default())?)
}

/// The streams of a swing, and the blocks that each has at most.
const SWINGING: usize = 8;
const HIGH: usize = 32;

/// A pool with one stream.
struct Bench {
    pool: DevicePool,
    tenant: Tenant,
    stream: Stream,
    held: Vec<Block>,
    /// The streams of a swing, with their blocks.
    swinging: Vec<(Stream, Vec<Block>)>,
}

impl Bench {
    fn new(row: Row) -> Outcome<Self> {
        let sim = Sim::h200(1).symbolic();
        sim.oracle(false);
        let driver: Arc<dyn Driver> = sim.driver();
        let mut config = PoolConfig::default();
        if let Row::Planned(most) = row {
            config = config.with_plan(Arc::new(plan(&steps(STEPS, most))?));
        }
        let pool = DevicePool::open(driver, DeviceId(0), config)?;
        let stream = pool.stream()?;
        let tenant = pool.for_tenant(&Budget::new("the tenant", 64 * GIB))?;
        Ok(Self { pool, tenant, stream, held: Vec::new(), swinging: Vec::new() })
    }

    /// Runs `row` for about `operations` operations. Returns nanoseconds per counted unit.
    fn run(&mut self, row: Row, operations: usize) -> Outcome<f64> {
        match row {
            Row::Pair(bytes) => {
                let begun = Instant::now();
                self.pairs(bytes, operations / 2)?;
                Ok(per(begun, operations / 2))
            }
            Row::Tenant(bytes) => {
                let begun = Instant::now();
                self.tenants_pairs(bytes, operations / 2)?;
                Ok(per(begun, operations / 2))
            }
            Row::Batch(bytes) => {
                self.held.reserve(BATCH);
                let batches = operations / (2 * BATCH);
                let begun = Instant::now();
                self.batches(bytes, batches)?;
                Ok(per(begun, batches * BATCH))
            }
            Row::Random(most) | Row::Planned(most) => {
                let steps = steps(STEPS, most);
                self.held.reserve(steps.len());
                let times = (operations / steps.len()).max(1);
                let begun = Instant::now();
                for _ in 0..times {
                    self.play(&steps)?;
                }
                Ok(per(begun, times * steps.len()))
            }
            Row::Swing(bytes) | Row::Below(bytes) => {
                if self.swinging.is_empty() {
                    for _ in 0..SWINGING {
                        self.swinging.push((self.pool.stream()?, Vec::with_capacity(HIGH)));
                    }
                }
                if matches!(row, Row::Below(_)) {
                    // Twice as much as all of them have together.
                    let high = bytes * (SWINGING * HIGH) as u64;
                    drop(self.pool.alloc(&self.stream, Request::bytes(high))?);
                }
                let begun = Instant::now();
                self.swings(bytes, operations)?;
                Ok(per(begun, operations))
            }
        }
    }

    /// Each stream in turn allocates or frees a block. A stream rises from nothing to `HIGH` blocks
    /// and falls, each an eighth of this time after the one before.
    #[inline(never)]
    fn swings(&mut self, bytes: u64, count: usize) -> Outcome<()> {
        let pool = &self.pool;
        for turn in 0..count / SWINGING {
            for (at, (stream, blocks)) in self.swinging.iter_mut().enumerate() {
                let phase = (turn + at * 2 * HIGH / SWINGING) % (2 * HIGH);
                if phase < HIGH {
                    blocks.push(pool.alloc(stream, Request::bytes(bytes + blocks.len() as u64))?);
                } else {
                    drop(blocks.pop());
                }
            }
        }
        self.swinging.iter_mut().for_each(|(_, blocks)| blocks.clear());
        Ok(())
    }

    #[inline(never)]
    fn pairs(&mut self, bytes: u64, count: usize) -> Outcome<()> {
        for _ in 0..count {
            drop(black_box(self.pool.alloc(&self.stream, Request::bytes(black_box(bytes)))?));
        }
        Ok(())
    }

    #[inline(never)]
    fn tenants_pairs(&mut self, bytes: u64, count: usize) -> Outcome<()> {
        for _ in 0..count {
            drop(black_box(self.tenant.alloc(&self.stream, Request::bytes(black_box(bytes)))?));
        }
        Ok(())
    }

    #[inline(never)]
    fn batches(&mut self, bytes: u64, count: usize) -> Outcome<()> {
        for _ in 0..count {
            for _ in 0..BATCH {
                self.held.push(self.pool.alloc(&self.stream, Request::bytes(black_box(bytes)))?);
            }
            self.held.drain(..).for_each(drop);
        }
        Ok(())
    }

    #[inline(never)]
    fn play(&mut self, steps: &[Step]) -> Outcome<()> {
        for step in steps {
            match *step {
                Step::Allocate(bytes) => {
                    self.held.push(self.pool.alloc(&self.stream, Request::bytes(bytes))?);
                }
                Step::Free(at) => drop(self.held.swap_remove(at)),
            }
        }
        Ok(())
    }

    /// The function whose instructions callgrind counts.
    #[inline(never)]
    fn measured(&mut self, row: Row, operations: usize) -> Outcome<f64> {
        self.run(row, operations)
    }
}

fn per(begun: Instant, count: usize) -> f64 {
    begun.elapsed().as_nanos() as f64 / count.max(1) as f64
}

/// The reference: the process's allocator with 64 bytes.
#[inline(never)]
fn malloc_pairs(count: usize) -> f64 {
    let begun = Instant::now();
    for _ in 0..count {
        drop(black_box(Vec::<u8>::with_capacity(black_box(64))));
    }
    per(begun, count)
}

fn middle(mut all: Vec<f64>) -> f64 {
    all.sort_by(f64::total_cmp);
    all.get(all.len() / 2).copied().unwrap_or(f64::NAN)
}

fn main() -> Outcome<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let Some(at) = arguments.iter().position(|argument| argument == "--count") {
        let bytes = arguments.get(at + 2).ok_or("a size in bytes is missing")?.parse()?;
        let row = match arguments.get(at + 1).map(String::as_str) {
            Some("pair") => Row::Pair(bytes),
            Some("tenant") => Row::Tenant(bytes),
            Some("batch") => Row::Batch(bytes),
            Some("random") => Row::Random(bytes),
            Some("planned") => Row::Planned(bytes),
            Some("swing") => Row::Swing(bytes),
            Some("below") => Row::Below(bytes),
            _ => {
                return Err(
                    "what to count: pair, tenant, batch, random, planned, swing or below".into()
                );
            }
        };
        let mut bench = Bench::new(row)?;
        bench.run(row, 20_000)?;
        bench.measured(row, 20_000)?;
        return Ok(());
    }
    let mut rows: Vec<Row> = Vec::new();
    rows.extend([256, 4 * KIB, 64 * KIB, MIB, 64 * MIB, GIB].map(Row::Pair));
    rows.extend([256, MIB, 64 * MIB].map(Row::Tenant));
    rows.extend([256, 64 * KIB, MIB, 64 * MIB].map(Row::Batch));
    rows.extend([MIB, 64 * MIB, 4 * GIB].map(Row::Random));
    rows.extend([MIB, 64 * MIB].map(Row::Planned));
    rows.extend([64 * KIB, MIB, 16 * MIB].map(Row::Swing));
    rows.extend([64 * KIB, MIB, 16 * MIB].map(Row::Below));
    println!("{:<40} {:>8} {:>12} {:>7}", "ns", "pool", "malloc pair", "ratio");
    for row in rows {
        let mut bench = Bench::new(row)?;
        bench.run(row, 100_000)?;
        let (mut pool, mut malloc) = (Vec::new(), Vec::new());
        for _ in 0..ROUNDS {
            pool.push(bench.run(row, 100_000)?);
            malloc.push(malloc_pairs(50_000));
        }
        let (pool, malloc) = (middle(pool), middle(malloc));
        println!("{:<40} {pool:>8.1} {malloc:>12.1} {:>7.2}", row.name(), pool / malloc);
    }
    Ok(())
}
