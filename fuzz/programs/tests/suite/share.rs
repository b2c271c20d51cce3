//! The program of messages between processes that share blocks, from seeds.

use aquifer_programs::{program::seeded, share};

#[test]
fn no_seeded_program_breaks_a_promise_of_messages_with_descriptors() {
    for seed in 0..24 {
        share::run(&seeded(seed, 400));
    }
}
