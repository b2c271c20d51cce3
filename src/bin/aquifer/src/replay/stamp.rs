//! Checks on real bytes: both ends of a block are stamped when it is written, and verified when it
//! is read.
//!
//! A write copies the block's own pattern to its first and last 64 bytes. A read copies them back
//! to the host. Both are queued on the stream that performs the access, and nothing waits for them.
//! A copy that runs out of order therefore finds, or leaves, another block's bytes. The host
//! compares everything at the end.
#![expect(
    unsafe_code,
    reason = "queues copies on raw addresses, and reads the pinned memory they end in"
)]

use super::work::{Spot, TOLD, Verdict, Violations, Work};
use aquifer_core::{MemoryError, Result, random::SplitMix64};
use aquifer_driver::{Call, DeviceId, Driver};
use aquifer_formats::trace::{Trace, TraceAction, TraceBlock};
use aquifer_stream::Stream;
use std::{
    fmt,
    ptr::NonNull,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

/// Length of a stamp at one end of a block.
const STAMP: usize = 64;

/// Pinned memory from the driver, so that the host need not wait for copies.
struct PinnedStamp {
    driver: Arc<dyn Driver>,
    device: DeviceId,
    start: NonNull<u8>,
    bytes: usize,
}

// SAFETY: 1. the value owns the memory and reaches it through raw pointers only, as described at
// each use; the memory is not bound to a thread.
unsafe impl Send for PinnedStamp {}
// SAFETY: 1. as above: `&Pinned` only returns an address, and each byte has one writer at a time.
unsafe impl Sync for PinnedStamp {}

impl PinnedStamp {
    fn new(driver: &Arc<dyn Driver>, device: DeviceId, bytes: usize) -> Result<Self> {
        let bytes = bytes.max(STAMP);
        let start = driver.host_alloc(device, bytes, false)?;
        Ok(Self { driver: driver.clone(), device, start, bytes })
    }

    /// Returns the address of one stamp. `at + STAMP` is at most `bytes`, since callers use whole
    /// stamps.
    fn stamp(&self, at: usize) -> NonNull<u8> {
        debug_assert!(at + STAMP <= self.bytes);
        // SAFETY: 1. the offset is inside the allocation, see the doc comment.
        unsafe { self.start.add(at) }
    }
}

impl Drop for PinnedStamp {
    fn drop(&mut self) {
        // Wait for the copies that use the memory. If the device is lost, none runs any more.
        let _ = self.driver.device_synchronize(self.device);
        // SAFETY: 1. it came from `host_alloc` in `new`, and is freed here only. 2. the
        // synchronisation above ended the queued copies, and no slice outlives `verdict`. If the
        // driver refuses, the memory leaks until the process ends.
        let _ = unsafe { self.driver.host_free(self.device, self.start) };
    }
}

/// A queued read.
#[derive(Clone, Copy)]
struct Read {
    block: u32,
    spot: Spot,
    stream: u32,
}

/// Stamps on a device's real memory.
pub(crate) struct Stamped {
    driver: Arc<dyn Driver>,
    device: DeviceId,
    blocks: usize,
    /// The row that allocates each block.
    rows: Vec<u32>,
    /// What a row of the trace is called.
    unit: &'static str,
    /// A stamp for each block.
    patterns: PinnedStamp,
    /// Two stamps for each read, in the order of `reads`.
    found: PinnedStamp,
    reads: Mutex<Vec<Read>>,
    /// The number of reads that `found` has room for.
    most_reads: usize,
    /// Queued copies: to the device, and to the host.
    copies: [AtomicU64; 2],
}

impl Stamped {
    /// Creates the patterns of all blocks of a trace, and room for all of its reads.
    ///
    /// # Errors
    /// The driver's, if pinned memory cannot be allocated.
    pub(crate) fn new(driver: &Arc<dyn Driver>, device: DeviceId, trace: &Trace) -> Result<Self> {
        let blocks = trace.blocks.len();
        let allocations = trace.steps.iter().filter(|step| step.action == TraceAction::Allocate);
        let rows = allocations.map(|step| step.row).collect();
        // One read on the block's own stream, one on another stream that frees it, and two on the
        // stream that it lingers on.
        let reads = |block: &TraceBlock| {
            1 + usize::from(block.freed_on.is_some_and(|on| on != block.stream))
                + 2 * usize::from(block.lingers)
        };
        let most_reads: usize = trace.blocks.iter().map(reads).sum();
        let patterns = PinnedStamp::new(driver, device, blocks * STAMP)?;
        let found = PinnedStamp::new(driver, device, most_reads * 2 * STAMP)?;
        for (index, block) in (0_u32..).zip(0..blocks) {
            let pattern = pattern(index);
            // SAFETY: 1. source and destination are valid for STAMP bytes and do not overlap. 2. no
            // copy is queued yet.
            unsafe {
                pattern
                    .as_ptr()
                    .copy_to_nonoverlapping(patterns.stamp(block * STAMP).as_ptr(), STAMP);
            };
        }
        let reads = Mutex::new(Vec::with_capacity(most_reads));
        Ok(Self {
            driver: driver.clone(),
            device,
            blocks,
            rows,
            unit: trace.unit(),
            patterns,
            found,
            reads,
            most_reads,
            copies: Default::default(),
        })
    }

    /// Returns the block whose pattern begins with `found`.
    fn owner(&self, found: &[u8]) -> Option<u32> {
        (0..self.blocks as u32).find(|&block| pattern(block).starts_with(found))
    }

    /// Describes a block by the row that allocates it.
    fn block(&self, block: u32) -> String {
        match self.rows.get(block as usize) {
            Some(row) => format!("the block of {} {row}", self.unit),
            None => format!("block {block}"),
        }
    }

    fn tell(&self, read: Read, found: &[u8], end: &str) -> String {
        let whose = match self.owner(found) {
            Some(other) => format!("those of {}", self.block(other)),
            None => "nobody's".to_owned(),
        };
        format!(
            "{} ({} bytes at {:#x}), read on stream {}: the {end} bytes are {whose}",
            self.block(read.block),
            read.spot.bytes,
            read.spot.address,
            read.stream
        )
    }
}

/// Returns the lengths of the stamps at the two ends of a block. They never overlap.
fn ends(bytes: u64) -> (usize, usize) {
    let head = bytes.min(STAMP as u64);
    let tail = (bytes - head).min(STAMP as u64);
    // Both are at most STAMP.
    (head as usize, tail as usize)
}

/// Returns the stamp of a block. Its first bytes already differ from those of all other blocks.
fn pattern(block: u32) -> [u8; STAMP] {
    let mut bytes = [0; STAMP];
    let mut random = SplitMix64::new(u64::from(block) + 1);
    for word in bytes.chunks_exact_mut(8) {
        word.copy_from_slice(&random.next_u64().to_le_bytes());
    }
    bytes
}

impl Work for Stamped {
    fn write(&self, block: u32, spot: Spot, stream: &Stream) -> Result<()> {
        let from = self.patterns.stamp(block as usize * STAMP);
        let (head, tail) = ends(spot.bytes);
        for (at, len) in [(0, head), (spot.bytes - tail as u64, tail)] {
            if len > 0 {
                // SAFETY: 1. the pattern is not changed or freed before `self` is dropped, which
                // waits for the device; the range lies in the block, which is live, or held back by
                // a use, during this call. 2. the patterns are not written; the order of accesses
                // on the device is what is being checked.
                unsafe { self.driver.copy_to_device(stream.raw(), spot.address + at, from, len)? };
                self.copies[0].fetch_add(1, Ordering::Relaxed);
            }
        }
        Ok(())
    }

    fn read(&self, block: u32, spot: Spot, stream: &Stream) -> Result<()> {
        let number = {
            let mut reads = self.reads.lock().unwrap_or_else(PoisonError::into_inner);
            if reads.len() == self.most_reads {
                return Err(MemoryError::Capacity {
                    max: u32::try_from(self.most_reads).unwrap_or(u32::MAX),
                });
            }
            reads.push(Read { block, spot, stream: stream.number() });
            reads.len() - 1
        };
        let (head, tail) = ends(spot.bytes);
        for (place, at, len) in [(0, 0, head), (1, spot.bytes - tail as u64, tail)] {
            if len > 0 {
                let to = self.found.stamp((number * 2 + place) * STAMP);
                // SAFETY: 1. the destination belongs to this read alone and lives until `self` is
                // dropped, which waits for the device; the range as above. 2. the destination is
                // not read before the device is synchronised.
                unsafe { self.driver.copy_to_host(stream.raw(), to, spot.address + at, len)? };
                self.copies[1].fetch_add(1, Ordering::Relaxed);
            }
        }
        Ok(())
    }

    fn driver_calls(&self) -> Vec<(Call, u64)> {
        let [up, down] = &self.copies;
        let read = |copies: &AtomicU64| copies.load(Ordering::Relaxed);
        vec![(Call::CopyToDevice, read(up)), (Call::CopyToHost, read(down))]
    }

    fn verdict(&self) -> Result<Verdict> {
        self.driver
            .device_synchronize(self.device)
            .map_err(|e| MemoryError::driver(self.device, e))?;
        let reads = self.reads.lock().unwrap_or_else(PoisonError::into_inner);
        let mut violations = Violations::default();
        for (number, read) in reads.iter().enumerate() {
            let expected = pattern(read.block);
            let (head, tail) = ends(read.spot.bytes);
            for (place, len, end) in [(0, head, "first"), (1, tail, "last")] {
                let at = self.found.stamp((number * 2 + place) * STAMP);
                // SAFETY: 1. the range is inside the allocation and initialised by the copy, which
                // is complete: the device was synchronised above, and `reads` is locked, so no copy
                // is queued meanwhile.
                let found = unsafe { std::slice::from_raw_parts(at.as_ptr(), len) };
                if found != &expected[..len] {
                    violations.count += 1;
                    if violations.first.len() < TOLD {
                        violations.first.push(self.tell(*read, found, end));
                    }
                    break;
                }
            }
        }
        Ok(Verdict { checked: reads.len() as u64, violations })
    }
}

impl fmt::Debug for Stamped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Stamped")
            .field("device", &self.device)
            .field("blocks", &self.blocks)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use aquifer_device::{DevicePool, PoolConfig, Request};
    use aquifer_driver::sim::Sim;

    /// Creates two blocks on a simulated device with bytes, and runs `test` on them.
    fn two_blocks(test: impl FnOnce(&Stamped, &Stream, Spot, Spot)) -> Verdict {
        let trace =
            crate::replay::trace_of("0,a,1,1000,0\n0,a,2,1000,0\n0,f,1,1000,0\n0,f,2,1000,0\n");
        let sim = Sim::h200(1).capacity(64 << 20);
        let driver = sim.driver();
        let pool = DevicePool::open(driver.clone(), DeviceId(0), PoolConfig::default()).unwrap();
        let stream = pool.stream().unwrap();
        let stamps = Stamped::new(&driver, DeviceId(0), &trace).unwrap();
        let blocks = [0, 1].map(|_| pool.alloc(&stream, Request::bytes(1000)).unwrap());
        test(&stamps, &stream, Spot::of(&blocks[0]), Spot::of(&blocks[1]));
        stamps.verdict().unwrap()
    }

    #[test]
    fn blocks_that_keep_their_bytes_are_found_right() {
        let verdict = two_blocks(|stamps, stream, first, second| {
            stamps.write(0, first, stream).unwrap();
            stamps.write(1, second, stream).unwrap();
            stamps.read(0, first, stream).unwrap();
            stamps.read(1, second, stream).unwrap();
            assert_eq!(stamps.driver_calls(), [(Call::CopyToDevice, 4), (Call::CopyToHost, 4)]);
        });
        assert_eq!(verdict, Verdict { checked: 2, violations: Violations::default() });
    }

    #[test]
    fn a_block_that_was_written_over_is_found_with_whose_bytes_it_has() {
        let verdict = two_blocks(|stamps, stream, first, second| {
            stamps.write(0, first, stream).unwrap();
            // A write of the second block's pattern to the wrong address.
            stamps.write(1, first, stream).unwrap();
            stamps.write(1, second, stream).unwrap();
            stamps.read(0, first, stream).unwrap();
            stamps.read(1, second, stream).unwrap();
        });
        assert_eq!((verdict.checked, verdict.violations.count), (2, 1));
        let told = &verdict.violations.first[0];
        assert!(told.starts_with("the block of row 2 (1000 bytes at 0x"), "{told}");
        assert!(told.ends_with("the first bytes are those of the block of row 3"), "{told}");
    }

    #[test]
    fn the_last_bytes_of_a_block_are_looked_at_too() {
        let verdict = two_blocks(|stamps, stream, first, _| {
            stamps.write(0, first, stream).unwrap();
            let tail = Spot { address: first.address + 900, bytes: 100, ..first };
            stamps.write(1, tail, stream).unwrap();
            stamps.read(0, first, stream).unwrap();
        });
        assert_eq!(verdict.violations.count, 1);
        assert!(
            verdict.violations.first[0].contains("the last bytes are"),
            "{:?}",
            verdict.violations
        );
    }

    #[test]
    fn stamps_at_both_ends_never_overlap() {
        for (bytes, expected) in
            [(1, (1, 0)), (64, (64, 0)), (65, (64, 1)), (128, (64, 64)), (1 << 30, (64, 64))]
        {
            assert_eq!(ends(bytes), expected);
        }
    }

    #[test]
    fn no_two_blocks_have_the_same_pattern() {
        let mut all: Vec<_> = (0..50_000).map(|block| pattern(block)[..8].to_vec()).collect();
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), 50_000);
    }
}
