//! An allocator whose blocks can be held by gates, and the gates for it.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a helper of a test that fails is a failed test"
)]
#![expect(unsafe_code, reason = "implements the allocator traits")]

use allocator_api2::alloc::{Allocator as _, Global};
use aquifer_adapters::Owns;
use aquifer_core::{
    DeferReuse, DriverError, Gate, MemoryError, Result as MemoryResult, impl_allocator,
};
use std::{
    cell::RefCell,
    collections::BTreeMap,
    ptr::NonNull,
    rc::Rc,
    sync::{
        Arc,
        atomic::{AtomicU8, Ordering},
    },
    thread,
    time::Instant,
};

/// A gate that a test opens, or breaks.
#[derive(Debug, Default)]
pub(crate) struct Latch(AtomicU8);

impl Latch {
    const CLOSED: u8 = 0;
    const OPEN: u8 = 1;
    const LOST: u8 = 2;

    pub(crate) fn closed() -> Arc<Self> {
        Arc::default()
    }

    pub(crate) fn open(&self) {
        self.0.store(Self::OPEN, Ordering::Release);
    }

    /// Fails all later waits as on a lost device.
    pub(crate) fn lose(&self) {
        self.0.store(Self::LOST, Ordering::Release);
    }
}

impl Gate for Latch {
    fn is_open(&self) -> bool {
        self.0.load(Ordering::Acquire) == Self::OPEN
    }

    fn wait(&self, deadline: Option<Instant>) -> MemoryResult<bool> {
        loop {
            match self.0.load(Ordering::Acquire) {
                Self::CLOSED if deadline.is_some_and(|deadline| Instant::now() >= deadline) => {
                    return Ok(false);
                }
                Self::CLOSED => thread::yield_now(),
                Self::OPEN => return Ok(true),
                _ => {
                    let lost = DriverError {
                        call: "cuEventQuery",
                        code: 719,
                        name: "CUDA_ERROR_LAUNCH_FAILED",
                    };
                    return Err(MemoryError::Driver(lost));
                }
            }
        }
    }
}

/// The global allocator with quarantine: a block freed while one of its gates is closed is not
/// reused.
///
/// Clones are handles to one pool.
#[derive(Clone, Debug, Default)]
pub(crate) struct Gated {
    blocks: Rc<RefCell<Vec<Block>>>,
}

#[derive(Debug)]
struct Block {
    start: NonNull<u8>,
    layout: std::alloc::Layout,
    gates: Vec<Arc<dyn Gate>>,
    freed: bool,
}

impl Gated {
    /// Returns freed blocks that no gate holds any more. Returns the numbers of remaining blocks:
    /// live and held ones.
    pub(crate) fn reap(&self) -> (usize, usize) {
        let mut blocks = self.blocks.borrow_mut();
        blocks.retain(|block| {
            if block.freed && block.gates.iter().all(|gate| gate.is_open()) {
                // SAFETY: the block came from `Global` with this layout, was freed, and is
                // forgotten here.
                unsafe { Global.deallocate(block.start, block.layout) };
                return false;
            }
            true
        });
        let held = blocks.iter().filter(|block| block.freed).count();
        (blocks.len() - held, held)
    }
}

impl_allocator! {
    // SAFETY: blocks are the global allocator's, returned to it later at the earliest.
    unsafe impl [] for Gated {
        fn allocate(&self, layout: Layout) -> Result<NonNull<[u8]>, AllocError> {
            self.reap();
            let block = Global.allocate(layout).map_err(|_| AllocError)?;
            self.blocks.borrow_mut().push(Block { start: block.cast(), layout, gates: Vec::new(), freed: false });
            Ok(block)
        }

        unsafe fn deallocate(&self, block: NonNull<u8>, _layout: Layout) {
            for held in self.blocks.borrow_mut().iter_mut().filter(|held| held.start == block) {
                held.freed = true;
            }
            self.reap();
        }
    }
}

// SAFETY: `reap` returns a block only when its gates are open, and nothing else returns blocks.
unsafe impl DeferReuse for Gated {
    fn defer(&self, address: NonNull<u8>, until: Arc<dyn Gate>) -> MemoryResult<()> {
        let mut blocks = self.blocks.borrow_mut();
        let held = blocks.iter_mut().filter(|block| !block.freed).find(|block| {
            (block.start.addr().get()..block.start.addr().get() + block.layout.size())
                .contains(&address.addr().get())
        });
        let address = address.addr().get() as u64;
        held.ok_or(MemoryError::ForeignBlock { address })?.gates.push(until);
        Ok(())
    }
}

// SAFETY: the table holds every live block, and blocks are the global allocator's, so no other
// allocator's lies in one.
unsafe impl Owns for Gated {
    fn owns(&self, block: NonNull<u8>) -> bool {
        let address = block.addr().get();
        self.blocks.borrow().iter().any(|held| {
            !held.freed
                && (held.start.addr().get()..held.start.addr().get() + held.layout.size())
                    .contains(&address)
        })
    }
}

type Table = BTreeMap<usize, (NonNull<u8>, std::alloc::Layout)>;

/// The global allocator with a table of its blocks and a fixed capacity. It returns blocks larger
/// than requested, and accepts any size in between at a free.
///
/// Clones are handles to one allocator.
#[derive(Clone, Debug)]
pub(crate) struct Owned {
    /// Blocks by address, with their real size, since the pointer of a caller need not reach the
    /// extra bytes.
    blocks: Rc<RefCell<Table>>,
    room: usize,
}

impl Owned {
    /// Bytes that each block has beyond the requested size.
    const EXTRA: usize = 5;

    pub(crate) fn with_room(room: usize) -> Self {
        Self { blocks: Rc::default(), room }
    }

    pub(crate) fn live(&self) -> usize {
        self.blocks.borrow().len()
    }
}

impl_allocator! {
    // SAFETY: blocks are the global allocator's, each freed with the layout it was allocated with.
    unsafe impl [] for Owned {
        fn allocate(&self, layout: Layout) -> Result<NonNull<[u8]>, AllocError> {
            let size = layout.size().checked_add(Self::EXTRA).ok_or(AllocError)?;
            let larger = Layout::from_size_align(size, layout.align()).map_err(|_| AllocError)?;
            let live: usize = self.blocks.borrow().values().map(|(_, layout)| layout.size()).sum();
            if live.saturating_add(larger.size()) > self.room {
                return Err(AllocError);
            }
            let block = Global.allocate(larger).map_err(|_| AllocError)?;
            self.blocks.borrow_mut().insert(block.cast::<u8>().addr().get(), (block.cast(), larger));
            Ok(block)
        }

        unsafe fn deallocate(&self, block: NonNull<u8>, layout: Layout) {
            let held = self.blocks.borrow_mut().remove(&block.addr().get());
            let (block, held) = held.unwrap_or_else(|| panic!("{block:p} is no live block"));
            assert_eq!(held.align(), layout.align());
            assert!((held.size() - Self::EXTRA..=held.size()).contains(&layout.size()), "{held:?} given back as {layout:?}");
            // SAFETY: the block came from `Global` with this layout, and is forgotten here.
            unsafe { Global.deallocate(block, held) };
        }
    }
}

// SAFETY: the table holds every live block, and blocks are the global allocator's, so no other
// allocator's lies in one.
unsafe impl Owns for Owned {
    fn owns(&self, block: NonNull<u8>) -> bool {
        let address = block.addr().get();
        let blocks = self.blocks.borrow();
        blocks
            .range(..=address)
            .next_back()
            .is_some_and(|(start, (_, layout))| address < start + layout.size())
    }
}
