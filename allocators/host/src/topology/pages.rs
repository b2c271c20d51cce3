//! Page sizes, and the kernel's mode of transparent huge pages.

use super::{
    Found, Provenance,
    files::{Files, TopologyError, file},
};
use nix::unistd::{SysconfVar, sysconf};
use std::path::Path;

/// When anonymous memory gets transparent huge pages
/// (`/sys/kernel/mm/transparent_hugepage/enabled`).
///
/// See [`Topology`](super::Topology) for an example.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum ThpMode {
    /// Everywhere.
    Always,
    /// Where a program requests it by `MADV_HUGEPAGE`.
    Madvise,
    /// Nowhere.
    Never,
}

impl ThpMode {
    /// Returns whether memory can get huge pages on request.
    #[must_use]
    pub fn is_offered(self) -> bool {
        self != Self::Never
    }
}

/// Reads the mode in brackets, as in `always [madvise] never`. An unexpected word is unknown.
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

/// Reads the bytes of a transparent huge page.
pub(super) fn thp_size(files: &Files) -> Result<Found<u64>, TopologyError> {
    let path = Path::new("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size");
    Ok(Found { value: files.number(path)?, source: file(path) })
}

/// Reads the bytes of a base page, from the auxiliary vector below the root if that exists, else
/// from the system.
pub(super) fn page_size(files: &Files) -> Result<Found<u64>, TopologyError> {
    let path = Path::new("/proc/self/auxv");
    if let Some(bytes) = files.bytes(path)?
        && let Some(size) = page_size_in(&bytes)
    {
        return Ok(Found::known(size, file(path)));
    }
    let value = sysconf(SysconfVar::PAGE_SIZE).ok().flatten().and_then(|n| u64::try_from(n).ok());
    Ok(Found { value, source: Provenance::SystemCall("sysconf") })
}

/// Finds the page size in the auxiliary vector, which consists of pairs of words: key and value.
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
