//! A bump allocator.

use core::fmt;

use crate::Range;

/// A bump allocator: allocates addresses of one range from its low end up, and frees all of them at
/// once, or down to a mark.
///
/// It stores three numbers and no blocks. A rewind frees everything above the mark, and the caller
/// must ensure that it is not in use any more.
///
/// ```
/// use aquifer_heap::{Bump, Range};
///
/// let mut bump = Bump::new(Range::new(0x1000, 4096));
/// let keep = bump.alloc(100, 16).ok_or("full")?;
/// let mark = bump.mark();
/// let scratch = bump.alloc(1000, 256).ok_or("full")?;
/// assert_eq!((keep, scratch), (0x1000, 0x1100));
///
/// bump.rewind(mark)?;
/// assert_eq!(bump.used(), 100);
/// assert_eq!(bump.high_water(), 0x100 + 1000);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bump {
    range: Range,
    /// Bytes allocated, padding included. Never above `range.len`.
    used: u64,
    /// The maximum of `used`.
    high_water: u64,
}

/// A position to rewind to, created by [`Bump::mark`].
///
/// A mark is valid until its allocator is rewound below it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Mark {
    start: u64,
    used: u64,
}

/// The error of a stale mark: it is above what is in use, since the allocator was rewound below it,
/// or it belongs to another range. Nothing has changed.
///
/// See the example of [`Bump`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct StaleMark {
    /// The position of the mark, in bytes.
    pub mark: u64,
    /// Bytes in use.
    pub used: u64,
}

impl fmt::Display for StaleMark {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "the mark at {} bytes is not of this range, or above the {} in use",
            self.mark, self.used
        )
    }
}

impl core::error::Error for StaleMark {}

impl Bump {
    /// Creates an allocator for `range`. A range that would wrap around is cut at the last address.
    #[must_use]
    pub const fn new(range: Range) -> Self {
        let range = Range::new(range.start, range.end() - range.start);
        Self { range, used: 0, high_water: 0 }
    }

    /// Allocates `bytes` bytes at a multiple of `align`. Returns `None` if they do not fit, if
    /// `bytes` is zero, or if `align` is not a power of two.
    ///
    /// The address is aligned, and not its offset in the range.
    #[must_use]
    pub fn alloc(&mut self, bytes: u64, align: u64) -> Option<u64> {
        if bytes == 0 || !align.is_power_of_two() {
            return None;
        }
        let address = (self.range.start + self.used).checked_next_multiple_of(align)?;
        let used = (address - self.range.start).checked_add(bytes)?;
        if used > self.range.len {
            return None;
        }
        self.used = used;
        self.high_water = self.high_water.max(used);
        Some(address)
    }

    /// Returns the current position.
    #[must_use]
    pub const fn mark(&self) -> Mark {
        Mark { start: self.range.start, used: self.used }
    }

    /// Rewinds to `mark`: exactly the allocations from before the mark are in use again.
    ///
    /// # Errors
    ///
    /// [`StaleMark`] if the mark is above what is in use, or belongs to another range. If the
    /// allocator was rewound below the mark and has grown past it again, this is not detected.
    pub const fn rewind(&mut self, mark: Mark) -> Result<(), StaleMark> {
        if mark.start != self.range.start || mark.used > self.used {
            return Err(StaleMark { mark: mark.used, used: self.used });
        }
        self.used = mark.used;
        Ok(())
    }

    /// Frees everything.
    pub const fn reset(&mut self) {
        self.used = 0;
    }

    /// Returns the range.
    #[must_use]
    pub const fn range(&self) -> Range {
        self.range
    }

    /// Returns whether `address` is allocated.
    #[must_use]
    pub const fn contains(&self, address: u64) -> bool {
        Range::new(self.range.start, self.used).contains(address)
    }

    /// Returns the bytes allocated, padding included.
    #[must_use]
    pub const fn used(&self) -> u64 {
        self.used
    }

    /// Returns the bytes not allocated.
    #[must_use]
    pub const fn remaining(&self) -> u64 {
        self.range.len - self.used
    }

    /// Returns the maximum of [`Bump::used`] so far.
    #[must_use]
    pub const fn high_water(&self) -> u64 {
        self.high_water
    }
}
