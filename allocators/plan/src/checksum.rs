//! CRC-64/XZ, the checksum of plan files.

/// The polynomial of ECMA-182, lowest bit first.
const POLYNOMIAL: u64 = 0xC96C_5795_D787_0F42;

/// The remainder of each byte.
const TABLE: [u64; 256] = {
    let mut table = [0; 256];
    let mut byte = 0;
    while byte < 256 {
        let mut remainder = byte as u64;
        let mut bit = 0;
        while bit < 8 {
            let odd = remainder & 1 == 1;
            remainder >>= 1;
            if odd {
                remainder ^= POLYNOMIAL;
            }
            bit += 1;
        }
        table[byte] = remainder;
        byte += 1;
    }
    table
};

/// Returns the checksum of `bytes`.
pub(crate) fn crc64(bytes: &[u8]) -> u64 {
    let next = |sum: u64, byte: &u8| TABLE[usize::from(sum as u8 ^ byte)] ^ (sum >> 8);
    !bytes.iter().fold(u64::MAX, next)
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
