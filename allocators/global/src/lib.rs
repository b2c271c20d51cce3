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
//! | [`account`] | live bytes, peak, counts and the cap: [`stats`], [`set_cap`], [`allocated_under`] |
//! | [`route`](mod@route) | scopes whose allocations another allocator serves: [`register`], [`route()`], [`unrouted`] |
//!
//! A process has one global allocator, so its account and its routes are the process's: they are free functions, and a
//! library can ask them without knowing the name of the program's static. [`is_installed`] says whether there is
//! anything to ask.
//!
//! # How it counts
//! Every thread prepays: it takes 64 KiB from the shared account at once and lives off this *change*.
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
//! - **`live` is exact** whenever nobody is inside a call: nothing is batched that could be lost, since a slot
//!   outlives its thread, and a thread that ends returns its change and leaves the slot to the next one.
//! - **The cap is never exceeded**, not for an instant: charged bytes never pass it, and live ones never pass those. It
//!   may refuse early, by what *other* threads hold as change: 128 KiB each at most. A single thread gets its cap to
//!   the byte.
//! - **The peak is never below the truth**, and above it by at most the change, 128 KiB a thread.
//!
//! What is counted is what was asked for, not what the allocator below rounds it to.
//!
//! # What it does not know
//! Whose a block is when it is freed. That would take a header in each block, and costs more than all the rest
//! together. So bytes are counted by [tag](aquifer_core::Tag) as they are allocated ([`allocated_under`]), and whoever
//! wants the live bytes of one part of a program routes that part to an allocator which counts.
//!
//! # Where it may be called
//! Everywhere: before `main`, in destructors of thread-locals, from threads that Rust has not made, in a forked child.
//! It allocates nothing for itself from the allocator it wraps, never calls itself, takes no lock, and does not unwind.
//! It relies on the C library for the destructors of thread-locals, as Rust does on Linux with glibc.

pub mod account;
pub mod allocator;
mod here;
pub mod route;

pub use account::{Allocated, Stats, allocated_under, cap, is_installed, reset_peak, set_cap, stats};
pub use allocator::Global;
pub use route::{Over, Route, RouteId, RoutesFull, register, route, unrouted};
