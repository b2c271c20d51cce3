//! Handles of driver objects: the driver's number, with the device it belongs to.
#![expect(
    unsafe_code,
    reason = "declares the unsafe constructors of handles; holds no unsafe block"
)]

use aquifer_core::DeviceId;

macro_rules! handle {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
        pub struct $name {
            device: DeviceId,
            handle: u64,
        }

        impl $name {
            /// Creates a handle from the driver's number.
            ///
            /// # Safety
            /// 1. `handle` was returned for `device` by the driver that the result is used with,
            ///    and it is alive whenever the result is used in a call.
            #[must_use]
            pub unsafe fn from_raw(device: DeviceId, handle: u64) -> Self {
                Self { device, handle }
            }

            /// Returns the device that the handle belongs to.
            #[must_use]
            pub fn device(self) -> DeviceId {
                self.device
            }

            /// Returns the driver's number.
            #[must_use]
            pub fn handle(self) -> u64 {
                self.handle
            }
        }
    };
}

handle! {
    /// A stream (`CUstream`).
    RawStream
}
impl RawStream {
    /// Returns the legacy default stream of a device's primary context (`CU_STREAM_LEGACY`). The
    /// handle 0 means the same stream.
    #[must_use]
    pub fn legacy(device: DeviceId) -> Self {
        Self { device, handle: 1 }
    }

    /// Returns the default stream of the calling thread (`CU_STREAM_PER_THREAD`), a different
    /// stream on every thread.
    #[must_use]
    pub fn per_thread(device: DeviceId) -> Self {
        Self { device, handle: 2 }
    }
}

handle! {
    /// An event (`CUevent`).
    RawEvent
}
handle! {
    /// Captured work, as a template (`CUgraph`).
    RawGraph
}
handle! {
    /// A graph that can be launched (`CUgraphExec`).
    RawGraphExec
}
handle! {
    /// Physical memory without an address (`CUmemGenericAllocationHandle`).
    PhysicalHandle
}
handle! {
    /// A stream-ordered memory pool of the driver (`CUmemoryPool`).
    PoolHandle
}
