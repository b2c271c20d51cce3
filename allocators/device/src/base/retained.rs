//! Values that are kept until the driver reports that it has released what needs them.

use std::{
    any::Any,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
};

/// A value that is kept until the driver reports the release.
struct Retained {
    /// Set by the driver's callback.
    released: Arc<AtomicBool>,
    value: Box<dyn Any + Send>,
}

/// For all pools, since what the driver keeps can outlive them.
static RETAINED: Mutex<Vec<Retained>> = Mutex::new(Vec::new());

fn retained() -> MutexGuard<'static, Vec<Retained>> {
    RETAINED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Keeps a value until a sweep finds `released` set.
pub(crate) fn retain(released: &Arc<AtomicBool>, value: Box<dyn Any + Send>) {
    retained().push(Retained { released: released.clone(), value });
}

/// Drops the values that the driver has released.
pub(crate) fn sweep() {
    let gone: Vec<_> =
        retained().extract_if(.., |entry| entry.released.load(Ordering::Acquire)).collect();
    gone.into_iter().for_each(|entry| drop(entry.value));
}
