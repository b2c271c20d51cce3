//! The functions of the real driver, looked up once in its own library.

#![expect(unsafe_code, reason = "looks up symbols of the CUDA driver, and gives them types")]

use nix::libc;
use std::{
    ffi::{CStr, c_char, c_int, c_uint, c_ulonglong, c_void},
    mem,
    sync::OnceLock,
};

/// `CUresult`.
pub(crate) type Code = c_uint;
/// `CUDA_SUCCESS`.
pub(crate) const SUCCESS: Code = 0;
/// `CUDA_ERROR_OUT_OF_MEMORY`.
pub(crate) const OUT_OF_MEMORY: Code = 2;
/// `CUDA_ERROR_NOT_INITIALIZED`.
pub(crate) const NOT_INITIALIZED: Code = 3;
/// `CUDA_ERROR_NOT_SUPPORTED`: this library has a function that the driver lacks.
pub(crate) const NOT_SUPPORTED: Code = 801;

/// A pointer to something of the driver's: a context, a stream, a pool, an array.
pub(crate) type Opaque = *mut c_void;

/// `CUmemLocation`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Location {
    pub(crate) kind: c_uint,
    pub(crate) number: c_int,
}

impl Location {
    /// `CU_MEM_LOCATION_TYPE_DEVICE`. The others are kinds of host memory.
    pub(crate) const DEVICE: c_uint = 1;
}

/// The first fields of `CUmemAllocationProp` and of `CUmemPoolProps`.
#[repr(C)]
pub(crate) struct Properties {
    pub(crate) kind: c_uint,
    pub(crate) handle_types: c_uint,
    pub(crate) location: Location,
}

/// `CUDA_ARRAY_DESCRIPTOR`.
#[repr(C)]
pub(crate) struct ArrayDescriptor {
    pub(crate) width: usize,
    pub(crate) height: usize,
    pub(crate) format: c_uint,
    pub(crate) channels: c_uint,
}

/// `CUDA_ARRAY3D_DESCRIPTOR`.
#[repr(C)]
pub(crate) struct Array3dDescriptor {
    pub(crate) width: usize,
    pub(crate) height: usize,
    pub(crate) depth: usize,
    pub(crate) format: c_uint,
    pub(crate) channels: c_uint,
    pub(crate) flags: c_uint,
}

macro_rules! real_functions {
    ($( $name:ident($($argument:ident: $kind:ty),* $(,)?); )+) => {
        /// The driver's functions under their own names. One that this driver lacks is replaced by
        /// one that fails.
        #[expect(non_snake_case, reason = "the driver's names")]
        pub(crate) struct Real {
            library: usize,
            $( pub(crate) $name: unsafe extern "C" fn($($kind),*) -> Code, )+
        }

        impl Real {
            fn load() -> Option<Self> {
                let library = library()?;
                Some(Self {
                    library: library as usize,
                    $( $name: {
                        unsafe extern "C" fn missing($(_: $kind),*) -> Code {
                            NOT_SUPPORTED
                        }
                        match symbol(library, stringify!($name)) {
                            // SAFETY: 1. The type is the one that cuda.h declares for this symbol.
                            Some(found) => unsafe {
                                mem::transmute::<*mut c_void, unsafe extern "C" fn($($kind),*) -> Code>(found)
                            },
                            None => missing,
                        }
                    }, )+
                })
            }
        }
    };
}

real_functions! {
    cuInit(flags: c_uint);
    cuGetProcAddress(name: *const c_char, found: *mut *mut c_void, version: c_int, flags: c_ulonglong);
    cuGetProcAddress_v2(
        name: *const c_char, found: *mut *mut c_void, version: c_int, flags: c_ulonglong, how: *mut c_uint,
    );
    cuDeviceGetCount(count: *mut c_int);
    cuDeviceGetName(name: *mut c_char, len: c_int, device: c_int);
    cuDeviceGetPCIBusId(address: *mut c_char, len: c_int, device: c_int);
    cuDeviceGetUuid_v2(uuid: *mut u8, device: c_int);
    cuDeviceTotalMem_v2(bytes: *mut usize, device: c_int);
    cuDeviceSetMemPool(device: c_int, pool: Opaque);
    cuDeviceGetMemPool(pool: *mut Opaque, device: c_int);
    cuDeviceGetDefaultMemPool(pool: *mut Opaque, device: c_int);
    cuDeviceGetGraphMemAttribute(device: c_int, attribute: c_uint, value: *mut c_void);
    cuDevicePrimaryCtxGetState(device: c_int, flags: *mut c_uint, active: *mut c_int);
    cuDevicePrimaryCtxRetain(context: *mut Opaque, device: c_int);
    cuDevicePrimaryCtxRelease_v2(device: c_int);
    cuDevicePrimaryCtxReset_v2(device: c_int);
    cuCtxDestroy_v2(context: Opaque);
    cuCtxSynchronize();
    cuCtxGetCurrent(context: *mut Opaque);
    cuCtxGetDevice(device: *mut c_int);
    cuStreamDestroy_v2(stream: Opaque);
    cuStreamGetId(stream: Opaque, id: *mut c_ulonglong);
    cuStreamIsCapturing(stream: Opaque, status: *mut c_uint);
    cuMemGetInfo_v2(free: *mut usize, total: *mut usize);
    cuMemAlloc_v2(address: *mut u64, bytes: usize);
    cuMemAllocPitch_v2(address: *mut u64, pitch: *mut usize, width: usize, height: usize, element: c_uint);
    cuMemAllocManaged(address: *mut u64, bytes: usize, flags: c_uint);
    cuMemFree_v2(address: u64);
    cuMemAllocAsync(address: *mut u64, bytes: usize, stream: Opaque);
    cuMemAllocAsync_ptsz(address: *mut u64, bytes: usize, stream: Opaque);
    cuMemAllocFromPoolAsync(address: *mut u64, bytes: usize, pool: Opaque, stream: Opaque);
    cuMemAllocFromPoolAsync_ptsz(address: *mut u64, bytes: usize, pool: Opaque, stream: Opaque);
    cuMemFreeAsync(address: u64, stream: Opaque);
    cuMemFreeAsync_ptsz(address: u64, stream: Opaque);
    cuMemPoolCreate(pool: *mut Opaque, properties: *const Properties);
    cuMemPoolDestroy(pool: Opaque);
    cuMemPoolTrimTo(pool: Opaque, keep: usize);
    cuMemPoolGetAttribute(pool: Opaque, attribute: c_uint, value: *mut c_void);
    cuMemHostAlloc(address: *mut *mut c_void, bytes: usize, flags: c_uint);
    cuMemAllocHost_v2(address: *mut *mut c_void, bytes: usize);
    cuMemFreeHost(address: *mut c_void);
    cuMemHostRegister_v2(address: *mut c_void, bytes: usize, flags: c_uint);
    cuMemHostUnregister(address: *mut c_void);
    cuArrayCreate_v2(array: *mut Opaque, descriptor: *const ArrayDescriptor);
    cuArray3DCreate_v2(array: *mut Opaque, descriptor: *const Array3dDescriptor);
    cuArrayDestroy(array: Opaque);
    cuMipmappedArrayCreate(array: *mut Opaque, descriptor: *const Array3dDescriptor, levels: c_uint);
    cuMipmappedArrayDestroy(array: Opaque);
    cuMemCreate(handle: *mut u64, bytes: usize, properties: *const Properties, flags: c_ulonglong);
    cuMemRelease(handle: u64);
    cuMemMap(address: u64, bytes: usize, offset: usize, handle: u64, flags: c_ulonglong);
    cuMemUnmap(address: u64, bytes: usize);
    cuMemRetainAllocationHandle(handle: *mut u64, address: *mut c_void);
    cuMemImportFromShareableHandle(handle: *mut u64, shareable: *mut c_void, kind: c_uint);
}

/// Returns the real driver, or `None` if its library is missing, which the dynamic linker reports
/// before this library runs.
pub(crate) fn real() -> Option<&'static Real> {
    static REAL: OnceLock<Option<Real>> = OnceLock::new();
    REAL.get_or_init(Real::load).as_ref()
}

impl Real {
    /// Returns the address of an exported symbol of the driver.
    pub(crate) fn address_of(&self, name: &str) -> Option<usize> {
        symbol(self.library as *mut c_void, name).map(|found| found as usize)
    }
}

/// The name under which this library needs the driver. See `build.rs`.
pub(crate) const LIBRARY: &CStr = c"libaquifer-real-cuda.so";

fn library() -> Option<*mut c_void> {
    // SAFETY: 1. The text ends with a zero byte. The library is loaded already, as one that this
    // one needs.
    let library = unsafe { libc::dlopen(LIBRARY.as_ptr(), libc::RTLD_NOW) };
    (!library.is_null()).then_some(library)
}

/// Looks up a symbol.
fn symbol(library: *mut c_void, name: &str) -> Option<*mut c_void> {
    let name = std::ffi::CString::new(name).ok()?;
    // SAFETY: 1. An open library and a text that ends with a zero byte.
    let found = unsafe { libc::dlsym(library, name.as_ptr()) };
    (!found.is_null()).then_some(found)
}
