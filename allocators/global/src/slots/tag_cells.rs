//! The accounts of tags: a row for each tag, and the cells of each thread.
//!
//! ```text
//!   row of a tag      │ charged, peak │ bytes, allocations, blocks │    shared; touched when a cell fills, or is flushed
//!   cell of a thread  │ credit        │ bytes, allocations, blocks │    eight in each slot, touched by its thread alone
//!   live     = charged − the credit of all cells of the tag
//! ```
//!
//! The same arithmetic as for the process: a cell prepays. So a thread that allocates and frees
//! under a tag writes only its own memory, and the row's figures are never too low.

use super::charged;
use aquifer_core::Tag;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

/// Minimum and maximum bytes of credit that a cell charges at once. In between it is a sixteenth of
/// the tag's bytes, so that the peak of a small tag is accurate.
const BATCH: (u64, u64) = (1 << 10, charged::BATCH);
/// Maximum of the credit above which a cell returns some.
const MAX_CREDIT: u64 = charged::MAX_CREDIT;

/// The account of one tag. Each has its own cache line, so that threads under different tags do not
/// contend.
#[repr(align(64))]
pub(crate) struct Row {
    /// Bytes in live blocks and in the credit of cells.
    pub(crate) charged: AtomicU64,
    /// The maximum of `charged` since the last reset.
    pub(crate) peak: AtomicU64,
    /// Counts of former cells.
    pub(crate) bytes: AtomicU64,
    pub(crate) allocations: AtomicU64,
    /// Live blocks of former cells. Negative (wrapped) if other cells have counted more frees.
    pub(crate) blocks: AtomicU64,
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

    pub(crate) fn charge(&self, bytes: u64) {
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
pub(crate) static ROWS: [Row; Tag::MAX] = [const { Row::new() }; Tag::MAX];
/// Rows from this index on have not been used.
pub(crate) static USED_ROWS: AtomicUsize = AtomicUsize::new(0);
/// Whether any row has been charged, so the program's allocator is one that records the tag of each
/// block.
pub(crate) static TRACKS_BLOCKS: AtomicBool = AtomicBool::new(false);

#[inline]
pub(crate) fn row(tag: u16) -> &'static Row {
    &ROWS[usize::from(tag)]
}

/// The tag of an unused cell.
const UNUSED: u64 = u64::MAX;
/// Cells per slot. If a thread uses more tags in turn, some of them share a cell, which then
/// switches between them.
const CELLS: usize = 8;

/// The counts of one thread under one tag. Written only by the slot's owner. A cache line in size,
/// so that a shift computes its offset.
#[repr(align(64))]
pub(crate) struct TagCell {
    /// The tag that it counts for.
    pub(crate) tag: AtomicU64,
    /// Bytes that are charged to the tag's row but not in a live block.
    pub(crate) credit: AtomicU64,
    /// The credit above which some is returned.
    max_credit: AtomicU64,
    pub(crate) bytes: AtomicU64,
    pub(crate) allocations: AtomicU64,
    pub(crate) blocks: AtomicU64,
}

#[inline]
pub(crate) fn add(counter: &AtomicU64, more: u64) {
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
    pub(crate) fn debit(&self, tag: u16, bytes: u64) {
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
    pub(crate) fn add_credit(&self, tag: u16, bytes: u64) {
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
pub(crate) struct TagCells([TagCell; CELLS]);

impl TagCells {
    pub(super) const fn new() -> Self {
        Self([const { TagCell::new() }; CELLS])
    }

    /// Returns the cell in which `tag` counts, which may count another tag now.
    #[inline]
    pub(crate) fn of(&self, tag: u16) -> &TagCell {
        &self.0[usize::from(tag) % CELLS]
    }

    #[inline]
    pub(crate) fn for_tag(&self, tag: u16) -> &TagCell {
        let cell = self.of(tag);
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
