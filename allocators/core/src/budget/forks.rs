//! Budgets in a process that forks.
//!
//! A child of a fork has one thread. The lock of a tree that another thread of its parent held at
//! that moment would stay taken for ever there, and the figures that it guards half changed. So the
//! forking thread takes the locks of all trees before the fork, and both processes give them back
//! after it. This crate makes no system calls: `aquifer_driver::forks` has the C library call these
//! two, as soon as a driver or a pool of host memory is there.
//!
//! Nothing is allocated meanwhile: an allocation may be charged. A thread that holds the lock of a
//! tree takes no other lock and calls nothing, so the locks can be waited for in any order.

use super::node::{Node, ROOTS};
use std::cell::Cell;

thread_local! {
    /// How many trees this thread holds while it forks. Const and without a destructor: nothing is allocated for it.
    static HELD: Cell<usize> = const { Cell::new(0) };
}

fn roots() -> impl Iterator<Item = &'static Node> {
    ROOTS.iter()
}

/// Takes the locks of all trees of budgets that there are. Blocks for as long as charges take. To
/// be followed by [`after`] on the same thread, and by no other call of a budget before that.
pub fn before() {
    // A tree that is made from here on is known to another thread alone, which a child does not
    // have.
    let held = roots().map(|root| root.tree.lock.enter().keep()).count();
    HELD.set(held);
}

/// Gives back what [`before`] has taken on this thread, or on the thread of the parent that forked.
pub fn after() {
    // Lists of trees only grow at their end.
    roots().take(HELD.replace(0)).for_each(|root| root.tree.lock.give_back());
}
