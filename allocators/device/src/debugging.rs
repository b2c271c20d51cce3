//! The settings of the checks of a pool, and what the checks report.

mod reports;

pub use reports::{Fault, Finding, LeakGroup, LeakReport};

use aquifer_core::{MemoryError, Result};
use std::{fmt, sync::Arc};

/// The checks of a pool. By default there are none, at no cost.
///
/// The environment can enable more: see the crate's documentation. Findings go to
/// [`DevicePool::findings`], to the pool's recorder as [`Action::Finding`], and to
/// [`Debugging::on_finding`]. A finding never panics.
///
/// ```
/// use aquifer::{Debugging, DeviceId, DevicePool, PoolConfig, sim::Sim};
/// let mut config = PoolConfig::default();
/// config.debug = Debugging::all();
/// let pool = DevicePool::open(Sim::h200(1).driver(), DeviceId(0), config)?;
/// let stream = pool.stream()?;
/// let mut x = pool.buffer::<u8>(&stream, 1000)?;
/// stream.fill(&mut x, 1)?;
/// drop(x);
/// assert!(pool.check()?.is_empty());
/// # Ok::<(), aquifer::MemoryError>(())
/// ```
///
/// [`DevicePool::findings`]: crate::DevicePool::findings
/// [`Action::Finding`]: aquifer_core::Action::Finding
#[derive(Clone, Default)]
#[non_exhaustive]
pub struct Debugging {
    /// Fill blocks with [`POISON_ALLOCATED`](crate::POISON_ALLOCATED) when they are allocated and
    /// with [`POISON_FREED`](crate::POISON_FREED) when they are freed.
    pub poison: bool,
    /// Put [`GUARD_BYTES`](crate::GUARD_BYTES) of [`CANARY`](crate::CANARY) right before and right
    /// behind each block, and check them when the block is freed.
    pub canaries: bool,
    /// Report the blocks that are live when the pool closes, and on demand by
    /// [`DevicePool::leaks`](crate::DevicePool::leaks).
    pub leaks: bool,
    /// Keep the call stacks of allocation and free. Each takes microseconds. This is the only way
    /// to find the line of a plain drop.
    pub backtraces: bool,
    /// Called with each finding by the thread that detects it, without a lock. A panic in it is
    /// contained. It must not use the pool.
    pub hook: Option<FindingHook>,
}

/// A callback for findings.
pub type FindingHook = Arc<dyn Fn(&Finding) + Send + Sync>;

impl Debugging {
    /// Returns all checks but call stacks.
    #[must_use]
    pub fn all() -> Self {
        Self { poison: true, canaries: true, leaks: true, backtraces: false, hook: None }
    }

    /// Returns these settings with `hook`, which is called with each finding.
    #[must_use]
    pub fn on_finding(self, hook: impl Fn(&Finding) + Send + Sync + 'static) -> Self {
        Self { hook: Some(Arc::new(hook)), ..self }
    }

    /// Returns whether any check is enabled.
    #[must_use]
    pub fn is_on(&self) -> bool {
        self.poison || self.canaries || self.leaks
    }

    /// Returns the union of both settings.
    pub(crate) fn or(self, other: Self) -> Self {
        Self {
            poison: self.poison || other.poison,
            canaries: self.canaries || other.canaries,
            leaks: self.leaks || other.leaks,
            backtraces: self.backtraces || other.backtraces,
            hook: self.hook.or(other.hook),
        }
    }

    /// Refuses checks that bypass mode excludes.
    pub(crate) fn beside_bypass(&self) -> Result<()> {
        if self.canaries {
            // A memory checker that sees allocations would take the guards for a part of the block.
            return Err(MemoryError::BadSetting {
                name: "canaries",
                value: "on".into(),
                expected: "off beside bypass, where the memory checker sees overruns",
            });
        }
        Ok(())
    }

    /// Parses a list like `poison,canaries,leaks`, or `all`. Returns
    /// `None` if an item is invalid.
    pub(crate) fn parse(list: &str) -> Option<Self> {
        let mut found = Self::default();
        for item in list.split(',') {
            match item {
                "all" => found = Self::all().or(found),
                "poison" => found.poison = true,
                "canaries" => found.canaries = true,
                "leaks" => found.leaks = true,
                "backtraces" => found.backtraces = true,
                _ => return None,
            }
        }
        Some(found)
    }
}

impl fmt::Debug for Debugging {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Debugging")
            .field("poison", &self.poison)
            .field("canaries", &self.canaries)
            .field("leaks", &self.leaks)
            .field("backtraces", &self.backtraces)
            .field("hook", &self.hook.is_some())
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(list: &str) -> String {
        format!("{:?}", Debugging::parse(list))
    }

    #[test]
    fn list_sets_only_the_named_checks() {
        let one = Debugging::parse("canaries,leaks").unwrap();
        assert_eq!((one.poison, one.canaries, one.leaks), (false, true, true));
        let all = format!("{:?}", Some(Debugging::all()));
        assert_eq!(parsed("all"), all);
        assert_eq!(parsed("poison,canaries,leaks"), all);
        assert!(Debugging::parse("all,backtraces").unwrap().backtraces);
    }
}
