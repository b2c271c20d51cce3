//! The lines that caches have claimed.

use crate::{
    layout::{LINES, header},
    line::CacheLine,
    region::Region,
};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// The number of lines that caches have claimed.
static CLAIMED: AtomicUsize = AtomicUsize::new(0);

/// Returns the number of lines of the file that are in use.
pub(crate) fn used() -> usize {
    CLAIMED.load(Relaxed).min(LINES)
}

/// Returns a line that no other cache has. Makes no system call after the first one.
///
/// ```
/// use aquifer_status::{claim_line, is_shown};
/// let line = claim_line();
/// if !is_shown(line) {
///     // All lines of the file are claimed: the cache's figures go to its pool's slot.
/// }
/// ```
#[must_use]
pub fn claim_line() -> &'static CacheLine {
    let found = Region::get().and_then(|region| {
        // Lines are never returned, so a number that is too large stays too large.
        let number = CLAIMED.fetch_add(1, Relaxed).min(LINES);
        CLAIMED.fetch_min(LINES, Relaxed);
        let line = region.line(number)?;
        region.header()[header::LINES_USED].store(used() as u64, Relaxed);
        Some(line)
    });
    found.unwrap_or_else(|| Box::leak(Box::default()))
}

/// Returns whether the line is in the file, where readers see it. A cache whose line is not counts
/// in its pool's slot. [`claim_line`] has an example.
#[must_use]
pub fn is_shown(line: &CacheLine) -> bool {
    Region::get().is_some_and(|region| region.contains(line))
}
