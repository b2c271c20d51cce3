//! Tests of streams of other libraries, which are created and destroyed without the pool.
#![expect(clippy::unwrap_used, reason = "helpers of tests")]
#![expect(unsafe_code, reason = "takes in a stream")]

use crate::support::{MIB, Rig, range};
use aquifer_core::MemoryError;
use aquifer_device::Request;
use aquifer_driver::{Access, KeepAlive, Operand, RawStream, sim::Sim};
use aquifer_stream::StreamLifetime;
use std::{sync::Arc, time::Duration};

/// Returns a stream made by another library.
fn foreign(sim: &Sim) -> (RawStream, KeepAlive) {
    let raw = sim.driver().stream_create(aquifer_driver::DeviceId(0), 0).unwrap();
    (raw, Arc::new(()))
}

#[test]
fn a_stream_released_and_adopted_again_is_waited_for_again() {
    let rig = Rig::stepped(8);
    let s = rig.stream();
    let (foreign, alive) = foreign(&rig.sim);
    for _ in 0..4 {
        let block = rig.alloc(&s, 6 * MIB);
        block.order(foreign, Some(alive.clone()), Access::Write).unwrap();
        rig.sim.access(foreign, range(&block), Access::Write, Some(block.generation())).unwrap();
        drop(block);
        // This waits for the foreign stream on the device. Afterwards no block records that stream.
        drop(rig.alloc(&s, 6 * MIB));
    }
    assert_eq!(rig.pool.stats().host_waits, 0);
    rig.assert_silent();
}

#[test]
fn memory_freed_by_a_retired_stream_is_pending_only_while_another_stream_uses_it() {
    let rig = Rig::on(Sim::h200(1).stepped(), 8, |config| config.wait = Duration::ZERO);
    let (s, u) = (rig.stream(), rig.stream());
    // SAFETY: 1. a stream of this device. 2. it is never destroyed.
    let foreign =
        unsafe { rig.pool.streams().adopt(foreign(&rig.sim).0, StreamLifetime::Retired) }.unwrap();
    let block = rig.alloc(&foreign, 6 * MIB);
    rig.uses(&u, &block, Access::Write);
    drop(block);
    foreign.retire().unwrap();
    // No other stream can make the retired stream wait, which does not fail the caller.
    let refused = rig.pool.alloc(&s, Request::bytes(6 * MIB)).map(drop);
    assert!(matches!(refused, Err(MemoryError::OutOfMemory(_))), "{refused:?}");
    rig.sim.run_all();
    rig.alloc(&s, 6 * MIB);
    rig.assert_silent();
}
