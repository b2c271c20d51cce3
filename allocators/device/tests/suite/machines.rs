//! Tests that streams and memory of two simulated machines are separate: every function that takes
//! a stream refuses one of another machine with a typed error and changes nothing.
#![expect(clippy::unwrap_used, clippy::panic, reason = "helpers of tests")]

use crate::support::{self, Rig};
use aquifer_core::{MemoryError, Result, Tag};
use aquifer_device::{Direct, Request};
use aquifer_driver::Access;
use aquifer_stream::{Launch, Stream};

/// Asserts that a call refused a stream of another machine.
#[track_caller]
fn refused<T>(what: &str, answer: Result<T>) {
    match answer.map(drop) {
        Err(MemoryError::OtherMachine { expected, actual }) => {
            assert_ne!(expected, actual, "{what}");
        }
        other => panic!("{what}: {other:?}"),
    }
}

/// Returns streams of a machine: a leased one, and the default stream, which has the same handle on
/// all machines.
fn streams(rig: &Rig) -> [Stream; 2] {
    [rig.stream(), rig.pool.streams().legacy_default().unwrap()]
}

#[test]
fn a_stream_of_another_machine_is_refused_wherever_one_is_taken() {
    let (here, there) = (Rig::new(64), Rig::new(64));
    let own = here.stream();
    for theirs in streams(&there) {
        let pool = &here.pool;
        refused("alloc", pool.alloc(&theirs, Request::bytes(4096)));
        refused("alloc_raw", pool.alloc_raw(&theirs, Request::bytes(4096)));
        refused("buffer", pool.buffer::<u8>(&theirs, 4096));
        refused("reserve", pool.reserve::<u8>(&theirs, 4096));
        refused("alloc_stable", pool.alloc_stable(&theirs, Request::bytes(4096)));
        refused(
            "parkable",
            pool.parkable(Tag::named("parked")).unwrap().alloc(&theirs, Request::bytes(4096)),
        );
        let direct = Direct::new(pool.driver().clone(), pool.streams().clone(), None);
        refused("direct", aquifer_device::Opaque::allocate(&direct, &theirs, Request::bytes(4096)));
        refused("graphs", pool.graph_pool().unwrap().announce(&theirs));
        refused("wait_for", own.wait_for(&theirs));
        refused("wait_for the other way", theirs.wait_for(&own));

        let mut buffer = here.bytes(&own, 4096);
        own.fill(&mut buffer, 7).unwrap();
        refused("prepare", buffer.block().prepare(&theirs, Access::Read));
        refused("record_use", buffer.block().record_use(&theirs, Access::Read));
        refused("launch", Launch::on(&theirs).reads(&buffer).preflight());
        refused("fill", theirs.fill(&mut buffer, 1));
        refused("fill_bytes", theirs.fill_bytes(&mut buffer, 1));
        let mut other = here.bytes(&own, 4096);
        refused("copy", theirs.copy(&buffer, &mut other));
        let mut bytes = vec![0_u8; 4096];
        refused("download", theirs.scope(|c| c.download(&buffer, &mut bytes)).unwrap());
        let up = vec![9_u8; 4096];
        refused("upload", theirs.scope(|c| c.upload(&up, &mut buffer)).unwrap());
        let slice = buffer.slice(0..16).unwrap();
        let mut few = vec![0_u8; 16];
        refused("download of a part", theirs.scope(|c| c.download(slice, &mut few)).unwrap());
        assert_eq!(support::read(&own, &buffer), vec![7; 4096], "nothing has changed");
    }
    here.assert_silent();
    there.assert_silent();
    assert_eq!(there.budget.used(), 0);
}
