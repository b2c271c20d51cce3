//! Which work a block of graph memory is for.

use crate::base::dependencies::StreamDeps;
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

    pub(super) fn is_eager(self) -> bool {
        self.id == Self::EAGER
    }

    /// Returns whether its work on `timeline` may use memory with these dependencies. Work that is
    /// not captured follows all earlier work of its stream. Captured work runs at any later time,
    /// on any stream.
    pub(super) fn may_use(self, timeline: &Arc<Timeline>, deps: &StreamDeps) -> bool {
        let own = |other: &Arc<Timeline>| self.is_eager() && Arc::ptr_eq(other, timeline);
        deps.iter().all(|(other, epoch)| own(other) || other.is_done(*epoch))
    }
}
