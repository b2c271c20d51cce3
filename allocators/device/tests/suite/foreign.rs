//! Streams of other libraries, which come and go without the pool.
#![expect(clippy::unwrap_used, reason = "helpers of tests")]
#![expect(unsafe_code, reason = "takes in a stream")]

use crate::support::{MIB, Rig, range};
use aquifer_core::MemoryError;
use aquifer_device::Request;
use aquifer_driver::{Access, KeepAlive, Operand, RawStream, sim::Sim};
use aquifer_stream::Life;
use std::{sync::Arc, time::Duration};

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
        // Has to wait for the foreign stream, on the device. Then nobody notes that stream any
        // more.
        drop(rig.pool.alloc(&s, Request::bytes(6 * MIB)).unwrap());
    }
    assert_eq!(rig.pool.stats().host_waits, 0);
    rig.assert_silent();
}

#[test]
fn what_a_retired_stream_has_freed_is_held_back_while_another_stream_uses_it_and_no_longer() {
    let rig = Rig::on(Sim::h200(1).stepped(), 8, |config| config.wait = Duration::ZERO);
    let (s, u) = (rig.stream(), rig.stream());
    // SAFETY: 1. a stream of this device. 2. it is never destroyed.
    let foreign = unsafe { rig.pool.streams().adopt(foreign(&rig.sim).0, Life::Retired) }.unwrap();
    let block = rig.pool.alloc(&foreign, Request::bytes(6 * MIB)).unwrap();
    let used = block.prepare(&u, Access::Write).unwrap();
    rig.sim.access(u.raw(), range(&block), Access::Write, Some(block.generation())).unwrap();
    used.finish().unwrap();
    drop(block);
    foreign.retire().unwrap();
    // Nobody can make the retired stream wait, and that is not the caller's affair.
    let refused = rig.pool.alloc(&s, Request::bytes(6 * MIB)).map(drop);
    assert!(matches!(refused, Err(MemoryError::OutOfMemory(_))), "{refused:?}");
    rig.sim.run_all();
    rig.pool.alloc(&s, Request::bytes(6 * MIB)).unwrap();
    rig.assert_silent();
}
