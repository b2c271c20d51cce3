//! Waits until no work that was queued on a stream runs any more.
//!
//! A short transfer is a copy and a wait, and the wait takes most of the time. There are two kinds
//! of wait: `cuStreamSynchronize`, and a word of pinned memory that the device writes. Which one is
//! faster depends on the machine. So the first waits of a stager alternate between both kinds, and
//! the kind with the lowest minimum is used from then on. They alternate as the Thue–Morse sequence
//! does, so that no periodic pattern of the program can assign all longer transfers to one kind.
#![expect(unsafe_code, reason = "lends the device a word of a slot")]

use super::{lane::Slot, synchronize::SynchronizeFn};
use aquifer_core::{MemoryError, Result};
use aquifer_stream::Timeline;
use std::{
    sync::atomic::{AtomicU32, AtomicU64, Ordering},
    time::Instant,
};

/// How a thread waits for a transfer that it makes itself.
///
/// See [`StagerConfig`](crate::StagerConfig) for an example.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default, Debug)]
pub enum ShortWait {
    /// The faster kind, measured in the first 128 waits, which alternate.
    #[default]
    Auto,
    /// Waits for the stream (`cuStreamSynchronize`).
    Stream,
    /// Waits for a word of pinned memory that the device writes (`cuStreamWriteValue32`). After
    /// some tens of microseconds it waits for the stream instead.
    Word,
}

/// Number of waits that alternate for the measurement.
const TRIALS: u32 = 128;

/// How a stager waits for short transfers.
pub(super) struct ShortWaits {
    configured: ShortWait,
    trials: AtomicU32,
    /// The shortest wait so far, in nanoseconds.
    by_stream: AtomicU64,
    by_word: AtomicU64,
}

impl ShortWaits {
    pub(super) fn new(configured: ShortWait) -> Self {
        let [by_stream, by_word] = [const { AtomicU64::new(u64::MAX) }; 2];
        Self { configured, trials: AtomicU32::new(0), by_stream, by_word }
    }

    /// Returns whether the next wait is part of the measurement.
    fn is_trial(&self) -> bool {
        self.configured == ShortWait::Auto && self.trials.load(Ordering::Relaxed) < TRIALS
    }

    /// Returns whether the next wait may be by a word. Outside the measurement, the next wait then
    /// is by a word.
    pub(super) fn use_word(&self) -> bool {
        match self.configured {
            ShortWait::Stream => false,
            ShortWait::Word => true,
            ShortWait::Auto => {
                self.is_trial()
                    || self.by_word.load(Ordering::Relaxed)
                        <= self.by_stream.load(Ordering::Relaxed)
            }
        }
    }

    /// Waits as `fallback` ([`synchronize`](super::synchronize::synchronize) or
    /// [`synchronize_or_abort`](super::synchronize::synchronize_or_abort)) does, with the faster
    /// kind of wait. A wait by a word needs a slot that carries nothing.
    ///
    /// # Errors
    /// As `fallback`. The slot is busy as well. It stays busy forever if the stream was capturing,
    /// because the graph may write it.
    pub(super) fn wait(
        &self,
        word: Option<&mut Slot>,
        on: &Timeline,
        fallback: SynchronizeFn,
    ) -> Result<()> {
        let Some(word) = word else { return fallback(on) };
        let trial = self.is_trial();
        let by_word = if trial {
            self.trials.fetch_add(1, Ordering::Relaxed).count_ones().is_multiple_of(2)
        } else {
            self.use_word()
        };
        let start = trial.then(Instant::now);
        if by_word { synchronize_by_word(word, on, fallback) } else { fallback(on) }?;
        if let Some(start) = start {
            let shortest = if by_word { &self.by_word } else { &self.by_stream };
            shortest.fetch_min(start.elapsed().as_nanos() as u64, Ordering::Relaxed);
        }
        Ok(())
    }
}

/// Waits as `fallback` does, by a word in a slot.
fn synchronize_by_word(slot: &mut Slot, on: &Timeline, fallback: SynchronizeFn) -> Result<()> {
    // SAFETY: 1. a slot consists of pages, and this thread has exclusive access to it.
    let word = unsafe { AtomicU32::from_ptr(slot.start().cast().as_ptr()) };
    // SAFETY: 1. the pool guarantees that this is pinned memory of the driver, and the caller owns
    // it. After an error the slot is returned only when the stream's work is known to be done, and
    // never if a graph may use it.
    match unsafe { on.synchronize_by(word) } {
        Ok(()) => Ok(()),
        Err(capturing @ MemoryError::Capturing { .. }) => fallback(on).and(Err(capturing)),
        Err(_) => fallback(on),
    }
}
