//! The entry of every call from C: panics, status codes and error texts.
//!
//! A panic in a call ends here as [`Status::Panic`]. The process's panic hook is called only for
//! panics of other code. The text of a panic in a call goes to [`aq_last_error`] instead.
#![expect(unsafe_code, reason = "exports functions to C")]

use crate::status::{Failure, Status, aq_status};
use std::{
    cell::{Cell, RefCell},
    ffi::{CStr, CString, c_char},
    mem::ManuallyDrop,
    panic::{self, AssertUnwindSafe},
    sync::{Mutex, MutexGuard, Once, PoisonError},
};

/// The interface's major version. It changes when something existing changes or is removed.
pub const AQ_VERSION_MAJOR: u32 = 0;
/// The interface's minor version. It changes when something is added.
pub const AQ_VERSION_MINOR: u32 = 4;

thread_local! {
    /// Depth of calls that this thread is in. Const and without a destructor, so that it is
    /// accessible at any time in a thread's life.
    static CALL_DEPTH: Cell<u32> = const { Cell::new(0) };
    /// The text of the last panic within a call.
    static PANIC_TEXT: RefCell<String> = const { RefCell::new(String::new()) };
    /// The text of this thread's last failure.
    static LAST_ERROR: RefCell<CString> = RefCell::default();
}

pub(crate) type CallResult<T = ()> = Result<T, Failure>;

/// Runs a call's work and returns its status code.
#[inline(always)]
pub(crate) fn enter(work: impl FnOnce() -> CallResult) -> aq_status {
    enter_with(|| work().map(|()| Status::Ok))
}

/// As [`enter`], for work with more than one status of success.
#[inline(always)]
pub(crate) fn enter_with(work: impl FnOnce() -> CallResult<Status>) -> aq_status {
    CALL_DEPTH.set(CALL_DEPTH.get() + 1);
    // State that a panic leaves unfinished is behind locks that ignore poisoning, or is local to
    // this call.
    let ended = panic::catch_unwind(AssertUnwindSafe(work));
    CALL_DEPTH.set(CALL_DEPTH.get() - 1);
    match ended {
        Ok(Ok(status)) => status as aq_status,
        Ok(Err(failure)) => report(failure),
        Err(payload) => report_panic(payload),
    }
}

#[cold]
fn report(failure: Failure) -> aq_status {
    let (status, text) = failure.into_parts();
    // A thread that is ending keeps no text.
    let _ = LAST_ERROR.try_with(|last| {
        if let Ok(mut last) = last.try_borrow_mut() {
            *last = CString::new(text.replace('\0', " ")).unwrap_or_default();
        }
    });
    status as aq_status
}

#[cold]
fn report_panic(payload: Box<dyn std::any::Any + Send>) -> aq_status {
    // The drop runs code of the payload, which may panic again.
    let _leaked =
        panic::catch_unwind(AssertUnwindSafe(|| drop(payload))).map_err(ManuallyDrop::new);
    let text = PANIC_TEXT
        .try_with(|text| text.try_borrow_mut().map(|mut text| std::mem::take(&mut *text)));
    let text = text.ok().and_then(Result::ok).unwrap_or_default();
    report(Failure::new(Status::Panic, format!("a bug of the library: {text}")))
}

/// Keeps the process's panic hook from printing what [`enter`] returns. Done once for the process.
/// The previous hook is called for all other panics.
pub(crate) fn install_panic_hook() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let before = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            if CALL_DEPTH.get() == 0 {
                return before(info);
            }
            let _ = PANIC_TEXT.try_with(|text| {
                if let Ok(mut text) = text.try_borrow_mut() {
                    *text = info.to_string();
                }
            });
        }));
    });
}

/// Writes a required result to the caller's memory.
///
/// # Safety
/// 1. `to` is null, or points to a `T` that the caller may write.
pub(crate) unsafe fn write_out<T>(to: *mut T, value: T, name: &'static str) -> CallResult {
    if to.is_null() {
        return Err(null(name));
    }
    // SAFETY: 1. Not null, and guaranteed by the caller.
    unsafe { to.write(value) };
    Ok(())
}

/// Writes an optional result to the caller's memory.
///
/// # Safety
/// 1. As [`write_out`].
pub(crate) unsafe fn write_out_if_set<T>(to: *mut T, value: T) {
    if !to.is_null() {
        // SAFETY: 1. Not null, and guaranteed by the caller.
        unsafe { to.write(value) };
    }
}

/// Checks that a result can be written, before any work is done for it.
#[inline]
pub(crate) fn require<T>(to: *mut T, name: &'static str) -> CallResult {
    if to.is_null() { Err(null(name)) } else { Ok(()) }
}

/// Locks a mutex, also after a panic of a call that held it.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cold]
pub(crate) fn null(name: &'static str) -> Failure {
    Failure::new(Status::Null, format!("{name} is null"))
}

/// Returns a text of the caller.
///
/// # Safety
/// 1. `text` is null, or points to bytes that end with a zero and stay unchanged for `'a`.
pub(crate) unsafe fn c_str_of<'a>(text: *const c_char, name: &'static str) -> CallResult<&'a CStr> {
    if text.is_null() {
        return Err(null(name));
    }
    // SAFETY: 1. Guaranteed by the caller.
    Ok(unsafe { CStr::from_ptr(text) })
}

/// Returns how many bytes of a caller's struct both sides have.
///
/// # Safety
/// 1. `at` points to a `size_t`, the first field of the caller's struct.
pub(crate) unsafe fn caller_size(
    at: *const usize,
    known_size: usize,
    name: &'static str,
) -> CallResult<usize> {
    // SAFETY: 1. Guaranteed by the caller.
    let size = unsafe { at.read() };
    if size < size_of::<usize>() {
        let text = format!("{name}->size is {size}; set it to sizeof({name})");
        return Err(Failure::new(Status::Version, text));
    }
    Ok(size.min(known_size))
}

/// Fills a caller's struct up to its size, and writes the number of bytes to its first field.
///
/// # Safety
/// 1. `to` is null, or points to a struct that begins with its size in bytes and that the caller
///    may write as a whole.
/// 2. `T` is `repr(C)`, begins with a `usize`, and has no padding.
pub(crate) unsafe fn fill<T>(to: *mut T, mut value: T, name: &'static str) -> CallResult {
    require(to, name)?;
    // SAFETY: 1. The struct begins with its size.
    let size = unsafe { caller_size(to.cast(), size_of::<T>(), name) }?;
    let from = &raw mut value;
    // SAFETY: 1. 2. Both begin with a `usize`. 3. No more bytes than either has. 4. `value` is a
    // local, so they do not overlap.
    unsafe {
        from.cast::<usize>().write(size);
        std::ptr::copy_nonoverlapping(from.cast::<u8>(), to.cast::<u8>(), size);
    }
    Ok(())
}

/// Allocates a text that the caller frees with [`aq_text_free`].
pub(crate) fn text(text: &str) -> *mut c_char {
    CString::new(text.replace('\0', " ")).unwrap_or_default().into_raw()
}

/// Returns the version of the loaded library: major in the upper, minor in the lower 16 bits.
#[unsafe(no_mangle)]
pub extern "C" fn aq_version() -> u32 {
    AQ_VERSION_MAJOR << 16 | AQ_VERSION_MINOR
}

/// Returns the name of a status.
#[unsafe(no_mangle)]
pub extern "C" fn aq_status_name(status: aq_status) -> *const c_char {
    let known = Status::ALL.iter().find(|known| **known as aq_status == status);
    known.map_or(c"unknown status", |known| known.name()).as_ptr()
}

/// Returns the text of this thread's last failing call.
#[unsafe(no_mangle)]
pub extern "C" fn aq_last_error() -> *const c_char {
    // The text stays valid until the next failure of this thread.
    LAST_ERROR
        .try_with(|last| last.try_borrow().map(|last| last.as_ptr()))
        .ok()
        .and_then(Result::ok)
        .unwrap_or(CStr::as_ptr(c""))
}

/// Frees a text.
///
/// # Safety
/// 1. `text` is null, or was returned by a call of this library that requires it to be freed here,
///    and has not been freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_text_free(text: *mut c_char) {
    if !text.is_null() {
        // SAFETY: 1. The text came from `CString::into_raw`, and is freed once.
        drop(unsafe { CString::from_raw(text) });
    }
}
