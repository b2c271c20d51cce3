//! Accounts by tag: what each tag has allocated, and what it holds.

use super::credit::thread_slot;
use crate::{
    slots::{
        Slot, slots,
        tag_cells::{ROWS, TRACKS_BLOCKS, USED_ROWS, add, row},
    },
    thread_state::THREAD_STATE,
};
use aquifer_core::Tag;
use std::sync::atomic::Ordering;

/// What has been allocated under one tag since the start, including freed blocks.
///
/// See [`top`] for an example.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
#[non_exhaustive]
pub struct Allocated {
    /// Requested bytes, including growth.
    pub bytes: u64,
    /// Number of allocations.
    pub allocations: u64,
}

/// What is held under one tag.
///
/// See [`held_under`] for an example.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
#[non_exhaustive]
pub struct Held {
    /// Requested bytes in live blocks of all allocators. Exact when no call is in progress on any
    /// thread.
    pub live: u64,
    /// Maximum of `live` since the start or the last [`reset_peak`](super::reset_peak). Never too
    /// low. For each thread that allocates under the tag it is too high by at most 128 KiB, or by
    /// about an eighth of the tag's bytes or two blocks, where that is less.
    pub peak: u64,
    /// Number of live blocks.
    pub blocks: u64,
}

/// One of the largest consumers.
///
/// See [`top`] for an example.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Consumer {
    /// The tag.
    pub tag: Tag,
    /// What it holds, or `None` if the program's allocator does not record that ([`held_under`]).
    pub held: Option<Held>,
    /// What it has allocated.
    pub allocated: Allocated,
}

#[inline]
fn current() -> u16 {
    // Every index fits, since `Tag::MAX` does.
    Tag::current().index() as u16
}

/// Counts an allocation under the current tag, if there is one.
#[inline]
pub(crate) fn count_allocation(bytes: usize, allocations: u64) {
    let tag = current();
    if tag != 0 {
        count_allocation_under(tag, bytes as u64, allocations);
    }
}

#[inline]
fn count_allocation_under(tag: u16, bytes: u64, allocations: u64) {
    THREAD_STATE.with(|state| match thread_slot(state) {
        Some(slot) => {
            let cell = slot.cells.for_tag(tag);
            add(&cell.bytes, bytes);
            add(&cell.allocations, allocations);
        }
        None => {
            USED_ROWS.fetch_max(usize::from(tag) + 1, Ordering::Relaxed);
            row(tag).bytes.fetch_add(bytes, Ordering::Relaxed);
            row(tag).allocations.fetch_add(allocations, Ordering::Relaxed);
        }
    });
}

/// Counts a block under the current tag, and returns the tag.
#[inline]
pub(crate) fn count_block(slot: Option<&Slot>, bytes: usize) -> u16 {
    let tag = current();
    match slot {
        Some(slot) => {
            let cell = slot.cells.for_tag(tag);
            cell.debit(tag, bytes as u64);
            add(&cell.allocations, 1);
            add(&cell.blocks, 1);
        }
        None => {
            grow(None, tag, bytes);
            row(tag).allocations.fetch_add(1, Ordering::Relaxed);
            row(tag).blocks.fetch_add(1, Ordering::Relaxed);
        }
    }
    tag
}

/// Counts that a block of this tag has grown by `bytes`.
#[inline]
pub(crate) fn grow(slot: Option<&Slot>, tag: u16, bytes: usize) {
    match slot {
        Some(slot) => slot.cells.for_tag(tag).debit(tag, bytes as u64),
        None => {
            USED_ROWS.fetch_max(usize::from(tag) + 1, Ordering::Relaxed);
            row(tag).charge(bytes as u64);
            row(tag).bytes.fetch_add(bytes as u64, Ordering::Relaxed);
        }
    }
}

/// Counts that a block of this tag has shrunk by `bytes` bytes. For a freed block, `freed_blocks`
/// is 1.
#[inline]
pub(crate) fn shrink(slot: Option<&Slot>, tag: u16, bytes: usize, freed_blocks: u64) {
    match slot {
        Some(slot) => {
            let cell = slot.cells.for_tag(tag);
            cell.add_credit(tag, bytes as u64);
            add(&cell.blocks, freed_blocks.wrapping_neg());
        }
        None => {
            row(tag).charged.fetch_sub(bytes as u64, Ordering::Relaxed);
            row(tag).blocks.fetch_sub(freed_blocks, Ordering::Relaxed);
        }
    }
}

/// Resets the peaks.
pub(super) fn reset_peaks() {
    for row in ROWS.iter().take(USED_ROWS.load(Ordering::Relaxed)) {
        row.peak.store(row.charged.load(Ordering::Relaxed), Ordering::Relaxed);
    }
}

/// Returns all figures of one tag.
fn figures(tag: u16) -> (Held, Allocated) {
    let row = row(tag);
    let mut allocated = Allocated {
        bytes: row.bytes.load(Ordering::Relaxed),
        allocations: row.allocations.load(Ordering::Relaxed),
    };
    let (mut credit, mut blocks) = (0u64, row.blocks.load(Ordering::Relaxed));
    for slot in slots() {
        let cell = slot.cells.of(tag);
        if cell.tag.load(Ordering::Relaxed) == u64::from(tag) {
            credit = credit.wrapping_add(cell.credit.load(Ordering::Relaxed));
            blocks = blocks.wrapping_add(cell.blocks.load(Ordering::Relaxed));
            allocated.bytes = allocated.bytes.wrapping_add(cell.bytes.load(Ordering::Relaxed));
            allocated.allocations =
                allocated.allocations.wrapping_add(cell.allocations.load(Ordering::Relaxed));
        }
    }
    let live = row.charged.load(Ordering::Relaxed).saturating_sub(credit);
    let held = Held { live, peak: row.peak.load(Ordering::Relaxed).max(live), blocks };
    (held, allocated)
}

/// Returns what has been allocated in scopes of this tag ([`tagged`](aquifer_core::tagged)), from
/// any allocator.
///
/// The figures only grow. Untagged allocations are not counted and cost nothing, so for
/// [`Tag::NONE`] the result is zero, unless the program's allocator is [`Tracked`](crate::Tracked).
/// Takes time linear in the maximum number of concurrent threads so far, and takes no lock.
///
/// ```
/// use aquifer::{Global, Tag, global, tagged};
/// #[global_allocator]
/// static GLOBAL: Global = Global::new();
///
/// let parse = Tag::named("parse");
/// let list = tagged(parse, || Vec::<u64>::with_capacity(100));
/// assert_eq!(global::allocated_under(parse).bytes, 800);
/// # drop(list);
/// ```
#[must_use]
pub fn allocated_under(tag: Tag) -> Allocated {
    figures(tag.index() as u16).1
}

/// Returns what is held of the allocations in scopes of this tag, or `None` unless the program's
/// allocator is [`Tracked`](crate::Tracked).
///
/// Blocks keep their tag when they are resized or passed to other code. Takes time linear in the
/// maximum number of concurrent threads so far, and takes no lock.
///
/// ```
/// use aquifer::{Global, Tag, global, global::Tracked, tagged};
/// #[global_allocator]
/// static GLOBAL: Global<std::alloc::System, Tracked> = Global::new();
///
/// let parse = Tag::named("parse");
/// let mut list = tagged(parse, || Vec::<u64>::with_capacity(100));
/// list.reserve_exact(200);
/// let held = global::held_under(parse).unwrap();
/// assert_eq!((held.live, held.blocks), (1600, 1));
/// drop(list);
/// assert_eq!(global::held_under(parse).unwrap().live, 0);
/// ```
#[must_use]
pub fn held_under(tag: Tag) -> Option<Held> {
    TRACKS_BLOCKS.load(Ordering::Relaxed).then(|| figures(tag.index() as u16).0)
}

/// Returns the `n` tags that hold the most bytes, in descending order.
///
/// If held bytes are not recorded, it returns those that have allocated the most. Tags without
/// allocations are left out. Takes time proportional to the number of tags times the maximum number
/// of concurrent threads so far.
///
/// ```
/// use aquifer::{Global, Tag, global, global::Tracked, tagged};
///
/// #[global_allocator]
/// static GLOBAL: Global<std::alloc::System, Tracked> = Global::new();
///
/// let kept = tagged(Tag::named("index"), || vec![0u8; 1 << 20]);
/// let most = &global::top(1)[0];
/// assert_eq!((most.tag.name(), most.held.map(|held| held.live)), ("index", Some(1 << 20)));
/// # drop(kept);
/// ```
#[must_use]
pub fn top(n: usize) -> Vec<Consumer> {
    let tracked = TRACKS_BLOCKS.load(Ordering::Relaxed);
    let used = USED_ROWS.load(Ordering::Relaxed);
    let mut all: Vec<_> = (0..used)
        .filter_map(Tag::from_index)
        .map(|tag| {
            let (held, allocated) = figures(tag.index() as u16);
            Consumer { tag, held: tracked.then_some(held), allocated }
        })
        .filter(|consumer| consumer.allocated != Allocated::default())
        .collect();
    let weight =
        |consumer: &Consumer| consumer.held.map_or(consumer.allocated.bytes, |held| held.live);
    all.sort_by_key(|consumer| std::cmp::Reverse((weight(consumer), consumer.allocated.bytes)));
    all.truncate(n);
    all
}
