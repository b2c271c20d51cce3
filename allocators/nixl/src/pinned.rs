//! Pinned memory that can be registered.
#![expect(unsafe_code, reason = "owns raw memory, and promises that it stays in place")]

use crate::{FixedMemory, FixedRange, MemoryPlace, NixlError};
use allocator_api2::alloc::Allocator;
use aquifer_host::{PinnedAllocator, PinnedPool};
use std::{alloc::Layout, fmt, ptr::NonNull};

/// The alignment.
const PAGE: usize = 4096;

/// One block of pinned memory, to be registered as a whole. Not zeroed.
///
/// There is no slice of it, since a peer may write to it at any time: use the pointer. A
/// [`RegisteredPool`](crate::RegisteredPool) has one, divided into blocks.
///
/// ```no_run
/// # fn registered(runtime: &aquifer::Runtime, agent: &aquifer_nixl::NixlAgent) -> Result<(), aquifer_nixl::NixlError> {
/// use aquifer_nixl::PinnedRange;
/// let range = PinnedRange::new(runtime.pinned_near(0), 1 << 20)?;
/// let registration = agent.register(std::sync::Arc::new(range))?;
/// # Ok(())
/// # }
/// ```
pub struct PinnedRange {
    allocator: PinnedAllocator,
    start: NonNull<u8>,
    layout: Layout,
}

// SAFETY: 1. the value owns the memory, which is not bound to a thread, and never reaches it.
unsafe impl Send for PinnedRange {}
// SAFETY: 1. as above.
unsafe impl Sync for PinnedRange {}

// SAFETY: 1. the block is the pool's until it is freed in `drop`, and pinned memory does not move.
// 2. it is reached through raw pointers alone.
unsafe impl FixedMemory for PinnedRange {
    fn fixed_range(&self) -> FixedRange {
        let address = self.start.as_ptr().expose_provenance() as u64;
        FixedRange { place: MemoryPlace::Host, address, bytes: self.layout.size() as u64 }
    }
}

impl Drop for PinnedRange {
    fn drop(&mut self) {
        // SAFETY: 1. `new` has allocated it from this allocator with this layout.
        unsafe { self.allocator.deallocate(self.start, self.layout) };
    }
}

impl PinnedRange {
    /// Allocates `bytes` of a pinned pool, rounded up to whole pages of 4 KiB. Blocks while the
    /// pool grows.
    ///
    /// # Errors
    /// [`NixlError::Memory`]; [`NixlError::OutOfBounds`] for no bytes and for more than a pointer
    /// can tell.
    pub fn new(pool: &PinnedPool, bytes: u64) -> Result<Self, NixlError> {
        let size = usize::try_from(bytes).ok().and_then(|n| n.checked_next_multiple_of(PAGE));
        let layout = size.and_then(|size| Layout::from_size_align(size, PAGE).ok());
        let Some(layout) = layout.filter(|layout| layout.size() > 0) else {
            return Err(NixlError::OutOfBounds { offset: 0, bytes, within: 0 });
        };
        let start = pool.allocate(layout).map_err(NixlError::Memory)?.cast();
        Ok(Self { allocator: pool.allocator(), start, layout })
    }

    /// Returns the address of its first byte. Peers that know of the range may write to it
    /// meanwhile.
    #[must_use]
    pub fn as_ptr(&self) -> *mut u8 {
        self.start.as_ptr()
    }
}

impl fmt::Debug for PinnedRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PinnedRange").field("range", &self.fixed_range()).finish_non_exhaustive()
    }
}
