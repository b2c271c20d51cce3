//! Level changes: soft limits with hysteresis, and hooks on their changes.
//!
//! ```text
//!   critical ─────────────────╮ up above it ── Critical
//!   critical − slack ─────────╯ down at or below it
//!   soft ─────────────────╮ up above it ────── Warning
//!   soft − slack ─────────╯ down at or below it
//!                                              Nominal
//! ```
//!
//! - A level changes under the tree's lock, together with the bytes.
//! - Hooks are called afterwards, with no lock held, by the thread whose charge or release changed
//!   the level.
//! - One thread at a time calls the hooks of a node, so the last call reports the current level.
//!   Changes that happen during a hook, also by the hook itself, are reported by the same thread
//!   after the hook has returned. Hooks of one node are never nested.

use super::{
    hooks::Hooks,
    level::{Level, LevelChange, Levels, Thresholds},
    node::{Budget, LevelHook, Node},
};
use crate::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed};
use std::sync::Arc;

impl Budget {
    /// Sets the thresholds of this budget's levels. A critical threshold below the soft limit is
    /// raised to it. Calls hooks if this changes the level.
    pub fn set_levels(&self, levels: Levels) {
        let level_changed = {
            let _guard = self.node.tree.lock.lock();
            self.node.thresholds.set(levels);
            let level_changed = self.node.update_level();
            self.node.update_bounds();
            level_changed
        };
        if level_changed {
            self.node.report_level();
        }
    }

    /// Returns the current level.
    #[must_use]
    pub fn level(&self) -> Level {
        Level::from_number(self.node.level.load(Relaxed))
    }

    /// Registers `hook`, which is called after each change of this budget's level until the
    /// registration is dropped.
    ///
    /// No lock of this crate is held during the call. The thread whose charge or release changed
    /// the level calls the hook, so a lock that this thread holds is held during the hook.
    pub fn on_level(&self, hook: Arc<LevelHook>) -> HookRegistration {
        let number = self.node.level_hooks.add(hook);
        HookRegistration { budget: self.clone(), number, is_level_hook: true }
    }

    /// Returns how often a hook or a reclaimer of this budget has panicked.
    #[must_use]
    pub fn panics(&self) -> u64 {
        self.node.level_hooks.panics() + self.node.reclaimers.panics()
    }
}

impl Node {
    /// Returns the bytes above which the level rises, and those below which it falls. Requires the
    /// tree's lock.
    pub(super) fn thresholds(&self) -> (u64, u64) {
        let Thresholds { soft, critical, slack } = &self.thresholds;
        let (soft, critical, slack) =
            (soft.load(Relaxed), critical.load(Relaxed), slack.load(Relaxed));
        // The level falls at or below the difference.
        let down = |threshold: u64| threshold.saturating_sub(slack).saturating_add(1);
        match Level::from_number(self.level.load(Relaxed)) {
            Level::Nominal => (soft, 0),
            Level::Warning => (critical, down(soft)),
            Level::Critical => (u64::MAX, down(critical)),
        }
    }

    /// Updates the level to match `used`. Returns whether it has changed. Requires the tree's lock.
    pub(super) fn update_level(&self) -> bool {
        let before = self.level.load(Relaxed);
        let used = self.used.load(Relaxed);
        // Overlapping hysteresis ranges could oscillate, so at most two steps are taken.
        for _ in 0..2 {
            let (rise, fall) = self.thresholds();
            let level = self.level.load(Relaxed);
            if used > rise {
                self.level.store(level + 1, Relaxed);
            } else if used < fall {
                self.level.store(level - 1, Relaxed);
            }
        }
        self.level.load(Relaxed) != before
    }

    /// Removes the thresholds without calling hooks. Requires the tree's lock.
    pub(super) fn clear_levels(&self) {
        self.thresholds.set(Levels::default());
        self.level.store(0, Relaxed);
        self.reported_level.store(0, Relaxed);
    }

    /// Calls the hooks of this node and its ancestors whose level differs from the one last
    /// reported. Must be called with no lock held.
    #[cold]
    pub(super) fn report_levels(&'static self) {
        for node in self.path() {
            node.report_level();
        }
    }

    pub(super) fn report_level(&'static self) {
        // The handle prevents recycling of the node while hooks run.
        let Some(budget) = self.handle_if_live() else { return };
        // Every thread that changed a level comes here. The swaps are read-modify-write operations
        // on both sides: a thread that finds another one in the loop has made its change visible
        // before that thread leaves.
        while self.reporting.swap(1, AcqRel) == 0 {
            self.call_level_hooks(&budget);
            self.reporting.swap(0, AcqRel);
            if !self.has_unreported_level() {
                return;
            }
        }
    }

    fn has_unreported_level(&self) -> bool {
        self.level.load(Acquire) != self.reported_level.load(Acquire)
    }

    fn call_level_hooks(&'static self, budget: &Budget) {
        loop {
            let (from, to) = (self.reported_level.load(Acquire), self.level.load(Acquire));
            if from == to {
                return;
            }
            self.reported_level.store(to, Relaxed);
            let change = LevelChange {
                from: Level::from_number(from),
                to: Level::from_number(to),
                used: self.used.load(Relaxed),
                limit: self.limit.load(Relaxed),
            };
            let hooks = self.level_hooks.snapshot();
            for (_, hook) in hooks.iter().flat_map(|hooks| hooks.iter()) {
                Hooks::call(&self.level_hooks, || hook(budget, change));
            }
        }
    }
}

/// A registered hook or reclaimer, removed when this is dropped. Another thread may still be
/// running it at that time.
///
/// See the example of [`Budget::on_need`](super::Budget::on_need).
#[must_use = "a registration that is dropped at once removes what it has registered"]
pub struct HookRegistration {
    pub(super) budget: Budget,
    pub(super) number: u64,
    pub(super) is_level_hook: bool,
}

impl std::fmt::Debug for HookRegistration {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Registration").field("budget", &self.budget.name()).finish_non_exhaustive()
    }
}

impl HookRegistration {
    /// Returns whether this is the reclaimer with this number at `node`.
    pub(super) fn is(&self, node: &Node, number: u64) -> bool {
        !self.is_level_hook && self.number == number && std::ptr::eq(self.budget.node, node)
    }
}

impl Drop for HookRegistration {
    fn drop(&mut self) {
        let node = self.budget.node;
        if self.is_level_hook {
            node.level_hooks.remove(self.number);
        } else {
            node.reclaimers.remove(self.number);
        }
    }
}
