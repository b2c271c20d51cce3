//! The functions of NIXL that are used, and how they are found.
//!
//! Declared after `wrapper.h` of NIXL 1.5, its interface for C. A function returns a status: 0 is
//! success, 1 a transfer that is not over, and less an error.
#![expect(unsafe_code, reason = "calls functions of a library that is opened at run time")]

use crate::NixlError;
use libloading::Library;
use std::{
    error::Error,
    ffi::{OsStr, OsString, c_char, c_int, c_void},
    fmt,
    path::Path,
    sync::Arc,
};

/// The file, as the dynamic loader searches for it.
const FILE: &str = "libnixl_capi.so";
/// The variable that names the file.
const VARIABLE: &str = "AQUIFER_NIXL";
/// The status of a transfer that is not over.
pub(crate) const IN_PROGRESS: c_int = 1;

/// A value that NIXL has made, of any of its types.
pub(crate) type Handle = *mut c_void;

/// The settings of an agent: `nixl_capi_agent_config_t`.
#[repr(C)]
pub(crate) struct AgentConfig {
    /// Whether a thread of NIXL's makes progress between polls.
    pub(crate) progress_thread: bool,
    pub(crate) listen_thread: bool,
    pub(crate) listen_port: c_int,
    /// 1: calls of several threads are serialised.
    pub(crate) thread_sync: c_int,
    pub(crate) workers: u32,
    pub(crate) progress_delay_us: u64,
    pub(crate) listen_delay_us: u64,
    pub(crate) telemetry: bool,
    /// Zeros for fields that a later version reads.
    pub(crate) reserved: [u64; 8],
}

/// Defines [`Api`] and its [`Api::load`].
macro_rules! functions {
    ($($name:ident($($argument:ty),*);)+) => {
        /// NIXL's functions, each under its name without `nixl_capi_`.
        pub(crate) struct Api {
            $(pub(crate) $name: unsafe extern "C" fn($($argument),*) -> c_int,)+
            /// Closed after the last call. `None` if the functions come from elsewhere.
            _library: Option<Library>,
        }

        impl Api {
            /// Finds all functions in a library.
            ///
            /// # Safety
            /// The library is NIXL's, with the types above.
            unsafe fn load(library: Library) -> Result<Self, libloading::Error> {
                Ok(Self {
                    // SAFETY: 1. the caller promises the types.
                    $($name: unsafe { *library.get(concat!("nixl_capi_", stringify!($name), "\0"))? },)+
                    _library: Some(library),
                })
            }

            /// Returns functions that come from no library.
            #[cfg(any(test, feature = "simulated"))]
            #[expect(clippy::too_many_arguments, reason = "as many as there are functions")]
            pub(crate) fn of($($name: unsafe extern "C" fn($($argument),*) -> c_int),+) -> Self {
                Self { $($name,)+ _library: None }
            }
        }
    };
}

functions! {
    create_configured_agent(*const c_char, *const AgentConfig, *mut Handle);
    destroy_agent(Handle);
    create_params(*mut Handle);
    params_add(Handle, *const c_char, *const c_char);
    destroy_params(Handle);
    create_backend(Handle, *const c_char, Handle, *mut Handle);
    destroy_backend(Handle);
    get_local_md(Handle, *mut *mut c_void, *mut usize);
    load_remote_md(Handle, *const c_void, usize, *mut *mut c_char);
    invalidate_remote_md(Handle, *const c_char);
    create_reg_dlist(c_int, *mut Handle);
    reg_dlist_add_desc(Handle, usize, usize, u64, *const c_void, usize);
    destroy_reg_dlist(Handle);
    register_mem(Handle, Handle, Handle);
    deregister_mem(Handle, Handle, Handle);
    create_xfer_dlist(c_int, *mut Handle);
    xfer_dlist_add_desc(Handle, usize, usize, u64);
    destroy_xfer_dlist(Handle);
    create_opt_args(*mut Handle);
    opt_args_set_notif_msg(Handle, *const c_void, usize);
    opt_args_set_has_notif(Handle, bool);
    destroy_opt_args(Handle);
    create_xfer_req(Handle, c_int, Handle, Handle, *const c_char, *mut Handle, Handle);
    post_xfer_req(Handle, Handle, Handle);
    get_xfer_status(Handle, Handle);
    release_xfer_req(Handle, Handle);
    destroy_xfer_req(Handle);
    create_notif_map(*mut Handle);
    get_notifs(Handle, Handle, Handle);
    notif_map_size(Handle, *mut usize);
    notif_map_get_agent_at(Handle, usize, *mut *const c_char);
    notif_map_get_notifs_size(Handle, *const c_char, *mut usize);
    notif_map_get_notif(Handle, *const c_char, usize, *mut *const c_void, *mut usize);
    destroy_notif_map(Handle);
}

/// Returns `Ok` for a status of success.
pub(crate) fn check(call: &'static str, status: c_int) -> Result<(), NixlError> {
    if status == 0 { Ok(()) } else { Err(NixlError::Call { call, status }) }
}

/// NIXL's library, opened. A clone is the same one; it is closed with the last agent.
#[derive(Clone)]
pub struct Nixl(pub(crate) Arc<Api>);

impl Nixl {
    /// Opens the file that `AQUIFER_NIXL` names, or else `libnixl_capi.so` where the dynamic loader
    /// searches (`dlopen`). Blocks while NIXL and what it needs are loaded.
    ///
    /// # Errors
    /// [`NixlError::Library`] if there is none, or if it lacks a function of NIXL 1.5.
    pub fn open() -> Result<Self, NixlError> {
        let named = std::env::var_os(VARIABLE).filter(|name| !name.is_empty());
        // SAFETY: 1. the user names NIXL's library, or it has NIXL's file name.
        unsafe { Self::load(&named.unwrap_or_else(|| OsString::from(FILE))) }
    }

    /// Opens a file of another name.
    ///
    /// # Safety
    /// The file is NIXL's library for C, of version 1.5 or a later one that agrees with it.
    ///
    /// # Errors
    /// As [`Nixl::open`].
    pub unsafe fn open_file(file: &Path) -> Result<Self, NixlError> {
        // SAFETY: 1. the caller promises it.
        unsafe { Self::load(file.as_os_str()) }
    }

    /// # Safety
    /// As [`Nixl::open_file`].
    unsafe fn load(file: &OsStr) -> Result<Self, NixlError> {
        // SAFETY: 1. the caller promises that the file is NIXL's, whose initialisers may run on any
        // thread, and whose functions have the types of 1.5.
        let loaded = unsafe { Library::new(file).and_then(|library| Api::load(library)) };
        match loaded {
            Ok(api) => Ok(Self(Arc::new(api))),
            Err(error) => {
                // The loader's own words are below it.
                let reason = error.source().map_or_else(|| error.to_string(), ToString::to_string);
                Err(NixlError::Library { reason })
            }
        }
    }
}

impl fmt::Debug for Nixl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Nixl").finish_non_exhaustive()
    }
}
