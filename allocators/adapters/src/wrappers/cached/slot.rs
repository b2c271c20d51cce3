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
const PATIENCE: u8 = 8;

/// Cached blocks by layout, behind a try-lock.
// Two cache lines of its own, because the hardware prefetches them in pairs.
#[repr(align(128))]
pub(super) struct Slot {
    taken: AtomicBool,
    kept: UnsafeCell<Kept>,
}

struct Kept {
    /// The sum of `layout.size() * count`.
    bytes: usize,
    /// Allocated when the first block is cached, so that unused slots take no memory.
    places: Option<Box<[Place; LAYOUTS]>>,
}

#[derive(Clone, Copy)]
struct Place {
    layout: Layout,
    count: usize,
    blocks: [Option<NonNull<u8>>; DEPTH],
    /// Calls for another layout since the last one for this layout.
    passed: u8,
}

// SAFETY: only `with` accesses `kept`, from one thread at a time. Only the allocator of its blocks
// dereferences their pointers, and the cache shares that allocator between threads only if it is
// `Sync`.
unsafe impl Sync for Slot {}
// SAFETY: as above.
unsafe impl Send for Slot {}

impl Slot {
    pub(super) fn new() -> Self {
        Self {
            taken: AtomicBool::new(false),
            kept: UnsafeCell::new(Kept { bytes: 0, places: None }),
        }
    }

    /// Runs `work` on the contents, unless another thread is using the slot. `work` must neither
    /// unwind nor call this again.
    #[inline]
    fn with<R>(&self, work: impl FnOnce(&mut Kept) -> R) -> Option<R> {
        if self.taken.swap(true, Ordering::Acquire) {
            return None;
        }
        // SAFETY: this thread changed the flag from false to true, so no other thread accesses the
        // contents until it is reset.
        let outcome = work(unsafe { &mut *self.kept.get() });
        self.taken.store(false, Ordering::Release);
        Some(outcome)
    }

    /// Removes and returns a cached block of exactly this layout.
    #[inline]
    pub(super) fn take(&self, layout: Layout) -> Option<NonNull<u8>> {
        self.with(|kept| {
            let place = &mut kept.places.as_deref_mut()?[place_of(layout)];
            if place.layout != layout {
                place.passed = place.passed.saturating_add(1);
                return None;
            }
            place.passed = 0;
            let block = place.pop()?;
            kept.bytes -= layout.size();
            Some(block)
        })
        .flatten()
    }

    /// Caches a block if the capacity of `room` bytes allows it. A rejected block, and evicted
    /// blocks of a layout that is no longer requested, are passed to `away`, one by one and outside
    /// the lock.
    #[inline]
    pub(super) fn keep(
        &self,
        block: NonNull<u8>,
        layout: Layout,
        room: usize,
        away: impl Fn(NonNull<u8>, Layout),
    ) {
        let (is_kept, stale) = self
            .with(|kept| {
                if layout.size() > room {
                    return (false, None);
                }
                let places = kept.places.get_or_insert_with(|| Box::new([Place::EMPTY; LAYOUTS]));
                let place = &mut places[place_of(layout)];
                let mut stale = None;
                if place.layout != layout {
                    if place.count > 0 && place.passed < PATIENCE {
                        place.passed += 1;
                        return (false, None);
                    }
                    kept.bytes -= place.layout.size() * place.count;
                    stale = (place.count > 0).then_some(*place);
                    *place = Place { layout, ..Place::EMPTY };
                }
                if place.count == DEPTH || kept.bytes + layout.size() > room {
                    return (false, stale);
                }
                place.blocks[place.count] = Some(block);
                place.count += 1;
                kept.bytes += layout.size();
                (true, stale)
            })
            .unwrap_or((false, None));
        if !is_kept {
            away(block, layout);
        }
        if let Some(mut place) = stale {
            while let Some(block) = place.pop() {
                away(block, place.layout);
            }
        }
    }

    /// Removes all blocks at once and passes them to `away`, one by one and outside the lock. So it
    /// terminates even if the upstream allocator calls back and caches more blocks.
    pub(super) fn drain(&self, away: impl Fn(NonNull<u8>, Layout)) {
        let places = self.with(|kept| {
            kept.bytes = 0;
            kept.places.take()
        });
        for mut place in places.flatten().into_iter().flat_map(|places| *places) {
            while let Some(block) = place.pop() {
                away(block, place.layout);
            }
        }
    }

    /// Returns the number of cached blocks and their bytes, or `None` while another thread is using
    /// the slot.
    pub(super) fn held(&self) -> Option<(usize, usize)> {
        self.with(|kept| {
            let blocks = kept
                .places
                .as_deref()
                .map_or(0, |places| places.iter().map(|place| place.count).sum());
            (blocks, kept.bytes)
        })
    }
}

impl Place {
    const EMPTY: Self =
        Self { layout: Layout::new::<()>(), count: 0, blocks: [None; DEPTH], passed: 0 };

    #[inline]
    fn pop(&mut self) -> Option<NonNull<u8>> {
        self.count = self.count.checked_sub(1)?;
        self.blocks[self.count].take()
    }
}

/// Returns the bin of this layout. Sizes that are consecutive multiples of a word use consecutive
/// bins.
#[inline]
fn place_of(layout: Layout) -> usize {
    let size = layout.size();
    (size.div_ceil(8)
        ^ (size >> 9)
        ^ (size >> 14)
        ^ (layout.align().trailing_zeros() as usize) << 3)
        % LAYOUTS
}
