//! Tests of a resource that allocates the same memory twice.

use super::{Checked, Debugging, Fault, POISON_ALLOCATED, Under};
use crate::{
    Block, DevicePool, PoolConfig, Request,
    backend::{Backed, Deferred, Release},
    block::Asked,
};
use aquifer_core::{DeviceId, MemoryError, Opaque, PoolStats, Result};
use aquifer_driver::{DeviceRange, sim::Sim};
use aquifer_stream::Stream;
use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

/// Allocates a valid block first, and then blocks that begin in the middle of it.
#[derive(Debug)]
struct Twice {
    pool: DevicePool,
    first: std::sync::Mutex<Option<u64>>,
    home: Arc<Freed>,
}

/// Counts the releases of the invalid blocks.
#[derive(Default, Debug)]
struct Freed(AtomicUsize);

impl Release for Freed {
    fn release(&self, _block: Deferred) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

impl Opaque for Twice {
    type Stream = Stream;
    type Block = Block;

    fn device(&self) -> DeviceId {
        self.pool.device()
    }
    fn allocate(&self, stream: &Stream, request: Request) -> Result<Block> {
        let mut first = self.first.lock().unwrap();
        let Some(address) = *first else {
            let block = self.pool.alloc(stream, request)?;
            *first = Some(block.address());
            return Ok(block);
        };
        let (timeline, streams) = (stream.timeline().clone(), self.pool.streams().clone());
        let backed = Backed { ledger: self.home.clone(), timeline, streams, bytes: request.size() };
        Ok(Block::backed(address + 512, Asked::new(request.size(), request.owner()), backed, 0))
    }
    fn stats(&self) -> PoolStats {
        self.pool.stats()
    }
    fn trim(&self, keep: u64) -> Result<u64> {
        self.pool.trim(keep)
    }
}

#[test]
fn a_block_over_another_is_refused_before_a_byte_of_the_other_is_touched_and_kept_from_use() {
    let sim = Sim::h200(1);
    let pool = DevicePool::open(sim.driver(), DeviceId(0), PoolConfig::default()).unwrap();
    let home = Arc::new(Freed::default());
    let twice =
        Arc::new(Twice { pool: pool.clone(), first: Default::default(), home: home.clone() });
    let (streams, s) = (pool.streams().clone(), pool.stream().unwrap());
    let settings = Debugging { overlap: true, poison: true, ..Debugging::default() };
    let under = Under::Direct(twice);
    let checked =
        Checked::new(under, settings, sim.driver(), streams, None, true, Duration::from_secs(1))
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
        home.0.load(Ordering::Relaxed),
        0,
        "it has gone home, where somebody else could have it"
    );
    assert_eq!(sim.driver().calls().get(aquifer_driver::Call::Fill), fills);

    // Once the first block has been freed, its range is free.
    drop(first);
    drop(checked.allocate(&s, Request::bytes(64), None).unwrap());
    assert_eq!(home.0.load(Ordering::Relaxed), 1);
    // The driver's observer detects the double allocation too.
    assert!(!sim.take_violations().is_empty());
}
