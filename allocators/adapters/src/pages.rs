//! Runs of pages in one block, told apart by their offset.
//!
//! ```text
//!   page      0     1     2     3     4     5     6     7
//!          ┌─────┬─────┬─────┬─────┬─────┬─────┬─────┬─────┐
//!          │  Pages 0..2   │ free│  Pages 3..6     │ waits │   one block of the allocator below
//!          └─────┴─────┴─────┴─────┴─────┴─────┴─────┴─────┘
//! ```
//!
//! An offset can be kept in other data, sent to a device or to another process, where an address
//! could not. Bookkeeping lies beside the block, never in it.
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

/// A fixed number of pages of one size, given out in runs.
///
/// The lowest run that is long enough is taken: the same operations give the same offsets. Freed
/// neighbours are one run again at once. Pages are zero when the arena is made, and afterwards what
/// their last owner wrote.
///
/// It is `Sync` where the allocator below is: threads take and free pages at a time, and each looks
/// at its own.
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
/// Pages are a token: without a copy of it nobody can look at them once they are freed.
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
/// It is given back by [`PageArena::free`]; one that is dropped stays taken until the arena goes.
#[must_use = "pages that are dropped stay taken"]
#[derive(PartialEq, Eq, Debug)]
pub struct Pages {
    id: Id<PageArena>,
    offset: usize,
    bytes: usize,
}

/// Why an arena of pages refused.
///
/// Its example is that of [`PageArena`].
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum PageError {
    /// No run of free pages is long enough.
    Full {
        /// Pages asked for.
        pages: usize,
        /// Pages that are free, in however many runs.
        free: usize,
        /// Pages that wait for a gate.
        waiting: usize,
    },
    /// A view reaches behind the pages' last byte, or ends before it begins.
    OutOfBounds {
        /// Where it begins and ends, in bytes from the pages' start.
        range: Range<usize>,
        /// Bytes that there are.
        bytes: usize,
    },
    /// The pages are another arena's.
    Foreign,
    /// The arena cannot be made: its pages are no power of two in size, or the allocator below
    /// refused.
    NoMemory {
        /// Pages.
        pages: usize,
        /// Bytes of each.
        page: usize,
    },
    /// The allocator below does not hold the block back.
    Memory(MemoryError),
}

/// Pages that could not be given back, and why. They are still taken, by whoever has this.
///
/// Its example is that of [`PageArena`].
#[derive(PartialEq, Eq, Debug)]
pub struct Unfreed {
    /// The pages.
    pub pages: Pages,
    /// Why not.
    pub why: PageError,
}

struct State {
    runs: Runs,
    /// Freed pages and the gate that they wait for.
    waiting: Vec<(Range<usize>, Arc<dyn Gate>)>,
}

// SAFETY: 1. the block is `A`'s and goes where `A` goes; the rest is `Send`.
unsafe impl<A: Allocator + Send> Send for PageArena<A> {}
// SAFETY: 1. bookkeeping is behind a lock. 2. Bytes are reached through `Pages` alone, of which
// there is one for each: by `&Pages` to be read, by `&mut Pages` to be written. 3. The allocator
// below is reached by `&` alone.
unsafe impl<A: Allocator + Sync> Sync for PageArena<A> {}

impl PageArena {
    /// `pages` pages of `page` bytes, a power of two, from the global allocator.
    ///
    /// # Errors
    /// [`PageError::NoMemory`].
    pub fn new(pages: usize, page: usize) -> Result<Self, PageError> {
        Self::new_in(pages, page, Global)
    }
}

impl<A: Allocator> PageArena<A> {
    /// `pages` pages of `page` bytes, a power of two, in one zeroed block of `upstream`, aligned to
    /// a page.
    ///
    /// # Errors
    /// [`PageError::NoMemory`]; nothing is held then.
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

    /// The lowest run of pages that holds `bytes`, which is one page at least. In time linear in
    /// the pages.
    ///
    /// # Errors
    /// [`PageError::Full`]. Nothing waits for gates: a run that is freed behind one counts once the
    /// gate is open.
    pub fn take(&self, bytes: usize) -> Result<Pages, PageError> {
        let pages = bytes.div_ceil(self.page).max(1);
        let mut state = self.lock();
        let mut at = state.runs.take(pages);
        if at.is_none() && !state.waiting.is_empty() {
            // Gates are foreign code: they are asked outside of the lock. One that is open stays
            // so.
            let mut gates: Vec<_> = state.waiting.iter().map(|(_, gate)| gate.clone()).collect();
            drop(state);
            gates.retain(|gate| gate.is_open());
            state = self.lock();
            state.release_behind(&gates);
            at = state.runs.take(pages);
        }
        let Some(at) = at else {
            let waiting = state.waiting.iter().map(|(pages, _)| pages.len()).sum();
            return Err(PageError::Full { pages, free: state.runs.free_pages(), waiting });
        };
        Ok(Pages { id: self.space.mint(0, 0), offset: at * self.page, bytes: pages * self.page })
    }

    /// Gives pages back.
    ///
    /// # Errors
    /// [`PageError::Foreign`] for those of another arena, which come back with it.
    pub fn free(&self, pages: Pages) -> Result<(), Unfreed> {
        match self.run(&pages) {
            Ok(run) => self.lock().runs.free(run),
            Err(why) => return Err(Unfreed { pages, why }),
        }
        Ok(())
    }

    /// Part of the bytes of some pages, by their offset from the pages' start.
    ///
    /// # Errors
    /// [`PageError::OutOfBounds`], [`PageError::Foreign`].
    pub fn view<'v>(
        &'v self,
        pages: &'v Pages,
        range: Range<usize>,
    ) -> Result<&'v [u8], PageError> {
        let block = self.part(pages, range)?;
        // SAFETY: 1. The bytes lie in the block and are initialised: it was zeroed. 2. They are
        // these pages' alone, and who holds the token by `&` sees nobody write. 3. Neither the
        // arena nor the token goes while the view is there.
        Ok(unsafe { block.as_ref() })
    }

    /// As [`view`](PageArena::view), to be written.
    ///
    /// # Errors
    /// As [`view`](PageArena::view).
    pub fn view_mut<'v>(
        &'v self,
        pages: &'v mut Pages,
        range: Range<usize>,
    ) -> Result<&'v mut [u8], PageError> {
        let mut block = self.part(pages, range)?;
        // SAFETY: 1. and 3. as in `view`. 2. The bytes are these pages' alone, and the token is
        // held by `&mut`.
        Ok(unsafe { block.as_mut() })
    }

    /// Pages that are free.
    #[must_use]
    pub fn free_pages(&self) -> usize {
        self.lock().runs.free_pages()
    }

    /// Bytes of a page.
    #[must_use]
    pub fn page_bytes(&self) -> usize {
        self.page
    }

    /// Bytes of all pages.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.layout.size()
    }

    /// Where offset 0 is: what a device is given, together with offsets.
    #[must_use]
    pub fn base(&self) -> NonNull<u8> {
        self.base
    }

    /// The allocator that the block comes from.
    pub fn upstream(&self) -> &A {
        &self.upstream
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing unwinds while it is held.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Which pages these are.
    fn run(&self, pages: &Pages) -> Result<Range<usize>, PageError> {
        self.space.resolve(pages.id).ok_or(PageError::Foreign)?;
        Ok(pages.offset / self.page..(pages.offset + pages.bytes) / self.page)
    }

    fn part(&self, pages: &Pages, range: Range<usize>) -> Result<NonNull<[u8]>, PageError> {
        self.run(pages)?;
        if range.start > range.end || range.end > pages.bytes {
            return Err(PageError::OutOfBounds { range, bytes: pages.bytes });
        }
        // SAFETY: the range was checked to lie in the pages, which lie in the block.
        let start = unsafe { self.base.add(pages.offset + range.start) };
        Ok(NonNull::slice_from_raw_parts(start, range.len()))
    }
}

impl<A: DeferReuse> PageArena<A> {
    /// Gives pages back once `until` is open: a device may read them before. Never blocks; the gate
    /// is asked when pages run out.
    ///
    /// The whole block stays behind the gate too, so that the arena may be dropped meanwhile.
    ///
    /// # Errors
    /// [`PageError::Foreign`], or [`PageError::Memory`] from the allocator below. The pages come
    /// back with it.
    pub fn free_after(&self, pages: Pages, until: Arc<dyn Gate>) -> Result<(), Unfreed> {
        let deferred = self.run(&pages).and_then(|run| {
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
    /// Releases what waits for these gates.
    fn release_behind(&mut self, open: &[Arc<dyn Gate>]) {
        let (ready, waiting) = std::mem::take(&mut self.waiting)
            .into_iter()
            .partition(|(_, gate)| open.iter().any(|open| Arc::ptr_eq(open, gate)));
        self.waiting = waiting;
        let ready: Vec<_> = ready;
        ready.into_iter().for_each(|(pages, _)| self.runs.free(pages));
    }
}

impl Pages {
    /// Bytes from the arena's base to the first page.
    #[must_use]
    pub fn offset(&self) -> usize {
        self.offset
    }

    /// Bytes of all pages.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

impl<A: Allocator> Drop for PageArena<A> {
    fn drop(&mut self) {
        // SAFETY: 1. The block is one of `upstream`'s with this layout. 2. No view of it is left.
        // Where a device still reads it, `upstream` was told by `defer`.
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
