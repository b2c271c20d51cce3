//! One macro, every `Allocator` trait.
//!
//! Rust has three: allocator-api2 0.2, which today's collections take, its 0.4, and the standard
//! library's own where the compiler has it. [`impl_allocator!`](crate::impl_allocator) takes one
//! body and expands it once for each that this build has. The body writes `Allocator`, `AllocError`
//! and `Layout`, and a `use` beside each expansion says whose they are: items are not hygienic in
//! `macro_rules!`.
//!
//! The switches stand on helper macros of this crate, not inside the expansion: a `#[cfg]` there
//! would read the features of the crate that expands it.

/// Implements every `Allocator` trait of this build for one type, from one body. The traits are
/// unsafe to implement, so the macro asks for that word, and for a SAFETY argument beside it:
///
/// ```
/// use std::{alloc::Layout, ptr::NonNull};
/// /// Refuses everything.
/// struct Empty;
/// aquifer_core::impl_allocator! {
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
/// aquifer_core::impl_allocator! {
///     impl [] for Empty { // no `unsafe`
///         fn allocate(&self, _layout: Layout) -> Result<NonNull<[u8]>, AllocError> { Err(AllocError) }
///         unsafe fn deallocate(&self, _block: NonNull<u8>, _layout: Layout) {}
///     }
/// }
/// ```
///
/// # Safety
/// The body keeps the promises of `Allocator`: blocks are valid, aligned and the caller's until
/// they are given back to any clone, moving the allocator moves none of them, and nothing unwinds.
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
