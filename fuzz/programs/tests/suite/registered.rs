//! The program of registered memory, from seeds.

use aquifer_programs::{program::seeded, registered};

#[test]
fn no_seeded_program_breaks_a_promise_of_registered_memory() {
    for seed in 0..200 {
        registered::run(&seeded(seed, 400));
    }
}
