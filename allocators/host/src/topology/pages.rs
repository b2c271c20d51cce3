//! Page sizes and when the kernel makes huge pages of its own accord.

use super::{
    Found, Source,
    files::{Files, TopologyError, file},
};
use nix::unistd::{SysconfVar, sysconf};
use std::path::Path;

/// When anonymous memory gets transparent huge pages
/// (`/sys/kernel/mm/transparent_hugepage/enabled`).
///
/// Its example is that of [`Topology`](super::Topology).
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

/// Bytes of a base page: what the kernel handed to the process at its start, below the root if that
/// is there.
pub(super) fn page_size(files: &Files) -> Result<Found<u64>, TopologyError> {
    let path = Path::new("/proc/self/auxv");
    if let Some(bytes) = files.bytes(path)?
        && let Some(size) = page_size_in(&bytes)
    {
        return Ok(Found::known(size, file(path)));
    }
    let value = sysconf(SysconfVar::PAGE_SIZE).ok().flatten().and_then(|n| u64::try_from(n).ok());
    Ok(Found { value, source: Source::SystemCall("sysconf") })
}

/// The auxiliary vector is pairs of words, a key and a value.
fn page_size_in(vector: &[u8]) -> Option<u64> {
    const WORD: usize = size_of::<usize>();
    const AT_PAGESZ: usize = 6;
    let mut words =
        vector.chunks_exact(WORD).filter_map(|word| word.try_into().ok().map(usize::from_ne_bytes));
    while let (Some(key), Some(value)) = (words.next(), words.next()) {
        if key == AT_PAGESZ && value.is_power_of_two() {
            return Some(value as u64);
        }
    }
    None
}
