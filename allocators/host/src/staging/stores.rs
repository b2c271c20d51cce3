//! Copies by the CPU, with cached or non-temporal stores.
//!
//! The device, not the CPU, reads the slots that the CPU fills.
//!
//! - If the last-level cache holds all slots of a direction, cached stores are faster: the CPU
//!   writes into the cache, and the device reads from it.
//! - Otherwise a cached store first reads the line that it overwrites, and later writes it back.
//!   That is three bytes on the memory bus for each copied byte. A non-temporal store only writes
//!   the line.
//! - The loops prefetch their source, which makes them faster.
//! - Non-temporal stores are weakly ordered. Each copy ends with a fence, so that every later
//!   reader, including the device, sees the bytes.
#![expect(unsafe_code, reason = "copies between raw addresses, by vector instructions")]

use super::plan::Direction;

/// Returns whether the workers use non-temporal stores for a transfer of `total` bytes, in a
/// direction with `slots` bytes of slots and a last-level cache of `cache` bytes.
///
/// Not to the device if the cache is known to hold twice the slots, and the transfer is twice as
/// long as these. Always to the host, since the data of large downloads does not stay in a cache.
pub(super) fn is_non_temporal(
    direction: Direction,
    total: u64,
    slots: u64,
    cache: Option<u64>,
) -> bool {
    let fits = || cache.is_some_and(|cache| cache / 2 >= slots) && total / 2 >= slots;
    direction == Direction::Download || !fits()
}

/// Shorter copies always use cached stores.
const NON_TEMPORAL_MIN: usize = 4096;

/// Copies `bytes` bytes from `from` to `to`, by non-temporal stores on request where the processor
/// has them (x86-64).
///
/// # Safety
/// 1. `from` is readable and `to` writable for `bytes` bytes. 2. They do not overlap. 3. Until this
///    returns, `from` is not written, and `to` is not accessed, by others.
pub(super) unsafe fn copy(to: *mut u8, from: *const u8, bytes: usize, non_temporal: bool) {
    if !non_temporal || bytes < NON_TEMPORAL_MIN {
        // SAFETY: 1., 2. and 3. guaranteed by the caller.
        unsafe { to.copy_from_nonoverlapping(from, bytes) };
    } else {
        // SAFETY: 1., 2. and 3. guaranteed by the caller.
        unsafe { copy_non_temporal(to, from, bytes) };
    }
}

/// # Safety
/// As [`copy`].
#[cfg(any(not(target_arch = "x86_64"), miri))]
unsafe fn copy_non_temporal(to: *mut u8, from: *const u8, bytes: usize) {
    // SAFETY: 1., 2. and 3. guaranteed by the caller.
    unsafe { to.copy_from_nonoverlapping(from, bytes) };
}

/// # Safety
/// As [`copy`].
#[cfg(all(target_arch = "x86_64", not(miri)))]
unsafe fn copy_non_temporal(to: *mut u8, from: *const u8, bytes: usize) {
    // The bytes before the alignment of the widest store.
    let head = to.align_offset(WIDEST).min(bytes);
    let body = (bytes - head) / BLOCK * BLOCK;
    let done = head + body;
    // SAFETY: 1., 2. and 3. guaranteed by the caller: head, body and tail are the parts of one
    // range. 4. `to` is aligned after its head, and the processor has the instructions.
    unsafe {
        to.copy_from_nonoverlapping(from, head);
        if std::is_x86_feature_detected!("avx512f") {
            stream_avx512(to.add(head), from.add(head), body);
        } else {
            stream_sse(to.add(head), from.add(head), body);
        }
        // SSE is part of x86-64.
        std::arch::x86_64::_mm_sfence();
        to.add(done).copy_from_nonoverlapping(from.add(done), bytes - done);
    }
}

/// Bytes of the widest store.
#[cfg(all(target_arch = "x86_64", not(miri)))]
const WIDEST: usize = 64;
/// Bytes of one iteration of the loops: two cache lines.
#[cfg(all(target_arch = "x86_64", not(miri)))]
const BLOCK: usize = 128;
/// Prefetch distance of the loops, in bytes. The hardware prefetcher does not cross a page.
#[cfg(all(target_arch = "x86_64", not(miri)))]
const PREFETCH_DISTANCE: usize = 4096;

/// Prefetches the two cache lines at distance [`PREFETCH_DISTANCE`] from `from`. They may be
/// unmapped, since a prefetch is no access.
#[cfg(all(target_arch = "x86_64", not(miri)))]
#[inline(always)]
fn prefetch(from: *const u8) {
    use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
    for line in [0, BLOCK / 2] {
        // SAFETY: 1. a prefetch accesses no memory, for any address. SSE is part of x86-64.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(from.wrapping_add(PREFETCH_DISTANCE + line).cast()) };
    }
}

/// # Safety
/// 1. to 3. as [`copy`]. 4. `to` is aligned to 64 bytes, `bytes` a multiple of [`BLOCK`], and the
///    processor has AVX-512.
#[cfg(all(target_arch = "x86_64", not(miri)))]
#[target_feature(enable = "avx512f")]
unsafe fn stream_avx512(to: *mut u8, from: *const u8, bytes: usize) {
    use std::arch::x86_64::{__m512i, _mm512_loadu_si512, _mm512_stream_si512};
    for at in (0..bytes).step_by(BLOCK) {
        // SAFETY: 1. to 4. guaranteed by the caller: the iteration lies within both ranges.
        unsafe {
            prefetch(from.add(at));
            let (source, target) = (from.add(at).cast::<__m512i>(), to.add(at).cast::<__m512i>());
            let a = _mm512_loadu_si512(source);
            let b = _mm512_loadu_si512(source.add(1));
            _mm512_stream_si512(target, a);
            _mm512_stream_si512(target.add(1), b);
        }
    }
}

/// # Safety
/// 1. to 3. as [`copy`]. 4. `to` is aligned to 16 bytes, and `bytes` a multiple of [`BLOCK`].
#[cfg(all(target_arch = "x86_64", not(miri)))]
unsafe fn stream_sse(to: *mut u8, from: *const u8, bytes: usize) {
    use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_stream_si128};
    for at in (0..bytes).step_by(16) {
        // SAFETY: 1. to 4. guaranteed by the caller: the store lies within both ranges. SSE2 is
        // part of x86-64.
        unsafe {
            _mm_stream_si128(to.add(at).cast::<__m128i>(), _mm_loadu_si128(from.add(at).cast()));
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copy_writes_exactly_its_bytes_at_any_alignment() {
        let from: Vec<u8> =
            (0..3 * NON_TEMPORAL_MIN + 700).map(|at| (at * 31 % 251) as u8).collect();
        for non_temporal in [true, false] {
            for (skew, start) in [(0, 0), (1, 0), (0, 1), (7, 33), (31, 63), (64, 5)] {
                for bytes in [
                    0,
                    1,
                    63,
                    NON_TEMPORAL_MIN - 1,
                    NON_TEMPORAL_MIN,
                    NON_TEMPORAL_MIN + 1,
                    2 * NON_TEMPORAL_MIN + 129,
                    3 * NON_TEMPORAL_MIN + 500,
                ] {
                    let mut to = vec![255; from.len() + 128];
                    // SAFETY: 1. both lie in their vectors: at most 3 * SHORT + 564 bytes of `from`
                    // are read. 2. and 3. two separate vectors, used by this thread only.
                    unsafe {
                        copy(
                            to.as_mut_ptr().add(skew),
                            from.as_ptr().add(start),
                            bytes,
                            non_temporal,
                        );
                    };
                    assert!(to[..skew].iter().chain(&to[skew + bytes..]).all(|&byte| byte == 255));
                    assert_eq!(
                        to[skew..skew + bytes],
                        from[start..start + bytes],
                        "{skew} {start} {bytes}"
                    );
                }
            }
        }
    }

    #[cfg(all(target_arch = "x86_64", not(miri)))]
    #[test]
    fn narrower_stores_copy_the_same_bytes() {
        #[repr(align(64))]
        struct Aligned([u8; 4 * BLOCK]);
        let from: Vec<u8> = (0..4 * BLOCK).map(|at| at as u8).collect();
        let mut to = Aligned([0; 4 * BLOCK]);
        // SAFETY: 1. to 3. two separate arrays of the same length, used by this thread only. 4.
        // aligned by its type, and whole blocks.
        unsafe { stream_sse(to.0.as_mut_ptr(), from.as_ptr(), 4 * BLOCK) };
        assert_eq!(to.0[..], from[..]);
    }

    #[test]
    fn cached_stores_need_a_cache_and_a_transfer_of_twice_the_slots() {
        let (slots, long) = (72 << 20, 144 << 20);
        for (direction, total, cache, expected) in [
            (Direction::Upload, long, Some(300 << 20), false),
            (Direction::Upload, long - 1, Some(300 << 20), true),
            (Direction::Upload, long, Some(144 << 20), false),
            (Direction::Upload, long, Some((144 << 20) - 1), true),
            (Direction::Upload, long, None, true),
            (Direction::Download, long, Some(300 << 20), true),
        ] {
            let non_temporal = is_non_temporal(direction, total, slots, cache);
            assert_eq!(non_temporal, expected, "{direction:?} {total} {cache:?}");
        }
    }
}
