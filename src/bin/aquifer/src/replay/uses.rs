//! Uses by other streams that outlive the free of their block.

use super::work::{Spot, Work};
use aquifer_core::Result;
use aquifer_device::{Offer, Reclaim};
use aquifer_stream::{Stream, Use};
use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

/// A use that has not ended.
#[derive(Debug)]
pub(crate) struct OpenUse {
    /// The block.
    pub(crate) block: u32,
    /// Where it was.
    pub(crate) spot: Spot,
    /// The stream that uses it.
    pub(crate) stream: Stream,
    /// The use that keeps the block's bytes, or none if the allocator is not informed.
    pub(crate) open: Option<Use>,
}

impl OpenUse {
    /// Reads the block once more and ends the use.
    pub(crate) fn end<W: Work>(self, work: &W) -> Result<()> {
        let read = work.read(self.block, self.spot, &self.stream);
        let finished = self.open.map_or(Ok(()), Use::finish);
        read.and(finished)
    }
}

/// All open uses, in order of their frees. Also accessed by the allocator's reclaim callback, which
/// may run during an allocation. The lock is therefore held only to move an entry.
#[derive(Debug)]
pub(crate) struct OpenUses {
    queue: Mutex<Queue>,
    early: AtomicU64,
}

/// Uses that keep bytes, and uses that the allocator is not informed of.
#[derive(Default, Debug)]
struct Queue {
    keeping: BTreeMap<u64, OpenUse>,
    untold: BTreeMap<u64, OpenUse>,
    /// Bytes kept by the uses in `keeping`.
    bytes: u64,
}

impl Queue {
    fn take(&mut self, number: u64) -> Option<OpenUse> {
        let held = self.keeping.remove(&number);
        self.bytes -= held.as_ref().map_or(0, |held| held.spot.bytes);
        held.or_else(|| self.untold.remove(&number))
    }
}

impl OpenUses {
    /// Creates an empty set.
    pub(crate) fn new() -> Self {
        Self { queue: Mutex::default(), early: AtomicU64::new(0) }
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a use. `number` must be higher than all before.
    pub(crate) fn hold(&self, number: u64, held: OpenUse) {
        let mut queue = self.queue();
        let last = |of: &BTreeMap<u64, OpenUse>| of.last_key_value().map(|(number, _)| *number);
        debug_assert!(last(&queue.keeping).max(last(&queue.untold)) < Some(number));
        if held.open.is_some() {
            queue.bytes += held.spot.bytes;
            queue.keeping.insert(number, held);
        } else {
            queue.untold.insert(number, held);
        }
    }

    /// Removes a use by its number. Returns `None` if it was ended early.
    pub(crate) fn take(&self, number: u64) -> Option<OpenUse> {
        self.queue().take(number)
    }

    /// Removes the oldest use.
    pub(crate) fn take_oldest(&self) -> Option<OpenUse> {
        let mut queue = self.queue();
        let first = |of: &BTreeMap<u64, OpenUse>| of.first_key_value().map(|(number, _)| *number);
        let oldest = first(&queue.keeping).into_iter().chain(first(&queue.untold)).min()?;
        queue.take(oldest)
    }

    /// Removes the oldest use that keeps bytes, and counts it as ended early.
    pub(crate) fn take_early(&self) -> Option<OpenUse> {
        let mut queue = self.queue();
        let number = *queue.keeping.first_key_value()?.0;
        let held = queue.take(number);
        self.early.fetch_add(1, Ordering::Relaxed);
        held
    }

    /// Returns how many bytes the uses keep.
    fn bytes(&self) -> u64 {
        self.queue().bytes
    }

    /// Returns how many uses were ended early.
    pub(crate) fn early(&self) -> u64 {
        self.early.load(Ordering::Relaxed)
    }
}

/// A reclaimer that ends the oldest open use before its time.
#[derive(Debug)]
pub(crate) struct EndOldest<W> {
    /// The open uses.
    pub(crate) uses: Arc<OpenUses>,
    /// The work that a stream does before its use ends.
    pub(crate) work: Arc<W>,
}

impl<W: Work> EndOldest<W> {
    /// Ends one use. Returns the bytes it kept, or 0 if there is none.
    pub(crate) fn end_one(&self) -> u64 {
        let Some(held) = self.uses.take_early() else { return 0 };
        let bytes = held.spot.bytes;
        // An error cannot be returned here. Its effect on the block is visible in the checks.
        if held.end(&*self.work).is_ok() { bytes } else { 0 }
    }
}

impl<W: Work> Reclaim for EndOldest<W> {
    fn name(&self) -> &'static str {
        "end the oldest use"
    }

    fn offer(&self) -> Offer {
        Offer { bytes: self.uses.bytes(), cost: Duration::ZERO }
    }

    /// One use at a time, so that no more uses end early than necessary.
    fn reclaim(&self, _bytes: u64, _deadline: Option<Instant>) {
        self.end_one();
    }
}
