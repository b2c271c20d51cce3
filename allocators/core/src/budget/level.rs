//! Levels of use: soft limits, with hysteresis, and who is told.
//!
//! ```text
//!   critical ─────────────────╮ up above it ── Critical
//!   critical − slack ─────────╯ down at or below it
//!   soft ─────────────────╮ up above it ────── Warning
//!   soft − slack ─────────╯ down at or below it
//!                                              Nominal
//! ```
//!
//! A level changes under the tree's lock, together with the bytes. Hooks are called after it, with
//! no lock held, by the thread whose charge or release has changed the level; one thread at a time,
//! so that the last that a hook hears is the level that stands. Whatever changes meanwhile, by a
//! hook too, is told by the same thread when the hook has returned: no hook is called within a hook
//! of its own node.

use super::{Budget, hooks::Hooks, node::Node};
use crate::sync::atomic::{
    AtomicU64,
    Ordering::{AcqRel, Acquire, Relaxed},
};
use std::sync::Arc;

/// How near a budget is to its edge.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Level {
    /// Below the soft limit.
    Nominal,
    /// Above the soft limit: what can be given back cheaply should be.
    Warning,
    /// Above the critical threshold: what is charged next may be refused.
    Critical,
}

impl Level {
    const fn of(number: u8) -> Self {
        match number {
            0 => Self::Nominal,
            1 => Self::Warning,
            _ => Self::Critical,
        }
    }
}

/// Where levels change, in bytes.
///
/// ```
/// use aquifer_core::{Budget, budget::{Level, Levels}};
/// let budget = Budget::new("device 0", 100);
/// budget.set_levels(Levels { soft: 70, critical: 90, slack: 10 });
/// let most = budget.charge(60)?;
/// let more = budget.charge(15)?;               // above the soft limit: granted, and told
/// assert_eq!(budget.level(), Level::Warning);
/// drop(more);                                  // 60 is not above 70 − 10
/// assert_eq!(budget.level(), Level::Nominal);
/// # Ok::<(), aquifer_core::OutOfBudget>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Levels {
    /// Use above this is [`Level::Warning`].
    pub soft: u64,
    /// Use above this is [`Level::Critical`].
    pub critical: u64,
    /// How far below a threshold use has to fall before the level does.
    pub slack: u64,
}

impl Default for Levels {
    /// Thresholds that are never passed.
    fn default() -> Self {
        Self { soft: u64::MAX, critical: u64::MAX, slack: 0 }
    }
}

/// The same, of a node.
pub(super) struct Thresholds {
    soft: AtomicU64,
    critical: AtomicU64,
    slack: AtomicU64,
}

impl Thresholds {
    pub(super) fn none() -> Self {
        Self {
            soft: AtomicU64::new(u64::MAX),
            critical: AtomicU64::new(u64::MAX),
            slack: AtomicU64::new(0),
        }
    }

    fn set(&self, levels: Levels) {
        self.soft.store(levels.soft, Relaxed);
        self.critical.store(levels.critical.max(levels.soft), Relaxed);
        self.slack.store(levels.slack, Relaxed);
    }
}

/// A level that has changed. Several changes in quick succession are told as one.
///
/// Its example is that of [`Budget::on_level`](super::Budget::on_level).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LevelChange {
    /// The level that was told last.
    pub from: Level,
    /// The level now.
    pub to: Level,
    /// Bytes used, a moment ago.
    pub used: u64,
    /// The limit, in bytes.
    pub limit: u64,
}

/// What is called when a level has changed. It may charge, release, set limits and panic; it should
/// not wait.
pub type LevelHook = dyn Fn(&Budget, LevelChange) + Send + Sync;

/// Keeps a hook in its place, and removes it when dropped; another thread may then still be inside
/// of it.
///
/// Its example is that of [`Budget::on_need`](super::Budget::on_need).
#[must_use = "a registration that is dropped at once removes what it has registered"]
pub struct Registration {
    pub(super) budget: Budget,
    pub(super) number: u64,
    pub(super) of_levels: bool,
}

impl std::fmt::Debug for Registration {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Registration").field("budget", &self.budget.name()).finish_non_exhaustive()
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        let node = self.budget.node;
        if self.of_levels {
            node.level_hooks.remove(self.number);
        } else {
            node.reclaimers.remove(self.number);
        }
    }
}

impl Budget {
    /// Sets where this budget's level changes. A critical threshold below the soft limit counts as
    /// at it. Calls hooks if the level is another now.
    pub fn set_levels(&self, levels: Levels) {
        let crossed = {
            let _inside = self.node.tree.lock.enter();
            self.node.thresholds.set(levels);
            let crossed = self.node.cross();
            self.node.refresh();
            crossed
        };
        if crossed {
            self.node.tell();
        }
    }

    /// The level now.
    #[must_use]
    pub fn level(&self) -> Level {
        Level::of(self.node.level.load(Relaxed))
    }

    /// Has `hook` called after each change of this budget's level, until the registration is
    /// dropped. It is called with no lock of this crate held, by the thread whose charge or release
    /// has changed the level: whoever charges or releases under a lock of its own has the hook
    /// called under that.
    pub fn on_level(&self, hook: Arc<LevelHook>) -> Registration {
        let number = self.node.level_hooks.add(hook);
        Registration { budget: self.clone(), number, of_levels: true }
    }

    /// How often a hook or a reclaimer of this budget has panicked (a count).
    #[must_use]
    pub fn panics(&self) -> u64 {
        self.node.level_hooks.panics() + self.node.reclaimers.panics()
    }
}

impl Node {
    /// The bytes above which the level rises, and those below which it falls. Under the tree's
    /// lock.
    pub(super) fn thresholds(&self) -> (u64, u64) {
        let Thresholds { soft, critical, slack } = &self.thresholds;
        let (soft, critical, slack) =
            (soft.load(Relaxed), critical.load(Relaxed), slack.load(Relaxed));
        // At or below the difference is down.
        let down = |threshold: u64| threshold.saturating_sub(slack).saturating_add(1);
        match Level::of(self.level.load(Relaxed)) {
            Level::Nominal => (soft, 0),
            Level::Warning => (critical, down(soft)),
            Level::Critical => (u64::MAX, down(critical)),
        }
    }

    /// Moves the level to where the bytes are; says whether it has changed. Under the tree's lock.
    pub(super) fn cross(&self) -> bool {
        let before = self.level.load(Relaxed);
        let used = self.used.load(Relaxed);
        // A level whose thresholds lie within each other's slack changes once, not for ever.
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

    /// Back to no thresholds, with nobody told. Under the tree's lock.
    pub(super) fn clear_levels(&self) {
        self.thresholds.set(Levels::default());
        self.level.store(0, Relaxed);
        self.told.store(0, Relaxed);
    }

    /// Calls the hooks of this node and those above it whose level is not the one that was told.
    /// With no lock held.
    #[cold]
    pub(super) fn tell_path(&'static self) {
        for node in self.path() {
            node.tell();
        }
    }

    pub(super) fn tell(&'static self) {
        // Whoever knows a node keeps it from becoming another's while hooks run.
        let Some(budget) = self.meet() else { return };
        // Whoever has changed a level asks here, whatever was told last: a read-modify-write on
        // both sides, so that whoever finds somebody at it has made the change visible to them
        // before they leave.
        while self.telling.swap(1, AcqRel) == 0 {
            self.tell_all(&budget);
            self.telling.swap(0, AcqRel);
            if !self.differs() {
                return;
            }
        }
    }

    fn differs(&self) -> bool {
        self.level.load(Acquire) != self.told.load(Acquire)
    }

    fn tell_all(&'static self, budget: &Budget) {
        loop {
            let (from, to) = (self.told.load(Acquire), self.level.load(Acquire));
            if from == to {
                return;
            }
            self.told.store(to, Relaxed);
            let change = LevelChange {
                from: Level::of(from),
                to: Level::of(to),
                used: self.used.load(Relaxed),
                limit: self.limit.load(Relaxed),
            };
            let hooks = self.level_hooks.now();
            for (_, hook) in hooks.iter().flat_map(|hooks| hooks.iter()) {
                Hooks::call(&self.level_hooks, || hook(budget, change));
            }
        }
    }
}
