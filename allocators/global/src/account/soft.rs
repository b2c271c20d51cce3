//! The soft cap: it refuses no allocation, but hooks are called when it is exceeded.
//!
//! ```text
//!   bytes │        hook: exceeded                 hook: no more
//!     cap ├╌╌╌╌╌╌╌╌╌╌╌╱▔▔╲╌╌╱▔▔▔╲╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌
//!     7/8 ├╌╌╌╌╌╌╌╌╌╱╌╌╌╌╌╲╱╌╌╌╌╌╲╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌
//!         └────────╱───────────────╲──────────────────────► time
//! ```
//!
//! An allocator must not run foreign code, because its caller may hold any lock. So the call that
//! crosses the threshold only sets a flag and wakes a thread. That thread runs the hooks outside of
//! every allocation, one after another and never recursively, even if they allocate.

use super::stats;
use crate::{
    not_installed::Warning,
    slots::{
        charged::CHARGED,
        watermark::{CAP, CROSSINGS, EXCEEDED, HOOK_THREAD, on_decrease, on_increase, wake},
    },
};
use std::{
    fmt, io,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, Mutex, PoisonError, atomic::Ordering},
    thread,
};

/// The argument of a hook.
///
/// See [`on_soft_cap`] for an example.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct SoftCap {
    /// Whether the charged bytes exceed the cap. If not, they have fallen to seven eighths of it.
    pub exceeded: bool,
    /// Bytes in live blocks at the time of the call.
    pub live: u64,
    /// The soft cap in bytes.
    pub cap: u64,
}

type Hook = dyn Fn(SoftCap) + Send + Sync;

static HOOKS: Mutex<Vec<Arc<Hook>>> = Mutex::new(Vec::new());

/// Sets the soft cap in bytes, above which hooks are called ([`on_soft_cap`]). `u64::MAX` removes
/// it. Returns whether it is already exceeded, for which hooks are called too.
///
/// No allocation is refused. The cap is compared with live bytes plus the credit of all threads. So
/// it may be crossed early, by at most 128 KiB per thread, and never late. It counts as exceeded
/// until seven eighths of it are reached, so that hooks are not called for each block near the cap.
///
/// If [`Global`](crate::Global) is not the program's global allocator, only explicit allocations
/// from it count, and the first call prints a warning to standard error.
pub fn set_soft_cap(bytes: u64) -> bool {
    static WARNING: Warning = Warning::new("what other code allocates never exceeds a soft cap");
    if bytes != u64::MAX {
        WARNING.check_once();
    }
    CAP.store(bytes, Ordering::Relaxed);
    let charged = CHARGED.load(Ordering::Relaxed);
    on_increase(charged);
    on_decrease(charged);
    EXCEEDED.load(Ordering::Relaxed)
}

/// Returns the soft cap in bytes, or `u64::MAX` if there is none.
///
/// See [`on_soft_cap`] for an example.
#[must_use]
pub fn soft_cap() -> u64 {
    CAP.load(Ordering::Relaxed)
}

/// Returns whether the soft cap is exceeded, as an alternative to a hook.
///
/// See [`on_soft_cap`] for an example.
#[must_use]
pub fn is_soft_cap_exceeded() -> bool {
    EXCEEDED.load(Ordering::Relaxed)
}

/// Registers a hook for the life of the process. It is called when the soft cap is exceeded, and
/// when it no longer is.
///
/// The first call starts the thread `aquifer-soft-cap`, which runs all hooks.
///
/// - Hooks run one after another in the order of registration, never inside an allocation and never
///   recursively. They may allocate and free.
/// - They run soon after the crossing, but not synchronously.
/// - The two kinds of calls alternate. Quick changes may be merged into one.
/// - A hook that is registered while the cap is exceeded may be called only for the next crossing.
/// - A hook that panics is called again the next time.
/// - A forked child has no such thread.
///
/// # Errors
/// Those of the system, if the thread cannot be started. The hook is then not registered.
///
/// ```
/// use aquifer::{Global, global};
/// use std::sync::mpsc;
/// #[global_allocator]
/// static GLOBAL: Global = Global::new();
///
/// let (sender, receiver) = mpsc::channel();
/// global::on_soft_cap(move |soft| drop(sender.send(soft.exceeded)))?;
/// global::set_soft_cap(global::stats().live + (1 << 20));
/// let cache = vec![0u8; 4 << 20];
/// assert_eq!(receiver.recv(), Ok(true)); // time to release caches
/// drop(cache);
/// assert_eq!(receiver.recv(), Ok(false));
/// # Ok::<(), std::io::Error>(())
/// ```
pub fn on_soft_cap(hook: impl Fn(SoftCap) + Send + Sync + 'static) -> io::Result<()> {
    let hook: Arc<Hook> = Arc::new(hook);
    let mut hooks = HOOKS.lock().unwrap_or_else(PoisonError::into_inner);
    // Under the lock, so that only one thread is started.
    if HOOK_THREAD.get().is_none() {
        let thread = thread::Builder::new().name("aquifer-soft-cap".into()).spawn(run_hooks)?;
        let _ = HOOK_THREAD.set(thread.thread().clone());
    }
    hooks.push(hook);
    drop(hooks);
    // The cap may have been crossed before `HOOK_THREAD` was set, without a wake-up.
    wake();
    Ok(())
}

/// Runs the hooks forever.
fn run_hooks() {
    let (mut crossings, mut reported) = (CROSSINGS.load(Ordering::Relaxed), false);
    loop {
        // `CROSSINGS` is read first. A later change unparks the thread again.
        let (now, up) = (CROSSINGS.load(Ordering::Relaxed), EXCEEDED.load(Ordering::Relaxed));
        if (up || now != crossings) && !reported {
            call_hooks(true);
            reported = true;
        } else if !up && reported {
            call_hooks(false);
            reported = false;
        } else {
            crossings = now;
            thread::park();
            continue;
        }
        crossings = now;
    }
}

fn call_hooks(exceeded: bool) {
    let hooks = HOOKS.lock().unwrap_or_else(PoisonError::into_inner).clone();
    for hook in hooks {
        let soft = SoftCap { exceeded, live: stats().live, cap: soft_cap() };
        if let Err(payload) = catch_unwind(AssertUnwindSafe(|| hook(soft))) {
            // The drop of the payload could unwind too.
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
