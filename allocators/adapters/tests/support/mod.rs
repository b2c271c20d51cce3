//! An allocator that can hold blocks back, and gates to hold them with.
#![expect(unsafe_code, reason = "implements the allocator traits")]
#![allow(dead_code, reason = "no test binary needs all of it")]

use allocator_api2::alloc::{Allocator as _, Global};
use aquifer_core::{DeferReuse, DriverError, Gate, MemoryError, Result as MemoryResult, impl_allocator};
use std::{
    cell::RefCell,
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

    /// Whoever waits from now on hears that the device is lost.
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
                    let lost =
                        DriverError { call: "cuEventQuery", code: 719, name: "CUDA_ERROR_LAUNCH_FAILED" };
                    return Err(MemoryError::Driver(lost));
                }
            }
        }
    }
}

/// The global allocator with quarantine: a block that is freed while one of its gates is closed stays as it is.
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
    /// Gives back what was freed and is not held any more. Says how many blocks are left: live ones, and held ones.
    pub(crate) fn reap(&self) -> (usize, usize) {
        let mut blocks = self.blocks.borrow_mut();
        blocks.retain(|block| {
            if block.freed && block.gates.iter().all(|gate| gate.is_open()) {
                // SAFETY: the block came from `Global` with this layout, was freed, and is forgotten here.
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
    // SAFETY: blocks are the global allocator's, given back later at the earliest.
    impl [] for Gated {
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

// SAFETY: `reap` gives a block back only when its gates are open, and it alone gives blocks back.
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
