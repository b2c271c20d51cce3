//! Numbers of slots.

use std::collections::BTreeSet;

/// Returns the first of `count` consecutive numbers that are not taken.
pub(crate) fn find_gap(taken: &BTreeSet<u64>, count: u64) -> u64 {
    let mut first = 0;
    for &slot in taken {
        if slot - first >= count {
            break;
        }
        first = slot + 1;
    }
    first
}
