//! The program of plans, from seeds.

use aquifer_programs::{plan, program::seeded};

#[test]
fn no_seeded_program_breaks_a_promise_of_a_pool_with_a_plan() {
    for seed in 0..80 {
        plan::run(&seeded(seed, 60 + seed as usize * 3));
    }
}
