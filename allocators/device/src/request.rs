//! Limits and validation of requests for device memory.

use aquifer_core::{BLOCK_ALIGN, MemoryError, Request, Result};

/// The maximum alignment of a request, in bytes.
pub const MAX_ALIGN: u64 = 2 << 20;
/// More than the memory of any device: a larger request is an arithmetic error.
pub(crate) const MAX_BYTES: u64 = 1 << 46;

/// Validation of requests.
pub(crate) trait ValidateRequest: Sized {
    /// Returns whether it is valid without change and needs no more than the default alignment,
    /// which is true for nearly all requests.
    fn is_plain(&self) -> bool;

    /// Returns the request if it is valid: not empty, not larger than any device, with a supported
    /// alignment.
    fn checked(self) -> Result<Self>;
}

impl ValidateRequest for Request {
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
