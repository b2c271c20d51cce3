//! Operations of the pool that call the driver: the first allocation, growing, trimming, and moving
//! handles.

use super::{
    DeviceBench,
    source::{ASYNC, Async, AsyncPool, Pooled, Source, pool},
};
use crate::console::place::Session;
use crate::{lap::repeat, row::Unit};
use aquifer_core::{Budget, MemoryError, Result};
use aquifer_device::{Block, DevicePool, PoolConfig, Request};
use std::time::{Duration, Instant};

const OPEN: &str = "open a pool";
const FIRST: &str = "first allocation, 1 MiB";
const GROW: &str = "grow by 1 GiB";
const TRIM: &str = "trim 1 GiB";
const MOVE: &str = "move a handle";

const GIB: u64 = 1 << 30;

pub(super) fn names(_: &DeviceBench<'_>) -> Vec<String> {
    [OPEN, FIRST, GROW, TRIM, MOVE].map(str::to_owned).to_vec()
}

pub(super) fn measure(bench: &mut DeviceBench<'_>) -> Result<()> {
    if bench.sheet.wants(OPEN) || bench.sheet.wants(FIRST) {
        start(bench)?;
    }
    if (bench.sheet.wants(GROW) || bench.sheet.wants(TRIM))
        && ![GROW, TRIM].map(|row| bench.has_room(row, GIB, false)).contains(&false)
    {
        grow_and_trim(bench)?;
    }
    if !bench.sheet.wants(MOVE) {
        return Ok(());
    }
    if !bench.place.info().virtual_memory {
        bench.sheet.leave_out(MOVE, "the device has no virtual memory management".to_owned());
    } else if bench.has_room(MOVE, moving::BUDGET, false) {
        let session = bench.session();
        let (bytes, pace) = (bench.place.granularity(), bench.pace);
        let [ns] = repeat(pace, || moving::once(&session, bytes).map(|ns| [ns]))?;
        bench.sheet.add(MOVE, Unit::UsPerHandle, ns, None);
    }
    Ok(())
}

fn nanoseconds(took: Duration) -> f64 {
    took.as_nanos() as f64
}

/// Measures opening a pool, and its first allocation.
fn start(bench: &mut DeviceBench<'_>) -> Result<()> {
    let session = bench.session();
    let has_peer = bench.peer(&session)?.is_some();
    let own = repeat(bench.pace, || {
        let begun = Instant::now();
        let pool = pool(&session)?;
        let open = begun.elapsed();
        first(open, &Pooled::on(&pool)?)
    })?;
    let other = if has_peer {
        Some(repeat(bench.pace, || {
            let begun = Instant::now();
            let pool = AsyncPool::open(&session)?;
            let open = begun.elapsed();
            first(open, &Async::on(&pool)?)
        })?)
    } else {
        None
    };
    for (place, name) in [OPEN, FIRST].into_iter().enumerate() {
        bench.sheet.add(name, Unit::Us, own[place], other.map(|other| (ASYNC, other[place])));
    }
    Ok(())
}

fn first<S: Source<Refused = MemoryError>>(open: Duration, source: &S) -> Result<[f64; 2]> {
    let begun = Instant::now();
    let held = source.take(1 << 20)?;
    let took = begun.elapsed();
    source.give(held)?;
    source.rest()?;
    Ok([nanoseconds(open), nanoseconds(took)])
}

/// Measures one block of a GiB, from an empty pool to an empty pool.
fn grow_and_trim(bench: &mut DeviceBench<'_>) -> Result<()> {
    let session = bench.session();
    let own = {
        let pool = pool(&session)?;
        let source = Pooled::on(&pool)?;
        let trim = || match pool.trim(0)? {
            given if given < GIB => {
                Err(unmoved("trim", format!("{given} bytes given back of {GIB}")))
            }
            _ => Ok(()),
        };
        repeat(bench.pace, || there_and_back(&source, trim))?
    };
    let other = match bench.peer(&session)? {
        Some(peer) => {
            let source = Async::on(&peer)?;
            Some(repeat(bench.pace, || there_and_back(&source, || peer.trim()))?)
        }
        None => None,
    };
    for (place, name) in [GROW, TRIM].into_iter().enumerate() {
        bench.sheet.add(name, Unit::MsPerGib, own[place], other.map(|other| (ASYNC, other[place])));
    }
    Ok(())
}

fn there_and_back<S: Source<Refused = MemoryError>>(
    source: &S,
    trim: impl Fn() -> Result<()>,
) -> Result<[f64; 2]> {
    let begun = Instant::now();
    let held = source.take(GIB)?;
    let grown = begun.elapsed();
    source.give(held)?;
    // Memory with pending work cannot be released.
    source.rest()?;
    let begun = Instant::now();
    trim()?;
    Ok([nanoseconds(grown), nanoseconds(begun.elapsed())])
}

/// The error if the operation to be timed did not happen.
fn unmoved(name: &'static str, value: String) -> MemoryError {
    MemoryError::BadSetting { name, value, expected: "a pool that does what is timed" }
}

/// Moves of handles, forced by an exhausted budget with every second handle free.
///
/// ```text
///   █ live  · free, one handle each        █·█·█·█·█·█·█·   no two neighbours are free
///   a block of two handles                 █ █ █ █·█·█·█·   ▐██▌ ← two handles, moved
/// ```
mod moving {
    use super::*;

    /// The budget of the pool, in bytes.
    pub(super) const BUDGET: u64 = 256 << 20;

    /// Returns nanoseconds per moved handle, including all other work of the allocation.
    pub(super) fn once(session: &Session, handle: u64) -> Result<f64> {
        let mut config = PoolConfig::with_budget(Budget::new("the bench's moves", BUDGET));
        // One handle per block, so that every free block frees a handle.
        config.handle_bytes = handle;
        let pool = DevicePool::open(session.driver.clone(), session.device, config)?;
        let stream = pool.stream()?;
        let take = |bytes| pool.alloc(&stream, Request::bytes(bytes));
        let mut blocks = (0..BUDGET / handle).map(|_| take(handle)).collect::<Result<Vec<_>>>()?;
        blocks.sort_by_key(Block::address);
        let mut place = 0;
        blocks.retain(|_| {
            place += 1;
            place % 2 == 0
        });
        let before = pool.stats().moves;
        let begun = Instant::now();
        // Half of the free handles. The search for the last ones takes longest.
        let moved =
            (0..BUDGET / handle / 8).map(|_| take(2 * handle)).collect::<Result<Vec<_>>>()?;
        let took = begun.elapsed();
        let moves = pool.stats().moves - before;
        drop((moved, blocks));
        stream.synchronize()?;
        if moves == 0 {
            return Err(unmoved("move", "no handle moved".to_owned()));
        }
        Ok(nanoseconds(took) / moves as f64)
    }
}
