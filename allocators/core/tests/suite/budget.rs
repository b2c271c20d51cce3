//! Tests of the guarantees of a budget, to the byte.

use aquifer_core::{Budget, OutOfBudget, error::HeldElsewhere};

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
fn charges_of_two_budgets_do_not_merge() {
    let (a, b) = (Budget::new("a", 10), Budget::new("b", 10));
    let mut charge = a.charge(4).unwrap();
    let other = charge.merge(b.charge(5).unwrap()).unwrap_err();
    assert_eq!((a.used(), b.used(), other.bytes()), (4, 5, 5));
    charge.merge(a.charge(3).unwrap()).unwrap();
    assert_eq!((charge.bytes(), a.used()), (7, 7));
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
