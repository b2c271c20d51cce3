//! A failing program is made short, and fails still.

use aquifer_programs::{minimise::minimise, program::seeded, targets::TARGETS};

#[test]
fn what_is_left_of_a_program_is_what_makes_it_fail() {
    let fails = |bytes: &[u8]| {
        let first = bytes.iter().position(|&byte| byte > 200);
        first.is_some_and(|first| bytes[first..].windows(2).any(|two| two[0] == 7 && two[1] > 9))
    };
    let mut short = 0;
    for seed in 0..200 {
        let mut bytes = seeded(seed, 500);
        bytes[seed as usize] = 201;
        bytes[300] = 7;
        bytes[301] = 99;
        assert!(fails(&bytes));
        let least = minimise(&bytes, 20_000, fails);
        assert!(fails(&least));
        short += usize::from(least == [201, 7, 10]);
    }
    assert!(short > 190, "{short} of 200 are as short as can be");
}

#[test]
fn no_more_programs_are_tried_than_was_said() {
    let mut tried = 0;
    minimise(&[1; 100], 30, |_| {
        tried += 1;
        true
    });
    assert!(tried <= 30, "tried {tried}");
}

#[test]
fn targets_have_names_of_their_own() {
    assert!(TARGETS.is_sorted_by(|one, other| one.name < other.name));
}
