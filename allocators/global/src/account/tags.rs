//! Accounts by tag: what each tag has allocated, and what it holds.
//!
//! ```text
//!   row of a tag      │ charged, peak │ bytes, allocations, blocks │    shared; touched when a cell fills, or is flushed
//!   cell of a thread  │ credit        │ bytes, allocations, blocks │    eight in each slot, touched by its thread alone
//!   live     = charged − the credit of all cells of the tag
//! ```
//!
//! The same arithmetic as for the process: a cell prepays. So a thread that allocates and frees
//! under a tag writes only its own memory, and the row's figures are never too low.

use super::slot::{self, Slot};
use crate::thread_state::THREAD_STATE;
use aquifer_core::Tag;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

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

/// Minimum and maximum bytes of credit that a cell charges at once. In between it is a sixteenth of
/// the tag's bytes, so that the peak of a small tag is accurate.
const BATCH: (u64, u64) = (1 << 10, super::BATCH);
/// Maximum of the credit above which a cell returns some.
const MAX_CREDIT: u64 = super::MAX_CREDIT;

/// The account of one tag. Each has its own cache line, so that threads under different tags do not
/// contend.
#[repr(align(64))]
struct Row {
    /// Bytes in live blocks and in the credit of cells.
    charged: AtomicU64,
    /// The maximum of `charged` since the last reset.
    peak: AtomicU64,
    /// Counts of former cells.
    bytes: AtomicU64,
    allocations: AtomicU64,
    /// Live blocks of former cells. Negative (wrapped) if other cells have counted more frees.
    blocks: AtomicU64,
}

impl Row {
    const fn new() -> Self {
        Self {
            charged: AtomicU64::new(0),
            peak: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
            allocations: AtomicU64::new(0),
            blocks: AtomicU64::new(0),
        }
    }

    fn charge(&self, bytes: u64) {
        TRACKS_BLOCKS.store(true, Ordering::Relaxed);
        let charged = self.charged.fetch_add(bytes, Ordering::Relaxed).wrapping_add(bytes);
        if self.peak.load(Ordering::Relaxed) < charged {
            self.peak.fetch_max(charged, Ordering::Relaxed);
        }
    }

    /// Returns the bytes that a cell charges in addition to what it needs.
    fn batch(&self) -> u64 {
        (self.charged.load(Ordering::Relaxed) / 16).clamp(BATCH.0, BATCH.1)
    }
}

// Relaxed throughout: statistics, which guard no other memory. There is a row for each possible
// tag: 4 MiB of address space, of which only the pages of used tags are touched.
static ROWS: [Row; Tag::MAX] = [const { Row::new() }; Tag::MAX];
/// Rows from this index on have not been used.
static USED_ROWS: AtomicUsize = AtomicUsize::new(0);
/// Whether any row has been charged, so the program's allocator is one that records the tag of each
/// block.
static TRACKS_BLOCKS: AtomicBool = AtomicBool::new(false);

#[inline]
fn row(tag: u16) -> &'static Row {
    &ROWS[usize::from(tag)]
}

#[inline]
fn current() -> u16 {
    // Every index fits, since `Tag::MAX` does.
    Tag::current().index() as u16
}

/// The tag of an unused cell.
const UNUSED: u64 = u64::MAX;
/// Cells per slot. If a thread uses more tags in turn, some of them share a cell, which then
/// switches between them.
const CELLS: usize = 8;

/// The counts of one thread under one tag. Written only by the slot's owner. A cache line in size,
/// so that a shift computes its offset.
#[repr(align(64))]
struct TagCell {
    /// The tag that it counts for.
    tag: AtomicU64,
    /// Bytes that are charged to the tag's row but not in a live block.
    credit: AtomicU64,
    /// The credit above which some is returned.
    max_credit: AtomicU64,
    bytes: AtomicU64,
    allocations: AtomicU64,
    blocks: AtomicU64,
}

#[inline]
fn add(counter: &AtomicU64, more: u64) {
    counter.store(counter.load(Ordering::Relaxed).wrapping_add(more), Ordering::Relaxed);
}

impl TagCell {
    const fn new() -> Self {
        Self {
            tag: AtomicU64::new(UNUSED),
            credit: AtomicU64::new(0),
            max_credit: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
            allocations: AtomicU64::new(0),
            blocks: AtomicU64::new(0),
        }
    }

    /// Adds the counts of the previous tag to its row, and switches to `tag`.
    #[cold]
    #[inline(never)]
    fn switch_to(&self, tag: u16) {
        self.flush();
        USED_ROWS.fetch_max(usize::from(tag) + 1, Ordering::Relaxed);
        self.tag.store(u64::from(tag), Ordering::Relaxed);
    }

    fn flush(&self) {
        let Ok(tag) = u16::try_from(self.tag.load(Ordering::Relaxed)) else { return };
        let row = row(tag);
        row.bytes.fetch_add(self.bytes.load(Ordering::Relaxed), Ordering::Relaxed);
        row.allocations.fetch_add(self.allocations.load(Ordering::Relaxed), Ordering::Relaxed);
        row.blocks.fetch_add(self.blocks.load(Ordering::Relaxed), Ordering::Relaxed);
        row.charged.fetch_sub(self.credit.load(Ordering::Relaxed), Ordering::Relaxed);
        self.tag.store(UNUSED, Ordering::Relaxed);
        for counter in
            [&self.credit, &self.max_credit, &self.bytes, &self.allocations, &self.blocks]
        {
            counter.store(0, Ordering::Relaxed);
        }
    }

    #[inline]
    fn debit(&self, tag: u16, bytes: u64) {
        match self.credit.load(Ordering::Relaxed).checked_sub(bytes) {
            Some(rest) => self.credit.store(rest, Ordering::Relaxed),
            None => self.refill_and_debit(tag, bytes),
        }
        add(&self.bytes, bytes);
    }

    #[cold]
    #[inline(never)]
    fn refill_and_debit(&self, tag: u16, bytes: u64) {
        let row = row(tag);
        let batch = row.batch();
        let need = bytes.saturating_sub(self.credit.load(Ordering::Relaxed));
        row.charge(need + batch);
        add(&self.credit, (need + batch).wrapping_sub(bytes));
        // Room for the free of this block, so that the next block of this size is debited from the
        // credit.
        self.max_credit.store((2 * bytes.max(batch)).min(MAX_CREDIT), Ordering::Relaxed);
    }

    #[inline]
    fn add_credit(&self, tag: u16, bytes: u64) {
        let credit = self.credit.load(Ordering::Relaxed).wrapping_add(bytes);
        self.credit.store(credit, Ordering::Relaxed);
        if credit > self.max_credit.load(Ordering::Relaxed) {
            self.trim_credit(tag);
        }
    }

    #[cold]
    #[inline(never)]
    fn trim_credit(&self, tag: u16) {
        let row = row(tag);
        // `max_credit` is not yet set on a thread that only frees.
        let most = self.max_credit.load(Ordering::Relaxed).max(2 * row.batch());
        self.max_credit.store(most, Ordering::Relaxed);
        let credit = self.credit.load(Ordering::Relaxed);
        if credit > most {
            self.credit.store(most / 2, Ordering::Relaxed);
            row.charged.fetch_sub(credit - most / 2, Ordering::Relaxed);
        }
    }
}

/// The cells of a slot. A tag uses the cell whose index is its number modulo [`CELLS`].
pub(super) struct TagCells([TagCell; CELLS]);

impl TagCells {
    pub(super) const fn new() -> Self {
        Self([const { TagCell::new() }; CELLS])
    }

    #[inline]
    fn for_tag(&self, tag: u16) -> &TagCell {
        let cell = &self.0[usize::from(tag) % CELLS];
        if cell.tag.load(Ordering::Relaxed) != u64::from(tag) {
            cell.switch_to(tag);
        }
        cell
    }

    /// Adds the counts of all cells to their rows.
    pub(super) fn flush(&self) {
        self.0.iter().for_each(TagCell::flush);
    }
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
    THREAD_STATE.with(|state| match slot::thread_slot(state) {
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
    for slot in slot::slots() {
        let cell = &slot.cells.0[usize::from(tag) % CELLS];
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
    figures(tag.index() as u16).1
}

/// Returns what is held of the allocations in scopes of this tag, or `None` unless the program's
/// allocator is [`Tracked`](crate::Tracked).
///
/// Blocks keep their tag when they are resized or passed to other code. Takes time linear in the
/// maximum number of concurrent threads so far, and takes no lock.
///
/// ```
/// use aquifer_core::{Tag, tagged};
/// use aquifer_global::{self as global, Global, Tracked};
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
/// use aquifer_core::{Tag, tagged};
/// use aquifer_global::{self as global, Global, Tracked};
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
