//! The hash that maps each key to a device: rendezvous (highest random weight) hashing.
//!
//! Every device has a score for every key, and a key is mapped to the device with the highest
//! score. When a device leaves, each of its keys moves to the device with the second-highest score,
//! and no other key moves. When a device joins, it takes the keys for which its score is highest,
//! and no other key moves. (Thaler and Ravishankar, "A Name-Based Mapping Scheme for Rendezvous",
//! 1996.)
//!
//! The hash never changes: a key is mapped to the same device in every process, build and version.
//!
//! ```text
//!   mix(x)            x ^= x >> 30; x *= 0xbf58476d1ce4e5b9; x ^= x >> 27; x *= 0x94d049bb133111eb; x ^= x >> 31
//!   score(key, d)     mix(key ^ mix((d + 1) · 0x9e3779b97f4a7c15))          all of it modulo 2⁶⁴
//!   key_of(bytes)     FNV-1a: h = 0xcbf29ce484222325; for each byte: h = (h ^ byte) · 0x100000001b3
//! ```
//!
//! `mix` is the finalizer of `SplitMix64` (Steele, Lea and Flood, 2014), `d` is the device's
//! ordinal.

use aquifer_core::DeviceId;

const fn mix(mut word: u64) -> u64 {
    word = (word ^ word >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    word = (word ^ word >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ word >> 31
}

/// Returns the score of `device` for `key`.
#[inline]
pub(super) const fn score(key: u64, device: DeviceId) -> u64 {
    mix(key ^ mix((device.0 as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15)))
}

/// Returns the key of a name, such as a session or a model: FNV-1a over its bytes, in 64 bits. The
/// function never changes.
///
/// ```
/// use aquifer::placement::{PlacementRequest, key_of};
/// let place = PlacementRequest::bytes(1 << 20).key(key_of(b"session 7"));
/// assert_eq!(key_of(b""), 0xcbf29ce484222325);
/// ```
#[must_use]
pub const fn key_of(name: &[u8]) -> u64 {
    let (mut hash, mut at) = (0xcbf2_9ce4_8422_2325_u64, 0);
    while at < name.len() {
        hash = (hash ^ name[at] as u64).wrapping_mul(0x0000_0100_0000_01b3);
        at += 1;
    }
    hash
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hash_matches_its_specification() {
        // Values of another implementation. If one of these changes, keys move between versions.
        assert_eq!(key_of(b"a"), 0xaf63_dc4c_8601_ec8c);
        assert_eq!(key_of(b"foobar"), 0x8594_4171_f739_67e8);
        // SplitMix64's first output from the seed 0.
        assert_eq!(mix(0x9e37_79b9_7f4a_7c15), 0xe220_a839_7b1d_cdaf);
        let scores = [(0, 0), (0, 1), (1, 0), (42, 7), (u64::MAX, 63)];
        let scores = scores.map(|(key, device)| score(key, DeviceId(device)));
        let golden = [
            0x4821_8226_ff3c_d4bf,
            0xcd73_fe3d_e975_ac26,
            0x9e01_6029_3a33_aaf7,
            0x9931_66b0_1c00_de09,
            0x385c_afaa_e57c_09eb,
        ];
        assert_eq!(scores, golden);
    }

    #[test]
    fn keys_spread_evenly() {
        let mut counts = [0u32; 8];
        for key in 0..8000 {
            let first = (0..8).max_by_key(|&device| score(key, DeviceId(device))).unwrap();
            counts[first as usize] += 1;
        }
        assert!(counts.iter().all(|count| (900..1100).contains(count)), "{counts:?}");
    }
}
