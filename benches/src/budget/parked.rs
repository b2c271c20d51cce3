//! The time to lend a device's memory: parking a tag and resuming it, compared with the link that
//! its contents cross.
//!
//! It runs on the first GPU with 8 GiB in the block sizes of a model, saved in pinned memory that
//! is ready. The link rows copy as many bytes between one block and one piece of that memory.

use super::BudgetBench;
use crate::console::place::{DeviceChoice, Place, Session};
use crate::{host, lap::repeat, row::Unit};
use aquifer_core::{Budget, MemoryError, Result, Tag};
use aquifer_device::{DeviceBuffer, DevicePool, Park, Parkable, PoolConfig};
use aquifer_host::{
    PinnedBuf, PinnedConfig, PinnedPool, kernel::Kernel, region::Host, topology::Topology,
};
use aquifer_stream::Stream;
use std::time::Instant;

const GIB: u64 = 1 << 30;
/// Bytes that are parked.
const BYTES: u64 = 8 * GIB;
/// Block sizes of a layer: norms, matrices and its part of the cache.
const LAYER: [usize; 5] = [16 << 10, 16 << 10, 50 << 20, 30 << 20, (48 << 20) - (32 << 10)];
/// Bytes per copy in the link rows.
const PIECE: usize = 1 << 30;
const ROWS: [&str; 2] = ["park 8 GiB", "resume 8 GiB"];
const LINK: [&str; 2] = ["link, from the device", "link, to the device"];

pub(super) fn names(_: &BudgetBench) -> Vec<String> {
    ROWS.map(str::to_owned).to_vec()
}

pub(super) fn measure(bench: &mut BudgetBench) -> Result<()> {
    if !ROWS.iter().any(|row| bench.sheet.wants(row)) {
        return Ok(());
    }
    let leave_out = |bench: &mut BudgetBench, why: &str| {
        ROWS.iter().for_each(|row| bench.sheet.leave_out(row, why.to_owned()));
    };
    let Ok(place @ Place::Cuda { .. }) = Place::choose(DeviceChoice::Auto) else {
        leave_out(bench, "a simulated link has no speed");
        return Ok(());
    };
    if !place.info().virtual_memory {
        leave_out(bench, "the device has no virtual memory management");
        return Ok(());
    }
    let Session { driver, device, .. } = place.begin();
    let free = driver.memory_info(device).map_err(|e| MemoryError::driver(device, e))?.free / 5 * 4;
    let host_room = host::available().unwrap_or(0) / 2;
    for (room, needed) in [(free, BYTES + 2 * GIB), (host_room, BYTES + 2 * GIB)] {
        if ROWS.iter().any(|row| !bench.sheet.has_room(row, needed, room)) {
            return Ok(());
        }
    }
    let node = Host::new(Topology::read()?, Kernel::new()).with_driver(driver.clone(), device);
    let pinned = PinnedPool::new(&node, &Budget::unlimited("bench"), PinnedConfig::default())?;
    pinned.warm((BYTES + GIB) as usize)?;
    let pool =
        DevicePool::open(driver, device, PoolConfig::with_budget(Budget::new("the device", free)))?;
    let stream = pool.stream()?;
    let link = repeat(bench.pace, || linked(&pool, &stream, &pinned))?;
    let parkable = pool.parkable(Tag::named("bench"))?;
    let mut blocks = Vec::new();
    while parkable.stats().live < BYTES {
        for bytes in LAYER {
            blocks.push(filled(&parkable, &stream, bytes)?);
        }
    }
    let took = repeat(bench.pace, || there_and_back(&pool, &parkable, &pinned))?;
    for (at, name) in ROWS.iter().enumerate() {
        bench.sheet.add(name, Unit::GbPerSecond, took[at], Some((LINK[at], link[at])));
    }
    Ok(())
}

fn filled(parkable: &Parkable, stream: &Stream, bytes: usize) -> Result<DeviceBuffer<u8>> {
    let mut block = parkable.buffer(stream, bytes)?;
    stream.fill(&mut block, 1)?;
    Ok(block)
}

/// Returns the nanoseconds per 10⁹ bytes from the device, and to the device.
fn linked(pool: &DevicePool, stream: &Stream, pinned: &PinnedPool) -> Result<[f64; 2]> {
    let mut block: DeviceBuffer<u8> = pool.buffer(stream, PIECE)?;
    let mut piece = PinnedBuf::<u8>::new_in(pinned, PIECE)?;
    stream.synchronize()?;
    let begun = Instant::now();
    stream.scope(|c| c.download(&block, &mut piece))??;
    let back = begun.elapsed();
    let begun = Instant::now();
    stream.scope(|c| c.upload(&piece, &mut block))??;
    Ok([back, begun.elapsed()].map(|took| took.as_nanos() as f64 * 1e9 / PIECE as f64))
}

/// Returns the same for parking and resuming everything.
#[expect(unsafe_code, reason = "parks what nobody is about to use")]
fn there_and_back(pool: &DevicePool, parkable: &Parkable, pinned: &PinnedPool) -> Result<[f64; 2]> {
    let begun = Instant::now();
    // SAFETY: 1. and 2. all work was queued by this thread, which queues nothing more before the
    // resume.
    let parked = unsafe { pool.park(parkable.tag(), Park::save_in(pinned.allocator())) }?;
    let there = begun.elapsed();
    let begun = Instant::now();
    let resumed = pool.resume(parkable.tag(), None)?;
    Ok([(there, parked.parked), (begun.elapsed(), resumed.restored)]
        .map(|(took, bytes)| took.as_nanos() as f64 * 1e9 / bytes as f64))
}
