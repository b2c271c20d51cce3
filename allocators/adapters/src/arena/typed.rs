//! Values in an arena: what `Arena` and `Scope` have in common.
#![expect(unsafe_code, reason = "makes references to blocks of the arena")]

use super::bump::Bump;
use allocator_api2::alloc::{AllocError, Allocator};
use std::{alloc::Layout, ptr::NonNull};

/// Moves a value into a block of its own.
#[inline]
pub(super) fn value<T, A: Allocator>(bump: &Bump<A>, value: T) -> Result<NonNull<T>, AllocError> {
    let place = bump.allocate_whole(Layout::new::<T>()).ok_or(AllocError)?.cast::<T>();
    // SAFETY: 1. The block has the layout of `T`: it is aligned and writable for one. 2. It holds
    // nothing to drop.
    unsafe { place.write(value) };
    Ok(place)
}

/// Copies a slice into a block of its own.
#[inline]
pub(super) fn slice_copy<T: Copy, A: Allocator>(
    bump: &Bump<A>,
    source: &[T],
) -> Result<NonNull<[T]>, AllocError> {
    let place = bump.allocate_whole(Layout::for_value(source)).ok_or(AllocError)?.cast::<T>();
    // SAFETY: 1. `source` is readable for its length. 2. The block has its layout, so it is
    // writable for as much.
    // 3. Both are aligned for `T`. 4. The block is fresh, so `source` is elsewhere.
    unsafe { place.copy_from_nonoverlapping(NonNull::from(source).cast(), source.len()) };
    Ok(NonNull::slice_from_raw_parts(place, source.len()))
}

/// Fills a block with `len` values, in order.
pub(super) fn slice_fill_with<T, A: Allocator>(
    bump: &Bump<A>,
    len: usize,
    mut fill: impl FnMut(usize) -> T,
) -> Result<NonNull<[T]>, AllocError> {
    let layout = Layout::array::<T>(len).map_err(|_| AllocError)?;
    let place = bump.allocate_whole(layout).ok_or(AllocError)?.cast::<T>();
    for at in 0..len {
        // If this unwinds the values so far stay where they are, undropped like all values of an
        // arena.
        let value = fill(at);
        // SAFETY: `at < len`, so the place lies in the block, which is aligned and writable for
        // `len` values.
        unsafe { place.add(at).write(value) };
    }
    Ok(NonNull::slice_from_raw_parts(place, len))
}

/// The layout to report when a slice of `len` values cannot be had.
pub(super) fn slice_layout<T>(len: usize) -> Layout {
    Layout::array::<T>(len).unwrap_or(Layout::new::<T>())
}

/// The allocating methods of `Arena` and of `Scope`, which differ in how long what they return
/// lives: as long as this borrow of an arena, as long as the scope that a scope stands for. The
/// second argument declares the lifetime where it is the borrow's.
macro_rules! allocating_methods {
    ($life:lifetime, [$($own:lifetime)?]) => {
        /// Moves a value into the arena. It is never dropped.
        ///
        /// Ends the process by [`handle_alloc_error`] if there is no memory; [`try_alloc`](Self::try_alloc) does not.
        #[inline]
        pub fn alloc<$($own,)? T>(&$($own)? self, value: T) -> &$life mut T {
            self.try_alloc(value).unwrap_or_else(|_| handle_alloc_error(Layout::new::<T>()))
        }

        /// Moves a value into the arena. It is never dropped.
        ///
        /// # Errors
        /// [`AllocError`] if there is no memory; the value is dropped.
        #[inline]
        pub fn try_alloc<$($own,)? T>(&$($own)? self, value: T) -> Result<&$life mut T, AllocError> {
            let mut place = typed::value(self.bump(), value)?;
            // SAFETY: 1. The place holds a `T` and is aligned for it. 2. The block was handed out just now and only
            // once, and it is taken back only when the lifetime is over.
            Ok(unsafe { place.as_mut() })
        }

        /// Copies a slice into the arena.
        ///
        /// Ends the process by [`handle_alloc_error`] if there is no memory.
        #[inline]
        pub fn alloc_slice_copy<$($own,)? T: Copy>(&$($own)? self, source: &[T]) -> &$life mut [T] {
            self.try_alloc_slice_copy(source).unwrap_or_else(|_| handle_alloc_error(Layout::for_value(source)))
        }

        /// Copies a slice into the arena.
        ///
        /// # Errors
        /// [`AllocError`] if there is no memory.
        #[inline]
        pub fn try_alloc_slice_copy<$($own,)? T: Copy>(&$($own)? self, source: &[T]) -> Result<&$life mut [T], AllocError> {
            let mut place = typed::slice_copy(self.bump(), source)?;
            // SAFETY: as in `try_alloc`, for each element.
            Ok(unsafe { place.as_mut() })
        }

        /// Fills a slice of `len` values in the arena, in order. They are never dropped.
        ///
        /// Ends the process by [`handle_alloc_error`] if there is no memory.
        pub fn alloc_slice_fill_with<$($own,)? T>(&$($own)? self, len: usize, fill: impl FnMut(usize) -> T) -> &$life mut [T] {
            self.try_alloc_slice_fill_with(len, fill)
                .unwrap_or_else(|_| handle_alloc_error(typed::slice_layout::<T>(len)))
        }

        /// Fills a slice of `len` values in the arena, in order. They are never dropped.
        ///
        /// # Errors
        /// [`AllocError`] if there is no memory; `fill` has not been called.
        pub fn try_alloc_slice_fill_with<$($own,)? T>(
            &$($own)? self,
            len: usize,
            fill: impl FnMut(usize) -> T,
        ) -> Result<&$life mut [T], AllocError> {
            let mut place = typed::slice_fill_with(self.bump(), len, fill)?;
            // SAFETY: as in `try_alloc`, for each element: all of them have been written.
            Ok(unsafe { place.as_mut() })
        }

        /// Copies a string into the arena.
        ///
        /// Ends the process by [`handle_alloc_error`] if there is no memory.
        #[inline]
        pub fn alloc_str<$($own)?>(&$($own)? self, source: &str) -> &$life mut str {
            self.try_alloc_str(source).unwrap_or_else(|_| handle_alloc_error(Layout::for_value(source)))
        }

        /// Copies a string into the arena.
        ///
        /// # Errors
        /// [`AllocError`] if there is no memory.
        #[inline]
        pub fn try_alloc_str<$($own)?>(&$($own)? self, source: &str) -> Result<&$life mut str, AllocError> {
            let bytes = self.try_alloc_slice_copy(source.as_bytes())?;
            // SAFETY: the bytes are those of a `str`.
            Ok(unsafe { std::str::from_utf8_unchecked_mut(bytes) })
        }

        /// A block of this layout, for as long as this borrow lasts; its bytes are whatever they were.
        ///
        /// Ends the process by [`handle_alloc_error`] if there is no memory.
        #[inline]
        pub fn alloc_layout(&self, layout: Layout) -> NonNull<u8> {
            self.try_alloc_layout(layout).unwrap_or_else(|_| handle_alloc_error(layout))
        }

        /// A block of this layout, for as long as this borrow lasts; its bytes are whatever they were.
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
