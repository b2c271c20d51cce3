//! Streams of other libraries, which come and go without the pool.
#![expect(clippy::unwrap_used, reason = "helpers of tests")]

mod support;

use aquifer_device::Request;
use aquifer_driver::{Access, KeepAlive, Operand, RawStream, sim::Sim};
use std::sync::Arc;
use support::{MIB, Rig, range};

/// A stream that some other library made.
fn foreign(sim: &Sim) -> (RawStream, KeepAlive) {
    let raw = sim.driver().stream_create(aquifer_driver::DeviceId(0), 0).unwrap();
    (raw, Arc::new(()))
}

#[test]
fn a_stream_that_is_let_go_of_and_taken_in_again_is_waited_for_again() {
    let rig = Rig::stepped(8);
    let s = rig.stream();
    let (foreign, alive) = foreign(&rig.sim);
    for _ in 0..4 {
        let block = rig.pool.alloc(&s, Request::bytes(6 * MIB)).unwrap();
        block.order(foreign, Some(alive.clone()), Access::Write).unwrap();
        rig.sim.access(foreign, range(&block), Access::Write, Some(block.generation())).unwrap();
        drop(block);
        // Has to wait for the foreign stream, on the device. Then nobody notes that stream any more.
        drop(rig.pool.alloc(&s, Request::bytes(6 * MIB)).unwrap());
    }
    assert_eq!(rig.pool.stats().host_waits, 0);
    rig.assert_silent();
}
