//! One macro that implements every `Allocator` trait.
//!
//! Rust has three of them: allocator-api2 0.2, which today's collections use, its version 0.4, and
//! the standard library's own trait on compilers that have it.
//! [`impl_allocator!`](crate::impl_allocator) takes one body and expands it once for each trait of
//! this build. The body names `Allocator`, `AllocError` and `Layout`. A `use` next to each
//! expansion resolves them, since items are not hygienic in `macro_rules!`.
//!
//! The `#[cfg]`s are on helper macros of this crate and not inside the expansion, where they would
//! read the features of the expanding crate.

/// Implements every `Allocator` trait of this build for one type, from one body. The traits are
/// unsafe to implement, so the macro requires the keyword `unsafe` and a SAFETY comment:
///
/// ```
/// use std::{alloc::Layout, ptr::NonNull};
/// /// Refuses everything.
/// struct Empty;
/// aquifer::impl_allocator! {
///     // SAFETY: it hands out no block.
///     unsafe impl [] for Empty {
///         fn allocate(&self, _layout: Layout) -> Result<NonNull<[u8]>, AllocError> { Err(AllocError) }
///         unsafe fn deallocate(&self, _block: NonNull<u8>, _layout: Layout) {}
///     }
/// }
/// use allocator_api2::alloc::Allocator;
/// assert!(Empty.allocate(Layout::new::<u64>()).is_err());
/// ```
///
/// ```compile_fail
/// # use std::{alloc::Layout, ptr::NonNull};
/// struct Empty;
/// aquifer::impl_allocator! {
///     impl [] for Empty { // no `unsafe`
///         fn allocate(&self, _layout: Layout) -> Result<NonNull<[u8]>, AllocError> { Err(AllocError) }
///         unsafe fn deallocate(&self, _block: NonNull<u8>, _layout: Layout) {}
///     }
/// }
/// ```
///
/// # Safety
/// The body fulfils the contract of `Allocator`: blocks are valid and aligned, they belong to the
/// caller until they are deallocated through any clone, moving the allocator does not move them,
/// and no call unwinds.
#[macro_export]
macro_rules! impl_allocator {
    ($(#[$attr:meta])* unsafe impl [$($generics:tt)*] for $t:ty { $($body:tt)* }) => {
        const _: () = {
            #[allow(unused_imports, reason = "a body may name all three or fewer")]
            use $crate::__api::api2::alloc::{AllocError, Allocator, Layout};
            $(#[$attr])*
            unsafe impl<$($generics)*> Allocator for $t { $($body)* }
        };
        $crate::__impl_allocator_04! { $(#[$attr])* unsafe impl [$($generics)*] for $t { $($body)* } }
        $crate::__impl_allocator_std! { $(#[$attr])* unsafe impl [$($generics)*] for $t { $($body)* } }
    };
}

/// The expansion for allocator-api2 0.4, if this build has it.
#[cfg(feature = "allocator-api2-04")]
#[doc(hidden)]
#[macro_export]
macro_rules! __impl_allocator_04 {
    ($(#[$attr:meta])* unsafe impl [$($generics:tt)*] for $t:ty { $($body:tt)* }) => {
        const _: () = {
            #[allow(unused_imports, reason = "a body may name all three or fewer")]
            use $crate::__api::api4::alloc::{AllocError, Allocator, Layout};
            $(#[$attr])*
            unsafe impl<$($generics)*> Allocator for $t { $($body)* }
        };
    };
}

/// The expansion for allocator-api2 0.4, if this build has it.
#[cfg(not(feature = "allocator-api2-04"))]
#[doc(hidden)]
#[macro_export]
macro_rules! __impl_allocator_04 {
    ($($t:tt)*) => {};
}

/// The expansion for the standard library's trait, if this compiler has it.
#[cfg(std_allocator)]
#[doc(hidden)]
#[macro_export]
macro_rules! __impl_allocator_std {
    ($(#[$attr:meta])* unsafe impl [$($generics:tt)*] for $t:ty { $($body:tt)* }) => {
        const _: () = {
            #[allow(unused_imports, reason = "a body may name all three or fewer")]
            use ::std::alloc::{AllocError, Allocator, Layout};
            $(#[$attr])*
            unsafe impl<$($generics)*> Allocator for $t { $($body)* }
        };
    };
}

/// The expansion for the standard library's trait, if this compiler has it.
#[cfg(not(std_allocator))]
#[doc(hidden)]
#[macro_export]
macro_rules! __impl_allocator_std {
    ($($t:tt)*) => {};
}
