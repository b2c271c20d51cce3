//! The driver's numbers, with the device each belongs to.
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
            /// Names a handle that the driver gave out.
            ///
            /// # Safety
            /// 1. `handle` is one that the driver this is used with gave out for `device`, and it is alive whenever the
            ///    result is used in a call.
            #[must_use]
            pub unsafe fn from_raw(device: DeviceId, handle: u64) -> Self {
                Self { device, handle }
            }

            /// The device that it belongs to.
            #[must_use]
            pub fn device(self) -> DeviceId {
                self.device
            }

            /// The driver's number.
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
    /// The legacy default stream of a device's primary context (`CU_STREAM_LEGACY`, which the
    /// handle 0 means too).
    #[must_use]
    pub fn legacy(device: DeviceId) -> Self {
        Self { device, handle: 1 }
    }

    /// The default stream that the calling thread has to itself (`CU_STREAM_PER_THREAD`): another
    /// one on every thread.
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
    /// Work that has been captured, as a template (`CUgraph`).
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
    /// A stream-ordered pool of the driver (`CUmemoryPool`).
    PoolHandle
}
