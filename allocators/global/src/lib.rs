//! A global allocator that counts, caps and routes allocations. Part of aquifer; promises no
//! stability beyond what aquifer re-exports.
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
//! | module | contains |
//! |---|---|
//! | [`allocator`] | [`Global`]: the wrapper itself |
//! | [`account`] | live bytes, peak, counts: [`stats`]; by tag: [`held_under`], [`allocated_under`], [`top`]; the cap: [`set_cap`] |
//! | [`report`](mod@report) | reports, also at exit: [`report()`], [`report_at_exit`] |
//! | [`route`](mod@route) | scopes whose allocations another allocator serves: [`register`], [`route()`], [`unrouted`] |
//!
//! A process has one global allocator, so accounts and routes are global to the process. They are
//! free functions, so a library can use them without the name of the program's static.
//! [`is_installed`] returns whether the program uses this allocator.
//!
//! # Accounting
//! Every thread prepays: it charges 64 KiB to the shared account at once, and debits its
//! allocations from this *credit*.
//!
//! ```text
//!   charged  ═══════════════════════════════════════════╗ ≤ cap        one atomic, touched every 64 KiB
//!   thread 1 │ live blocks ███████████ │ credit ░░░░     ║
//!   thread 2 │ live blocks ████ │ credit ░░              ║              a slot each, touched by its thread alone
//!   live     = charged − the credit of all threads
//! ```
//!
//! So an allocation costs one subtraction in thread-local memory, with these guarantees:
//!
//! - **`live` is exact** whenever no thread is inside a call. No batched counts can be lost: a slot
//!   outlives its thread, and a thread that ends returns its credit and leaves the slot to another
//!   thread.
//! - **The cap is never exceeded**, not even briefly: charged bytes never exceed it, and live bytes
//!   never exceed charged bytes. An allocation may be refused early, by the credit of *other*
//!   threads, at most 128 KiB each. A single thread can use its cap to the byte.
//! - **The peak is never too low**, and too high by at most the credit, 128 KiB per thread.
//!
//! Requested sizes are counted, not the rounded sizes of the wrapped allocator.
//!
//! # Tags of blocks
//! Bytes are counted by [tag](aquifer_core::Tag) when they are allocated ([`allocated_under`]). To
//! count what a tag still *holds*, the tag of a block must be known when it is freed. The program
//! chooses this with the type of its allocator: [`Tracked`] writes two bytes behind every block.
//!
//! ```
//! use aquifer::{Global, global::Tracked};
//!
//! #[global_allocator]
//! static GLOBAL: Global<std::alloc::System, Tracked> = Global::new();
//! ```
//!
//! | | known at a free | cost |
//! |---|---|---|
//! | [`Uncounted`] | nothing; routes work | two loads and a comparison |
//! | [`Counted`], the default | totals | about 2 ns a pair |
//! | [`Tracked`] | the tag | about 5 ns a pair more, 2 B a block |
//!
//! With a table by address instead, every free would have to search the table, which is usually a
//! cache miss. The footer behind a block is usually a hit. A header before the block would have to
//! be as large as the block's alignment.
//!
//! # Where it may be called
//! It may be called wherever the wrapped allocator may be called: before `main`, in destructors of
//! thread-locals, on threads that Rust has not created, in a forked child, and in a signal handler
//! that does not interrupt an allocation.
//!
//! - It allocates nothing for itself from the allocator that it wraps, and never calls itself.
//! - It takes no lock and does not unwind.
//! - It relies on the C library for the destructors of thread-locals, as Rust does on Linux with
//!   glibc.

pub mod account;
pub mod allocator;
mod footer;
mod not_installed;
pub mod report;
pub mod route;
mod scope;
mod slots;
mod thread_state;

pub use account::{
    Allocated, Consumer, Held, Stats, allocated_under, cap, held_under, publish_status, reset_peak,
    set_cap, stats, top,
};
pub use allocator::{Counted, Global, Tracked, Uncounted};
pub use report::{BadReportTo, Report, ReportTo, report, report_at_exit};
pub use route::{
    Context, Over, Route, RouteId, RoutesFull, capture, is_installed, register, route, unrouted,
};
