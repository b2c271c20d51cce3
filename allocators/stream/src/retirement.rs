//! Who may still call the driver for a handle whose owner is about to destroy it.
//!
//! Threads that call are counted in the word that says whether they may: so whoever retires the
//! handle, and sets the word, sees each of them or is seen by it. Two words would need every access
//! in the one order of sequential consistency.

use crate::sync::{
    atomic::{AtomicU32, Ordering},
    yield_now,
};

/// The part of the word that counts threads in a call.
const COUNT: u32 = (1 << 30) - 1;
/// The handle is good.
const LIVE: u32 = 0;
/// Somebody waits for the last of the stream's work; the handle is still good.
const ENDING: u32 = 1 << 30;
/// All work is done, and the handle is gone or about to go.
const RETIRED: u32 = 2 << 30;
/// The device is lost, and with it all that was queued.
const LOST: u32 = 3 << 30;

/// Why a handle may not be called for any more.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Ended {
    /// Its owner has taken it back.
    Retired,
    /// Its device is lost.
    Lost,
}

/// Whether a handle is good, and how many threads are in a call for it.
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
    /// One of the four above, and the count. The former does not go back, but for a retirement
    /// that fails.
    word: AtomicU32,
}

impl Default for Retirement {
    fn default() -> Self {
        Self::new()
    }
}

impl Retirement {
    /// A good handle.
    #[must_use]
    pub fn new() -> Self {
        Self { word: AtomicU32::new(LIVE) }
    }

    /// Announces calls for the handle, which stays good while the answer lives. Waits while a
    /// retirement is under way.
    ///
    /// # Errors
    /// Why there is nothing to call for.
    pub fn enter(&self) -> Result<Calling<'_>, Ended> {
        loop {
            // Acquire: after a retirement that failed.
            let before = self.word.fetch_add(1, Ordering::Acquire);
            let calling = Calling(self);
            match before & !COUNT {
                LIVE => return Ok(calling),
                ENDING => {
                    drop(calling);
                    // Whoever retires waits until nobody is counted, so this does not count itself
                    // again and again.
                    while self.word.load(Ordering::Relaxed) & !COUNT == ENDING {
                        yield_now();
                    }
                }
                LOST => return Err(Ended::Lost),
                _ => return Err(Ended::Retired),
            }
        }
    }

    /// Lets nobody in any more, waits until all who are in have left, and runs `last`, for which
    /// the handle is still good. If that fails, the handle is as it was. `None` if it had ended
    /// already, or ends meanwhile on another thread.
    pub fn end<T, E>(&self, last: impl FnOnce() -> Result<T, E>) -> Option<Result<T, E>> {
        loop {
            let word = self.word.load(Ordering::Acquire);
            match word & !COUNT {
                LIVE => {}
                ENDING => {
                    yield_now();
                    continue;
                }
                _ => return None,
            }
            let ending = ENDING | word & COUNT;
            if self.word.compare_exchange(word, ending, Ordering::AcqRel, Ordering::Relaxed).is_ok()
            {
                break;
            }
        }
        // Acquire: after the calls of those who have left. Whoever comes now leaves without a call.
        while self.word.load(Ordering::Acquire) & COUNT > 0 {
            yield_now();
        }
        let answer = last();
        let after = if answer.is_ok() { RETIRED } else { LIVE };
        // Only the state: threads that look in and leave are counted meanwhile.
        self.word.fetch_add(after.wrapping_sub(ENDING), Ordering::AcqRel);
        Some(answer)
    }

    /// The device is lost. One that is being retired, or has been, is left to that.
    pub fn lose(&self) {
        let mut word = self.word.load(Ordering::Relaxed);
        while word & !COUNT == LIVE {
            match self.word.compare_exchange(word, LOST | word, Ordering::AcqRel, Ordering::Relaxed)
            {
                Ok(_) => return,
                Err(now) => word = now,
            }
        }
    }

    /// Whether the handle is not to be called for any more.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.word.load(Ordering::Acquire) & !COUNT >= RETIRED
    }
}

/// A thread in a driver call for a handle: whoever retires the handle waits for it.
///
/// Its example is that of [`Retirement`].
#[derive(Debug)]
#[must_use = "the handle may go as soon as this is dropped"]
pub struct Calling<'a>(&'a Retirement);

impl Drop for Calling<'_> {
    fn drop(&mut self) {
        // Release: whoever retires the handle comes after the calls.
        self.0.word.fetch_sub(1, Ordering::Release);
    }
}
