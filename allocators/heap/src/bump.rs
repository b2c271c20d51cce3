//! One pointer that only goes up.

use core::fmt;

use crate::Range;

/// A bump engine: hands out addresses of one range from its low end up, and takes them back all
/// at once, or down to a mark.
///
/// It keeps three numbers whatever the number of blocks, so it knows no block: what lies above
/// a mark is gone when the engine is rewound to it, and it is for the caller to see that nobody
/// uses it any more.
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
    /// Bytes handed out, padding included. Never above `range.len`.
    used: u64,
    /// The most that `used` has been. Never below `used`.
    high_water: u64,
}

/// A height to come back to, made by [`Bump::mark`].
///
/// A mark is good until its engine is rewound below it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Mark {
    start: u64,
    used: u64,
}

/// The mark lies above what is in use, or belongs to another range: the engine was rewound
/// below it since. Nothing has changed.
///
/// Its example is that of [`Bump`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct StaleMark {
    /// The height of the mark, in bytes.
    pub mark: u64,
    /// What is in use, in bytes.
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
    /// An engine over `range`. A range that would pass the last address is cut there.
    #[must_use]
    pub const fn new(range: Range) -> Self {
        let range = Range::new(range.start, range.end() - range.start);
        Self { range, used: 0, high_water: 0 }
    }

    /// `bytes` bytes at a multiple of `align`, or `None` when they do not fit, when `bytes` is
    /// zero, or when `align` is not a power of two.
    ///
    /// The address is what is aligned, not its distance from the start of the range.
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

    /// The present height.
    #[must_use]
    pub const fn mark(&self) -> Mark {
        Mark { start: self.range.start, used: self.used }
    }

    /// Goes back to `mark`: exactly what was in use when it was made is in use again.
    ///
    /// # Errors
    ///
    /// [`StaleMark`] when the mark lies above what is in use or was made over another range. A
    /// mark that the engine was rewound below and has climbed past again cannot be told from a
    /// good one.
    pub const fn rewind(&mut self, mark: Mark) -> Result<(), StaleMark> {
        if mark.start != self.range.start || mark.used > self.used {
            return Err(StaleMark { mark: mark.used, used: self.used });
        }
        self.used = mark.used;
        Ok(())
    }

    /// Takes everything back.
    pub const fn reset(&mut self) {
        self.used = 0;
    }

    /// The range it hands out.
    #[must_use]
    pub const fn range(&self) -> Range {
        self.range
    }

    /// Whether `address` lies in what is handed out.
    #[must_use]
    pub const fn contains(&self, address: u64) -> bool {
        Range::new(self.range.start, self.used).contains(address)
    }

    /// Bytes handed out, padding included.
    #[must_use]
    pub const fn used(&self) -> u64 {
        self.used
    }

    /// Bytes not handed out.
    #[must_use]
    pub const fn remaining(&self) -> u64 {
        self.range.len - self.used
    }

    /// The most bytes that were ever handed out at once.
    #[must_use]
    pub const fn high_water(&self) -> u64 {
        self.high_water
    }
}
