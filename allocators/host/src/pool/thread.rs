//! Which thread this is, and whether it is at work for a pool.
//!
//! A thread that allocates gets a small number, by which pools find its magazines, and gives it
//! back when it ends. The next thread that begins takes it over with what is in them, so that
//! threads which come and go do not each begin with nothing, and not with a queue before the lock.
//! The end is learnt from a key of the C library's (`pthread_key_create`): its destructors run
//! after those of Rust's thread-locals, so that these find their magazines still, and nothing is
//! allocated for it from a global allocator that may be at work for us. A thread that allocates
//! later still does without magazines.
//!
//! A child of a fork has the books of magazines and not their memory, so the thread that goes on in
//! it forgets its own (`pthread_atfork`): from there on it meets the shells, which know whose they
//! are.
#![expect(unsafe_code, reason = "makes a key of the C library's threads")]

use super::magazine::Magazine;
use crate::kernel::{AcrossForks, Guard, Of};
use nix::libc;
use std::{cell::Cell, ffi::c_void, ptr, sync::OnceLock};

/// Threads with magazines at one time; others go by the lock.
pub(super) const THREADS: usize = 1024;

/// Not asked for a number yet.
const NEW: u32 = u32::MAX;
/// Never to get one: at its end, or one too many.
const NONE: u32 = NEW - 1;

/// Pools whose magazines a thread finds at once; others' are looked up under way to the lock.
const NEAR: usize = 4;

struct Here {
    at_work: Cell<bool>,
    number: Cell<u32>,
    /// By generation: the last one that was looked up. It says itself whom it serves. None while
    /// the thread is at work for a pool, so that whoever finds one need not ask for that.
    magazines: [Cell<Option<&'static Magazine>>; NEAR],
}

thread_local! {
    // Const and without a destructor, so that an allocator may read it at any time of a thread's life.
    static HERE: Here = const {
        Here { at_work: Cell::new(false), number: Cell::new(NEW), magazines: [const { Cell::new(None) }; NEAR] }
    };
}

/// A magazine of this thread's, that of the pool of this generation if it was looked up lately;
/// none while the thread is at work for a pool. By reference, so that it need not be kept where
/// thread-locals are found by a call.
#[inline(always)]
pub(super) fn magazine(generation: &u64) -> Option<&'static Magazine> {
    HERE.with(|here| here.magazines[*generation as usize % NEAR].get())
}

/// Notes which magazine this thread has for the pool of this generation.
pub(super) fn set_magazine(generation: u64, magazine: &'static Magazine) {
    HERE.with(|here| here.magazines[generation as usize % NEAR].set(Some(magazine)));
}

/// Whether this thread is at work for a pool.
#[inline]
pub(super) fn is_at_work() -> bool {
    HERE.with(|here| here.at_work.get())
}

/// While it lives, this thread is at work for a pool, and pools refuse its allocations: see the
/// module's surprises.
pub(super) struct AtWork {
    /// The thread's magazines.
    aside: [Option<&'static Magazine>; NEAR],
}

impl AtWork {
    /// `None` if the thread is at work for a pool already.
    #[inline]
    pub(super) fn begin() -> Option<Self> {
        // Made only where it is the first: the end of another would end the first one's work.
        HERE.with(|here| {
            let was = here.at_work.replace(true);
            (!was).then(|| Self { aside: here.magazines.each_ref().map(Cell::take) })
        })
    }
}

impl Drop for AtWork {
    #[inline]
    fn drop(&mut self) {
        HERE.with(|here| {
            // Not in a child of a fork meanwhile, which has forgotten them.
            if here.at_work.replace(false) {
                here.magazines
                    .iter()
                    .zip(self.aside)
                    .for_each(|(place, magazine)| place.set(magazine));
            }
        });
    }
}

/// What all threads share.
struct Register {
    /// Numbers of threads that have ended.
    free: Vec<u32>,
    /// The first number that nobody has had.
    next: u32,
}

static REGISTER: AcrossForks<Register> =
    AcrossForks::new(Of::Threads, Register { free: Vec::new(), next: 0 });

fn register() -> Guard<'static, Register> {
    REGISTER.lock()
}

/// The number of this thread, which gets one if it has none and one is to be had.
pub(super) fn number() -> Option<usize> {
    let set = |number| HERE.with(|here| here.number.set(number));
    let known = HERE.with(|here| here.number.get());
    if known != NEW {
        return (known < NONE).then_some(known as usize);
    }
    // Whatever is allocated from here on is not for the pool.
    set(NONE);
    let _at_work = AtWork::begin();
    let number = take_number();
    set(number.unwrap_or(NONE));
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
    // SAFETY: 1. the key was made and is never deleted. 2. the value is a number and no address
    // that anybody follows.
    let noted =
        unsafe { libc::pthread_setspecific(key, ptr::without_provenance(number as usize + 1)) };
    if noted == 0 {
        return Some(number);
    }
    register().free.push(number);
    None
}

/// The key whose destructor tells of a thread's end; `None` where there are too many, or where a
/// fork would not be told.
fn key() -> &'static Option<libc::pthread_key_t> {
    static KEY: OnceLock<Option<libc::pthread_key_t>> = OnceLock::new();
    KEY.get_or_init(|| {
        let mut key = 0;
        // SAFETY: 1. the key is written to a place of that type. 2. `ended` is there as long as the
        // program is.
        let made = unsafe { libc::pthread_key_create(&raw mut key, Some(ended)) };
        // SAFETY: 1. `forked` may run in a child of a process with threads: it writes to its own
        // thread-locals.
        (made == 0 && unsafe { libc::pthread_atfork(None, None, Some(forked)) } == 0).then_some(key)
    })
}

/// The C library calls it in a child, in the one thread that it has.
unsafe extern "C" fn forked() {
    HERE.with(|here| {
        here.at_work.set(false);
        here.magazines.iter().for_each(|magazine| magazine.set(None));
    });
}

/// The C library calls it in a thread that ends, with what was noted.
extern "C" fn ended(value: *mut c_void) {
    let Some(number) = value.addr().checked_sub(1) else { return };
    HERE.with(|here| {
        here.number.set(NONE);
        here.magazines.iter().for_each(|magazine| magazine.set(None));
    });
    let _at_work = AtWork::begin();
    register().free.push(number as u32);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_stays_at_work_until_the_first_to_say_so_is_done() {
        let first = AtWork::begin();
        assert!(first.is_some() && AtWork::begin().is_none());
        assert!(is_at_work(), "whoever came second has ended it");
        drop(first);
        assert!(!is_at_work());
    }

    #[test]
    fn a_thread_at_work_finds_no_magazine_and_its_own_again_afterwards() {
        let own: &'static Magazine = Box::leak(Box::new(Magazine::new(0)));
        set_magazine(7, own);
        let first = AtWork::begin();
        assert!(magazine(&7).is_none());
        drop(AtWork::begin());
        assert!(magazine(&7).is_none(), "whoever came second has ended it");
        drop(first);
        assert!(magazine(&7).is_some_and(|found| ptr::eq(found, own)));
    }
}
