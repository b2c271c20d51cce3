//! Lock-free lookup from an address to the span that contains it.
//!
//! A two-level table covers the process's addresses, with one entry per page of 4 KiB. An entry
//! names the span that contains the first byte of the page:
//! - A slab begins at a page boundary, so every page that contains an address of a slot names it.
//! - A single block begins anywhere and is longer than a page. Only the first page that begins
//!   inside it names it. So one store is enough, however long the block is.
//!
//! A second-level table has 2 MiB and covers 1 GiB of addresses. It is made when memory in that
//! range is first used, and is never freed. The system provides it zeroed and backs only the pages
//! that are written: 8 bytes for each page with blocks.
#![expect(unsafe_code, reason = "follows pointers to what is never freed")]

use super::span::SlabSpan;
use std::{
    alloc::{Layout, alloc_zeroed, dealloc},
    ops::Range,
    ptr,
    sync::atomic::{AtomicPtr, Ordering},
};

const PAGE_SHIFT: u32 = 12;
const PAGE: u64 = 1 << PAGE_SHIFT;
/// A second-level table covers 2³⁰ bytes.
const TABLE_SHIFT: u32 = 30;
const ENTRIES: usize = 1 << (TABLE_SHIFT - PAGE_SHIFT);
/// User addresses have 47 bits. The kernel maps memory beyond that only on request.
const TABLES: usize = if cfg!(miri) { 1 << 10 } else { 1 << (47 - TABLE_SHIFT) };

type Table = [AtomicPtr<SlabSpan>; ENTRIES];

static TOP: [AtomicPtr<Table>; TABLES] = [const { AtomicPtr::new(ptr::null_mut()) }; TABLES];

#[inline(always)]
fn entry(address: u64) -> Option<&'static AtomicPtr<SlabSpan>> {
    // An address beyond the table reads the entry of another address, and does not lie in its span.
    let table = TOP[(address >> TABLE_SHIFT) as usize % TABLES].load(Ordering::Acquire);
    // SAFETY: 1. null, or a table that `create_tables` made, which is never freed. 2. it contains
    // only atomics, and all zeros are null pointers.
    let table = unsafe { table.as_ref()? };
    Some(&table[(address >> PAGE_SHIFT) as usize % ENTRIES])
}

#[inline(always)]
fn load(address: u64) -> Option<&'static SlabSpan> {
    let span = entry(address)?.load(Ordering::Acquire);
    // SAFETY: 1. null, or from a `&'static Span` in `set`.
    unsafe { span.as_ref() }
}

/// Returns the span of the block that begins at `address`, and the block's slot.
#[inline]
pub(super) fn block_starting_at(address: u64) -> Option<(&'static SlabSpan, usize)> {
    if let Some(span) = load(address)
        && let Some(slot) = span.slot_starting_at(address)
    {
        return Some((span, slot));
    }
    single_starting_at(address)
}

/// Returns a single block that begins inside a page.
#[inline]
fn single_starting_at(address: u64) -> Option<(&'static SlabSpan, usize)> {
    let next = address.checked_next_multiple_of(PAGE)?;
    let span = load(next)?;
    (span.start() == address && span.slot_containing(address) == Some(0)).then_some((span, 0))
}

/// Returns the slot that begins at `address`, of a slab or of a single block that begins at a page.
#[inline(always)]
pub(super) fn slot_starting_at(address: u64) -> Option<(&'static SlabSpan, usize)> {
    let span = load(address)?;
    Some((span, span.slot_starting_at(address)?))
}

/// Returns the span and the slot that contain `address`.
#[inline(always)]
pub(super) fn slot_containing(address: u64) -> Option<(&'static SlabSpan, usize)> {
    let span = load(address)?;
    Some((span, span.slot_containing(address)?))
}

/// Creates the tables for these addresses. Returns whether that succeeded.
pub(super) fn create_tables(range: Range<u64>) -> bool {
    let last = range.end.saturating_sub(1).max(range.start);
    for table in range.start >> TABLE_SHIFT..=last >> TABLE_SHIFT {
        let Some(place) = TOP.get(table as usize) else { return false };
        if !place.load(Ordering::Acquire).is_null() {
            continue;
        }
        let layout = Layout::new::<Table>();
        // SAFETY: 1. the layout is not empty.
        let made = unsafe { alloc_zeroed(layout) };
        if made.is_null() {
            return false;
        }
        let raced = place
            .compare_exchange(ptr::null_mut(), made.cast(), Ordering::AcqRel, Ordering::Acquire)
            .is_err();
        if raced {
            // SAFETY: 1. allocated above with this layout, and not published.
            unsafe { dealloc(made, layout) };
        }
    }
    true
}

/// The pages that name a span: all that begin in a slab, or the first that begins in a single
/// block.
fn pages(start: u64, bytes: u64, slab: bool) -> impl Iterator<Item = u64> {
    let first = start.next_multiple_of(PAGE);
    let pages = (start + bytes).saturating_sub(first).div_ceil(PAGE);
    (0..if slab { pages } else { pages.min(1) }).map(move |page| first + page * PAGE)
}

/// Enters the span at its pages. [`create_tables`] must have succeeded for these addresses.
pub(super) fn set(start: u64, bytes: u64, slab: bool, span: &'static SlabSpan) {
    for entry in pages(start, bytes, slab).filter_map(entry) {
        debug_assert!(entry.load(Ordering::Relaxed).is_null(), "a page of {start:#x} has a span");
        entry.store(ptr::from_ref(span).cast_mut(), Ordering::Release);
    }
}

/// Clears the entries of a span's pages.
pub(super) fn clear(start: u64, bytes: u64, slab: bool) {
    for entry in pages(start, bytes, slab).filter_map(entry) {
        entry.store(ptr::null_mut(), Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Addresses that this process does not use.
    const AT: u64 = 5 << TABLE_SHIFT;

    #[test]
    fn slabs_and_single_blocks_on_shared_pages_are_distinguished() {
        assert!(block_starting_at(AT).is_none() && create_tables(AT - 4096..AT + (1 << 20)));
        let [slab, block, next]: [&'static SlabSpan; 3] =
            [(); 3].map(|()| &*Box::leak(Box::new(SlabSpan::vacant(0))));
        // Three slots of 1,344 bytes end 64 bytes before the page does, and a single block begins
        // there.
        let class = (0..super::super::classes::CLASSES)
            .find(|&c| super::super::classes::bytes_of(c) == 1344)
            .unwrap();
        slab.init_slab(1, AT, class, 3);
        set(AT, slab.bytes(), true, slab);
        let start = AT + slab.bytes();
        block.init_single(1, start, 100_000);
        set(start, 100_000, false, block);
        next.init_single(1, start + 100_000, 70_000);
        set(start + 100_000, 70_000, false, next);
        let found = |at| block_starting_at(at).map(|(span, slot)| (ptr::from_ref(span), slot));
        assert_eq!(found(AT + 1344), Some((ptr::from_ref(slab), 1)));
        assert_eq!(found(start), Some((ptr::from_ref(block), 0)));
        assert_eq!(found(start + 100_000), Some((ptr::from_ref(next), 0)));
        assert_eq!((found(AT + 16), found(start + 16), found(start + 4096)), (None, None, None));
        for beyond in [1 << 47, 1 << 60, 1 << 63] {
            assert_eq!((found(AT + beyond), found(start + beyond)), (None, None), "{beyond:x}");
        }
        clear(start, 100_000, false);
        assert_eq!((found(start), found(start + 100_000)), (None, Some((ptr::from_ref(next), 0))));
        assert!(found(u64::MAX).is_none() && found(0).is_none());
    }

    #[test]
    fn addresses_beyond_the_table_are_refused() {
        assert!(!create_tables(1 << 60..(1 << 60) + 4096));
        assert!(create_tables(AT..AT));
    }
}
