//! Runs of pages in one block of device memory, told apart by their offset.

use crate::{Block, DeviceSlice, DeviceSliceMut, MAX_ALIGN, Request, Resource};
use aquifer_core::{Id, IdSpace, MemoryError, Result};
use aquifer_heap::Runs;
use aquifer_stream::Stream;
use std::{
    error, fmt,
    ops::Range,
    sync::{Mutex, MutexGuard, PoisonError},
};

/// A fixed number of pages of one size in one block, given out in runs: the home of a cache of keys
/// and values, or of whatever else a kernel finds by a table of offsets.
///
/// The lowest run that is long enough is taken: the same operations give the same offsets. Freed
/// neighbours are one run again at once. Pages hold what was there before.
///
/// A view of pages is what a part of a [`DeviceBuffer`](crate::DeviceBuffer) is: work on any stream
/// takes it, waits for what it must, and its use is noted. A use is one of the whole block. So
/// [`free`](DevicePages::free) waits for nothing, and calls no driver: work that uses pages which
/// were freed and taken again is queued behind what used them before, whatever the streams. And so
/// two streams that write pages of one arena take turns; where they are to run at once, take
/// an arena for each.
///
/// ```
/// use aquifer_device::{DevicePages, DevicePool, PoolConfig};
/// use aquifer_driver::{DeviceId, sim::Sim};
/// let sim = Sim::h200(1);
/// let pool = DevicePool::open(sim.driver(), DeviceId(0), PoolConfig::default())?;
/// let (s, u) = (pool.stream()?, pool.stream()?);
/// let arena = DevicePages::new(&pool, &s, 64, 64 << 10)?;
/// let mut keys = arena.take(100_000)?; // bytes: two pages
/// assert_eq!((keys.offset(), keys.bytes(), arena.free_pages()), (0, 2 * (64 << 10), 62));
/// s.fill(&mut arena.view_mut(&mut keys, 0..100_000)?.cast::<f32>()?, 0.5)?;
/// assert!(arena.view(&keys, 0..200_000).is_err(), "it ends at 131,072");
/// arena.free(keys)?; // the fill may still be queued
/// let mut values = arena.take(1)?;
/// u.fill(&mut arena.view_mut(&mut values, 0..4096)?, 1)?; // runs when it is done
/// assert_eq!(values.offset(), 0);
/// # assert!(sim.violations().is_empty());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// Pages are a token: without a copy of it nobody can use them once they are freed.
///
/// ```compile_fail,E0505
/// # use aquifer_device::{DevicePages, PageRun};
/// # use aquifer_stream::Stream;
/// fn late(arena: &DevicePages, mut pages: PageRun, s: &Stream) -> Result<(), Box<dyn std::error::Error>> {
///     let mut view = arena.view_mut(&mut pages, 0..1)?;
///     arena.free(pages)?;
///     Ok(s.fill(&mut view, 1)?)
/// }
/// ```
pub struct DevicePages {
    block: Block,
    page: u64,
    space: IdSpace<DevicePages>,
    runs: Mutex<Runs>,
}

/// A run of pages of one [`DevicePages`].
///
/// It is given back by [`DevicePages::free`]; one that is dropped stays taken until the arena goes.
#[must_use = "pages that are dropped stay taken"]
#[derive(PartialEq, Eq, Debug)]
pub struct PageRun {
    id: Id<DevicePages>,
    offset: u64,
    bytes: u64,
}

/// Pages that could not be given back, since they are another arena's. They are still taken, by
/// whoever has this.
///
/// Its example is that of [`DevicePages`].
#[derive(PartialEq, Eq, Debug)]
pub struct ForeignPages(
    /// The pages.
    pub PageRun,
);

impl DevicePages {
    /// `pages` pages of `page` bytes, a power of two, in one block from `resource`, for work on
    /// `stream` first of all. The block is aligned to a page, or to [`MAX_ALIGN`] if pages are
    /// larger.
    ///
    /// # Errors
    /// [`MemoryError::BadAlignment`] for pages that are no power of two in size;
    /// [`MemoryError::ZeroSize`] for none; the resource's.
    #[track_caller]
    pub fn new(
        resource: &(impl Resource + ?Sized),
        stream: &Stream,
        pages: usize,
        page: u64,
    ) -> Result<Self> {
        if !page.is_power_of_two() {
            return Err(MemoryError::BadAlignment { align: page });
        }
        let bytes = (pages as u64).saturating_mul(page);
        let block = resource.allocate(stream, Request::bytes(bytes).align(page.min(MAX_ALIGN)))?;
        // A wrapper may have handed out any block.
        if block.bytes() < bytes {
            return Err(MemoryError::OutOfBounds { offset: 0, len: bytes, bytes: block.bytes() });
        }
        if !block.address().is_multiple_of(page.min(MAX_ALIGN)) {
            return Err(MemoryError::BadAlignment { align: page });
        }
        // A device has fewer pages than a host has bits for them.
        let runs = Runs::new(pages).ok_or(MemoryError::TooLarge { requested: bytes, limit: 0 })?;
        Ok(Self { block, page, space: IdSpace::new(), runs: Mutex::new(runs) })
    }

    /// The lowest run of pages that holds `bytes`, which is one page at least. Calls no driver; in
    /// time linear in the pages.
    ///
    /// # Errors
    /// [`MemoryError::TooLarge`] if no more than that limit is free in one run.
    pub fn take(&self, bytes: u64) -> Result<PageRun> {
        let pages = usize::try_from(bytes.div_ceil(self.page).max(1)).unwrap_or(usize::MAX);
        let mut runs = self.runs();
        let Some(at) = runs.take(pages) else {
            return Err(MemoryError::TooLarge {
                requested: bytes,
                limit: runs.longest() as u64 * self.page,
            });
        };
        let (offset, bytes) = (at as u64 * self.page, pages as u64 * self.page);
        Ok(PageRun { id: self.space.mint(0, 0), offset, bytes })
    }

    /// Gives pages back, at once, whatever is queued on them. Calls no driver.
    ///
    /// # Errors
    /// [`ForeignPages`] with those of another arena.
    pub fn free(&self, pages: PageRun) -> Result<(), ForeignPages> {
        if self.check(&pages).is_err() {
            return Err(ForeignPages(pages));
        }
        let first = (pages.offset / self.page) as usize;
        self.runs().free(first..first + (pages.bytes / self.page) as usize);
        Ok(())
    }

    /// Part of the bytes of some pages, to be read by work: those in `range`, counted from the
    /// pages' start.
    ///
    /// # Errors
    /// [`MemoryError::OutOfBounds`]; [`MemoryError::ForeignBlock`] for pages of another arena.
    pub fn view<'v>(
        &'v self,
        pages: &'v PageRun,
        range: Range<u64>,
    ) -> Result<DeviceSlice<'v, u8>> {
        let (offset, len) = self.part(pages, range)?;
        Ok(DeviceSlice::of_several(&self.block, offset, len))
    }

    /// As [`view`](DevicePages::view), to be written.
    ///
    /// # Errors
    /// As [`view`](DevicePages::view).
    pub fn view_mut<'v>(
        &'v self,
        pages: &'v mut PageRun,
        range: Range<u64>,
    ) -> Result<DeviceSliceMut<'v, u8>> {
        let (offset, len) = self.part(pages, range)?;
        // The bytes are these pages' alone, whose token is held by `&mut` for as long as the view
        // is there.
        Ok(DeviceSliceMut::of_several(&self.block, offset, len))
    }

    /// All pages, taken or not, to be read by a kernel that finds its own by their offsets.
    #[must_use]
    pub fn all(&self) -> DeviceSlice<'_, u8> {
        DeviceSlice::of_several(&self.block, 0, self.block.bytes() as usize)
    }

    /// All pages, taken or not, to be written by a kernel that finds its own by their offsets.
    #[must_use]
    pub fn all_mut(&mut self) -> DeviceSliceMut<'_, u8> {
        DeviceSliceMut::of_several(&self.block, 0, self.block.bytes() as usize)
    }

    /// Pages that are free.
    #[must_use]
    pub fn free_pages(&self) -> usize {
        self.runs().free_pages()
    }

    /// Bytes of a page.
    #[must_use]
    pub fn page_bytes(&self) -> u64 {
        self.page
    }

    /// Bytes of all pages.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.block.bytes()
    }

    /// The address of offset 0 on the device.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.block.address()
    }

    fn runs(&self) -> MutexGuard<'_, Runs> {
        // Nothing unwinds while it is held.
        self.runs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn check(&self, pages: &PageRun) -> Result<()> {
        let foreign =
            MemoryError::ForeignBlock { address: self.block.address().wrapping_add(pages.offset) };
        self.space.resolve(pages.id).map(drop).ok_or(foreign)
    }

    fn part(&self, pages: &PageRun, range: Range<u64>) -> Result<(u64, usize)> {
        self.check(pages)?;
        let Range { start, end } = range;
        if start > end {
            return Err(MemoryError::ReversedRange { start, end });
        }
        let len = end - start;
        if end > pages.bytes {
            return Err(MemoryError::OutOfBounds { offset: start, len, bytes: pages.bytes });
        }
        Ok((pages.offset + range.start, len as usize))
    }
}

impl PageRun {
    /// Bytes from the arena's start to the first page.
    #[must_use]
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// Bytes of all pages.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl fmt::Debug for DevicePages {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DevicePages")
            .field("block", &self.block)
            .field("page", &self.page)
            .field("free", &self.free_pages())
            .finish_non_exhaustive()
    }
}

impl fmt::Display for ForeignPages {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the pages at offset {} are another arena's", self.0.offset)
    }
}

impl error::Error for ForeignPages {}
