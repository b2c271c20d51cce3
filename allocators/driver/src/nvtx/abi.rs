//! Types of NVTX's C interface, as in `nvToolsExtMem.h` and `nvtxDetail` of nvidia-nvtx 13.5.25.
//!
//! Structures have the names of the C types without prefix and version. Reserved fields are zero.

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::sync::atomic::AtomicPtr;

/// `NVTX_VERSION`
pub(super) const VERSION: u16 = 3;
/// `NVTX_EXT_MODULEID_MEM`
pub(super) const MODULE_MEMORY: u16 = 1;
/// `NVTX_EXT_COMPATID_MEM`
pub(super) const COMPATIBILITY: u16 = 0x0102;
/// `NVTX_EXT_MEM_SLOT_COUNT`
pub(super) const SLOT_COUNT: usize = 63;
/// `NVTX_INJECTION_INITIALIZER_…`
pub(super) const INITIALIZER_CORE: c_int = 1;
pub(super) const INITIALIZER_EXTENSION: c_int = 2;

/// `NVTX_MEM_HEAP_USAGE_TYPE_SUB_ALLOCATOR`
pub(super) const USAGE_SUBALLOCATOR: u32 = 1;
/// `NVTX_MEM_TYPE_VIRTUAL_ADDRESS`
pub(super) const TYPE_VIRTUAL_ADDRESS: u32 = 1;
/// `NVTX_MEM_REGION_REF_TYPE_POINTER`
pub(super) const REFERENCE_POINTER: u32 = 1;
/// `NVTX_MESSAGE_TYPE_ASCII`
pub(super) const MESSAGE_ASCII: u32 = 1;

/// `NVTX3EXT_CBID_nvtxMem…`: the slots of the extension's functions.
pub(super) const HEAP_REGISTER: usize = 0;
pub(super) const HEAP_UNREGISTER: usize = 1;
pub(super) const REGIONS_REGISTER: usize = 3;
pub(super) const REGIONS_UNREGISTER: usize = 5;
pub(super) const REGIONS_NAME: usize = 6;

/// An object of the tool: a domain or a heap. Never dereferenced here.
pub(super) type ToolPtr = *mut c_void;

/// `NvtxGetExportTableFunc_t`
pub(super) type GetExportTable = unsafe extern "C" fn(u32) -> *const c_void;
/// `NvtxInitializeInjectionNvtxFunc_t`
pub(super) type InitializeCore = unsafe extern "C" fn(GetExportTable) -> c_int;
/// `NvtxExtInitializeInjectionFunc_t`
pub(super) type InitializeExtension = unsafe extern "C" fn(*mut ModuleInfo) -> c_int;
/// `NvtxGetInjectionInitializerFunc_t`
pub(super) type GetInitializer = unsafe extern "C" fn(c_int, *mut *mut c_void) -> c_int;
/// `nvtxDomainCreateA_impl_fntype`
pub(super) type DomainCreate = unsafe extern "C" fn(*const c_char) -> ToolPtr;
/// `nvtxMemHeapRegister_impl_fntype`
pub(super) type HeapRegister = unsafe extern "C" fn(ToolPtr, *const HeapDesc) -> ToolPtr;
/// `nvtxMemHeapUnregister_impl_fntype`
pub(super) type HeapUnregister = unsafe extern "C" fn(ToolPtr, ToolPtr);
/// `nvtxMemRegionsRegister_impl_fntype`
pub(super) type RegionsRegister = unsafe extern "C" fn(ToolPtr, *const RegionsRegisterBatch);
/// `nvtxMemRegionsUnregister_impl_fntype`
pub(super) type RegionsUnregister = unsafe extern "C" fn(ToolPtr, *const RegionsUnregisterBatch);
/// `nvtxMemRegionsName_impl_fntype`
pub(super) type RegionsName = unsafe extern "C" fn(ToolPtr, *const RegionsNameBatch);

/// A pointer to a slot that the tool writes a function to. `None` is the null pointer.
pub(super) type SlotPtr = Option<&'static AtomicPtr<c_void>>;

/// `NvtxExportTableCallbacks`
#[repr(C)]
pub(super) struct ExportTableCallbacks {
    pub(super) struct_size: usize,
    pub(super) get_module_function_table:
        unsafe extern "C" fn(c_uint, *mut *const SlotPtr, *mut c_uint) -> c_int,
}

/// `NvtxExportTableVersionInfo`
#[repr(C)]
pub(super) struct ExportTableVersionInfo {
    pub(super) struct_size: usize,
    pub(super) version: u32,
    pub(super) reserved: u32,
    pub(super) set_injection_version: unsafe extern "C" fn(u32),
}

/// `nvtxExtModuleSegment_t`
#[repr(C)]
pub(super) struct ModuleSegment {
    pub(super) segment_id: usize,
    pub(super) slot_count: usize,
    pub(super) function_slots: *const AtomicPtr<c_void>,
}

/// `nvtxExtModuleInfo_t`
#[repr(C)]
pub(super) struct ModuleInfo {
    pub(super) nvtx_version: u16,
    pub(super) struct_size: u16,
    pub(super) module_id: u16,
    pub(super) compatibility: u16,
    pub(super) segments_count: usize,
    pub(super) segments: *mut ModuleSegment,
    pub(super) get_export_function: *const c_void,
    pub(super) extension_info: *const c_void,
}

/// `nvtxMemVirtualRangeDesc_t`
#[repr(C)]
pub(super) struct VirtualRangeDesc {
    pub(super) size: usize,
    pub(super) pointer: *const c_void,
}

/// `nvtxMemHeapDesc_t`
#[repr(C)]
pub(super) struct HeapDesc {
    pub(super) compatibility: u16,
    pub(super) struct_size: u16,
    pub(super) reserved: u32,
    pub(super) usage: u32,
    pub(super) kind: u32,
    pub(super) type_specific_size: usize,
    pub(super) type_specific: *const VirtualRangeDesc,
    pub(super) category: u32,
    pub(super) message_type: u32,
    pub(super) message: *const c_char,
}

/// `nvtxMemRegionsRegisterBatch_t`
#[repr(C)]
pub(super) struct RegionsRegisterBatch {
    pub(super) compatibility: u16,
    pub(super) struct_size: u16,
    pub(super) region_type: u32,
    pub(super) heap: ToolPtr,
    pub(super) region_count: usize,
    pub(super) element_size: usize,
    pub(super) elements: *const VirtualRangeDesc,
    pub(super) handles_out: *mut ToolPtr,
}

/// `nvtxMemRegionsUnregisterBatch_t`, of references by pointer.
#[repr(C)]
pub(super) struct RegionsUnregisterBatch {
    pub(super) compatibility: u16,
    pub(super) struct_size: u16,
    pub(super) reference_type: u32,
    pub(super) reference_count: usize,
    pub(super) element_size: usize,
    pub(super) elements: *const *const c_void,
}

/// `nvtxMemRegionNameDesc_t`, of a reference by pointer.
#[repr(C)]
pub(super) struct RegionNameDesc {
    pub(super) reference_type: u32,
    pub(super) name_type: u32,
    pub(super) region: *const c_void,
    pub(super) name: *const c_char,
    pub(super) category: u32,
    pub(super) reserved: u32,
}

/// `nvtxMemRegionsNameBatch_t`
#[repr(C)]
pub(super) struct RegionsNameBatch {
    pub(super) compatibility: u16,
    pub(super) struct_size: u16,
    pub(super) reserved: u32,
    pub(super) region_count: usize,
    pub(super) element_size: usize,
    pub(super) elements: *const RegionNameDesc,
    pub(super) reserved_too: usize,
}

/// The size of a structure for the field that states it.
pub(super) const fn size_field<T>() -> u16 {
    assert!(size_of::<T>() <= u16::MAX as usize, "a structure is larger than its size field");
    size_of::<T>() as u16
}
