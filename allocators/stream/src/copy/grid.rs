//! Which rows a 2D copy is about.

use aquifer_core::{MemoryError, Result};
use aquifer_driver::Rows;

/// The rows of a 2D copy: how many elements each has, how many there are, and how far apart they
/// start on either side.
///
/// All four are in elements. The first row starts where its side does: pass a slice for rows that
/// start further on. Between the rows of the destination nothing is touched.
///
/// ```
/// use aquifer_stream::Grid;
///
/// // A tile of 64 × 16, out of an image 1920 wide, packed.
/// let tile = Grid::new(64, 16).source_pitch(1920);
/// assert_eq!((tile.width, tile.height, tile.from_pitch, tile.to_pitch), (64, 16, 1920, 64));
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Grid {
    /// Elements of a row.
    pub width: usize,
    /// Rows.
    pub height: usize,
    /// Elements from the start of one row of the source to that of the next; at least `width`.
    pub from_pitch: usize,
    /// The same in the destination.
    pub to_pitch: usize,
}

impl Grid {
    /// `height` rows of `width` elements, side by side in source and destination.
    #[must_use]
    pub fn new(width: usize, height: usize) -> Self {
        Self { width, height, from_pitch: width, to_pitch: width }
    }

    /// With rows of the source so many elements apart.
    #[must_use]
    pub fn source_pitch(self, from_pitch: usize) -> Self {
        Self { from_pitch, ..self }
    }

    /// With rows of the destination so many elements apart.
    #[must_use]
    pub fn target_pitch(self, to_pitch: usize) -> Self {
        Self { to_pitch, ..self }
    }

    /// The same in bytes, if it lies in a source of `from` bytes and a destination of `to`.
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
    /// What is copied.
    pub(super) fn bytes(&self) -> u64 {
        // Every row lies in a side, whose size is a number.
        self.rows.width.saturating_mul(self.rows.height)
    }

    /// Bytes from the first row's start to the last one's end, in a source of `held`.
    pub(super) fn source_span(&self, held: u64) -> Result<u64> {
        span(self.rows, self.from_pitch, held)
    }

    /// The same in a destination of `held`.
    pub(super) fn target_span(&self, held: u64) -> Result<u64> {
        span(self.rows, self.to_pitch, held)
    }
}

/// Bytes that rows span, which must lie in `held`.
pub(super) fn span(rows: Rows, pitch: u64, held: u64) -> Result<u64> {
    let Rows { width, height } = rows;
    if width == 0 || height == 0 {
        return Ok(0);
    }
    if pitch < width {
        return Err(MemoryError::BadPitch { pitch, width });
    }
    let span = pitch.checked_mul(height - 1).and_then(|before| before.checked_add(width));
    match span {
        Some(span) if span <= held => Ok(span),
        _ => {
            Err(MemoryError::OutOfBounds { offset: 0, len: span.unwrap_or(u64::MAX), bytes: held })
        }
    }
}
