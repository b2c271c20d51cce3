//! Tests of every policy, by table and by property.

use super::*;
use proptest::prelude::*;

fn candidates(free: &[u64]) -> Vec<Candidate<'static>> {
    let candidate = |(index, &free)| Candidate::new(index, DeviceId(index as u32), free, 100);
    free.iter().enumerate().map(candidate).collect()
}

fn one() -> PlacementRequest {
    PlacementRequest::bytes(1)
}

/// Returns the devices that are taken in the first turns.
fn picks(policy: &Policy, candidates: &[Candidate<'_>], turns: u64, devices: usize) -> Vec<usize> {
    (0..turns).map(|turn| policy.pick(&one(), candidates, turn, devices).unwrap()).collect()
}

#[test]
fn each_policy_picks_the_device_of_its_table_row() {
    let mut some = candidates(&[50, 90, 20, 90, 70]);
    some[4].total = 71;
    some[2].compute_capability = (9, 0);
    some[3].compute_capability = (8, 9);
    some[0].far = 20;
    some.iter_mut().skip(1).for_each(|c| c.far = 10);
    let table = [
        (Policy::RoundRobin, 0),
        (Policy::LeastLoaded, 4),
        (Policy::MostFree, 1),
        (Policy::BestFit, 2),
        (Policy::BestCompute, 2),
        (Policy::Near, 1),
        (Policy::Affinity, 1),
    ];
    for (policy, expected) in table {
        assert_eq!(policy.pick(&one(), &some, 0, 5), Some(expected), "{policy:?}");
        assert_eq!(policy.pick(&one(), &[], 0, 5), None, "{policy:?}");
    }
}

#[test]
fn ties_go_to_the_lowest_index() {
    for policy in [
        Policy::LeastLoaded,
        Policy::MostFree,
        Policy::BestFit,
        Policy::BestCompute,
        Policy::Near,
        Policy::Affinity,
    ] {
        assert_eq!(policy.pick(&one(), &candidates(&[30; 4]), 9, 4), Some(0), "{policy:?}");
    }
}

#[test]
fn round_robin_takes_devices_in_turn_and_skips_absent_ones() {
    let all = candidates(&[50; 3]);
    assert_eq!(picks(&Policy::RoundRobin, &all, 4, 3), [0, 1, 2, 0]);
    assert_eq!(picks(&Policy::RoundRobin, &all[1..], 4, 3), [1, 1, 2, 1]);
}

#[test]
fn weights_hold_in_every_run_of_turns() {
    let weighted = Policy::weighted([(DeviceId(1), 5), (DeviceId(2), 2)]);
    let picks = picks(&weighted, &candidates(&[50; 3]), 8000, 3);
    for run in picks.chunks(80) {
        for (index, weight) in [1, 5, 2].into_iter().enumerate() {
            let count = run.iter().filter(|&&pick| pick == index).count() as i32;
            assert!(
                (count - 10 * weight).abs() <= 3,
                "{count} of 80 for a weight of {weight} of 8"
            );
        }
    }
}

#[test]
fn a_device_without_weight_is_the_last_resort() {
    let two = candidates(&[50; 2]);
    let weighted = Policy::weighted([(DeviceId(0), 0)]);
    assert_eq!(picks(&weighted, &two, 4, 2), [1; 4]);
    assert_eq!(picks(&weighted, &two[..1], 2, 2), [0; 2]);
    let Policy::Weighted(weights) = weighted else { unreachable!() };
    assert_eq!((weights.of(DeviceId(0)), weights.of(DeviceId(1))), (0, 1));
}

#[test]
fn the_order_of_a_custom_policy_is_validated() {
    let all = candidates(&[50; 3]);
    let order = |named: &'static [u32]| {
        let policy =
            Policy::custom("a test", move |_, _| named.iter().copied().map(DeviceId).collect());
        let Policy::Custom(custom) = policy else { unreachable!() };
        let order = custom.order(&one(), &all[1..]).unwrap();
        order.iter().map(|candidate| candidate.index).collect::<Vec<_>>()
    };
    assert_eq!(order(&[2, 1]), [2, 1]);
    assert_eq!(order(&[0, 9, 2, 2, 1, 2]), [2, 1], "not admitted, unknown, twice");
    assert!(order(&[]).is_empty());
    let panics = Policy::custom("a test", |_, _| panic!("on purpose"));
    assert_eq!(panics.pick(&one(), &all, 0, 3), None);
}

#[test]
fn every_constraint_is_enforced() {
    let [small, large] = candidates(&[10, 90])[..] else { unreachable!() };
    assert!(
        !PlacementRequest::bytes(20).admits(&small) && PlacementRequest::bytes(20).admits(&large)
    );
    assert!(!one().min_free(95).admits(&large));
    assert!(!one().min_compute((10, 0)).admits(&large));
    assert!(!one().only([small.device]).admits(&large));
    assert!(!one().not_on([large.device]).admits(&large));
    assert!(!one().reaching([small.device]).admits(&large));
    let peers = [small.device];
    assert!(
        one().reaching([small.device, large.device]).admits(&Candidate { peers: &peers, ..large })
    );
}

proptest! {
    /// Keys of a device that leaves move elsewhere and return with it; no other key moves.
    #[test]
    fn a_removed_device_moves_only_its_own_keys(
        devices in prop::collection::btree_set(0u32..200, 2..20),
        leaves in any::<prop::sample::Index>(),
        keys in prop::collection::vec(any::<u64>(), 1..50),
    ) {
        let all: Vec<_> = devices.iter().enumerate()
            .map(|(index, &device)| Candidate::new(index, DeviceId(device), 50, 100)).collect();
        let gone = leaves.index(all.len());
        let rest: Vec<_> = all.iter().copied().filter(|c| c.index != gone).collect();
        for key in keys {
            let pick = |some: &[Candidate<'_>]| Policy::Affinity.pick(&one().key(key), some, 0, all.len()).unwrap();
            let (before, after) = (pick(&all), pick(&rest));
            prop_assert!(before == after || before == gone);
        }
    }

    /// The pick is one of the candidates, and none is better by the policy's own measure.
    #[test]
    fn the_pick_is_the_best_candidate(
        free in prop::collection::vec(0u64..100, 1..64),
        totals in prop::collection::vec(100u64..1000, 64),
        turn in any::<u64>(),
        some in prop::collection::vec(any::<bool>(), 64),
    ) {
        let mut all = candidates(&free);
        all.iter_mut().for_each(|c| c.total = totals[c.index]);
        all.retain(|c| some[c.index]);
        let pick = |policy: &Policy| {
            let index = policy.pick(&one().key(turn), &all, turn, free.len())?;
            all.iter().find(|c| c.index == index)
        };
        for policy in [Policy::RoundRobin, Policy::weighted([]), Policy::Affinity, Policy::Near] {
            prop_assert_eq!(pick(&policy).is_some(), !all.is_empty());
        }
        if let Some(best) = pick(&Policy::MostFree) {
            prop_assert!(all.iter().all(|c| (c.free, best.index) <= (best.free, c.index.max(best.index))));
        }
        if let Some(best) = pick(&Policy::BestFit) {
            prop_assert!(all.iter().all(|c| c.free >= best.free));
        }
        if let Some(best) = pick(&Policy::LeastLoaded) {
            let part = |c: &Candidate<'_>, of: &Candidate<'_>| u128::from(c.total - c.free) * u128::from(of.total);
            prop_assert!(all.iter().all(|c| part(best, c) <= part(c, best)));
        }
    }
}
