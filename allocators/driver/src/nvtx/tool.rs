//! The search for a tool, its start, and calls of its memory extension.
#![expect(unsafe_code, reason = "loads a tool's library and calls its functions")]

use super::{
    abi::{
        COMPATIBILITY, GetInitializer, HEAP_REGISTER, HEAP_UNREGISTER, HeapDesc, HeapRegister,
        HeapUnregister, INITIALIZER_CORE, INITIALIZER_EXTENSION, InitializeCore,
        InitializeExtension, MESSAGE_ASCII, MODULE_MEMORY, ModuleInfo, ModuleSegment,
        REFERENCE_POINTER, REGIONS_NAME, REGIONS_REGISTER, REGIONS_UNREGISTER, RegionNameDesc,
        RegionsName, RegionsNameBatch, RegionsRegister, RegionsRegisterBatch, RegionsUnregister,
        RegionsUnregisterBatch, SLOT_COUNT, TYPE_VIRTUAL_ADDRESS, USAGE_SUBALLOCATOR, VERSION,
        VirtualRangeDesc, size_field,
    },
    core_table,
};
use nix::{libc, unistd::geteuid};
use std::{
    env,
    ffi::{CStr, CString, OsStr, c_int, c_void},
    fmt, mem,
    os::unix::ffi::OsStrExt,
    path::{Path, PathBuf},
    ptr,
    sync::atomic::{AtomicPtr, Ordering},
};

const VARIABLE: &str =
    if size_of::<usize>() == 4 { "NVTX_INJECTION32_PATH" } else { "NVTX_INJECTION64_PATH" };
/// The value of the variable that excludes every tool.
const NO_TOOL: &str = "./.";
const CORE_SYMBOL: &CStr = c"InitializeInjectionNvtx2";
const EXTENSION_SYMBOL: &CStr = c"InitializeInjectionNvtxExtension";
/// The domain of all announcements.
const DOMAIN: &CStr = c"aquifer";

/// The slots of the memory extension's functions, null until a tool writes them.
static SLOTS: [AtomicPtr<c_void>; SLOT_COUNT] =
    [const { AtomicPtr::new(ptr::null_mut()) }; SLOT_COUNT];

/// Why there is no tool.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum NoMemoryTool {
    /// No tool has announced itself.
    None,
    /// The variable excludes tools.
    Excluded,
    /// The library cannot be loaded.
    NotLoaded { library: PathBuf },
    /// The library has no entry point for extensions.
    NoEntryPoint { library: PathBuf },
    /// The tool has refused to start.
    Refused,
    /// The tool does not support heaps and regions.
    NoHeaps,
}

impl fmt::Display for NoMemoryTool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::None => write!(f, "no tool is there, since {VARIABLE} is not set"),
            Self::Excluded => write!(f, "{VARIABLE}={NO_TOOL} excludes tools"),
            Self::NotLoaded { library } => {
                write!(f, "{VARIABLE}={} cannot be loaded", library.display())
            }
            Self::NoEntryPoint { library } => {
                write!(f, "{VARIABLE}={} has no {EXTENSION_SYMBOL:?}", library.display())
            }
            Self::Refused => f.write_str("the tool has refused the memory extension"),
            Self::NoHeaps => f.write_str("the tool does not support heaps and regions"),
        }
    }
}

/// A heap of the tool, as the number of its handle.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct HeapHandle(usize);

/// A tool that supports heaps and regions. It stays loaded for good.
pub(super) struct MemoryTool {
    /// The handle of our domain.
    domain: usize,
    heap_register: HeapRegister,
    heap_unregister: HeapUnregister,
    regions_register: RegionsRegister,
    regions_unregister: RegionsUnregister,
    /// Few tools need names.
    regions_name: Option<RegionsName>,
}

impl MemoryTool {
    /// Finds and starts a tool. Must be called once at most.
    pub(super) fn start() -> Result<Self, NoMemoryTool> {
        let initialize = match env::var_os(VARIABLE) {
            Some(path) if path == NO_TOOL => return Err(NoMemoryTool::Excluded),
            Some(path) => from_library(&path)?,
            None => from_cuda_driver().ok_or(NoMemoryTool::None)?,
        };
        start_extension(initialize)?;
        let [Some(heap_register), Some(heap_unregister), Some(register), Some(unregister)] =
            [HEAP_REGISTER, HEAP_UNREGISTER, REGIONS_REGISTER, REGIONS_UNREGISTER].map(slot)
        else {
            return Err(NoMemoryTool::NoHeaps);
        };
        // SAFETY: 1. the tool wrote functions of these types to the slots of these numbers, as the
        // memory extension of this compatibility number requires.
        unsafe {
            Ok(Self {
                domain: core_table::create_domain(DOMAIN).expose_provenance(),
                heap_register: mem::transmute::<*mut c_void, HeapRegister>(heap_register),
                heap_unregister: mem::transmute::<*mut c_void, HeapUnregister>(heap_unregister),
                regions_register: mem::transmute::<*mut c_void, RegionsRegister>(register),
                regions_unregister: mem::transmute::<*mut c_void, RegionsUnregister>(unregister),
                regions_name: slot(REGIONS_NAME)
                    .map(|name| mem::transmute::<*mut c_void, RegionsName>(name)),
            })
        }
    }

    /// Registers a heap for suballocation (`nvtxMemHeapRegister`). Returns `None` if the tool
    /// refuses it.
    pub(super) fn register_heap(&self, address: u64, bytes: u64) -> Option<HeapHandle> {
        let range = VirtualRangeDesc { size: bytes as usize, pointer: pointer(address) };
        let heap = HeapDesc {
            compatibility: COMPATIBILITY,
            struct_size: size_field::<HeapDesc>(),
            reserved: 0,
            usage: USAGE_SUBALLOCATOR,
            kind: TYPE_VIRTUAL_ADDRESS,
            type_specific_size: size_of::<VirtualRangeDesc>(),
            type_specific: &raw const range,
            category: 0,
            message_type: 0,
            message: ptr::null(),
        };
        // SAFETY: 1. the structures are complete, and outlive the call. 2. the domain is the
        // tool's.
        let handle = unsafe { (self.heap_register)(self.domain(), &raw const heap) };
        (!handle.is_null()).then(|| HeapHandle(handle.expose_provenance()))
    }

    /// Ends a heap (`nvtxMemHeapUnregister`).
    pub(super) fn unregister_heap(&self, heap: HeapHandle) {
        let heap = ptr::with_exposed_provenance_mut(heap.0);
        // SAFETY: 1. the heap is the tool's. 2. so is the domain.
        unsafe { (self.heap_unregister)(self.domain(), heap) }
    }

    /// Registers a region of a heap (`nvtxMemRegionsRegister`).
    pub(super) fn register_region(&self, heap: HeapHandle, address: u64, bytes: u64) {
        let range = VirtualRangeDesc { size: bytes as usize, pointer: pointer(address) };
        let batch = RegionsRegisterBatch {
            compatibility: COMPATIBILITY,
            struct_size: size_field::<RegionsRegisterBatch>(),
            region_type: TYPE_VIRTUAL_ADDRESS,
            heap: ptr::with_exposed_provenance_mut(heap.0),
            region_count: 1,
            element_size: size_of::<VirtualRangeDesc>(),
            elements: &raw const range,
            handles_out: ptr::null_mut(),
        };
        // SAFETY: 1. the structures are complete, and outlive the call. 2. the heap and the domain
        // are the tool's.
        unsafe { (self.regions_register)(self.domain(), &raw const batch) }
    }

    /// Ends the region at an address (`nvtxMemRegionsUnregister`).
    pub(super) fn unregister_region(&self, address: u64) {
        let region = pointer(address);
        let batch = RegionsUnregisterBatch {
            compatibility: COMPATIBILITY,
            struct_size: size_field::<RegionsUnregisterBatch>(),
            reference_type: REFERENCE_POINTER,
            reference_count: 1,
            element_size: size_of::<*const c_void>(),
            elements: &raw const region,
        };
        // SAFETY: 1. the structures are complete, and outlive the call. 2. the domain is the
        // tool's.
        unsafe { (self.regions_unregister)(self.domain(), &raw const batch) }
    }

    /// Names the region at an address (`nvtxMemRegionsName`), if the tool supports it.
    pub(super) fn name_region(&self, address: u64, name: &CStr) {
        let Some(regions_name) = self.regions_name else { return };
        let region = RegionNameDesc {
            reference_type: REFERENCE_POINTER,
            name_type: MESSAGE_ASCII,
            region: pointer(address),
            name: name.as_ptr(),
            category: 0,
            reserved: 0,
        };
        let batch = RegionsNameBatch {
            compatibility: COMPATIBILITY,
            struct_size: size_field::<RegionsNameBatch>(),
            reserved: 0,
            region_count: 1,
            element_size: size_of::<RegionNameDesc>(),
            elements: &raw const region,
            reserved_too: 0,
        };
        // SAFETY: 1. the structures are complete, and outlive the call. 2. the domain is the
        // tool's.
        unsafe { regions_name(self.domain(), &raw const batch) }
    }

    fn domain(&self) -> *mut c_void {
        ptr::with_exposed_provenance_mut(self.domain)
    }
}

impl fmt::Debug for MemoryTool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryTool").finish_non_exhaustive()
    }
}

/// Returns an address of the device for the tool, which does not dereference it.
fn pointer(address: u64) -> *const c_void {
    ptr::without_provenance(address as usize)
}

/// Returns the function that the tool wrote to a slot.
fn slot(number: usize) -> Option<*mut c_void> {
    Some(SLOTS[number].load(Ordering::Acquire)).filter(|function| !function.is_null())
}

/// Starts the core of the tool in a library, and returns its entry point for extensions.
fn from_library(path: &OsStr) -> Result<InitializeExtension, NoMemoryTool> {
    let library = || PathBuf::from(path);
    let name = CString::new(path.as_bytes())
        .map_err(|_| NoMemoryTool::NotLoaded { library: library() })?;
    let loaded = open(&name).ok_or_else(|| NoMemoryTool::NotLoaded { library: library() })?;
    if let Some(core) = symbol(loaded, CORE_SYMBOL) {
        // SAFETY: 1. NVTX gives the function of this name this type.
        start_core(unsafe { mem::transmute::<*mut c_void, InitializeCore>(core) });
    }
    let Some(extension) = symbol(loaded, EXTENSION_SYMBOL) else {
        // The library stays loaded: its core may have started.
        return Err(NoMemoryTool::NoEntryPoint { library: library() });
    };
    // SAFETY: 1. as above.
    Ok(unsafe { mem::transmute::<*mut c_void, InitializeExtension>(extension) })
}

/// Starts the core of the tool that the CUDA driver has, if any, and returns its entry point for
/// extensions. The driver is loaded only if a tool has announced itself by a file.
fn from_cuda_driver() -> Option<InitializeExtension> {
    if !is_announced_by_file() {
        return None;
    }
    let get = symbol(open(c"libcuda.so.1")?, c"cuNvtxGetInjectionInitializer")?;
    // SAFETY: 1. the driver gives the function of this name this type.
    let get = unsafe { mem::transmute::<*mut c_void, GetInitializer>(get) };
    let initializer = |kind: c_int| {
        let mut function = ptr::null_mut();
        // SAFETY: 1. the pointer is valid during the call.
        let status = unsafe { get(kind, &raw mut function) };
        (status == 0 && !function.is_null()).then_some(function)
    };
    if let Some(core) = initializer(INITIALIZER_CORE) {
        // SAFETY: 1. the driver returns a function of this type for this kind.
        start_core(unsafe { mem::transmute::<*mut c_void, InitializeCore>(core) });
    }
    let extension = initializer(INITIALIZER_EXTENSION)?;
    // SAFETY: 1. as above.
    Some(unsafe { mem::transmute::<*mut c_void, InitializeExtension>(extension) })
}

/// Returns whether a tool has created the file by which it announces itself to the CUDA driver.
fn is_announced_by_file() -> bool {
    const FILE: &str = "nvidia/nvtx/nvtx-cuda.yaml";
    if Path::new("/run").join(FILE).exists() {
        return true;
    }
    if geteuid().is_root() {
        return Path::new("/run/nvidia/nvtx/user.0/nvtx-cuda.yaml").exists();
    }
    env::var_os("XDG_RUNTIME_DIR")
        .filter(|folder| !folder.is_empty())
        .is_some_and(|folder| Path::new(&folder).join(FILE).exists())
}

fn open(name: &CStr) -> Option<*mut c_void> {
    // SAFETY: 1. `name` is a C string. 2. loading a library runs its start-up code. The user has
    // named it for this, or it is the CUDA driver's, which is safe to run.
    let library = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_LAZY) };
    (!library.is_null()).then_some(library)
}

fn symbol(library: *mut c_void, name: &CStr) -> Option<*mut c_void> {
    // SAFETY: 1. the library is loaded, and never unloaded. 2. `name` is a C string.
    let found = unsafe { libc::dlsym(library, name.as_ptr()) };
    (!found.is_null()).then_some(found)
}

/// Starts the tool's core. After a failure there are only default domains.
fn start_core(initialize: InitializeCore) {
    // SAFETY: 1. the function returns tables that live for good.
    if unsafe { initialize(core_table::get_export_table) } == 0 {
        core_table::reset();
    }
}

/// Has the tool fill the slots of the memory extension.
fn start_extension(initialize: InitializeExtension) -> Result<(), NoMemoryTool> {
    let mut segment =
        ModuleSegment { segment_id: 1, slot_count: SLOT_COUNT, function_slots: SLOTS.as_ptr() };
    let mut info = ModuleInfo {
        nvtx_version: VERSION,
        struct_size: size_field::<ModuleInfo>(),
        module_id: MODULE_MEMORY,
        compatibility: COMPATIBILITY,
        segments_count: 1,
        segments: &raw mut segment,
        get_export_function: ptr::null(),
        extension_info: ptr::null(),
    };
    // SAFETY: 1. the structures are complete and outlive the call, and the slots live for good.
    let started = unsafe { initialize(&raw mut info) };
    if started == 0 { Err(NoMemoryTool::Refused) } else { Ok(()) }
}
