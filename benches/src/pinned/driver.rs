//! The cost of an allocation by the driver and its free, compared with a pair of the pool.

use super::{
    PinnedBench, size,
    source::{Direct, Pinned},
};
use crate::{device::lane::pairs, row::Unit};
use aquifer_core::Result;

/// Sizes in bytes. Larger ones take seconds per lap.
const SIZES: [u64; 3] = [4 << 10, 1 << 20, 64 << 20];

fn name(bytes: u64) -> String {
    format!("cuMemHostAlloc, cuMemFreeHost {}", size(bytes))
}

pub(super) fn names(bench: &PinnedBench<'_>) -> Vec<String> {
    if bench.has_gpu() { SIZES.map(name).to_vec() } else { Vec::new() }
}

pub(super) fn measure(bench: &mut PinnedBench<'_>) -> Result<()> {
    for bytes in SIZES {
        let name = name(bytes);
        if !bench.sheet.wants(&name) || !bench.has_room(&name, 4 * bytes) {
            continue;
        }
        let pool = bench.pool(2 * bytes)?;
        let direct = Direct { driver: bench.driver.clone(), device: bench.device };
        let (direct, own) = bench.sheet.compete(
            bench.pace,
            &name,
            pairs(direct, bytes),
            Some(pairs(Pinned::on(&pool), bytes)),
        );
        let own = own.unwrap_or_default();
        bench.sheet.add(&name, Unit::NsPerPair, direct.each, Some(("the pool", own.each)));
    }
    Ok(())
}
