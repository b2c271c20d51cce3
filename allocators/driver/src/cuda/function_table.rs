//! The driver's functions, looked up by name once.
//!
//! The bindings look a symbol up at its first call and panic if it is missing. They also return an
//! enum, so that an unknown code from a later driver would be undefined behaviour. Here each
//! function is looked up at the start in the library that the bindings have loaded, and codes are
//! plain numbers.
#![expect(unsafe_code, reason = "assigns types to symbols of the CUDA driver")]

use super::{
    OpenError,
    abi::{AccessDescription, AllocationProperties, DriverPtr, PoolProperties},
};
use cudarc::driver::sys;
use libloading::Library;
use std::ffi::{c_char, c_int, c_uchar, c_uint, c_ulonglong, c_ushort, c_void};

macro_rules! function_table {
    ($( $field:ident = $symbol:literal ( $($argument:ident: $kind:ty),* $(,)? ); )+) => {
        /// All functions of the driver that are used, by their name in this module.
        pub(super) struct FunctionTable {
            $( pub(super) $field: unsafe extern "C" fn($($argument: $kind),*) -> c_uint, )+
        }

        impl FunctionTable {
            /// Loads the driver's library and looks up all functions.
            pub(super) fn load() -> Result<Self, OpenError> {
                // SAFETY: 1. Loading a library runs its start-up code. That of the CUDA driver is
                // safe to run.
                if !unsafe { sys::is_culib_present() } {
                    return Err(OpenError::NoLibrary);
                }
                // SAFETY: 1. As above. The library was just found, so this does not panic.
                Self::of(unsafe { sys::culib() })
            }

            /// As [`load`](Self::load), for the library with this name or path.
            pub(super) fn load_library(name: &str) -> Result<Self, OpenError> {
                // SAFETY: 1. As above.
                let library = unsafe { Library::new(name) }.map_err(|_| OpenError::NoLibrary)?;
                // It is never unloaded.
                Self::of(Box::leak(Box::new(library)))
            }

            fn of(library: &'static Library) -> Result<Self, OpenError> {
                Ok(Self {
                    $( $field: {
                        // SAFETY: 1. The type is the one that cuda.h declares for this symbol.
                        let function = unsafe {
                            library.get::<unsafe extern "C" fn($($kind),*) -> c_uint>(concat!($symbol, "\0").as_bytes())
                        };
                        *function.map_err(|_| OpenError::MissingSymbol { symbol: $symbol })?
                    }, )+
                })
            }
        }
    };
}

// A function whose types have changed is looked up by its newest name. The plain name is the
// oldest.
function_table! {
    init = "cuInit"(flags: c_uint);
    driver_version = "cuDriverGetVersion"(version: *mut c_int);
    device_count = "cuDeviceGetCount"(count: *mut c_int);
    device_get = "cuDeviceGet"(device: *mut c_int, ordinal: c_int);
    device_name = "cuDeviceGetName"(name: *mut c_char, len: c_int, device: c_int);
    device_memory = "cuDeviceTotalMem_v2"(bytes: *mut usize, device: c_int);
    device_attribute = "cuDeviceGetAttribute"(value: *mut c_int, attribute: c_uint, device: c_int);
    device_pci_address = "cuDeviceGetPCIBusId"(address: *mut c_char, len: c_int, device: c_int);
    device_uuid = "cuDeviceGetUuid_v2"(uuid: *mut u8, device: c_int);
    device_can_access_peer = "cuDeviceCanAccessPeer"(can_access: *mut c_int, device: c_int, other: c_int);
    context_retain = "cuDevicePrimaryCtxRetain"(context: *mut DriverPtr, device: c_int);
    context_release = "cuDevicePrimaryCtxRelease_v2"(device: c_int);
    context_current = "cuCtxGetCurrent"(context: *mut DriverPtr);
    context_set_current = "cuCtxSetCurrent"(context: DriverPtr);
    context_synchronize = "cuCtxSynchronize"();
    memory_info = "cuMemGetInfo_v2"(free: *mut usize, total: *mut usize);

    stream_create = "cuStreamCreateWithPriority"(stream: *mut DriverPtr, flags: c_uint, priority: c_int);
    stream_destroy = "cuStreamDestroy_v2"(stream: DriverPtr);
    stream_id = "cuStreamGetId"(stream: DriverPtr, id: *mut c_ulonglong);
    stream_query = "cuStreamQuery"(stream: DriverPtr);
    stream_synchronize = "cuStreamSynchronize"(stream: DriverPtr);
    stream_wait_event = "cuStreamWaitEvent"(stream: DriverPtr, event: DriverPtr, flags: c_uint);
    stream_is_capturing = "cuStreamIsCapturing"(stream: DriverPtr, status: *mut c_uint);
    exchange_capture_mode = "cuThreadExchangeStreamCaptureMode"(mode: *mut c_uint);

    event_create = "cuEventCreate"(event: *mut DriverPtr, flags: c_uint);
    event_destroy = "cuEventDestroy_v2"(event: DriverPtr);
    event_record = "cuEventRecord"(event: DriverPtr, stream: DriverPtr);
    event_query = "cuEventQuery"(event: DriverPtr);
    event_synchronize = "cuEventSynchronize"(event: DriverPtr);

    capture_begin = "cuStreamBeginCapture_v2"(stream: DriverPtr, mode: c_uint);
    capture_end = "cuStreamEndCapture"(stream: DriverPtr, graph: *mut DriverPtr);
    // The newest version that a driver of CUDA 12.0 has.
    capture_status = "cuStreamGetCaptureInfo_v2"(
        stream: DriverPtr, status: *mut c_uint, id: *mut c_ulonglong,
        graph: *mut DriverPtr, dependencies: *mut *const DriverPtr, count: *mut usize,
    );
    graph_instantiate = "cuGraphInstantiateWithFlags"(exec: *mut DriverPtr, graph: DriverPtr, flags: c_ulonglong);
    graph_launch = "cuGraphLaunch"(exec: DriverPtr, stream: DriverPtr);
    graph_destroy = "cuGraphDestroy"(graph: DriverPtr);
    graph_exec_destroy = "cuGraphExecDestroy"(exec: DriverPtr);

    mem_alloc = "cuMemAlloc_v2"(address: *mut u64, bytes: usize);
    mem_free = "cuMemFree_v2"(address: u64);
    pool_create = "cuMemPoolCreate"(pool: *mut DriverPtr, properties: *const PoolProperties);
    pool_destroy = "cuMemPoolDestroy"(pool: DriverPtr);
    pool_trim = "cuMemPoolTrimTo"(pool: DriverPtr, keep: usize);
    pool_set = "cuMemPoolSetAttribute"(pool: DriverPtr, attribute: c_uint, value: *mut c_void);
    pool_get = "cuMemPoolGetAttribute"(pool: DriverPtr, attribute: c_uint, value: *mut c_void);
    pool_alloc = "cuMemAllocFromPoolAsync"(address: *mut u64, bytes: usize, pool: DriverPtr, stream: DriverPtr);
    pool_free = "cuMemFreeAsync"(address: u64, stream: DriverPtr);

    granularity = "cuMemGetAllocationGranularity"(
        granularity: *mut usize, properties: *const AllocationProperties, option: c_uint,
    );
    address_reserve = "cuMemAddressReserve"(
        address: *mut u64, bytes: usize, align: usize, hint: u64, flags: c_ulonglong,
    );
    address_free = "cuMemAddressFree"(address: u64, bytes: usize);
    handle_create = "cuMemCreate"(
        handle: *mut u64, bytes: usize, properties: *const AllocationProperties, flags: c_ulonglong,
    );
    handle_release = "cuMemRelease"(handle: u64);
    map = "cuMemMap"(address: u64, bytes: usize, offset: usize, handle: u64, flags: c_ulonglong);
    unmap = "cuMemUnmap"(address: u64, bytes: usize);
    set_access = "cuMemSetAccess"(address: u64, bytes: usize, access: *const AccessDescription, count: usize);

    handle_export = "cuMemExportToShareableHandle"(
        shareable: *mut c_void, handle: u64, kind: c_uint, flags: c_ulonglong,
    );
    handle_import = "cuMemImportFromShareableHandle"(handle: *mut u64, shareable: *mut c_void, kind: c_uint);

    range_handle = "cuMemGetHandleForAddressRange"(
        handle: *mut c_void, address: u64, bytes: usize, kind: c_uint, flags: c_ulonglong,
    );

    host_alloc = "cuMemHostAlloc"(address: *mut *mut c_void, bytes: usize, flags: c_uint);
    host_free = "cuMemFreeHost"(address: *mut c_void);
    host_register = "cuMemHostRegister_v2"(address: *mut c_void, bytes: usize, flags: c_uint);
    host_unregister = "cuMemHostUnregister"(address: *mut c_void);

    copy_to_device = "cuMemcpyHtoDAsync_v2"(to: u64, from: *const c_void, bytes: usize, stream: DriverPtr);
    copy_to_host = "cuMemcpyDtoHAsync_v2"(to: *mut c_void, from: u64, bytes: usize, stream: DriverPtr);
    copy_on_device = "cuMemcpyDtoDAsync_v2"(to: u64, from: u64, bytes: usize, stream: DriverPtr);
    copy_rows = "cuMemcpy2DAsync_v2"(copy: *const sys::CUDA_MEMCPY2D, stream: DriverPtr);
    copy_between = "cuMemcpyPeerAsync"(
        to: u64, to_context: DriverPtr, from: u64, from_context: DriverPtr, bytes: usize, stream: DriverPtr,
    );
    fill = "cuMemsetD8Async"(to: u64, byte: c_uchar, bytes: usize, stream: DriverPtr);
    fill_16 = "cuMemsetD16Async"(to: u64, half: c_ushort, count: usize, stream: DriverPtr);
    fill_32 = "cuMemsetD32Async"(to: u64, word: c_uint, count: usize, stream: DriverPtr);
    pointer_attribute = "cuPointerGetAttribute"(value: *mut c_void, attribute: c_uint, address: u64);
}
