//! Page sizes and when the kernel makes huge pages of its own accord.

use super::{
    Found, Source,
    files::{Files, TopologyError, file},
};
use nix::unistd::{SysconfVar, sysconf};
use std::path::Path;

/// When anonymous memory gets transparent huge pages (`/sys/kernel/mm/transparent_hugepage/enabled`).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum ThpMode {
    /// Everywhere.
    Always,
    /// Where a program asks by `MADV_HUGEPAGE`.
    Madvise,
    /// Nowhere.
    Never,
}

impl ThpMode {
    /// Whether memory can have them if its owner asks.
    #[must_use]
    pub fn is_offered(self) -> bool {
        self != Self::Never
    }
}

/// The mode in brackets: `always [madvise] never`. A word that this build does not know is unknown.
pub(super) fn thp(files: &Files) -> Result<Found<ThpMode>, TopologyError> {
    let path = Path::new("/sys/kernel/mm/transparent_hugepage/enabled");
    let text = files.text(path)?.unwrap_or_default();
    let value = text.split_whitespace().find_map(|word| word.strip_prefix('[')?.strip_suffix(']'));
    let value = value.and_then(|word| match word {
        "always" => Some(ThpMode::Always),
        "madvise" => Some(ThpMode::Madvise),
        "never" => Some(ThpMode::Never),
        _ => None,
    });
    Ok(Found { value, source: file(path) })
}

/// Bytes of a transparent huge page.
pub(super) fn thp_size(files: &Files) -> Result<Found<u64>, TopologyError> {
    let path = Path::new("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size");
    Ok(Found { value: files.number(path)?, source: file(path) })
}

/// Bytes of a base page: of the running kernel, whatever the root.
pub(super) fn page_size() -> Found<u64> {
    let value = sysconf(SysconfVar::PAGE_SIZE).ok().flatten().and_then(|n| u64::try_from(n).ok());
    Found { value, source: Source::SystemCall("sysconf") }
}
