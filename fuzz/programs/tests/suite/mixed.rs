//! The program that does everything at once, from seeds.

use aquifer_programs::{
    mixed,
    program::{length, seeded},
};

#[test]
fn a_server_that_does_everything_at_once_breaks_no_promise_in_seeded_programs() {
    for seed in 0..25 {
        mixed::run(&seeded(seed, length(seed)));
    }
}
