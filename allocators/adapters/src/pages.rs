//! An arena of fixed-size pages: runs of pages in one block, identified by their offset.
//!
//! ```text
//!   page      0     1     2     3     4     5     6     7
//!          ┌─────┬─────┬─────┬─────┬─────┬─────┬─────┬─────┐
//!          │  Pages 0..2   │ free│  Pages 3..6     │ waits │   one block of the allocator below
//!          └─────┴─────┴─────┴─────┴─────┴─────┴─────┴─────┘
//! ```
//!
//! An offset, unlike an address, can be stored in other data, or sent to a device or another
//! process. Metadata is stored outside the block.
#![expect(unsafe_code, reason = "makes references to its pages")]

use allocator_api2::alloc::{Allocator, Global};
use aquifer_core::{DeferReuse, Gate, Id, IdSpace, MemoryError};
use aquifer_heap::Runs;
use std::{
    alloc::Layout,
    error, fmt,
    ops::Range,
    ptr::NonNull,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

/// A fixed number of pages of one size, allocated in runs.
///
/// - The lowest run that is long enough is allocated, so the same operations give the same offsets.
/// - Adjacent free pages are merged immediately.
/// - Pages are zeroed when the arena is created. Later they contain what their last owner wrote.
/// - It is `Sync` if the upstream allocator is. Threads may take and free pages concurrently, and
///   each accesses its own pages.
///
/// ```
/// use aquifer_adapters::PageArena;
/// let arena = PageArena::new(64, 4096)?;
/// let mut table = arena.take(10_000)?; // bytes: three pages
/// assert_eq!((table.offset(), table.bytes(), arena.free_pages()), (0, 3 * 4096, 61));
/// arena.view_mut(&mut table, 9_000..9_004)?.copy_from_slice(&[1, 2, 3, 4]);
/// assert_eq!(arena.view(&table, 9_002..9_004)?, &[3, 4]);
/// assert!(arena.view(&table, 12_000..12_289).is_err(), "it ends at 12,288");
/// arena.free(table)?;
/// assert_eq!(arena.free_pages(), 64);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// `Pages` is a token that cannot be copied, so freed pages cannot be accessed.
///
/// ```compile_fail
/// # use aquifer_adapters::PageArena;
/// let arena = PageArena::new(4, 4096)?;
/// let pages = arena.take(1)?;
/// let view = arena.view(&pages, 0..1)?;
/// arena.free(pages)?;
/// let late = view[0];
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct PageArena<A: Allocator = Global> {
    upstream: A,
    base: NonNull<u8>,
    layout: Layout,
    page: usize,
    space: IdSpace<PageArena>,
    state: Mutex<State>,
}

/// A run of pages of one [`PageArena`].
///
/// Return it with [`PageArena::free`]. If it is dropped, its pages stay allocated until the arena
/// is dropped.
#[must_use = "pages that are dropped stay taken"]
#[derive(PartialEq, Eq, Debug)]
pub struct Pages {
    id: Id<PageArena>,
    offset: usize,
    bytes: usize,
}

/// The error of a [`PageArena`].
///
/// See [`PageArena`] for an example.
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum PageError {
    /// No run of free pages is long enough.
    Full {
        /// Requested pages.
        pages: usize,
        /// Free pages, in any number of runs.
        free: usize,
        /// Freed pages that wait for a gate.
        waiting: usize,
    },
    /// A view ends after the last byte of the pages, or before it begins.
    OutOfBounds {
        /// The range of the view, in bytes from the start of the pages.
        range: Range<usize>,
        /// Bytes of the pages.
        bytes: usize,
    },
    /// The pages belong to another arena.
    Foreign,
    /// The arena cannot be created: the page size is not a power of two, or the upstream allocator
    /// refused.
    NoMemory {
        /// Number of pages.
        pages: usize,
        /// Bytes of each page.
        page: usize,
    },
    /// The upstream allocator cannot hold back the block.
    Memory(MemoryError),
}

/// Pages that could not be freed, and the error. The pages stay allocated.
///
/// See [`PageArena`] for an example.
#[derive(PartialEq, Eq, Debug)]
pub struct Unfreed {
    /// The pages.
    pub pages: Pages,
    /// The reason.
    pub why: PageError,
}

struct State {
    runs: Runs,
    /// Freed pages, and the gates that they wait for.
    waiting: Vec<(Range<usize>, Arc<dyn Gate>)>,
}

// SAFETY: 1. the block belongs to `A` and moves with it, and the rest is `Send`.
unsafe impl<A: Allocator + Send> Send for PageArena<A> {}
// SAFETY: 1. the metadata is behind a lock. 2. Bytes are accessed only through their unique
// `Pages`: `&Pages` for reading, `&mut Pages` for writing. 3. The upstream allocator is accessed
// only through `&`.
unsafe impl<A: Allocator + Sync> Sync for PageArena<A> {}

impl PageArena {
    /// Creates an arena of `pages` pages of `page` bytes, a power of two, from the global
    /// allocator.
    ///
    /// # Errors
    /// [`PageError::NoMemory`].
    pub fn new(pages: usize, page: usize) -> Result<Self, PageError> {
        Self::new_in(pages, page, Global)
    }
}

impl<A: Allocator> PageArena<A> {
    /// Creates an arena of `pages` pages of `page` bytes, a power of two, in one zeroed block of
    /// `upstream` that is aligned to a page.
    ///
    /// # Errors
    /// [`PageError::NoMemory`]. No memory is held then.
    pub fn new_in(pages: usize, page: usize, upstream: A) -> Result<Self, PageError> {
        let refused = PageError::NoMemory { pages, page };
        let bytes = pages.checked_mul(page).filter(|&bytes| bytes > 0);
        let layout = bytes.and_then(|bytes| Layout::from_size_align(bytes, page).ok());
        let layout = layout.ok_or_else(|| refused.clone())?;
        let runs = Runs::new(pages).ok_or_else(|| refused.clone())?;
        let base = upstream.allocate_zeroed(layout).map_err(|_| refused)?.cast();
        let state = Mutex::new(State { runs, waiting: Vec::new() });
        Ok(Self { upstream, base, layout, page, space: IdSpace::new(), state })
    }

    /// Allocates the lowest run of pages that holds `bytes`, at least one page. Takes time linear
    /// in the number of pages.
    ///
    /// # Errors
    /// [`PageError::Full`]. Does not wait for gates: pages freed behind a gate are available once
    /// it is open.
    pub fn take(&self, bytes: usize) -> Result<Pages, PageError> {
        let pages = bytes.div_ceil(self.page).max(1);
        let mut state = self.lock();
        let mut at = state.runs.take(pages);
        if at.is_none() && !state.waiting.is_empty() {
            // Gates are foreign code, so they are polled outside the lock. An open gate stays open.
            let mut gates: Vec<_> = state.waiting.iter().map(|(_, gate)| gate.clone()).collect();
            drop(state);
            gates.retain(|gate| gate.is_open());
            state = self.lock();
            state.free_opened(&gates);
            at = state.runs.take(pages);
        }
        let Some(at) = at else {
            let waiting = state.waiting.iter().map(|(pages, _)| pages.len()).sum();
            return Err(PageError::Full { pages, free: state.runs.free_pages(), waiting });
        };
        Ok(Pages { id: self.space.mint(0, 0), offset: at * self.page, bytes: pages * self.page })
    }

    /// Frees pages.
    ///
    /// # Errors
    /// [`PageError::Foreign`] for pages of another arena. The error returns them.
    pub fn free(&self, pages: Pages) -> Result<(), Unfreed> {
        match self.page_range(&pages) {
            Ok(run) => self.lock().runs.free(run),
            Err(why) => return Err(Unfreed { pages, why }),
        }
        Ok(())
    }

    /// Returns part of the bytes of some pages, by the offset from their start.
    ///
    /// # Errors
    /// [`PageError::OutOfBounds`], [`PageError::Foreign`].
    pub fn view<'v>(
        &'v self,
        pages: &'v Pages,
        range: Range<usize>,
    ) -> Result<&'v [u8], PageError> {
        let block = self.bytes_of(pages, range)?;
        // SAFETY: 1. The bytes lie in the block and are initialised: it was zeroed. 2. They belong
        // only to these pages, and holding the token by `&` excludes writes. 3. The view borrows
        // both the arena and the token.
        Ok(unsafe { block.as_ref() })
    }

    /// Like [`view`](PageArena::view), for writing.
    ///
    /// # Errors
    /// As [`view`](PageArena::view).
    pub fn view_mut<'v>(
        &'v self,
        pages: &'v mut Pages,
        range: Range<usize>,
    ) -> Result<&'v mut [u8], PageError> {
        let mut block = self.bytes_of(pages, range)?;
        // SAFETY: 1. and 3. as in `view`. 2. The bytes belong only to these pages, and the token is
        // borrowed mutably.
        Ok(unsafe { block.as_mut() })
    }

    /// Returns the number of free pages.
    #[must_use]
    pub fn free_pages(&self) -> usize {
        self.lock().runs.free_pages()
    }

    /// Returns the bytes of one page.
    #[must_use]
    pub fn page_bytes(&self) -> usize {
        self.page
    }

    /// Returns the bytes of all pages.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.layout.size()
    }

    /// Returns the address of offset 0. A device needs it together with offsets.
    #[must_use]
    pub fn base(&self) -> NonNull<u8> {
        self.base
    }

    /// Returns the upstream allocator.
    pub fn upstream(&self) -> &A {
        &self.upstream
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing unwinds while the lock is held.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the page numbers of a run.
    fn page_range(&self, pages: &Pages) -> Result<Range<usize>, PageError> {
        self.space.resolve(pages.id).ok_or(PageError::Foreign)?;
        Ok(pages.offset / self.page..(pages.offset + pages.bytes) / self.page)
    }

    fn bytes_of(&self, pages: &Pages, range: Range<usize>) -> Result<NonNull<[u8]>, PageError> {
        self.page_range(pages)?;
        if range.start > range.end || range.end > pages.bytes {
            return Err(PageError::OutOfBounds { range, bytes: pages.bytes });
        }
        // SAFETY: the range was checked to lie in the pages, which lie in the block.
        let start = unsafe { self.base.add(pages.offset + range.start) };
        Ok(NonNull::slice_from_raw_parts(start, range.len()))
    }
}

impl<A: DeferReuse> PageArena<A> {
    /// Frees pages once `until` is open, because a device may read them before. Never blocks. The
    /// gate is polled when pages run out.
    ///
    /// The whole block is held back until the gate opens too, so the arena may be dropped before.
    ///
    /// # Errors
    /// [`PageError::Foreign`], or [`PageError::Memory`] from the upstream allocator. The error
    /// returns the pages.
    pub fn free_after(&self, pages: Pages, until: Arc<dyn Gate>) -> Result<(), Unfreed> {
        let deferred = self.page_range(&pages).and_then(|run| {
            self.upstream.defer(self.base, until.clone()).map_err(PageError::Memory)?;
            Ok(run)
        });
        match deferred {
            Ok(run) => self.lock().waiting.push((run, until)),
            Err(why) => return Err(Unfreed { pages, why }),
        }
        Ok(())
    }
}

impl State {
    /// Frees the pages that wait for these gates.
    fn free_opened(&mut self, open: &[Arc<dyn Gate>]) {
        let (ready, waiting) = std::mem::take(&mut self.waiting)
            .into_iter()
            .partition(|(_, gate)| open.iter().any(|open| Arc::ptr_eq(open, gate)));
        self.waiting = waiting;
        let ready: Vec<_> = ready;
        ready.into_iter().for_each(|(pages, _)| self.runs.free(pages));
    }
}

impl Pages {
    /// Returns the bytes from the arena's base to the first page.
    #[must_use]
    pub fn offset(&self) -> usize {
        self.offset
    }

    /// Returns the bytes of all pages.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

impl<A: Allocator> Drop for PageArena<A> {
    fn drop(&mut self) {
        // SAFETY: 1. `upstream` allocated the block with this layout. 2. No view of it is left. If
        // a device may still read it, it was deferred in `upstream`.
        unsafe { self.upstream.deallocate(self.base, self.layout) };
    }
}

impl<A: Allocator> fmt::Debug for PageArena<A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PageArena")
            .field("base", &self.base)
            .field("bytes", &self.bytes())
            .field("page", &self.page)
            .field("free", &self.free_pages())
            .finish_non_exhaustive()
    }
}

aquifer_core::__debug_as_display!(PageError);

impl fmt::Display for PageError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Full { pages, free, waiting } => write!(
                f,
                "no run of {pages} pages is free: {free} are free in shorter runs, {waiting} wait for a device"
            ),
            Self::OutOfBounds { range, bytes } => {
                write!(f, "bytes {} to {} of pages that have {bytes}", range.start, range.end)
            }
            Self::Foreign => f.write_str("the pages are another arena's"),
            Self::NoMemory { pages, page } => write!(
                f,
                "{pages} pages of {page} bytes cannot be had: the size is no power of two, or the allocator below refused"
            ),
            Self::Memory(_) => f.write_str("the allocator below does not hold the block back"),
        }
    }
}

impl fmt::Display for Unfreed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "pages at offset {} were not given back", self.pages.offset)
    }
}

impl error::Error for Unfreed {
    fn source(&self) -> Option<&(dyn error::Error + 'static)> {
        Some(&self.why)
    }
}

impl error::Error for PageError {
    fn source(&self) -> Option<&(dyn error::Error + 'static)> {
        match self {
            Self::Memory(error) => Some(error),
            _ => None,
        }
    }
}
