//! Tests of budgets in children of a fork, which is made while other threads charge.
#![allow(clippy::unwrap_used, reason = "a step that fails fails its test")]
#![expect(unsafe_code, reason = "forks")]

use aquifer_core::Budget;
use aquifer_driver::forks;
use nix::libc;
use std::{
    sync::atomic::{AtomicBool, Ordering},
    thread,
};

/// Stops the threads of a scope, also when its test fails.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn a_forked_child_charges_and_finds_consistent_figures() {
    forks::hold_budgets();
    let stop = AtomicBool::new(false);
    let (root, other) = (Budget::new("process", 1 << 30), Budget::new("another tree", 1 << 30));
    let pool = root.child("pool", 1 << 30).child("tenant", 1 << 30);
    let standing = pool.charge(1 << 20).unwrap();
    thread::scope(|scope| {
        let _stop = Stop(&stop);
        for budget in [&pool, &pool, &other] {
            // Holds the lock most of the time, also when the process forks.
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    let held: Vec<_> = (0..50).map_while(|_| budget.charge(64).ok()).collect();
                    drop(held);
                }
            });
        }
        for _ in 0..20 {
            // SAFETY: 1. the child allocates nothing, and leaves by `_exit`.
            let child = unsafe { libc::fork() };
            if child == 0 {
                // SAFETY: 1. takes a number. A child that blocks is ended by the alarm.
                unsafe { libc::alarm(20) };
                let charged = pool.charge(1000).is_ok_and(|charge| charge.bytes() == 1000);
                let whole = pool.used() == root.used() && pool.used() >= standing.bytes();
                let also = other.charge(1000).is_ok();
                // SAFETY: 1. ends the child.
                unsafe { libc::_exit(i32::from(!(charged && whole && also))) };
            }
            let mut status = -1;
            // SAFETY: 1. the child belongs to this process, and the status is a local.
            let waited = unsafe { libc::waitpid(child, &raw mut status, 0) };
            assert_eq!(
                (waited, status),
                (child, 0),
                "exit code {}, signal {}",
                status >> 8,
                status & 127
            );
        }
    });
    drop(standing);
    assert_eq!((root.used(), other.used()), (0, 0));
}
