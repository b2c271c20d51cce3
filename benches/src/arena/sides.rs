//! The allocators: the library's arena over any allocator, bumpalo, bump-scope, and the process's
//! allocator.
#![expect(unsafe_code, reason = "rewinds arenas and frees memory by hand")]

use allocator_api2::{
    alloc::{Allocator, Global},
    boxed::Box as AllocBox,
    vec::Vec as AllocVec,
};
use aquifer_adapters::Arena;
use std::{alloc::Layout, cell::RefCell, hint::black_box, ptr::NonNull};

/// The requested size of each arena's first chunk, in bytes.
const CHUNK: usize = 4 << 10;

/// The operations of an arena. Each method is one operation of a row, and is inlined into its loop.
pub(super) trait Side {
    /// Allocates `count` numbers in a new arena over the same memory, and drops it.
    fn afresh(&mut self, count: u64);
    fn value(&self, value: u64);
    fn record(&self, value: [u32; 9]);
    fn block(&self, layout: Layout);
    fn text(&self, text: &str);
    fn slice(&self, source: &[u32]);
    /// Creates a box and drops it.
    fn boxed(&self, value: u64);
    /// Pushes `count` numbers onto a vector and drops it.
    fn pushes(&self, count: u32);
    fn reset(&mut self);
}

/// Arenas that can return to an earlier state.
pub(super) trait Rewinds: Side {
    /// Allocates `count` numbers above a mark, then rewinds to it.
    fn marked(&mut self, count: u64);
    /// Allocates `count` numbers in a scope, and as many in a scope inside it.
    fn nested(&mut self, count: u64);
}

#[inline]
fn push<A: Allocator>(mut list: AllocVec<u32, A>, count: u32) {
    (0..black_box(count)).for_each(|at| list.push(at));
    black_box(&list);
}

macro_rules! by_methods {
    ($block:ident, $list:expr) => {
        #[inline]
        fn value(&self, value: u64) {
            black_box(self.alloc(value));
        }
        #[inline]
        fn record(&self, value: [u32; 9]) {
            black_box(self.alloc(value));
        }
        #[inline]
        fn block(&self, layout: Layout) {
            black_box(self.$block(layout));
        }
        #[inline]
        fn text(&self, text: &str) {
            black_box(self.alloc_str(text));
        }
        #[inline]
        fn slice(&self, source: &[u32]) {
            black_box(self.alloc_slice_copy(source));
        }
        #[inline]
        fn boxed(&self, value: u64) {
            drop(black_box(AllocBox::new_in(value, $list(self))));
        }
        #[inline]
        fn pushes(&self, count: u32) {
            push(AllocVec::new_in($list(self)), count);
        }
    };
}

// Below the macro, which it uses.
#[cfg(feature = "peers")]
mod scoped;

#[cfg(feature = "peers")]
pub(super) use scoped::scoped;

impl<A: Allocator + Clone> Side for Arena<A> {
    #[inline]
    fn afresh(&mut self, count: u64) {
        let fresh = Arena::new_in(self.upstream().clone());
        (0..count).for_each(|at| fresh.value(at));
    }
    by_methods!(alloc_layout, |arena| arena);
    #[inline]
    fn reset(&mut self) {
        // Without gates no reset can fail.
        let _reset = Arena::reset(self);
    }
}

impl<A: Allocator + Clone> Rewinds for Arena<A> {
    #[inline]
    fn marked(&mut self, count: u64) {
        let mark = self.mark();
        (0..count).for_each(|at| self.value(at));
        // SAFETY: 1. The mark was taken here. 2. Nothing was reset or rewound since. 3. What was
        // allocated since is not used any more.
        unsafe { self.rewind(mark) };
    }
    #[inline]
    fn nested(&mut self, count: u64) {
        self.scope(|outer| {
            (0..count).for_each(|at| {
                black_box(outer.alloc(at));
            });
            outer.scope(|inner| {
                (0..count).for_each(|at| {
                    black_box(inner.alloc(at));
                });
            });
        });
    }
}

impl Side for bumpalo::Bump {
    #[inline]
    fn afresh(&mut self, count: u64) {
        let fresh = Self::with_capacity(CHUNK);
        (0..count).for_each(|at| fresh.value(at));
    }
    by_methods!(alloc_layout, |bump| bump);
    #[inline]
    fn reset(&mut self) {
        bumpalo::Bump::reset(self);
    }
}

/// The process's allocator. Blocks are kept for as long as an arena would keep them, and freed one
/// by one.
#[derive(Default)]
pub(super) struct MallocSide {
    kept: RefCell<Vec<(NonNull<u8>, Layout)>>,
}

impl MallocSide {
    #[inline]
    fn keep(&self, layout: Layout) -> Option<NonNull<u8>> {
        if layout.size() == 0 {
            return None;
        }
        let block = Global.allocate(layout).ok()?.cast();
        self.kept.borrow_mut().push((block, layout));
        Some(black_box(block))
    }

    #[inline]
    fn put<T>(&self, value: T) {
        if let Some(block) = self.keep(Layout::new::<T>()) {
            // SAFETY: the block is new, and has the layout of a `T`.
            unsafe { block.cast().write(value) };
        }
    }

    fn free_from(&mut self, first: usize) {
        for (block, layout) in self.kept.get_mut().drain(first..) {
            // SAFETY: a block of the global allocator with its layout, which was removed from the
            // list.
            unsafe { Global.deallocate(block, layout) };
        }
    }
}

impl Drop for MallocSide {
    fn drop(&mut self) {
        self.free_from(0);
    }
}

impl Side for MallocSide {
    #[inline]
    fn afresh(&mut self, count: u64) {
        self.marked(count);
    }
    #[inline]
    fn value(&self, value: u64) {
        self.put(value);
    }
    #[inline]
    fn record(&self, value: [u32; 9]) {
        self.put(value);
    }
    #[inline]
    fn block(&self, layout: Layout) {
        self.keep(layout);
    }
    #[inline]
    fn text(&self, text: &str) {
        if let Some(block) = self.keep(Layout::for_value(text)) {
            // SAFETY: 1. both have the text's bytes. 2. The block is new, so they do not overlap.
            unsafe { block.copy_from_nonoverlapping(NonNull::from(text).cast(), text.len()) };
        }
    }
    #[inline]
    fn slice(&self, source: &[u32]) {
        if let Some(block) = self.keep(Layout::for_value(source)) {
            // SAFETY: 1. both have the slice's bytes. 2. The block is new, so they do not overlap.
            unsafe {
                block
                    .cast()
                    .copy_from_nonoverlapping(NonNull::from(source).cast::<u32>(), source.len());
            };
        }
    }
    #[inline]
    fn boxed(&self, value: u64) {
        drop(black_box(Box::new(value)));
    }
    #[inline]
    fn pushes(&self, count: u32) {
        push(AllocVec::new(), count);
    }
    #[inline]
    fn reset(&mut self) {
        self.free_from(0);
    }
}

impl Rewinds for MallocSide {
    #[inline]
    fn marked(&mut self, count: u64) {
        let first = self.kept.get_mut().len();
        (0..count).for_each(|at| self.value(at));
        self.free_from(first);
    }
    #[inline]
    fn nested(&mut self, count: u64) {
        let outer = self.kept.get_mut().len();
        (0..count).for_each(|at| self.value(at));
        self.marked(count);
        self.free_from(outer);
    }
}
