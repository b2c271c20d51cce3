//! Types of the driver's C interface: handles, constants and structures.
//!
//! The structures are defined here, since the bindings name their fields differently in each CUDA
//! version. Their layout has stayed the same: new fields were only taken from reserved ones. The
//! assertions below compare them, and the constants, with the bindings of the version that is
//! compiled in.

use crate::{CaptureMode, DeviceId, ExportTypes};
use cudarc::driver::sys;
use std::ffi::{c_int, c_uchar, c_uint, c_ushort, c_void};

/// An object of the driver: a context, stream, event or pool. Never dereferenced here.
pub(super) type DriverPtr = *mut c_void;

/// Converts a handle to the driver's pointer.
pub(super) fn driver_ptr(handle: u64) -> DriverPtr {
    std::ptr::with_exposed_provenance_mut(handle as usize)
}

/// Converts the driver's pointer to a handle.
pub(super) fn handle_of(object: DriverPtr) -> u64 {
    object.expose_provenance() as u64
}

/// `CU_DEVICE_ATTRIBUTE_…`: attributes of a device.
#[derive(Clone, Copy, Debug)]
#[repr(u32)]
pub(super) enum Attribute {
    Integrated = 18,
    CapabilityMajor = 75,
    CapabilityMinor = 76,
    VirtualMemory = 102,
    ExportPosixFd = 103,
    RdmaCapable = 110,
    MemoryPools = 115,
    /// Since CUDA 12.3. An older driver returns invalid value.
    ExportFabric = 128,
    /// Whether the device's memory is a NUMA node of the host. These three exist since CUDA 12.2.
    /// An older driver returns invalid value.
    NumaConfig = 130,
    NumaId = 131,
    HostNumaId = 134,
}

/// `CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL`
pub(super) const POINTER_DEVICE: u32 = 9;
/// `CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE`
pub(super) const POINTER_LEGACY_IPC: u32 = 10;
/// `CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD`
pub(super) const RANGE_DMA_BUF_FD: c_uint = 1;

/// `CU_STREAM_NON_BLOCKING`
pub(super) const STREAM_NON_BLOCKING: c_uint = 1;
/// `CU_EVENT_DISABLE_TIMING`
pub(super) const EVENT_DISABLE_TIMING: c_uint = 2;

/// `CU_STREAM_CAPTURE_MODE_…`
pub(super) const CAPTURE_GLOBAL: c_uint = 0;
pub(super) const CAPTURE_THREAD_LOCAL: c_uint = 1;
pub(super) const CAPTURE_RELAXED: c_uint = 2;

/// `CUstreamCaptureMode`
pub(super) fn capture_mode(mode: CaptureMode) -> c_uint {
    match mode {
        CaptureMode::Global => CAPTURE_GLOBAL,
        CaptureMode::ThreadLocal => CAPTURE_THREAD_LOCAL,
        CaptureMode::Relaxed => CAPTURE_RELAXED,
    }
}

/// `CU_STREAM_CAPTURE_STATUS_…`. The third value means that a capture is invalidated.
pub(super) const CAPTURE_STATUS_NONE: c_uint = 0;
pub(super) const CAPTURE_STATUS_ACTIVE: c_uint = 1;

/// `CU_MEMHOSTALLOC_…`
pub(super) const HOST_ALLOC_PORTABLE: c_uint = 1;
pub(super) const HOST_ALLOC_WRITE_COMBINED: c_uint = 4;
/// `CU_MEMHOSTREGISTER_…`
pub(super) const HOST_REGISTER_PORTABLE: c_uint = 1;

/// `CU_MEMPOOL_ATTR_…`, with 64-bit values.
pub(super) const POOL_RELEASE_THRESHOLD: c_uint = 4;
pub(super) const POOL_RESERVED: c_uint = 5;
pub(super) const POOL_RESERVED_HIGH: c_uint = 6;
pub(super) const POOL_USED: c_uint = 7;

/// `CU_MEM_ALLOC_GRANULARITY_MINIMUM`
pub(super) const GRANULARITY_MINIMUM: c_uint = 0;

const LOCATION_DEVICE: c_uint = 1;
const ALLOCATION_PINNED: c_uint = 1;
const HANDLE_NONE: c_uint = 0;
/// `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`
pub(super) const HANDLE_POSIX_FD: c_uint = 1;
/// `CU_MEM_HANDLE_TYPE_FABRIC`
const HANDLE_FABRIC: c_uint = 8;
const ACCESS_READ: c_uint = 1;
const ACCESS_READ_WRITE: c_uint = 3;

/// `CUmemLocation`
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct Location {
    kind: c_uint,
    id: c_int,
}

impl Location {
    fn device(device: DeviceId) -> Self {
        // An ordinal that does not fit cannot exist. The driver refuses -1.
        Self { kind: LOCATION_DEVICE, id: c_int::try_from(device.0).unwrap_or(-1) }
    }
}

/// `CUmemAllocationProp`
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct AllocationProperties {
    kind: c_uint,
    handle_types: c_uint,
    location: Location,
    windows_metadata: *mut c_void,
    compression: c_uchar,
    rdma_capable: c_uchar,
    usage: c_ushort,
    reserved: [c_uchar; 4],
}

impl AllocationProperties {
    /// Device memory that cannot be exported.
    pub(super) fn pinned_on(device: DeviceId) -> Self {
        Self {
            kind: ALLOCATION_PINNED,
            handle_types: HANDLE_NONE,
            location: Location::device(device),
            windows_metadata: std::ptr::null_mut(),
            compression: 0,
            rdma_capable: 0,
            usage: 0,
            reserved: [0; 4],
        }
    }

    /// Device memory that can be exported in these ways.
    pub(super) fn exportable_on(device: DeviceId, types: ExportTypes) -> Self {
        let fd = if types.posix_fd { HANDLE_POSIX_FD } else { HANDLE_NONE };
        let fabric = if types.fabric { HANDLE_FABRIC } else { HANDLE_NONE };
        Self {
            handle_types: fd | fabric,
            rdma_capable: c_uchar::from(types.rdma),
            ..Self::pinned_on(device)
        }
    }
}

/// `CUmemPoolProps`
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct PoolProperties {
    kind: c_uint,
    handle_types: c_uint,
    location: Location,
    windows_security: *mut c_void,
    /// Reserved before CUDA 12.2, whose driver refuses any value but 0 here.
    max_size: usize,
    usage: c_ushort,
    reserved: [c_uchar; 54],
}

impl PoolProperties {
    /// A pool on a device, without a limit.
    pub(super) fn pinned_on(device: DeviceId) -> Self {
        Self {
            kind: ALLOCATION_PINNED,
            handle_types: HANDLE_NONE,
            location: Location::device(device),
            windows_security: std::ptr::null_mut(),
            max_size: 0,
            usage: 0,
            reserved: [0; 54],
        }
    }
}

/// `CUmemAccessDesc`
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct AccessDescription {
    location: Location,
    access: c_uint,
}

impl AccessDescription {
    /// Read and write access for a device.
    pub(super) fn read_write(device: DeviceId) -> Self {
        Self { location: Location::device(device), access: ACCESS_READ_WRITE }
    }

    /// Read access for a device.
    pub(super) fn read(device: DeviceId) -> Self {
        Self { location: Location::device(device), access: ACCESS_READ }
    }
}

macro_rules! same_layout {
    ($($ours:ty = $theirs:ty),+ $(,)?) => {$(
        const _: () = assert!(size_of::<$ours>() == size_of::<$theirs>());
        const _: () = assert!(align_of::<$ours>() == align_of::<$theirs>());
    )+};
}
same_layout! {
    Location = sys::CUmemLocation,
    AllocationProperties = sys::CUmemAllocationProp,
    PoolProperties = sys::CUmemPoolProps,
    AccessDescription = sys::CUmemAccessDesc,
    DriverPtr = sys::CUcontext,
    DriverPtr = sys::CUstream,
    DriverPtr = sys::CUgraph,
    DriverPtr = sys::CUgraphExec,
    u64 = sys::CUdeviceptr,
    u64 = sys::CUmemGenericAllocationHandle,
    u64 = usize,
}

macro_rules! same_field {
    ($($ours:ty, $our:ident = $theirs:ty, $their:ident);+ $(;)?) => {$(
        const _: () = assert!(std::mem::offset_of!($ours, $our) == std::mem::offset_of!($theirs, $their));
    )+};
}
same_field! {
    Location, kind = sys::CUmemLocation, type_;
    AllocationProperties, kind = sys::CUmemAllocationProp, type_;
    AllocationProperties, handle_types = sys::CUmemAllocationProp, requestedHandleTypes;
    AllocationProperties, location = sys::CUmemAllocationProp, location;
    AllocationProperties, windows_metadata = sys::CUmemAllocationProp, win32HandleMetaData;
    PoolProperties, kind = sys::CUmemPoolProps, allocType;
    PoolProperties, handle_types = sys::CUmemPoolProps, handleTypes;
    PoolProperties, location = sys::CUmemPoolProps, location;
    PoolProperties, windows_security = sys::CUmemPoolProps, win32SecurityAttributes;
    AccessDescription, location = sys::CUmemAccessDesc, location;
    AccessDescription, access = sys::CUmemAccessDesc, flags;
}

macro_rules! same_value {
    ($($ours:expr => $theirs:expr),+ $(,)?) => {$( const _: () = assert!($ours as u32 == $theirs as u32); )+};
}
same_value! {
    Attribute::Integrated => sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_INTEGRATED,
    Attribute::CapabilityMajor => sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
    Attribute::CapabilityMinor => sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
    Attribute::MemoryPools => sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED,
    POINTER_DEVICE => sys::CUpointer_attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
    RANGE_DMA_BUF_FD => sys::CUmemRangeHandleType::CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD,
    POINTER_LEGACY_IPC => sys::CUpointer_attribute::CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE,
    STREAM_NON_BLOCKING => sys::CUstream_flags::CU_STREAM_NON_BLOCKING,
    EVENT_DISABLE_TIMING => sys::CUevent_flags::CU_EVENT_DISABLE_TIMING,
    CAPTURE_GLOBAL => sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL,
    CAPTURE_THREAD_LOCAL => sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL,
    CAPTURE_RELAXED => sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED,
    CAPTURE_STATUS_ACTIVE => sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE,
    CAPTURE_STATUS_NONE => sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE,
    POOL_RELEASE_THRESHOLD => sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD,
    POOL_RESERVED => sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT,
    POOL_RESERVED_HIGH => sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH,
    POOL_USED => sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_USED_MEM_CURRENT,
    GRANULARITY_MINIMUM => sys::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM,
    LOCATION_DEVICE => sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE,
    Attribute::ExportPosixFd => sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED,
    Attribute::RdmaCapable => sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED,
    HANDLE_POSIX_FD => sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR.0,
    ALLOCATION_PINNED => sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
    ACCESS_READ => sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READ,
    ACCESS_READ_WRITE => sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
}
