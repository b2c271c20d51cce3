//! The innermost allocator, which tracks each of its blocks.
#![expect(unsafe_code, reason = "implements the allocator traits")]

use allocator_api2::alloc::{Allocator as _, Global};
use aquifer_core::{DeferReuse, Gate, MemoryError, Result as MemoryResult, impl_allocator};
use std::{
    alloc::Layout,
    cell::{Cell, RefCell},
    collections::BTreeMap,
    ptr::NonNull,
    rc::Rc,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Instant,
};

/// Bytes that a block has beyond its requested size, so that several sizes fit it.
const EXTRA: usize = 3;
/// The size of the largest block in bytes.
const MOST: usize = 1 << 32;

/// The global allocator with a table of its blocks. Clones share the table.
#[derive(Clone, Debug, Default)]
pub(crate) struct Books {
    blocks: Rc<RefCell<BTreeMap<usize, Entry>>>,
    /// Every how many allocations one fails. 0 for none.
    refuse: Rc<Cell<u32>>,
    calls: Rc<Cell<u32>>,
}

#[derive(Debug)]
struct Entry {
    start: NonNull<u8>,
    layout: Layout,
    gates: Vec<Arc<dyn Gate>>,
    freed: bool,
}

impl Books {
    /// Makes every `nth` allocation fail from now on, or none for 0.
    pub(crate) fn refuse(&self, nth: u32) {
        self.refuse.set(nth);
    }

    /// Frees deallocated blocks whose gates are open, without waiting. Returns how many blocks are
    /// live, and how many are held back.
    pub(crate) fn reap(&self) -> (usize, usize) {
        let mut blocks = self.blocks.borrow_mut();
        blocks.retain(|_, entry| {
            if entry.freed && entry.gates.iter().all(|gate| gate.is_open()) {
                // SAFETY: 1. the block came from `Global` with this layout, was deallocated, and is
                // removed from the table here.
                unsafe { Global.deallocate(entry.start, entry.layout) };
                return false;
            }
            true
        });
        let held = blocks.values().filter(|entry| entry.freed).count();
        (blocks.len() - held, held)
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        debug_assert!(
            self.freed || std::thread::panicking(),
            "a block of {:?} was leaked",
            self.layout
        );
    }
}

impl_allocator! {
    // SAFETY: 1. blocks come from the global allocator and are freed no earlier than they are
    // deallocated.
    unsafe impl [] for Books {
        fn allocate(&self, layout: Layout) -> Result<NonNull<[u8]>, AllocError> {
            self.calls.set(self.calls.get().wrapping_add(1));
            if self.refuse.get() > 0 && self.calls.get().is_multiple_of(self.refuse.get()) {
                return Err(AllocError);
            }
            // No machine has that much, and sanitizers report such a request as an error of the
            // program.
            let size = layout.size().checked_add(EXTRA).filter(|&size| size <= MOST).ok_or(AllocError)?;
            let layout = Layout::from_size_align(size, layout.align()).map_err(|_| AllocError)?;
            self.reap();
            let block = Global.allocate(layout).map_err(|_| AllocError)?;
            let start = block.cast::<u8>();
            let entry = Entry { start, layout, gates: Vec::new(), freed: false };
            assert!(self.blocks.borrow_mut().insert(start.addr().get(), entry).is_none());
            Ok(NonNull::slice_from_raw_parts(start, size))
        }

        unsafe fn deallocate(&self, block: NonNull<u8>, layout: Layout) {
            let mut blocks = self.blocks.borrow_mut();
            let entry = blocks.get_mut(&block.addr().get()).filter(|entry| !entry.freed);
            assert!(entry.is_some(), "{block:p} is no live block");
            if let Some(entry) = entry {
                let size = entry.layout.size();
                assert!(
                    entry.layout.align() == layout.align() && (size - EXTRA..=size).contains(&layout.size()),
                    "a block of {:?} was given back as {layout:?}",
                    entry.layout
                );
                entry.freed = true;
            }
            drop(blocks);
            self.reap();
        }
    }
}

// SAFETY: 1. only `reap` frees blocks, once their gates are open.
unsafe impl DeferReuse for Books {
    fn defer(&self, address: NonNull<u8>, until: Arc<dyn Gate>) -> MemoryResult<()> {
        let address = address.addr().get();
        let foreign = MemoryError::ForeignBlock { address: address as u64 };
        let mut blocks = self.blocks.borrow_mut();
        let entry = blocks.range_mut(..=address).next_back().map(|(_, entry)| entry);
        let holds = |entry: &&mut Entry| {
            !entry.freed && address < entry.start.addr().get() + entry.layout.size()
        };
        entry.filter(holds).ok_or(foreign)?.gates.push(until);
        Ok(())
    }
}

/// A gate that the program opens. A wait returns at once if it is closed.
#[derive(Debug, Default)]
pub(crate) struct Latch(AtomicBool);

impl Latch {
    /// Opens the gate.
    pub(crate) fn open(&self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

impl Gate for Latch {
    fn is_open(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
    fn wait(&self, _deadline: Option<Instant>) -> MemoryResult<bool> {
        Ok(self.is_open())
    }
}
