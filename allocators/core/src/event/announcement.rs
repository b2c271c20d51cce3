//! Announcements to a tool that checks memory accesses, in order and before the caller goes on.
//!
//! A sink may receive an event late, and on another thread. A memory checker may not: it has to
//! know of a block before the block is used, and of its end before its address is used again. So
//! an [`Announcer`] has an order of its own, in which each thread waits for its turn:
//!
//! ```text
//!   thread A   lock ─ ticket 7 ─ unlock ─────────────── record: 7 is next: call, then 8, which waits
//!   thread B       lock ─ ticket 8 ─ unlock ─ record: 7 is missing: enqueue, wait ────── return
//! ```
//!
//! # No deadlock
//! - A thread waits only for tickets that were taken before its own.
//! - The holder of such a ticket is between [`Recorder::ticket`](super::Recorder::ticket) and
//!   [`Recorder::record`](super::Recorder::record). Pools neither call the program's code nor the
//!   driver between the two, and finish the critical section in which the ticket was taken.
//! - A thread that holds further tickets does not wait. Its last `record` waits for all of them.
//! - A thread that waits holds no lock of a pool. Nor does it hold one of its sink, since the
//!   announcement comes before the sink is called.
//! - A ticket that is dropped gives up its turn. Its thread has announced nothing with it, so it
//!   waits only for announcements of its own that it has not waited for yet. A ticket of a parent
//!   process is not waited for.

use super::{Event, thread_number::thread_number};
use crate::{DeviceId, panics::contain};
use std::{
    cell::Cell,
    collections::BTreeMap,
    fmt, process,
    sync::{
        Condvar, Mutex, OnceLock, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

/// A tool that is told of the memory of all pools of the process. Called for one announcement at a
/// time, in order.
///
/// It must neither use a device pool nor wait for another thread that does.
pub trait Announcer: fmt::Debug + Send {
    /// Processes one announcement.
    fn announce(&mut self, announcement: &Announcement);
}

/// What an [`Announcer`] is told.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Announcement {
    /// A pool has got memory from the driver, and will allocate blocks in it. Made before it does.
    Supplied(SuppliedRange),
    /// A pool is about to return memory to the driver. All its blocks there have ended.
    Withdrawn(SuppliedRange),
    /// An event of any [`Recorder`](super::Recorder).
    Event(Event),
}

/// Memory that a pool has from the driver. [`supply`] has an example.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SuppliedRange {
    /// The device.
    pub device: DeviceId,
    /// The first address.
    pub address: u64,
    /// The length in bytes.
    pub bytes: u64,
}

/// The announcer of this process, for good.
static LANE: OnceLock<Lane> = OnceLock::new();

thread_local! {
    /// The tickets that this thread has taken and not used yet.
    static OUTSTANDING: Cell<u32> = const { Cell::new(0) };
    /// The last announcement of this thread that it has not waited for, since it held another
    /// ticket.
    static UNAWAITED: Cell<Option<u64>> = const { Cell::new(None) };
    /// Whether this thread is making announcements. What it allocates meanwhile may come from a
    /// pool of host memory, whose events are not announced then.
    static ANNOUNCING: Cell<bool> = const { Cell::new(false) };
}

/// An announcer and the order of its announcements.
struct Lane {
    /// A child of a fork announces nothing: the tool and the device belong to its parent.
    process: u32,
    tickets: AtomicU64,
    queue: Mutex<Queue>,
    /// Signalled when `Queue::next` rises.
    moved: Condvar,
}

struct Queue {
    announcer: Box<dyn Announcer>,
    /// The ticket whose turn it is.
    next: u64,
    /// What waits for earlier tickets. `None` for a ticket that was dropped.
    pending: BTreeMap<u64, Option<Announcement>>,
}

/// A turn in the order of announcements. Given up on drop.
#[derive(Debug)]
pub(super) struct Turn {
    number: u64,
    /// The thread that took it.
    thread: u32,
    lane: &'static Lane,
    used: bool,
}

/// Sets the announcer of this process, which is never removed. Returns whether it is the first one;
/// a later one is dropped.
///
/// ```
/// use aquifer_core::event::announcement::{Announcement, Announcer, set_announcer, supply};
/// use aquifer_core::DeviceId;
/// use std::sync::mpsc::{Sender, channel};
/// #[derive(Debug)]
/// struct Tool(Sender<Announcement>);
/// impl Announcer for Tool {
///     fn announce(&mut self, announcement: &Announcement) {
///         let _ = self.0.send(*announcement);
///     }
/// }
/// let (tool, heard) = channel();
/// assert!(set_announcer(Box::new(Tool(tool))));
/// supply(DeviceId(0), 0x20_0000, 2 << 20);      // what a pool does when it grows
/// assert!(matches!(heard.try_recv(), Ok(Announcement::Supplied(_))));
/// ```
pub fn set_announcer(announcer: Box<dyn Announcer>) -> bool {
    let queue = Queue { announcer, next: 0, pending: BTreeMap::new() };
    let lane = Lane {
        process: process::id(),
        tickets: AtomicU64::new(0),
        queue: Mutex::new(queue),
        moved: Condvar::new(),
    };
    LANE.set(lane).is_ok()
}

/// Announces memory that a pool has got from the driver. Must be called without a lock, and before
/// any block is allocated there. Without an announcer it costs a load.
///
/// ```
/// use aquifer_core::{DeviceId, event::announcement::{supply, withdraw}};
///
/// let (device, address, bytes) = (DeviceId(0), 0x20_0000, 2 << 20);
/// supply(device, address, bytes);               // the driver has mapped it; no block is there yet
/// withdraw(device, address, bytes);             // no block is there any more; it is unmapped next
/// ```
pub fn supply(device: DeviceId, address: u64, bytes: u64) {
    if let Some(turn) = Turn::take() {
        turn.announce(Announcement::Supplied(SuppliedRange { device, address, bytes }));
    }
}

/// Announces that the memory of a range returns to the driver. Must be called without a lock, when
/// the range is in no cache any more, and before the driver unmaps or frees it. [`supply`] has an
/// example.
pub fn withdraw(device: DeviceId, address: u64, bytes: u64) {
    if let Some(turn) = Turn::take() {
        turn.announce(Announcement::Withdrawn(SuppliedRange { device, address, bytes }));
    }
}

impl Turn {
    /// Takes the next turn if there is an announcer.
    #[inline]
    pub(super) fn take() -> Option<Self> {
        LANE.get().and_then(Lane::turn)
    }

    /// Makes the announcement in its turn. Returns when it is made, unless this thread holds
    /// another turn.
    pub(super) fn announce(mut self, announcement: Announcement) {
        self.pass(Some(announcement));
    }

    /// Gives the turn up, with an announcement or without one. Returns when all announcements of
    /// this thread are made, unless it holds another turn.
    fn pass(&mut self, announcement: Option<Announcement>) {
        self.used = true;
        let outstanding = OUTSTANDING.with(|count| {
            // A turn that was taken on another thread is counted there for good: that thread no
            // longer waits.
            if self.thread == thread_number() {
                count.set(count.get().saturating_sub(1));
            }
            count.get()
        });
        if self.lane.process != process::id() {
            return;
        }
        // Turns may be used out of order, so this is not always the last announcement.
        let last = UNAWAITED.get().max(announcement.map(|_| self.number));
        let (awaited, left) = if outstanding == 0 { (last, None) } else { (None, last) };
        UNAWAITED.set(left);
        self.lane.pass(self.number, announcement, awaited);
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        if !self.used {
            self.pass(None);
        }
    }
}

impl Lane {
    #[cold]
    fn turn(&'static self) -> Option<Turn> {
        if self.process != process::id() || ANNOUNCING.get() {
            return None;
        }
        OUTSTANDING.with(|count| count.set(count.get() + 1));
        let number = self.tickets.fetch_add(1, Ordering::Relaxed);
        Some(Turn { number, thread: thread_number(), lane: self, used: false })
    }

    /// Makes every announcement that is due, and waits until that of the turn `awaited` is made.
    fn pass(&self, number: u64, announcement: Option<Announcement>, awaited: Option<u64>) {
        let _announcing = AnnouncingGuard::enter();
        let mut queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
        queue.pending.insert(number, announcement);
        if queue.announce_due() {
            self.moved.notify_all();
        }
        while awaited.is_some_and(|last| queue.next <= last) {
            queue = self.moved.wait(queue).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// Ends [`ANNOUNCING`] when it is dropped.
struct AnnouncingGuard;

impl AnnouncingGuard {
    fn enter() -> Self {
        ANNOUNCING.set(true);
        Self
    }
}

impl Drop for AnnouncingGuard {
    fn drop(&mut self) {
        ANNOUNCING.set(false);
    }
}

impl Queue {
    /// Makes the announcements whose turn has come. Returns whether there were any.
    fn announce_due(&mut self) -> bool {
        let before = self.next;
        while let Some(due) = self.pending.remove(&self.next) {
            if let Some(announcement) = due {
                let announcer = &mut self.announcer;
                // Pools make announcements in drops, so a panic must not propagate.
                let _panicked = contain(|| announcer.announce(&announcement));
            }
            self.next += 1;
        }
        self.next > before
    }
}

impl fmt::Debug for Lane {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lane").field("process", &self.process).finish_non_exhaustive()
    }
}
