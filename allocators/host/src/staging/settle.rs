//! Waiting until nothing that was queued on a stream runs any more.
//!
//! A short transfer is a copy and a wait, and most of it is the wait. There are two, and which is
//! shorter depends on the machine:
//!
//! | 4 KiB to the device, medians | `cuStreamSynchronize` | a word that the device writes |
//! |---|---|---|
//! | a host with one H200 and 16 processors | 7.7 µs | 6.9 µs |
//! | a host with two, joined by `NVLink`, and 32 | 6.6 µs | 7.1 µs |
//!
//! So the first waits of a stager take turns, and the shortest of each kind decides. In turns as
//! they are in the sequence of Thue and Morse, of which no rhythm of a program's own can give one
//! kind all the longer transfers.
#![expect(unsafe_code, reason = "lends the device a word of a slot")]

use super::lane::Slot;
use aquifer_core::{MemoryError, Result};
use aquifer_stream::Timeline;
use std::{
    sync::atomic::{AtomicU32, AtomicU64, Ordering},
    thread,
    time::{Duration, Instant},
};

/// How a thread waits for a transfer that it makes by itself.
///
/// Its example is that of [`StagerConfig`](crate::StagerConfig).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default, Debug)]
pub enum ShortWait {
    /// As the first 128 waits tell, which take turns.
    #[default]
    Auto,
    /// For the stream (`cuStreamSynchronize`).
    Stream,
    /// For a word of pinned memory that the device writes (`cuStreamWriteValue32`); after some tens
    /// of microseconds for the stream.
    Word,
}

/// Waits that take turns.
const TRIES: u32 = 128;

/// How long is waited between two looks whether a capture has ended.
const CAPTURE_PAUSE: Duration = Duration::from_micros(100);

/// How a stager waits for short transfers.
pub(super) struct Waits {
    said: ShortWait,
    tried: AtomicU32,
    /// The shortest so far, in nanoseconds.
    by_stream: AtomicU64,
    by_word: AtomicU64,
}

impl Waits {
    pub(super) fn new(said: ShortWait) -> Self {
        let [by_stream, by_word] = [const { AtomicU64::new(u64::MAX) }; 2];
        Self { said, tried: AtomicU32::new(0), by_stream, by_word }
    }

    /// Whether the next wait takes its turn.
    fn is_trial(&self) -> bool {
        self.said == ShortWait::Auto && self.tried.load(Ordering::Relaxed) < TRIES
    }

    /// Whether the next wait may be by a word; is by one, where it takes no turn.
    pub(super) fn want_word(&self) -> bool {
        match self.said {
            ShortWait::Stream => false,
            ShortWait::Word => true,
            ShortWait::Auto => {
                self.is_trial()
                    || self.by_word.load(Ordering::Relaxed)
                        <= self.by_stream.load(Ordering::Relaxed)
            }
        }
    }

    /// As `last` ([`settle`] or [`settle_or_abort`]), by whichever way is shorter. For the one by a
    /// word there must be a slot that carries nothing.
    ///
    /// # Errors
    /// As `last`. The slot is busy as well, and for ever if the stream captured: the graph may
    /// write it.
    pub(super) fn settle(
        &self,
        word: Option<&mut Slot>,
        on: &Timeline,
        last: Settle,
    ) -> Result<()> {
        let Some(word) = word else { return last(on) };
        let trial = self.is_trial();
        let by_word = if trial {
            self.tried.fetch_add(1, Ordering::Relaxed).count_ones().is_multiple_of(2)
        } else {
            self.want_word()
        };
        let begun = trial.then(Instant::now);
        if by_word { settle_by(word, on, last) } else { last(on) }?;
        if let Some(begun) = begun {
            let shortest = if by_word { &self.by_word } else { &self.by_stream };
            shortest.fetch_min(begun.elapsed().as_nanos() as u64, Ordering::Relaxed);
        }
        Ok(())
    }
}

/// A way to wait until nothing that was queued on a stream runs any more.
pub(super) type Settle = fn(&Timeline) -> Result<()>;

/// Waits until nothing that was queued on a stream runs any more, by every means that the driver
/// has, for callers that can hold back what that work touches. Blocks, also while a capture is open
/// on the stream: nothing can be waited for before.
///
/// # Errors
/// As [`Timeline::settle`]. [`MemoryError::Capturing`] when a capture has ended that was seen: what
/// was queued may have become a part of it, and never have run.
pub(super) fn settle(timeline: &Timeline) -> Result<()> {
    behind_captures(timeline, Timeline::settle)
}

/// As [`settle`], for callers that cannot: does not return while work may run, see
/// [`Timeline::settle_or_abort`].
///
/// # Errors
/// As [`settle`]. No work runs any more.
pub(super) fn settle_or_abort(timeline: &Timeline) -> Result<()> {
    behind_captures(timeline, Timeline::settle_or_abort)
}

fn behind_captures(timeline: &Timeline, settle: Settle) -> Result<()> {
    let mut seen = Ok(());
    loop {
        match settle(timeline) {
            Ok(()) => return seen,
            Err(capturing @ MemoryError::Capturing { .. }) => seen = Err(capturing),
            refused => return refused,
        }
        thread::sleep(CAPTURE_PAUSE);
    }
}

/// As `last`, by a word of a slot.
fn settle_by(slot: &mut Slot, on: &Timeline, last: Settle) -> Result<()> {
    // SAFETY: 1. a slot is of pages, and nobody else's.
    let word = unsafe { AtomicU32::from_ptr(slot.start().cast().as_ptr()) };
    // SAFETY: 1. pinned memory of the driver's, as its pool says, and the caller's; after an error
    // the slot goes back only when the stream's work is known to be done, and never if a graph may
    // have it.
    match unsafe { on.synchronize_by(word) } {
        Ok(()) => Ok(()),
        Err(capturing @ MemoryError::Capturing { .. }) => last(on).and(Err(capturing)),
        Err(_) => last(on),
    }
}
