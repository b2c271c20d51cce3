//! Tests that the block freed last, which waits in front of its stream's heap, behaves like any
//! other free memory except in speed.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use crate::support::{MIB, Rig, range};
use aquifer_core::{MemoryError, Tag};
use aquifer_device::{Block, Request};
use aquifer_driver::sim::SimKernel;
use aquifer_stream::Stream;

fn writes(rig: &Rig, stream: &Stream, block: &Block) {
    rig.sim.launch(stream.raw(), SimKernel::new("fill").writes(range(block), None)).unwrap();
}

#[test]
fn the_last_freed_block_is_reused_in_place_and_counts_as_free_meanwhile() {
    let rig = Rig::new(64);
    let s = rig.stream();
    let other = rig.pool.alloc(&s, Request::bytes(MIB)).unwrap();
    for bytes in [300, 5_000, 100_000, 3 * MIB] {
        let first = rig.pool.alloc(&s, Request::bytes(bytes)).unwrap().address();
        let free = rig.pool.stats();
        assert_eq!((free.blocks, free.requested, free.live), (1, MIB, MIB), "{bytes}");
        assert_eq!((free.allocations - free.frees, free.live + free.cached), (1, free.physical));
        let again = rig.pool.alloc(&s, Request::bytes(bytes)).unwrap();
        assert_eq!(again.address(), first);
        let live = rig.pool.stats();
        assert_eq!((live.blocks, live.requested), (2, MIB + bytes));
        assert_eq!(live.live, MIB + again.capacity());
        assert_eq!((live.allocations, live.frees), (free.allocations + 1, free.frees));
    }
    drop(other);
    rig.assert_silent();
}

#[test]
fn a_request_with_another_tag_or_larger_alignment_is_counted_and_placed_separately() {
    let rig = Rig::new(64);
    let s = rig.stream();
    let (a, b) = (Tag::named("a"), Tag::named("b"));
    let holds = |tag: Tag| {
        rig.pool.alloc(&s, Request::bytes(128 * MIB)).map(drop).map_err(|error| match error {
            MemoryError::OutOfMemory(error) => {
                error.holders.iter().find(|h| h.tag == tag).map_or(0, |h| h.bytes)
            }
            _ => u64::MAX,
        })
    };
    // A block below it makes its address unaligned to a page.
    let below = rig.pool.alloc(&s, Request::bytes(MIB + 512)).unwrap();
    drop(rig.pool.alloc(&s, Request::bytes(MIB).tag(a)).unwrap());
    let held = rig.pool.alloc(&s, Request::bytes(MIB).tag(b)).unwrap();
    assert_eq!((holds(a), holds(b)), (Err(0), Err(MIB)));
    drop(held);
    let aligned = rig.pool.alloc(&s, Request::bytes(MIB).tag(b).align(1 << 16)).unwrap();
    assert_eq!(aligned.address() % (1 << 16), 0);
    drop((below, aligned));
    rig.assert_silent();
}

#[test]
fn other_streams_reuse_the_last_freed_block_in_order_with_its_stream() {
    let rig = Rig::stepped(8);
    let (s, t) = (rig.stream(), rig.stream());
    let first = rig.pool.alloc(&s, Request::bytes(8 * MIB)).unwrap();
    writes(&rig, &s, &first);
    drop(first);
    // The block is fenced and known to be done, but this proof does not cover the work that counts.
    for _ in 0..2 {
        rig.pool.trim(u64::MAX).unwrap();
        rig.sim.run_all();
    }
    let block = rig.pool.alloc(&s, Request::bytes(8 * MIB)).unwrap();
    writes(&rig, &s, &block);
    drop(block);
    let taken = rig.pool.alloc(&t, Request::bytes(8 * MIB)).unwrap();
    writes(&rig, &t, &taken);
    rig.sim.run_all();
    rig.assert_silent();
}

#[test]
fn the_last_freed_block_is_trimmed_and_its_bare_address_is_refused() {
    let rig = Rig::new(64);
    let s = rig.stream();
    let address = rig.pool.alloc(&s, Request::bytes(MIB)).unwrap().into_raw();
    rig.pool.free_raw(address).unwrap();
    assert_eq!(rig.pool.free_raw(address), Err(MemoryError::DoubleFree { address }));
    drop(rig.pool.alloc(&s, Request::bytes(MIB)).unwrap());
    s.synchronize().unwrap();
    rig.pool.trim(0).unwrap();
    assert_eq!(rig.pool.stats().physical, 0);
    assert_eq!(rig.budget.used(), 0);
    rig.assert_silent();
}
