//! The command line as a person runs it: what it prints where, and how it exits.
//!
//! | module | contents |
//! |---|---|
//! | `program` | replays, snapshots, completions, errors |
//! | `plan`, `report`, `stage`, `bench` | the commands of these names |
//! | `run` | programs under `aquifer run`, with a stand-in for the driver |
//! | `foreign` | hostile names in every command |
//! | `processes` | `aquifer top` and `aquifer metrics` over other processes |
//! | `terminal` | a program on a pseudo-terminal |
//! | `support` | the program, its data, folders of a test's own |

#![expect(
    clippy::expect_used,
    clippy::panic,
    reason = "a test that cannot go on fails, wherever it is"
)]

mod bench;
mod foreign;
mod plan;
mod processes;
mod program;
mod report;
mod run;
mod stage;
mod support;
mod terminal;
