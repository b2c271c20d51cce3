//! Whether this process publishes, its file, and what happens to both at forks and at the exit.
//!
//! ```text
//!   unset ──start──▶ published ──disable──▶ off
//!     │                  │ fork, in the child
//!     │ off, or refused  ▼
//!     └────────▶ off   forked ──resume──▶ published (a file of its own)
//! ```
//!
//! The file is created under its final name, locked before its magic is written, and has its blocks
//! from the beginning, so that no store to it can fail.
#![expect(unsafe_code, reason = "installs fork handlers, and closes a file after a fork")]

use crate::{
    error::StatusError,
    folder::{self, StatusSetting, VARIABLE},
    layout::{FILE_BYTES, MAGIC, SUFFIX, VERSION, header},
    reader::{ProcessStatus, StatusFolder, file},
    region::{Region, lines_used},
    slot,
    state::{FORKED, GENERATION, OFF, PUBLISHED, STATE, UNSET, now_ns},
    text::{cut, write_text},
};
use aquifer_core::{MemoryError, Result};
use nix::{fcntl::posix_fallocate, libc};
use std::{
    env, fs,
    io::{self, Write},
    mem::ManuallyDrop,
    os::{fd::IntoRawFd, unix::fs::OpenOptionsExt},
    path::{Path, PathBuf},
    process, ptr,
    sync::{
        OnceLock,
        atomic::{AtomicBool, AtomicI32, AtomicPtr, AtomicU32, Ordering},
    },
    thread,
    time::Duration,
};

/// Taken while the state changes, and by forks.
static CHANGING: AtomicBool = AtomicBool::new(false);
/// The open file, whose lock tells that the process lives, or -1.
static FILE: AtomicI32 = AtomicI32::new(-1);
/// The path of the file.
static PATH: AtomicPtr<CreatedFile> = AtomicPtr::new(ptr::null_mut());
/// The last file that was created, also if it has been removed.
static CREATED: AtomicPtr<CreatedFile> = AtomicPtr::new(ptr::null_mut());

/// A file that was created. Never freed, and found from [`CREATED`], so that leak checkers do not
/// report it.
struct CreatedFile {
    path: PathBuf,
    _before: Option<&'static CreatedFile>,
}
/// The process that created the file.
static CREATOR: AtomicU32 = AtomicU32::new(0);

/// Files of dead processes are swept by the next process once they are older than this.
const SWEPT_AFTER: Duration = Duration::from_secs(3600);

/// Publishes the figures of this process from now on, unless `AQUIFER_STATUS` is `off` or
/// [`disable`] was called. The first pool calls it. Any failure is reported once on standard error
/// and changes nothing else.
///
/// # Errors
/// [`MemoryError::BadSetting`] if `AQUIFER_STATUS` is neither a path nor `off`.
pub fn start() -> Result<()> {
    match STATE.load(Ordering::Acquire) {
        // Reserved here, so that no cache has to do it under a lock.
        UNSET => _ = Region::get(),
        FORKED => {
            resume();
            return Ok(());
        }
        _ => return Ok(()),
    }
    let folder = match StatusSetting::read() {
        Ok(StatusSetting::Off) => None,
        Ok(StatusSetting::Path(path)) => Some(path),
        Ok(StatusSetting::Default) => Some(folder::default_folder()),
        Err(value) => {
            let expected = "off, or the path of a folder with a /";
            return Err(MemoryError::BadSetting { name: VARIABLE, value, expected });
        }
    };
    let _changing = Changing::enter();
    if STATE.load(Ordering::Acquire) == UNSET {
        let folder = folder.filter(|_| !cfg!(miri));
        publish_in(folder.filter(|_| install_handlers()));
    }
    Ok(())
}

/// Publishes the figures of a forked child, whose parent publishes. Returns whether it begins to
/// publish now. Slow paths call it, with no lock held. Costs one load in any other process.
#[inline]
pub fn resume() -> bool {
    STATE.load(Ordering::Acquire) == FORKED && resume_forked()
}

#[cold]
fn resume_forked() -> bool {
    // Another thread is doing it.
    let Some(_changing) = Changing::try_enter() else { return false };
    if STATE.load(Ordering::Acquire) == FORKED {
        publish_in(match StatusSetting::read() {
            Ok(StatusSetting::Path(path)) => Some(path),
            Ok(StatusSetting::Default) => Some(folder::default_folder()),
            Ok(StatusSetting::Off) | Err(_) => None,
        });
    }
    crate::is_published()
}

/// Ends publication in this process and its future children, and removes the file.
///
/// ```
/// use aquifer::{Runtime, status};
/// let rt = Runtime::builder().or_sim_quietly().build()?;       // its first pool publishes them
/// status::disable();
/// assert!(!status::is_published());
/// # Ok::<(), aquifer::MemoryError>(())
/// ```
pub fn disable() {
    let _changing = Changing::enter();
    if STATE.swap(OFF, Ordering::AcqRel) == PUBLISHED {
        remove_file();
        // If the kernel refuses, stores go to a file that has no name.
        let _refused = Region::get().map(Region::detach);
        close_file();
    }
}

/// Returns the path of the file that this process publishes its figures in.
pub(crate) fn own_path() -> Option<&'static Path> {
    if STATE.load(Ordering::Acquire) != PUBLISHED {
        return None;
    }
    // SAFETY: 1. A pointer that is not null was leaked by `create`, and no mutable reference to it
    // exists.
    unsafe { PATH.load(Ordering::Acquire).as_ref() }.map(|created| created.path.as_path())
}

/// Sets the state that the creation of the file leads to. The caller has [`CHANGING`].
fn publish_in(folder: Option<PathBuf>) {
    let state = match folder.map(|folder| create(&folder)) {
        None => OFF,
        Some(Ok(())) => PUBLISHED,
        Some(Err(error)) => {
            // A failed write cannot be reported anywhere.
            let error = error.to_string();
            let error = error.escape_debug();
            let _ = writeln!(io::stderr().lock(), "aquifer: no status is published: {error}");
            OFF
        }
    };
    STATE.store(state, Ordering::Release);
}

/// Creates the file of this process and maps it.
fn create(folder: &Path) -> std::result::Result<(), StatusError> {
    let refused = |path: &Path| {
        let path = path.to_owned();
        move |error: io::Error| StatusError::System { path, error }
    };
    let region = Region::get()
        .ok_or_else(|| refused(folder)(io::Error::from(io::ErrorKind::OutOfMemory)))?;
    folder::create(folder)?;
    if let Ok(folder) = StatusFolder::at(folder) {
        let _swept = folder.sweep_older_than(SWEPT_AFTER);
    }
    let started = now_ns();
    let path = folder.join(format!("{}-{started:x}{SUFFIX}", process::id()));
    let file = fs::OpenOptions::new()
        .read(true)
        .write(true)
        .create_new(true)
        .mode(0o600)
        .custom_flags(libc::O_NOFOLLOW)
        .open(&path)
        .map_err(refused(&path))?;
    let mapped = file
        .try_lock()
        .map_err(io::Error::from)
        .and_then(|()| posix_fallocate(&file, 0, FILE_BYTES as i64).map_err(io::Error::from))
        .and_then(|()| region.attach(&file));
    if let Err(error) = mapped {
        let _ = fs::remove_file(&path);
        return Err(refused(&path)(error));
    }
    write_header(region, started);
    FILE.store(file.into_raw_fd(), Ordering::Relaxed);
    // SAFETY: 1. A pointer that is not null was leaked below, and no mutable reference to it
    // exists.
    let _before = unsafe { CREATED.load(Ordering::Acquire).as_ref() };
    let created = ptr::from_mut(Box::leak(Box::new(CreatedFile { path, _before })));
    CREATED.store(created, Ordering::Release);
    PATH.store(created, Ordering::Release);
    CREATOR.store(process::id(), Ordering::Relaxed);
    Ok(())
}

fn write_header(region: &Region, started: u64) {
    let words = region.header();
    let set = |at: usize, value: u64| words[at].store(value, Ordering::Relaxed);
    set(header::VERSION, VERSION);
    set(header::PROCESS, u64::from(process::id()));
    set(header::STARTED, started);
    set(header::SLOTS_USED, slot::used() as u64);
    set(header::LINES_USED, lines_used() as u64);
    write_text(words, header::LIBRARY, cut(env!("CARGO_PKG_VERSION"), header::LIBRARY_BYTES));
    let command: Vec<String> =
        env::args_os().map(|argument| argument.to_string_lossy().into_owned()).collect();
    write_text(words, header::COMMAND, cut(&command.join(" "), header::COMMAND_BYTES));
    words[header::MAGIC].store(MAGIC, Ordering::Release);
}

fn remove_file() {
    let created = PATH.swap(ptr::null_mut(), Ordering::Acquire);
    if CREATOR.load(Ordering::Relaxed) != process::id() {
        return;
    }
    // SAFETY: 1. A pointer that is not null was leaked by `create`, and no mutable reference to it
    // exists.
    if let Some(created) = unsafe { created.as_ref() } {
        // A file that cannot be removed is swept once the lock is gone.
        let _ = fs::remove_file(&created.path);
    }
}

fn close_file() {
    let file = FILE.swap(-1, Ordering::Relaxed);
    if file >= 0 {
        // SAFETY: 1. `create` made this descriptor, and the swap has given it to this call only.
        unsafe { libc::close(file) };
    }
}

/// The right to change the state.
struct Changing;

impl Changing {
    fn try_enter() -> Option<Self> {
        (!CHANGING.swap(true, Ordering::Acquire)).then(|| Self)
    }

    /// Waits for the right. A change takes a few system calls.
    fn enter() -> Self {
        loop {
            if let Some(changing) = Self::try_enter() {
                return changing;
            }
            thread::yield_now();
        }
    }
}

impl Drop for Changing {
    fn drop(&mut self) {
        CHANGING.store(false, Ordering::Release);
    }
}

unsafe extern "C" {
    safe fn atexit(call: extern "C" fn()) -> i32;
}

/// Installs the handlers of forks and of the exit. Returns whether forks are handled: without that
/// nothing may be published.
fn install_handlers() -> bool {
    static INSTALLED: OnceLock<bool> = OnceLock::new();
    *INSTALLED.get_or_init(|| {
        // Without it the file stays, and is swept later.
        let _ = atexit(at_exit);
        // SAFETY: 1. All three are valid for the whole life of the program. `in_child` may run in a
        // child of a process with threads: it touches atomics and makes system calls that are safe
        // there.
        let installed =
            unsafe { libc::pthread_atfork(Some(before_fork), Some(in_parent), Some(in_child)) };
        installed == 0
    })
}

extern "C" fn at_exit() {
    if STATE.load(Ordering::Acquire) == PUBLISHED {
        remove_file();
    }
}

unsafe extern "C" fn before_fork() {
    let _until_the_other_handlers = ManuallyDrop::new(Changing::enter());
}

unsafe extern "C" fn in_parent() {
    drop(Changing);
}

/// Ends the publication of the parent's figures, before the child runs anything else.
unsafe extern "C" fn in_child() {
    GENERATION.fetch_add(1, Ordering::Relaxed);
    if STATE.load(Ordering::Relaxed) == PUBLISHED {
        // If the kernel refuses a mapping here, the child is as short of memory as after any failed
        // fork, and its figures appear among its parent's.
        let _refused = Region::get().map(Region::detach);
        // The lock stays, since the parent has the file open.
        close_file();
        PATH.store(ptr::null_mut(), Ordering::Relaxed);
        STATE.store(FORKED, Ordering::Release);
    }
    drop(Changing);
}

impl ProcessStatus {
    /// Returns the figures of this process: all of its pools, as other processes see them. Returns
    /// `None` if it publishes nothing: before its first pool, and where publication is off.
    ///
    /// Reads the process's own file with a few system calls, and stops no thread. No allocator
    /// depends on the result.
    ///
    /// ```
    /// use aquifer_status::ProcessStatus;
    /// if let Some(own) = ProcessStatus::current()? {
    ///     println!("{} bytes in {} pools", own.total().live, own.pools.len());
    /// }
    /// # Ok::<(), aquifer_status::StatusError>(())
    /// ```
    ///
    /// # Errors
    /// [`StatusError::System`] if the file cannot be read; [`StatusError::BadFile`] if another
    /// process has damaged it.
    pub fn current() -> Result<Option<Self>, StatusError> {
        let Some(path) = own_path() else { return Ok(None) };
        match file::read(path) {
            Ok(status) => Ok(Some(status)),
            // Another thread has ended publication meanwhile.
            Err(_) if own_path().is_none() => Ok(None),
            Err(error) => Err(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Changing;

    #[test]
    fn a_thread_that_does_not_get_the_right_leaves_it_to_its_holder() {
        let changing = Changing::enter();
        for _ in 0..3 {
            assert!(Changing::try_enter().is_none());
        }
        drop(changing);
    }
}
