//! Which thread this is, and whether it is at work for a pool.
//!
//! A thread that allocates gets a small number, by which pools find its magazines, and gives it back with what is in
//! them when it ends. The end is learnt from a key of the C library's (`pthread_key_create`): its destructors run after
//! those of Rust's thread-locals, so that these find their magazines still, and nothing is allocated for it from a
//! global allocator that may be at work for us. A thread that allocates later still does without magazines.
#![expect(unsafe_code, reason = "makes a key of the C library's threads")]

use super::home::Home;
use nix::libc;
use std::{
    cell::Cell,
    ffi::c_void,
    ptr,
    sync::{Mutex, MutexGuard, OnceLock, PoisonError},
};

/// Threads with magazines at one time; others go by the lock.
pub(super) const THREADS: usize = 1024;

/// Not asked for a number yet.
const NEW: u32 = u32::MAX >> 1;
/// Never to get one: at its end, or one too many.
const NONE: u32 = NEW - 1;
/// Set while the thread is at work for a pool.
const AT_WORK: u32 = 1 << 31;

thread_local! {
    // Const and without a destructor, so that an allocator may read it at any time of a thread's life.
    static HERE: Cell<u32> = const { Cell::new(NEW) };
}

/// This thread's number; [`THREADS`] or more if it has none, or is at work for a pool.
#[inline(always)]
pub(super) fn here() -> usize {
    HERE.get() as usize
}

/// Whether this thread is at work for a pool.
#[inline]
pub(super) fn is_at_work() -> bool {
    HERE.get() & AT_WORK != 0
}

/// While it lives, this thread is at work for a pool, and pools refuse its allocations: see the module's surprises.
pub(super) struct AtWork(());

impl AtWork {
    /// `None` if the thread is at work for a pool already.
    #[inline]
    pub(super) fn begin() -> Option<Self> {
        let here = HERE.get();
        HERE.set(here | AT_WORK);
        (here & AT_WORK == 0).then_some(Self(()))
    }
}

impl Drop for AtWork {
    #[inline]
    fn drop(&mut self) {
        HERE.set(HERE.get() & !AT_WORK);
    }
}

/// What all threads and shells share.
struct Register {
    /// Numbers of threads that have ended.
    free: Vec<u32>,
    /// The first number that nobody has had.
    next: u32,
    /// Every shell there is.
    homes: Vec<&'static Home>,
}

static REGISTER: Mutex<Register> = Mutex::new(Register { free: Vec::new(), next: 0, homes: Vec::new() });

fn register() -> MutexGuard<'static, Register> {
    REGISTER.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Makes a shell known to threads that end.
pub(super) fn know(home: &'static Home) {
    let _at_work = AtWork::begin();
    register().homes.push(home);
}

/// Every shell there is.
fn homes() -> Vec<&'static Home> {
    let _at_work = AtWork::begin();
    register().homes.clone()
}

/// The number of this thread, which gets one if it has none and one is to be had.
#[cold]
pub(super) fn number() -> Option<usize> {
    let at_work = HERE.get() & AT_WORK;
    let here = HERE.get() & !AT_WORK;
    if here != NEW {
        return (here < NONE).then_some(here as usize);
    }
    // Whatever is allocated from here on is not for the pool.
    HERE.set(NONE | AT_WORK);
    let number = take_number();
    HERE.set(number.unwrap_or(NONE) | at_work);
    number.map(|number| number as usize)
}

fn take_number() -> Option<u32> {
    let key = (*key())?;
    let mut all = register();
    let number = match all.free.pop() {
        Some(number) => number,
        None if (all.next as usize) < THREADS => {
            all.next += 1;
            all.next - 1
        }
        None => return None,
    };
    drop(all);
    // SAFETY: 1. the key was made and is never deleted. 2. the value is a number and no address that anybody follows.
    let noted = unsafe { libc::pthread_setspecific(key, ptr::without_provenance(number as usize + 1)) };
    if noted == 0 {
        return Some(number);
    }
    register().free.push(number);
    None
}

/// The key whose destructor tells of a thread's end; `None` where there are too many.
fn key() -> &'static Option<libc::pthread_key_t> {
    static KEY: OnceLock<Option<libc::pthread_key_t>> = OnceLock::new();
    KEY.get_or_init(|| {
        let mut key = 0;
        // SAFETY: 1. the key is written to a place of that type. 2. `ended` is there as long as the program is.
        let made = unsafe { libc::pthread_key_create(&raw mut key, Some(ended)) };
        (made == 0).then_some(key)
    })
}

/// The C library calls it in a thread that ends, with what was noted.
extern "C" fn ended(value: *mut c_void) {
    let Some(number) = value.addr().checked_sub(1) else { return };
    HERE.set(NONE);
    for home in homes() {
        home.leave(number);
    }
    let _at_work = AtWork::begin();
    register().free.push(number as u32);
}
