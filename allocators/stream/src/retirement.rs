//! The state of a driver handle that its owner may destroy, and a count of threads in calls for it.
//!
//! State and count share one atomic word. So a thread that retires the handle either sees each
//! calling thread in the count, or that thread sees the new state. Two words would need
//! sequentially consistent access.

use crate::sync::{
    atomic::{AtomicU32, Ordering},
    yield_now,
};

/// The bits that count threads in a call.
const COUNT_MASK: u32 = (1 << 30) - 1;
/// The handle is valid.
const LIVE: u32 = 0;
/// A thread waits for the last work of the stream. The handle is still valid.
const ENDING: u32 = 1 << 30;
/// All work is complete, and the handle is destroyed or about to be.
const RETIRED: u32 = 2 << 30;
/// The device is lost, and all queued work with it.
const LOST: u32 = 3 << 30;

/// Why a handle may not be used any more.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Ended {
    /// Its owner has retired it.
    Retired,
    /// Its device is lost.
    Lost,
}

/// The state of a handle, and the number of threads in a driver call for it.
///
/// ```
/// use aquifer_stream::{Ended, Retirement};
/// let retirement = Retirement::new();
/// let calling = retirement.enter();
/// assert!(calling.is_ok());
/// drop(calling); // or `end` would wait for it
/// assert_eq!(retirement.end(|| Ok::<_, ()>(())), Some(Ok(())));
/// assert_eq!(retirement.enter().err(), Some(Ended::Retired));
/// ```
#[derive(Debug)]
pub struct Retirement {
    /// One of the four states above, and the count. The state never goes back, except after a
    /// retirement that failed.
    word: AtomicU32,
}

impl Default for Retirement {
    fn default() -> Self {
        Self::new()
    }
}

impl Retirement {
    /// Creates the state of a valid handle.
    #[must_use]
    pub fn new() -> Self {
        Self { word: AtomicU32::new(LIVE) }
    }

    /// Announces calls for the handle. It stays valid until the returned guard is dropped. Waits
    /// while a retirement is in progress.
    ///
    /// # Errors
    /// The reason why the handle may not be used.
    pub fn enter(&self) -> Result<Calling<'_>, Ended> {
        loop {
            // Acquire: orders this after a retirement that failed.
            let before = self.word.fetch_add(1, Ordering::Acquire);
            let calling = Calling(self);
            match before & !COUNT_MASK {
                LIVE => return Ok(calling),
                ENDING => {
                    drop(calling);
                    // The retiring thread waits for a count of zero, so this thread must not keep
                    // incrementing it.
                    while self.word.load(Ordering::Relaxed) & !COUNT_MASK == ENDING {
                        yield_now();
                    }
                }
                LOST => return Err(Ended::Lost),
                _ => return Err(Ended::Retired),
            }
        }
    }

    /// Refuses new calls, waits until all calls have ended, and runs `final_call`, for which the
    /// handle is still valid. If `final_call` fails, the handle is valid again. Returns `None` if
    /// the handle had already ended, or if another thread ended it first.
    pub fn end<T, E>(&self, final_call: impl FnOnce() -> Result<T, E>) -> Option<Result<T, E>> {
        loop {
            let word = self.word.load(Ordering::Acquire);
            match word & !COUNT_MASK {
                LIVE => {}
                ENDING => {
                    yield_now();
                    continue;
                }
                _ => return None,
            }
            let ending = ENDING | word & COUNT_MASK;
            if self.word.compare_exchange(word, ending, Ordering::AcqRel, Ordering::Relaxed).is_ok()
            {
                break;
            }
        }
        // Acquire: orders this after the calls that ended. A thread that enters now leaves without
        // a call.
        while self.word.load(Ordering::Acquire) & COUNT_MASK > 0 {
            yield_now();
        }
        let result = final_call();
        let after = if result.is_ok() { RETIRED } else { LIVE };
        // Changes only the state: threads that enter and leave change the count concurrently.
        self.word.fetch_add(after.wrapping_sub(ENDING), Ordering::AcqRel);
        Some(result)
    }

    /// Marks the device as lost. Has no effect on a handle that is retired or being retired.
    pub fn lose(&self) {
        let mut word = self.word.load(Ordering::Relaxed);
        while word & !COUNT_MASK == LIVE {
            match self.word.compare_exchange(word, LOST | word, Ordering::AcqRel, Ordering::Relaxed)
            {
                Ok(_) => return,
                Err(now) => word = now,
            }
        }
    }

    /// Returns whether the handle may not be used any more.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.word.load(Ordering::Acquire) & !COUNT_MASK >= RETIRED
    }
}

/// A guard for driver calls with a handle. Retiring the handle waits until it is dropped.
///
/// See [`Retirement`] for an example.
#[derive(Debug)]
#[must_use = "the handle may go as soon as this is dropped"]
pub struct Calling<'a>(&'a Retirement);

impl Drop for Calling<'_> {
    fn drop(&mut self) {
        // Release: orders a retirement after the calls.
        self.0.word.fetch_sub(1, Ordering::Release);
    }
}
