//! Thread numbers, the thread's current magazines, and whether the thread is inside a pool.
//!
//! A thread that allocates gets a small number, which is the index of its magazines in all pools,
//! and returns it when it ends. The next new thread takes over the number and the contents of the
//! magazines. So short-lived threads do not start with empty magazines, nor queue for the lock.
//!
//! The end of a thread is detected by a destructor of a key of the C library
//! (`pthread_key_create`). It runs after the destructors of Rust's thread-locals, which can
//! therefore still use the magazines. It also allocates nothing from a global allocator that may be
//! served by a pool. A thread that allocates after it does so without magazines.
//!
//! A child of a fork inherits the metadata of magazines without their memory. So its thread clears
//! its magazines (`pthread_atfork`), and reaches the pool cores instead, which compare the process.
#![expect(unsafe_code, reason = "makes a key of the C library's threads")]

use super::magazine::Magazine;
use crate::kernel::is_forked_child;
use nix::libc;
use std::{
    cell::Cell,
    ffi::c_void,
    ptr,
    sync::{Mutex, MutexGuard, OnceLock, PoisonError},
};

/// Maximum number of threads with magazines at a time. Others take the lock.
pub(super) const THREADS: usize = 1024;

/// No number has been requested yet.
const UNASSIGNED: u32 = u32::MAX;
/// The thread gets no number: it is ending, or there are too many threads.
const UNAVAILABLE: u32 = UNASSIGNED - 1;

/// Number of cached magazines of a thread. Other magazines are looked up on the slow path.
const CACHED: usize = 4;

struct ThreadState {
    inside: Cell<bool>,
    number: Cell<u32>,
    /// By generation modulo the length, the magazine that was looked up last. The magazine holds
    /// its generation itself. `None` while the thread is inside a pool, so that a lookup implies
    /// that it is not.
    magazines: [Cell<Option<&'static Magazine>>; CACHED],
}

thread_local! {
    // Const and without a destructor, so that an allocator can read it at any time in the life of a
    // thread.
    static STATE: ThreadState = const {
        ThreadState {
            inside: Cell::new(false),
            number: Cell::new(UNASSIGNED),
            magazines: [const { Cell::new(None) }; CACHED]
        }
    };
}

/// Returns the cached magazine of this thread for the generation. It may serve another pool.
/// Returns `None` while the thread is inside a pool. Takes a reference, so that the value need not
/// be saved where access to thread-locals is a function call.
#[inline(always)]
pub(super) fn magazine(generation: &u64) -> Option<&'static Magazine> {
    STATE.with(|state| state.magazines[*generation as usize % CACHED].get())
}

/// Caches this thread's magazine for the pool of this generation.
pub(super) fn set_magazine(generation: u64, magazine: &'static Magazine) {
    STATE.with(|state| state.magazines[generation as usize % CACHED].set(Some(magazine)));
}

/// Returns whether this thread is inside a pool.
#[inline]
pub(super) fn is_inside_pool() -> bool {
    STATE.with(|state| state.inside.get())
}

/// While this guard lives, the thread is inside a pool, and pools refuse its allocations (see the
/// caveats of [`pool`](super)).
pub(super) struct InsidePool {
    /// The thread's cached magazines.
    cached: [Option<&'static Magazine>; CACHED],
}

impl InsidePool {
    /// Marks the thread as inside a pool. Returns `None` if it is already.
    #[inline]
    pub(super) fn enter() -> Option<Self> {
        // Only the outermost call returns a guard, because the drop of an inner one would end the
        // state.
        STATE.with(|state| {
            let was = state.inside.replace(true);
            (!was).then(|| Self { cached: state.magazines.each_ref().map(Cell::take) })
        })
    }
}

impl Drop for InsidePool {
    #[inline]
    fn drop(&mut self) {
        STATE.with(|state| {
            // The flag is clear in a child that was forked in the meantime, which has no magazines.
            if state.inside.replace(false) {
                state
                    .magazines
                    .iter()
                    .zip(self.cached)
                    .for_each(|(place, magazine)| place.set(magazine));
            }
        });
    }
}

/// State of all threads.
struct ThreadNumbers {
    /// Numbers of threads that have ended.
    free: Vec<u32>,
    /// The lowest number that was never used.
    next: u32,
}

static NUMBERS: Mutex<ThreadNumbers> = Mutex::new(ThreadNumbers { free: Vec::new(), next: 0 });

fn numbers() -> MutexGuard<'static, ThreadNumbers> {
    NUMBERS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the number of this thread, and assigns one if possible.
pub(super) fn number() -> Option<usize> {
    let set = |number| STATE.with(|state| state.number.set(number));
    let known = STATE.with(|state| state.number.get());
    if known != UNASSIGNED {
        return (known < UNAVAILABLE).then_some(known as usize);
    }
    // Allocations from here on must not use the pool.
    set(UNAVAILABLE);
    let _inside = InsidePool::enter();
    let number = assign_number();
    set(number.unwrap_or(UNAVAILABLE));
    number.map(|number| number as usize)
}

fn assign_number() -> Option<u32> {
    let key = (*key())?;
    let mut all = numbers();
    let number = match all.free.pop() {
        Some(number) => number,
        None if (all.next as usize) < THREADS => {
            all.next += 1;
            all.next - 1
        }
        None => return None,
    };
    drop(all);
    // SAFETY: 1. the key was created and is never deleted. 2. the value is a number that is never
    // dereferenced.
    let stored =
        unsafe { libc::pthread_setspecific(key, ptr::without_provenance(number as usize + 1)) };
    if stored == 0 {
        return Some(number);
    }
    numbers().free.push(number);
    None
}

/// Returns the key whose destructor reports the end of a thread. Returns `None` if there are too
/// many keys, or if the fork handler cannot be installed.
fn key() -> &'static Option<libc::pthread_key_t> {
    static KEY: OnceLock<Option<libc::pthread_key_t>> = OnceLock::new();
    KEY.get_or_init(|| {
        let mut key = 0;
        // SAFETY: 1. the key is written to a place of that type. 2. `ended` is valid for the whole
        // life of the program.
        let made = unsafe { libc::pthread_key_create(&raw mut key, Some(ended)) };
        // SAFETY: 1. `forked` may run in a child of a process with threads: it only writes to its
        // own thread-locals.
        (made == 0 && unsafe { libc::pthread_atfork(None, None, Some(forked)) } == 0).then_some(key)
    })
}

/// Called by the C library in the only thread of a forked child.
unsafe extern "C" fn forked() {
    STATE.with(|state| {
        state.inside.set(false);
        state.magazines.iter().for_each(|magazine| magazine.set(None));
    });
}

/// Called by the C library in a thread that ends, with the value of its key.
extern "C" fn ended(value: *mut c_void) {
    let Some(number) = value.addr().checked_sub(1) else { return };
    STATE.with(|state| {
        state.number.set(UNAVAILABLE);
        state.magazines.iter().for_each(|magazine| magazine.set(None));
    });
    // In a child of a fork, a thread that does not exist there may hold the lock.
    if !is_forked_child() {
        let _inside = InsidePool::enter();
        numbers().free.push(number as u32);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thread_stays_inside_the_pool_until_the_outermost_guard_is_dropped() {
        let first = InsidePool::enter();
        assert!(first.is_some() && InsidePool::enter().is_none());
        assert!(is_inside_pool(), "the inner guard must not end it");
        drop(first);
        assert!(!is_inside_pool());
    }

    #[test]
    fn cached_magazines_are_hidden_inside_the_pool() {
        let own: &'static Magazine = Box::leak(Box::new(Magazine::new(0)));
        set_magazine(7, own);
        let first = InsidePool::enter();
        assert!(magazine(&7).is_none());
        drop(InsidePool::enter());
        assert!(magazine(&7).is_none(), "the inner guard must not end it");
        drop(first);
        assert!(magazine(&7).is_some_and(|found| ptr::eq(found, own)));
    }
}
