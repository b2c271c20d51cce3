//! The state of memory in slots: its blocks, its free ranges, the captures that allocate from it,
//! and the launches that touch it.

use super::{
    blocks::{SlotBlock, SlotBlocks},
    ranges::Capture,
};
use crate::{
    backing::{shared_free::SharedFreeList, window::Grid},
    base::pending::StreamDeps,
};
use aquifer_core::Result;
use aquifer_heap::Range;
use aquifer_stream::Timeline;
use smallvec::smallvec;
use std::{collections::BTreeSet, sync::Arc};

#[derive(Default)]
pub(super) struct SlotState {
    /// Any work may use the free ranges once the host has seen their dependencies done.
    pub(super) slots: SlotBlocks,
    /// Claimed slots that captured work may use at any later launch. They keep their memory.
    pub(super) captured: BTreeSet<u64>,
    /// Ranges freed within captures that are still open.
    pub(super) capture_lists: Vec<CaptureFreeList>,
    /// The last launch on each stream.
    pub(super) launches: Vec<(Arc<Timeline>, u64)>,
    /// Whether there are graphs whose launches are not recorded.
    pub(super) has_untracked_launches: bool,
}

/// Records a launch as a use of a block, so that later uses wait for it. The block's own stream is
/// ordered anyway.
pub(super) fn record_launch(live: &SlotBlock, on: &Arc<Timeline>, epoch: u64) {
    if let Some(watch) = live.watch.as_ref().filter(|_| !Arc::ptr_eq(&live.owner_stream, on)) {
        // Recording fails only for parked memory, which this is not.
        let _ = watch.record(on, epoch);
    }
}

/// The ranges that one stream has freed within one capture. The stream can reuse them at once,
/// since its work is in order.
pub(super) struct CaptureFreeList {
    pub(super) capture: Capture,
    timeline: Arc<Timeline>,
    free: SharedFreeList,
}

impl CaptureFreeList {
    fn is_of(&self, capture: Capture, timeline: &Arc<Timeline>) -> bool {
        self.capture == capture && Arc::ptr_eq(&self.timeline, timeline)
    }
}

impl SlotState {
    /// Ends the earlier captures of this announcement: what they had freed becomes usable by any
    /// later capture. At the first block of a capture, the blocks that are live count as captured:
    /// its graph may use them.
    pub(super) fn enter_capture(&mut self, capture: Capture, grid: Grid) {
        self.close_captures(|other| other.announced == capture.announced && other != capture);
        if !capture.is_eager() && self.capture_lists.iter().all(|list| list.capture != capture) {
            let Self { captured, slots, .. } = self;
            captured.extend(
                slots
                    .blocks
                    .iter()
                    .flat_map(|(&start, live)| grid.slots(Range { start, len: live.bytes })),
            );
        }
    }

    pub(super) fn close_captures(&mut self, over: impl Fn(Capture) -> bool) {
        let closed: Vec<_> =
            self.capture_lists.extract_if(.., |capture_list| over(capture_list.capture)).collect();
        // Launches during the capture have not been recorded with these blocks, which only captured
        // work could use.
        let blocks = self
            .slots
            .blocks
            .values()
            .filter(|live| closed.iter().any(|s| s.capture == live.capture));
        for live in blocks {
            for (on, epoch) in &self.launches {
                record_launch(live, on, *epoch);
            }
        }
        for capture_list in closed {
            let ranges: Vec<_> =
                capture_list.free.iter().map(|(range, deps)| (range, deps.clone())).collect();
            ranges.into_iter().for_each(|(range, deps)| self.slots.ranges.free.add(range, deps));
        }
    }

    pub(super) fn capture_list(
        &mut self,
        capture: Capture,
        timeline: &Arc<Timeline>,
    ) -> Option<&mut SharedFreeList> {
        let mut lists = self.capture_lists.iter_mut();
        lists.find(|list| list.is_of(capture, timeline)).map(|list| &mut list.free)
    }

    /// Takes a free range for the capture, among those that its stream has freed in it and those
    /// whose dependencies are done: one that the block fills wholly, or else the lowest.
    pub(super) fn take_free(
        &mut self,
        capture: Capture,
        timeline: &Arc<Timeline>,
        bytes: u64,
        align: u64,
    ) -> Option<Range> {
        let own = self.capture_list(capture, timeline);
        let own = own.and_then(|own| own.find_filled(bytes, align, |_| true));
        let ready = |deps: &StreamDeps| capture.may_use(timeline, deps);
        let shared = self.slots.ranges.free.find_filled(bytes, align, ready);
        let rank = |(is_filled, range): (bool, Range)| (!is_filled, range.start);
        let is_own = match (own, shared) {
            (Some(own), Some(shared)) => rank(own) < rank(shared),
            (own, _) => own.is_some(),
        };
        let (_, range) = if is_own { own } else { shared }?;
        let list = if is_own {
            self.capture_list(capture, timeline)?
        } else {
            &mut self.slots.ranges.free
        };
        list.take(range).map(|_| range)
    }

    /// Takes the free range that ends at `end`, from an aligned address on, if the capture may use
    /// it.
    pub(super) fn take_tail(
        &mut self,
        capture: Capture,
        timeline: &Arc<Timeline>,
        end: u64,
        align: u64,
        most: u64,
    ) -> Option<Range> {
        let tail = |free: &SharedFreeList, ready: &dyn Fn(&StreamDeps) -> bool| {
            let (range, deps) = free.iter().last()?;
            let start = range.start.next_multiple_of(align);
            // A range that is long enough for the whole block lies too low to be extended.
            let fits = range.end() == end && start < end && end - start < most && ready(deps);
            fits.then_some(Range { start, len: end - start })
        };
        if let Some(own) = self.capture_list(capture, timeline)
            && let Some(range) = tail(own, &|_| true)
        {
            return own.take(range).map(|_| range);
        }
        let range = tail(&self.slots.ranges.free, &|deps| capture.may_use(timeline, deps))?;
        self.slots.ranges.free.take(range).map(|_| range)
    }

    /// Frees a range of a stream, whose last work is `own`, and that was allocated in `capture`. If
    /// that is over and the stream takes part in a later one, that one's work follows all uses: a
    /// launch is ordered after the stream's work outside of captures.
    pub(super) fn add_free(
        &mut self,
        range: Range,
        timeline: &Arc<Timeline>,
        own: StreamDeps,
        capture: Capture,
    ) {
        let lists = &self.capture_lists;
        let open = if lists.iter().any(|list| list.capture == capture) {
            Some(capture)
        } else {
            let later = lists.iter().rfind(|list| Arc::ptr_eq(&list.timeline, timeline));
            later.map(|list| list.capture)
        };
        match open {
            Some(capture) => self.open_list(capture, timeline).add(range, own),
            None => self.slots.ranges.free.add(range, own),
        }
    }

    /// Returns what the stream has freed within a capture, empty before the first.
    pub(super) fn open_list(
        &mut self,
        capture: Capture,
        timeline: &Arc<Timeline>,
    ) -> &mut SharedFreeList {
        let lists = &mut self.capture_lists;
        let known = lists.iter().position(|list| list.is_of(capture, timeline));
        let at = known.unwrap_or_else(|| {
            let (timeline, free) = (timeline.clone(), SharedFreeList::default());
            lists.push(CaptureFreeList { capture, timeline, free });
            lists.len() - 1
        });
        &mut lists[at].free
    }

    /// Frees a range that was taken for a block, if any, for which there was no memory.
    pub(super) fn return_tail(
        &mut self,
        tail: Option<Range>,
        timeline: &Arc<Timeline>,
        capture: Capture,
    ) {
        if let Some(tail) = tail {
            self.return_range(tail, timeline, capture);
        }
    }

    /// Frees a range that was taken for a block of the capture.
    pub(super) fn return_range(
        &mut self,
        range: Range,
        timeline: &Arc<Timeline>,
        capture: Capture,
    ) {
        let own = smallvec![(timeline.clone(), timeline.open())];
        self.add_free(range, timeline, own, capture);
    }

    /// Returns the work that freed memory depends on, except for open uses.
    pub(super) fn freed_work(&self) -> Vec<(Arc<Timeline>, u64)> {
        let captured = self.capture_lists.iter().flat_map(|capture_list| capture_list.free.iter());
        let captured = captured.flat_map(|(_, deps)| deps.iter().cloned());
        self.slots
            .ranges
            .free_work()
            .chain(captured)
            .chain(self.slots.ranges.pending_work())
            .collect()
    }

    /// Returns all work that a launch must follow: everything that touches any of the memory.
    pub(super) fn all_work(&self) -> Result<Vec<(Arc<Timeline>, u64)>> {
        self.slots.ranges.check_closed()?;
        let mut work = self.freed_work();
        for (&address, live) in &self.slots.blocks {
            work.push((live.owner_stream.clone(), live.owner_stream.open()));
            if let Some(watch) = &live.watch {
                work.extend(watch.work(address)?);
            }
        }
        work.extend(self.launches.iter().cloned());
        Ok(work)
    }
}
