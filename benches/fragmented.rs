//! The cost of the device pool's slow path where free memory is in many short ranges.
//!
//! ```text
//! cargo bench -p aquifer-benches --bench fragmented
//! ```
//!
//! Blocks of 100 KiB are allocated on one stream, and every other one is freed. No free range holds
//! a block of 3 MiB then, so that it takes new memory, and a block of 200 MiB is beyond the limit.
//! The driver is the simulator without its checks. Each figure is the median of the rounds; the
//! slowest follows, which for 3 MiB takes new handles.
#![expect(clippy::print_stdout, reason = "a benchmark shows what it found")]

use aquifer::{Block, Budget, DeviceId, DevicePool, Driver, PoolConfig, Request, Stream, sim::Sim};
use std::{error::Error, sync::Arc, time::Instant};

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const ROUNDS: usize = 21;

fn main() -> Result<(), Box<dyn Error>> {
    println!("{:>8}  {:>22}  {:>22}", "ranges", "3 MiB, µs: median, most", "200 MiB refused, µs");
    for ranges in [2_000, 20_000, 200_000] {
        let sim = Sim::h200(1).symbolic();
        sim.oracle(false);
        let driver: Arc<dyn Driver> = sim.driver();
        let budget = Budget::new("a bench", 1 << 40);
        let config = PoolConfig::with_budget(budget.clone());
        let pool = DevicePool::open(driver, DeviceId(0), config)?;
        let stream = pool.stream()?;
        let live = checkered(&pool, &stream, ranges)?;
        let large = rounds(|| pool.alloc(&stream, Request::bytes(3 * MIB)).is_ok());
        budget.set_limit(budget.used() + 100 * MIB);
        let refused = rounds(|| pool.alloc(&stream, Request::bytes(200 * MIB)).is_err());
        println!(
            "{ranges:>8}  {:>15.1} {:>6.1}  {:>15.1} {:>6.1}",
            large.0, large.1, refused.0, refused.1
        );
        drop(live);
    }
    Ok(())
}

/// Returns live blocks with as many free ranges between them.
fn checkered(
    pool: &DevicePool,
    stream: &Stream,
    ranges: usize,
) -> Result<Vec<Block>, Box<dyn Error>> {
    let blocks = (0..2 * ranges).map(|_| pool.alloc(stream, Request::bytes(100 * KIB)));
    let mut blocks = blocks.collect::<Result<Vec<_>, _>>()?;
    let mut keep = false;
    blocks.retain(|_| {
        keep = !keep;
        keep
    });
    Ok(blocks)
}

/// Returns the median and the most of what `work` takes, in microseconds. It is as expected.
fn rounds(work: impl Fn() -> bool) -> (f64, f64) {
    let mut each: Vec<f64> = (0..ROUNDS)
        .map(|_| {
            let begun = Instant::now();
            assert!(work(), "the pool has decided otherwise");
            begun.elapsed().as_secs_f64() * 1e6
        })
        .collect();
    each.sort_by(f64::total_cmp);
    (each[ROUNDS / 2], each[ROUNDS - 1])
}
