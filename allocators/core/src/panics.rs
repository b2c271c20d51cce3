//! Code of others, called where nothing may unwind.

use std::{
    mem::ManuallyDrop,
    panic::{AssertUnwindSafe, catch_unwind},
};

/// Calls code of others. `None` if it has panicked.
///
/// For hooks, wakers, sources and destructors that a program hands in: a panic of theirs must not
/// skip what the caller still has to do. What the code has left half done is its own.
///
/// ```
/// use aquifer_core::panics::contain;
/// assert_eq!(contain(|| 7), Some(7));
/// ```
pub fn contain<R>(work: impl FnOnce() -> R) -> Option<R> {
    match catch_unwind(AssertUnwindSafe(work)) {
        Ok(answer) => Some(answer),
        Err(panic) => {
            // What was thrown may throw again when it goes; what is thrown then stays.
            if let Err(again) = catch_unwind(AssertUnwindSafe(move || drop(panic))) {
                let _kept = ManuallyDrop::new(again);
            }
            None
        }
    }
}

/// Something of others whose drop does not unwind.
///
/// ```
/// use aquifer_core::panics::Contained;
/// drop(Contained::new(vec![1, 2, 3]));
/// ```
#[derive(Debug)]
pub struct Contained<T>(Option<T>);

impl<T> Contained<T> {
    /// Keeps `thing` until this is dropped.
    pub fn new(thing: T) -> Self {
        Self(Some(thing))
    }
}

impl<T> Drop for Contained<T> {
    fn drop(&mut self) {
        let thing = self.0.take();
        contain(move || drop(thing));
    }
}
