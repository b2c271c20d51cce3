//! Tests of sources of device memory that users write: the guarantees of the pool around them, and
//! that the check finds incorrect ones.
#![expect(clippy::unwrap_used, reason = "helpers of tests")]
#![expect(unsafe_code, reason = "sources of memory, honest ones and others")]

use crate::support::assert_silent;
use aquifer::{
    Block, Budget, Dependencies, DeviceBuffer, DeviceId, DevicePages, DeviceRange, MemoryError,
    Opaque, PoolStats, RangeSource, Request, Resource, SourcePool, Stream, StreamPool,
    device::{BrokenPromise, conformance},
    error::Result,
    sim::Sim,
};
use std::sync::{
    Arc, Mutex,
    atomic::{AtomicU64, Ordering},
};

const GPU: DeviceId = DeviceId(0);
const SLOT: u64 = 64 << 10;

/// Slots of one allocation. The rig may let them overlap, which breaks the contract of a source.
#[derive(Debug)]
struct Slab {
    free: Arc<Mutex<Vec<u64>>>,
    waits: bool,
}

// SAFETY: 1. slots of one allocation, if configured to be correct. 2. it is never freed. 3. and 4.
// a slot is on the list when its work is done.
unsafe impl RangeSource for Slab {
    fn device(&self) -> DeviceId {
        GPU
    }
    fn alignment(&self) -> u64 {
        4096
    }
    fn allocate(&self, _stream: &Stream, _bytes: u64) -> Result<u64> {
        self.free.lock().unwrap().pop().ok_or(MemoryError::Capacity { max: 0 })
    }
    fn deallocate(&self, range: DeviceRange, after: &Dependencies<'_>) -> Result<()> {
        if self.waits {
            after.wait()?;
        } else if !after.is_done()? {
            return Err(MemoryError::Busy { address: range.address });
        }
        self.free.lock().unwrap().push(range.address);
        Ok(())
    }
}

struct Rig {
    sim: Sim,
    pool: SourcePool<Slab>,
    free: Arc<Mutex<Vec<u64>>>,
    s: Stream,
    u: Stream,
}

fn rig(sim: Sim, slots: u64, stride: u64, waits: bool, budget: Option<Budget>) -> Rig {
    let streams = StreamPool::new(sim.driver(), GPU, 4);
    let start = sim.driver().mem_alloc(GPU, slots * SLOT).unwrap();
    let free =
        Arc::new(Mutex::new((0..slots).map(|slot| start + slot * stride).collect::<Vec<_>>()));
    let pool =
        SourcePool::new(Slab { free: free.clone(), waits }, streams.clone(), budget).unwrap();
    let (s, u) = (streams.lease().unwrap(), streams.lease().unwrap());
    Rig { sim, pool, free, s, u }
}

#[test]
fn an_honest_source_conforms_whether_it_waits_or_has_ranges_offered_again() {
    for waits in [false, true] {
        let rig = rig(Sim::h200(1).seeded(7), 64, SLOT, waits, None);
        conformance(&rig.pool, &[rig.s.clone(), rig.u.clone()], 300, 7).unwrap();
        rig.pool.trim(0).unwrap();
        assert_eq!((rig.free.lock().unwrap().len(), rig.pool.stats().pending), (64, 0));
        assert_silent(&rig.sim);
    }
}

#[test]
fn a_range_comes_back_when_the_last_stream_that_used_it_is_done_and_is_charged_until_then() {
    let budget = Budget::new("the slab", SLOT);
    let rig = rig(Sim::h200(1).stepped(), 1, SLOT, false, Some(budget.clone()));
    let mut x: DeviceBuffer<u8> = DeviceBuffer::new_in(&rig.pool, &rig.s, SLOT as usize).unwrap();
    rig.u.fill(&mut x, 1).unwrap();
    assert!(matches!(
        rig.pool.allocate(&rig.s, Request::bytes(1)),
        Err(MemoryError::OutOfMemory(_))
    ));
    rig.s.synchronize().unwrap();
    drop(x);
    assert_eq!(
        (budget.used(), rig.pool.stats().pending, rig.free.lock().unwrap().len()),
        (SLOT, SLOT, 0)
    );
    rig.u.synchronize().unwrap();
    rig.pool.trim(0).unwrap();
    assert_eq!(
        (budget.used(), rig.pool.stats().pending, rig.free.lock().unwrap().len()),
        (0, 0, 1)
    );
    assert_silent(&rig.sim);
}

#[test]
fn a_source_lives_until_its_last_block_is_returned() {
    let rig = rig(Sim::h200(1), 1, SLOT, true, None);
    let block = rig.pool.allocate(&rig.s, Request::bytes(100)).unwrap();
    let Rig { pool, free, .. } = rig;
    drop(pool);
    assert_eq!(Arc::strong_count(&free), 2, "the source is there");
    drop(block);
    assert_eq!((Arc::strong_count(&free), free.lock().unwrap().len()), (1, 1));
}

#[test]
fn requests_that_the_source_cannot_serve_are_refused_before_it_is_asked() {
    let rig = rig(Sim::h200(2), 1, SLOT, true, None);
    let ask = |request| rig.pool.allocate(&rig.s, request).map(drop);
    assert_eq!(ask(Request::bytes(0)), Ok(()), "an empty block is not asked of the source");
    assert_eq!(ask(Request::bytes(1).align(8192)), Err(MemoryError::BadAlignment { align: 8192 }));
    let far = StreamPool::new(rig.sim.driver(), DeviceId(1), 1);
    let wrong = MemoryError::WrongDevice { expected: GPU, actual: DeviceId(1) };
    assert_eq!(
        rig.pool.allocate(&far.lease().unwrap(), Request::bytes(1)).map(drop),
        Err(wrong.clone())
    );
    let slab = Slab { free: rig.free.clone(), waits: true };
    assert_eq!(SourcePool::new(slab, far, None).map(drop), Err(wrong));
    ask(Request::bytes(1).align(4096)).unwrap();
}

#[test]
fn ranges_that_overlap_are_found() {
    let rig = rig(Sim::h200(1), 64, 4096, true, None);
    let broken = conformance(&rig.pool, std::slice::from_ref(&rig.s), 300, 7).unwrap_err();
    assert!(matches!(broken, BrokenPromise::Overlap { .. }), "{broken}");
}

/// A wrapper in safe code that breaks its contract.
#[derive(Debug)]
struct Short<M>(M, AtomicU64);

impl<M: Resource> Opaque for Short<M> {
    type Stream = Stream;
    type Block = Block;
    fn device(&self) -> DeviceId {
        self.0.device()
    }
    fn allocate(&self, stream: &Stream, request: Request) -> Result<Block> {
        self.1.fetch_add(1, Ordering::Relaxed);
        let short = Request::bytes(request.size().div_ceil(2)).align(request.alignment());
        self.0.allocate(stream, if request.size() == 0 { request } else { short })
    }
    fn stats(&self) -> PoolStats {
        self.0.stats()
    }
    fn trim(&self, keep: u64) -> Result<u64> {
        self.0.trim(keep)
    }
}

#[test]
fn an_incorrect_wrapper_is_found_and_causes_no_damage() {
    let rig = rig(Sim::h200(1), 4, SLOT, true, None);
    let short = Short(rig.pool.clone(), AtomicU64::new(0));
    let broken = conformance(&short, std::slice::from_ref(&rig.s), 10, 7).unwrap_err();
    assert!(matches!(broken, BrokenPromise::Unfit { .. }), "{broken}");
    // Every user of its blocks checks their length.
    assert!(matches!(
        DeviceBuffer::<u8>::new_in(&short, &rig.s, 1000).map(drop),
        Err(MemoryError::OutOfBounds { .. })
    ));
    assert!(matches!(
        DevicePages::new(&short, &rig.s, 4, 4096).map(drop),
        Err(MemoryError::OutOfBounds { .. })
    ));
    assert!(short.1.load(Ordering::Relaxed) >= 3);
}
