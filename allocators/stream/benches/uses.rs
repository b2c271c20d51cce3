//! What noting a use costs, without the driver's calls: `cargo bench -p aquifer-stream --bench
//! uses`.
//!
//! The block's own stream has been retired, so that there is nothing to wait for.
#![expect(clippy::print_stdout, reason = "prints its figures")]
#![expect(unsafe_code, reason = "adopts a stream")]

use aquifer_core::{DeviceId, Result};
use aquifer_driver::{Access, sim::Sim};
use aquifer_stream::{Stream, StreamLifetime, StreamPool, UseList};
use std::{hint::black_box, time::Instant};

const ROUNDS: u32 = 2_000_000;

/// The best of five, in nanoseconds a round.
fn time(name: &str, mut round: impl FnMut() -> Result<()>) -> Result<()> {
    let mut best = f64::MAX;
    for _ in 0..5 {
        let start = Instant::now();
        for _ in 0..ROUNDS / 5 {
            round()?;
        }
        best = best.min(start.elapsed().as_secs_f64() * 1e9 / f64::from(ROUNDS / 5));
    }
    println!("{name:<52} {best:>8.1} ns");
    Ok(())
}

fn main() -> Result<()> {
    let sim = Sim::h200(1).symbolic();
    let pool = StreamPool::new(sim.driver(), DeviceId(0), 8);
    let raw =
        sim.driver().stream_create(DeviceId(0), 0).map_err(aquifer_core::MemoryError::Driver)?;
    // SAFETY: 1. a stream of this driver. 2. retired at once, and never destroyed.
    let home = unsafe { pool.adopt(raw, StreamLifetime::Retired) }?;
    home.clone().retire()?;
    let (u, v): (Stream, Stream) = (pool.lease()?, pool.lease()?);
    let (home, u, v) = (home.timeline(), u.timeline(), v.timeline());

    let (mut uses, mut round) = (UseList::new(), 0);
    time("prepare + finish, a block used up to 64 times before", || {
        round += 1;
        if round % 64 == 0 {
            drop(black_box(uses.take()));
        }
        uses.prepare(1, home, u, Access::Read)?.finish()
    })?;
    let uses = UseList::new();
    time("prepare + finish, on the block's own stream", || {
        uses.prepare(1, home, home, Access::Write)?.finish()
    })?;
    let uses = UseList::new();
    time("record_use, a block used before", || uses.record(home, u, Access::Read))?;
    time("record_use, a new block, then its free", || {
        let mut uses = UseList::new();
        uses.record(home, u, Access::Read)?;
        drop(black_box(uses.take()));
        Ok(())
    })?;
    time("record_use by two streams, a new block, its free", || {
        let mut uses = UseList::new();
        uses.record(home, u, Access::Read)?;
        uses.record(home, v, Access::Read)?;
        drop(black_box(uses.take()));
        Ok(())
    })?;
    time("prepare + finish, a new block, then its free", || {
        let mut uses = UseList::new();
        uses.prepare(1, home, u, Access::Read)?.finish()?;
        drop(black_box(uses.take()));
        Ok(())
    })
}
