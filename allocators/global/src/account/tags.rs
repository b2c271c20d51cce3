//! What was allocated under each tag.

use aquifer_core::Tag;
use std::sync::atomic::{AtomicU64, Ordering};

/// What has been allocated under one tag since the start, freed or not.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
#[non_exhaustive]
pub struct Allocated {
    /// Bytes asked for, by growth as well.
    pub bytes: u64,
    /// Allocations (a count).
    pub allocations: u64,
}

struct Row {
    bytes: AtomicU64,
    allocations: AtomicU64,
}

// A row for each tag that there can be: 1 MiB of address space, of which the pages of tags in use are touched.
static ROWS: [Row; Tag::MAX] =
    [const { Row { bytes: AtomicU64::new(0), allocations: AtomicU64::new(0) } }; Tag::MAX];

/// What has been allocated in scopes of this tag ([`tagged`](aquifer_core::tagged)), by whichever allocator served it.
///
/// It only grows: a free does not tell whose the block was. What nobody tagged is not counted here, so that it costs
/// nothing: for [`Tag::NONE`] the answer is zero.
///
/// ```
/// use aquifer_core::{Tag, tagged};
/// use aquifer_global as global;
/// #[global_allocator]
/// static GLOBAL: global::Global = global::Global::new();
///
/// let parse = Tag::named("parse");
/// let list = tagged(parse, || Vec::<u64>::with_capacity(100));
/// assert_eq!(global::allocated_under(parse).bytes, 800);
/// # drop(list);
/// ```
#[must_use]
pub fn allocated_under(tag: Tag) -> Allocated {
    let row = &ROWS[tag.index()];
    Allocated {
        bytes: row.bytes.load(Ordering::Relaxed),
        allocations: row.allocations.load(Ordering::Relaxed),
    }
}

/// Counts under the current tag, if there is one.
#[inline]
pub(crate) fn note(bytes: usize, allocations: u64) {
    let tag = Tag::current();
    if tag != Tag::NONE {
        count(tag, bytes, allocations);
    }
}

#[cold]
fn count(tag: Tag, bytes: usize, allocations: u64) {
    let row = &ROWS[tag.index()];
    row.bytes.fetch_add(bytes as u64, Ordering::Relaxed);
    row.allocations.fetch_add(allocations, Ordering::Relaxed);
}
