//! Scopes whose allocations another allocator serves.
//!
//! A program that wants the bytes of a file in pinned memory, read by a library that returns a
//! plain `Vec<u8>`, runs the call in a scope: what it allocates there on its thread, from a size
//! on, comes from a [`Route`]. The `Vec` then lives as long as any, is grown and freed by any
//! thread, in or out of a scope: every free finds the owner by the address.
//!
//! ```text
//!   alloc    in a scope, and large enough? ── yes ─► the route ── refuses ─┐
//!                 └──────────── no ───────────────────────────────────────┴─► the wrapped allocator
//!   free     address in the window of all routes? ── yes ─► a route's own? ── yes ─► that route
//!                 └──────────── no ────────────────────────────┴─ no ─────► the wrapped allocator
//! ```
//!
//! Routes are registered for the life of the process. While none is, a free pays two loads and a
//! comparison.
//!
//! # Within a route
//! A route may allocate for itself in any of its methods: on that thread scopes are off meanwhile,
//! so it is not asked again. If it frees a routed block there, that free is put off until the route
//! is left: a route is never entered twice by one thread, and may hold a lock. A route's other
//! functions, which its user calls in a scope, should keep their bookkeeping out of it by
//! [`unrouted`].
#![expect(unsafe_code, reason = "declares an unsafe trait; holds no unsafe block")]

mod deferred;
mod over;
mod probe;
mod table;

pub use over::Over;
pub use probe::is_installed;
pub use table::{RouteId, RoutesFull, register};

pub(crate) use scope::{Scope, scoped};
pub use scope::{route, unrouted};

mod scope;
mod serve;

pub(crate) use serve::{Reallocation, allocate, allocate_zeroed, deallocate, figures, reallocate};

use std::{alloc::Layout, ops::Range, ptr::NonNull};

/// An allocator that scopes can be routed to. Implement it, or lay [`Over`] over an `Allocator`.
///
/// ```
/// use aquifer_global::{self as global, Route};
/// use std::{alloc::Layout, ops::Range, ptr::NonNull, sync::atomic::{AtomicUsize, Ordering::Relaxed}};
///
/// #[global_allocator]
/// static GLOBAL: global::Global = global::Global::new();
///
/// /// Hands out its bytes once and takes none back.
/// struct Strip {
///     start: NonNull<u8>,
///     bytes: usize,
///     used: AtomicUsize,
/// }
/// // SAFETY: the bytes behind the pointer belong to the strip, and `used` gives each away once.
/// unsafe impl Sync for Strip {}
///
/// // SAFETY: 1. Blocks are cut off one after another. 2. They lie in the strip's bytes, 3. where nobody else's are.
/// // 4. Nothing unwinds. 5. One atomic is all there is.
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
/// 1. `allocate` and `resize` answer with blocks as `GlobalAlloc`'s do: of the layout asked for,
///    overlapping no other, live until they are given back.
/// 2. All blocks lie in [`window`](Route::window), which never changes.
/// 3. `owns` is true for every live block of this route and false for every live block of any other
///    allocator.
/// 4. No method unwinds.
/// 5. Every method may be called from any thread at any time: early, late, and in thread-local
///    destructors.
pub unsafe trait Route: Sync {
    /// A block of this layout, whose size is not zero; `None` sends the caller to the wrapped
    /// allocator.
    fn allocate(&self, layout: Layout) -> Option<NonNull<u8>>;

    /// As [`allocate`](Route::allocate), with all bytes zero.
    fn allocate_zeroed(&self, layout: Layout) -> Option<NonNull<u8>>;

    /// Takes a block back.
    ///
    /// # Safety
    /// `owns(block)`; the layout is the one that it was asked for with, or resized to; nobody uses
    /// it any more.
    unsafe fn deallocate(&self, block: NonNull<u8>, layout: Layout);

    /// Makes a block larger or smaller, by a move if need be; `None`, and the block is as it was,
    /// if it cannot.
    ///
    /// # Safety
    /// As for [`deallocate`](Route::deallocate), if it answers with a block; `new` has the same
    /// alignment and a size.
    unsafe fn resize(&self, block: NonNull<u8>, old: Layout, new: Layout) -> Option<NonNull<u8>>;

    /// Whether this is the address of one of this route's blocks. Asked for frees of any
    /// allocator's blocks in the window, so it must be quick and take no lock.
    fn owns(&self, block: NonNull<u8>) -> bool;

    /// The addresses between which all blocks lie, for ever. The narrower, the fewer frees ask
    /// further.
    fn window(&self) -> Range<usize>;
}
