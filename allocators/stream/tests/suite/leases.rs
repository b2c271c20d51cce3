//! Tests of stream leases: each stream has one holder, the cap is never exceeded, and streams are
//! returned.
//!
//! - A stream is in one lease at a time, and is returned with the last clone of it.
//! - An id is valid for its lease, in its pool, and for nothing else.
//! - A refusal by the pool or the driver changes nothing.

use crate::support::{GPU, PATIENCE, Rig, within};
use aquifer_core::MemoryError;
use aquifer_driver::{Call, CaptureMode, RawStream, sim::Sim};
use aquifer_stream::{StreamLifetime, StreamPool};
use std::{
    collections::HashSet,
    sync::{
        Mutex,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
    thread,
};

const OUT_OF_MEMORY: u32 = 2;

#[test]
fn ids_are_distinct_among_leases_and_over_time() {
    let rig = Rig::new(8);
    let leases: Vec<_> = (0..5).map(|_| rig.lease()).collect();
    let mut ids: HashSet<_> = leases.iter().map(|stream| stream.id()).collect();
    drop(leases);
    let again: Vec<_> = (0..5).map(|_| rig.lease()).collect();
    ids.extend(again.iter().map(|stream| stream.id()));
    assert_eq!(ids.len(), 10, "the same streams, and other leases");
    assert_eq!(rig.made(Call::StreamCreate), 5);
}

#[test]
fn at_the_cap_and_not_before_a_lease_is_refused_with_the_cap() {
    let rig = Rig::new(3);
    let mut leases: Vec<_> = (0..3).map(|_| rig.lease()).collect();
    assert_eq!(rig.pool.lease().unwrap_err(), MemoryError::Capacity { max: 3 });
    assert_eq!((rig.pool.leased(), rig.pool.cap()), (3, 3));
    assert_eq!(rig.made(Call::StreamCreate), 3, "no stream is made in order to be refused");
    leases.pop();
    leases.push(rig.lease());
    assert_eq!(rig.pool.lease().unwrap_err(), MemoryError::Capacity { max: 3 });
    drop(leases);
    assert_eq!(Rig::new(0).pool.lease().unwrap_err(), MemoryError::Capacity { max: 0 });
    rig.assert_all_given_back();
}

#[test]
fn a_stream_is_returned_with_the_last_clone_of_its_lease_and_reused() {
    let rig = Rig::new(4);
    let first = rig.lease();
    let (raw, clone) = (first.raw(), first.clone());
    drop(first);
    assert_eq!(rig.pool.leased(), 1, "a clone is the lease as much as the first");
    assert_ne!(rig.lease().raw(), raw);
    drop(clone);
    assert_eq!(rig.pool.leased(), 0);
    let both = [rig.lease().raw(), rig.lease().raw()];
    assert!(both.contains(&raw));
    assert_eq!(rig.made(Call::StreamCreate), 2);
    assert_eq!(rig.made(Call::StreamDestroy), 0);
}

#[test]
fn an_id_is_good_in_its_own_pool_and_for_its_own_lease_only() {
    let (rig, other) = (Rig::new(2), Rig::new(2));
    let (stream, theirs) = (rig.lease(), other.lease());
    let id = stream.id();
    assert_eq!(rig.pool.get(id), Ok(stream.clone()));
    assert_eq!(
        rig.pool.get(theirs.id()),
        Err(MemoryError::UnknownId),
        "the same slot of another pool"
    );
    assert_eq!(other.pool.get(id), Err(MemoryError::UnknownId));
    drop(stream);
    assert_eq!(rig.pool.get(id), Err(MemoryError::UnknownId), "nobody holds it");
    let next = rig.lease();
    assert_eq!(rig.pool.get(id), Err(MemoryError::UnknownId), "somebody else holds it");
    assert_eq!(rig.pool.get(next.id()), Ok(next));
}

#[test]
fn a_stream_that_is_looked_up_keeps_the_lease() {
    let rig = Rig::new(1);
    let stream = rig.lease();
    let found = rig.pool.get(stream.id()).unwrap();
    drop(stream);
    assert_eq!(rig.pool.lease().unwrap_err(), MemoryError::Capacity { max: 1 });
    drop(found);
    assert!(rig.pool.lease().is_ok());
}

#[test]
fn an_id_of_an_adopted_stream_names_no_lease() {
    let rig = Rig::new(2);
    let (leased, foreign) = (rig.lease(), rig.foreign());
    let adopted = rig.adopt(foreign, StreamLifetime::Fenced).unwrap();
    assert_eq!(rig.pool.get(adopted.id()), Err(MemoryError::UnknownId));
    let own = rig.adopt(leased.raw(), StreamLifetime::Fenced).unwrap();
    assert_eq!(rig.pool.get(own.id()), Err(MemoryError::UnknownId));
    assert_eq!(rig.pool.leased(), 1, "adoption is no lease");
}

#[test]
fn streams_of_one_priority_are_not_handed_out_as_another() {
    let rig = Rig::new(2);
    let high = rig.pool.lease_with_priority(-5).unwrap();
    let raw = high.raw();
    drop(high);
    assert_ne!(rig.lease().raw(), raw, "below the cap a stream is made");
    assert_eq!(rig.pool.lease_with_priority(-5).unwrap().raw(), raw);
    assert_eq!(rig.made(Call::StreamCreate), 2);
}

#[test]
fn at_the_cap_an_idle_stream_of_another_priority_gives_way() {
    let rig = Rig::new(1);
    let low = rig.lease();
    let (id, raw) = (low.id(), low.raw());
    drop(low);
    let high = rig.pool.lease_with_priority(-5).unwrap();
    assert_ne!(high.raw(), raw);
    assert_eq!(rig.sim.outstanding().streams, 1, "the other is destroyed");
    assert_eq!(rig.pool.get(id), Err(MemoryError::UnknownId));
    assert_eq!(rig.pool.lease_with_priority(0).unwrap_err(), MemoryError::Capacity { max: 1 });
    drop(high);
    rig.assert_all_given_back();
}

#[test]
fn a_failed_stream_creation_leaves_the_pool_unchanged() {
    // When a stream is created or queried, with free capacity or with an idle stream to replace.
    for call in [Call::StreamCreate, Call::StreamId] {
        for give_way in [false, true] {
            let rig = Rig::new(1);
            if give_way {
                drop(rig.lease());
            }
            let before = rig.sim.outstanding();
            rig.sim.fail(call, 1, OUT_OF_MEMORY);
            let refused = rig.pool.lease_with_priority(-5).unwrap_err();
            let MemoryError::Driver(error) = refused else { panic!("{refused:?}") };
            assert_eq!((error.code, error.call), (OUT_OF_MEMORY, call.name()));
            assert_eq!(rig.pool.leased(), 0);
            assert_eq!(rig.sim.outstanding(), before, "{call:?}, {give_way}");
            // The replaced stream still exists, and the capacity for the one that was not created
            // is free.
            drop(rig.lease());
            drop(rig.pool.lease_with_priority(-5).unwrap());
            rig.assert_all_given_back();
        }
    }
}

#[test]
fn no_lock_is_held_while_a_stream_is_made() {
    let rig = Rig::new(2);
    drop(rig.lease());
    let slow = rig.sim.stall(Call::StreamCreate);
    let pool = rig.pool.clone();
    let making = thread::spawn(move || pool.lease_with_priority(-5));
    assert!(slow.wait_for(1, PATIENCE));
    let pool = rig.pool.clone();
    let idle = within(move || pool.lease()).unwrap();
    assert_eq!(idle.number(), 0);
    let pool = rig.pool.clone();
    let full = within(move || pool.lease()).unwrap_err();
    assert_eq!(full, MemoryError::Capacity { max: 2 }, "the stream that is being made counts");
    let id = idle.id();
    let pool = rig.pool.clone();
    assert_eq!(within(move || pool.get(id)), Ok(idle));
    drop(slow);
    assert_eq!(making.join().unwrap().unwrap().number(), 1);
}

#[test]
fn no_lock_is_held_while_a_stream_that_gave_way_is_destroyed() {
    let rig = Rig::new(2);
    let held = rig.lease();
    drop(rig.lease());
    let slow = rig.sim.stall(Call::StreamDestroy);
    let pool = rig.pool.clone();
    let changing = thread::spawn(move || pool.lease_with_priority(-5).map(drop));
    assert!(slow.wait_for(1, PATIENCE));
    let pool = rig.pool.clone();
    within(move || {
        drop(held);
        pool.lease().map(drop)
    })
    .unwrap();
    drop(slow);
    changing.join().unwrap().unwrap();
}

#[test]
fn eight_threads_never_exceed_the_cap_and_never_share_a_stream() {
    const CAP: u32 = 5;
    let rig = Rig::new(CAP);
    let held: Mutex<HashSet<RawStream>> = Mutex::default();
    let refused = AtomicU32::new(0);
    thread::scope(|scope| {
        for thread in 0..8i32 {
            let (rig, held, refused) = (&rig, &held, &refused);
            scope.spawn(move || {
                for round in 0..400 {
                    // Two priorities, so that streams also replace each other.
                    match rig.pool.lease_with_priority(-((thread + round / 64) % 2)) {
                        Ok(stream) => {
                            assert!(
                                held.lock().unwrap().insert(stream.raw()),
                                "a stream was leased twice"
                            );
                            assert!(rig.pool.leased() <= CAP);
                            assert_eq!(rig.pool.get(stream.id()), Ok(stream.clone()));
                            thread::yield_now();
                            held.lock().unwrap().remove(&stream.raw());
                        }
                        Err(error) => {
                            assert_eq!(error, MemoryError::Capacity { max: CAP });
                            refused.fetch_add(1, Ordering::Relaxed);
                            thread::yield_now();
                        }
                    }
                }
            });
        }
    });
    assert_eq!(rig.pool.leased(), 0);
    assert!(rig.sim.outstanding().streams <= u64::from(CAP));
    assert!(refused.into_inner() < 8 * 400, "somebody must have had a stream");
    rig.assert_all_given_back();
}

#[test]
fn leasing_and_adopting_concurrently_do_not_deadlock() {
    let rig = Rig::new(4);
    // Enough known streams make an adoption take some time.
    let known: Vec<_> =
        (0..300).map(|_| rig.adopt(rig.foreign(), StreamLifetime::Retired).unwrap()).collect();
    let (pool, other) = (rig.pool.clone(), Rig { sim: rig.sim.clone(), pool: rig.pool.clone() });
    within(move || {
        let over = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| {
                while !over.load(Ordering::Relaxed) {
                    drop(pool.lease().unwrap());
                }
            });
            for _ in 0..2000 {
                let foreign = other.foreign();
                let adopted = other.adopt(foreign, StreamLifetime::Retired).unwrap();
                adopted.retire().unwrap();
                other.destroy(foreign);
            }
            over.store(true, Ordering::Relaxed);
        });
    });
    for stream in known {
        let raw = stream.raw();
        stream.retire().unwrap();
        rig.destroy(raw);
    }
    rig.assert_all_given_back();
}

#[test]
fn streams_are_destroyed_with_the_last_of_pool_and_leases_in_either_order() {
    for lease_first in [true, false] {
        let sim = Sim::h200(2);
        let pool = StreamPool::new(sim.driver(), GPU, 4);
        drop(pool.lease().unwrap());
        let lease = pool.lease().unwrap();
        if lease_first {
            drop(lease);
            drop(pool);
        } else {
            drop(pool);
            lease.synchronize().unwrap();
            drop(lease);
        }
        assert!(sim.outstanding().is_empty(), "{}", sim.outstanding());
    }
}

#[test]
fn an_isolated_lease_gets_an_isolated_stream_and_no_other_lease_does() {
    let rig = Rig::new(3);
    let isolated = rig.pool.lease_isolated().unwrap();
    let raw = isolated.raw();
    assert!(isolated.timeline().is_isolated() && !isolated.timeline().waits_unasked());
    assert!(!isolated.timeline().is_waited_for_unasked(isolated.timeline().open()));
    drop(isolated);
    let other = rig.lease();
    assert!(!other.timeline().is_isolated() && other.timeline().waits_unasked());
    assert_ne!(other.raw(), raw, "the one that came back is of another kind");
    assert_eq!(rig.pool.lease_isolated().unwrap().raw(), raw);
}

#[test]
#[expect(unsafe_code, reason = "adopts a stream")]
fn an_adopted_stream_is_isolated_once_it_is_declared_so() {
    let rig = Rig::new(1);
    let foreign = rig.foreign();
    let before = rig.adopt(foreign, StreamLifetime::Retired).unwrap();
    assert!(!before.timeline().is_isolated());
    // SAFETY: 1. a stream of this driver. 2. never destroyed.
    let isolated = unsafe { rig.pool.adopt_isolated(foreign, StreamLifetime::Retired) }.unwrap();
    assert_eq!(isolated, before);
    assert!(before.timeline().is_isolated());
    drop(rig.adopt(foreign, StreamLifetime::Retired).unwrap());
    assert!(before.timeline().is_isolated());
}

#[test]
fn a_stream_that_still_captures_is_not_leased_and_gives_way_when_there_is_no_other() {
    let rig = Rig::new(2);
    let first = rig.lease();
    let raw = first.raw();
    rig.sim.driver().capture_begin(raw, CaptureMode::Relaxed).unwrap();
    drop(first);
    let second = rig.lease();
    assert_ne!(second.raw(), raw, "it captures");
    assert_eq!(second.timeline().is_capturing(), Ok(false));
    // After the capture it can be leased like any other.
    rig.end_capture(raw).unwrap();
    let third = rig.lease();
    assert_eq!(third.raw(), raw);
    rig.sim.driver().capture_begin(raw, CaptureMode::Relaxed).unwrap();
    drop(third);
    let fourth = rig.lease();
    assert_eq!(fourth.timeline().is_capturing(), Ok(false));
    assert_eq!(rig.pool.lease().err(), Some(MemoryError::Capacity { max: 2 }));
    drop((second, fourth));
    assert_eq!(rig.sim.outstanding().streams, 2);
    rig.assert_all_given_back();
}

#[test]
fn a_driver_that_cannot_say_whether_a_stream_captures_leases_none_and_loses_none() {
    let rig = Rig::new(1);
    drop(rig.lease());
    rig.sim.fail(Call::StreamIsCapturing, 1, 999);
    assert!(matches!(rig.pool.lease(), Err(MemoryError::Driver(refused)) if refused.code == 999));
    assert_eq!(rig.pool.leased(), 0);
    drop(rig.lease());
    assert_eq!(rig.made(Call::StreamCreate), 1);
    rig.assert_all_given_back();
}

#[test]
fn a_pool_without_leases_adopts_streams() {
    let rig = Rig::new(u32::MAX);
    let (legacy, own) = (rig.pool.legacy_default().unwrap(), rig.pool.thread_default().unwrap());
    assert_ne!(legacy.raw(), own.raw());
    drop((legacy, own, rig.lease()));
    rig.assert_all_given_back();
}
