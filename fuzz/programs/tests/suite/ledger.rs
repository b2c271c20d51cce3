//! The program of ledgers, from seeds.

use aquifer_programs::{ledger, program::seeded};

#[test]
fn no_seeded_program_breaks_a_promise_of_ledgers() {
    for seed in 0..40 {
        ledger::run(&seeded(seed, 1200));
    }
}
