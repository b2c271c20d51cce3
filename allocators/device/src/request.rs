//! What can be asked of device memory.

use aquifer_core::{BLOCK_ALIGN, MemoryError, Request, Result};

/// The largest alignment that can be asked for, in bytes.
pub const MAX_ALIGN: u64 = 2 << 20;
/// More than any device has: a request beyond it is an arithmetic mistake.
pub(crate) const MAX_BYTES: u64 = 1 << 46;

/// Whether a request makes sense here.
pub(crate) trait Sensible: Sized {
    /// Whether it makes sense as it is, and asks for no more alignment than every block has: true
    /// of nearly all.
    fn is_plain(&self) -> bool;

    /// The request, if it makes sense: not empty, not beyond any device, an alignment that can be
    /// had.
    fn checked(self) -> Result<Self>;
}

impl Sensible for Request {
    #[inline]
    fn is_plain(&self) -> bool {
        self.size().wrapping_sub(1) < MAX_BYTES && self.alignment() == BLOCK_ALIGN
    }

    fn checked(self) -> Result<Self> {
        if self.size() == 0 {
            return Err(MemoryError::ZeroSize);
        }
        if self.size() > MAX_BYTES {
            return Err(MemoryError::TooLarge { requested: self.size(), limit: MAX_BYTES });
        }
        if !self.alignment().is_power_of_two() || self.alignment() > MAX_ALIGN {
            return Err(MemoryError::BadAlignment { align: self.alignment() });
        }
        Ok(self.align(self.alignment().max(BLOCK_ALIGN)))
    }
}
