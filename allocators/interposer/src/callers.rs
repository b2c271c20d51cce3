//! Who asked for memory: the innermost functions of the program that are not the driver's or the
//! runtime's, and the Python functions of the thread.
#![expect(unsafe_code, reason = "walks the stack, and calls functions of the program's libraries")]

use crate::guest::lock;
use aquifer_core::Tag;
use nix::libc;
use std::{
    cell::Cell,
    collections::HashMap,
    ffi::{CStr, c_char, c_int, c_void},
    fmt::Write,
    mem,
    ptr::null_mut,
    sync::{LazyLock, Mutex, OnceLock},
};

/// How many frames of the stack are read.
const DEPTH: usize = 32;
/// How many functions of native code are named.
const NAMED: usize = 6;
/// How many frames of Python are read, and how many functions are named.
const PYTHON_FRAMES: usize = 64;
const PYTHON_NAMED: usize = 6;
/// What paths of Python's libraries contain.
const LIBRARIES: [&str; 3] = ["/site-packages/", "/dist-packages/", "/lib/python3"];
/// The longest string of Python that is read.
const PYTHON_TEXT: usize = 512;
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
    let seen = lock(&SEEN).get(&key).cloned();
    let native = seen.unwrap_or_else(|| {
        let native = native(by, &frames[..count.min(DEPTH)]);
        lock(&SEEN).insert(key, native.clone());
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
        // A library that tells no names is named itself, once for all its frames.
        let name = if !found.dli_sname.is_null() {
            // SAFETY: 1. As above.
            demangled(unsafe { CStr::from_ptr(found.dli_sname) })
        } else if file.contains(".so") {
            file.to_owned()
        } else {
            format!("{file}+{:#x}", (frame as usize).wrapping_sub(found.dli_fbase as usize))
        };
        if text.ends_with(&name) {
            continue;
        }
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
    let plain = name.to_string_lossy();
    if !plain.starts_with("_Z") {
        return plain.into_owned();
    }
    // SAFETY: 1. A text that ends with a zero byte. Nothing is loaded.
    let library =
        unsafe { libc::dlopen(c"libstdc++.so.6".as_ptr(), libc::RTLD_NOLOAD | libc::RTLD_LAZY) };
    if library.is_null() {
        return plain.into_owned();
    }
    // SAFETY: 1. An open library, which the program keeps, and a text that ends with a zero byte.
    let demangle = unsafe { libc::dlsym(library, c"__cxa_demangle".as_ptr()) };
    if demangle.is_null() {
        return plain.into_owned();
    }
    // SAFETY: 1. The type that the C++ ABI declares for this name.
    let demangle = unsafe { mem::transmute::<*mut c_void, Demangle>(demangle) };
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

/// Where an interpreter of one minor version keeps what is read: distances in bytes within its
/// structures, from its headers.
struct Layout {
    /// From a thread's state to its frames, in two steps.
    frames: [usize; 2],
    /// In a frame.
    code: usize,
    previous: usize,
    instruction: usize,
    /// In a code object.
    first_line: usize,
    file: usize,
    name: usize,
    lines: usize,
    instructions: usize,
    /// From an ASCII string to its characters.
    characters: usize,
}

const LAYOUTS: [(&str, Layout); 2] = [
    (
        "3.11.",
        Layout {
            frames: [56, 8],
            code: 32,
            previous: 48,
            instruction: 56,
            first_line: 72,
            file: 112,
            name: 120,
            lines: 136,
            instructions: 184,
            characters: 48,
        },
    ),
    (
        "3.12.",
        Layout {
            frames: [56, 0],
            code: 0,
            previous: 8,
            instruction: 56,
            first_line: 68,
            file: 112,
            name: 120,
            lines: 136,
            instructions: 192,
            characters: 40,
        },
    ),
];

/// The program's interpreter.
struct Python {
    /// Returns the state of the calling thread, also where it does not hold the interpreter's
    /// lock.
    thread_state: unsafe extern "C" fn() -> *const c_void,
    layout: &'static Layout,
}

impl Python {
    fn find() -> Option<Self> {
        let version = program_symbol(c"Py_GetVersion")?;
        // SAFETY: 1. The type that Python's headers declare for this name.
        let version = unsafe {
            mem::transmute::<*mut c_void, unsafe extern "C" fn() -> *const c_char>(version)
        };
        // SAFETY: 1. May be called at any time, and returns a text that stays.
        let version = unsafe { CStr::from_ptr(version()) }.to_str().ok()?;
        let layout = LAYOUTS.iter().find(|(prefix, _)| version.starts_with(prefix));
        let state = program_symbol(c"PyGILState_GetThisThreadState")?;
        // SAFETY: 1. As above.
        let thread_state = unsafe {
            mem::transmute::<*mut c_void, unsafe extern "C" fn() -> *const c_void>(state)
        };
        Some(Self { thread_state, layout: layout.map(|(_, layout)| layout)? })
    }
}

/// Names the Python functions of the calling thread, the innermost first, with their lines.
///
/// Native code has mostly released the interpreter's lock, so nothing of the interpreter is called:
/// its frames are read as they lie in memory, which only this thread changes. The kernel reads, so
/// that a place that is not mapped ends the list and nothing else.
fn python() -> Option<String> {
    static PYTHON: OnceLock<Option<Python>> = OnceLock::new();
    let Python { thread_state, layout } = PYTHON.get_or_init(Python::find).as_ref()?;
    // SAFETY: 1. May be called by any thread.
    let state = unsafe { thread_state() } as usize;
    let mut frame = layout.frames.iter().try_fold(state, |at, distance| word(at, *distance))?;
    let (mut text, mut named) = (String::new(), 0);
    for _ in 0..PYTHON_FRAMES {
        if frame == 0 || named == PYTHON_NAMED {
            break;
        }
        let code = word(frame, layout.code)?;
        let attribute = |at: usize| ascii(word(code, at)?, layout.characters);
        if let (Some(path), Some(name)) = (attribute(layout.file), attribute(layout.name))
            && !name.starts_with("<interpreter")
            // Of libraries, only the function that was called last.
            && (named == 0 || !LIBRARIES.iter().any(|library| path.contains(library)))
        {
            let line = line_of(frame, code, layout)?;
            let file = path.rsplit('/').next().unwrap_or_default();
            let separator = if named == 0 { "" } else { " < " };
            // Writing to a string cannot fail.
            let _ = write!(text, "{separator}{file}:{line} {name}");
            named += 1;
        }
        frame = word(frame, layout.previous)?;
    }
    (named > 0).then_some(text)
}

/// Returns the line that a frame is at. Python's `Objects/locations.md` describes the table: each
/// entry has a kind, a number of instructions, and how far its line is from that of the entry
/// before.
fn line_of(frame: usize, code: usize, layout: &Layout) -> Option<i64> {
    /// From an object of bytes to its size, and to its contents.
    const SIZE: usize = 16;
    const CONTENTS: usize = 32;
    let instruction = word(frame, layout.instruction)?;
    let at = instruction.checked_sub(code + layout.instructions)?;
    let table = word(code, layout.lines)?;
    let mut bytes = vec![0; word(table, SIZE)?.min(1 << 16)];
    read(table + CONTENTS, &mut bytes)?;
    let mut line = i64::from(word(code, layout.first_line)? as u32);
    let (mut entries, mut end) = (bytes.into_iter().peekable(), 0);
    while let Some(head) = entries.next() {
        let mut number = || {
            let (mut value, mut shift) = (0u64, 0);
            for byte in entries.by_ref() {
                value |= u64::from(byte & 0x3f) << shift.min(58);
                shift += 6;
                if byte & 0x40 == 0 {
                    break;
                }
            }
            value as i64
        };
        match head >> 3 & 0xf {
            kind @ 10..=12 => line += i64::from(kind) - 10,
            13 | 14 => {
                let moved = number();
                line += if moved & 1 == 1 { -(moved >> 1) } else { moved >> 1 };
            }
            _ => {}
        }
        // What follows tells columns. The first byte of an entry has its highest bit set.
        while entries.next_if(|byte| byte & 0x80 == 0).is_some() {}
        end += 2 * (usize::from(head & 7) + 1);
        if at < end {
            break;
        }
    }
    Some(line)
}

/// Reads bytes of this process, or as many as are mapped.
fn read(address: usize, into: &mut [u8]) -> Option<()> {
    if address == 0 {
        return None;
    }
    let local = libc::iovec { iov_base: into.as_mut_ptr().cast(), iov_len: into.len() };
    let remote = libc::iovec { iov_base: address as *mut c_void, iov_len: into.len() };
    // SAFETY: 1. Writes to `into` only. The kernel checks the other address.
    let got = unsafe {
        libc::process_vm_readv(libc::getpid(), &raw const local, 1, &raw const remote, 1, 0)
    };
    (usize::try_from(got) == Ok(into.len())).then_some(())
}

fn word(address: usize, distance: usize) -> Option<usize> {
    let mut bytes = [0; 8];
    read(address.checked_add(distance).filter(|_| address != 0)?, &mut bytes)?;
    Some(usize::from_ne_bytes(bytes))
}

/// Reads an ASCII string of the interpreter's.
fn ascii(string: usize, characters: usize) -> Option<String> {
    const LENGTH: usize = 16;
    let mut bytes = vec![0; word(string, LENGTH)?.min(PYTHON_TEXT)];
    read(string + characters, &mut bytes)?;
    String::from_utf8(bytes)
        .ok()
        .filter(|text| text.chars().all(|c| c.is_ascii_graphic() || c == ' '))
}
