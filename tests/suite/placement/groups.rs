//! Tests of groups of leases, which are granted as a whole or not at all.

use super::*;
use std::{
    future::Future,
    pin::pin,
    task::{Context, Poll, Waker},
};

fn each(mib: u64) -> PlacementRequest {
    PlacementRequest::bytes(mib * MIB)
}

#[test]
fn shards_go_to_devices_of_their_own_or_to_as_few_as_have_room() {
    let (_, rt) = machine(4, 10);
    let placer = rt.placer(Policy::MostFree);
    let _held = fill(rt.device(1).unwrap(), 8).unwrap();
    assert_eq!(devices(&placer.place_group(&Group::of(3, each(4))).unwrap()), [0, 2, 3]);
    assert_eq!(devices(&placer.place_group(&Group::of(3, each(4)).packed()).unwrap()), [0, 0, 2]);
    assert_eq!(placer.place_group(&Group::of(0, each(4))).unwrap_err(), PlaceError::ZeroSize);
    assert_eq!(placer.place_group(&Group::of(2, each(0))).unwrap_err(), PlaceError::ZeroSize);
}

#[test]
fn all_shards_are_held_or_none() {
    let (_, rt) = machine(3, 10);
    let placer = rt.placer(Policy::MostFree);
    let _held = fill(rt.device(1).unwrap(), 8).unwrap();
    let refused = placer.place_group(&Group::of(3, each(4))).unwrap_err();
    assert_eq!(
        (why(&refused, 0), why(&refused, 1)),
        (RejectReason::Alone, RejectReason::Free { needs: 4 * MIB })
    );
    assert_eq!(rt.device(0).unwrap().budget().used(), 0);
}

#[test]
fn under_one_root_all_shards_are_held_or_none() {
    let root = Budget::new("the process", 10 * MIB);
    let sim = Sim::h200(4).symbolic();
    let rt = Runtime::builder().driver(sim.driver()).pools(PoolConfig::with_budget(root.clone()));
    let rt = rt.build().unwrap();
    let placer = rt.placer(Policy::MostFree);
    let refused = placer.place_group(&Group::of(3, each(4))).unwrap_err();
    assert!(
        (0..4).any(|device| matches!(
            why(&refused, device),
            RejectReason::Budget(_) | RejectReason::Free { .. }
        )),
        "{refused}"
    );
    assert_eq!(root.used(), 0, "what was held is given back");
    let two = placer.place_group(&Group::of(2, each(4))).unwrap();
    assert_eq!((root.used(), two.len()), (8 * MIB, 2));
}

#[test]
fn a_group_that_must_be_on_peers_finds_none_where_there_are_none() {
    let mut config = SimConfig::h200(2);
    config.peers = false;
    let (_, rt) = on(Sim::new(config).symbolic(), 10);
    let placer = rt.placer(Policy::MostFree);
    assert!(placer.place_group(&Group::of(2, each(1))).is_ok());
    let refused = placer.place_group(&Group::of(2, each(1)).on_peers()).unwrap_err();
    assert_eq!(why(&refused, 0), RejectReason::Alone);
    let both = placer.place_group(&Group::of(2, each(1)).on_peers().packed()).unwrap();
    assert_eq!(both[0].device(), both[1].device());
    let reach = placer.place(&each(1).reaching([DeviceId(0)]).not_on([DeviceId(0)])).unwrap_err();
    assert_eq!(why(&reach, 1), RejectReason::Unreachable { peer: DeviceId(0) });
}

#[test]
fn of_groups_that_meet_one_gets_through() {
    for _ in 0..30 {
        let (_, rt) = machine(4, 10);
        let (placer, start) = (rt.placer(Policy::RoundRobin), Barrier::new(4));
        let got = thread::scope(|scope| {
            let race = || {
                start.wait();
                placer.place_group(&Group::of(4, each(6)))
            };
            let threads: Vec<_> = (0..4).map(|_| scope.spawn(race)).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
        });
        assert_eq!(got.iter().filter(|group| group.is_ok()).count(), 1);
    }
}

#[test]
fn groups_that_wait_for_each_others_bytes_all_get_through() {
    for one_root in [false, true] {
        let sim = Sim::h200(3).symbolic();
        let rt = Runtime::builder().driver(sim.driver());
        let rt = if one_root {
            rt.pools(PoolConfig::with_budget(Budget::new("the process", 20 * MIB)))
        } else {
            rt.device_budget(10 * MIB)
        };
        let rt = rt.build().unwrap();
        let placer = rt.placer(Policy::RoundRobin);
        let deadline = Instant::now() + Duration::from_secs(60);
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..10 {
                        let group = Group::of(2, each(6));
                        let leases = placer.place_group_by(&group, Some(deadline)).unwrap();
                        assert_eq!(leases.len(), 2);
                    }
                });
            }
        });
        assert!(rt.devices().iter().all(|pool| pool.budget().used() == 0));
        let refused = placer.place_group_by(&Group::of(4, each(6)), None).unwrap_err();
        assert!(matches!(refused, PlaceError::Nowhere(_)), "there can never be room, so at once");
    }
}

#[test]
fn a_group_waits_until_its_deadline() {
    let (_, rt) = machine(2, 10);
    let placer = rt.placer(Policy::MostFree);
    let _held = place(&placer, 8).unwrap();
    let soon = Instant::now() + Duration::from_millis(5);
    assert!(placer.place_group_by(&Group::of(2, each(6)), Some(soon)).is_err());
    assert!(Instant::now() >= soon);
    assert_eq!(rt.device(1).unwrap().budget().used(), 0);
}

#[test]
fn a_group_that_waits_by_a_future_is_served_in_order_and_dropping_it_hands_the_bytes_on() {
    let (_, rt) = machine(2, 10);
    let placer = rt.placer(Policy::MostFree);
    let held = place(&placer, 8).unwrap();
    let full = held.pool().budget().clone();
    let mut context = Context::from_waker(Waker::noop());
    let mut first = Box::pin(placer.place_group_async(Group::of(2, each(6))));
    assert!(first.as_mut().poll(&mut context).is_pending());
    let mut second = pin!(placer.place_group_async(Group::of(2, each(6))));
    assert!(second.as_mut().poll(&mut context).is_pending());
    assert_eq!(full.waiting(), 2, "both stand where bytes are lacking");
    assert_eq!(rt.device(1).unwrap().budget().used(), 0, "and hold nothing");
    // Polling again does not lose its place.
    assert!(first.as_mut().poll(&mut context).is_pending());
    drop(held);
    assert!(second.as_mut().poll(&mut context).is_pending(), "the first one's turn");
    // It was granted, and is dropped without having taken the bytes.
    drop(first);
    let Poll::Ready(leases) = second.as_mut().poll(&mut context) else { panic!("its turn") };
    assert_eq!(leases.unwrap().len(), 2);
    assert!(second.poll(&mut context).is_pending(), "it was ready once");
    assert!(
        rt.devices().iter().all(|pool| pool.budget().used() == 0 && pool.budget().waiting() == 0)
    );
}

#[test]
fn a_group_leaves_a_line_that_does_not_move_for_one_that_does() {
    let (_, rt) = machine(3, 10);
    let placer = rt.placer(Policy::MostFree);
    let on = |device, mib| placer.place(&each(mib).only([DeviceId(device)])).unwrap();
    let [full, nearly] = [on(0, 9), on(1, 8)];
    let mut context = Context::from_waker(Waker::noop());
    let mut wait = pin!(placer.place_group_async(Group::of(2, each(6))));
    assert!(wait.as_mut().poll(&mut context).is_pending());
    let waiting = || rt.devices().iter().map(|pool| pool.budget().waiting()).collect::<Vec<_>>();
    assert_eq!(waiting(), [0, 1, 0]);
    drop(full);
    let _again = [nearly, on(0, 5)];
    assert!(wait.as_mut().poll(&mut context).is_pending());
    assert_eq!(waiting(), [1, 0, 0], "where five are free now");
}
