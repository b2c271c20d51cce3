//! The kinds of pools.

/// What a pool's memory is.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize), serde(rename_all = "lowercase"))]
#[non_exhaustive]
pub enum PoolKind {
    /// Device memory in caches of streams.
    Device,
    /// Pinned host memory.
    Pinned,
    /// Device memory of a source other than a pool, such as the driver.
    Source,
    /// The program's global allocator.
    Global,
}

impl PoolKind {
    const ALL: [Self; 4] = [Self::Device, Self::Pinned, Self::Source, Self::Global];

    /// Returns the kind with this number.
    pub(crate) fn numbered(number: u64) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.number() == number)
    }

    /// Returns the name of the kind in lower case, as in JSON and metrics.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Device => "device",
            Self::Pinned => "pinned",
            Self::Source => "source",
            Self::Global => "global",
        }
    }

    pub(crate) fn number(self) -> u64 {
        self as u64 + 1
    }
}
