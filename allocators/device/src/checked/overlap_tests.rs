//! Tests of a resource that allocates the same memory twice.

use super::{BlockSource, CheckedPool, Debugging, Fault, POISON_ALLOCATED};
use crate::{
    Block, DevicePool, PoolConfig, Request,
    base::usage::LiveUsage,
    base::{extent::PackedRequest, pending::DeferredFree},
    block::{DriverBlock, ReleaseBlock},
};
use aquifer_core::{DeviceId, MemoryError, PoolStats, Reservation, Result};
use aquifer_driver::{DeviceRange, sim::Sim};
use aquifer_stream::Stream;
use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

/// Allocates a valid block first, and then blocks that begin in the middle of it.
#[derive(Debug)]
struct OverlappingSource {
    pool: DevicePool,
    first: Mutex<Option<u64>>,
    releases: Arc<CountedReleases>,
}

/// Counts the releases of the invalid blocks.
#[derive(Default, Debug)]
struct CountedReleases(AtomicUsize);

impl ReleaseBlock for CountedReleases {
    fn release(&self, _block: DeferredFree) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

impl BlockSource for OverlappingSource {
    fn allocate(
        &self,
        stream: &Stream,
        request: Request,
        _drawn: Option<&Mutex<Reservation>>,
        _bytes: u64,
    ) -> Result<Block> {
        let mut first = self.first.lock().unwrap();
        let Some(address) = *first else {
            let block = self.pool.alloc(stream, request)?;
            *first = Some(block.address());
            return Ok(block);
        };
        let (timeline, streams) = (stream.timeline().clone(), self.pool.streams().clone());
        let driver_block = DriverBlock {
            releaser: self.releases.clone(),
            timeline,
            streams,
            bytes: request.size(),
            key: 0,
        };
        Ok(Block::from_driver_block(
            address + 512,
            PackedRequest::new(request.size(), request.owner()),
            driver_block,
            0,
        ))
    }
    fn stats(&self) -> PoolStats {
        self.pool.stats()
    }
    fn unchecked_stats(&self) -> PoolStats {
        PoolStats::default()
    }
    fn trim(&self, keep: u64) -> Result<u64> {
        self.pool.trim(keep)
    }
}

#[test]
fn overlapping_block_is_refused_untouched_and_leaked() {
    let sim = Sim::h200(1);
    let pool = DevicePool::open(sim.driver(), DeviceId(0), PoolConfig::default()).unwrap();
    let releases = Arc::new(CountedReleases::default());
    let overlapping = Arc::new(OverlappingSource {
        pool: pool.clone(),
        first: Default::default(),
        releases: releases.clone(),
    });
    let (streams, s) = (pool.streams().clone(), pool.stream().unwrap());
    let settings = Debugging { overlap: true, poison: true, ..Debugging::default() };
    let checked = CheckedPool::new(
        overlapping,
        settings,
        sim.driver(),
        streams,
        None,
        LiveUsage::default(),
        (true, Duration::from_secs(1)),
    )
    .unwrap();
    let first = checked.allocate(&s, Request::bytes(4096), None).unwrap();
    s.synchronize().unwrap();
    let whole = DeviceRange { device: DeviceId(0), address: first.address(), bytes: 4096 };
    assert_eq!(sim.read_back(whole).unwrap(), [POISON_ALLOCATED; 4096]);
    let fills = sim.driver().calls().get(aquifer_driver::Call::Fill);

    let refused = checked.allocate(&s, Request::bytes(64), None).unwrap_err();
    assert_eq!(
        refused,
        MemoryError::BlockOverlap { address: first.address() + 512, held: first.address() }
    );
    let findings = checked.findings();
    assert_eq!(findings.len(), 1);
    let Fault::Overlap { held } = &findings[0].fault else { panic!("{:?}", findings[0]) };
    assert_eq!((held.address, held.number, findings[0].block.number), (first.address(), 1, 2));
    let text = findings[0].to_string();
    assert_eq!(text.matches(file!()).count(), 2, "both lines are told: {text}");
    assert_eq!(
        releases.0.load(Ordering::Relaxed),
        0,
        "it has gone home, where somebody else could have it"
    );
    assert_eq!(sim.driver().calls().get(aquifer_driver::Call::Fill), fills);

    // Once the first block has been freed, its range is free.
    drop(first);
    drop(checked.allocate(&s, Request::bytes(64), None).unwrap());
    assert_eq!(releases.0.load(Ordering::Relaxed), 1);
    // The driver's observer detects the double allocation too.
    assert!(!sim.take_violations().is_empty());
}
