//! Routing scopes, which determine the allocations that are routed.

use super::Route;
use std::{
    fmt,
    panic::{RefUnwindSafe, UnwindSafe},
};

/// A routing scope of one thread, stored on its stack.
#[derive(Clone, Copy)]
pub(crate) struct Scope {
    pub(super) route: &'static dyn Route,
    /// Minimum bytes of a routed allocation.
    pub(super) at_least: usize,
}

// A route does not unwind, so no inconsistent state of one can be observed.
impl UnwindSafe for Scope {}
impl RefUnwindSafe for Scope {}

impl fmt::Debug for Scope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Scope").field("at_least", &self.at_least).finish_non_exhaustive()
    }
}
