//! Counters of driver calls.

use crate::Pattern;
use std::{
    fmt,
    sync::atomic::{AtomicU64, Ordering},
};

macro_rules! calls {
    ($($variant:ident = $name:literal),+ $(,)?) => {
        /// A driver call that is counted, by its CUDA name.
        #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
        #[non_exhaustive]
        pub enum Call {
            $(#[doc = concat!("`", $name, "`")] $variant),+
        }

        impl Call {
            /// All calls.
            pub const ALL: &'static [Call] = &[$(Call::$variant),+];

            /// Returns the CUDA name of the call.
            #[must_use]
            pub fn name(self) -> &'static str {
                match self { $(Call::$variant => $name),+ }
            }
        }
    };
}

calls! {
    DeviceCount = "cuDeviceGetCount",
    DeviceInfo = "cuDeviceGetAttribute",
    MemoryInfo = "cuMemGetInfo",
    DriverVersion = "cuDriverGetVersion",
    DeviceSynchronize = "cuCtxSynchronize",
    StreamCreate = "cuStreamCreateWithPriority",
    StreamDestroy = "cuStreamDestroy",
    StreamId = "cuStreamGetId",
    StreamQuery = "cuStreamQuery",
    StreamSynchronize = "cuStreamSynchronize",
    StreamWaitEvent = "cuStreamWaitEvent",
    StreamIsCapturing = "cuStreamIsCapturing",
    ExchangeCaptureMode = "cuThreadExchangeStreamCaptureMode",
    EventCreate = "cuEventCreate",
    EventDestroy = "cuEventDestroy",
    EventRecord = "cuEventRecord",
    EventQuery = "cuEventQuery",
    EventSynchronize = "cuEventSynchronize",
    CaptureBegin = "cuStreamBeginCapture",
    CaptureEnd = "cuStreamEndCapture",
    CaptureStatus = "cuStreamGetCaptureInfo",
    GraphInstantiate = "cuGraphInstantiate",
    GraphLaunch = "cuGraphLaunch",
    GraphDestroy = "cuGraphDestroy",
    GraphExecDestroy = "cuGraphExecDestroy",
    MemAlloc = "cuMemAlloc",
    MemFree = "cuMemFree",
    PoolCreate = "cuMemPoolCreate",
    PoolDestroy = "cuMemPoolDestroy",
    PoolAlloc = "cuMemAllocFromPoolAsync",
    PoolFree = "cuMemFreeAsync",
    PoolTrim = "cuMemPoolTrimTo",
    PoolUsage = "cuMemPoolGetAttribute",
    AddressReserve = "cuMemAddressReserve",
    AddressFree = "cuMemAddressFree",
    HandleCreate = "cuMemCreate",
    HandleRelease = "cuMemRelease",
    Map = "cuMemMap",
    Unmap = "cuMemUnmap",
    SetAccess = "cuMemSetAccess",
    HandleExport = "cuMemExportToShareableHandle",
    DmaBufExport = "cuMemGetHandleForAddressRange",
    PointerAttribute = "cuPointerGetAttribute",
    HandleImport = "cuMemImportFromShareableHandle",
    HostAlloc = "cuMemHostAlloc",
    HostFree = "cuMemFreeHost",
    HostRegister = "cuMemHostRegister",
    HostUnregister = "cuMemHostUnregister",
    CopyToDevice = "cuMemcpyHtoDAsync",
    CopyToHost = "cuMemcpyDtoHAsync",
    CopyOnDevice = "cuMemcpyDtoDAsync",
    CopyRows = "cuMemcpy2DAsync",
    Fill = "cuMemsetD8Async",
    Fill16 = "cuMemsetD16Async",
    Fill32 = "cuMemsetD32Async",
}

impl Call {
    /// Returns the fill call for this element size.
    pub(crate) fn of_fill(pattern: Pattern) -> Call {
        match pattern {
            Pattern::Byte(_) => Self::Fill,
            Pattern::Half(_) => Self::Fill16,
            Pattern::Word(_) => Self::Fill32,
        }
    }
}

/// One counter for each call.
///
/// ```
/// use aquifer::{DeviceId, Driver, driver::Call, sim::Sim};
/// let driver = Sim::h200(1).driver();
/// let before = driver.calls().get(Call::StreamCreate);
/// driver.stream_create(DeviceId(0), 0)?;
/// assert_eq!(driver.calls().get(Call::StreamCreate), before + 1);
/// # Ok::<(), aquifer::error::DriverError>(())
/// ```
pub struct CallCounts {
    counts: [AtomicU64; Call::ALL.len()],
}

impl CallCounts {
    /// Creates counters that are all zero.
    #[must_use]
    pub const fn new() -> Self {
        Self { counts: [const { AtomicU64::new(0) }; Call::ALL.len()] }
    }

    /// Counts one call.
    pub fn add(&self, call: Call) {
        self.counts[call as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// Returns how often a call has been made.
    #[must_use]
    pub fn get(&self, call: Call) -> u64 {
        self.counts[call as usize].load(Ordering::Relaxed)
    }

    /// Returns every call that has been made, with its count, in the order of [`Call::ALL`].
    #[must_use]
    pub fn made(&self) -> Vec<(Call, u64)> {
        Call::ALL
            .iter()
            .map(|&call| (call, self.get(call)))
            .filter(|&(_, count)| count > 0)
            .collect()
    }
}

impl Default for CallCounts {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for CallCounts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map()
            .entries(self.made().into_iter().map(|(call, count)| (call.name(), count)))
            .finish()
    }
}
