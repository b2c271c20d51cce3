//! The door: what every call from C passes, both ways.
//!
//! A panic ends here as [`Status::Panic`]. The process's panic hook, which would print it, is asked
//! only for panics of other code: the text of one in here is for [`aq_last_error`].
#![expect(unsafe_code, reason = "exports functions to C")]

use crate::status::{Failure, Status, aq_status};
use std::{
    cell::{Cell, RefCell},
    ffi::{CStr, CString, c_char},
    mem::ManuallyDrop,
    panic::{self, AssertUnwindSafe},
    sync::Once,
};

/// The interface's major version: raised when something that was there changes or goes.
pub const AQ_VERSION_MAJOR: u32 = 0;
/// The interface's minor version: raised when something is added.
pub const AQ_VERSION_MINOR: u32 = 3;

thread_local! {
    /// Calls that this thread is in. Const and without a destructor, so that it is there at any time of a thread's life.
    static INSIDE: Cell<u32> = const { Cell::new(0) };
    /// What the last panic in here said.
    static PANIC: RefCell<String> = const { RefCell::new(String::new()) };
    /// The text of this thread's last failure.
    static LAST: RefCell<CString> = RefCell::default();
}

pub(crate) type Answer<T = ()> = Result<T, Failure>;

/// Runs a call's work and answers with its code.
#[inline(always)]
pub(crate) fn enter(work: impl FnOnce() -> Answer) -> aq_status {
    enter_with(|| work().map(|()| Status::Ok))
}

/// The same, for work with more than one good end.
#[inline(always)]
pub(crate) fn enter_with(work: impl FnOnce() -> Answer<Status>) -> aq_status {
    INSIDE.set(INSIDE.get() + 1);
    // What a panic leaves half done lies behind locks that count a poisoned value as a value, or is
    // this call's own.
    let ended = panic::catch_unwind(AssertUnwindSafe(work));
    INSIDE.set(INSIDE.get() - 1);
    match ended {
        Ok(Ok(status)) => status as aq_status,
        Ok(Err(failure)) => tell(failure),
        Err(payload) => tell_panic(payload),
    }
}

#[cold]
fn tell(failure: Failure) -> aq_status {
    let (status, text) = failure.into_parts();
    // A thread that is ending keeps no text.
    let _ = LAST.try_with(|last| {
        if let Ok(mut last) = last.try_borrow_mut() {
            *last = CString::new(text.replace('\0', " ")).unwrap_or_default();
        }
    });
    status as aq_status
}

#[cold]
fn tell_panic(payload: Box<dyn std::any::Any + Send>) -> aq_status {
    // Dropping it runs code of whoever panicked, which may do so again.
    let _left = panic::catch_unwind(AssertUnwindSafe(|| drop(payload))).map_err(ManuallyDrop::new);
    let said =
        PANIC.try_with(|said| said.try_borrow_mut().map(|mut said| std::mem::take(&mut *said)));
    let said = said.ok().and_then(Result::ok).unwrap_or_default();
    tell(Failure::new(Status::Panic, format!("a bug of the library: {said}")))
}

/// Keeps the process's hook from printing what [`enter`] will answer with. Once for the process;
/// the hook that was there is asked for all other panics.
pub(crate) fn keep_panics_quiet() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let before = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            if INSIDE.get() == 0 {
                return before(info);
            }
            let _ = PANIC.try_with(|said| {
                if let Ok(mut said) = said.try_borrow_mut() {
                    *said = info.to_string();
                }
            });
        }));
    });
}

/// Writes an answer where the caller wants it.
///
/// # Safety
/// 1. `to` is null, or points to a `T` that the caller may write.
pub(crate) unsafe fn put<T>(to: *mut T, value: T, name: &'static str) -> Answer {
    if to.is_null() {
        return Err(null(name));
    }
    // SAFETY: 1. not null, and the caller's.
    unsafe { to.write(value) };
    Ok(())
}

/// Writes an answer that the caller may do without.
///
/// # Safety
/// 1. As [`put`].
pub(crate) unsafe fn put_if_wanted<T>(to: *mut T, value: T) {
    if !to.is_null() {
        // SAFETY: 1. not null, and the caller's.
        unsafe { to.write(value) };
    }
}

/// Whether an answer can be written, asked before anything is done for it.
#[inline]
pub(crate) fn wanted<T>(to: *mut T, name: &'static str) -> Answer {
    if to.is_null() { Err(null(name)) } else { Ok(()) }
}

#[cold]
pub(crate) fn null(name: &'static str) -> Failure {
    Failure::new(Status::Null, format!("{name} is null"))
}

/// A text of the caller's.
///
/// # Safety
/// 1. `text` is null, or points to bytes that end with a zero and stay as they are for `'a`.
pub(crate) unsafe fn text_of<'a>(text: *const c_char, name: &'static str) -> Answer<&'a CStr> {
    if text.is_null() {
        return Err(null(name));
    }
    // SAFETY: 1. the caller's.
    Ok(unsafe { CStr::from_ptr(text) })
}

/// A struct of the caller's: how many bytes of it both sides know.
///
/// # Safety
/// 1. `at` points to a `size_t`, the first field of the caller's struct.
pub(crate) unsafe fn size_of_theirs(
    at: *const usize,
    ours: usize,
    name: &'static str,
) -> Answer<usize> {
    // SAFETY: 1. the caller's.
    let size = unsafe { at.read() };
    if size < size_of::<usize>() {
        let text = format!("{name}->size is {size}; set it to sizeof({name})");
        return Err(Failure::new(Status::Version, text));
    }
    Ok(size.min(ours))
}

/// Fills a struct of the caller's as far as it goes, and says in its first field how far that is.
///
/// # Safety
/// 1. `to` is null, or points to a struct that begins with its size in bytes, which the caller may
///    write whole.
/// 2. `T` is `repr(C)`, begins with a `usize`, and has no padding.
pub(crate) unsafe fn fill<T>(to: *mut T, mut value: T, name: &'static str) -> Answer {
    wanted(to, name)?;
    // SAFETY: 1. the struct begins with its size.
    let size = unsafe { size_of_theirs(to.cast(), size_of::<T>(), name) }?;
    let from = &raw mut value;
    // SAFETY: 1. 2. both begin with a `usize`. 3. no more bytes than either has. 4. `value` is this
    // function's own, so they do not overlap.
    unsafe {
        from.cast::<usize>().write(size);
        std::ptr::copy_nonoverlapping(from.cast::<u8>(), to.cast::<u8>(), size);
    }
    Ok(())
}

/// A text for the caller, who gives it back to [`aq_text_free`].
pub(crate) fn text(text: &str) -> *mut c_char {
    CString::new(text.replace('\0', " ")).unwrap_or_default().into_raw()
}

/// The version of the library that is loaded, major in the upper and minor in the lower 16 bits.
#[unsafe(no_mangle)]
pub extern "C" fn aq_version() -> u32 {
    AQ_VERSION_MAJOR << 16 | AQ_VERSION_MINOR
}

/// A status's name.
#[unsafe(no_mangle)]
pub extern "C" fn aq_status_name(status: aq_status) -> *const c_char {
    let known = Status::ALL.iter().find(|known| **known as aq_status == status);
    known.map_or(c"unknown status", |known| known.name()).as_ptr()
}

/// Why this thread's last failing call failed.
#[unsafe(no_mangle)]
pub extern "C" fn aq_last_error() -> *const c_char {
    // The text stays where it is until the next failure of this thread.
    LAST.try_with(|last| last.try_borrow().map(|last| last.as_ptr()))
        .ok()
        .and_then(Result::ok)
        .unwrap_or(CStr::as_ptr(c""))
}

/// Gives a text back.
///
/// # Safety
/// 1. `text` is null, or came from a call of this library that says so, and has not been given
///    back.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_text_free(text: *mut c_char) {
    if !text.is_null() {
        // SAFETY: 1. from `CString::into_raw`, and given back once.
        drop(unsafe { CString::from_raw(text) });
    }
}
