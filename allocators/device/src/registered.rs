//! Device memory for transports that register it, such as NCCL, NIXL and RDMA: whole chunks, each
//! registered once and served in parts.
//!
//! ```text
//!   chunk ──▶ register ──▶ parts ──the last is free, its work is done──▶ unregister ──▶ the driver
//!                                                                                └ refused: kept, tried again
//! ```
//!
//! The state is locked for bookkeeping alone: the driver and the registrar are called without it.
#![expect(unsafe_code, reason = "makes the promises of a source of ranges")]

use crate::{
    AddressRegistration, Block, Dependencies, DevicePool, RangeSource, Request, StableBlock,
    base::{
        pending::{PartsWork, PendingUses, is_done_except},
        waits::{deadline, try_wait},
    },
    source::allocator::{SourceAllocator, forward_to_allocator},
    stable::StableMemory,
};
use aquifer_core::{BLOCK_ALIGN, DeviceId, MemoryError, Opaque, PoolStats, Result};
use aquifer_driver::{DeviceRange, ExportTypes, Relaxed};
use aquifer_heap::{Config, Heap, HeapBlock, Range};
use aquifer_stream::Stream;
use std::{
    fmt,
    mem::{self, ManuallyDrop},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

/// Chunks are multiples of it, so that none shares a page of the driver with other memory.
const CHUNK_UNIT: u64 = 2 << 20;

/// Registers memory with a transport. Called by the thread that allocates or frees, which may
/// capture a graph, and by several threads at once. May block; must not panic.
///
/// See [`RegisteredDevicePool`] for an example.
pub trait Registrar: fmt::Debug + Send + Sync + 'static {
    /// What the transport knows a registration by.
    type Handle: Send + 'static;

    /// Registers the range of `memory`, one allocation of the driver that does not move.
    ///
    /// # Errors
    /// The transport's code. Nothing is registered.
    fn register(&self, memory: &AddressRegistration) -> Result<Self::Handle, i32>;

    /// Returns how the transport exports chunks. With [`ExportTypes::NONE`] a chunk is one
    /// `cuMemAlloc`, which the transports of [`DevicePool::alloc_stable_legacy`] accept. Otherwise
    /// it is one physical handle with those of the types that the device supports. Where it
    /// supports none of them, and in [bypass mode](crate::PoolConfig::bypass), it is a
    /// `cuMemAlloc` too.
    ///
    /// NCCL exports a handle by a file descriptor, and does not use what it cannot export: return
    /// `ExportTypes::POSIX_FD.with_rdma()`, as `ncclMemAlloc` does.
    fn export(&self) -> ExportTypes {
        ExportTypes::NONE
    }

    /// Ends a registration. No queued work uses the memory any more.
    ///
    /// # Errors
    /// The transport's code. The memory is kept, and the call is repeated at later allocations,
    /// frees and trims.
    fn unregister(&self, memory: &AddressRegistration, handle: &Self::Handle) -> Result<(), i32>;
}

/// Device memory that a transport has registered: a [`Resource`](crate::Resource) whose blocks are
/// parts of chunks and keep the pool.
///
/// - A chunk is one allocation or one physical handle of the driver, as the [registrar
///   chooses](Registrar::export), charged to the device pool's budget. It is registered once,
///   before its first part, and never moves.
/// - The pool grows by whole chunks. A request that is larger gets a chunk of its own size.
/// - When the last part of a chunk is free and its work is done, the chunk is unregistered and
///   returned to the device pool, which releases it at its next slow path or trim. None is kept:
///   hold a block to keep a chunk.
/// - A freed block is reused at once by its own stream, and by others when the host has seen its
///   work done. An allocation without room waits for such work before it is refused.
///
/// Allocations and frees may call the driver, and block while the registrar does. The drop of the
/// pool and its last block waits for the work of freed blocks. A chunk that cannot be unregistered
/// then stays allocated.
///
/// ```
/// use aquifer::{
///     DeviceId, DevicePool, Opaque, PoolConfig, RegisteredDevicePool, Request,
///     device::{AddressRegistration, Registrar}, driver::ExportTypes, sim::Sim,
/// };
/// #[derive(Debug)]
/// struct Nccl; // with a communicator
/// impl Registrar for Nccl {
///     type Handle = u64;
///     fn register(&self, memory: &AddressRegistration) -> Result<u64, i32> {
///         Ok(memory.range().address) // ncclCommRegister
///     }
///     fn unregister(&self, _: &AddressRegistration, _: &u64) -> Result<(), i32> {
///         Ok(()) // ncclCommDeregister
///     }
///     fn export(&self) -> ExportTypes {
///         ExportTypes::POSIX_FD.with_rdma()
///     }
/// }
/// let pool = DevicePool::open(Sim::h200(1).driver(), DeviceId(0), PoolConfig::default())?;
/// let registered = RegisteredDevicePool::new(&pool, 64 << 20, Nccl)?;
/// let stream = pool.stream()?;
/// let gradients = registered.allocate(&stream, Request::bytes(8 << 20))?;
/// let weights = registered.allocate(&stream, Request::bytes(100 << 20))?;
/// assert_eq!(registered.chunks().iter().map(|c| c.bytes >> 20).collect::<Vec<_>>(), [64, 100]);
/// # drop((gradients, weights));
/// # Ok::<(), aquifer::MemoryError>(())
/// ```
#[derive(Debug)]
pub struct RegisteredDevicePool<R: Registrar> {
    allocator: Arc<SourceAllocator<RegisteredChunks<R>>>,
}

/// The source of the parts.
struct RegisteredChunks<R: Registrar> {
    registrar: R,
    pool: DevicePool,
    /// Chunks are of a stream without work, so nothing delays their release.
    stream: Stream,
    chunk_bytes: u64,
    memory: StableMemory,
    state: Mutex<State<R::Handle>>,
}

/// A chunk. What the transport holds ends before the memory.
struct RegisteredChunk<H> {
    handle: H,
    memory: AddressRegistration,
    _block: StableBlock,
    /// Its parts, live or pending.
    heap: Heap,
}

/// A freed part whose work may not be done. It is live in its chunk's heap.
struct PendingPart {
    part: HeapBlock,
    work: PartsWork,
}

struct State<H> {
    chunks: Vec<RegisteredChunk<H>>,
    pending: Vec<PendingPart>,
    /// Chunks without parts, whose registration has not ended yet.
    leaving: Vec<RegisteredChunk<H>>,
}

impl<H> State<H> {
    fn free(&mut self, part: &HeapBlock) {
        let freed = self.chunks.iter_mut().any(|chunk| chunk.heap.free_block(part, 0).is_ok());
        debug_assert!(freed, "{part:?} is in no chunk");
    }
}

impl<R: Registrar> RegisteredDevicePool<R> {
    /// Creates a pool without chunks over the device of `pool`. Chunks have `chunk_bytes`, rounded
    /// up to 2 MiB. Leases a stream.
    ///
    /// # Errors
    /// As [`DevicePool::stream`].
    pub fn new(pool: &DevicePool, chunk_bytes: u64, registrar: R) -> Result<Self> {
        let state = State { chunks: Vec::new(), pending: Vec::new(), leaving: Vec::new() };
        let (stream, state) = (pool.stream()?, Mutex::new(state));
        let export = registrar.export().common(pool.core().info.export_types);
        let memory = if export.posix_fd || export.fabric {
            StableMemory::Mapped(export)
        } else {
            StableMemory::Whole
        };
        let chunks_of = pool.clone();
        let source =
            RegisteredChunks { registrar, pool: chunks_of, stream, chunk_bytes, memory, state };
        let (driver, streams) = (pool.driver().clone(), pool.streams().clone());
        let allocator = SourceAllocator::new(source, driver, streams, None, "registered");
        Ok(Self { allocator })
    }

    /// Returns the block that was [converted](Block::into_raw) to this address.
    ///
    /// # Errors
    /// [`MemoryError::DoubleFree`] if it has been freed and the address is still remembered;
    /// [`MemoryError::ForeignBlock`] if there is no such block.
    pub fn from_raw(&self, address: u64) -> Result<Block> {
        self.allocator.take_raw(address)
    }

    /// Returns the ranges of the registered chunks that have parts, in the order of their growth.
    #[must_use]
    pub fn chunks(&self) -> Vec<DeviceRange> {
        self.allocator.source.state().chunks.iter().map(|chunk| chunk.memory.range()).collect()
    }

    /// Returns the registrar.
    #[must_use]
    pub fn registrar(&self) -> &R {
        &self.allocator.source.registrar
    }
}

impl<R: Registrar> RegisteredChunks<R> {
    fn state(&self) -> MutexGuard<'_, State<R::Handle>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the freed parts whose work is done to their chunks.
    fn settle(&self) {
        let pending = mem::take(&mut self.state().pending).into_iter();
        let polled = pending.map(|mut pending| {
            let is_lost = matches!(pending.work.poll(), Err(MemoryError::DeviceLost { .. }));
            (is_lost || pending.work.is_over(), pending)
        });
        let polled: Vec<_> = polled.collect();
        let mut state = self.state();
        for (is_over, pending) in polled {
            if is_over { state.free(&pending.part) } else { state.pending.push(pending) }
        }
    }

    /// Unregisters the chunks that have no parts, and returns them to the device pool.
    fn release_unused(&self) {
        let leaving = {
            let mut state = self.state();
            let (unused, used) =
                mem::take(&mut state.chunks).into_iter().partition(|c| c.heap.live_bytes() == 0);
            state.chunks = used;
            mem::take(&mut state.leaving).into_iter().chain::<Vec<_>>(unused)
        };
        for chunk in leaving {
            let relaxed = Relaxed::enter(&**self.pool.driver());
            let ended = self.registrar.unregister(&chunk.memory, &chunk.handle);
            drop(relaxed);
            if ended.is_err() {
                self.state().leaving.push(chunk);
            }
        }
    }

    fn take(&self, bytes: u64) -> Option<u64> {
        let mut state = self.state();
        let part = state.chunks.iter_mut().find_map(|chunk| chunk.heap.alloc(bytes, BLOCK_ALIGN));
        part.map(|part| part.address)
    }

    /// Takes a part of about this size that `stream` itself has freed, ordered after its other
    /// uses.
    fn take_own(&self, stream: &Stream, bytes: u64) -> Option<u64> {
        let on = Some(stream.timeline());
        let found = {
            let mut state = self.state();
            let at = state.pending.iter().position(|PendingPart { part, work }| {
                (bytes..=2 * bytes.max(BLOCK_ALIGN)).contains(&part.bytes)
                    && is_done_except(&work.own, on)
            })?;
            state.pending.swap_remove(at)
        };
        let address = found.part.address;
        if found.work.uses.order_before(stream.timeline(), address).is_ok() {
            return Some(address);
        }
        self.state().pending.push(found);
        None
    }

    /// Registers a new chunk, and takes a part of it.
    fn grow(&self, bytes: u64) -> Result<u64> {
        let size = bytes.max(self.chunk_bytes).max(1).next_multiple_of(CHUNK_UNIT);
        let block = self.pool.alloc_chunk(&self.stream, Request::bytes(size), self.memory)?;
        let (memory, mut heap) = (block.register(), Heap::new(Config::device()));
        let added = heap.add(Range::new(block.address(), size), 0).ok();
        let Some(part) = added.and_then(|()| heap.alloc(bytes, BLOCK_ALIGN)) else {
            return Err(MemoryError::TooLarge { requested: bytes, limit: size });
        };
        let relaxed = Relaxed::enter(&**self.pool.driver());
        let registered = self.registrar.register(&memory);
        drop(relaxed);
        let handle = registered.map_err(|code| {
            let address = block.address();
            MemoryError::Registration { address, bytes: size, code }
        })?;
        self.state().chunks.push(RegisteredChunk { handle, memory, _block: block, heap });
        Ok(part.address)
    }

    /// Waits until the work of freed parts is done, for at most the device pool's time.
    fn wait_for_pending(&self) {
        let until = deadline(self.pool.core().config.wait);
        let work = self.state().pending.iter().map(|pending| pending.work.clone()).collect();
        // What cannot be waited for stays pending.
        Vec::into_iter(work).for_each(|work: PartsWork| _ = try_wait(|| work.wait(until)));
        self.settle();
    }
}

// SAFETY: 1. A part lies in a chunk, which is the driver's and aligned to at least `BLOCK_ALIGN`,
// and is live in the chunk's heap until it is free. 2. A chunk is dropped when its heap has no live
// part. 3. A part returns to its heap when the host has seen its work done; before that it goes to
// the stream that it belonged to, whole, and that stream waits for its other uses. 4. As 3.
unsafe impl<R: Registrar> RangeSource for RegisteredChunks<R> {
    fn device(&self) -> DeviceId {
        self.pool.device()
    }

    fn allocate(&self, stream: &Stream, bytes: u64) -> Result<u64> {
        let mut waits = true;
        self.settle();
        loop {
            if let Some(address) = self.take(bytes).or_else(|| self.take_own(stream, bytes)) {
                return Ok(address);
            }
            self.release_unused();
            match self.grow(bytes) {
                Err(MemoryError::OutOfMemory(_)) if mem::take(&mut waits) => {
                    self.wait_for_pending();
                }
                grown => return grown,
            }
        }
    }

    fn deallocate(&self, range: DeviceRange, after: &Dependencies<'_>) -> Result<()> {
        let freed = &after.freed.work;
        freed.fence_at_once();
        let work = PartsWork { own: freed.own.clone(), uses: freed.uses.follow() };
        {
            let mut state = self.state();
            let mut parts = state.chunks.iter().map(|chunk| chunk.heap.block_at(range.address));
            let Some(part) = parts.find_map(std::result::Result::ok) else {
                return Err(MemoryError::ForeignBlock { address: range.address });
            };
            state.pending.push(PendingPart { part, work });
        }
        self.settle();
        self.release_unused();
        Ok(())
    }

    fn reserved(&self) -> Option<u64> {
        let state = self.state();
        let chunks = state.chunks.iter().chain(&state.leaving);
        Some(chunks.map(|chunk| chunk.memory.range().bytes).sum())
    }

    /// Also releases returned chunks to the driver, which waits for the device.
    fn trim(&self, _keep: u64) -> Result<u64> {
        self.settle();
        self.release_unused();
        let mut released = 0;
        for _ in 0..2 {
            // The first trim records events for work that none covered.
            if self.pool.core().dedicated.retiring() > 0 {
                released += self.pool.trim(u64::MAX)?;
            }
        }
        Ok(released)
    }
}

impl<R: Registrar> Drop for RegisteredChunks<R> {
    fn drop(&mut self) {
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        for PendingPart { part, work } in mem::take(&mut state.pending) {
            if matches!(work.wait(None), Ok(true) | Err(MemoryError::DeviceLost { .. })) {
                state.free(&part);
            }
        }
        for chunk in state.chunks.drain(..).chain(state.leaving.drain(..)) {
            let is_used = chunk.heap.live_bytes() > 0;
            if is_used || self.registrar.unregister(&chunk.memory, &chunk.handle).is_err() {
                // Work or a transport may still write to it.
                let _kept = ManuallyDrop::new(chunk);
            }
        }
    }
}

impl<R: Registrar> Opaque for RegisteredDevicePool<R> {
    forward_to_allocator!();
    fn stats(&self) -> PoolStats {
        self.allocator.stats()
    }
}

impl<R: Registrar> fmt::Debug for RegisteredChunks<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RegisteredChunks")
            .field("registrar", &self.registrar)
            .finish_non_exhaustive()
    }
}
