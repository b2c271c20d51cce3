//! Routing scopes, which determine the allocations that are routed, and the allocators that serve
//! them.
#![expect(unsafe_code, reason = "declares an unsafe trait; holds no unsafe block")]

use std::{
    alloc::Layout,
    fmt,
    ops::Range,
    panic::{RefUnwindSafe, UnwindSafe},
    ptr::NonNull,
};

/// An allocator for routed scopes. Implement it, or wrap an `Allocator` in [`Over`](crate::Over).
///
/// ```
/// use aquifer_global::{self as global, Route};
/// use std::{alloc::Layout, ops::Range, ptr::NonNull, sync::atomic::{AtomicUsize, Ordering::Relaxed}};
///
/// #[global_allocator]
/// static GLOBAL: global::Global = global::Global::new();
///
/// /// A bump allocator that never reuses its bytes.
/// struct Strip {
///     start: NonNull<u8>,
///     bytes: usize,
///     used: AtomicUsize,
/// }
/// // SAFETY: the bytes behind the pointer belong to the strip, and `used` allocates each once.
/// unsafe impl Sync for Strip {}
///
/// // SAFETY: 1. Blocks are cut off one after another. 2. They lie in the strip's bytes, 3. which
/// // no other allocator uses. 4. Nothing unwinds. 5. The only state is one atomic.
/// unsafe impl Route for Strip {
///     fn allocate(&self, layout: Layout) -> Option<NonNull<u8>> {
///         let bytes = layout.pad_to_align().size().next_multiple_of(64);
///         let at = self.used.fetch_add(bytes, Relaxed);
///         // SAFETY: the offset lies in the strip.
///         (layout.align() <= 64 && at + bytes <= self.bytes).then(|| unsafe { self.start.add(at) })
///     }
///     fn allocate_zeroed(&self, layout: Layout) -> Option<NonNull<u8>> {
///         let block = self.allocate(layout)?;
///         // SAFETY: the block has that many bytes.
///         unsafe { block.write_bytes(0, layout.size()) };
///         Some(block)
///     }
///     unsafe fn deallocate(&self, _: NonNull<u8>, _: Layout) {}
///     unsafe fn resize(&self, _: NonNull<u8>, _: Layout, _: Layout) -> Option<NonNull<u8>> {
///         None
///     }
///     fn owns(&self, block: NonNull<u8>) -> bool {
///         self.window().contains(&block.addr().get())
///     }
///     fn window(&self) -> Range<usize> {
///         self.start.addr().get()..self.start.addr().get() + self.bytes
///     }
/// }
///
/// # #[repr(align(64))]
/// # struct Aligned([u8; 1 << 16]);
/// let bytes = Box::leak(Box::new(Aligned([0; 1 << 16])));
/// let strip = Strip { start: NonNull::from(bytes).cast(), bytes: 1 << 16, used: AtomicUsize::new(0) };
/// let strip: &'static Strip = Box::leak(Box::new(strip));
/// let to = global::register(strip)?;
///
/// let text = global::route(to, 1024, || "in the strip ".repeat(100));
/// assert!(strip.window().contains(&text.as_ptr().addr()));
/// assert_eq!(global::stats().routed, text.capacity() as u64);
/// # Ok::<(), global::RoutesFull>(())
/// ```
///
/// # Safety
/// 1. `allocate` and `resize` return blocks as `GlobalAlloc` does: of the requested layout,
///    overlapping no other block, live until they are deallocated.
/// 2. All blocks lie in [`window`](Route::window), which never changes.
/// 3. `owns` returns `true` for every live block of this route, and `false` for every live block of
///    any other allocator.
/// 4. No method unwinds.
/// 5. Every method may be called from any thread at any time: early, late, and in thread-local
///    destructors.
pub unsafe trait Route: Sync {
    /// Allocates a block of this layout, whose size is not zero. If it returns `None`, the wrapped
    /// allocator serves the request.
    fn allocate(&self, layout: Layout) -> Option<NonNull<u8>>;

    /// Allocates as [`allocate`](Route::allocate) does, with all bytes zero.
    fn allocate_zeroed(&self, layout: Layout) -> Option<NonNull<u8>>;

    /// Deallocates a block.
    ///
    /// # Safety
    /// `owns(block)` is true. The layout is that of its allocation, or of its last resize. The
    /// block is no longer used.
    unsafe fn deallocate(&self, block: NonNull<u8>, layout: Layout);

    /// Resizes a block, and moves it if needed. If it returns `None`, the block is unchanged.
    ///
    /// # Safety
    /// As for [`deallocate`](Route::deallocate) if it returns a block. `new` has the same alignment
    /// and a nonzero size.
    unsafe fn resize(&self, block: NonNull<u8>, old: Layout, new: Layout) -> Option<NonNull<u8>>;

    /// Returns whether this is the address of a block of this route. It is called when any
    /// allocator's block in the window is freed, so it must be fast and lock-free.
    fn owns(&self, block: NonNull<u8>) -> bool;

    /// Returns the address range of all blocks, which never changes. A narrow window causes fewer
    /// calls of `owns`.
    fn window(&self) -> Range<usize>;
}

/// A routing scope of one thread, stored on its stack.
#[derive(Clone, Copy)]
pub(crate) struct Scope {
    pub(crate) route: &'static dyn Route,
    /// Minimum bytes of a routed allocation.
    pub(crate) at_least: usize,
}

// A route does not unwind, so no inconsistent state of one can be observed.
impl UnwindSafe for Scope {}
impl RefUnwindSafe for Scope {}

impl fmt::Debug for Scope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Scope").field("at_least", &self.at_least).finish_non_exhaustive()
    }
}
