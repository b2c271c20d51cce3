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

/// A use that is still to end.
#[derive(Debug)]
pub(crate) struct Held {
    /// The block.
    pub(crate) block: u32,
    /// Where it was.
    pub(crate) spot: Spot,
    /// The stream that uses it.
    pub(crate) stream: Stream,
    /// What keeps its bytes; none where the allocator is not told.
    pub(crate) open: Option<Use>,
}

impl Held {
    /// Reads once more, and ends.
    pub(crate) fn end<W: Work>(self, work: &W) -> Result<()> {
        let read = work.read(self.block, self.spot, &self.stream);
        let finished = self.open.map_or(Ok(()), Use::finish);
        read.and(finished)
    }
}

/// All of them, in order of their frees. Shared with the allocator's cry for memory, which may come
/// in the middle of an allocation; so the lock is held for moving an entry only.
#[derive(Debug)]
pub(crate) struct OpenUses {
    queue: Mutex<Queue>,
    early: AtomicU64,
}

/// Those that keep bytes, apart from those of which the allocator was told nothing.
#[derive(Default, Debug)]
struct Queue {
    keeping: BTreeMap<u64, Held>,
    untold: BTreeMap<u64, Held>,
    /// Bytes that the first keep.
    bytes: u64,
}

impl Queue {
    fn take(&mut self, number: u64) -> Option<Held> {
        let held = self.keeping.remove(&number);
        self.bytes -= held.as_ref().map_or(0, |held| held.spot.bytes);
        held.or_else(|| self.untold.remove(&number))
    }
}

impl OpenUses {
    /// None.
    pub(crate) fn new() -> Self {
        Self { queue: Mutex::default(), early: AtomicU64::new(0) }
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds one under a number that is higher than all before.
    pub(crate) fn hold(&self, number: u64, held: Held) {
        let mut queue = self.queue();
        if held.open.is_some() {
            queue.bytes += held.spot.bytes;
            queue.keeping.insert(number, held);
        } else {
            queue.untold.insert(number, held);
        }
    }

    /// Takes one out by its number; none if it has ended early.
    pub(crate) fn take(&self, number: u64) -> Option<Held> {
        self.queue().take(number)
    }

    /// Takes the oldest out.
    pub(crate) fn take_oldest(&self) -> Option<Held> {
        let mut queue = self.queue();
        let first = |of: &BTreeMap<u64, Held>| of.first_key_value().map(|(number, _)| *number);
        let oldest = first(&queue.keeping).into_iter().chain(first(&queue.untold)).min()?;
        queue.take(oldest)
    }

    /// Takes out the oldest that keeps bytes, and counts it as ended early.
    pub(crate) fn take_early(&self) -> Option<Held> {
        let mut queue = self.queue();
        let number = *queue.keeping.first_key_value()?.0;
        let held = queue.take(number);
        self.early.fetch_add(1, Ordering::Relaxed);
        held
    }

    /// Bytes that they keep.
    fn bytes(&self) -> u64 {
        self.queue().bytes
    }

    /// How many have ended early.
    pub(crate) fn early(&self) -> u64 {
        self.early.load(Ordering::Relaxed)
    }
}

/// The allocator's cry for memory: ends the use that has been open longest, ahead of its time.
#[derive(Debug)]
pub(crate) struct EndOldest<W> {
    /// What there is to end.
    pub(crate) uses: Arc<OpenUses>,
    /// What its stream does before.
    pub(crate) work: Arc<W>,
}

impl<W: Work> EndOldest<W> {
    /// Ends one use. Answers with the bytes it kept, 0 if there is none.
    pub(crate) fn end_one(&self) -> u64 {
        let Some(held) = self.uses.take_early() else { return 0 };
        let bytes = held.spot.bytes;
        // An error cannot be answered here; what it means for the block will show in the checks.
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

    /// One use at a time, so that none ends early that need not.
    fn reclaim(&self, _bytes: u64, _deadline: Option<Instant>) {
        self.end_one();
    }
}
