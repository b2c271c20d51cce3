//! One slot of the cache.
#![expect(unsafe_code, reason = "a try-lock is a promise about a cell")]

use std::{
    alloc::Layout,
    cell::UnsafeCell,
    ptr::NonNull,
    sync::atomic::{AtomicBool, Ordering},
};

/// The number of layouts that a slot caches.
const LAYOUTS: usize = 64;
/// The number of blocks cached of each layout.
const DEPTH: usize = 32;
/// After this many calls for another layout, a bin switches to that layout.
const MAX_MISSES: u8 = 8;

/// Cached blocks by layout, behind a try-lock.
// Two cache lines of its own, because the hardware prefetches them in pairs.
#[repr(align(128))]
pub(super) struct Slot {
    locked: AtomicBool,
    contents: UnsafeCell<SlotContents>,
}

struct SlotContents {
    /// The sum of `layout.size() * count`.
    bytes: usize,
    /// Allocated when the first block is cached, so that unused slots take no memory.
    bins: Option<Box<[LayoutBin; LAYOUTS]>>,
}

#[derive(Clone, Copy)]
struct LayoutBin {
    layout: Layout,
    count: usize,
    blocks: [Option<NonNull<u8>>; DEPTH],
    /// Calls for another layout since the last one for this layout.
    misses: u8,
}

// SAFETY: only `with` accesses `contents`, from one thread at a time. Only the allocator of its
// blocks dereferences their pointers, and the cache shares that allocator between threads only if
// it is `Sync`.
unsafe impl Sync for Slot {}
// SAFETY: as above.
unsafe impl Send for Slot {}

impl Slot {
    pub(super) fn new() -> Self {
        Self {
            locked: AtomicBool::new(false),
            contents: UnsafeCell::new(SlotContents { bytes: 0, bins: None }),
        }
    }

    /// Runs `work` on the contents, unless another thread is using the slot. `work` must neither
    /// unwind nor call this again.
    #[inline]
    fn with<R>(&self, work: impl FnOnce(&mut SlotContents) -> R) -> Option<R> {
        if self.locked.swap(true, Ordering::Acquire) {
            return None;
        }
        // SAFETY: this thread changed the flag from false to true, so no other thread accesses the
        // contents until it is reset.
        let outcome = work(unsafe { &mut *self.contents.get() });
        self.locked.store(false, Ordering::Release);
        Some(outcome)
    }

    /// Removes and returns a cached block of exactly this layout.
    #[inline]
    pub(super) fn pop(&self, layout: Layout) -> Option<NonNull<u8>> {
        self.with(|contents| {
            let bin = &mut contents.bins.as_deref_mut()?[bin_index(layout)];
            if bin.layout != layout {
                bin.misses = bin.misses.saturating_add(1);
                return None;
            }
            bin.misses = 0;
            let block = bin.pop()?;
            contents.bytes -= layout.size();
            Some(block)
        })
        .flatten()
    }

    /// Caches a block if the capacity of `capacity` bytes allows it. A rejected block, and evicted
    /// blocks of a layout that is no longer requested, are passed to `release`, one by one and
    /// outside the lock.
    #[inline]
    pub(super) fn push(
        &self,
        block: NonNull<u8>,
        layout: Layout,
        capacity: usize,
        release: impl Fn(NonNull<u8>, Layout),
    ) {
        let (is_cached, stale) = self
            .with(|contents| {
                if layout.size() > capacity {
                    return (false, None);
                }
                let bins =
                    contents.bins.get_or_insert_with(|| Box::new([LayoutBin::EMPTY; LAYOUTS]));
                let bin = &mut bins[bin_index(layout)];
                let mut stale = None;
                if bin.layout != layout {
                    if bin.count > 0 && bin.misses < MAX_MISSES {
                        bin.misses += 1;
                        return (false, None);
                    }
                    contents.bytes -= bin.layout.size() * bin.count;
                    stale = (bin.count > 0).then_some(*bin);
                    *bin = LayoutBin { layout, ..LayoutBin::EMPTY };
                }
                if bin.count == DEPTH || contents.bytes + layout.size() > capacity {
                    return (false, stale);
                }
                bin.blocks[bin.count] = Some(block);
                bin.count += 1;
                contents.bytes += layout.size();
                (true, stale)
            })
            .unwrap_or((false, None));
        if !is_cached {
            release(block, layout);
        }
        if let Some(mut bin) = stale {
            while let Some(block) = bin.pop() {
                release(block, bin.layout);
            }
        }
    }

    /// Removes all blocks at once and passes them to `release`, one by one and outside the lock. So
    /// it terminates even if the upstream allocator calls back and caches more blocks.
    pub(super) fn drain(&self, release: impl Fn(NonNull<u8>, Layout)) {
        let bins = self.with(|contents| {
            contents.bytes = 0;
            contents.bins.take()
        });
        for mut bin in bins.flatten().into_iter().flat_map(|bins| *bins) {
            while let Some(block) = bin.pop() {
                release(block, bin.layout);
            }
        }
    }

    /// Returns the number of cached blocks and their bytes, or `None` while another thread is using
    /// the slot.
    pub(super) fn usage(&self) -> Option<(usize, usize)> {
        self.with(|contents| {
            let blocks =
                contents.bins.as_deref().map_or(0, |bins| bins.iter().map(|bin| bin.count).sum());
            (blocks, contents.bytes)
        })
    }
}

impl LayoutBin {
    const EMPTY: Self =
        Self { layout: Layout::new::<()>(), count: 0, blocks: [None; DEPTH], misses: 0 };

    #[inline]
    fn pop(&mut self) -> Option<NonNull<u8>> {
        self.count = self.count.checked_sub(1)?;
        self.blocks[self.count].take()
    }
}

/// Returns the bin of this layout. Sizes that are consecutive multiples of a word use consecutive
/// bins.
#[inline]
fn bin_index(layout: Layout) -> usize {
    let size = layout.size();
    (size.div_ceil(8)
        ^ (size >> 9)
        ^ (size >> 14)
        ^ (layout.align().trailing_zeros() as usize) << 3)
        % LAYOUTS
}
