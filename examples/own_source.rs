//! Custom memory below the library: slots of a slab that another library has allocated, and a
//! custom wrapper that counts. Both work with the same checks, buffers and wrappers as any pool.
#![expect(clippy::print_stdout, reason = "an example shows what it did")]
#![expect(unsafe_code, reason = "answers for memory that another library has allocated")]

use aquifer::{
    Block, Budget, Bytes, Dependencies, DeviceBuffer, DeviceId, DeviceRange, Driver, Limit,
    MemoryError, Opaque, OutOfMemory, PoolStats, RangeSource, Request, Runtime, SourcePool, Stream,
    Tag,
    adapters::{CountingAllocator, Tagged},
    device::conformance,
};
use std::{
    error::Error,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

const SLOT: u64 = 64 << 10;
const SLOTS: u64 = 64;

/// Slots of one allocation. The other library may allocate them in any way. Here it calls the
/// driver.
struct Slab {
    driver: Arc<dyn Driver>,
    range: DeviceRange,
    free: Mutex<Vec<u64>>,
}

impl Slab {
    fn new(driver: Arc<dyn Driver>, device: DeviceId) -> Result<Self, MemoryError> {
        let bytes = SLOT * SLOTS;
        let address = driver.mem_alloc(device, bytes)?;
        let free = Mutex::new((0..SLOTS).map(|slot| address + slot * SLOT).collect());
        Ok(Self { driver, range: DeviceRange { device, address, bytes }, free })
    }

    fn free(&self) -> MutexGuard<'_, Vec<u64>> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

// SAFETY: 1. a slot is inside the slab, and is removed from the free list when it is allocated.
// `cuMemAlloc` aligns to 256 bytes, and slots have the same distance. 2. the slab is freed only
// when all slots are in the list. 3. and 4. a slot returns to the list when all work that used it
// is complete, so any stream can use it next.
unsafe impl RangeSource for Slab {
    fn device(&self) -> DeviceId {
        self.range.device
    }

    fn allocate(&self, _stream: &Stream, bytes: u64) -> Result<u64, MemoryError> {
        if bytes > SLOT {
            return Err(MemoryError::TooLarge { requested: bytes, limit: SLOT });
        }
        let full =
            || MemoryError::OutOfMemory(Box::new(OutOfMemory::new("the slab".into(), bytes)));
        self.free().pop().ok_or_else(full)
    }

    fn deallocate(&self, range: DeviceRange, after: &Dependencies<'_>) -> Result<(), MemoryError> {
        if !after.is_done()? {
            // Work is pending: the pool tries again later.
            return Err(MemoryError::Busy { address: range.address });
        }
        self.free().push(range.address);
        Ok(())
    }

    fn reserved(&self) -> Option<u64> {
        Some(self.range.bytes)
    }
}

impl Drop for Slab {
    fn drop(&mut self) {
        // A slot that was not returned may still be in use, so the slab is leaked.
        if self.free().len() as u64 == SLOTS {
            // SAFETY: 1. from `mem_alloc`, and freed once. 2. the work of every slot is complete.
            let _ = unsafe { self.driver.mem_free(self.range.device, self.range.address) };
        }
    }
}

impl std::fmt::Debug for Slab {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Slab").field("range", &self.range).finish_non_exhaustive()
    }
}

/// Records the largest request. Needs no unsafe code, since only pools create blocks.
#[derive(Debug)]
struct Largest<M> {
    inner: M,
    bytes: AtomicU64,
}

impl<M: Opaque<Stream = Stream, Block = Block>> Opaque for Largest<M> {
    type Stream = Stream;
    type Block = Block;

    fn device(&self) -> DeviceId {
        self.inner.device()
    }
    fn allocate(&self, stream: &Stream, request: Request) -> Result<Block, MemoryError> {
        let block = self.inner.allocate(stream, request)?;
        self.bytes.fetch_max(block.bytes(), Ordering::Relaxed);
        Ok(block)
    }
    fn stats(&self) -> PoolStats {
        self.inner.stats()
    }
    fn trim(&self, keep: u64) -> Result<u64, MemoryError> {
        self.inner.trim(keep)
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let rt = Runtime::builder().or_sim().build()?;
    let device = rt.device(0)?;
    let (s, u) = (device.stream()?, device.stream()?);

    let slab = Slab::new(device.driver().clone(), device.device())?;
    let slab = SourcePool::new(slab, device.streams().clone(), None)?;
    conformance(&slab, &[s.clone(), u.clone()], 300, 1)?;
    assert_eq!(slab.source().free().len() as u64, SLOTS);

    // The library's wrappers over it, and a custom wrapper over these.
    let limit = Limit::new(slab.clone(), Budget::new("the slab's user", 1 << 20));
    let stack = Largest {
        inner: CountingAllocator::new(Tagged::new(limit, Tag::named("slots"))),
        bytes: AtomicU64::new(0),
    };
    conformance(&stack, &[s.clone(), u.clone()], 300, 2)?;
    println!(
        "the largest of {} blocks had {}",
        stack.stats().allocations,
        Bytes(stack.bytes.load(Ordering::Relaxed))
    );

    let mut x: DeviceBuffer<f32> = DeviceBuffer::new_in(&stack, &s, 1000)?;
    u.fill(&mut x, 1.5)?;
    let mut back = vec![0.0; 1000];
    s.try_scope(|c| c.download(&x, &mut back))?;
    assert_eq!((back[999], x.block().tag()), (1.5, Tag::named("slots")));
    Ok(())
}
