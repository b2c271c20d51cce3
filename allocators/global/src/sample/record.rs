//! Records of sampled live blocks.
//!
//! - Records lie in chunks of doubling size, from the system's allocator. Chunks are never freed,
//!   so a record is found by its number without a lock, and readers never access freed memory.
//! - Free records form a stack. Its head carries a version, so that a pop detects a record that was
//!   popped and pushed again in the meantime (ABA).
//!
//! ```text
//!   chunk 0    256 records      number → chunk by its leading zeros
//!   chunk 1    512
//!   chunk 2   1024 …
//! ```
#![expect(unsafe_code, reason = "leaks chunks that come from the system")]

use std::{
    alloc::{GlobalAlloc, Layout, System},
    ptr,
    sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence},
};

/// Maximum number of recorded frames, the innermost ones. Outer frames rarely add information.
pub(crate) const FRAMES: usize = 40;
/// Records in the first chunk.
const FIRST: u32 = 256;
/// Maximum number of chunks. It keeps numbers below 2²⁸.
const CHUNKS: usize = 20;
/// The phase of a record in use. See [`Record::version`].
const LIVE: u32 = 2;

/// A sample of a live block, or a free record. All zeros are a free record.
struct Record {
    /// A sequence lock. Modulo 4: 0 free, 1 being written, 2 in use. A reader that reads the same
    /// version before and after has read a consistent record.
    version: AtomicU32,
    tag: AtomicU32,
    /// The next free record, if this one is free.
    next: AtomicU32,
    depth: AtomicUsize,
    /// Bytes that the sample represents.
    weight: AtomicU64,
    /// Bytes of the block.
    bytes: AtomicU64,
    frames: [AtomicUsize; FRAMES],
}

/// A copy of a record's content.
#[derive(Debug)]
pub(super) struct Sample {
    pub(super) weight: u64,
    pub(super) bytes: u64,
    pub(super) depth: usize,
    pub(super) frames: [usize; FRAMES],
}

static CHUNK: [AtomicPtr<Record>; CHUNKS] = [const { AtomicPtr::new(ptr::null_mut()) }; CHUNKS];
/// Records from this number on have never been used.
static USED: AtomicU32 = AtomicU32::new(0);
/// Lower half: the number of the first free record plus one, or 0 if there is none. Upper half: the
/// version.
static FREE: AtomicU64 = AtomicU64::new(0);

/// Returns the chunk of a record, the chunk's size, and the index in the chunk.
fn locate(number: u32) -> (usize, u32, u32) {
    let chunk = (number / FIRST + 1).ilog2();
    let before = FIRST * ((1 << chunk) - 1);
    (chunk as usize, FIRST << chunk, number - before)
}

fn record(number: u32) -> Option<&'static Record> {
    let (chunk, _, at) = locate(number);
    let chunk = CHUNK.get(chunk)?.load(Ordering::Acquire);
    // SAFETY: 1. A chunk that is not null was created by `chunk_for`, zeroed, which is the state of
    // free records, and is never freed. 2. `locate` returns an index inside the chunk.
    (!chunk.is_null()).then(|| unsafe { &*chunk.add(at as usize) })
}

/// Allocates the chunk of a number, unless it exists.
fn chunk_for(number: u32) -> Option<()> {
    let (chunk, records, _) = locate(number);
    let chunk = CHUNK.get(chunk)?;
    if !chunk.load(Ordering::Acquire).is_null() {
        return Some(());
    }
    let layout = Layout::array::<Record>(records as usize).ok()?;
    // SAFETY: the layout has a nonzero size. The system allocator is used, not the wrapped one,
    // because this runs inside a call of the wrapper.
    let fresh = unsafe { System.alloc_zeroed(layout) }.cast::<Record>();
    if fresh.is_null() {
        return None;
    }
    // Release: a thread that sees the chunk sees its zeros.
    if chunk.compare_exchange(ptr::null_mut(), fresh, Ordering::AcqRel, Ordering::Acquire).is_err()
    {
        // SAFETY: 1. `fresh` was allocated by the system with this layout. 2. It was not published,
        // so no other thread has its address.
        unsafe { System.dealloc(fresh.cast(), layout) };
    }
    Some(())
}

/// Takes a free record. Returns `None` if the system has no memory, or the maximum number of
/// records is in use.
fn acquire() -> Option<u32> {
    let mut free = FREE.load(Ordering::Acquire);
    while let Some(number) = (free as u32).checked_sub(1) {
        let next = record(number)?.next.load(Ordering::Relaxed);
        let rest = (free >> 32).wrapping_add(1) << 32 | u64::from(next);
        // Acquire: sees the writes of the last user.
        match FREE.compare_exchange_weak(free, rest, Ordering::Acquire, Ordering::Acquire) {
            Ok(_) => return Some(number),
            Err(now) => free = now,
        }
    }
    let mut used = USED.load(Ordering::Relaxed);
    loop {
        chunk_for(used)?;
        match USED.compare_exchange_weak(used, used + 1, Ordering::AcqRel, Ordering::Relaxed) {
            Ok(_) => return Some(used),
            Err(now) => used = now,
        }
    }
}

/// Stores a sample, and returns its number.
pub(super) fn store(tag: u16, weight: u64, bytes: u64, frames: &[usize]) -> Option<u32> {
    let number = acquire()?;
    let record = record(number)?;
    let version = record.version.load(Ordering::Relaxed);
    record.version.store(version.wrapping_add(1), Ordering::Relaxed);
    // A reader that sees any of the stores below also sees that the record is being written.
    fence(Ordering::Release);
    record.tag.store(u32::from(tag), Ordering::Relaxed);
    record.weight.store(weight, Ordering::Relaxed);
    record.bytes.store(bytes, Ordering::Relaxed);
    record.depth.store(frames.len().min(FRAMES), Ordering::Relaxed);
    for (to, &frame) in record.frames.iter().zip(frames) {
        to.store(frame, Ordering::Relaxed);
    }
    record.version.store(version.wrapping_add(LIVE), Ordering::Release);
    Some(number)
}

/// Returns the tag of a sampled live block.
pub(crate) fn tag(number: u32) -> u16 {
    record(number).map_or(0, |record| record.tag.load(Ordering::Relaxed) as u16)
}

/// Frees the record of a freed block.
#[cold]
pub(crate) fn free(number: u32) {
    let Some(record) = record(number) else { return };
    record.version.store(record.version.load(Ordering::Relaxed).wrapping_add(2), Ordering::Release);
    let mut free = FREE.load(Ordering::Relaxed);
    loop {
        record.next.store(free as u32, Ordering::Relaxed);
        let first = (free >> 32).wrapping_add(1) << 32 | u64::from(number + 1);
        // Release: the next user sees the writes of this one.
        match FREE.compare_exchange_weak(free, first, Ordering::Release, Ordering::Relaxed) {
            Ok(_) => return,
            Err(now) => free = now,
        }
    }
}

/// An iterator over the current samples. Those that change during the iteration may be left out.
pub(super) fn samples() -> impl Iterator<Item = Sample> {
    (0..USED.load(Ordering::Acquire)).filter_map(record).filter_map(|record| {
        let version = record.version.load(Ordering::Acquire);
        if version % 4 != LIVE {
            return None;
        }
        let sample = Sample {
            weight: record.weight.load(Ordering::Relaxed),
            bytes: record.bytes.load(Ordering::Relaxed),
            depth: record.depth.load(Ordering::Relaxed).min(FRAMES),
            frames: std::array::from_fn(|at| record.frames[at].load(Ordering::Relaxed)),
        };
        // Orders the loads above before the load below.
        fence(Ordering::Acquire);
        (record.version.load(Ordering::Relaxed) == version).then_some(sample)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{collections::BTreeSet, thread};

    #[test]
    fn every_record_number_has_its_own_index() {
        let mut seen = BTreeSet::new();
        for number in 0..20_000 {
            let (chunk, records, at) = locate(number);
            assert!(at < records && chunk < CHUNKS, "{number}");
            assert!(seen.insert((chunk, at)), "{number}");
        }
        assert_eq!(
            (locate(255), locate(256), locate(768)),
            ((0, 256, 255), (1, 512, 0), (2, 1024, 0))
        );
    }

    /// A single test, since samples are global to the process.
    #[test]
    fn samples_are_distinct_read_consistently_and_reused() {
        let before = samples().count();
        let numbers: Vec<_> =
            (0..1000).map(|n| store(7, n, n, &[n as usize; 5]).unwrap()).collect();
        assert_eq!(numbers.iter().collect::<BTreeSet<_>>().len(), 1000);
        assert!(numbers.iter().all(|&number| tag(number) == 7));
        assert_eq!(samples().count(), before + 1000);
        for sample in samples() {
            assert!(sample.frames[..5].iter().all(|&frame| frame as u64 == sample.bytes));
        }
        numbers.into_iter().for_each(free);
        assert_eq!(samples().count(), before);
        let used = USED.load(Ordering::Relaxed);
        thread::scope(|threads| {
            for seed in 1..5u64 {
                threads.spawn(move || {
                    for round in 0..2000u64 {
                        let of = seed * 10_000 + round;
                        let numbers: Vec<_> = (0..20)
                            .map(|_| store(seed as u16, of, of, &[of as usize; FRAMES]).unwrap())
                            .collect();
                        assert!(numbers.iter().all(|&number| tag(number) == seed as u16));
                        numbers.into_iter().for_each(free);
                    }
                });
            }
            threads.spawn(|| {
                for _ in 0..200 {
                    for sample in samples() {
                        let of = sample.bytes;
                        assert!(sample.weight == of && sample.depth == FRAMES);
                        assert!(
                            sample.frames.iter().all(|&frame| frame as u64 == of),
                            "read in pieces"
                        );
                    }
                }
            });
        });
        assert_eq!(samples().count(), before);
        assert_eq!(USED.load(Ordering::Relaxed), used, "what was free was used again");
    }
}
