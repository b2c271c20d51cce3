//! The rows of a 2D copy.

use aquifer_core::{MemoryError, Result};
use aquifer_driver::Rows;

/// The rows of a 2D copy: their width, their number, and their pitch on both sides.
///
/// All four are in elements. The first row starts at the start of its side. For rows that start
/// further on, pass a slice. The elements between the rows of the destination are unchanged.
///
/// ```
/// use aquifer::stream::Grid;
///
/// // A tile of 64 × 16 from an image 1920 wide, stored packed.
/// let tile = Grid::new(64, 16).source_pitch(1920);
/// assert_eq!((tile.width, tile.height, tile.from_pitch, tile.to_pitch), (64, 16, 1920, 64));
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Grid {
    /// Elements in a row.
    pub width: usize,
    /// Number of rows.
    pub height: usize,
    /// Elements from the start of one row of the source to the start of the next. At least
    /// `width`.
    pub from_pitch: usize,
    /// The same for the destination.
    pub to_pitch: usize,
}

impl Grid {
    /// Creates a grid of `height` rows of `width` elements, packed in source and destination.
    #[must_use]
    pub fn new(width: usize, height: usize) -> Self {
        Self { width, height, from_pitch: width, to_pitch: width }
    }

    /// Sets the distance between rows of the source, in elements.
    #[must_use]
    pub fn source_pitch(self, from_pitch: usize) -> Self {
        Self { from_pitch, ..self }
    }

    /// Sets the distance between rows of the destination, in elements.
    #[must_use]
    pub fn target_pitch(self, to_pitch: usize) -> Self {
        Self { to_pitch, ..self }
    }

    /// Converts to bytes, and checks that the rows lie in a source of `from` bytes and a
    /// destination of `to`.
    pub(super) fn in_bytes(self, element: u64, from: u64, to: u64) -> Result<ByteGrid> {
        let rows = Rows { width: bytes(self.width, element)?, height: self.height as u64 };
        let grid = ByteGrid {
            rows,
            from_pitch: bytes(self.from_pitch, element)?,
            to_pitch: bytes(self.to_pitch, element)?,
        };
        grid.source_span(from)?;
        grid.target_span(to)?;
        Ok(grid)
    }
}

fn bytes(elements: usize, element: u64) -> Result<u64> {
    (elements as u64)
        .checked_mul(element)
        .ok_or(MemoryError::TooLarge { requested: u64::MAX, limit: u64::MAX })
}

/// A [`Grid`] in bytes.
#[derive(Clone, Copy, Debug)]
pub(super) struct ByteGrid {
    pub(super) rows: Rows,
    pub(super) from_pitch: u64,
    pub(super) to_pitch: u64,
}

impl ByteGrid {
    /// Returns the number of bytes copied.
    pub(super) fn bytes(&self) -> u64 {
        // Cannot overflow: all rows lie in a side whose size fits in a `u64`.
        self.rows.width.saturating_mul(self.rows.height)
    }

    /// Returns the bytes from the start of the first row to the end of the last one, in a source of
    /// `available` bytes.
    pub(super) fn source_span(&self, available: u64) -> Result<u64> {
        span(self.rows, self.from_pitch, available)
    }

    /// The same for a destination of `available` bytes.
    pub(super) fn target_span(&self, available: u64) -> Result<u64> {
        span(self.rows, self.to_pitch, available)
    }
}

/// Returns the number of bytes that the rows span, which must be at most `available`.
pub(super) fn span(rows: Rows, pitch: u64, available: u64) -> Result<u64> {
    let Rows { width, height } = rows;
    if width == 0 || height == 0 {
        return Ok(0);
    }
    if pitch < width {
        return Err(MemoryError::BadPitch { pitch, width });
    }
    let span = pitch.checked_mul(height - 1).and_then(|before| before.checked_add(width));
    match span {
        Some(span) if span <= available => Ok(span),
        _ => Err(MemoryError::OutOfBounds {
            offset: 0,
            len: span.unwrap_or(u64::MAX),
            bytes: available,
        }),
    }
}
