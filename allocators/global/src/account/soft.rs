//! The soft cap: nothing is refused, but somebody is told.
//!
//! ```text
//!   bytes │        told: exceeded                 told: no more
//!     cap ├╌╌╌╌╌╌╌╌╌╌╌╱▔▔╲╌╌╱▔▔▔╲╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌
//!     7/8 ├╌╌╌╌╌╌╌╌╌╱╌╌╌╌╌╲╱╌╌╌╌╌╲╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌
//!         └────────╱───────────────╲──────────────────────► time
//! ```
//!
//! An allocator must not run anybody's code: its caller may hold any lock, and be anywhere. So the
//! call that crosses the line only leaves word and wakes a thread, which runs the hooks: outside of
//! every allocation, one after another, and never within one another, whatever they allocate.

use super::{CHARGED, stats};
use std::{
    fmt, io,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc, Mutex, OnceLock, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::{self, Thread},
};

static CAP: AtomicU64 = AtomicU64::new(u64::MAX);
static EXCEEDED: AtomicBool = AtomicBool::new(false);
/// How often the line was crossed upwards.
static CROSSINGS: AtomicU64 = AtomicU64::new(0);

/// What a hook is told.
///
/// Its example is that of [`on_soft_cap`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct SoftCap {
    /// Whether more is charged than the cap allows; if not, it has fallen to seven eighths of it.
    pub exceeded: bool,
    /// Bytes in live blocks, as the hook is called.
    pub live: u64,
    /// The soft cap.
    pub cap: u64,
}

type Hook = dyn Fn(SoftCap) + Send + Sync;

static HOOKS: Mutex<Vec<Arc<Hook>>> = Mutex::new(Vec::new());
/// The thread that runs the hooks, once there is one.
static TELLER: OnceLock<Thread> = OnceLock::new();

/// Where it counts as fallen.
fn low(cap: u64) -> u64 {
    cap - cap / 8
}

/// More is charged than before, now `charged`.
#[inline]
pub(super) fn risen(charged: u64) {
    if charged > CAP.load(Ordering::Relaxed) {
        exceeded();
    }
}

/// Less is charged than before, now `charged`.
#[inline]
pub(super) fn fallen(charged: u64) {
    if EXCEEDED.load(Ordering::Relaxed) && charged <= low(CAP.load(Ordering::Relaxed)) {
        relaxed();
    }
}

#[cold]
fn exceeded() {
    if !EXCEEDED.swap(true, Ordering::Relaxed) {
        CROSSINGS.fetch_add(1, Ordering::Relaxed);
        wake();
    }
}

#[cold]
fn relaxed() {
    if EXCEEDED.swap(false, Ordering::Relaxed) {
        wake();
    }
}

/// A futex call at most: no lock, and no memory.
fn wake() {
    if let Some(teller) = TELLER.get() {
        teller.unpark();
    }
}

/// Sets the bytes above which hooks are told ([`on_soft_cap`]); `u64::MAX` lifts it. Says whether
/// more is charged already, of which hooks are told too.
///
/// Nothing is refused. What is compared are the live bytes and what threads hold as change, so it
/// may be crossed early, by 128 KiB for each thread at most, and never late. It counts as fallen at
/// seven eighths, so that hooks are not called for each block around the line.
pub fn set_soft_cap(bytes: u64) -> bool {
    CAP.store(bytes, Ordering::Relaxed);
    let charged = CHARGED.load(Ordering::Relaxed);
    risen(charged);
    fallen(charged);
    EXCEEDED.load(Ordering::Relaxed)
}

/// The soft cap, in bytes; `u64::MAX` if there is none.
///
/// Its example is that of [`on_soft_cap`].
#[must_use]
pub fn soft_cap() -> u64 {
    CAP.load(Ordering::Relaxed)
}

/// Whether the soft cap is exceeded, for who asks instead of being told.
///
/// Its example is that of [`on_soft_cap`].
#[must_use]
pub fn is_soft_cap_exceeded() -> bool {
    EXCEEDED.load(Ordering::Relaxed)
}

/// Has `hook` called whenever the soft cap is exceeded, and when it no longer is, for the life of
/// the process.
///
/// Hooks run on a thread of their own, `aquifer-soft-cap`, which the first call starts: one after
/// another, in their order, never inside an allocation and never inside each other, soon after the
/// line was crossed but not at that instant. They may allocate and free as they like. Each is told
/// in turn that the cap is exceeded and that it no longer is, of quick changes once; one that is
/// added while the cap is exceeded may be told of the next time only. One that panics is called
/// again the next time. A forked child has no such thread.
///
/// # Errors
/// The system's, if the thread cannot be started; the hook is not kept then.
///
/// ```
/// use aquifer_global as global;
/// use std::sync::mpsc;
/// #[global_allocator]
/// static GLOBAL: global::Global = global::Global::new();
///
/// let (tell, told) = mpsc::channel();
/// global::on_soft_cap(move |soft| drop(tell.send(soft.exceeded)))?;
/// global::set_soft_cap(global::stats().live + (1 << 20));
/// let cache = vec![0u8; 4 << 20];
/// assert_eq!(told.recv(), Ok(true)); // time to let go of caches
/// drop(cache);
/// assert_eq!(told.recv(), Ok(false));
/// # Ok::<(), std::io::Error>(())
/// ```
pub fn on_soft_cap(hook: impl Fn(SoftCap) + Send + Sync + 'static) -> io::Result<()> {
    let hook: Arc<Hook> = Arc::new(hook);
    let mut hooks = HOOKS.lock().unwrap_or_else(PoisonError::into_inner);
    // Under the lock, so that there is one thread.
    if TELLER.get().is_none() {
        let teller = thread::Builder::new().name("aquifer-soft-cap".into()).spawn(tell)?;
        let _ = TELLER.set(teller.thread().clone());
    }
    hooks.push(hook);
    drop(hooks);
    // The thread may have looked before there was anybody to wake.
    wake();
    Ok(())
}

/// Runs the hooks, for ever.
fn tell() {
    let (mut crossings, mut told) = (CROSSINGS.load(Ordering::Relaxed), false);
    loop {
        // Before the state is read, so that what changes later wakes it again.
        let (now, up) = (CROSSINGS.load(Ordering::Relaxed), EXCEEDED.load(Ordering::Relaxed));
        if (up || now != crossings) && !told {
            call(true);
            told = true;
        } else if !up && told {
            call(false);
            told = false;
        } else {
            crossings = now;
            thread::park();
            continue;
        }
        crossings = now;
    }
}

fn call(exceeded: bool) {
    let hooks = HOOKS.lock().unwrap_or_else(PoisonError::into_inner).clone();
    for hook in hooks {
        let soft = SoftCap { exceeded, live: stats().live, cap: soft_cap() };
        if let Err(payload) = catch_unwind(AssertUnwindSafe(|| hook(soft))) {
            // Its drop could unwind in its turn.
            Box::leak(payload);
        }
    }
}

impl fmt::Display for SoftCap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (live, cap) = (aquifer_core::Bytes(self.live), aquifer_core::Bytes(self.cap));
        let what = if self.exceeded { "exceeds" } else { "is well below" };
        write!(f, "what is held, {live}, {what} the soft cap of {cap}")
    }
}
