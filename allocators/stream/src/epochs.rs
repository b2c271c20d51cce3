//! The epochs of a stream: proof that a prefix of its work is complete, without an event for each
//! piece of work.
//!
//! - The work of a stream is divided into *epochs*, numbered from 1.
//! - A free stores the number of the open epoch. All uses of the block were queued in that epoch or
//!   earlier. No event is recorded.
//! - To prove completion later, the stream is *fenced*: the open epoch is closed, an event is
//!   recorded behind all queued work, and the event is published as proof of that epoch and all
//!   earlier ones.
//! - If recording fails, the epoch is closed and has no event. The next event covers it.
//!
//! ```text
//!   host      queue K1   free A(e1)   queue K2   free B(e1)   | close e1 | record E | publish (E, e1) |  free C(e2)
//!   stream    ─── K1 ────────────────── K2 ───────────────────────────────── E ──────────────────────── …
//!                                                             └ from here on frees note e2
//! ```
//!
//! **The order matters: close, then record, then publish.** If the event were recorded first, work
//! could be queued between the record and the close. A block freed after that work would store the
//! epoch that the event proves, but the event does not cover that work. If the close comes first, a
//! thread that still reads the old epoch queued its work before the record: the driver's lock on
//! the stream orders the calls of the two threads, so a record before the work would make the close
//! visible to the thread that queued it. `tests/loom.rs` models both orders.
//!
//! **An event recorded in a capture proves nothing.** It becomes part of a graph, and the driver
//! refuses a query of it. So if the stream captures after the record, nothing is published. A query
//! before the record would miss a capture that begins between the two. Streams that have captured
//! before are queried there as well, so that their epochs stay open during a capture. A capture
//! that ends between the record and the query is not seen: its event is published, and withdrawn
//! when the driver refuses it.

use crate::{
    Spin,
    sync::atomic::{AtomicU64, Ordering},
};
use std::{collections::VecDeque, fmt, sync::Arc};

/// The epochs of one stream. `E` is the type of the events that prove them.
///
/// See [`Timeline`](crate::Timeline), which is built on it, for an example.
pub struct Epochs<E> {
    /// The epoch that work queued now belongs to. Only grows.
    open: AtomicU64,
    /// All epochs up to this one are complete. Only grows. Less than `open`, or `u64::MAX` once
    /// the stream has ended.
    done: AtomicU64,
    /// Published events that were not yet seen complete, in ascending order of epochs.
    recorded: Spin<VecDeque<(u64, Arc<E>)>>,
}

impl<E> Epochs<E> {
    /// Creates the epochs of a stream without queued work.
    #[must_use]
    pub fn new() -> Self {
        Self {
            open: AtomicU64::new(1),
            done: AtomicU64::new(0),
            recorded: Spin::new(VecDeque::new()),
        }
    }

    /// Returns the open epoch, which covers all work queued so far. Must be read after the work is
    /// queued.
    #[inline]
    #[must_use]
    pub fn open(&self) -> u64 {
        // Relaxed: the driver's lock on the stream provides the order, see the module
        // documentation.
        self.open.load(Ordering::Relaxed)
    }

    /// Returns whether an epoch is known to be complete.
    #[inline]
    #[must_use]
    pub fn is_done(&self, epoch: u64) -> bool {
        // Acquire: synchronises with the thread that saw the event complete.
        epoch <= self.done.load(Ordering::Acquire)
    }

    /// Closes the open epoch, so that later work belongs to the next one. Returns the closed epoch.
    #[must_use]
    pub fn close(&self) -> u64 {
        self.open.fetch_add(1, Ordering::AcqRel)
    }

    /// Publishes an event that was recorded after `epoch` was closed.
    pub fn publish(&self, epoch: u64, event: Arc<E>) {
        self.recorded.with(|recorded| {
            // Two threads may fence at once and publish in either order.
            let at = recorded
                .iter()
                .rposition(|&(other, _)| other < epoch)
                .map_or(0, |before| before + 1);
            recorded.insert(at, (epoch, event));
        });
    }

    /// Withdraws the event that was published for `epoch` because it proves nothing. The next event
    /// covers the epoch.
    #[must_use]
    pub fn withdraw(&self, epoch: u64) -> Option<Arc<E>> {
        self.recorded.with(|recorded| {
            let at = recorded.iter().position(|&(other, _)| other == epoch)?;
            recorded.remove(at).map(|(_, event)| event)
        })
    }

    /// Returns the first published event that proves `epoch`, and the epoch it was published for.
    #[must_use]
    pub fn proof(&self, epoch: u64) -> Option<(u64, Arc<E>)> {
        self.recorded.with(|recorded| {
            let at = recorded.partition_point(|&(other, _)| other < epoch);
            recorded.get(at).map(|(proved, event)| (*proved, event.clone()))
        })
    }

    /// Returns the oldest published event.
    #[must_use]
    pub fn oldest(&self) -> Option<(u64, Arc<E>)> {
        self.recorded
            .with(|recorded| recorded.front().map(|(epoch, event)| (*epoch, event.clone())))
    }

    /// Returns the published event in the middle, if the number of published ones is a multiple of
    /// `count`.
    pub(crate) fn middle(&self, count: usize) -> Option<(u64, Arc<E>)> {
        self.recorded.with(|recorded| {
            let (epoch, event) = recorded.get(recorded.len() / 2)?;
            recorded.len().is_multiple_of(count).then(|| (*epoch, event.clone()))
        })
    }

    /// Returns the newest epoch that has an event or is complete.
    #[must_use]
    pub fn proved(&self) -> u64 {
        let newest = self.recorded.with(|recorded| recorded.back().map_or(0, |&(epoch, _)| epoch));
        newest.max(self.done.load(Ordering::Acquire))
    }

    /// Marks `epoch` and all earlier ones as complete, and returns the events that are no longer
    /// needed.
    #[must_use]
    pub fn finish(&self, epoch: u64) -> Vec<Arc<E>> {
        self.done.fetch_max(epoch, Ordering::AcqRel);
        self.recorded.with(|recorded| {
            let finished = recorded.partition_point(|&(other, _)| other <= epoch);
            recorded.drain(..finished).map(|(_, event)| event).collect()
        })
    }
}

impl<E> Default for Epochs<E> {
    fn default() -> Self {
        Self::new()
    }
}

impl<E> fmt::Debug for Epochs<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Epochs")
            .field("open", &self.open)
            .field("done", &self.done)
            .finish_non_exhaustive()
    }
}
