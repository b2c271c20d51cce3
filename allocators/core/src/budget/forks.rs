//! Fork safety of budgets.
//!
//! The child of a fork has one thread. If another thread of the parent held a tree's lock at that
//! moment, the lock would stay locked in the child, with the figures half changed. So the forking
//! thread locks all trees before the fork, and both processes unlock them afterwards.
//!
//! This crate makes no system calls. `aquifer_driver::forks` registers these two functions with the
//! C library (`pthread_atfork`) as soon as a driver or a pool of host memory exists.
//!
//! - Nothing allocates between the two calls, since an allocation may be charged.
//! - A thread that holds the lock of a tree takes no other lock and makes no calls, so the locks
//!   may be taken in any order.

use super::node::{Node, ROOTS};
use std::cell::Cell;

thread_local! {
    /// The number of trees that this thread has locked for a fork. `const` and without a
    /// destructor, so that access does not allocate.
    static LOCKED_TREES: Cell<usize> = const { Cell::new(0) };
}

fn roots() -> impl Iterator<Item = &'static Node> {
    ROOTS.iter()
}

/// Locks all trees of budgets. Blocks until running charges are done. The same thread must call
/// [`after`] next, with no other call of a budget in between.
pub fn before() {
    // A tree created from here on is known only to another thread, which the child does not have.
    let locked = roots().map(|root| root.tree.lock.lock().leak()).count();
    LOCKED_TREES.set(locked);
}

/// Unlocks what [`before`] has locked on this thread. In the child, this is the copy of the forking
/// thread.
pub fn after() {
    // Trees are only appended to the list.
    roots().take(LOCKED_TREES.replace(0)).for_each(|root| root.tree.lock.unlock());
}
