//! The queued work that must be over before memory is reused.

use aquifer_stream::Timeline;
use smallvec::SmallVec;
use std::sync::Arc;

/// The dependencies of a range: the streams that used it, and the epochs that must be done before
/// it is reused.
pub(crate) type StreamDeps = SmallVec<[(Arc<Timeline>, u64); 2]>;

/// Returns whether the host has seen all dependencies done.
pub(crate) fn is_done(deps: &StreamDeps) -> bool {
    is_done_except(deps, None)
}

/// Returns whether the host has seen all dependencies done, except for those on `own`, which is in
/// order with itself.
pub(crate) fn is_done_except(deps: &StreamDeps, own: Option<&Arc<Timeline>>) -> bool {
    let is_own = |timeline| own.is_some_and(|own| Arc::ptr_eq(own, timeline));
    deps.iter().all(|(timeline, epoch)| is_own(timeline) || timeline.is_done(*epoch))
}

/// Raises the epoch of a stream to `epoch` in a list of streams. Returns whether it is in the list.
/// The latest epoch of a stream covers all others.
pub(crate) fn raise(list: &mut [(Arc<Timeline>, u64)], on: &Arc<Timeline>, epoch: u64) -> bool {
    let known = list.iter_mut().find(|(other, _)| Arc::ptr_eq(other, on));
    known.is_some_and(|(_, last)| {
        *last = epoch.max(*last);
        true
    })
}

/// Merges the dependencies `more` into `deps`, without those that are done.
pub(crate) fn merge_deps(deps: &mut StreamDeps, more: StreamDeps) {
    deps.retain(|(timeline, epoch)| !timeline.is_done(*epoch));
    for (timeline, epoch) in more {
        if !timeline.is_done(epoch) && !raise(deps, &timeline, epoch) {
            deps.push((timeline, epoch));
        }
    }
}

/// Returns the latest unfinished epoch of each stream.
pub(crate) fn latest(work: Vec<(Arc<Timeline>, u64)>) -> Vec<(Arc<Timeline>, u64)> {
    let mut latest: Vec<(Arc<Timeline>, u64)> = Vec::new();
    for (timeline, epoch) in work {
        if !raise(&mut latest, &timeline, epoch) && !timeline.is_done(epoch) {
            latest.push((timeline, epoch));
        }
    }
    latest
}
