//! From an address to what is known of the memory there, without a lock.
//!
//! A table of two levels over the process's addresses, a page of 4 KiB an entry: an entry names the
//! span that the page's first byte lies in. A slab begins at a page, so every page of it that an
//! address can lie in is its own. A single block begins anywhere and is at least a page and a bit
//! long, so the first page that begins inside it is its own, and that one has its entry: one store,
//! however long it is.
//!
//! The lower tables are of 2 MiB for each GiB of addresses in which memory has ever been, and are
//! never freed. They come zeroed from the system, which backs only what is written: 8 bytes for
//! each page that blocks lie in.
#![expect(unsafe_code, reason = "follows pointers to what is never freed")]

use super::span::Span;
use std::{
    alloc::{Layout, alloc_zeroed, dealloc},
    ops::Range,
    ptr,
    sync::atomic::{AtomicPtr, Ordering},
};

const PAGE_SHIFT: u32 = 12;
const PAGE: u64 = 1 << PAGE_SHIFT;
/// A lower table is for 2³⁰ bytes.
const TABLE_SHIFT: u32 = 30;
const ENTRIES: usize = 1 << (TABLE_SHIFT - PAGE_SHIFT);
/// User addresses have 47 bits; beyond that nobody maps anything unasked.
const TABLES: usize = if cfg!(miri) { 1 << 10 } else { 1 << (47 - TABLE_SHIFT) };

type Table = [AtomicPtr<Span>; ENTRIES];

static TOP: [AtomicPtr<Table>; TABLES] = [const { AtomicPtr::new(ptr::null_mut()) }; TABLES];

#[inline(always)]
fn entry(address: u64) -> Option<&'static AtomicPtr<Span>> {
    // An address beyond the table meets the entry of another, and does not lie in its span.
    let table = TOP[(address >> TABLE_SHIFT) as usize % TABLES].load(Ordering::Acquire);
    // SAFETY: 1. null, or a table that `cover` made, which is never freed. 2. only atomics in it,
    // and all zeros are a null pointer.
    let table = unsafe { table.as_ref()? };
    Some(&table[(address >> PAGE_SHIFT) as usize % ENTRIES])
}

#[inline(always)]
fn load(address: u64) -> Option<&'static Span> {
    let span = entry(address)?.load(Ordering::Acquire);
    // SAFETY: 1. null, or from a `&'static Span` in `set`.
    unsafe { span.as_ref() }
}

/// The span of the block that begins at `address`, and the block's slot in it.
#[inline]
pub(super) fn block_from(address: u64) -> Option<(&'static Span, usize)> {
    if let Some(span) = load(address)
        && let Some(slot) = span.slot_from(address)
    {
        return Some((span, slot));
    }
    exact_from(address)
}

/// A single block that begins inside a page.
#[inline]
fn exact_from(address: u64) -> Option<(&'static Span, usize)> {
    let next = address.checked_next_multiple_of(PAGE)?;
    let span = load(next)?;
    (span.start() == address && span.slot_at(address) == Some(0)).then_some((span, 0))
}

/// The slot that begins at `address`, of a slab or of a single block that begins at a page.
#[inline(always)]
pub(super) fn slot_from(address: u64) -> Option<(&'static Span, usize)> {
    let span = load(address)?;
    Some((span, span.slot_from(address)?))
}

/// The slab that `address` lies in, anywhere, and the slot.
#[inline(always)]
pub(super) fn slab_at(address: u64) -> Option<(&'static Span, usize)> {
    let span = load(address)?;
    Some((span, span.slot_at(address)?))
}

/// Makes entries for these addresses possible; says whether that could be done.
pub(super) fn cover(range: Range<u64>) -> bool {
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
            // SAFETY: 1. made above with this layout, and nobody has seen it.
            unsafe { dealloc(made, layout) };
        }
    }
    true
}

/// The pages that name a span: all that begin in a slab, the first that begins in a single block.
fn pages(start: u64, bytes: u64, slab: bool) -> impl Iterator<Item = u64> {
    let first = start.next_multiple_of(PAGE);
    let pages = (start + bytes).saturating_sub(first).div_ceil(PAGE);
    (0..if slab { pages } else { pages.min(1) }).map(move |page| first + page * PAGE)
}

/// Names the span at its pages. Their addresses have been covered.
pub(super) fn set(start: u64, bytes: u64, slab: bool, span: &'static Span) {
    for entry in pages(start, bytes, slab).filter_map(entry) {
        entry.store(ptr::from_ref(span).cast_mut(), Ordering::Release);
    }
}

/// Takes the span's name off its pages.
pub(super) fn clear(start: u64, bytes: u64, slab: bool) {
    for entry in pages(start, bytes, slab).filter_map(entry) {
        entry.store(ptr::null_mut(), Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Addresses that nothing of this process has.
    const AT: u64 = 5 << TABLE_SHIFT;

    #[test]
    fn slabs_and_single_blocks_that_share_pages_are_told_apart() {
        assert!(block_from(AT).is_none() && cover(AT - 4096..AT + (1 << 20)));
        let [slab, block, next]: [&'static Span; 3] =
            [(); 3].map(|()| &*Box::leak(Box::new(Span::vacant(0))));
        // Three slots of 1,360 bytes end 16 bytes before the page does, where a single block
        // begins.
        let class = (0..super::super::classes::CLASSES)
            .find(|&c| super::super::classes::bytes_of(c) == 1344)
            .unwrap();
        slab.cut(1, AT, class, 3);
        set(AT, slab.bytes(), true, slab);
        let start = AT + slab.bytes();
        block.exact(1, start, 100_000);
        set(start, 100_000, false, block);
        next.exact(1, start + 100_000, 70_000);
        set(start + 100_000, 70_000, false, next);
        let found = |at| block_from(at).map(|(span, slot)| (ptr::from_ref(span), slot));
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
        assert!(!cover(1 << 60..(1 << 60) + 4096));
        assert!(cover(AT..AT));
    }
}
