//! Who asked for memory: the innermost functions of the program that are not the driver's or the
//! runtime's, and the Python functions that called them where the thread holds the interpreter's lock.
#![expect(unsafe_code, reason = "walks the stack, and calls functions of the program's libraries")]

use aquifer_core::Tag;
use nix::libc;
use std::{
    cell::Cell,
    collections::HashMap,
    ffi::{CStr, c_char, c_int, c_void},
    fmt::Write,
    mem,
    ptr::null_mut,
    sync::{LazyLock, Mutex, OnceLock, PoisonError},
};

/// How many frames of the stack are read.
const DEPTH: usize = 32;
/// How many functions of native code are named.
const NAMED: usize = 6;
/// How many functions of Python are named.
const PYTHON_NAMED: usize = 6;
/// The most characters of one name.
const NAME: usize = 96;
/// Files whose functions are left out: the driver, its runtime, and this library.
const LEFT_OUT: [&str; 3] = ["libcuda.so", "libcudart", "libaquifer"];

unsafe extern "C" {
    fn backtrace(frames: *mut *mut c_void, most: c_int) -> c_int;
}

thread_local! {
    /// Whether this thread is looking: a function of the program's libraries may take memory.
    static LOOKS: Cell<bool> = const { Cell::new(false) };
}

/// Returns the tag of a request: the driver's function, and who called it.
pub(crate) fn tag(by: &'static str) -> Tag {
    if LOOKS.replace(true) {
        return Tag::named(by);
    }
    let tag = find(by);
    LOOKS.set(false);
    tag
}

fn find(by: &'static str) -> Tag {
    /// Stacks that were seen, with their text.
    type Seen = Mutex<HashMap<(usize, [usize; DEPTH]), String>>;
    static SEEN: LazyLock<Seen> = LazyLock::new(Mutex::default);
    let mut frames = [null_mut(); DEPTH];
    // SAFETY: 1. Room for as many frames.
    let count = unsafe { backtrace(frames.as_mut_ptr(), DEPTH as c_int) }.max(0) as usize;
    let key = (by.as_ptr() as usize, frames.map(|frame| frame as usize));
    let seen = SEEN.lock().unwrap_or_else(PoisonError::into_inner).get(&key).cloned();
    let native = seen.unwrap_or_else(|| {
        let native = native(by, &frames[..count.min(DEPTH)]);
        SEEN.lock().unwrap_or_else(PoisonError::into_inner).insert(key, native.clone());
        native
    });
    match python() {
        Some(python) => Tag::named(&format!("{native} < {python}")),
        None => Tag::named(&native),
    }
}

/// Names the functions of a stack, the innermost first.
fn native(by: &str, frames: &[*mut c_void]) -> String {
    let mut text = by.to_owned();
    let mut named = 0;
    for &frame in frames {
        // SAFETY: 1. An all-zero value is valid.
        let mut found: libc::Dl_info = unsafe { mem::zeroed() };
        // SAFETY: 1. Any address may be asked for, and the result is a local.
        if unsafe { libc::dladdr(frame, &raw mut found) } == 0 || found.dli_fname.is_null() {
            continue;
        }
        // SAFETY: 1. The linker's text, which stays while the library is loaded.
        let file = unsafe { CStr::from_ptr(found.dli_fname) }.to_string_lossy();
        let file = file.rsplit('/').next().unwrap_or_default();
        if LEFT_OUT.iter().any(|name| file.starts_with(name)) || file.starts_with("ld-linux") {
            continue;
        }
        // Frames of an interpreter say nothing of the program: its own functions follow.
        if file.starts_with("libpython") || file.starts_with("python") {
            break;
        }
        let name = if found.dli_sname.is_null() {
            let offset = (frame as usize).wrapping_sub(found.dli_fbase as usize);
            format!("{file}+{offset:#x}")
        } else {
            // SAFETY: 1. As above.
            demangled(unsafe { CStr::from_ptr(found.dli_sname) })
        };
        let end = name.char_indices().nth(NAME).map_or(name.len(), |(end, _)| end);
        // Writing to a string cannot fail.
        let _ = write!(text, " < {}", &name[..end]);
        named += 1;
        if named == NAMED {
            break;
        }
    }
    text
}

/// Returns the function with this name in any library of the program.
fn program_symbol(name: &CStr) -> Option<*mut c_void> {
    // SAFETY: 1. A text that ends with a zero byte.
    let found = unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) };
    (!found.is_null()).then_some(found)
}

/// Returns the name of a C++ function as it was written, without its parameters, if the program has
/// the C++ library.
fn demangled(name: &CStr) -> String {
    type Demangle =
        unsafe extern "C" fn(*const c_char, *mut c_char, *mut usize, *mut c_int) -> *mut c_char;
    static DEMANGLE: OnceLock<Option<usize>> = OnceLock::new();
    let plain = name.to_string_lossy();
    let found =
        *DEMANGLE.get_or_init(|| program_symbol(c"__cxa_demangle").map(|found| found as usize));
    let Some(demangle) = found.filter(|_| plain.starts_with("_Z")) else {
        return plain.into_owned();
    };
    // SAFETY: 1. The type that the C++ ABI declares for this name.
    let demangle = unsafe { mem::transmute::<usize, Demangle>(demangle) };
    // SAFETY: 1. A text that ends with a zero byte. It allocates the result.
    let result = unsafe { demangle(name.as_ptr(), null_mut(), null_mut(), null_mut()) };
    if result.is_null() {
        return plain.into_owned();
    }
    // SAFETY: 1. The result is a text.
    let text = unsafe { CStr::from_ptr(result) }.to_string_lossy().into_owned();
    // SAFETY: 1. The result was allocated by malloc.
    unsafe { libc::free(result.cast()) };
    text.split('(').next().unwrap_or_default().to_owned()
}

macro_rules! python_functions {
    ($( $field:ident = $symbol:literal ($($argument:ty),*) -> $result:ty; )+) => {
        /// The functions of the interpreter that are used: all are in Python 3.9 and later.
        struct Python {
            $( $field: unsafe extern "C" fn($($argument),*) -> $result, )+
        }

        impl Python {
            fn find() -> Option<Self> {
                Some(Self { $(
                    $field: {
                        let found = program_symbol($symbol)?;
                        // SAFETY: 1. The type that Python's headers declare for this name.
                        unsafe {
                            mem::transmute::<*mut c_void, unsafe extern "C" fn($($argument),*) -> $result>(found)
                        }
                    },
                )+ })
            }
        }
    };
}

python_functions! {
    is_initialized = c"Py_IsInitialized" () -> c_int;
    holds_lock = c"PyGILState_Check" () -> c_int;
    frame = c"PyEval_GetFrame" () -> *mut c_void;
    back = c"PyFrame_GetBack" (*mut c_void) -> *mut c_void;
    code = c"PyFrame_GetCode" (*mut c_void) -> *mut c_void;
    line = c"PyFrame_GetLineNumber" (*mut c_void) -> c_int;
    attribute = c"PyObject_GetAttrString" (*mut c_void, *const c_char) -> *mut c_void;
    utf8 = c"PyUnicode_AsUTF8" (*mut c_void) -> *const c_char;
    end = c"Py_DecRef" (*mut c_void) -> ();
}

impl Python {
    /// Returns an attribute of a code object as text.
    ///
    /// # Safety
    /// 1. The thread holds the interpreter's lock, and `code` is a code object.
    unsafe fn text(&self, code: *mut c_void, name: &CStr) -> Option<String> {
        // SAFETY: 1. Guaranteed by the caller. The attributes of code objects exist, so no exception
        // is set.
        let value = unsafe { (self.attribute)(code, name.as_ptr()) };
        if value.is_null() {
            return None;
        }
        // SAFETY: 1. The attribute is a `str`, whose text lives as long as it does.
        let text = unsafe { (self.utf8)(value) };
        let text = if text.is_null() {
            None
        } else {
            // SAFETY: 1. The text ends with a zero byte.
            Some(unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned())
        };
        // SAFETY: 1. The reference is owned here.
        unsafe { (self.end)(value) };
        text
    }
}

/// Names the Python functions of the calling thread, the innermost first, if it holds the lock of the
/// interpreter: native code that has released it is not asked.
fn python() -> Option<String> {
    static PYTHON: OnceLock<Option<Python>> = OnceLock::new();
    let python = PYTHON.get_or_init(Python::find).as_ref()?;
    // SAFETY: 1. Both may be called by any thread.
    if unsafe { (python.is_initialized)() == 0 || (python.holds_lock)() != 1 } {
        return None;
    }
    let mut text = String::new();
    // SAFETY: 1. The thread holds the lock, as was just checked. The frame is borrowed.
    let mut frame = unsafe { (python.frame)() };
    let mut owned = false;
    for _ in 0..PYTHON_NAMED {
        if frame.is_null() {
            break;
        }
        // SAFETY: 1. The thread holds the lock, and the frame lives: it is running, or owned here.
        unsafe {
            let (code, line) = ((python.code)(frame), (python.line)(frame));
            let name = python.text(code, c"co_name").unwrap_or_default();
            let path = python.text(code, c"co_filename").unwrap_or_default();
            (python.end)(code);
            let path = path.rsplit('/').next().unwrap_or_default();
            let separator = if text.is_empty() { "" } else { " < " };
            // Writing to a string cannot fail.
            let _ = write!(text, "{separator}{path}:{line} {name}");
            let back = (python.back)(frame);
            if owned {
                (python.end)(frame);
            }
            (frame, owned) = (back, true);
        }
    }
    if owned && !frame.is_null() {
        // SAFETY: 1. As above.
        unsafe { (python.end)(frame) };
    }
    (!text.is_empty()).then_some(text)
}
