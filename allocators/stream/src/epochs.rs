//! Which part of a stream's past is done, without an event for each piece of work.
//!
//! A stream's past is cut into *epochs*, numbered from 1. Whoever frees a block notes the epoch
//! that is open: everything the block was used for was queued in that epoch or before. Nothing is
//! recorded then. Later, when somebody needs to know, the stream is *fenced*: the open epoch is
//! closed, an event is recorded behind all that is queued, and the event is published as the proof
//! for that epoch and all before it.
//!
//! ```text
//!   host      queue K1   free A(e1)   queue K2   free B(e1)   | close e1 | record E | publish (E, e1) |  free C(e2)
//!   stream    ─── K1 ────────────────── K2 ───────────────────────────────── E ──────────────────────── …
//!                                                             └ from here on frees note e2
//! ```
//!
//! **The order matters: close, then record, then publish.** Had the event been recorded first, a
//! block whose last work is queued between the record and the close would note the epoch that the
//! event proves, and the event would say nothing about that work. With the close first, a thread
//! that still reads the old epoch had queued its work before: the driver's own lock on the stream
//! orders the two threads' calls, so a record that came before the work would make
//! the close visible to whoever queued it. A model of both orders is in `tests/loom.rs`.
//!
//! If recording fails the epoch is closed and has no event. The next event covers it.
//!
//! **An event recorded in a capture proves nothing**: it becomes part of a graph, and the driver
//! answers questions about it with an error. So the stream is asked whether it captures before the
//! record, and nothing is closed if it does; and after the record, since a capture may have begun
//! between, and nothing is published if it has.

use crate::{
    Spin,
    sync::atomic::{AtomicU64, Ordering},
};
use std::{collections::VecDeque, fmt, sync::Arc};

/// The epochs of one stream. `E` is the event that proves one.
///
/// Its example is that of [`Timeline`](crate::Timeline), which is made of it.
pub struct Epochs<E> {
    /// The epoch that work queued now belongs to. Only grows.
    open: AtomicU64,
    /// All epochs up to this one are done. Only grows; below `open`, or `u64::MAX` when the stream
    /// has ended.
    done: AtomicU64,
    /// Events published and not yet seen to be done, by rising epoch.
    recorded: Spin<VecDeque<(u64, Arc<E>)>>,
}

impl<E> Epochs<E> {
    /// Nothing queued, nothing recorded.
    #[must_use]
    pub fn new() -> Self {
        Self {
            open: AtomicU64::new(1),
            done: AtomicU64::new(0),
            recorded: Spin::new(VecDeque::new()),
        }
    }

    /// The epoch of work that has been queued by now. To be taken after the work is queued.
    #[inline]
    #[must_use]
    pub fn open(&self) -> u64 {
        // Relaxed: see the module's text; the order comes from the driver's lock on the stream.
        self.open.load(Ordering::Relaxed)
    }

    /// Whether an epoch is known to be done.
    #[inline]
    #[must_use]
    pub fn is_done(&self, epoch: u64) -> bool {
        // Acquire: whoever saw the event done did so before.
        epoch <= self.done.load(Ordering::Acquire)
    }

    /// Ends the open epoch, so that later work belongs to the next. Answers with the one that
    /// ended.
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

    /// Takes back what was published for `epoch`, which proves nothing after all: the next event
    /// covers it.
    #[must_use]
    pub fn withdraw(&self, epoch: u64) -> Option<Arc<E>> {
        self.recorded.with(|recorded| {
            let at = recorded.iter().position(|&(other, _)| other == epoch)?;
            recorded.remove(at).map(|(_, event)| event)
        })
    }

    /// The first published event that proves `epoch`, with the epoch it was published for.
    #[must_use]
    pub fn proof(&self, epoch: u64) -> Option<(u64, Arc<E>)> {
        self.recorded.with(|recorded| {
            let at = recorded.partition_point(|&(other, _)| other < epoch);
            recorded.get(at).map(|(proved, event)| (*proved, event.clone()))
        })
    }

    /// The oldest published event.
    #[must_use]
    pub fn oldest(&self) -> Option<(u64, Arc<E>)> {
        self.recorded
            .with(|recorded| recorded.front().map(|(epoch, event)| (*epoch, event.clone())))
    }

    /// The newest epoch that has an event or is done.
    #[must_use]
    pub fn proved(&self) -> u64 {
        let newest = self.recorded.with(|recorded| recorded.back().map_or(0, |&(epoch, _)| epoch));
        newest.max(self.done.load(Ordering::Acquire))
    }

    /// Notes that `epoch` and all before it are done, and answers with the events that are not
    /// needed any more.
    #[must_use]
    pub fn finish(&self, epoch: u64) -> Vec<Arc<E>> {
        self.done.fetch_max(epoch, Ordering::AcqRel);
        self.recorded.with(|recorded| {
            let over = recorded.partition_point(|&(other, _)| other <= epoch);
            recorded.drain(..over).map(|(_, event)| event).collect()
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
