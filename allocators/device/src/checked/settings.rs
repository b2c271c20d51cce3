//! Settings of the checks.

use super::Finding;
use aquifer_core::{Bytes, MemoryError, Result};
use std::{fmt, sync::Arc};

/// Size of the quarantine if none is given.
const DEFAULT_QUARANTINE: u64 = 64 << 20;

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
    /// Keep up to this many bytes of freed blocks from reuse, guards included, and check them for
    /// writes when they are released. The blocks are filled with
    /// [`POISON_FREED`](crate::POISON_FREED) for that. 0 disables the quarantine.
    pub quarantine: u64,
    /// Refuse a block that overlaps a block in use.
    pub overlap: bool,
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
    /// Returns all checks but call stacks, with a quarantine of 64 MiB.
    #[must_use]
    pub fn all() -> Self {
        Self {
            poison: true,
            canaries: true,
            quarantine: DEFAULT_QUARANTINE,
            overlap: true,
            leaks: true,
            backtraces: false,
            hook: None,
        }
    }

    /// Returns these settings with `hook`, which is called with each finding.
    #[must_use]
    pub fn on_finding(self, hook: impl Fn(&Finding) + Send + Sync + 'static) -> Self {
        Self { hook: Some(Arc::new(hook)), ..self }
    }

    /// Returns whether any check is enabled.
    #[must_use]
    pub fn is_on(&self) -> bool {
        self.poison || self.canaries || self.quarantine > 0 || self.overlap || self.leaks
    }

    /// Returns the union of both settings.
    pub(crate) fn or(self, other: Self) -> Self {
        Self {
            poison: self.poison || other.poison,
            canaries: self.canaries || other.canaries,
            quarantine: self.quarantine.max(other.quarantine),
            overlap: self.overlap || other.overlap,
            leaks: self.leaks || other.leaks,
            backtraces: self.backtraces || other.backtraces,
            hook: self.hook.or(other.hook),
        }
    }

    /// Refuses checks that bypass mode excludes.
    pub(crate) fn beside_bypass(&self) -> Result<()> {
        let refuse =
            |name, value: String, expected| Err(MemoryError::BadSetting { name, value, expected });
        if self.canaries {
            // A memory checker that sees allocations would take the guards for a part of the block.
            return refuse(
                "canaries",
                "on".into(),
                "off beside bypass, where the memory checker sees overruns",
            );
        }
        if self.quarantine > 0 {
            // A memory checker would take freed blocks for live ones.
            return refuse(
                "quarantine",
                self.quarantine.to_string(),
                "0 beside bypass, where the memory checker sees uses after the free",
            );
        }
        Ok(())
    }

    /// Returns whether freed blocks are read before they are released.
    pub(super) fn inspects_freed(&self) -> bool {
        self.canaries || self.quarantine > 0
    }

    /// Returns whether freed blocks are filled.
    pub(super) fn fills_freed(&self) -> bool {
        self.poison || self.quarantine > 0
    }

    /// Parses a list like `poison,canaries,quarantine=64MiB,overlap,leaks`, or `all`. Returns
    /// `None` if an item is invalid.
    pub(crate) fn parse(list: &str) -> Option<Self> {
        let mut found = Self::default();
        for item in list.split(',') {
            match item.split_once('=').unwrap_or((item, "")) {
                ("all", "") => found = Self::all().or(found),
                ("poison", "") => found.poison = true,
                ("canaries", "") => found.canaries = true,
                ("overlap", "") => found.overlap = true,
                ("leaks", "") => found.leaks = true,
                ("backtraces", "") => found.backtraces = true,
                ("quarantine", "") if item == "quarantine" => found.quarantine = DEFAULT_QUARANTINE,
                ("quarantine", amount) => found.quarantine = Bytes::parse(amount)?.0,
                _ => return None,
            }
            if item.ends_with('=') {
                return None;
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
            .field("quarantine", &self.quarantine)
            .field("overlap", &self.overlap)
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
        let one = Debugging::parse("canaries,quarantine=3MiB").unwrap();
        assert_eq!((one.poison, one.canaries, one.quarantine), (false, true, 3 << 20));
        assert_eq!(parsed("all"), format!("{:?}", Some(Debugging::all())));
        assert_eq!(
            parsed("poison,canaries,quarantine=64MiB,overlap,leaks"),
            format!("{:?}", Some(Debugging::all()))
        );
        assert_eq!(parsed("quarantine"), parsed("quarantine=64MiB"));
        assert!(Debugging::parse("all,backtraces").unwrap().backtraces);
        assert!(!Debugging::parse("quarantine=0").unwrap().is_on());
    }

    #[test]
    fn invalid_items_are_refused() {
        for wrong in [
            "",
            "1",
            "poison,",
            ",poison",
            " poison",
            "poison=1",
            "poison=",
            "quarantine=",
            "ALL",
            "all=1",
        ] {
            assert!(Debugging::parse(wrong).is_none(), "{wrong:?}");
        }
    }
}
