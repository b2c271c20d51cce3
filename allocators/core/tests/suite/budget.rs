//! Tests of the guarantees of a budget, to the byte.

use aquifer_core::{Budget, Charge, OutOfBudget, error::HeldElsewhere};
use std::{sync::Barrier, thread};

#[test]
fn the_limit_is_granted_and_one_byte_more_is_refused_with_every_figure() {
    let budget = Budget::new("b", 100);
    let most = budget.charge(100).unwrap();
    let refused = budget.charge(1).unwrap_err();
    assert_eq!(
        refused,
        OutOfBudget {
            budget: "b",
            requested: 1,
            current: 100,
            remaining: 0,
            limit: 100,
            elsewhere: HeldElsewhere::default(),
        }
    );
    drop(most);
    assert_eq!(budget.charge(u64::MAX).unwrap_err().remaining, 100);
    assert_eq!(budget.used(), 0, "a refusal charges nothing");
}

#[test]
fn of_two_reservations_that_do_not_both_fit_one_wins() {
    let budget = Budget::new("b", 100);
    let start = Barrier::new(2);
    let won = thread::scope(|s| {
        let race = || {
            start.wait();
            budget.reserve(60).ok()
        };
        let (a, b) = (s.spawn(race), s.spawn(race));
        let both = [a.join().unwrap(), b.join().unwrap()];
        assert_eq!(budget.used(), 60);
        both.iter().flatten().count()
    });
    assert_eq!(won, 1);
    assert_eq!(budget.used(), 0);
}

#[test]
fn a_partly_drawn_reservation_returns_the_rest_once_in_either_drop_order() {
    for charge_first in [true, false] {
        let budget = Budget::new("b", 100);
        let mut held = budget.reserve(80).unwrap();
        let drawn = held.draw(30).unwrap();
        assert_eq!((held.remaining(), budget.used()), (50, 80));
        if charge_first {
            drop(drawn);
            assert_eq!(budget.used(), 50);
            drop(held);
        } else {
            drop(held);
            assert_eq!(budget.used(), 30);
            drop(drawn);
        }
        assert_eq!(budget.used(), 0);
    }
}

#[test]
fn a_draw_beyond_the_reservation_is_refused_and_takes_nothing() {
    let budget = Budget::new("b", 100);
    let mut held = budget.reserve(10).unwrap();
    assert_eq!(held.draw(11).unwrap_err().remaining, 10);
    assert_eq!((held.remaining(), budget.used()), (10, 10));
}

#[test]
fn a_limit_that_is_lowered_refuses_until_enough_is_given_back() {
    let budget = Budget::new("b", 100);
    let most = budget.charge(80).unwrap();
    assert_eq!(budget.set_limit(50), 30, "the excess is told");
    assert!(budget.charge(1).is_err());
    assert_eq!(budget.remaining(), 0);
    drop(most);
    assert!(budget.charge(50).is_ok());
}

#[test]
fn the_peak_is_the_most_that_was_charged_and_starts_anew_when_reset() {
    let budget = Budget::new("b", 100);
    drop((budget.charge(40).unwrap(), budget.charge(30).unwrap()));
    let kept = budget.charge(20).unwrap();
    assert_eq!(budget.peak(), 70);
    budget.reset_peak();
    assert_eq!(budget.peak(), 20);
    drop(kept);
}

#[test]
fn charges_of_two_budgets_do_not_merge() {
    let (a, b) = (Budget::new("a", 10), Budget::new("b", 10));
    let mut charge = a.charge(4).unwrap();
    let other = charge.merge(b.charge(5).unwrap()).unwrap_err();
    assert_eq!((a.used(), b.used(), other.bytes()), (4, 5, 5));
    charge.merge(a.charge(3).unwrap()).unwrap();
    assert_eq!((charge.bytes(), a.used()), (7, 7));
}

/// An account kept as the difference of two readings of a shared counter would drift here.
#[test]
fn concurrent_charges_of_many_sizes_leave_exactly_nothing_and_never_pass_the_limit() {
    let budget = Budget::new("b", 1000);
    thread::scope(|s| {
        for seed in 1..=8u64 {
            let budget = &budget;
            s.spawn(move || {
                let mut state = seed;
                let mut held: Vec<Charge> = Vec::new();
                for _ in 0..if cfg!(miri) { 60 } else { 4000 } {
                    state = state
                        .wrapping_mul(6_364_136_223_846_793_005)
                        .wrapping_add(1_442_695_040_888_963_407);
                    if held.len() > 4 || state >> 63 == 1 {
                        held.pop();
                    } else if let Ok(charge) = budget.charge(state >> 56) {
                        held.push(charge);
                    }
                    assert!(budget.used() <= 1000);
                }
            });
        }
    });
    assert_eq!(budget.used(), 0);
    assert!(budget.peak() <= 1000);
}

#[test]
fn budgets_named_at_run_time_keep_their_names_however_many_there_are() {
    let root = Budget::unlimited("all tenants");
    let name_of = |n: u32| format!("tenant {}", n % (if cfg!(miri) { 9 } else { 70_000 }));
    for n in 0..if cfg!(miri) { 20 } else { 140_000 } {
        let tenant = root.child(name_of(n), 1);
        assert_eq!(tenant.name(), name_of(n));
        assert_eq!(tenant.charge(2).unwrap_err().budget, name_of(n));
    }
    let [one, same] = [(); 2].map(|()| root.child(String::from("the same"), 1).name());
    assert!(std::ptr::eq(one, same), "a name is stored once");
    assert_ne!(aquifer_core::Tag::named("a tag after all these"), aquifer_core::Tag::OTHER);
}
