//! One thread and one stream, whose cache can serve every request.

use super::{
    DeviceBench, lane, size,
    source::{ASYNC, Async, Malloc, Pooled, pool},
    work::WorkPlan,
};
use crate::{
    lap::{Contender, contest},
    row::Unit,
};
use aquifer_core::Result;

/// Sizes of pairs, in bytes.
const PAIRS: [u64; 6] = [256, 4 << 10, 64 << 10, 1 << 20, 64 << 20, 1 << 30];
/// Sizes of batches, in bytes.
const BATCHES: [u64; 5] = [256, 4 << 10, 64 << 10, 1 << 20, 64 << 20];
/// Blocks per batch.
const BATCH: u32 = 64;
/// Maxima of random sizes, in bytes.
const RANDOM: [u64; 3] = [1 << 20, 64 << 20, 4 << 30];

/// The reference row, and its name as a peer.
const MALLOC: (&str, &str) = ("malloc pair 64 B", "malloc 64 B");

fn pair_name(bytes: u64) -> String {
    format!("pair {}", size(bytes))
}

pub(super) fn pair_names(_: &DeviceBench<'_>) -> Vec<String> {
    std::iter::once(MALLOC.0.to_owned()).chain(PAIRS.map(pair_name)).collect()
}

/// All sizes and the reference take turns in one contest, so that their ratios are from the same
/// time.
pub(super) fn pairs(bench: &mut DeviceBench<'_>) -> Result<()> {
    let session = bench.session();
    let (pool, peer) = (pool(&session)?, bench.peer(&session)?);
    let mut contenders: Vec<Contender<'_>> = vec![lane::pairs(Malloc, 64)];
    let mut sizes = Vec::new();
    for bytes in PAIRS {
        let name = pair_name(bytes);
        if !bench.sheet.wants(&name) || !bench.has_room(&name, bytes, peer.is_some()) {
            continue;
        }
        sizes.push(name);
        contenders.push(lane::pairs(Pooled::on(&pool)?, bytes));
        if let Some(peer) = &peer {
            contenders.push(lane::pairs(Async::on(peer)?, bytes));
        }
    }
    let mut outcomes = contest(bench.pace, contenders).into_iter();
    let malloc = outcomes.next().unwrap_or_default();
    bench.sheet.note(MALLOC.0, malloc.failed);
    bench.sheet.add(MALLOC.0, Unit::NsPerPair, malloc.each, None);
    for name in sizes {
        let Some(own) = outcomes.next() else { break };
        bench.sheet.note(&name, own.failed);
        let other = match &peer {
            None => Some((MALLOC.1, malloc.each)),
            Some(_) => outcomes.next().map(|other| {
                bench.sheet.note(&format!("{name} (peer)"), other.failed);
                (ASYNC, other.each)
            }),
        };
        bench.sheet.add(&name, Unit::NsPerPair, own.each, other);
    }
    Ok(())
}

fn batch_name(bytes: u64) -> String {
    format!("batch of {BATCH}, {}", size(bytes))
}

pub(super) fn batch_names(_: &DeviceBench<'_>) -> Vec<String> {
    BATCHES.map(batch_name).to_vec()
}

pub(super) fn batches(bench: &mut DeviceBench<'_>) -> Result<()> {
    for bytes in BATCHES {
        play(bench, &batch_name(bytes), &WorkPlan::batch(BATCH, bytes))?;
    }
    Ok(())
}

fn random_name(bytes: u64) -> String {
    format!("random up to {}", size(bytes))
}

pub(super) fn random_names(_: &DeviceBench<'_>) -> Vec<String> {
    RANDOM.map(random_name).to_vec()
}

pub(super) fn random(bench: &mut DeviceBench<'_>) -> Result<()> {
    for bytes in RANDOM {
        play(bench, &random_name(bytes), &WorkPlan::random(bytes, 0, 1))?;
    }
    Ok(())
}

/// Adds a row of `work` by a new pool and a new peer.
fn play(bench: &mut DeviceBench<'_>, name: &str, work: &WorkPlan) -> Result<()> {
    if !bench.sheet.wants(name) {
        return Ok(());
    }
    let session = bench.session();
    let (pool, peer) = (pool(&session)?, bench.peer(&session)?);
    if !bench.has_room(name, work.peak / 4 * 5, peer.is_some()) {
        return Ok(());
    }
    let other = peer.as_ref().map(Async::on).transpose()?.map(|other| lane::plays(other, work));
    let (own, other) =
        bench.sheet.compete(bench.pace, name, lane::plays(Pooled::on(&pool)?, work), other);
    bench.sheet.add(name, Unit::NsPerOperation, own.each, other.map(|other| (ASYNC, other.each)));
    Ok(())
}
