//! What stands behind the addresses.
//!
//! With virtual memory management ([`mapped`]) a pool has one range of addresses and a stock of physical handles, all of
//! one size. Addresses are cheap and handles are memory, so handles go where the need is: a live block's stay, those
//! under free ranges may be taken away and mapped elsewhere. Without it ([`plain`]) a pool has whole allocations of the
//! driver's, each a segment that no block crosses.

pub(crate) mod handle;
pub(crate) mod mapped;
pub(crate) mod plain;
pub(crate) mod slots;
pub(crate) mod window;

use crate::{Request, home::State};
use aquifer_heap::Range;
use mapped::Mapped;
use plain::Plain;

/// One of the two.
#[derive(Debug)]
pub(crate) enum Physical {
    Mapped(Mapped),
    Plain(Plain),
}

impl Physical {
    /// What of a free stretch one cache would hand to another for `request`, after the bytes of which it is cut; `None`
    /// if that does not hold the request.
    pub(crate) fn part_for(&self, free: Range, request: &Request) -> Option<(u64, Range)> {
        match self {
            Self::Mapped(mapped) => {
                let (first, count) = mapped.whole_slots(free);
                // A slot is aligned to its own size, which is as much as can be asked for.
                let wanted = request.size().div_ceil(mapped.slot_bytes());
                (wanted <= count).then(|| (count * mapped.slot_bytes(), mapped.range(first, wanted)))
            }
            Self::Plain(plain) => {
                // Whole, or the pieces of a segment would be scattered and never go back.
                let fits = free.len >= request.size() + request.alignment() && plain.is_segment(free);
                fits.then_some((free.len, free))
            }
        }
    }

    /// Gives a cache memory that was nobody's.
    pub(crate) fn give_to(&self, cache: &mut State, range: Range, stamp: u64) {
        match self {
            Self::Mapped(_) => cache.add(range, stamp),
            Self::Plain(_) => cache.add_segment(range, stamp),
        }
    }
}
