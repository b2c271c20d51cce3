//! The heap against a naive model, over random programs.

use proptest::prelude::*;

use crate::shadow::{Op, Shadow};

fn op() -> impl Strategy<Value = Op> {
    let place = || (0..4u8, any::<u16>(), prop_oneof![1..40u16, any::<u16>()]);
    // Mostly small, some up to half a window, and now and then any.
    let units = || prop_oneof![4 => 0..16u16, 3 => 0..48u16, 2 => 0..256u16, 1 => any::<u16>()];
    let stamp = || 0..1000u16;
    prop_oneof![
        3 => (place(), stamp(), any::<bool>()).prop_map(|((window, at, units), stamp, segment)| {
            Op::Add { window, at, units, stamp, segment }
        }),
        2 => place().prop_map(|(window, at, units)| Op::Remove { window, at, units }),
        12 => (units(), any::<u8>(), prop_oneof![4 => Just(0u8), 1 => 0..17u8])
            .prop_map(|(units, short, align)| Op::Alloc { units, short, align }),
        2 => place().prop_map(|(window, at, units)| Op::AllocAt { window, at, units }),
        10 => (any::<u16>(), stamp(), any::<bool>())
            .prop_map(|(which, stamp, by_note)| Op::Free { which, stamp, by_note }),
        1 => (0..4u8, any::<u16>(), any::<u8>())
            .prop_map(|(window, at, inside)| Op::FreeAnywhere { window, at, inside }),
        1 => any::<u16>().prop_map(|which| Op::FreeStale { which }),
        3 => (any::<u16>(), units(), any::<u8>(), stamp())
            .prop_map(|(which, units, short, stamp)| Op::Resize { which, units, short, stamp }),
    ]
}

/// Begins with a whole window, so that most programs have something to place blocks in.
fn program() -> impl Strategy<Value = (usize, Vec<Op>)> {
    let length = if cfg!(miri) { 8 } else { 150 };
    (0..Shadow::configs().len(), 0..4u8, prop::collection::vec(op(), 1..length)).prop_map(
        |(config, window, ops)| {
            let whole = Op::Add { window, at: 0, units: u16::MAX, stamp: 0, segment: false };
            (config, std::iter::once(whole).chain(ops).collect())
        },
    )
}

fn settings() -> ProptestConfig {
    ProptestConfig {
        cases: if cfg!(miri) { 1 } else { 600 },
        // Miri has no file system to keep failures in.
        failure_persistence: None,
        ..ProptestConfig::default()
    }
}

fn run(config: usize, ops: &[Op]) -> Vec<u64> {
    let mut shadow = Shadow::new(Shadow::configs()[config]);
    for &op in ops {
        shadow.apply(op);
    }
    let transcript = std::mem::take(&mut shadow.transcript);
    shadow.finish();
    transcript
}

proptest! {
    #![proptest_config(settings())]

    #[test]
    fn every_promise_holds_after_every_operation((config, ops) in program()) {
        run(config, &ops);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: if cfg!(miri) { 1 } else { 40 }, ..settings() })]

    #[test]
    fn the_same_operations_give_the_same_addresses((config, ops) in program()) {
        prop_assert_eq!(run(config, &ops), run(config, &ops));
    }
}
