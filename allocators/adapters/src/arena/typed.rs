//! Typed allocation, shared by `Arena` and `Scope`.
#![expect(unsafe_code, reason = "makes references to blocks of the arena")]

use super::bump::Bump;
use allocator_api2::alloc::{AllocError, Allocator};
use std::{alloc::Layout, ptr::NonNull};

/// Moves a value into its own block.
#[inline]
pub(super) fn value<T, A: Allocator>(bump: &Bump<A>, value: T) -> Result<NonNull<T>, AllocError> {
    let block = bump.allocate_padded(Layout::new::<T>()).ok_or(AllocError)?.cast::<T>();
    // SAFETY: 1. The block has the layout of `T`: it is aligned and writable for one value. 2. It
    // contains no value that would have to be dropped.
    unsafe { block.write(value) };
    Ok(block)
}

/// Copies a slice into its own block.
#[inline]
pub(super) fn slice_copy<T: Copy, A: Allocator>(
    bump: &Bump<A>,
    source: &[T],
) -> Result<NonNull<[T]>, AllocError> {
    let block = bump.allocate_padded(Layout::for_value(source)).ok_or(AllocError)?.cast::<T>();
    // SAFETY: 1. `source` is readable for its length. 2. The block has the same layout, so it is
    // writable for as many bytes. 3. Both are aligned for `T`. 4. The block is new, so it does not
    // overlap `source`.
    unsafe { block.copy_from_nonoverlapping(NonNull::from(source).cast(), source.len()) };
    Ok(NonNull::slice_from_raw_parts(block, source.len()))
}

/// Fills a block with `len` values, in order.
pub(super) fn slice_fill_with<T, A: Allocator>(
    bump: &Bump<A>,
    len: usize,
    mut fill: impl FnMut(usize) -> T,
) -> Result<NonNull<[T]>, AllocError> {
    let layout = Layout::array::<T>(len).map_err(|_| AllocError)?;
    let block = bump.allocate_padded(layout).ok_or(AllocError)?.cast::<T>();
    for at in 0..len {
        // If this unwinds, the values written so far stay in the arena and are not dropped, as
        // usual.
        let value = fill(at);
        // SAFETY: `at < len`, so the element lies in the block, which is aligned and writable for
        // `len` values.
        unsafe { block.add(at).write(value) };
    }
    Ok(NonNull::slice_from_raw_parts(block, len))
}

/// Returns the layout to report when a slice of `len` values cannot be allocated.
pub(super) fn slice_layout<T>(len: usize) -> Layout {
    Layout::array::<T>(len).unwrap_or(Layout::new::<T>())
}

/// Defines the allocation methods of `Arena` and of `Scope`. They differ in the lifetime of the
/// returned references: the borrow of the arena, or the scope. The second argument declares the
/// lifetime if it is that of the borrow.
macro_rules! allocating_methods {
    ($lifetime:lifetime, [$($borrow:lifetime)?]) => {
        /// Moves a value into the arena. The value is never dropped.
        ///
        /// Calls [`handle_alloc_error`] if there is no memory. [`try_alloc`](Self::try_alloc)
        /// returns an error instead.
        #[inline]
        pub fn alloc<$($borrow,)? T>(&$($borrow)? self, value: T) -> &$lifetime mut T {
            self.try_alloc(value).unwrap_or_else(|_| handle_alloc_error(Layout::new::<T>()))
        }

        /// Moves a value into the arena. The value is never dropped.
        ///
        /// # Errors
        /// [`AllocError`] if there is no memory. The value is dropped then.
        #[inline]
        pub fn try_alloc<$($borrow,)? T>(
            &$($borrow)? self,
            value: T,
        ) -> Result<&$lifetime mut T, AllocError> {
            let mut block = typed::value(self.bump(), value)?;
            // SAFETY: 1. The block holds a `T` and is aligned for it. 2. The block was allocated
            // just now and only once, and it is not freed before the lifetime ends.
            Ok(unsafe { block.as_mut() })
        }

        /// Copies a slice into the arena.
        ///
        /// Calls [`handle_alloc_error`] if there is no memory.
        #[inline]
        pub fn alloc_slice_copy<$($borrow,)? T: Copy>(
            &$($borrow)? self,
            source: &[T],
        ) -> &$lifetime mut [T] {
            self.try_alloc_slice_copy(source)
                .unwrap_or_else(|_| handle_alloc_error(Layout::for_value(source)))
        }

        /// Copies a slice into the arena.
        ///
        /// # Errors
        /// [`AllocError`] if there is no memory.
        #[inline]
        pub fn try_alloc_slice_copy<$($borrow,)? T: Copy>(
            &$($borrow)? self,
            source: &[T],
        ) -> Result<&$lifetime mut [T], AllocError> {
            let mut block = typed::slice_copy(self.bump(), source)?;
            // SAFETY: as in `try_alloc`, for each element.
            Ok(unsafe { block.as_mut() })
        }

        /// Allocates a slice and fills it with `len` values, in order. The values are never
        /// dropped.
        ///
        /// Calls [`handle_alloc_error`] if there is no memory.
        pub fn alloc_slice_fill_with<$($borrow,)? T>(
            &$($borrow)? self,
            len: usize,
            fill: impl FnMut(usize) -> T,
        ) -> &$lifetime mut [T] {
            self.try_alloc_slice_fill_with(len, fill)
                .unwrap_or_else(|_| handle_alloc_error(typed::slice_layout::<T>(len)))
        }

        /// Allocates a slice and fills it with `len` values, in order. The values are never
        /// dropped.
        ///
        /// # Errors
        /// [`AllocError`] if there is no memory. `fill` is not called then.
        pub fn try_alloc_slice_fill_with<$($borrow,)? T>(
            &$($borrow)? self,
            len: usize,
            fill: impl FnMut(usize) -> T,
        ) -> Result<&$lifetime mut [T], AllocError> {
            let mut block = typed::slice_fill_with(self.bump(), len, fill)?;
            // SAFETY: as in `try_alloc`, for each element: all of them were written.
            Ok(unsafe { block.as_mut() })
        }

        /// Copies a string into the arena.
        ///
        /// Calls [`handle_alloc_error`] if there is no memory.
        #[inline]
        pub fn alloc_str<$($borrow)?>(&$($borrow)? self, source: &str) -> &$lifetime mut str {
            self.try_alloc_str(source)
                .unwrap_or_else(|_| handle_alloc_error(Layout::for_value(source)))
        }

        /// Copies a string into the arena.
        ///
        /// # Errors
        /// [`AllocError`] if there is no memory.
        #[inline]
        pub fn try_alloc_str<$($borrow)?>(
            &$($borrow)? self,
            source: &str,
        ) -> Result<&$lifetime mut str, AllocError> {
            let bytes = self.try_alloc_slice_copy(source.as_bytes())?;
            // SAFETY: the bytes are those of a `str`.
            Ok(unsafe { std::str::from_utf8_unchecked_mut(bytes) })
        }

        /// Allocates a block of this layout that lives as long as this borrow. Its bytes are
        /// unspecified.
        ///
        /// Calls [`handle_alloc_error`] if there is no memory.
        #[inline]
        pub fn alloc_layout(&self, layout: Layout) -> NonNull<u8> {
            self.try_alloc_layout(layout).unwrap_or_else(|_| handle_alloc_error(layout))
        }

        /// Allocates a block of this layout that lives as long as this borrow. Its bytes are
        /// unspecified.
        ///
        /// # Errors
        /// [`AllocError`] if there is no memory.
        #[inline]
        pub fn try_alloc_layout(&self, layout: Layout) -> Result<NonNull<u8>, AllocError> {
            self.bump().allocate(layout).ok_or(AllocError)
        }
    };
}
pub(super) use allocating_methods;
