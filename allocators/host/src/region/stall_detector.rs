//! Detects when huge pages take longer than they are worth.
//!
//! If free memory is fragmented, the kernel compacts memory inside the populating call, at a
//! hundredth of the usual speed. But other machines are slow for every page, such as a virtual
//! machine whose memory grows on demand. So a slow piece only starts a test: the next piece uses
//! base pages. Times are CPU times, since wall-clock time includes other threads on a busy machine.
//!
//! ```text
//!   watching ── a piece is slow ──► suspected ── the next piece, in base pages ──► twice as fast? ── yes ──► base pages, to the end
//!       ▲                                                                                │
//!       └────────────────── no: only a still slower piece is suspected again ◄───────────┘
//! ```

use std::{
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

/// The kind of pages of a piece.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Pages {
    Huge,
    Base,
}

/// The stall detector of one region. It costs one comparison for each piece of megabytes.
#[derive(Default, Debug)]
pub(super) struct StallDetector {
    state: Mutex<State>,
}

#[derive(Clone, Copy, Debug)]
struct State {
    phase: Phase,
    /// Nanoseconds per byte of the fastest piece in huge pages.
    fastest: f64,
    /// A piece at or below this rate is never slow.
    patience: f64,
    /// Bytes that got base pages.
    base: u64,
}

#[derive(Clone, Copy, PartialEq, Debug)]
enum Phase {
    Watching,
    /// A piece was slow, with this many nanoseconds per byte. The next piece will use base pages.
    Suspected(f64),
    /// That piece is in progress.
    Trying(f64),
    Stalled,
}

impl Default for State {
    fn default() -> Self {
        Self { phase: Phase::Watching, fastest: f64::INFINITY, patience: QUICK, base: 0 }
    }
}

/// Nanoseconds per byte that are never slow. The usual rate of a thread is several times lower.
const QUICK: f64 = 1.0;
/// Nanoseconds per byte that are slow even for the first piece: 0.25 GB/s per thread.
const SLOW: f64 = 4.0;
/// A piece is slow if it takes this many times as long as the fastest piece.
const TIMES: f64 = 8.0;

impl StallDetector {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the kind of pages for the next piece.
    pub(super) fn next(&self, bytes: usize) -> Pages {
        let mut state = self.lock();
        match state.phase {
            Phase::Watching | Phase::Trying(_) => return Pages::Huge,
            Phase::Suspected(slow) => state.phase = Phase::Trying(slow),
            Phase::Stalled => {}
        }
        state.base += bytes as u64;
        Pages::Base
    }

    /// Records that a piece has been populated.
    pub(super) fn record(&self, pages: Pages, bytes: usize, took: Duration) {
        let rate = took.as_nanos() as f64 / bytes.max(1) as f64;
        let mut state = self.lock();
        match (pages, state.phase) {
            (Pages::Huge, Phase::Watching) => {
                let slow = rate > SLOW || rate > TIMES * state.fastest;
                state.fastest = state.fastest.min(rate);
                if slow && rate > state.patience {
                    state.phase = Phase::Suspected(rate);
                }
            }
            (Pages::Base, Phase::Trying(slow)) => {
                if rate * 2.0 < slow {
                    state.phase = Phase::Stalled;
                } else {
                    state.phase = Phase::Watching;
                    state.patience = slow * 4.0;
                }
            }
            _ => {}
        }
    }

    /// Returns the bytes in base pages, if a stall was detected.
    pub(super) fn stalled(&self) -> Option<u64> {
        let state = self.lock();
        (state.phase == Phase::Stalled).then_some(state.base)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PIECE: usize = 32 << 20;

    fn run(stall: &StallDetector, huge_ms: u64, base_ms: u64, pieces: usize) -> Vec<Pages> {
        let populate = |_| {
            let pages = stall.next(PIECE);
            let ms = if pages == Pages::Huge { huge_ms } else { base_ms };
            stall.record(pages, PIECE, Duration::from_millis(ms));
            pages
        };
        (0..pieces).map(populate).collect()
    }

    #[test]
    fn pieces_at_the_usual_rate_stay_huge() {
        let stall = StallDetector::default();
        assert!(run(&stall, 6, 10, 100).iter().all(|&pages| pages == Pages::Huge));
        assert!(
            run(&stall, 30, 10, 1).iter().all(|&pages| pages == Pages::Huge),
            "five times, not slow"
        );
        assert_eq!(stall.stalled(), None);
    }

    #[test]
    fn compaction_is_detected_and_later_pieces_get_base_pages() {
        let stall = StallDetector::default();
        run(&stall, 6, 10, 3);
        let late = run(&stall, 600, 10, 5);
        assert_eq!(late[0], Pages::Huge);
        assert!(late[1..].iter().all(|&pages| pages == Pages::Base), "{late:?}");
        assert_eq!(stall.stalled(), Some(4 * PIECE as u64));
    }

    #[test]
    fn machine_that_is_slow_for_all_pages_keeps_huge_pages() {
        let stall = StallDetector::default();
        let pages = run(&stall, 300, 280, 20);
        assert_eq!(pages.iter().filter(|&&pages| pages == Pages::Base).count(), 1, "one try");
        assert_eq!(stall.stalled(), None);
        assert_eq!(run(&stall, 5_000, 280, 3)[1..], [Pages::Base; 2], "until it gets worse by far");
    }

    #[test]
    fn concurrent_pieces_stay_huge_during_a_test_and_do_not_count() {
        let stall = StallDetector::default();
        stall.record(Pages::Huge, PIECE, Duration::from_secs(1));
        assert_eq!([stall.next(PIECE), stall.next(PIECE)], [Pages::Base, Pages::Huge]);
        stall.record(Pages::Huge, PIECE, Duration::from_millis(1));
        stall.record(Pages::Base, PIECE, Duration::from_millis(100));
        assert_eq!(stall.next(PIECE), Pages::Base);
    }
}
