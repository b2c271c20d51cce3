//! An allocator for runs of equal pages, with a bitmap.

use std::ops::Range;

/// A row of pages, of which runs are allocated and freed. The lowest run that is long enough is
/// taken, so the same calls return the same pages. Adjacent free pages form one run at once.
///
/// Allocated runs are not recorded: the caller of [`free`](Self::free) passes the pages. A search
/// takes time linear in the number of pages, 64 of them per step.
///
/// ```
/// use aquifer_heap::Runs;
/// let mut pages = Runs::new(8).ok_or("no memory")?;
/// let (first, second) = (pages.take(3), pages.take(2));
/// assert_eq!((first, second), (Some(0), Some(3)));
/// pages.free(0..3);
/// assert_eq!((pages.free_pages(), pages.longest(), pages.take(4)), (6, 3, None));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Runs {
    /// Bit set: the page is allocated. Bits from `len` on are clear.
    words: Box<[u64]>,
    len: usize,
    free: usize,
}

impl Runs {
    /// Creates `len` free pages. Returns `None` if the bitmap cannot be allocated.
    #[must_use]
    pub fn new(len: usize) -> Option<Self> {
        let mut words = Vec::new();
        words.try_reserve_exact(len.div_ceil(64)).ok()?;
        words.resize(len.div_ceil(64), 0);
        Some(Self { words: words.into_boxed_slice(), len, free: len })
    }

    /// Allocates the lowest run of `count` free pages, at least one. Returns its first page, or
    /// `None` if no run is long enough.
    pub fn take(&mut self, count: usize) -> Option<usize> {
        let count = count.max(1);
        let start = self.runs().find(|run| run.len() >= count)?.start;
        debug_assert!(start + count <= self.len && count <= self.free, "beyond the end");
        self.set(start..start + count, true);
        self.free -= count;
        Some(start)
    }

    /// Frees pages, all of which must be allocated.
    pub fn free(&mut self, pages: Range<usize>) {
        debug_assert!(pages.end <= self.len, "pages up to {} of {}", pages.end, self.len);
        debug_assert!(
            pages.is_empty() || self.next(pages.start, true) == Some(pages.start),
            "pages {pages:?} are freed twice"
        );
        self.free += pages.len();
        debug_assert!(self.free <= self.len, "more pages are free than there are");
        self.set(pages, false);
    }

    /// Returns the total number of free pages.
    #[must_use]
    pub fn free_pages(&self) -> usize {
        self.free
    }

    /// Returns the length of the longest free run, in pages.
    #[must_use]
    pub fn longest(&self) -> usize {
        self.runs().map(|run| run.len()).max().unwrap_or(0)
    }

    /// An iterator over all free runs, the lowest first.
    fn runs(&self) -> impl Iterator<Item = Range<usize>> {
        let mut from = 0;
        std::iter::from_fn(move || {
            let start = self.next(from, false)?;
            from = self.next(start, true).unwrap_or(self.len);
            Some(start..from)
        })
    }

    /// Sets or clears a range of bits below `len`.
    fn set(&mut self, range: Range<usize>, value: bool) {
        let mut at = range.start;
        while at < range.end {
            let (word, low) = (at / 64, at % 64);
            let count = (64 - low).min(range.end - at);
            let mask = (u64::MAX >> (64 - count)) << low;
            if value {
                self.words[word] |= mask;
            } else {
                self.words[word] &= !mask;
            }
            at += count;
        }
    }

    /// Returns the first bit from `from` on whose value is `set`.
    fn next(&self, from: usize, set: bool) -> Option<usize> {
        let mut at = from;
        while at < self.len {
            let word = if set { self.words[at / 64] } else { !self.words[at / 64] };
            let rest = word >> (at % 64);
            if rest != 0 {
                let found = at + rest.trailing_zeros() as usize;
                return (found < self.len).then_some(found);
            }
            at = (at / 64 + 1) * 64;
        }
        None
    }
}
