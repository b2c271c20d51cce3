//! Scopes whose allocations are served by another allocator.
//!
//! Example: a program needs the contents of a file in pinned memory, and the library that reads it
//! returns a plain `Vec<u8>`. The program runs the call in a scope. Allocations on its thread
//! there, of a given size or more, then come from a [`Route`]. The `Vec` can be grown and freed
//! later by any thread, inside or outside a scope: every free finds the owner by address.
//!
//! ```text
//!   alloc    in a scope, and large enough? ── yes ─► the route ── refuses ─┐
//!                 └──────────── no ───────────────────────────────────────┴─► the wrapped allocator
//!   free     address in the window of all routes? ── yes ─► a route's own? ── yes ─► that route
//!                 └──────────── no ────────────────────────────┴─ no ─────► the wrapped allocator
//! ```
//!
//! Routes are registered for the life of the process. Without any route, a free costs two loads and
//! a comparison.
//!
//! # Within a route
//! - A route may allocate in any of its methods. Scopes are disabled on that thread during the
//!   call, so the route is not called recursively.
//! - If a route's method frees a routed block, that free is deferred until the method returns. So a
//!   thread never enters a route twice, and a route may hold a lock.
//! - Other functions of a route, which its users call in a scope, should use [`unrouted`] for their
//!   bookkeeping.

mod deferred;
mod over;
mod probe;
mod scoped;
mod serve;
mod table;

pub use crate::scope::Route;
pub use over::Over;
pub use probe::is_installed;
pub use scoped::{Context, capture, route, unrouted};
pub use table::{RouteId, RoutesFull, register};

pub(crate) use scoped::scoped;
pub(crate) use serve::{Reallocation, allocate, allocate_zeroed, deallocate, figures, reallocate};
