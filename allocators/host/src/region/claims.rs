//! The pages of foreign memory that are currently registered.
//!
//! The driver pins whole pages. Two registrations that share a page would depend on each other's
//! release, so each page can be claimed only once.

use super::window;
use crate::kernel::{ForkSafe, ForkSafeGuard, LockOrder, Span};
use std::collections::BTreeMap;

/// First address to end address.
static CLAIMED: ForkSafe<BTreeMap<usize, usize>> =
    ForkSafe::new(LockOrder::Claims, BTreeMap::new());

fn lock() -> ForkSafeGuard<'static, BTreeMap<usize, usize>> {
    CLAIMED.lock()
}

/// Claims whole pages, or returns a range that is already claimed.
pub(super) fn claim(pages: Span) -> Result<(), Span> {
    if window::contains(pages.start) || window::contains(pages.end() - 1) {
        return Err(pages);
    }
    let mut claimed = lock();
    match claimed.range(..pages.end()).next_back() {
        Some((&start, &end)) if end > pages.start => Err(Span { start, len: end - start }),
        _ => {
            claimed.insert(pages.start, pages.end());
            Ok(())
        }
    }
}

/// Releases a claim.
pub(super) fn release(pages: Span) {
    lock().remove(&pages.start);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn page_can_be_claimed_once_at_a_time() {
        // Unmapped addresses.
        let at =
            |page: usize, pages: usize| Span { start: (1 << 50) + page * 4096, len: pages * 4096 };
        claim(at(4, 4)).unwrap();
        for taken in [at(4, 4), at(3, 2), at(7, 1), at(0, 100), at(5, 1)] {
            assert_eq!(claim(taken), Err(at(4, 4)), "{taken:?}");
        }
        claim(at(8, 1)).unwrap();
        claim(at(3, 1)).unwrap();
        release(at(4, 4));
        claim(at(5, 1)).unwrap();
        [at(8, 1), at(3, 1), at(5, 1)].into_iter().for_each(release);
    }
}
