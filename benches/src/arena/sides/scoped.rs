//! bump-scope.

use super::{CHUNK, Rewinds, Side, push};
use allocator_api2::{boxed::Box as AllocBox, vec::Vec as AllocVec};
use bump_scope::{alloc::compat::AllocatorApi2V02Compat, traits::BumpAllocatorTyped};
use std::{alloc::Layout, hint::black_box};

/// bump-scope's own type.
type Scoped = bump_scope::Bump;

pub(in crate::arena) fn scoped() -> Scoped {
    Scoped::with_size(CHUNK)
}

impl Side for Scoped {
    #[inline]
    fn afresh(&mut self, count: u64) {
        let fresh = scoped();
        (0..count).for_each(|at| fresh.value(at));
    }
    by_methods!(allocate_layout, AllocatorApi2V02Compat);
    #[inline]
    fn reset(&mut self) {
        bump_scope::Bump::reset(self);
    }
}

impl Rewinds for Scoped {
    #[inline]
    fn marked(&mut self, count: u64) {
        let mark = self.checkpoint();
        (0..count).for_each(|at| self.value(at));
        // SAFETY: 1. The mark was taken here, of this arena. 2. Nothing was reset since. 3. What
        // was allocated since is not used any more.
        unsafe { self.reset_to(mark) };
    }
    #[inline]
    fn nested(&mut self, count: u64) {
        self.scoped(|outer| {
            (0..count).for_each(|at| {
                black_box(outer.alloc(at));
            });
            outer.scoped(|inner| {
                (0..count).for_each(|at| {
                    black_box(inner.alloc(at));
                });
            });
        });
    }
}
