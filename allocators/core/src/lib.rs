//! The shared vocabulary of aquifer: the types that all pools, arenas and drivers use. Part of
//! aquifer; promises no stability beyond what aquifer re-exports.
//!
//! | module | holds |
//! |---|---|
//! | [`ids`] | typed ids of devices, streams and pools, which only their creator can make |
//! | [`tag`] | the owner of an allocation, set by scope |
//! | [`error`] | the error types, with the figures that explain them |
//! | [`bytes`] | a number of bytes, formatted and parsed with binary units |
//! | [`budget`] | exact limits on bytes, by RAII |
//! | [`stats`] | the statistics of a pool |
//! | [`event`] | the record of every operation on memory, and the sinks for such records |
//! | [`adapter`] | one macro for every `Allocator` trait |
//! | [`defer`] | an allocator whose freed blocks a device may still read, gates of queued work, and memory that is reset between the steps of a loop |
//! | [`request`] | memory that the host cannot access, as wrappers see it, and requests for it |
//! | [`sanitizer`] | poisoning of free memory for `AddressSanitizer` |
//! | [`wake`] | futures that wait for devices, and the thread that wakes them |
//!
//! This crate touches no memory and no device, and makes no memory-related system calls.

pub mod adapter;
pub mod budget;
pub mod bytes;
pub mod defer;
pub mod error;
pub mod event;
pub mod ids;
#[doc(hidden)]
pub mod panics;
#[doc(hidden)]
pub mod random;
pub mod request;
pub mod sanitizer;
#[doc(hidden)]
pub mod scratch;
pub mod stats;
mod sync;
pub mod tag;
pub mod wake;

pub use budget::{Budget, Charge, OutOfBudget, Reservation};
pub use bytes::Bytes;
pub use defer::DeferReuse;
pub use defer::Gate;
pub use defer::StepMemory;
pub use error::{DriverError, MemoryError, NoGpu, OutOfMemory, Result, SystemError};
pub use event::{Action, Event, EventSink, Recorder};
pub use ids::{DeviceId, Id, IdSpace};
pub use request::{BLOCK_ALIGN, Request};
pub use request::{Opaque, OpaqueBlock};
pub use stats::PoolStats;
pub use tag::{Tag, tagged};

/// Names used by the expansion of [`impl_allocator!`]. Not for direct use.
#[doc(hidden)]
pub mod __api {
    pub use allocator_api2 as api2;
    #[cfg(feature = "allocator-api2-04")]
    pub use allocator_api2_04 as api4;
}

/// Implements `Debug` by `Display` for errors, so that `main() -> Result<(), MemoryError>` prints a
/// sentence. Not for direct use.
#[doc(hidden)]
#[macro_export]
macro_rules! __debug_as_display {
    ($($error:ty),+ $(,)?) => {$(
        impl ::std::fmt::Debug for $error {
            fn fmt(&self, f: &mut ::std::fmt::Formatter<'_>) -> ::std::fmt::Result {
                ::std::fmt::Display::fmt(self, f)
            }
        }
    )+};
}

/// Implements `UnwindSafe` and `RefUnwindSafe`. Not for direct use.
#[doc(hidden)]
#[macro_export]
macro_rules! __unwind_safe {
    ($([$($generics:tt)*] $t:ty),+ $(,)?) => {$(
        impl<$($generics)*> ::std::panic::UnwindSafe for $t {}
        impl<$($generics)*> ::std::panic::RefUnwindSafe for $t {}
    )+};
}

/// Notifies the global allocator of changes of the current tag. Not for direct use.
#[doc(hidden)]
pub mod __tag {
    pub use crate::tag::follow;
}
