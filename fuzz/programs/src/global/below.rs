//! The allocators below those under test: one that tracks its blocks, and two routes.
#![expect(unsafe_code, reason = "implements `GlobalAlloc` and an allocator to route to")]

use aquifer_core::impl_allocator;
use aquifer_global::{Over, RouteId, register};
use std::{
    alloc::{GlobalAlloc, Layout, System},
    collections::BTreeMap,
    ops::Range,
    ptr::{self, NonNull},
    sync::{
        Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicU32, Ordering},
    },
};

/// Live blocks and their layouts.
type Table = Mutex<BTreeMap<usize, Layout>>;

fn locked(table: &Table) -> MutexGuard<'_, BTreeMap<usize, Layout>> {
    table.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The system's allocator with a table of its blocks. It returns memory filled with garbage, and
/// fails as often as requested.
#[derive(Debug)]
pub(crate) struct Books {
    live: Table,
    refusals: AtomicU32,
}

impl Books {
    /// Creates it without blocks.
    pub(crate) const fn new() -> Self {
        Self { live: Mutex::new(BTreeMap::new()), refusals: AtomicU32::new(0) }
    }

    /// Makes the next `count` requests fail.
    pub(crate) fn refuse(&self, count: u32) {
        self.refusals.store(count, Ordering::Relaxed);
    }

    /// Returns whether the next request would fail.
    pub(crate) fn refuses(&self) -> bool {
        self.refusals.load(Ordering::Relaxed) > 0
    }

    /// Returns the layout of a live block.
    pub(crate) fn layout(&self, block: *mut u8) -> Option<Layout> {
        locked(&self.live).get(&block.addr()).copied()
    }

    /// Returns the number of live blocks.
    pub(crate) fn blocks(&self) -> usize {
        locked(&self.live).len()
    }

    fn refused(&self) -> bool {
        self.refusals
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1))
            .is_ok()
    }

    fn note(&self, block: *mut u8, layout: Layout) -> *mut u8 {
        if !block.is_null() {
            assert!(locked(&self.live).insert(block.addr(), layout).is_none(), "given twice");
        }
        block
    }

    fn strike(&self, block: *mut u8, layout: Layout) {
        assert_eq!(
            locked(&self.live).remove(&block.addr()),
            Some(layout),
            "given back as it was asked for"
        );
    }
}

impl Default for Books {
    fn default() -> Self {
        Self::new()
    }
}

// SAFETY: returns the system's blocks, or null.
unsafe impl GlobalAlloc for Books {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if self.refused() {
            return ptr::null_mut();
        }
        // SAFETY: guaranteed by the caller.
        let block = unsafe { System.alloc(layout) };
        if !block.is_null() {
            // SAFETY: the block has that many bytes.
            unsafe { block.write_bytes(0xD1, layout.size()) };
        }
        self.note(block, layout)
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        if self.refused() {
            return ptr::null_mut();
        }
        // SAFETY: guaranteed by the caller.
        self.note(unsafe { System.alloc_zeroed(layout) }, layout)
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        if self.refused() {
            return ptr::null_mut();
        }
        let Ok(new) = Layout::from_size_align(new_size, layout.align()) else {
            return ptr::null_mut();
        };
        self.strike(block, layout);
        // SAFETY: guaranteed by the caller.
        let moved = unsafe { System.realloc(block, layout, new_size) };
        if moved.is_null() {
            self.note(block, layout)
        } else {
            self.note(moved, new)
        };
        moved
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        self.strike(block, layout);
        // SAFETY: guaranteed by the caller.
        unsafe { System.dealloc(block, layout) };
    }
}

/// Bytes of a route.
const STRIP: usize = 128 << 10;

/// A first-fit allocator over its own bytes.
#[derive(Debug)]
pub(crate) struct Strip {
    start: NonNull<u8>,
    live: Table,
}

// SAFETY: the bytes behind the pointer belong to the owners of the blocks.
unsafe impl Send for Strip {}
// SAFETY: the other field is a lock.
unsafe impl Sync for Strip {}

impl Strip {
    fn new() -> Self {
        let start = NonNull::from(vec![0xD2u8; STRIP].leak()).cast();
        Self { start, live: Mutex::default() }
    }

    /// Returns the address range of its blocks.
    pub(crate) fn window(&self) -> Range<usize> {
        self.start.addr().get()..self.start.addr().get() + STRIP
    }

    /// Returns the layout of a live block.
    pub(crate) fn layout(&self, block: *mut u8) -> Option<Layout> {
        locked(&self.live).get(&block.addr()).copied()
    }

    fn take(&self, layout: Layout) -> Option<NonNull<u8>> {
        let mut live = locked(&self.live);
        let mut at = self.window().start.next_multiple_of(layout.align());
        for (&start, other) in live.iter() {
            if at + layout.size() <= start {
                break;
            }
            at = at.max((start + other.size()).next_multiple_of(layout.align()));
        }
        if at + layout.size() > self.window().end {
            return None;
        }
        live.insert(at, layout);
        // SAFETY: the offset is inside the strip.
        Some(unsafe { self.start.add(at - self.window().start) })
    }

    fn give_back(&self, block: NonNull<u8>, layout: Layout) {
        let found = locked(&self.live).remove(&block.addr().get());
        assert_eq!(found, Some(layout), "given back as it was asked for");
    }
}

impl_allocator! {
    // SAFETY: blocks are taken from the strip where no live one is.
    unsafe impl ['s] for &'s Strip {
        fn allocate(&self, layout: Layout) -> Result<NonNull<[u8]>, AllocError> {
            let block = self.take(layout).ok_or(AllocError)?;
            Ok(NonNull::slice_from_raw_parts(block, layout.size()))
        }

        unsafe fn deallocate(&self, block: NonNull<u8>, layout: Layout) {
            self.give_back(block, layout);
        }
    }
}

/// Returns the routes of all programs, which are registered for the life of the process.
pub(crate) fn routes() -> &'static [(RouteId, &'static Strip)] {
    static ROUTES: OnceLock<Vec<(RouteId, &'static Strip)>> = OnceLock::new();
    let made = || {
        let strip: &'static Strip = Box::leak(Box::new(Strip::new()));
        // SAFETY: 1. The strip's blocks are in its window and no other blocks are. 2. A lock works
        // at any time.
        let over = Box::leak(Box::new(unsafe { Over::new(strip, strip.window()) }));
        register(over).ok().map(|id| (id, strip))
    };
    ROUTES.get_or_init(|| (0..2).filter_map(|_| made()).collect())
}
