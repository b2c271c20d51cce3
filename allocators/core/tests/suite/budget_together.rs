//! Tests of reservations of several nodes at once: all or nothing, whatever the nodes have in
//! common.

use aquifer_core::{
    Budget,
    budget::{Level, Levels},
};
use std::{sync::Barrier, thread};

/// Returns a machine of 100 bytes, and two devices of 80.
fn machine() -> [Budget; 3] {
    let machine = Budget::new("the machine", 100);
    let (left, right) = (machine.child("left", 80), machine.child("right", 80));
    [machine, left, right]
}

#[test]
fn parts_are_granted_in_their_order_the_same_node_twice_and_none_at_all_too() {
    let [machine, left, right] = machine();
    let mut all =
        Budget::reserve_all(&[(&left, 10), (&right, 0), (&left, 20), (&machine, 30), (&right, 40)])
            .unwrap();
    let bytes: Vec<u64> = all.iter().map(|part| part.remaining()).collect();
    assert_eq!(bytes, [10, 0, 20, 30, 40]);
    assert!(all[1].budget().is(&right) && all[2].budget().is(&left));
    assert_eq!((machine.used(), left.used(), right.used()), (100, 30, 40));
    let drawn = all[2].draw(5).unwrap();
    drop(all);
    assert_eq!((machine.used(), left.used(), drawn.bytes()), (5, 5, 5));
    drop(drawn);
    assert_eq!(machine.figures().held, 0);
    assert!(Budget::reserve_all(&[]).unwrap().is_empty());
}

#[test]
fn a_refusal_names_the_node_with_its_whole_request_and_changes_nothing() {
    let [machine, left, right] = machine();
    for node in [&machine, &left, &right] {
        node.set_levels(Levels { soft: 50, critical: 70, slack: 30 });
    }
    right.set_guarantee(40).unwrap();
    let before = [&machine, &left, &right].map(|node| node.figures());
    // Each part fits alone, and the first two fit together.
    let refused = Budget::reserve_all(&[(&right, 30), (&left, 60), (&right, 20)]).unwrap_err();
    assert_eq!((refused.budget, refused.requested, refused.current), ("the machine", 110, 0));
    assert_eq!(
        [&machine, &left, &right].map(|node| node.figures()),
        before,
        "peaks and levels as well"
    );
    let refused = Budget::reserve_all(&[(&left, 50), (&left, 31)]).unwrap_err();
    assert_eq!((refused.budget, refused.requested, refused.remaining), ("left", 81, 80));
    assert!(Budget::reserve_all(&[(&left, 1), (&left, u64::MAX)]).is_err());
    let all = Budget::reserve_all(&[(&right, 40), (&left, 60)]).unwrap();
    assert_eq!(
        (machine.level(), machine.peak(), left.level()),
        (Level::Critical, 100, Level::Warning)
    );
    drop(all);
    assert_eq!(machine.figures().held, 40, "what is guaranteed");
}

#[test]
fn a_grant_of_one_root_is_returned_when_another_refuses() {
    let (one, two) = (Budget::new("one", 10), Budget::new("two", 10));
    let refused = Budget::reserve_all(&[(&one, 5), (&two, 11), (&one, 5)]).unwrap_err();
    assert_eq!((refused.budget, refused.requested), ("two", 11));
    assert_eq!((one.used(), two.used()), (0, 0));
    let all = Budget::reserve_all(&[(&one, 5), (&two, 10), (&one, 5)]).unwrap();
    assert_eq!((one.remaining(), two.remaining(), all.len()), (0, 0, 3));
}

#[test]
fn spare_bytes_of_leases_are_reclaimed_before_a_refusal() {
    let [machine, left, right] = machine();
    let leases = [left.lease(20), right.lease(20)];
    drop([leases[0].charge(1).unwrap(), leases[1].charge(1).unwrap()]);
    assert_eq!((machine.used(), machine.spare()), (0, 42));
    let all = Budget::reserve_all(&[(&left, 50), (&right, 50)]).unwrap();
    assert_eq!((machine.used(), machine.spare(), all.len()), (100, 0, 2));
}

#[test]
fn waiters_get_the_bytes_of_a_released_joint_reservation() {
    let [machine, left, right] = machine();
    let all = Budget::reserve_all(&[(&left, 50), (&right, 50)]).unwrap();
    let begun = Barrier::new(2);
    thread::scope(|scope| {
        let waiter = scope.spawn(|| {
            begun.wait();
            machine.charge_by(80, None).unwrap().bytes()
        });
        begun.wait();
        while machine.waiting() == 0 {
            thread::yield_now();
        }
        assert_eq!(Budget::reserve_all(&[(&left, 1)]).unwrap_err().budget, "the machine");
        drop(all);
        assert_eq!(waiter.join().unwrap(), 80);
    });
    assert_eq!(machine.used(), 0);
}

#[test]
fn one_of_two_conflicting_joint_reservations_is_granted_whole() {
    let [machine, left, right] = machine();
    let begun = Barrier::new(2);
    for _ in 0..if cfg!(miri) { 20 } else { 500 } {
        let ask = |first: &Budget, second: &Budget| {
            begun.wait();
            let answer = Budget::reserve_all(&[(first, 60), (second, 30)]);
            begun.wait();
            answer.map(|all| all.len()).unwrap_or_default()
        };
        let granted = thread::scope(|scope| {
            let other = scope.spawn(|| ask(&right, &left));
            ask(&left, &right) + other.join().unwrap()
        });
        assert_eq!((granted, machine.used()), (2, 0));
    }
}
