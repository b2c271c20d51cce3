//! Waits for a stream, across captures.

use aquifer_core::{MemoryError, Result};
use aquifer_stream::Timeline;
use std::{thread, time::Duration};

/// Interval of the checks whether a capture has ended.
const CAPTURE_PAUSE: Duration = Duration::from_micros(100);

/// Waits until no work that was queued on a stream runs any more, with every method of the driver.
/// For callers that can keep the memory of that work. Blocks, also while a capture is open on the
/// stream, since no wait is possible before it ends.
///
/// # Errors
/// As [`Timeline::settle`]. [`MemoryError::Capturing`] if a capture was seen and has ended: the
/// queued work may have become part of it, and may never have run.
pub(super) fn synchronize(timeline: &Timeline) -> Result<()> {
    retry_after_captures(timeline, Timeline::settle)
}

/// Waits as [`synchronize`] does, for callers that cannot keep the memory: does not return while
/// work may run. See [`Timeline::settle_or_abort`].
///
/// # Errors
/// As [`synchronize`]. No work runs any more.
pub(super) fn synchronize_or_abort(timeline: &Timeline) -> Result<()> {
    retry_after_captures(timeline, Timeline::settle_or_abort)
}

fn retry_after_captures(
    timeline: &Timeline,
    synchronize: fn(&Timeline) -> Result<()>,
) -> Result<()> {
    let mut seen = Ok(());
    loop {
        match synchronize(timeline) {
            Ok(()) => return seen,
            Err(capturing @ MemoryError::Capturing { .. }) => seen = Err(capturing),
            refused => return refused,
        }
        thread::sleep(CAPTURE_PAUSE);
    }
}
