//! The blocks of an allocator's user, and their expected contents.
#![expect(unsafe_code, reason = "calls the allocator trait, and looks into blocks")]

use super::books::Latch;
use crate::program::Bytes;
use allocator_api2::alloc::Allocator;
use aquifer_core::{DeferReuse, Gate};
use std::{alloc::Layout, ptr::NonNull, sync::Arc};

/// Maximum number of live blocks, so that checking all of them after each operation is cheap.
const MAX_BLOCKS: usize = 40;

/// A live block, filled with its stamp.
#[derive(Debug)]
struct Block {
    start: NonNull<u8>,
    layout: Layout,
    /// The size that was returned.
    bytes: usize,
    stamp: u8,
}

/// Bytes that a device may still read.
#[derive(Debug)]
struct Held {
    start: NonNull<u8>,
    bytes: usize,
    stamp: u8,
    until: Arc<Latch>,
}

/// Live blocks, and bytes that a device still reads.
#[derive(Debug, Default)]
pub(crate) struct Shadow {
    blocks: Vec<Block>,
    held: Vec<Held>,
    stamps: u8,
}

fn is(start: NonNull<u8>, from: usize, to: usize, stamp: u8) -> bool {
    // SAFETY: 1. initialised bytes of a live block, or of one that is held back.
    (from..to).all(|at| unsafe { start.add(at).read() } == stamp)
}

impl Shadow {
    /// Performs one operation on `allocator`, chosen by the next bytes.
    pub(crate) fn step(&mut self, allocator: &impl Allocator, bytes: &mut Bytes<'_>) {
        match bytes.choice(10) {
            0..=3 => self.allocate(allocator, bytes),
            4 | 5 => self.free(allocator, bytes),
            6 | 7 => self.grow(allocator, bytes),
            _ => self.shrink(allocator, bytes),
        }
        self.check();
    }

    /// Returns a layout that is small in most cases.
    fn layout(bytes: &mut Bytes<'_>, least: usize) -> Layout {
        let size = least + usize::from(bytes.small()) % 3000;
        Layout::from_size_align(size, 1 << bytes.choice(8)).unwrap_or(Layout::new::<u64>())
    }

    /// Returns the index of a block, the newest one in half of the cases.
    fn pick(&self, bytes: &mut Bytes<'_>) -> Option<usize> {
        let last = self.blocks.len().checked_sub(1)?;
        if bytes.flag() {
            Some(last)
        } else {
            usize::from(bytes.u8()).checked_rem(self.blocks.len())
        }
    }

    /// Returns the layout of the request, or another one that fits the block.
    fn fitting(block: &Block, bytes: &mut Bytes<'_>) -> Layout {
        let spare = block.bytes - block.layout.size();
        let size = block.layout.size() + usize::from(bytes.u8()) % (spare + 1);
        Layout::from_size_align(size, block.layout.align()).unwrap_or(block.layout)
    }

    /// Adds a block whose first `kept` bytes already have the stamp of another.
    fn keep(&mut self, answer: NonNull<[u8]>, layout: Layout, kept: usize, stamp: Option<u8>) {
        let (start, bytes) = (answer.cast::<u8>(), answer.len());
        assert!(bytes >= layout.size(), "{bytes} bytes for {layout:?}");
        assert!(start.addr().get().is_multiple_of(layout.align()), "{start:p} for {layout:?}");
        self.stamps = self.stamps % 250 + 1;
        let stamp = stamp.unwrap_or(self.stamps);
        for at in kept..bytes {
            // SAFETY: 1. inside the block, which is live and not used elsewhere.
            unsafe { start.add(at).write(stamp) };
        }
        self.blocks.push(Block { start, layout, bytes, stamp });
    }

    fn allocate(&mut self, allocator: &impl Allocator, bytes: &mut Bytes<'_>) {
        let (layout, zeroed) = (Self::layout(bytes, 0), bytes.flag());
        if self.blocks.len() >= MAX_BLOCKS {
            return;
        }
        let answer =
            if zeroed { allocator.allocate_zeroed(layout) } else { allocator.allocate(layout) };
        let Ok(answer) = answer else { return };
        assert!(!zeroed || is(answer.cast(), 0, answer.len(), 0), "not zero");
        self.keep(answer, layout, 0, None);
    }

    fn free(&mut self, allocator: &impl Allocator, bytes: &mut Bytes<'_>) {
        let Some(which) = self.pick(bytes) else { return };
        let block = self.blocks.swap_remove(which);
        let layout = Self::fitting(&block, bytes);
        // SAFETY: 1. live, of this allocator, with a layout that fits it.
        unsafe { allocator.deallocate(block.start, layout) };
    }

    fn grow(&mut self, allocator: &impl Allocator, bytes: &mut Bytes<'_>) {
        let Some(which) = self.pick(bytes) else { return };
        let block = self.blocks.swap_remove(which);
        let (old, zeroed) = (Self::fitting(&block, bytes), bytes.flag());
        let mut new = Self::layout(bytes, block.bytes);
        if bytes.choice(16) == 0 && !cfg!(miri) {
            // A size that must be refused.
            new = Layout::from_size_align(1 << 46, new.align()).unwrap_or(new);
        }
        // SAFETY: 1. live, of this allocator, with a layout that fits it; the new one is no
        // smaller.
        let answer = unsafe {
            if zeroed {
                allocator.grow_zeroed(block.start, old, new)
            } else {
                allocator.grow(block.start, old, new)
            }
        };
        match answer {
            Err(_) => self.blocks.push(block),
            Ok(answer) => {
                assert!(
                    is(answer.cast(), 0, old.size(), block.stamp),
                    "the common part was not kept"
                );
                assert!(!zeroed || is(answer.cast(), old.size(), answer.len(), 0), "not zero");
                self.keep(answer, new, old.size(), Some(block.stamp));
            }
        }
    }

    fn shrink(&mut self, allocator: &impl Allocator, bytes: &mut Bytes<'_>) {
        let Some(which) = self.pick(bytes) else { return };
        let block = self.blocks.swap_remove(which);
        let old = Self::fitting(&block, bytes);
        let size = usize::from(bytes.u16()) % (block.layout.size() + 1);
        let new = Layout::from_size_align(size, 1 << bytes.choice(8)).unwrap_or(block.layout);
        // SAFETY: 1. live, of this allocator, with a layout that fits it; the new one is no larger.
        match unsafe { allocator.shrink(block.start, old, new) } {
            Err(_) => self.blocks.push(block),
            Ok(answer) => {
                assert!(is(answer.cast(), 0, size, block.stamp), "the common part was not kept");
                // Bytes that a device reads must not be written. Keeping the stamp leaves those
                // beyond the new size unchanged.
                self.keep(answer, new, size, Some(block.stamp));
            }
        }
    }

    /// Lets a device read one of the blocks until a gate opens.
    pub(crate) fn defer(&mut self, allocator: &impl DeferReuse, bytes: &mut Bytes<'_>) {
        let Some(block) = self.pick(bytes).map(|which| &self.blocks[which]) else { return };
        if block.layout.size() == 0 {
            return;
        }
        let until = Arc::new(Latch::default());
        // SAFETY: 1. inside the block.
        let inside = unsafe { block.start.add(usize::from(bytes.u16()) % block.layout.size()) };
        let noted = allocator.defer(inside, until.clone());
        assert!(noted.is_ok(), "{noted:?}");
        let held =
            Held { start: block.start, bytes: block.layout.size(), stamp: block.stamp, until };
        self.held.push(held);
    }

    /// Opens one of the closed gates.
    pub(crate) fn open_one(&mut self, bytes: &mut Bytes<'_>) {
        if let Some(which) = usize::from(bytes.u8()).checked_rem(self.held.len()) {
            self.held.swap_remove(which).until.open();
        }
    }

    /// Opens every gate.
    pub(crate) fn open_all(&mut self) {
        self.held.drain(..).for_each(|held| held.until.open());
    }

    /// Returns whether a gate is closed.
    pub(crate) fn is_held(&self) -> bool {
        self.held.iter().any(|held| !held.until.is_open())
    }

    /// Drops the blocks of an arena, which are not used any more.
    pub(crate) fn forget(&mut self) {
        self.blocks.clear();
    }

    /// Checks all blocks.
    pub(crate) fn check(&self) {
        for (at, block) in self.blocks.iter().enumerate() {
            assert!(is(block.start, 0, block.bytes, block.stamp), "{block:?} was overwritten");
            let (from, to) = (block.start.addr().get(), block.start.addr().get() + block.bytes);
            for other in &self.blocks[..at] {
                let start = other.start.addr().get();
                let apart = to <= start || start + other.bytes <= from;
                assert!(
                    apart || block.bytes == 0 || other.bytes == 0,
                    "{block:?} and {other:?} overlap"
                );
            }
        }
        for held in &self.held {
            assert!(is(held.start, 0, held.bytes, held.stamp), "{held:?} was overwritten");
        }
    }
}
