//! Tests that the block freed last, which waits in front of its stream's heap, behaves like any
//! other free memory except in speed.

use crate::support::{MIB, Rig};
use aquifer_core::{MemoryError, Tag};
use aquifer_device::Request;

#[test]
fn the_last_freed_block_is_reused_in_place_and_counts_as_free_meanwhile() {
    let rig = Rig::new(64);
    let s = rig.stream();
    let other = rig.alloc(&s, MIB);
    for bytes in [300, 5_000, 100_000, 3 * MIB] {
        let first = rig.alloc(&s, bytes).address();
        let free = rig.pool.stats();
        assert_eq!((free.blocks, free.requested, free.live), (1, MIB, MIB), "{bytes}");
        assert_eq!((free.allocations - free.frees, free.live + free.cached), (1, free.physical));
        let again = rig.alloc(&s, bytes);
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
    let below = rig.alloc(&s, MIB + 512);
    drop(rig.pool.alloc(&s, Request::bytes(MIB).tag(a)).unwrap());
    let held = rig.pool.alloc(&s, Request::bytes(MIB).tag(b)).unwrap();
    assert_eq!((holds(a), holds(b)), (Err(0), Err(MIB)));
    drop(held);
    let aligned = rig.pool.alloc(&s, Request::bytes(MIB).tag(b).align(1 << 16)).unwrap();
    assert_eq!(aligned.address() % (1 << 16), 0);
    drop((below, aligned));
    rig.assert_silent();
}
