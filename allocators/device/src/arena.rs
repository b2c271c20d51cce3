//! An arena of device memory: one block that is allocated in parts from its low end, and reset as a
//! whole.

use crate::{BLOCK_ALIGN, Block, DeviceSliceMut, Request, Resource};
use aquifer_core::{MemoryError, Result, StepMemory};
use aquifer_driver::site;
use aquifer_heap::{Bump, Range};
use aquifer_stream::{Noted, Stream};
use bytemuck::Pod;
use std::{
    fmt,
    sync::{Mutex, MutexGuard, PoisonError},
    time::Instant,
};

/// Device memory for the buffers of one step: bounds-checked parts of one block, which are freed
/// together.
///
/// A part is used like a slice of a [`DeviceBuffer`](crate::DeviceBuffer): work on any stream can
/// take it and is ordered with other uses. A use of a part counts as a use of the whole block, so
/// two streams that write parts of one arena take turns. For concurrent writes, use an arena for
/// each stream.
///
/// [`reset`](DeviceArena::reset) frees all parts. It waits on the host until all work that used
/// them is done. With several arenas in rotation, as in aquifer-adapters' `Frames`, the host can
/// run ahead by as many steps.
///
/// ```
/// use aquifer::{DeviceArena, DeviceId, DevicePool, PoolConfig, sim::Sim};
/// let sim = Sim::h200(1);
/// let pool = DevicePool::open(sim.driver(), DeviceId(0), PoolConfig::default())?;
/// let s = pool.stream()?;
/// let mut arena = DeviceArena::new(&pool, &s, 1 << 20)?;
/// for step in 0..3u32 {
///     let mut tokens = arena.alloc::<u32>(1000)?;
///     let mut scores = arena.alloc::<f32>(1000)?;
///     s.fill(&mut tokens, step)?;
///     s.fill(&mut scores, 0.5)?;
///     arena.reset()?;
/// }
/// assert!(arena.alloc::<u8>(2 << 20).is_err());
/// # Ok::<(), aquifer::MemoryError>(())
/// ```
///
/// A part does not outlive the step:
///
/// ```compile_fail,E0502
/// # use aquifer::{DeviceArena, Stream};
/// fn late(arena: &mut DeviceArena, s: &Stream) -> aquifer::error::Result<()> {
///     let mut part = arena.alloc::<u8>(100)?;
///     arena.reset()?;
///     s.fill(&mut part, 1)
/// }
/// ```
pub struct DeviceArena {
    block: Block,
    owner_stream: Stream,
    bump: Mutex<Bump>,
    /// The end of the step's work, after the step has ended.
    ended: Option<StepEnd>,
}

struct StepEnd {
    /// The epoch of the arena's own stream.
    owner_stream: u64,
    /// Uses by other streams.
    others: Vec<Noted>,
}

impl DeviceArena {
    /// Creates an arena of `bytes` from `resource`. `stream` becomes its owner stream.
    ///
    /// # Errors
    /// The resource's.
    #[track_caller]
    pub fn new(resource: &(impl Resource + ?Sized), stream: &Stream, bytes: u64) -> Result<Self> {
        let block = resource.allocate(stream, Request::bytes(bytes))?;
        let bump = Mutex::new(Bump::new(Range::new(block.address(), block.bytes())));
        Ok(Self { block, owner_stream: stream.clone(), bump, ended: None })
    }

    /// Allocates the next `len` elements, aligned as every block is. They are not initialised.
    ///
    /// # Errors
    /// [`MemoryError::ZeroSize`] for elements of no size; [`MemoryError::TooLarge`] if fewer bytes
    /// are left, with their number as the limit.
    pub fn alloc<T: Pod>(&self, len: usize) -> Result<DeviceSliceMut<'_, T>> {
        if size_of::<T>() == 0 {
            return Err(MemoryError::ZeroSize);
        }
        if len == 0 {
            return Ok(DeviceSliceMut::of_several(&self.block, 0, 0));
        }
        let bytes = (len as u64).saturating_mul(size_of::<T>() as u64);
        let mut bump = self.bump();
        let align = BLOCK_ALIGN.max(align_of::<T>() as u64);
        let address = bump.alloc(bytes, align).ok_or_else(|| {
            let start = bump.range().start + bump.used();
            let padding = start.next_multiple_of(align) - start;
            MemoryError::TooLarge {
                requested: bytes,
                limit: bump.remaining().saturating_sub(padding),
            }
        })?;
        let within = Range::new(self.block.address(), self.block.bytes());
        debug_assert!(
            address >= within.start && address + bytes <= within.end(),
            "beyond the arena"
        );
        debug_assert!(address.is_multiple_of(align), "a part is not aligned");
        // The bump allocator never returns the same bytes twice before `reset`, which no part
        // outlives.
        Ok(DeviceSliceMut::of_several(&self.block, address - self.block.address(), len))
    }

    /// Frees all parts. Blocks until all work that used them is done: the work queued when
    /// [`end_step`](StepMemory::end_step) was called, or until now without such a call.
    ///
    /// # Errors
    /// [`MemoryError::Busy`] while a [prepared](Block::prepare) use is not finished;
    /// [`MemoryError::Capturing`]; the driver's. Nothing has changed then.
    #[track_caller]
    pub fn reset(&mut self) -> Result<()> {
        let _site = site::enter();
        self.reset_by(None).map(drop)
    }

    /// As [`DeviceArena::reset`], until `deadline`. Returns whether the work was done by then.
    fn reset_by(&mut self, deadline: Option<Instant>) -> Result<bool> {
        self.end_step()?;
        if let Some(ended) = &self.ended {
            for noted in &ended.others {
                let epoch =
                    noted.epoch().ok_or(MemoryError::Busy { address: self.block.address() })?;
                if !noted.on().wait(epoch, deadline)? && deadline.is_some() {
                    return Ok(false);
                }
            }
            if !self.owner_stream.timeline().wait(ended.owner_stream, deadline)?
                && deadline.is_some()
            {
                return Ok(false);
            }
        }
        self.ended = None;
        self.bump().reset();
        Ok(true)
    }

    /// Returns the underlying block.
    #[must_use]
    pub fn block(&self) -> &Block {
        &self.block
    }

    /// Returns the bytes allocated since the last reset, with alignment padding.
    #[must_use]
    pub fn used(&self) -> u64 {
        self.bump().used()
    }

    /// Returns the size of the arena in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.block.bytes()
    }

    /// Returns the peak of [`used`](DeviceArena::used).
    #[must_use]
    pub fn high_water(&self) -> u64 {
        self.bump().high_water()
    }

    fn bump(&self) -> MutexGuard<'_, Bump> {
        // No code panics while the lock is held.
        self.bump.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl StepMemory for DeviceArena {
    #[track_caller]
    fn end_step(&mut self) -> Result<()> {
        if self.ended.is_some() {
            return Ok(());
        }
        let _site = site::enter();
        let owner_stream = self.owner_stream.timeline();
        let others = self.block.uses.current(owner_stream);
        // Recorded now: an event recorded at the wait would also cover the following steps.
        for noted in &others {
            noted.epoch().map_or(Ok(()), |epoch| noted.on().fence(epoch).map(drop))?;
        }
        let epoch = owner_stream.open();
        owner_stream.fence(epoch)?;
        self.ended = Some(StepEnd { owner_stream: epoch, others });
        Ok(())
    }

    #[track_caller]
    fn reset(&mut self) -> Result<()> {
        self.reset()
    }

    #[track_caller]
    fn try_reset(&mut self) -> Result<bool> {
        let _site = site::enter();
        self.reset_by(Some(Instant::now()))
    }
}

impl fmt::Debug for DeviceArena {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceArena")
            .field("block", &self.block)
            .field("used", &self.used())
            .finish_non_exhaustive()
    }
}
