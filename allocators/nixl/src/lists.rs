//! Values that NIXL makes: lists of ranges and options, each freed with its owner, and requests.
#![expect(unsafe_code, reason = "calls NIXL with values that it has made")]

use crate::{
    FixedRange, NixlError,
    library::{Api, Handle, check},
};
use std::{
    any::Any,
    ffi::{CStr, CString, c_int},
    sync::Arc,
};

/// A value that NIXL has made, and the function that frees it.
pub(crate) struct Owned<'a> {
    pub(crate) handle: Handle,
    destroy: unsafe extern "C" fn(Handle) -> c_int,
    api: &'a Api,
}

impl<'a> Owned<'a> {
    /// Makes a value by `create`, which stores it.
    pub(crate) fn new(
        api: &'a Api,
        call: &'static str,
        create: impl FnOnce(*mut Handle) -> c_int,
        destroy: unsafe extern "C" fn(Handle) -> c_int,
    ) -> Result<Self, NixlError> {
        let mut handle = std::ptr::null_mut();
        check(call, create(&raw mut handle))?;
        Ok(Self { handle, destroy, api })
    }

    /// Makes a list of what is to be registered.
    pub(crate) fn registration(api: &'a Api, range: FixedRange) -> Result<Self, NixlError> {
        let FixedRange { place, address, bytes } = range;
        // SAFETY: 1. the place is valid for the write.
        let create = |made| unsafe { (api.create_reg_dlist)(place.kind(), made) };
        let list = Self::new(api, "create_reg_dlist", create, api.destroy_reg_dlist)?;
        // SAFETY: 1. the list is live. 2. there are no extra bytes.
        let status = unsafe {
            (api.reg_dlist_add_desc)(
                list.handle,
                address as usize,
                bytes as usize,
                place.device(),
                std::ptr::null(),
                0,
            )
        };
        check("reg_dlist_add_desc", status)?;
        Ok(list)
    }

    /// Makes a list of one side of a transfer, which is of one kind of memory and not empty.
    pub(crate) fn side(
        api: &'a Api,
        kind: c_int,
        ranges: impl Iterator<Item = FixedRange>,
    ) -> Result<Self, NixlError> {
        // SAFETY: 1. the place is valid for the write.
        let create = |made| unsafe { (api.create_xfer_dlist)(kind, made) };
        let list = Self::new(api, "create_xfer_dlist", create, api.destroy_xfer_dlist)?;
        for FixedRange { place, address, bytes } in ranges {
            // SAFETY: 1. the list is live.
            let status = unsafe {
                (api.xfer_dlist_add_desc)(
                    list.handle,
                    address as usize,
                    bytes as usize,
                    place.device(),
                )
            };
            check("xfer_dlist_add_desc", status)?;
        }
        Ok(list)
    }

    /// Makes the options of a transfer that ends with a message to the peer.
    pub(crate) fn message(api: &'a Api, message: &[u8]) -> Result<Self, NixlError> {
        // SAFETY: 1. the place is valid for the write.
        let create = |made| unsafe { (api.create_opt_args)(made) };
        let options = Self::new(api, "create_opt_args", create, api.destroy_opt_args)?;
        // SAFETY: 1. the options are live. 2. the message is copied.
        let status = unsafe {
            (api.opt_args_set_notif_msg)(options.handle, message.as_ptr().cast(), message.len())
        };
        check("opt_args_set_notif_msg", status)?;
        // SAFETY: 1. the options are live.
        check("opt_args_set_has_notif", unsafe {
            (api.opt_args_set_has_notif)(options.handle, true)
        })?;
        Ok(options)
    }

    /// Makes the parameters of a backend.
    pub(crate) fn parameters(api: &'a Api, parameters: &[(&str, &str)]) -> Result<Self, NixlError> {
        // SAFETY: 1. the place is valid for the write.
        let create = |made| unsafe { (api.create_params)(made) };
        let made = Self::new(api, "create_params", create, api.destroy_params)?;
        for (key, value) in parameters {
            let (key, value) = (name(key)?, c_string(value)?);
            // SAFETY: 1. the parameters are live. 2. both texts end with a zero and are copied.
            let status = unsafe { (api.params_add)(made.handle, key.as_ptr(), value.as_ptr()) };
            check("params_add", status)?;
        }
        Ok(made)
    }

    /// Makes a map of messages.
    pub(crate) fn messages(api: &'a Api) -> Result<Self, NixlError> {
        // SAFETY: 1. the place is valid for the write.
        let create = |made| unsafe { (api.create_notif_map)(made) };
        Self::new(api, "create_notif_map", create, api.destroy_notif_map)
    }

    /// Gives the value up without freeing it.
    pub(crate) fn into_handle(mut self) -> Handle {
        std::mem::replace(&mut self.handle, std::ptr::null_mut())
    }

    pub(crate) fn api(&self) -> &'a Api {
        self.api
    }
}

impl Drop for Owned<'_> {
    fn drop(&mut self) {
        if !self.handle.is_null() {
            // SAFETY: 1. NIXL has made the value, and this is its only owner.
            let _ = unsafe { (self.destroy)(self.handle) };
        }
    }
}

/// A request of NIXL's, and what keeps the memory that it uses.
pub(crate) struct Unfinished {
    pub(crate) request: Handle,
    pub(crate) _kept: Vec<Arc<dyn Any + Send + Sync>>,
}

// SAFETY: 1. NIXL's values are not bound to a thread, and an agent is created with NIXL's strict
// synchronisation.
unsafe impl Send for Unfinished {}
// SAFETY: 1. as above: a reference reaches nothing but the agent, which serialises.
unsafe impl Sync for Unfinished {}

/// Returns a text for C.
fn c_string(text: &str) -> Result<CString, NixlError> {
    CString::new(text).map_err(|_| NixlError::BadName { name: text.to_owned() })
}

/// Returns a name for C, which is not empty.
pub(crate) fn name(text: &str) -> Result<CString, NixlError> {
    c_string(text).and_then(|name| {
        if name.is_empty() { Err(NixlError::BadName { name: String::new() }) } else { Ok(name) }
    })
}

/// Returns a text of NIXL's.
///
/// # Safety
/// It is null, or ends with a zero and is valid until the function returns.
pub(crate) unsafe fn text(of: *const std::ffi::c_char) -> String {
    if of.is_null() {
        return String::new();
    }
    // SAFETY: 1. the caller promises it.
    unsafe { CStr::from_ptr(of) }.to_string_lossy().into_owned()
}
