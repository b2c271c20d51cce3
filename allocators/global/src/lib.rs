//! A global allocator that counts, caps and routes.
//!
//! ```
//! use aquifer_global as global;
//!
//! #[global_allocator]
//! static GLOBAL: global::Global = global::Global::new();
//!
//! let before = global::stats();
//! let text = String::from("counted to the byte");
//! assert_eq!(global::stats().live, before.live + text.capacity() as u64);
//! ```
//!
//! | module | holds |
//! |---|---|
//! | [`allocator`] | [`Global`]: the wrapper itself |
//! | [`account`] | live bytes, peak, counts: [`stats`]; by tag: [`held_under`], [`allocated_under`], [`top`]; the caps: [`set_cap`], [`set_soft_cap`], [`on_soft_cap`] |
//! | [`context`] | tags and routes for work on other threads: [`capture`] |
//! | [`sample`] | where what is held was allocated: `sample_every` with the feature `stacks`, [`stacks`] |
//! | [`report`](mod@report) | all of it in words, also at exit: [`report()`], [`report_at_exit`], `AQUIFER_GLOBAL_REPORT` |
//! | [`route`](mod@route) | scopes whose allocations another allocator serves: [`register`], [`route()`], [`unrouted`] |
//!
//! A process has one global allocator, so its account and its routes are the process's: they are
//! free functions, and a library can ask them without knowing the name of the program's static.
//! [`is_installed`] says whether there is anything to ask.
//!
//! # How it counts
//! Every thread prepays: it takes 64 KiB from the shared account at once and lives off this
//! *change*.
//!
//! ```text
//!   charged  ═══════════════════════════════════════════╗ ≤ cap        one atomic, touched every 64 KiB
//!   thread 1 │ live blocks ███████████ │ change ░░░░     ║
//!   thread 2 │ live blocks ████ │ change ░░              ║              a slot each, touched by its thread alone
//!   live     = charged − the change of all threads
//! ```
//!
//! So an allocation costs a subtraction in memory of the thread's own, and yet:
//!
//! - **`live` is exact** whenever nobody is inside a call: nothing is batched that could be lost,
//!   since a slot outlives its thread, and a thread that ends returns its change and leaves the
//!   slot to the next one.
//! - **The cap is never exceeded**, not for an instant: charged bytes never pass it, and live ones
//!   never pass those. It may refuse early, by what *other* threads hold as change: 128 KiB each at
//!   most. A single thread gets its cap to the byte.
//! - **The peak is never below the truth**, and above it by at most the change, 128 KiB a thread.
//!
//! What is counted is what was asked for, not what the allocator below rounds it to.
//!
//! # Whose a block is
//! Bytes are counted by [tag](aquifer_core::Tag) as they are allocated ([`allocated_under`]). What
//! a tag still *holds* takes knowing at a free whose the block was, and that is a choice of the
//! program's, made with the type of its allocator: [`Tracked`] writes four bytes behind every
//! block.
//!
//! ```
//! use aquifer_global::{Global, Tracked};
//!
//! #[global_allocator]
//! static GLOBAL: Global<std::alloc::System, Tracked> = Global::new();
//! ```
//!
//! | | knows at a free | costs |
//! |---|---|---|
//! | [`Uncounted`] | nothing; routes work | two loads and a comparison |
//! | [`Counted`], the default | totals | about 2 ns a pair |
//! | [`Tracked`] | whose it is, and whether its call stack was sampled | about 5 ns a pair more, 4 B a block, and the cache line that they lie in |
//!
//! A table by address would leave blocks as they are, but every free, of tagged blocks or not,
//! would have to look there: a miss of the cache where this is most often a hit. A word before the
//! block would have to be as large as the block's alignment.
//!
//! # Where it may be called
//! Everywhere that the wrapped allocator may: before `main`, in destructors of thread-locals, from
//! threads that Rust has not made, in a forked child, and in a signal handler that does not
//! interrupt an allocation. It allocates nothing for itself from the allocator it wraps, never
//! calls itself, takes no lock, and does not unwind. It relies on the C library for the destructors
//! of thread-locals, as Rust does on Linux with glibc.

pub mod account;
pub mod allocator;
pub mod context;
mod here;
mod note;
pub mod report;
pub mod route;
pub mod sample;

pub use account::{
    Allocated, Consumer, Held, SoftCap, Stats, allocated_under, cap, held_under,
    is_soft_cap_exceeded, on_soft_cap, reset_peak, set_cap, set_soft_cap, soft_cap, stats, top,
};
pub use allocator::{Counted, Global, Tracked, Uncounted};
pub use context::{Context, capture};
pub use report::{BadReportTo, Report, ReportTo, report, report_at_exit};
pub use route::{Over, Route, RouteId, RoutesFull, is_installed, register, route, unrouted};
#[cfg(feature = "stacks")]
pub use sample::sample_every;
pub use sample::{Stack, stacks};
