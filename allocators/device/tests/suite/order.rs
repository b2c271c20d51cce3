//! Tests of the order of events of memory that several blocks share: a block's end comes before the
//! beginning of the next block at its place.
#![expect(unsafe_code, reason = "captures by hand")]
#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use crate::support::{MIB, Rig};
use aquifer_core::{Action, Event, OpaqueBlock, Recorder, Tag, event::RingSink};
use aquifer_device::{Block, Request};
use aquifer_driver::{Access, CaptureMode, sim::Sim};
use std::sync::{Arc, Mutex};

/// Calls a function when it is dropped.
struct OnDrop<F: FnMut()>(F);

impl<F: FnMut()> Drop for OnDrop<F> {
    fn drop(&mut self) {
        (self.0)();
    }
}

/// Returns a pool on a device that runs no work by itself, and its events.
fn recorded() -> (Rig, Arc<RingSink>) {
    let ring = Arc::new(RingSink::new(1 << 10));
    let rig = Rig::on(Sim::h200(1).symbolic().stepped(), 64, |config| {
        config.recorder = Some(Arc::new(Recorder::new(ring.clone())));
    });
    (rig, ring)
}

/// Asserts that every block begins where no other one is.
#[track_caller]
fn assert_ordered(events: &[Event]) {
    let mut present: Vec<(u64, u64)> = Vec::new();
    for event in events {
        let (start, end) = (event.address, event.address + event.bytes);
        match event.action {
            Action::Allocate => {
                let other = present.iter().find(|(from, to)| *from < end && start < *to);
                assert_eq!(other, None, "{events:#?}");
                present.push((start, end));
            }
            Action::Complete => present.retain(|(from, _)| *from != start),
            _ => {}
        }
    }
}

/// Frees two blocks side by side that `user` still uses. As soon as the first of them is free,
/// `next` allocates a block over both.
fn free_both(
    rig: &Rig,
    [mut a, b]: [Block; 2],
    next: impl FnMut() -> Block + Send + Sync + 'static,
) -> Arc<Mutex<Vec<Block>>> {
    assert_eq!(a.address() + a.bytes(), b.address());
    let user = rig.stream();
    let scratch = rig.alloc(&user, 4096);
    rig.sim
        .access(
            user.raw(),
            crate::support::range(&scratch),
            Access::Write,
            Some(scratch.generation()),
        )
        .unwrap();
    for block in [&a, &b] {
        block.record_use(&user, Access::Read).unwrap();
    }
    let taken = Arc::new(Mutex::new(Vec::new()));
    let (into, mut next) = (taken.clone(), next);
    a.keep_until_free(Box::new(OnDrop(move || into.lock().unwrap().push(next()))));
    drop((a, b));
    assert!(taken.lock().unwrap().is_empty(), "both are still in use");
    taken
}

#[test]
fn freed_parkable_blocks_end_before_the_next_block_begins() {
    let (rig, ring) = recorded();
    let s = rig.stream();
    let parkable = rig.pool.parkable(Tag::named("in order")).unwrap();
    let both = [0; 2].map(|_| parkable.alloc(&s, Request::bytes(MIB)).unwrap());
    let taken = {
        let (parkable, s) = (parkable.clone(), s.clone());
        free_both(&rig, both, move || parkable.alloc(&s, Request::bytes(2 * MIB)).unwrap())
    };
    rig.sim.run_all();
    rig.pool.poll().unwrap();
    assert_eq!(taken.lock().unwrap().len(), 1);
    assert_ordered(&ring.take());
    taken.lock().unwrap().clear();
    rig.assert_silent();
}

#[test]
fn freed_blocks_of_graphs_end_before_the_next_block_begins() {
    let (rig, ring) = recorded();
    let (s, t) = (rig.stream(), rig.stream());
    let graphs = rig.pool.graph_pool().unwrap();
    let driver = rig.sim.driver();
    let alloc = |bytes| rig.alloc(&s, bytes);
    let announced = graphs.announce(&s).unwrap();
    driver.capture_begin(s.raw(), CaptureMode::Relaxed).unwrap();
    let both = [0; 2].map(|_| alloc(MIB));
    let first = driver.capture_end(s.raw()).unwrap();
    drop(announced);
    let taken = {
        let (pool, t) = (rig.pool.clone(), t.clone());
        free_both(&rig, both, move || pool.alloc(&t, Request::bytes(2 * MIB)).unwrap())
    };
    let announced = graphs.announce(&t).unwrap();
    driver.capture_begin(t.raw(), CaptureMode::Relaxed).unwrap();
    rig.sim.run_all();
    // This block is larger than what is free, so the pool polls what is not.
    let more = rig.alloc(&t, 4 * MIB);
    assert_eq!(taken.lock().unwrap().len(), 1);
    let second = driver.capture_end(t.raw()).unwrap();
    drop((more, announced));
    assert_ordered(&ring.take());
    taken.lock().unwrap().clear();
    for graph in [first, second] {
        // SAFETY: 1. known only here.
        unsafe { driver.graph_destroy(graph) }.unwrap();
    }
    rig.assert_silent();
}
