//! Where a stream's blocks live and where they return to.
//!
//! Each stream has a cache of its own, so that allocating and freeing on it touch nothing that another stream touches.
//! The cache stands in a *shell*: leaked once, used again for another stream after the last of its blocks has come
//! home, never freed. So a block needs no reference count to find its way: a plain `&'static` does.
//!
//! **What is in the heap of a cache is in order with its stream.** A block whose only user was the stream goes back at
//! once, and the stream may have it again at once. A block that others use as well waits outside the heap until they
//! are done, or until the stream has been made to wait for them. Each free range carries the epoch of the stream that
//! covers its last use, for the day when somebody else wants it.
//!
//! ```text
//!   block ──drop──▶ other uses done? ──yes──▶ heap (epoch e of this stream)
//!                        │ no                   ▲
//!                        ▼                      │ all done, or this stream waits for them
//!                     pending ──────────────────┘
//! ```

use crate::{
    Request,
    block::{Freed, UntilFree},
    leasing::ALWAYS_OWN,
    pool::Inner,
};
use aquifer_core::{Action, MemoryError, Tag, budget::Holding, event::Ticket};
use aquifer_driver::{BlockNote, DeviceRange, Driver, Ownership, RawStream};
use aquifer_heap::{Config, Heap, Range};
use aquifer_stream::{Noted, Spin, StreamPool, Timeline, UseList};
use crossbeam_utils::CachePadded;
use std::{
    fmt,
    sync::{Arc, Mutex, PoisonError},
};

/// A stream's cache, at an address that stays valid for the life of the process.
pub(crate) struct Home {
    state: CachePadded<Spin<State>>,
}

/// The cache itself. All of it is reached under the lock.
pub(crate) struct State {
    pub(crate) heap: Heap,
    /// Freed blocks that others still use.
    pub(crate) pending: Vec<Pending>,
    /// Threads that have taken the pending blocks out to settle them.
    settling: u32,
    pub(crate) account: Account,
    /// The epoch of the last free: what has to be fenced before anybody else may have what is free here.
    pub(crate) last_free: u64,
    /// `None` in a shell that waits for a stream.
    serving: Option<Serving>,
}

/// What a shell serves.
struct Serving {
    pool: Arc<Inner>,
    timeline: Arc<Timeline>,
    /// Whether the pool is open: a closed pool's shell is retired with its last block.
    open: bool,
}

/// What a cache counts. Plain numbers: they change under its lock.
#[derive(Default, Clone)]
pub(crate) struct Account {
    pub(crate) live: u64,
    pub(crate) requested: u64,
    pub(crate) peak_live: u64,
    pub(crate) peak_requested: u64,
    pub(crate) pending: u64,
    pub(crate) blocks: u64,
    pub(crate) allocations: u64,
    pub(crate) frees: u64,
    /// By tag; few tags, so a search from the front.
    pub(crate) holdings: Vec<Holding>,
}

/// A freed block that is held back for its other users.
pub(crate) struct Pending {
    pub(crate) freed: Freed,
    /// The epoch of the home stream that covers the block's own work.
    epoch: u64,
    /// Uses that were not known to be done at the last look.
    pub(crate) uses: Vec<Noted>,
    until_free: UntilFree,
}

/// How far to go for a pending block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Settle {
    /// Take those whose uses are known to be done.
    Done,
    /// Also make the stream wait for uses that are stamped.
    Wait,
}

/// Shells without a stream.
static RETIRED: Mutex<Vec<&'static Home>> = Mutex::new(Vec::new());

/// What is left of a shell's service when its last block has come home: to be dropped outside the lock.
pub(crate) struct Retired {
    heap: Heap,
    serving: Option<Serving>,
}

impl Home {
    /// A shell that serves `timeline` for `pool`.
    pub(crate) fn open(pool: Arc<Inner>, timeline: Arc<Timeline>) -> &'static Home {
        let old = RETIRED.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let home = old.unwrap_or_else(|| {
            Box::leak(Box::new(Home {
                state: CachePadded::new(Spin::new(State {
                    heap: Heap::new(Config::device()),
                    pending: Vec::new(),
                    settling: 0,
                    account: Account::default(),
                    last_free: 0,
                    serving: None,
                })),
            }))
        });
        home.state.with(|s| s.serving = Some(Serving { pool, timeline, open: true }));
        home
    }

    /// Runs `work` under the lock. Never a driver call in there.
    #[inline]
    pub(crate) fn with<R>(&self, work: impl FnOnce(&mut State) -> R) -> R {
        self.state.with(work)
    }

    /// The stream it serves.
    pub(crate) fn timeline(&self) -> Arc<Timeline> {
        // A shell serves a stream as long as a block or an open pool refers to it, and only those call this.
        self.with(|s| s.serving.as_ref().map(|serving| serving.timeline.clone()))
            .unwrap_or_else(|| unreachable!("a block outlived its shell's service"))
    }

    /// The streams of its pool.
    pub(crate) fn streams(&self) -> Option<StreamPool> {
        self.with(|s| s.serving.as_ref().map(|serving| serving.pool.streams().clone()))
    }

    /// A block out of the cache, if it has room. The hot path.
    #[inline]
    pub(crate) fn try_alloc(&'static self, pool: &Inner, request: &Request) -> Option<crate::Block> {
        if request.size() > ALWAYS_OWN && pool.leasing.is_together() {
            return None;
        }
        let (place, ticket) = self.with(|s| {
            let place = s.allocate(request)?;
            Some((place, pool.ticket()))
        })?;
        Some(pool.hand_out(self, place, request, ticket))
    }

    /// Takes a freed block back.
    #[inline]
    pub(crate) fn take_back(&'static self, freed: Freed, uses: &mut UseList, until_free: &mut UntilFree) {
        if !uses.is_empty() || until_free.is_some() || freed.generation != 0 {
            return self.take_back_with_ends(freed, uses, until_free);
        }
        self.put_back(freed);
    }

    /// A block that nobody else uses: straight into the heap.
    #[inline]
    fn put_back(&'static self, freed: Freed) {
        let (retired, reports, fence) = self.with(|s| {
            s.account.freed(&freed);
            let reports = s.reports();
            let epoch = s.timeline().map_or(0, |t| t.open());
            let fence = s.timeline().filter(|t| t.fences_at_once()).cloned().map(|t| (t, epoch));
            s.give_to_heap(&freed.place, epoch);
            (s.retire_if_done(), reports, fence)
        });
        if let Some((timeline, epoch)) = fence {
            // A refusal leaves the range without a proof, so nobody else gets it before a later event covers it.
            let _ = timeline.fence_at_once(epoch);
        }
        if let Some((pool, free, complete)) = reports {
            self.report(&pool, free, Action::Free, &freed);
            self.report(&pool, complete, Action::Complete, &freed);
        }
        if let Some(retired) = retired {
            self.finish(retired);
        }
    }

    #[cold]
    fn take_back_with_ends(&'static self, freed: Freed, uses: &mut UseList, until_free: &mut UntilFree) {
        let timeline = self.timeline();
        let uses = uses.take(&timeline);
        let until_free = until_free.take();
        if uses.is_empty() {
            freed.note(&timeline, Ownership::Free);
            drop(until_free);
            return self.put_back(freed);
        }
        let users: Vec<RawStream> = uses.iter().map(|u| u.on().raw()).collect();
        freed.note(&timeline, Ownership::Pending { users: &users });
        let epoch = timeline.open();
        // As above.
        let _ = timeline.fence_at_once(epoch);
        let reports = self.with(|s| {
            s.account.freed(&freed);
            s.account.pending += freed.place.bytes;
            s.pending.push(Pending { freed, epoch, uses, until_free });
            s.report_one()
        });
        if let Some((pool, ticket)) = reports {
            self.report(&pool, ticket, Action::Free, &freed);
        }
    }

    fn report(&'static self, pool: &Inner, ticket: Ticket, action: Action, freed: &Freed) {
        pool.report(Some(ticket), action, self, freed.place.address, freed.requested, freed.tag);
    }

    /// Puts pending blocks into the heap whose other uses are over. Answers with the bytes, and with the waits it had
    /// to queue. Calls the driver, never under the lock.
    pub(crate) fn settle(&'static self, how: Settle) -> aquifer_core::Result<(u64, u64)> {
        let (mut pending, timeline) = {
            let taken = self.with(|s| {
                let serving = s.serving.as_ref()?;
                if s.pending.is_empty() {
                    return None;
                }
                let timeline = serving.timeline.clone();
                s.settling += 1;
                Some((std::mem::take(&mut s.pending), timeline))
            });
            let Some(taken) = taken else { return Ok((0, 0)) };
            taken
        };
        // A stream that is fenced at once may be gone by now, and is not called for.
        let may_wait = how == Settle::Wait && !timeline.fences_at_once() && timeline.waits_unasked();
        // Meanwhile these blocks are nobody's: no other thread can settle them twice.
        let (mut waits, mut bytes) = (0, 0);
        let mut outcome = Ok(());
        let mut rest = Vec::new();
        for mut entry in pending.drain(..) {
            entry.uses.retain(|u| !u.is_done());
            let waited_for = |u: &Noted| u.epoch().is_some_and(|epoch| u.on().is_waited_for_unasked(epoch));
            if may_wait && outcome.is_ok() && entry.uses.iter().all(waited_for) {
                for noted in &entry.uses {
                    match noted.epoch().map_or(Ok(false), |epoch| timeline.wait_for(noted.on(), epoch)) {
                        Ok(waited) => waits += u64::from(waited),
                        Err(error) => {
                            outcome = Err(error);
                            break;
                        }
                    }
                }
                if outcome.is_ok() {
                    entry.uses.clear();
                    // The waits are queued, and belong to the epoch that is open now.
                    entry.epoch = timeline.open();
                }
            }
            if entry.uses.is_empty() {
                bytes += entry.freed.place.bytes;
                self.complete(&timeline, entry);
            } else {
                rest.push(entry);
            }
        }
        let retired = self.with(|s| {
            s.pending.append(&mut rest);
            s.settling -= 1;
            s.retire_if_done()
        });
        if let Some(retired) = retired {
            self.finish(retired);
        }
        outcome.map(|()| (bytes, waits))
    }

    /// Whether another stream may be made to wait for what is free here: see [`Timeline::is_waited_for_unasked`].
    pub(crate) fn is_waited_for(&self) -> bool {
        let (timeline, last_free) = self.with(|s| (s.timeline().cloned(), s.last_free));
        timeline.is_some_and(|timeline| timeline.is_waited_for_unasked(last_free))
    }

    /// A pending block's last use is over.
    fn complete(&'static self, timeline: &Arc<Timeline>, entry: Pending) {
        let Pending { freed, epoch, until_free, .. } = entry;
        freed.note(timeline, Ownership::Free);
        drop(until_free);
        let reports = self.with(|s| {
            s.account.pending -= freed.place.bytes;
            let reports = s.report_one();
            s.give_to_heap(&freed.place, epoch);
            reports
        });
        if let Some((pool, ticket)) = reports {
            self.report(&pool, ticket, Action::Complete, &freed);
        }
    }

    /// The pool is closed: the shell retires when its last block has come home, perhaps now.
    pub(crate) fn close(&'static self) {
        // Whoever still uses a pending block must be waited for, or its memory could not go. Uses that nobody has
        // finished cannot be: their blocks, and this shell, stay.
        loop {
            match self.wait_for_pending(None) {
                Ok(true) => {}
                Ok(false) => break,
                Err(MemoryError::DeviceLost { .. }) => {
                    // Nothing runs there any more.
                    let users: Vec<Arc<Timeline>> = self
                        .with(|s| s.pending.iter().flat_map(|p| &p.uses).map(|u| u.on().clone()).collect());
                    users.iter().for_each(|user| user.abandon());
                    let _ = self.settle(Settle::Done);
                    break;
                }
                Err(_) => break,
            }
        }
        let retired = self.with(|s| {
            if let Some(serving) = &mut s.serving {
                serving.open = false;
            }
            s.retire_if_done()
        });
        if let Some(retired) = retired {
            self.finish(retired);
        }
    }

    /// Waits for the oldest stamped uses of pending blocks, then settles. Says whether there was one to wait for.
    pub(crate) fn wait_for_pending(
        &'static self,
        deadline: Option<std::time::Instant>,
    ) -> aquifer_core::Result<bool> {
        let oldest: Vec<(Arc<Timeline>, u64)> = self.with(|s| {
            let stamped = |p: &&Pending| p.uses.iter().all(|u| u.epoch().is_some());
            let first = s.pending.iter().find(stamped);
            first.map_or_else(Vec::new, |p| {
                p.uses.iter().filter_map(|u| Some((u.on().clone(), u.epoch()?))).collect()
            })
        });
        for (timeline, epoch) in &oldest {
            timeline.wait(*epoch, deadline)?;
        }
        if !oldest.is_empty() {
            self.settle(Settle::Done)?;
        }
        Ok(!oldest.is_empty())
    }

    /// Ends a shell's service: everything queued on its stream is waited for, and its ranges go back to the pool.
    #[cold]
    pub(crate) fn finish(&'static self, retired: Retired) {
        if let Some(Serving { pool, timeline, .. }) = retired.serving {
            match timeline.quiesce() {
                Ok(()) => pool.take_home_back(self, &timeline, &retired.heap),
                Err(MemoryError::DeviceLost { .. }) => {
                    // Nothing runs there any more.
                    timeline.abandon();
                    pool.take_home_back(self, &timeline, &retired.heap);
                }
                // Work may still run on this memory, so it stays mapped and charged.
                Err(_) => pool.keep_home(self, &timeline),
            }
            drop(timeline);
            drop(pool);
        }
        drop(retired.heap);
        RETIRED.lock().unwrap_or_else(PoisonError::into_inner).push(self);
    }
}

impl State {
    /// A range for `request` out of the heap, and counted.
    #[inline]
    pub(crate) fn allocate(&mut self, request: &Request) -> Option<aquifer_heap::Block> {
        let place = self.heap.alloc(request.size(), request.alignment())?;
        self.account.allocated(place.bytes, request);
        Some(place)
    }

    /// As [`State::allocate`], in exactly this free range.
    pub(crate) fn allocate_at(&mut self, range: Range, request: &Request) -> Option<aquifer_heap::Block> {
        let place = self.heap.alloc_at(range).ok()?;
        self.account.allocated(place.bytes, request);
        Some(place)
    }

    #[inline]
    fn give_to_heap(&mut self, place: &aquifer_heap::Block, epoch: u64) {
        self.last_free = self.last_free.max(epoch);
        // A block is freed once, by the token that owns it; should the heap refuse all the same, the bytes stay out of
        // use, which is the one outcome that corrupts nothing.
        let freed = self.heap.free_block(place, epoch);
        debug_assert!(freed.is_ok(), "the heap refused a block's only token: {freed:?}");
    }

    /// Places in the order of events for a free and its completion, if anybody listens.
    #[inline]
    fn reports(&self) -> Option<(Arc<Inner>, Ticket, Ticket)> {
        let pool = &self.serving.as_ref()?.pool;
        let (free, complete) = (pool.ticket()?, pool.ticket()?);
        Some((pool.clone(), free, complete))
    }

    /// A place for one event.
    fn report_one(&self) -> Option<(Arc<Inner>, Ticket)> {
        let pool = &self.serving.as_ref()?.pool;
        let ticket = pool.ticket()?;
        Some((pool.clone(), ticket))
    }

    /// The stream it serves, if any.
    pub(crate) fn timeline(&self) -> Option<&Arc<Timeline>> {
        self.serving.as_ref().map(|serving| &serving.timeline)
    }

    /// Adds memory in order with the stream from `stamp` on. The caller has made sure that it is nobody's.
    pub(crate) fn add(&mut self, range: Range, stamp: u64) {
        let added = self.heap.add(range, stamp);
        debug_assert!(added.is_ok(), "a range that was nobody's is in the heap: {added:?}");
    }

    /// Adds memory that no block may cross the ends of.
    pub(crate) fn add_segment(&mut self, range: Range, stamp: u64) {
        let added = self.heap.add_segment(range, stamp);
        debug_assert!(added.is_ok(), "a range that was nobody's is in the heap: {added:?}");
    }

    fn retire_if_done(&mut self) -> Option<Retired> {
        let over = self.serving.as_ref().is_some_and(|v| !v.open);
        if !over || self.account.blocks > 0 || !self.pending.is_empty() || self.settling > 0 {
            return None;
        }
        self.account = Account::default();
        self.last_free = 0;
        let heap = std::mem::replace(&mut self.heap, Heap::new(Config::device()));
        Some(Retired { heap, serving: self.serving.take() })
    }
}

impl Account {
    #[inline]
    fn allocated(&mut self, bytes: u64, request: &Request) {
        self.live += bytes;
        self.requested += request.size();
        self.peak_live = self.peak_live.max(self.live);
        self.peak_requested = self.peak_requested.max(self.requested);
        self.blocks += 1;
        self.allocations += 1;
        let holding = self.holding(request.owner());
        holding.bytes += request.size();
        holding.blocks += 1;
    }

    #[inline]
    fn freed(&mut self, freed: &Freed) {
        self.live -= freed.place.bytes;
        self.requested -= freed.requested;
        self.blocks -= 1;
        self.frees += 1;
        let holding = self.holding(freed.tag);
        holding.bytes -= freed.requested;
        holding.blocks -= 1;
    }

    #[inline]
    fn holding(&mut self, tag: Tag) -> &mut Holding {
        let at = self.holdings.iter().position(|h| h.tag == tag).unwrap_or_else(|| {
            self.holdings.push(Holding { tag, bytes: 0, blocks: 0 });
            self.holdings.len() - 1
        });
        &mut self.holdings[at]
    }
}

/// Tells a driver that checks whose a range is.
pub(crate) fn note(driver: &Arc<dyn Driver>, generation: u64, range: DeviceRange, owner: Ownership<'_>) {
    if generation != 0
        && let Some(observer) = driver.observer()
    {
        observer.block(BlockNote { range, owner });
    }
}

impl Freed {
    fn note(&self, timeline: &Timeline, owner: Ownership<'_>) {
        let (address, bytes) = (self.place.address, self.place.bytes);
        let range = DeviceRange { device: timeline.raw().device(), address, bytes };
        note(timeline.driver(), self.generation, range, owner);
    }
}

impl fmt::Debug for Home {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.with(|s| {
            f.debug_struct("Home")
                .field("live", &s.account.live)
                .field("pending", &s.account.pending)
                .field("stream", &s.timeline().map(|t| t.number()))
                .finish_non_exhaustive()
        })
    }
}
