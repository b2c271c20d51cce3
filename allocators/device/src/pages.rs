//! Runs of pages in one block of device memory, identified by their offset.

use crate::{Block, DeviceSlice, DeviceSliceMut, MAX_ALIGN, Request, Resource};
use aquifer_core::{Id, IdSpace, MemoryError, Result};
use aquifer_heap::Runs;
use aquifer_stream::Stream;
use std::{
    error, fmt,
    ops::Range,
    sync::{Mutex, MutexGuard, PoisonError},
};

/// A fixed number of pages of one size in one block, allocated in runs. It suits a cache of keys
/// and values, or any data that a kernel finds through a table of offsets.
///
/// Allocation is first fit: the lowest run that is long enough is taken, so the same operations
/// give the same offsets. Free neighbours are merged at once. Pages are not cleared.
///
/// A view of pages works like a part of a [`DeviceBuffer`](crate::DeviceBuffer): work on any stream
/// accepts it, waits for its dependencies, and is recorded as a use. A use applies to the whole
/// block. This has two effects:
///
/// - [`free`](DevicePages::free) does not wait and makes no driver call. Work on pages that were
///   freed and allocated again is ordered after their earlier uses, on any stream.
/// - Two streams that write pages of one arena run one after the other. For concurrent writes,
///   create one arena per stream.
///
/// ```
/// use aquifer::{DeviceId, DevicePages, DevicePool, PoolConfig, sim::Sim};
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
/// u.fill(&mut arena.view_mut(&mut values, 0..4096)?, 1)?; // runs after the fill
/// assert_eq!(values.offset(), 0);
/// # assert!(sim.violations().is_empty());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// A [`PageRun`] cannot be copied, so pages cannot be used after they are freed.
///
/// ```compile_fail,E0505
/// # use aquifer::{DevicePages, Stream, device::PageRun};
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
/// Return it with [`DevicePages::free`]. A run that is dropped stays allocated until the arena is
/// dropped.
#[must_use = "pages that are dropped stay taken"]
#[derive(PartialEq, Eq, Debug)]
pub struct PageRun {
    id: Id<DevicePages>,
    offset: u64,
    bytes: u64,
}

/// The error for pages that belong to another arena. It contains the pages, which are still
/// allocated.
///
/// [`DevicePages`] has an example.
#[derive(PartialEq, Eq, Debug)]
pub struct ForeignPages(
    /// The pages.
    pub PageRun,
);

impl DevicePages {
    /// Creates an arena of `pages` pages of `page` bytes each, a power of two, in one block from
    /// `resource`, allocated for `stream`. The block is aligned to a page, or to [`MAX_ALIGN`] if
    /// pages are larger.
    ///
    /// # Errors
    /// [`MemoryError::BadAlignment`] if the page size is not a power of two;
    /// [`MemoryError::ZeroSize`] for no pages; the resource's.
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
        if pages == 0 {
            return Err(MemoryError::ZeroSize);
        }
        let bytes = (pages as u64).saturating_mul(page);
        let block = resource.allocate(stream, Request::bytes(bytes).align(page.min(MAX_ALIGN)))?;
        // A custom resource may return any block, so it is checked.
        if block.bytes() < bytes {
            return Err(MemoryError::OutOfBounds { offset: 0, len: bytes, bytes: block.bytes() });
        }
        if !block.address().is_multiple_of(page.min(MAX_ALIGN)) {
            return Err(MemoryError::BadAlignment { align: page });
        }
        // A device has fewer pages than the host can represent.
        let runs = Runs::new(pages).ok_or(MemoryError::TooLarge { requested: bytes, limit: 0 })?;
        Ok(Self { block, page, space: IdSpace::new(), runs: Mutex::new(runs) })
    }

    /// Allocates the lowest free run of pages that holds `bytes`, at least one page. Makes no
    /// driver call. Takes time linear in the number of pages.
    ///
    /// # Errors
    /// [`MemoryError::TooLarge`] with the longest free run as its limit.
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

    /// Frees pages at once, whatever work on them is queued. Makes no driver call.
    ///
    /// # Errors
    /// [`ForeignPages`] if they belong to another arena.
    pub fn free(&self, pages: PageRun) -> Result<(), ForeignPages> {
        if self.check(&pages).is_err() {
            return Err(ForeignPages(pages));
        }
        let first = (pages.offset / self.page) as usize;
        self.runs().free(first..first + (pages.bytes / self.page) as usize);
        Ok(())
    }

    /// Returns a view of `range`, counted from the start of the pages, for work that reads it.
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

    /// Returns a view of `range`, counted from the start of the pages, for work that writes it.
    ///
    /// # Errors
    /// As [`view`](DevicePages::view).
    pub fn view_mut<'v>(
        &'v self,
        pages: &'v mut PageRun,
        range: Range<u64>,
    ) -> Result<DeviceSliceMut<'v, u8>> {
        let (offset, len) = self.part(pages, range)?;
        // The bytes belong to these pages alone, and their token is borrowed mutably as long as the
        // view.
        Ok(DeviceSliceMut::of_several(&self.block, offset, len))
    }

    /// Returns a view of all pages, allocated or not, for a kernel that reads its pages by their
    /// offsets.
    #[must_use]
    pub fn all(&self) -> DeviceSlice<'_, u8> {
        DeviceSlice::of_several(&self.block, 0, self.block.bytes() as usize)
    }

    /// Returns a view of all pages, allocated or not, for a kernel that writes its pages by their
    /// offsets.
    #[must_use]
    pub fn all_mut(&mut self) -> DeviceSliceMut<'_, u8> {
        DeviceSliceMut::of_several(&self.block, 0, self.block.bytes() as usize)
    }

    /// Returns the number of free pages.
    #[must_use]
    pub fn free_pages(&self) -> usize {
        self.runs().free_pages()
    }

    /// Returns the size of a page in bytes.
    #[must_use]
    pub fn page_bytes(&self) -> u64 {
        self.page
    }

    /// Returns the size of all pages in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.block.bytes()
    }

    /// Returns the device address of offset 0.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.block.address()
    }

    fn runs(&self) -> MutexGuard<'_, Runs> {
        // Nothing panics while it is held.
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
    /// Returns the bytes from the arena's start to the first page.
    #[must_use]
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// Returns the bytes of all pages in the run.
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
