//! What is checked.

use super::Finding;
use aquifer_core::{Bytes, MemoryError, Result};
use std::{fmt, sync::Arc};

/// What a quarantine holds when no size is named.
const DEFAULT_QUARANTINE: u64 = 64 << 20;

/// What a pool checks. Nothing, unless told otherwise, and that costs nothing.
///
/// The environment adds to it: see the crate's text. Findings go to [`DevicePool::findings`], to
/// the pool's recorder as [`Action::Finding`], and to [`Debugging::on_finding`]. None is ever a
/// panic.
///
/// ```
/// use aquifer_device::{Debugging, DevicePool, PoolConfig};
/// use aquifer_driver::{DeviceId, sim::Sim};
/// let mut config = PoolConfig::default();
/// config.debug = Debugging::all();
/// let pool = DevicePool::open(Sim::h200(1).driver(), DeviceId(0), config)?;
/// let stream = pool.stream()?;
/// let mut x = pool.buffer::<u8>(&stream, 1000)?;
/// stream.fill(&mut x, 1)?;
/// drop(x);
/// assert!(pool.check()?.is_empty());
/// # Ok::<(), aquifer_core::MemoryError>(())
/// ```
///
/// [`DevicePool::findings`]: crate::DevicePool::findings
/// [`Action::Finding`]: aquifer_core::Action::Finding
#[derive(Clone, Default)]
#[non_exhaustive]
pub struct Debugging {
    /// Fill blocks with [`POISON_ALLOCATED`](crate::POISON_ALLOCATED) when they are given out and
    /// with [`POISON_FREED`](crate::POISON_FREED) when they are freed.
    pub poison: bool,
    /// Put [`GUARD_BYTES`](crate::GUARD_BYTES) of [`CANARY`](crate::CANARY) right before and right
    /// behind each block, and look whether they are intact when the block comes back.
    pub canaries: bool,
    /// Keep freed blocks from use up to so many bytes, guards included, and look on their way out
    /// whether anybody has written to them. They are filled with
    /// [`POISON_FREED`](crate::POISON_FREED) for that. 0: none.
    pub quarantine: u64,
    /// Refuse a block that overlaps one which is held.
    pub overlap: bool,
    /// Report the blocks that are live when the pool closes, and on demand by
    /// [`DevicePool::leaks`](crate::DevicePool::leaks).
    pub leaks: bool,
    /// Keep the call stacks of allocation and free: microseconds each, and the only way to learn
    /// where a plain drop was.
    pub backtraces: bool,
    /// Called with each finding, by the thread that comes across it, under no lock. A panic in it
    /// ends there. It must not use the pool.
    pub hook: Option<FindingHook>,
}

/// What is called with each finding.
pub type FindingHook = Arc<dyn Fn(&Finding) + Send + Sync>;

impl Debugging {
    /// Everything but call stacks, with a quarantine of 64 MiB.
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

    /// The same, with `hook` called at each finding.
    #[must_use]
    pub fn on_finding(self, hook: impl Fn(&Finding) + Send + Sync + 'static) -> Self {
        Self { hook: Some(Arc::new(hook)), ..self }
    }

    /// Whether anything is checked at all.
    #[must_use]
    pub fn is_on(&self) -> bool {
        self.poison || self.canaries || self.quarantine > 0 || self.overlap || self.leaks
    }

    /// What either of two asks for.
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

    /// Refuses what cannot be had where each block is an allocation of its own.
    pub(crate) fn beside_bypass(&self) -> Result<()> {
        let refuse =
            |name, value: String, expected| Err(MemoryError::BadSetting { name, value, expected });
        if self.canaries {
            // A checker that sees allocations would take the guards for the block's.
            return refuse(
                "canaries",
                "on".into(),
                "off beside bypass, where the memory checker sees overruns",
            );
        }
        if self.quarantine > 0 {
            // It would see freed blocks as live ones.
            return refuse(
                "quarantine",
                self.quarantine.to_string(),
                "0 beside bypass, where the memory checker sees uses after the free",
            );
        }
        Ok(())
    }

    /// Whether freed blocks are looked at before they go home.
    pub(super) fn looks_at_freed(&self) -> bool {
        self.canaries || self.quarantine > 0
    }

    /// Whether freed blocks are filled.
    pub(super) fn fills_freed(&self) -> bool {
        self.poison || self.quarantine > 0
    }

    /// Reads a list like `poison,canaries,quarantine=64MiB,overlap,leaks`, or `all`. `None`: there
    /// is an item in it that says nothing.
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

    fn told(list: &str) -> String {
        format!("{:?}", Debugging::parse(list))
    }

    #[test]
    fn a_list_sets_what_it_names_and_nothing_else() {
        let one = Debugging::parse("canaries,quarantine=3MiB").unwrap();
        assert_eq!((one.poison, one.canaries, one.quarantine), (false, true, 3 << 20));
        assert_eq!(told("all"), format!("{:?}", Some(Debugging::all())));
        assert_eq!(
            told("poison,canaries,quarantine=64MiB,overlap,leaks"),
            format!("{:?}", Some(Debugging::all()))
        );
        assert_eq!(told("quarantine"), told("quarantine=64MiB"));
        assert!(Debugging::parse("all,backtraces").unwrap().backtraces);
        assert!(!Debugging::parse("quarantine=0").unwrap().is_on());
    }

    #[test]
    fn an_item_that_says_nothing_is_refused() {
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
