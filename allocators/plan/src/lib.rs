//! Plans: a place for each block of a recorded program, in as few addresses as possible. Part of
//! aquifer; promises no stability.
//!
//! A program that allocates the same blocks in the same order each time needs no search for memory
//! while it runs. A [`Plan`] is made once, from a trace of the program: each block has an offset,
//! the range has the size of the most live bytes or little more, and for each reuse of addresses
//! across streams the plan has an edge that says what must be complete first.
//!
//! | module | contents |
//! |---|---|
//! | `block` | blocks with the steps of their lives, the checks on them, and edges |
//! | `trace` | the blocks of a trace, with the feature `read` |
//! | `occupancy` | which addresses are occupied during which part of time |
//! | `range_set` | a set of addresses |
//! | `search` | the search for an order of placement |
//! | `random` | repeatable random numbers |
//! | `reuse` | which edges are needed, and the check that no live blocks overlap |
//! | `plan` | the plan |
//! | `cursor` | follows a plan while its program runs again, in a loop or once |
//! | `expectation` | what a plan says about its blocks, for a cursor |
//! | `last_users` | which blocks used which addresses last, for a cursor |
//! | `file` | plan files |
//! | `checksum` | CRC-64 |
//! | `limits` | what a plan may have at most |
//! | `error` | errors |
//!
//! # Cost
//! Placing `n` blocks once takes about `n log n` steps for each of the ranges that a search passes,
//! of which a dense plan has few: 40 ms for 30,000 blocks of a training, and 7 s and 130 MB of
//! memory for 200,000 blocks of random sizes and lives, on one core.
//!
//! # Plan files
//! All numbers are little-endian. A file is a header, the blocks, the edges and a checksum, with
//! nothing between or after them.
//!
//! | bytes | of the header |
//! |---|---|
//! | 0–7 | `aqplan\r\n` |
//! | 8–11 | the version: 1 |
//! | 12–15 | the bytes of a unit: 512 |
//! | 16–19 | the number of blocks, from 1 to [`MAX_BLOCKS`] |
//! | 20–23 | the number of edges, at most four for each block |
//!
//! A block has six numbers of 32 bits: its size in units, its offset in units, its first step, its
//! end ([`NEVER`] if it is never freed), its stream, and 1 if it is shared, else 0. Blocks are in
//! the order of their first steps, and no two have the same.
//!
//! An edge has two numbers of 32 bits, which count blocks from 0: the one before, and the one
//! after. Edges are in the order of the one after and then of the one before.
//!
//! The last eight bytes are the CRC-64/XZ of all bytes before them.
//!
//! A reader refuses a file whose length does not follow from its header, whose checksum differs,
//! whose live blocks overlap, or whose edges are not exactly those that its blocks need.
#![forbid(unsafe_code)]

mod block;
mod cursor;
mod error;
mod expectation;
mod file;
mod last_users;
mod occupancy;
mod plan;
mod range_set;
mod reuse;
mod search;
#[cfg(feature = "read")]
mod trace;

pub use block::{PlanBlock, PlanEdge, PlannedBlock};
pub use cursor::{CursorCounters, PlanAnswer, PlanCursor};
pub use error::{MAX_BLOCK, MAX_BLOCKS, MAX_TOP, NEVER, PlanError};
pub use file::PlanFileError;
pub use plan::Plan;
pub use search::PlanOptions;
