//! A test of the core of a closed pool, which serves the next pool.
#![expect(clippy::unwrap_used, reason = "a support function that fails is a failed test")]
#![expect(unsafe_code, reason = "calls the allocator trait")]

use crate::{
    alone,
    support::{self, MIB},
};
use allocator_api2::alloc::Allocator;
use aquifer_core::{
    Action, Budget, Recorder,
    event::{Event, EventSink},
};
use aquifer_host::{PinnedConfig, PinnedPool};
use std::{
    alloc::Layout,
    sync::{
        Arc, Mutex,
        mpsc::{Receiver, SyncSender, sync_channel},
    },
    thread,
};

/// Holds the thread that records the first release of a region.
#[derive(Debug)]
struct HoldsFirstRelease(Mutex<Option<(SyncSender<()>, Receiver<()>)>>);

impl EventSink for HoldsFirstRelease {
    fn record(&self, event: &Event) {
        if event.action != Action::Reap {
            return;
        }
        if let Some((arrived, go_on)) = self.0.lock().unwrap().take() {
            arrived.send(()).unwrap();
            go_on.recv().unwrap();
        }
    }
}

/// A block that goes to another thread.
struct Sent(std::ptr::NonNull<u8>);

// SAFETY: 1. the block has a single owner.
unsafe impl Send for Sent {}

#[test]
fn releases_of_a_closed_pool_take_no_region_of_the_next_pool_on_its_core() {
    let _alone = alone();
    let (arrived, has_arrived) = sync_channel(1);
    let (go_on, may_go_on) = sync_channel(1);
    let sink = HoldsFirstRelease(Mutex::new(Some((arrived, may_go_on))));
    let budget = Budget::new("pinned", 64 * MIB as u64);
    let mut config = PinnedConfig::default();
    config.chunk = 4 * MIB;
    config.recorder = Some(Arc::new(Recorder::new(Arc::new(sink))));
    let first = PinnedPool::new(&support::host(), &budget, config).unwrap();
    // Each block has a region of its own.
    let layout = Layout::from_size_align(3 * MIB, 64).unwrap();
    let allocator = first.allocator();
    let [one, other] = [(); 2].map(|()| Sent(allocator.allocate(layout).unwrap().cast()));
    drop(first);

    thread::scope(|scope| {
        let releasing = scope.spawn(move || {
            let block = one;
            // SAFETY: 1. alive, with its own layout.
            unsafe { allocator.deallocate(block.0, layout) };
        });
        has_arrived.recv().unwrap();
        // SAFETY: 1. alive, with its own layout. It is the last block, so the core is recycled.
        unsafe { allocator.deallocate(other.0, layout) };
        let mut config = PinnedConfig::default();
        config.chunk = 4 * MIB;
        let next = PinnedPool::new(&support::host(), &budget, config).unwrap();
        next.warm(4 * MIB).unwrap();
        go_on.send(()).unwrap();
        releasing.join().unwrap();
        assert_eq!(next.stats().memory.physical, 4 * MIB as u64, "the memory of the next pool");
    });
    support::sweep_out(&budget);
}
