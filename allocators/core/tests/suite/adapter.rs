//! Tests that one implementation serves every allocator trait of this build: allocator-api2 0.2,
//! its 0.4 with the feature, and the standard library's where the compiler has it.
#![expect(unsafe_code, reason = "implements the allocator traits")]

use aquifer_core::impl_allocator;
use std::{
    alloc::{alloc, dealloc},
    cell::Cell,
    ptr::NonNull,
};

/// The program's allocator, which counts its live blocks.
#[derive(Default)]
struct Counting(Cell<usize>);

impl_allocator! {
    // SAFETY: blocks are the global allocator's, freed with the layout they were allocated with,
    // since sizes are exact.
    unsafe impl ['c] for &'c Counting {
        fn allocate(&self, layout: Layout) -> Result<NonNull<[u8]>, AllocError> {
            if layout.size() == 0 {
                let nowhere = NonNull::without_provenance(layout.align().try_into().map_err(|_| AllocError)?);
                return Ok(NonNull::slice_from_raw_parts(nowhere, 0));
            }
            // SAFETY: the layout has a size.
            let block = NonNull::new(unsafe { alloc(layout) }).ok_or(AllocError)?;
            self.0.set(self.0.get() + 1);
            Ok(NonNull::slice_from_raw_parts(block, layout.size()))
        }

        unsafe fn deallocate(&self, block: NonNull<u8>, layout: Layout) {
            if layout.size() > 0 {
                self.0.set(self.0.get() - 1);
                // SAFETY: guaranteed by the caller.
                unsafe { dealloc(block.as_ptr(), layout) };
            }
        }
    }
}

/// Uses a vector of vectors, which grow, shrink and are dropped.
macro_rules! serves {
    ($name:ident, $($vec:ident)::+) => {
        #[test]
        fn $name() {
            let counting = Counting::default();
            let mut rows = $($vec)::+::new_in(&counting);
            for length in 0..50u32 {
                let mut row = $($vec)::+::new_in(&counting);
                row.extend(0..length);
                row.truncate(length as usize / 2);
                row.shrink_to_fit();
                rows.push(row);
            }
            assert_eq!(counting.0.get(), 1 + 48, "all but those of no length");
            let lengths = rows.iter().map(|row| row.len()).sum::<usize>();
            assert_eq!(lengths, (0..50).map(|length| length / 2).sum::<usize>());
            drop(rows);
            assert_eq!(counting.0.get(), 0);
        }
    };
}

serves!(allocator_api2_0_2, allocator_api2::vec::Vec);
#[cfg(feature = "allocator-api2-04")]
serves!(allocator_api2_0_4, allocator_api2_04::vec::Vec);
#[cfg(std_allocator)]
serves!(the_standard_library, std::vec::Vec);
