//! Limits and validation of requests for device memory.

use aquifer_core::{BLOCK_ALIGN, MemoryError, Request, Result};

/// The maximum alignment of a request, in bytes.
pub const MAX_ALIGN: u64 = 2 << 20;
/// More than the memory of any device. Pools refuse a larger request as they refuse one that is
/// larger than their device.
pub(crate) const MAX_BYTES: u64 = 1 << 46;
/// The largest object of a program. A larger request is an arithmetic error.
pub(crate) const MAX_OBJECT: u64 = isize::MAX as u64;

/// Validation of requests.
pub(crate) trait ValidateRequest: Sized {
    /// Returns whether it is valid without change and needs no more than the default alignment,
    /// which is true for nearly all requests.
    fn is_plain(&self) -> bool;

    /// Returns the request if it is valid: not empty, not larger than any device, with a supported
    /// alignment.
    ///
    /// # Errors
    /// [`MemoryError::TooLarge`] for more than any device has. If the bytes are within its limit,
    /// the request is to be refused as out of memory, since programs then ask for less.
    fn checked(self) -> Result<Self>;
}

impl ValidateRequest for Request {
    #[inline]
    fn is_plain(&self) -> bool {
        self.size().wrapping_sub(1) < MAX_BYTES && self.alignment() == BLOCK_ALIGN
    }

    #[inline]
    fn checked(self) -> Result<Self> {
        if self.is_plain() { Ok(self) } else { check(self) }
    }
}

/// As [`ValidateRequest::checked`], for requests that are not plain.
#[inline(never)]
fn check(request: Request) -> Result<Request> {
    if request.size() == 0 {
        return Err(MemoryError::ZeroSize);
    }
    if request.size() > MAX_BYTES {
        return Err(MemoryError::TooLarge { requested: request.size(), limit: MAX_OBJECT });
    }
    if !request.alignment().is_power_of_two() || request.alignment() > MAX_ALIGN {
        return Err(MemoryError::BadAlignment { align: request.alignment() });
    }
    Ok(request.align(request.alignment().max(BLOCK_ALIGN)))
}
