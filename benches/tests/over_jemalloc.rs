//! Over another allocator: the same account, the same tags, the same routes.
//!
//! A binary without a test harness: it counts what the process allocates, so nothing else may.
#![expect(unsafe_code, reason = "an allocator to route to")]
#![expect(clippy::panic, reason = "a test, though not in a harness")]

use aquifer_global::{Global, Tracked};
use tikv_jemallocator::Jemalloc as Other;

#[global_allocator]
static GLOBAL: Global<Other, Tracked> = Global::over(Other);

#[path = "over/all.rs"]
mod all;

fn main() {
    all::run();
}
