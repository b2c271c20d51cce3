//! Containment of panics in foreign code, where an unwind is not allowed.

use std::{
    mem::ManuallyDrop,
    panic::{AssertUnwindSafe, catch_unwind},
};

/// Calls foreign code. Returns `None` if it panicked.
///
/// For hooks, wakers, sources and destructors of the program: their panic must not skip the rest of
/// the caller's work. State that the foreign code left inconsistent is its own responsibility.
///
/// ```
/// use aquifer_core::panics::contain;
/// assert_eq!(contain(|| 7), Some(7));
/// ```
pub fn contain<R>(work: impl FnOnce() -> R) -> Option<R> {
    match catch_unwind(AssertUnwindSafe(work)) {
        Ok(answer) => Some(answer),
        Err(panic) => {
            // The drop of the panic payload may panic too. That second payload is leaked.
            if let Err(second) = catch_unwind(AssertUnwindSafe(move || drop(panic))) {
                let _leaked = ManuallyDrop::new(second);
            }
            None
        }
    }
}

/// A foreign value whose drop does not unwind.
///
/// ```
/// use aquifer_core::panics::Contained;
/// drop(Contained::new(vec![1, 2, 3]));
/// ```
#[derive(Debug)]
pub struct Contained<T>(Option<T>);

impl<T> Contained<T> {
    /// Holds `value` until this is dropped.
    pub fn new(value: T) -> Self {
        Self(Some(value))
    }
}

impl<T> Drop for Contained<T> {
    fn drop(&mut self) {
        let value = self.0.take();
        contain(move || drop(value));
    }
}
