//! Pressure levels and their thresholds.

use crate::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// How close the use of a budget is to its limit.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize), serde(rename_all = "lowercase"))]
pub enum Level {
    /// Below the soft limit.
    Nominal,
    /// Above the soft limit: cached memory that is cheap to release should be released.
    Warning,
    /// Above the critical threshold: the next charge may be refused.
    Critical,
}

impl Level {
    pub(super) const fn from_number(number: u8) -> Self {
        match number {
            0 => Self::Nominal,
            1 => Self::Warning,
            _ => Self::Critical,
        }
    }
}

/// The thresholds of the levels, in bytes.
///
/// ```
/// use aquifer::{Budget, budget::{Level, Levels}};
/// let budget = Budget::new("device 0", 100);
/// budget.set_levels(Levels { soft: 70, critical: 90, slack: 10 });
/// let most = budget.charge(60)?;
/// let more = budget.charge(15)?;               // above the soft limit: granted, hooks are called
/// assert_eq!(budget.level(), Level::Warning);
/// drop(more);                                  // 60 is not above 70 − 10
/// assert_eq!(budget.level(), Level::Nominal);
/// # Ok::<(), aquifer::OutOfBudget>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Levels {
    /// Use above this is [`Level::Warning`].
    pub soft: u64,
    /// Use above this is [`Level::Critical`].
    pub critical: u64,
    /// How far use has to fall below a threshold before the level falls.
    pub slack: u64,
}

impl Default for Levels {
    /// Thresholds that are never reached.
    fn default() -> Self {
        Self { soft: u64::MAX, critical: u64::MAX, slack: 0 }
    }
}

/// The thresholds of a node.
pub(super) struct Thresholds {
    pub(super) soft: AtomicU64,
    pub(super) critical: AtomicU64,
    pub(super) slack: AtomicU64,
}

impl Thresholds {
    pub(super) fn none() -> Self {
        Self {
            soft: AtomicU64::new(u64::MAX),
            critical: AtomicU64::new(u64::MAX),
            slack: AtomicU64::new(0),
        }
    }

    pub(super) fn set(&self, levels: Levels) {
        self.soft.store(levels.soft, Relaxed);
        self.critical.store(levels.critical.max(levels.soft), Relaxed);
        self.slack.store(levels.slack, Relaxed);
    }
}

/// A change of level, passed to hooks. Several quick changes may be reported as one.
///
/// See the example of [`Budget::on_level`](super::Budget::on_level).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LevelChange {
    /// The level that was last reported.
    pub from: Level,
    /// The new level.
    pub to: Level,
    /// Bytes used when the change was reported.
    pub used: u64,
    /// The limit, in bytes.
    pub limit: u64,
}
