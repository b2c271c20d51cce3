//! Which work a block of graph memory is for.

use crate::base::dependencies::{StreamDeps, is_done_except};
use aquifer_stream::Timeline;
use std::sync::Arc;

/// A capture of an announcement, or the work of an announcement that is not captured.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::graphs) struct Capture {
    /// The announcement's number; 0 for blocks that belong to none.
    pub(in crate::graphs) announced: u64,
    /// The driver's number of the capture, or [`Capture::EAGER`].
    pub(in crate::graphs) id: u64,
}

impl Capture {
    /// Stands for work that is not captured. No driver numbers a capture so.
    pub(in crate::graphs) const EAGER: u64 = 0;
    /// Stands for eager work that no announcement covers.
    pub(super) const UNANNOUNCED: Self = Self { announced: 0, id: Self::EAGER };

    pub(super) fn is_eager(self) -> bool {
        self.id == Self::EAGER
    }

    /// Returns whether its work on `timeline` may use memory with these dependencies. Work that is
    /// not captured follows all earlier work of its stream. Captured work runs at any later time,
    /// on any stream.
    pub(super) fn may_use(self, timeline: &Arc<Timeline>, deps: &StreamDeps) -> bool {
        is_done_except(deps, self.is_eager().then_some(timeline))
    }
}
