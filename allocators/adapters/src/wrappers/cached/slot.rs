//! What one thread keeps.
#![expect(unsafe_code, reason = "a try-lock is a promise about a cell")]

use std::{
    alloc::Layout,
    cell::UnsafeCell,
    ptr::NonNull,
    sync::atomic::{AtomicBool, Ordering},
};

/// Layouts of which blocks are kept.
const LAYOUTS: usize = 64;
/// Blocks kept of each.
const DEPTH: usize = 32;
/// Calls for another layout after which a place goes over to that one.
const PATIENCE: u8 = 8;

/// Blocks kept by layout, behind a lock that nobody waits for.
// A cache line of its own, and the one that is fetched with it.
#[repr(align(128))]
pub(super) struct Slot {
    taken: AtomicBool,
    kept: UnsafeCell<Kept>,
}

struct Kept {
    /// The sum of `layout.size() * count`.
    bytes: usize,
    /// Made by the first block that is kept: a slot that no thread comes to takes no memory.
    places: Option<Box<[Place; LAYOUTS]>>,
}

#[derive(Clone, Copy)]
struct Place {
    layout: Layout,
    count: usize,
    blocks: [Option<NonNull<u8>>; DEPTH],
    /// Calls for another layout since the last one for this.
    passed: u8,
}

// SAFETY: `kept` is reached by `with` alone, from one thread at a time. The blocks in it are
// followed by the allocator that they came from alone, which the cache shares between threads only
// if that is `Sync`.
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

    /// Runs `work` on what is kept, unless somebody else is there. `work` must not unwind nor come
    /// back here.
    #[inline]
    fn with<R>(&self, work: impl FnOnce(&mut Kept) -> R) -> Option<R> {
        if self.taken.swap(true, Ordering::Acquire) {
            return None;
        }
        // SAFETY: the flag was down and is up, so nobody else is here until it is down again.
        let outcome = work(unsafe { &mut *self.kept.get() });
        self.taken.store(false, Ordering::Release);
        Some(outcome)
    }

    /// A kept block of exactly this layout.
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

    /// Keeps a block, if there is room for it in `room` bytes. What is not kept, this block or
    /// others of which no more are asked for, goes to `away`, one by one and outside of the lock.
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

    /// Takes everything out at once and hands it to `away`, one by one and outside of the lock: an
    /// allocator below that comes back and has something kept meanwhile is not called for ever.
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

    /// Blocks that are kept, and their bytes; `None` while somebody is there.
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

/// Where blocks of this layout are kept: sizes that are multiples of a word lie side by side.
#[inline]
fn place_of(layout: Layout) -> usize {
    let size = layout.size();
    (size.div_ceil(8)
        ^ (size >> 9)
        ^ (size >> 14)
        ^ (layout.align().trailing_zeros() as usize) << 3)
        % LAYOUTS
}
