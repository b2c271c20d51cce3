//! Tests that polling gates and reporting reclaimable memory allocate nothing from the host's heap
//! in the steady state.
#![expect(unsafe_code, reason = "frees by hand")]

use crate::{
    counting::asked,
    support::{Latch, MIB, host},
};
use allocator_api2::alloc::Allocator;
use aquifer_core::{Budget, DeferReuse};
use aquifer_host::{PinnedConfig, PinnedPool, region::Pinning};
use std::{
    alloc::Layout,
    sync::atomic::Ordering,
    time::{Duration, Instant},
};

#[test]
fn a_steady_state_poll_of_gates_allocates_nothing_on_the_heap() {
    let budget = Budget::new("test", 8 * MIB as u64);
    let mut config = PinnedConfig::default();
    (config.pinning, config.chunk, config.patience) = (Pinning::Off, 8 * MIB, Duration::ZERO);
    // Without magazines each allocation polls gates.
    config.magazines = false;
    let pool = PinnedPool::new(&host(), &budget, config).unwrap();
    let allocator = pool.allocator();
    let layout = Layout::from_size_align(64 << 10, 64).unwrap();
    let pair = |layout| {
        let block = allocator.allocate(layout).unwrap().cast();
        // SAFETY: 1. allocated just now with this layout.
        unsafe { allocator.deallocate(block, layout) };
    };
    let gate = Latch::shut();
    for _ in 0..50 {
        let block = allocator.allocate(layout).unwrap().cast();
        allocator.defer(block, gate.clone()).unwrap();
        // SAFETY: 1. allocated just now with this layout.
        unsafe { allocator.deallocate(block, layout) };
    }
    assert_eq!(pool.stats().memory.pending, 50 * layout.size() as u64);
    let before = gate.asked.load(Ordering::Relaxed);
    let few = asked(|| pair(layout));
    assert!(gate.asked.load(Ordering::Relaxed) >= before + 100, "a few gates at each turn");
    let all = asked(|| assert_eq!(pool.trim(0).unwrap(), 0));
    let offered = asked(|| assert_eq!(budget.reclaim(1, Some(Instant::now()), None).missing, 1));
    assert_eq!((few, all, offered), (0, 0, 0));
    gate.open();
}
