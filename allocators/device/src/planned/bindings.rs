//! Which stream of a program is which of a plan.

use aquifer_core::BLOCK_ALIGN;
use aquifer_plan::PlanCursor;
use aquifer_stream::Timeline;
use std::sync::Arc;

/// The streams of a program that are streams of a plan. No two are the same one.
#[derive(Default)]
pub(super) struct StreamBindings {
    bound: Vec<(Arc<Timeline>, u32)>,
    /// The index of the last one: the next block usually has the same stream.
    last: usize,
}

impl StreamBindings {
    /// Returns the plan's number of a stream, if it has one.
    #[inline]
    pub(super) fn find(&mut self, timeline: &Arc<Timeline>) -> Option<u32> {
        let is = |(other, _): &(Arc<Timeline>, u32)| Arc::ptr_eq(other, timeline);
        if !self.bound.get(self.last).is_some_and(is) {
            self.last = self.bound.iter().position(is)?;
        }
        Some(self.bound[self.last].1)
    }

    /// Makes a stream the one of the plan whose block of `bytes` is expected next, if no other
    /// stream that can still be used is that one. Returns its number, and the stream that was it
    /// before, to be dropped without a lock.
    pub(super) fn bind(
        &mut self,
        timeline: &Arc<Timeline>,
        bytes: u64,
        cursor: &mut PlanCursor,
    ) -> Option<(u32, Option<Arc<Timeline>>)> {
        let bytes = bytes.checked_next_multiple_of(BLOCK_ALIGN)?;
        let is_over = |other: &Timeline| other.is_retired() || !other.is_leased();
        let can_bind = |stream: u32| {
            self.bound.iter().all(|(other, number)| *number != stream || is_over(other))
        };
        let mut expected = cursor.expected();
        let stream = expected.find(|block| block.bytes == bytes && can_bind(block.stream))?.stream;
        drop(expected);
        match self.bound.iter_mut().find(|(_, number)| *number == stream) {
            Some((other, _)) => {
                cursor.replace_stream(stream);
                Some((stream, Some(std::mem::replace(other, timeline.clone()))))
            }
            None => {
                self.bound.push((timeline.clone(), stream));
                Some((stream, None))
            }
        }
    }

    /// Takes all streams, to be dropped without a lock.
    pub(super) fn take(&mut self) -> Vec<Arc<Timeline>> {
        std::mem::take(&mut self.bound).into_iter().map(|(timeline, _)| timeline).collect()
    }
}
