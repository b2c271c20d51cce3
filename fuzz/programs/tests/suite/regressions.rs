//! Programs that once broke a promise, each by the name of the promise.
//!
//! `ci/soak` prints the seed and the length of what it finds. The bytes are those of
//! `program::seeded(seed, length)`.

use aquifer_programs::{program::seeded, targets};

macro_rules! regressions {
    ($($(#[$meta:meta])* $name:ident: $target:literal [$(($seed:literal, $length:literal)),+ $(,)?];)+) => {
        $($(#[$meta])* #[test]
        fn $name() {
            let target = targets::find($target).expect("a target of this name");
            for (seed, length) in [$(($seed, $length)),+] {
                println!("{} {seed} {length}", target.name);
                (target.run)(&seeded(seed, length));
            }
        })+
    };
}

regressions! {
    a_block_freed_before_is_refused_as_stale_whatever_its_range_has_become_since: "heap" [
        (7002522, 930),
        (7004475, 865),
        (7010749, 2313),
        (7016129, 1792),
        (7023805, 1935),
        (7027065, 1923),
        (7030248, 1698),
        (7040028, 1662),
        (7044863, 978),
        (1795365888510791935, 2262),
        (13679457532755276395, 2649),
    ];
    a_lease_grants_no_more_than_its_budget_where_guarantees_fill_a_lowered_limit: "budget" [
        (14342794408075834852, 7644),
    ];
    a_claim_of_no_bytes_is_granted_where_others_hold_more_than_the_capacity: "ledger" [
        (6579279337601419967, 6680),
    ];
    a_file_whose_version_is_written_again_is_no_damaged_one: "ledger" [
        (5838626569123150138, 3587),
    ];
    noise_in_the_figure_of_others_use_is_gone_once_claims_have_stood_still: "ledger" [
        (1082200053058387672, 5574),
        (9824187624041739793, 4892),
    ];
    a_small_block_may_take_a_handle_that_is_still_in_use_and_longer_than_it_needs: "device" [
        (3451306073315346828, 12499),
    ];
    a_small_block_takes_what_is_left_of_a_page_where_no_new_one_can_be_had: "device" [
        (11117004601979016457, 7586),
    ];
    memory_of_the_driver_that_is_freed_during_a_use_waits_for_its_own_ended_stream_too: "device" [
        (6132999379926653495, 2265),
    ];
    a_checked_block_whose_stream_ended_is_no_leak: "checked" [
        (17936868116424951412, 628),
    ];
    a_group_has_room_where_it_was_held_over_the_same_devices: "placement" [
        (2358099568764263775, 13674),
    ];
}
