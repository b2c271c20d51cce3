//! The function tables of NVTX's core, which a tool fills in `InitializeInjectionNvtx2`.
//!
//! A tool asks for a module's table by the export table of callbacks, and writes a function to each
//! slot that it wants to be called at (`nvtxDetail/nvtxImpl.h`, `nvtxEtiGetModuleFunctionTable`).
//! Only the slot of `nvtxDomainCreateA` is read here. The others exist since tools fill them.
#![expect(unsafe_code, reason = "returns tables through pointers of the tool")]

use super::abi::{
    DomainCreate, ExportTableCallbacks, ExportTableVersionInfo, SlotPtr, ToolPtr, VERSION,
};
use std::{
    ffi::{CStr, c_int, c_uint, c_void},
    mem, ptr,
    sync::atomic::{AtomicPtr, Ordering},
};

/// `NVTX_ETID_…`
const CALLBACKS: u32 = 1;
const VERSION_INFO: u32 = 3;

/// `NVTX_CB_MODULE_CORE2`
const CORE2: usize = 5;
/// `NVTX_CBID_CORE2_DomainCreateA`
const DOMAIN_CREATE: usize = 12;
/// `NVTX_CBID_…_SIZE` of each `NVTX_CB_MODULE_…`: core, CUDA, `OpenCL`, CUDA runtime, core 2, sync.
const SIZES: [usize; MODULES] = [0, 16, 9, 15, 7, 16, 7];
const MODULES: usize = 7;
const MOST: usize = 16;

/// The slots of each module, null until a tool writes them.
static SLOTS: [[AtomicPtr<c_void>; MOST]; MODULES] =
    [const { [const { AtomicPtr::new(ptr::null_mut()) }; MOST] }; MODULES];

/// Pointers to the slots. The first of each module and the one behind the last are null.
static TABLES: [[SlotPtr; MOST + 1]; MODULES] = tables(&SLOTS);

static CALLBACK_TABLE: ExportTableCallbacks = ExportTableCallbacks {
    struct_size: size_of::<ExportTableCallbacks>(),
    get_module_function_table,
};

static VERSION_TABLE: ExportTableVersionInfo = ExportTableVersionInfo {
    struct_size: size_of::<ExportTableVersionInfo>(),
    version: VERSION as u32,
    reserved: 0,
    set_injection_version,
};

const fn tables(
    slots: &'static [[AtomicPtr<c_void>; MOST]; MODULES],
) -> [[SlotPtr; MOST + 1]; MODULES] {
    let mut tables: [[SlotPtr; MOST + 1]; MODULES] = [[None; MOST + 1]; MODULES];
    let mut module = 1;
    while module < MODULES {
        let mut slot = 1;
        while slot < SIZES[module] {
            tables[module][slot] = Some(&slots[module][slot]);
            slot += 1;
        }
        module += 1;
    }
    tables
}

/// `nvtxGetExportTable`: passed to the tool, which calls it for the tables.
pub(super) extern "C" fn get_export_table(id: u32) -> *const c_void {
    match id {
        CALLBACKS => (&raw const CALLBACK_TABLE).cast(),
        VERSION_INFO => (&raw const VERSION_TABLE).cast(),
        _ => ptr::null(),
    }
}

/// `nvtxEtiGetModuleFunctionTable`: returns 0 for an unknown module.
unsafe extern "C" fn get_module_function_table(
    module: c_uint,
    table: *mut *const SlotPtr,
    size: *mut c_uint,
) -> c_int {
    let module = module as usize;
    if module == 0 || module >= MODULES {
        return 0;
    }
    if !size.is_null() {
        // SAFETY: 1. the tool passes a valid pointer or null.
        unsafe { size.write(SIZES[module] as c_uint) };
    }
    if !table.is_null() {
        // SAFETY: 1. as above.
        unsafe { table.write(TABLES[module].as_ptr()) };
    }
    1
}

/// `nvtxEtiSetInjectionNvtxVersion`: ignored, as in C.
extern "C" fn set_injection_version(_version: u32) {}

/// Removes what a tool wrote whose start failed.
pub(super) fn reset() {
    SLOTS.iter().flatten().for_each(|slot| slot.store(ptr::null_mut(), Ordering::Release));
}

/// Creates a domain (`nvtxDomainCreateA`). Returns null, the default domain, if the tool has no
/// such function.
pub(super) fn create_domain(name: &CStr) -> ToolPtr {
    let function = SLOTS[CORE2][DOMAIN_CREATE].load(Ordering::Acquire);
    if function.is_null() {
        return ptr::null_mut();
    }
    // SAFETY: 1. the tool wrote a function of this type to the slot, as NVTX requires.
    let create = unsafe { mem::transmute::<*mut c_void, DomainCreate>(function) };
    // SAFETY: 1. `name` is a C string, which the tool only reads during the call.
    unsafe { create(name.as_ptr()) }
}
