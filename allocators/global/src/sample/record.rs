//! Samples of live blocks.
//!
//! Records lie in chunks that double, from the system's allocator, and are never given back: a
//! number finds its record without a lock, and a reader never meets memory that is gone. Free ones
//! are a stack, whose head carries a version so that a pop cannot mistake a record that was taken
//! and came back meanwhile.
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

/// Frames of a stack that are kept, the innermost ones: deeper ones rarely tell more.
pub(crate) const FRAMES: usize = 40;
/// Records in the first chunk.
const FIRST: u32 = 256;
/// Chunks that there can be: numbers stay below 2²⁸.
const CHUNKS: usize = 20;
/// The phase of a record that is in use; see [`Record::version`].
const LIVE: u32 = 2;

/// A sample of a live block, or none. All zero is a free one.
struct Record {
    /// Modulo 4: 0 free, 1 being written, 2 in use. Whoever reads the same before and after, has
    /// read what was written at once.
    version: AtomicU32,
    tag: AtomicU32,
    /// The next free record, if this one is free.
    next: AtomicU32,
    depth: AtomicUsize,
    /// Bytes that it stands for.
    stands_for: AtomicU64,
    /// Bytes of the block.
    bytes: AtomicU64,
    frames: [AtomicUsize; FRAMES],
}

/// What a record said.
#[derive(Debug)]
pub(super) struct Sample {
    pub(super) stands_for: u64,
    pub(super) bytes: u64,
    pub(super) depth: usize,
    pub(super) frames: [usize; FRAMES],
}

static CHUNK: [AtomicPtr<Record>; CHUNKS] = [const { AtomicPtr::new(ptr::null_mut()) }; CHUNKS];
/// Records from this one on have never been used.
static USED: AtomicU32 = AtomicU32::new(0);
/// The first free record's number and one, 0 if there is none; in the upper half the version.
static FREE: AtomicU64 = AtomicU64::new(0);

/// The chunk of a record, its size, and the place in it.
fn place(number: u32) -> (usize, u32, u32) {
    let chunk = (number / FIRST + 1).ilog2();
    let before = FIRST * ((1 << chunk) - 1);
    (chunk as usize, FIRST << chunk, number - before)
}

fn record(number: u32) -> Option<&'static Record> {
    let (chunk, _, at) = place(number);
    let chunk = CHUNK.get(chunk)?.load(Ordering::Acquire);
    // SAFETY: 1. A chunk that is not null was made by `chunk_for`, zeroed, which is what free
    // records are, and is never freed. 2. `place` answers with a place inside.
    (!chunk.is_null()).then(|| unsafe { &*chunk.add(at as usize) })
}

/// Sees to it that a number's chunk is there.
fn chunk_for(number: u32) -> Option<()> {
    let (chunk, records, _) = place(number);
    let chunk = CHUNK.get(chunk)?;
    if !chunk.load(Ordering::Acquire).is_null() {
        return Some(());
    }
    let layout = Layout::array::<Record>(records as usize).ok()?;
    // SAFETY: the layout has a size. From the system and not from the allocator that is being
    // wrapped: this runs inside a call of it.
    let fresh = unsafe { System.alloc_zeroed(layout) }.cast::<Record>();
    if fresh.is_null() {
        return None;
    }
    // Release: whoever sees the chunk sees its zeros.
    if chunk.compare_exchange(ptr::null_mut(), fresh, Ordering::AcqRel, Ordering::Acquire).is_err()
    {
        // SAFETY: 1. `fresh` came from the system with this layout. 2. It was not published, so
        // nobody has it.
        unsafe { System.dealloc(fresh.cast(), layout) };
    }
    Some(())
}

/// A record that nobody uses; `None` if the system has no memory, or there are as many as there can
/// be.
fn take() -> Option<u32> {
    let mut free = FREE.load(Ordering::Acquire);
    while let Some(number) = (free as u32).checked_sub(1) {
        let next = record(number)?.next.load(Ordering::Relaxed);
        let rest = (free >> 32).wrapping_add(1) << 32 | u64::from(next);
        // Acquire: what the last user wrote.
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

/// Keeps a sample, and answers with its number.
pub(super) fn keep(tag: u16, stands_for: u64, bytes: u64, frames: &[usize]) -> Option<u32> {
    let number = take()?;
    let record = record(number)?;
    let version = record.version.load(Ordering::Relaxed);
    record.version.store(version.wrapping_add(1), Ordering::Relaxed);
    // Who reads any of what follows reads that it is being written.
    fence(Ordering::Release);
    record.tag.store(u32::from(tag), Ordering::Relaxed);
    record.stands_for.store(stands_for, Ordering::Relaxed);
    record.bytes.store(bytes, Ordering::Relaxed);
    record.depth.store(frames.len().min(FRAMES), Ordering::Relaxed);
    for (to, &frame) in record.frames.iter().zip(frames) {
        to.store(frame, Ordering::Relaxed);
    }
    record.version.store(version.wrapping_add(LIVE), Ordering::Release);
    Some(number)
}

/// The tag of a live block that was sampled.
pub(crate) fn tag(number: u32) -> u16 {
    record(number).map_or(0, |record| record.tag.load(Ordering::Relaxed) as u16)
}

/// Ends a sample: its block is gone.
#[cold]
pub(crate) fn forget(number: u32) {
    let Some(record) = record(number) else { return };
    record.version.store(record.version.load(Ordering::Relaxed).wrapping_add(2), Ordering::Release);
    let mut free = FREE.load(Ordering::Relaxed);
    loop {
        record.next.store(free as u32, Ordering::Relaxed);
        let first = (free >> 32).wrapping_add(1) << 32 | u64::from(number + 1);
        // Release: the next user sees what was written here.
        match FREE.compare_exchange_weak(free, first, Ordering::Release, Ordering::Relaxed) {
            Ok(_) => return,
            Err(now) => free = now,
        }
    }
}

/// What is sampled now; what changes meanwhile is left out.
pub(super) fn samples() -> impl Iterator<Item = Sample> {
    (0..USED.load(Ordering::Acquire)).filter_map(record).filter_map(|record| {
        let version = record.version.load(Ordering::Acquire);
        if version % 4 != LIVE {
            return None;
        }
        let sample = Sample {
            stands_for: record.stands_for.load(Ordering::Relaxed),
            bytes: record.bytes.load(Ordering::Relaxed),
            depth: record.depth.load(Ordering::Relaxed).min(FRAMES),
            frames: std::array::from_fn(|at| record.frames[at].load(Ordering::Relaxed)),
        };
        // Orders the loads above before this one.
        fence(Ordering::Acquire);
        (record.version.load(Ordering::Relaxed) == version).then_some(sample)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{collections::BTreeSet, thread};

    #[test]
    fn every_number_has_a_place_of_its_own_in_its_chunk() {
        let mut seen = BTreeSet::new();
        for number in 0..20_000 {
            let (chunk, records, at) = place(number);
            assert!(at < records && chunk < CHUNKS, "{number}");
            assert!(seen.insert((chunk, at)), "{number}");
        }
        assert_eq!(
            (place(255), place(256), place(768)),
            ((0, 256, 255), (1, 512, 0), (2, 1024, 0))
        );
    }

    /// One test for all: samples are the process's.
    #[test]
    fn samples_are_kept_apart_read_whole_and_used_again() {
        let before = samples().count();
        let numbers: Vec<_> = (0..1000).map(|n| keep(7, n, n, &[n as usize; 5]).unwrap()).collect();
        assert_eq!(numbers.iter().collect::<BTreeSet<_>>().len(), 1000);
        assert!(numbers.iter().all(|&number| tag(number) == 7));
        assert_eq!(samples().count(), before + 1000);
        for sample in samples() {
            assert!(sample.frames[..5].iter().all(|&frame| frame as u64 == sample.bytes));
        }
        numbers.into_iter().for_each(forget);
        assert_eq!(samples().count(), before);
        let used = USED.load(Ordering::Relaxed);
        thread::scope(|threads| {
            for seed in 1..5u64 {
                threads.spawn(move || {
                    for round in 0..2000u64 {
                        let of = seed * 10_000 + round;
                        let mine: Vec<_> = (0..20)
                            .map(|_| keep(seed as u16, of, of, &[of as usize; FRAMES]).unwrap())
                            .collect();
                        assert!(mine.iter().all(|&number| tag(number) == seed as u16));
                        mine.into_iter().for_each(forget);
                    }
                });
            }
            threads.spawn(|| {
                for _ in 0..200 {
                    for sample in samples() {
                        let of = sample.bytes;
                        assert!(sample.stands_for == of && sample.depth == FRAMES);
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
