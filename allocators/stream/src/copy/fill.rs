//! Asynchronous fills.
//!
//! The driver fills with elements of 1, 2 or 4 bytes. A value whose bytes repeat with such a period
//! is filled in one call. Any other value is written once, in pieces, and then copied onto the
//! bytes that follow it, so that each copy doubles the filled part. This takes about `log2(n)`
//! calls and no host memory, reads and writes each byte about once, and may be captured like any
//! other work.
#![expect(unsafe_code, reason = "calls the driver's fills and copies")]

use crate::Stream;
use aquifer_core::{MemoryError, Result};
use aquifer_driver::{Access, DeviceRange, OperandMut, Pattern, Typed, site};
use bytemuck::Pod;

impl Stream {
    /// Fills `to` with copies of `value`, in order on this stream.
    ///
    /// Takes one call (`cuMemsetD8Async`, `…D16Async`, `…D32Async`) if the value's bytes repeat
    /// with a period of 1, 2 or 4. This includes every value of such a size, and zeros of any type.
    /// Otherwise it writes the value's words and then makes about `log2(len)` copies on the device.
    ///
    /// # Errors
    /// A conflicting use, and driver errors. Nothing is queued then. If the driver refuses a later
    /// one of several calls, the first part of `to` is filled.
    #[track_caller]
    pub fn fill<T, D>(&self, to: &mut D, value: T) -> Result<()>
    where
        T: Pod,
        D: Typed<Item = T> + OperandMut + ?Sized,
    {
        let _site = site::enter();
        self.fill_operand(to, bytemuck::bytes_of(&value))?;
        Ok(())
    }

    /// Fills `to` with one byte, in order on this stream (`cuMemsetD8Async`), for any element type.
    ///
    /// # Errors
    /// A conflicting use, and driver errors. Nothing is queued then.
    #[track_caller]
    pub fn fill_bytes<D>(&self, to: &mut D, byte: u8) -> Result<()>
    where
        D: Typed + OperandMut + ?Sized,
        D::Item: Pod,
    {
        let _site = site::enter();
        self.fill_operand(to, &[byte])?;
        Ok(())
    }

    fn fill_operand<D: OperandMut + ?Sized>(&self, to: &mut D, element: &[u8]) -> Result<()> {
        let range = to.range();
        self.check_operand(to)?;
        to.order_mut(self.raw(), Some(self.timeline().keep_alive()), Access::Write)?;
        if range.bytes == 0 {
            return Ok(());
        }
        let _calling = self.timeline().calling()?;
        // SAFETY: 1. and 2. the operand keeps its range, and was ordered for this access on this
        // stream.
        unsafe { self.fill_range(range, element) }
    }

    /// # Safety
    /// 1. The range is mapped until the fill is complete.
    /// 2. It has been ordered for this stream to write it.
    unsafe fn fill_range(&self, range: DeviceRange, element: &[u8]) -> Result<()> {
        let DeviceRange { address, bytes, .. } = range;
        if let Some(pattern) = pattern(element, address) {
            // SAFETY: 1. and 2. the caller guarantees them.
            return unsafe { self.fill_with(address, pattern, bytes / pattern.bytes()) };
        }
        // Writes the first element by runs of equal pieces.
        let piece = piece_size(element.len() as u64, address);
        let mut at = address;
        for run in element.chunks(piece).collect::<Vec<_>>().chunk_by(|a, b| a == b) {
            let bytes = (run.len() * piece) as u64;
            if let Some(pattern) = pattern(run[0], at) {
                // SAFETY: 1. and 2. the caller guarantees them. The first element lies within the
                // range.
                unsafe { self.fill_with(at, pattern, bytes / pattern.bytes()) }?;
            }
            at += bytes;
        }
        let mut done = element.len() as u64;
        while done < bytes {
            let more = done.min(bytes - done);
            // SAFETY: 1. and 2. the caller guarantees them. The part already written, and at most
            // as many bytes after it, lie within the range.
            let copied =
                unsafe { self.driver().copy_on_device(self.raw(), address + done, address, more) };
            copied.map_err(|e| MemoryError::driver(self.device(), e))?;
            done += more;
        }
        Ok(())
    }

    /// # Safety
    /// As [`fill_with`](aquifer_driver::Copies::fill_with).
    unsafe fn fill_with(&self, to: u64, pattern: Pattern, count: u64) -> Result<()> {
        // SAFETY: 1. and 2. the caller guarantees them.
        let filled = unsafe { self.driver().fill_with(self.raw(), to, pattern, count) };
        filled.map_err(|e| MemoryError::driver(self.device(), e))
    }
}

/// Returns the largest size the driver fills with (1, 2 or 4 bytes) that divides an element at
/// `address` evenly.
fn piece_size(element: u64, address: u64) -> usize {
    match element | address {
        both if both.is_multiple_of(4) => 4,
        both if both.is_multiple_of(2) => 2,
        _ => 1,
    }
}

/// Returns a pattern with which the driver can repeat this element from `address` on, if there is
/// one.
fn pattern(element: &[u8], address: u64) -> Option<Pattern> {
    let repeats = |after: usize| {
        element.len().is_multiple_of(after)
            && address.is_multiple_of(after as u64)
            && element.chunks_exact(after).all(|piece| piece == &element[..after])
    };
    match *element {
        [byte, ..] if repeats(1) => Some(Pattern::Byte(byte)),
        [a, b, ..] if repeats(2) => Some(Pattern::Half(u16::from_ne_bytes([a, b]))),
        [a, b, c, d, ..] if repeats(4) => Some(Pattern::Word(u32::from_ne_bytes([a, b, c, d]))),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn value_with_repeating_bytes_is_filled_in_one_call() {
        assert_eq!(pattern(&[0; 32], 1), Some(Pattern::Byte(0)));
        assert_eq!(pattern(&[1, 2], 2), Some(Pattern::Half(u16::from_ne_bytes([1, 2]))));
        assert_eq!(
            pattern(&[1, 2, 1, 2, 1, 2], 4),
            Some(Pattern::Half(u16::from_ne_bytes([1, 2])))
        );
        assert_eq!(
            pattern(&[1, 2, 3, 4], 8),
            Some(Pattern::Word(u32::from_ne_bytes([1, 2, 3, 4])))
        );
        assert_eq!(pattern(&[1, 2, 3, 4, 1, 2, 3, 4], 8).map(Pattern::bytes), Some(4));
        assert_eq!(pattern(&[1, 2, 3], 4), None);
        assert_eq!(pattern(&[1, 2, 3, 4, 5, 6, 7, 8], 8), None);
        assert_eq!(pattern(&[1, 2], 1), None, "off its alignment");
        assert_eq!(pattern(&[1, 2, 3, 4], 2), None);
        assert_eq!(pattern(&[], 0), None);
    }

    #[test]
    fn piece_size_is_the_largest_that_fits_size_and_address() {
        assert_eq!(
            (piece_size(16, 512), piece_size(6, 512), piece_size(16, 2), piece_size(3, 0)),
            (4, 2, 2, 1)
        );
    }
}
