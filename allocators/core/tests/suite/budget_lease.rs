//! Tests of leases: limits on live bytes are exact, although spare bytes are charged.

use aquifer_core::{Budget, budget::Leased};
use std::{
    future::Future,
    pin::pin,
    task::{Context, Waker},
    thread,
};

#[test]
fn a_lease_takes_grains_and_keeps_no_more_than_two() {
    let root = Budget::new("root", 10_000);
    let tenant = root.child("tenant", 8_000);
    let lease = tenant.lease(1000);
    assert_eq!(root.used(), 0, "nothing is taken in advance of the first charge");
    let first = lease.charge(100).unwrap();
    assert_eq!((root.used(), lease.spare(), tenant.spare()), (100, 1000, 1000));
    let more: Vec<_> = (0..10).map(|_| lease.charge(100).unwrap()).collect();
    assert_eq!((root.used(), lease.spare()), (1100, 0));
    let large = lease.charge(3000).unwrap();
    assert_eq!((root.used(), lease.spare()), (4100, 0), "what is above a grain is taken by itself");
    drop((first, more, large));
    assert!(lease.spare() <= 2000);
    assert_eq!(root.used(), 0, "what is spare is not used");
    lease.trim();
    assert_eq!((root.used(), lease.spare()), (0, 0));
}

#[test]
fn live_bytes_are_granted_to_the_last_byte_whatever_other_leases_have_spare() {
    let root = Budget::new("root", 1000);
    let (a, b) = (root.child("a", 900), root.child("b", 900));
    let leases = [a.lease(100), a.lease(100), b.lease(100)];
    let live: Vec<Leased> = leases.iter().map(|lease| lease.charge(100).unwrap()).collect();
    assert_eq!((root.used(), root.spare()), (300, 300));
    let refused = leases[0].charge(701).unwrap_err();
    assert_eq!(
        (refused.budget, refused.current),
        ("a", 200),
        "nothing is spare when somebody is refused"
    );
    let rest = leases[2].charge(700).unwrap();
    assert_eq!((root.used(), root.spare()), (1000, 0));
    assert_eq!(leases[1].charge(1).unwrap_err().budget, "root");
    drop(live);
    assert_eq!(root.used(), 700);
    let exact = a.charge(300).unwrap();
    drop((rest, exact));
}

/// Spare bytes at the node that refuses first do not help the next node.
#[test]
fn spare_bytes_at_every_level_are_reclaimed_before_a_refusal() {
    let root = Budget::new("root", 400);
    let (pool, other) = (root.child("pool", 300), root.child("other", 400));
    let leases = [pool.lease(100), other.lease(100)];
    let live = leases.each_ref().map(|lease| lease.charge(50).unwrap());
    assert_eq!((pool.used() + pool.spare(), other.used() + other.spare()), (150, 150));
    assert_eq!(pool.charge(250).unwrap().bytes(), 250);
    drop(live);
}

#[test]
fn a_lowered_limit_reclaims_spare_bytes_before_it_reports_an_excess() {
    let tenant = Budget::new("tenant", 1000);
    let lease = tenant.lease(300);
    let live = lease.charge(100).unwrap();
    assert_eq!((tenant.used(), tenant.spare()), (100, 300));
    assert_eq!(tenant.set_limit(150), 0);
    assert_eq!(tenant.set_limit(60), 40);
    assert!(lease.charge(1).is_err());
    drop(live);
    assert_eq!(tenant.used(), 0);
    assert!(lease.charge(60).is_ok());
}

#[test]
fn charges_outlive_their_lease_and_then_go_back_to_the_budget() {
    let root = Budget::new("root", 1000);
    let tenant = root.child("tenant", 1000);
    let lease = tenant.lease(100);
    let live: Vec<_> = (0..5).map(|_| lease.charge(50).unwrap()).collect();
    drop((lease, tenant));
    assert_eq!((root.used(), root.children().count()), (250, 1));
    drop(live);
    assert_eq!((root.used(), root.children().count()), (0, 0));
    let again = root.child("next", 10).lease(1);
    assert_eq!((again.budget().name(), again.spare()), ("next", 0));
}

#[test]
fn released_live_bytes_reach_waiters() {
    let root = Budget::new("root", 1000);
    let lease = root.child("tenant", 1000).lease(400);
    let (live, rest) = (lease.charge(300).unwrap(), root.charge(300).unwrap());
    assert_eq!(lease.spare(), 400);
    let mut context = Context::from_waker(Waker::noop());
    let mut first = pin!(root.charge_async(500));
    assert!(first.as_mut().poll(&mut context).is_pending() || lease.spare() == 0);
    let mut second = pin!(root.charge_async(1000));
    assert!(second.as_mut().poll(&mut context).is_pending());
    assert_eq!(lease.spare(), 0, "what is spare belongs to whoever waits");
    assert!(lease.charge(1).is_err(), "and nothing is taken in front of them");
    drop(live);
    assert_eq!((lease.spare(), root.waiting()), (0, 1));
    assert!(first.as_mut().poll(&mut context).is_ready());
    drop(rest);
    assert!(second.as_mut().poll(&mut context).is_ready());
    assert_eq!(root.used(), 0);
}

/// Spare bytes elsewhere are not in the way when a waiter queues, but will be.
#[test]
fn a_waiter_for_one_node_finds_no_spare_bytes_at_the_next() {
    let root = Budget::new("root", 100);
    let (tenant, other) = (root.child("tenant", 50), root.child("other", 100));
    let lease = other.lease(50);
    let (own, live) = (tenant.charge(30).unwrap(), lease.charge(10).unwrap());
    let mut context = Context::from_waker(Waker::noop());
    let mut waiting = pin!(tenant.charge_async(50));
    assert!(waiting.as_mut().poll(&mut context).is_pending());
    drop(own);
    assert!(waiting.as_mut().poll(&mut context).is_ready());
    drop(live);
}

#[test]
fn a_large_lease_holds_all_bytes_there_are() {
    let root = Budget::unlimited("root");
    let lease = root.lease(u64::MAX);
    let all = lease.charge(u64::MAX).unwrap();
    assert!(lease.charge(1).is_err());
    drop(all);
    drop(lease.charge(1).unwrap());
    drop(lease);
    assert_eq!(root.used(), 0);
}

/// Live bytes never exceed the limit, no request that fits is refused without other charges, and
/// nothing remains.
#[test]
fn threads_with_leases_leave_exactly_nothing() {
    let root = Budget::new("root", 4000);
    let tenants = [root.child("a", 2500), root.child("b", 2500)];
    thread::scope(|s| {
        for seed in 0..6u64 {
            let (root, tenant) = (&root, &tenants[seed as usize % 2]);
            s.spawn(move || {
                let mut state = seed + 1;
                let mut lease = tenant.lease(100 * (1 + seed % 3));
                let mut held = Vec::new();
                for round in 0..if cfg!(miri) { 60 } else { 30_000 } {
                    state = state
                        .wrapping_mul(6_364_136_223_846_793_005)
                        .wrapping_add(1_442_695_040_888_963_407);
                    if held.len() > 5 || state >> 63 == 1 {
                        held.pop();
                    } else {
                        held.extend(lease.charge(state >> 56).ok());
                    }
                    if round % 1000 == 999 {
                        lease = tenant.lease(300);
                    }
                    if seed == 0 && round % 10 == 0 {
                        drop(root.charge_by(1 + state % 1000, None).unwrap());
                    }
                    assert!(root.used() <= 4000 && tenant.used() <= 2500);
                }
            });
        }
    });
    assert_eq!((root.used(), root.spare(), root.waiting()), (0, 0, 0));
}

#[test]
fn a_lease_keeps_nothing_below_a_limit_that_was_lowered_and_does_again_when_it_is_met() {
    let root = Budget::new("root", 100);
    let tenant = root.child("tenant", 100);
    let lease = tenant.lease(20);
    let (live, most) = (lease.charge(10).unwrap(), root.charge(60).unwrap());
    assert_eq!(root.set_limit(50), 20);
    drop(live);
    assert_eq!((lease.spare(), root.used()), (0, 60), "what comes back is the root's excess");
    assert_eq!(lease.charge(5).unwrap_err().budget, "root");
    drop(most);
    drop(lease.charge(5).unwrap());
    assert_eq!((lease.spare(), root.used()), (25, 0));
    drop(lease);
    assert_eq!(root.used(), 0);
}

#[test]
fn a_lease_has_no_spare_bytes_where_guarantees_fill_a_lowered_limit() {
    let root = Budget::new("root", 100);
    let child = root.child("child", 100);
    child.set_guarantee(30).unwrap();
    let lease = root.lease(10);
    let live = lease.charge(8).unwrap();
    assert_eq!((root.used(), lease.spare()), (8, 10));
    // 18 bytes are used or spare and 30 set aside. Nothing is left under a limit of 28.
    root.set_limit(28);
    assert_eq!((root.used(), lease.spare()), (8, 0));
    assert!(root.charge(1).is_err(), "held is above the limit");
    assert!(lease.charge(1).is_err(), "a lease grants no more than its budget");
    drop(live);
    assert_eq!((root.used(), lease.spare()), (0, 0), "what is returned is not kept either");
}
