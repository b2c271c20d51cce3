//! The fuzz programs without a fuzzer, from a few seeds: the fuzzer tries many more.
//!
//! The programs can share one process: each holds what it needs of the process's state.

mod agree;
mod regressions;

use aquifer_programs::{
    park,
    program::{length, seeded},
    targets::{self, TARGETS},
};

macro_rules! programs {
    ($($name:ident: $target:literal, $count:literal seeds of $length:expr;)+) => {
        $(#[test]
        fn $name() {
            let target = targets::find($target).expect("a target of this name");
            let length: fn(u64) -> usize = $length;
            for seed in 0..$count {
                (target.run)(&seeded(seed, length(seed)));
            }
        })+
    };
}

/// Returns lengths from 40 bytes on.
fn many(seed: u64) -> usize {
    40 + (seed as usize % 32) * 24
}

programs! {
    // As many bytes as a program has choices.
    a_program_for_a_driver_is_right_whenever_its_work_runs: "agree", 40 seeds of |_| 16 << 10;
    no_program_breaks_a_promise_of_arenas_and_wrappers: "arena", 400 seeds of many;
    no_program_breaks_a_promise_of_budgets: "budget", 60 seeds of |_| 1200;
    a_pool_that_checks_its_blocks_finds_nothing: "checked", 30 seeds of |_| 600;
    no_program_breaks_a_promise_of_registered_chunks: "chunks", 120 seeds of |_| 600;
    no_program_breaks_a_promise_of_the_device_pool: "device", 120 seeds of |_| 600;
    no_program_breaks_a_promise_of_the_global_allocator: "global", 150 seeds of
        |seed| 60 + (seed as usize % 40) * 24;
    no_program_breaks_a_promise_of_graphs: "graphs", 120 seeds of |_| 500;
    // Short programs as well as those that reach the limit.
    no_program_breaks_a_promise_of_the_heap: "heap", 100 seeds of
        |seed| 16 + (seed as usize % 64) * 24;
    no_program_breaks_a_promise_of_ledgers: "ledger", 20 seeds of |_| 1200;
    a_server_that_does_everything_at_once_breaks_no_promise: "mixed", 25 seeds of
        |seed| length(seed) / 4;
    no_program_breaks_a_promise_of_pinned_pools: "pinned", 32 seeds of many;
    no_program_breaks_a_promise_of_placement: "placement", 50 seeds of |_| 600;
    no_program_breaks_a_promise_of_a_pool_with_a_plan: "plan", 40 seeds of
        |seed| 60 + seed as usize * 6;
    no_program_breaks_a_promise_of_pools_under_one_budget: "pressure", 32 seeds of many;
    no_program_breaks_a_promise_of_registered_memory: "registered", 80 seeds of |_| 400;
    a_pool_that_is_told_what_to_keep_keeps_its_promises: "retaining", 80 seeds of |_| 600;
    no_program_breaks_a_promise_of_messages_with_descriptors: "share", 12 seeds of |_| 400;
    no_program_breaks_a_promise_of_memory_that_keeps_its_address: "stable", 120 seeds of |_| 500;
    no_program_breaks_a_promise_of_the_stager: "stager", 50 seeds of
        |seed| 40 + (seed as usize % 16) * 24;
}

#[test]
fn no_program_breaks_a_promise_of_parkable_memory() {
    let (mut parks, mut resumes) = (0, 0);
    for seed in 0..80 {
        let (parked, resumed) = park::run(&seeded(seed, 600));
        (parks, resumes) = (parks + parked, resumes + resumed);
    }
    assert!(parks > 160 && resumes > 80, "{parks} parks and {resumes} resumes had blocks to move");
}

#[test]
fn targets_have_names_of_their_own() {
    assert!(TARGETS.is_sorted_by(|one, other| one.name < other.name));
}
