//! Calls of an allocator by hand, and a route.
#![expect(unsafe_code, reason = "calls allocators by hand; implements a route")]

use crate::device::source::Source;
use aquifer_core::Bytes;
use aquifer_global::{Route, RouteId, register};
use std::{
    alloc::{GlobalAlloc, Layout},
    fmt,
    ops::Range,
    ptr::NonNull,
    sync::OnceLock,
};

/// An allocator, called through `GlobalAlloc`.
#[derive(Debug)]
pub(super) struct By<A: 'static>(pub(super) &'static A);

/// A block, as its user holds it.
#[derive(Debug)]
pub(super) struct GlobalBlock(NonNull<u8>, Layout);

// SAFETY: the block belongs to the owner of this value, as that of a `Box` does.
unsafe impl Send for GlobalBlock {}

/// The allocator returned null.
#[derive(Debug)]
pub(super) struct NoMemory(u64);

impl fmt::Display for NoMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "no memory for {}", Bytes(self.0))
    }
}

impl<A: GlobalAlloc> Source for By<A> {
    type Held = GlobalBlock;
    type Refused = NoMemory;

    #[inline]
    fn take(&self, bytes: u64) -> Result<GlobalBlock, NoMemory> {
        let Ok(layout) = Layout::from_size_align(bytes.max(1) as usize, 16) else {
            return Err(NoMemory(bytes));
        };
        // SAFETY: the layout has a size.
        let block = NonNull::new(unsafe { self.0.alloc(layout) });
        block.map(|block| GlobalBlock(block, layout)).ok_or(NoMemory(bytes))
    }

    #[inline]
    fn give(&self, GlobalBlock(block, layout): GlobalBlock) -> Result<(), NoMemory> {
        // SAFETY: the block was allocated here with this layout, and is freed once.
        unsafe { self.0.dealloc(block.as_ptr(), layout) };
        Ok(())
    }
}

/// A route without blocks, to measure what its address window costs all other blocks.
struct Empty(Range<usize>);

// SAFETY: it has no blocks, and nothing in it unwinds.
unsafe impl Route for Empty {
    fn allocate(&self, _layout: Layout) -> Option<NonNull<u8>> {
        None
    }

    fn allocate_zeroed(&self, _layout: Layout) -> Option<NonNull<u8>> {
        None
    }

    unsafe fn deallocate(&self, _block: NonNull<u8>, _layout: Layout) {}

    unsafe fn resize(
        &self,
        _block: NonNull<u8>,
        _old: Layout,
        _new: Layout,
    ) -> Option<NonNull<u8>> {
        None
    }

    fn owns(&self, _block: NonNull<u8>) -> bool {
        false
    }

    fn window(&self) -> Range<usize> {
        self.0.clone()
    }
}

/// Registers a route for the rest of the process.
pub(super) fn routed() -> Option<RouteId> {
    static TO: OnceLock<Option<RouteId>> = OnceLock::new();
    *TO.get_or_init(|| {
        let apart = vec![0u8; 4096].leak().as_ptr_range();
        register(Box::leak(Box::new(Empty(apart.start.addr()..apart.end.addr())))).ok()
    })
}
