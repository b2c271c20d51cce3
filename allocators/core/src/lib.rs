//! The vocabulary of aquifer: what every pool, arena and driver of it speaks.
//!
//! | module | holds |
//! |---|---|
//! | [`ids`] | names for devices, streams and pools that only their maker can make |
//! | [`tag`] | who an allocation belongs to, by scope |
//! | [`error`] | what can go wrong, with the figures a person needs |
//! | [`budget`] | limits on bytes, exact to the byte, by RAII |
//! | [`gate`] | something that opens when queued work is done |
//! | [`stats`] | what a pool holds |
//! | [`event`] | one record for everything that happens to memory, and where records go |
//! | [`adapter`] | one macro for every `Allocator` trait |
//! | [`defer`] | the promise of an allocator whose blocks a device may still read |
//! | [`opaque`] | memory that the host cannot reach, as wrappers see it |
//! | [`request`] | what is asked of such memory |
//! | [`sanitizer`] | which memory is nobody's, for `AddressSanitizer` |
//! | [`step`] | memory that is emptied between the steps of a loop |
//! | [`wake`] | futures that wait for devices, and the thread that wakes them |
//!
//! Nothing here touches memory, a device or the operating system's memory calls.

pub mod adapter;
pub mod budget;
pub mod bytes;
pub mod defer;
pub mod error;
pub mod event;
pub mod gate;
pub mod ids;
pub mod opaque;
#[doc(hidden)]
pub mod panics;
pub mod request;
pub mod sanitizer;
#[doc(hidden)]
pub mod scratch;
pub mod stats;
pub mod step;
mod sync;
pub mod tag;
pub mod wake;

pub use budget::{Budget, Charge, OutOfBudget, Reservation};
pub use bytes::Bytes;
pub use defer::DeferReuse;
pub use error::{DriverError, MemoryError, NoGpu, OutOfMemory, Result, SystemError};
pub use event::{Action, Event, Recorder, Sink};
pub use gate::Gate;
pub use ids::{DeviceId, Id, IdSpace};
pub use opaque::{Opaque, OpaqueBlock};
pub use request::{BLOCK_ALIGN, Request};
pub use stats::PoolStats;
pub use step::StepMemory;
pub use tag::{Tag, tagged};

/// What [`impl_allocator!`] expands to names; not for use by hand.
#[doc(hidden)]
pub mod __api {
    pub use allocator_api2 as api2;
    #[cfg(feature = "allocator-api2-04")]
    pub use allocator_api2_04 as api4;
}

/// Implements `Debug` by `Display`, for errors: `main() -> Result<(), MemoryError>` then ends with
/// a sentence. Not for use by hand.
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

/// How the global allocator hears of scopes; not for use by hand.
#[doc(hidden)]
pub mod __tag {
    pub use crate::tag::follow;
}
