//! CRC-64/XZ, the checksum of plan files.

use crc64fast::Digest;

/// Returns the checksum of `bytes`.
pub(crate) fn crc64(bytes: &[u8]) -> u64 {
    let mut digest = Digest::new();
    digest.write(bytes);
    digest.sum64()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_checksum_has_the_published_check_value() {
        assert_eq!(crc64(b"123456789"), 0x995D_C9BB_DF19_39FA);
        assert_eq!(crc64(b""), 0);
    }
}
