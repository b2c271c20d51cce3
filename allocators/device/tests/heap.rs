//! A block that other streams use takes nothing from the host's heap, once as many have been used at once before.
#![expect(unsafe_code, reason = "counts what an allocator is asked for")]

#[path = "../../../tests/support/counting.rs"]
mod counting;
mod support;

use aquifer_device::Request;
use aquifer_driver::{Access, sim::Sim};
use counting::{asked, uncounted};
use support::Rig;

#[test]
fn in_a_steady_state_blocks_that_other_streams_use_take_nothing_from_the_heap() {
    // Nobody watches who has which block.
    let sim = Sim::h200(1).symbolic();
    sim.oracle(false);
    let rig = Rig::on(sim, 64, |_| ());
    let (s, u) = (rig.stream(), rig.stream());
    let alloc = || rig.pool.alloc(&s, Request::bytes(4096)).unwrap();
    let alone = asked(|| drop(alloc()));
    // Each block is held back until the end of the round, and all go home together.
    let used = asked(|| {
        for _ in 0..8 {
            alloc().record_use(&u, Access::Read).unwrap();
        }
        // The driver's calls are its own affair.
        uncounted(|| {
            u.synchronize().unwrap();
            rig.pool.trim(u64::MAX).unwrap();
            assert_eq!(rig.pool.stats().pending, 0);
        });
    });
    assert_eq!((alone, used), (0, 0));
}
