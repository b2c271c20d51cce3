//! Where a stream's blocks live and where they return to.
//!
//! Each stream has a cache of its own, so that allocating and freeing on it touch nothing that
//! another stream touches. The cache stands in a *shell*: leaked once, used again for another
//! stream after the last of its blocks has come home, never freed. So a block needs no reference
//! count to find its way: a plain `&'static` does.
//!
//! **What is in the heap of a cache is in order with its stream.** A block whose only user was the
//! stream goes back at once, and the stream may have it again at once. A block that others use as
//! well waits outside the heap until they are done, or until the stream has been made to wait for
//! them. Each free range carries the epoch of the stream that covers its last use, for the day when
//! somebody else wants it.
//!
//! ```text
//!   block ──drop──▶ other uses done? ──yes──▶ heap (epoch e of this stream)
//!                        │ no                   ▲
//!                        ▼                      │ all done, or this stream waits for them
//!                     pending ──────────────────┘
//! ```
//!
//! # The block that was freed last
//!
//! It waits in front of the heap, as its token was, for an allocation that asks for the same bytes
//! under the same tag: a loop over one block has no heap to ask, which would cut and merge it each
//! time. By every account it is live until it is given up, which is the first thing that happens
//! whenever anything else is wanted of the cache: [`Home::with`] sees to it. So nobody else can
//! tell that it is there, and it costs no other block a better place, but where a tighter hole
//! was free: the three recorded programs fit in 1.0092, 1.0065 and 1.0082 times their peaks
//! (1.0092, 1.0073 and 1.0089 without), on one stream in 1.0092, 1.0056 and 1.0102 (1.0092, 1.0031
//! and 1.0102).
//!
//! More than one is quicker and packs worse. 256 blocks that waited, found by size, took recorded
//! programs in fewer nanoseconds an operation (`llama_train` 37 in place of 62, `resnet_train` 47
//! in place of 52), and made all of them take more memory where it is not short, in place of 1.16,
//! 1.06 and 1.60 times their peaks:
//!
//! | blocks that wait | `llama_train` | `resnet_train` | `serve_mixed` |
//! |---|---|---|---|
//! | 8 | 1.25 | 1.08 | 1.71 |
//! | 16 | 1.26 | 1.08 | 1.65 |
//! | 32 | 1.33 | 1.10 | 1.82 |
//! | 256 | 1.34 | 1.11 | 1.89 |
//!
//! # What a pair costs
//!
//! Instructions of one allocation and one free, counted by callgrind over `benches/hot_path.rs`,
//! which says how:
//!
//! | part | a pair of any size | random ≤ 1 MiB, an operation |
//! |---|---|---|
//! | request, pool, finding the stream's cache, lock, what waits, token | 88 | with the account and the next row 125 |
//! | lock, epoch, what waits, the token's end | 62 | |
//! | the heap finds a place | – | 248 |
//! | the heap takes it back | – | 161 |
//! | the loop itself | 31 | 49 |
//! | all | 181 | 583 |
//!
//! Two of these are locked, one for each time the cache is taken. On a 2-core virtual machine a
//! pair takes 16 ns, where a `malloc` pair of 64 bytes takes 10. It took 426 instructions and 41 ns
//! at 256 bytes, 524 and 43 at 4 KiB and 346 and 30 from 64 KiB on when the heap was asked each
//! time.
//!
//! Instructions are not all: a value that is stored in parts and loaded as one waits until the
//! parts have left the store buffer, some 8 ns. With no more instructions a pair took 41 ns while
//! the token was put together from its parts, which whoever moves it loads as halves of sixteen
//! bytes, and while it came home by the stack. So a token comes and goes by halves that are copied
//! whole, from the place where it waits and to it, and what a stream's timeline keeps for a pool is
//! a number: to ask a `dyn Any` for its type is such a wait as well.
//!
//! Of a random operation most is the heap's splitting and merging: taking extents out of their bins
//! and filing them again, finding the best fit, and the records. Leaving an extent that is alone in
//! its bin there when it shrinks or grows changed random rows by -4 to +4 %; a leaf of the map from
//! pages to records remembered from call to call by less than 1 %. Neither is worth its rules.

mod figures;
pub(crate) mod vacancy;

use crate::{
    BLOCK_ALIGN, Block, Request,
    block::{Asked, Extras, Freed, Place, Rare, UntilFree, Way},
    physical::commons::Past,
    pool::Inner,
};
use aquifer_core::{Action, DeviceId, MemoryError, Tag, budget::Holding, event::Ticket};
use aquifer_driver::{BlockNote, DeviceRange, Driver, Ownership, RawStream, same_machine};
use aquifer_heap::{Config, Heap, Key, Range};
use aquifer_stream::{LastUse, Noted, Spin, StreamPool, Timeline, UseList, Uses};
use crossbeam_utils::CachePadded;
use std::{
    fmt, mem,
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
    /// Calls of [`Home::settle_now_and_then`] that are still to be skipped.
    skip: usize,
    pub(crate) account: Account,
    /// The epoch of the last free, also of blocks that are pending: what has to be fenced before
    /// other streams may have what is free here.
    pub(crate) last_free: u64,
    /// `None` in a shell that waits for a stream.
    serving: Option<Serving>,
    /// The block that was freed last.
    last: Option<Freed>,
    /// Whether it waits here for the next allocation: live by every account, and nobody's.
    last_waits: bool,
    /// A free has more to do than to give its bytes back: somebody listens, the pool is closed, or
    /// the stream has to be fenced at once.
    attention: bool,
    /// Blocks that are out as bare addresses.
    pub(crate) raw: crate::raw::Table,
}

/// What a shell serves.
struct Serving {
    pool: Arc<Inner>,
    /// Its number among the caches of the pool.
    number: usize,
    timeline: Arc<Timeline>,
    /// Whether the pool is open: a closed pool's shell is retired with its last block.
    open: bool,
}

/// What a cache counts beside what its heap counts anyway. Plain numbers: they change under its
/// lock.
///
/// A block is an addition or two: what follows from other numbers is not counted, and peaks are
/// looked at where a number grows.
#[derive(Default)]
pub(crate) struct Account {
    /// Bytes that were asked for, of the live blocks.
    pub(crate) requested: u64,
    peak_live: u64,
    peak_requested: u64,
    allocations: u64,
    /// Bytes of pending blocks: the heap still has them as live.
    pub(crate) pending: u64,
    pending_blocks: u64,
    /// Of every tag but [`Tag::NONE`], whose share is what is left.
    tagged: Vec<Holding>,
    /// Where in `tagged` the last block was counted: the next one is of the same tag as a rule.
    last: usize,
}

/// A freed block that is held back for its other users.
pub(crate) struct Pending {
    pub(crate) freed: Freed,
    /// Bytes that it holds.
    bytes: u64,
    /// As [`Extras::generation`].
    generation: u64,
    /// The epoch of the home stream that covers the block's own work.
    epoch: u64,
    /// Uses that were not known to be done at the last look.
    pub(crate) uses: Uses,
    until_free: UntilFree,
}

/// Pending blocks that one allocation may look at in vain, averaged over many.
const STEPS_A_CALL: usize = 256;

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

/// What is left to do of the end of a cache because the driver has refused to wait: within a host
/// callback it refuses every call.
enum Unended {
    Close(&'static Home, Arc<Inner>),
    Finish(&'static Home, Box<Retired>),
}

static UNENDED: Mutex<Vec<Unended>> = Mutex::new(Vec::new());

fn end_later(unended: Unended) {
    UNENDED.lock().unwrap_or_else(PoisonError::into_inner).push(unended);
}

/// Ends caches whose end the driver has refused. What it refuses again is kept for the next time.
pub(crate) fn sweep() {
    let unended = mem::take(&mut *UNENDED.lock().unwrap_or_else(PoisonError::into_inner));
    for one in unended {
        match one {
            Unended::Close(home, pool) => home.close(&pool),
            Unended::Finish(home, retired) => home.finish(*retired),
        }
    }
}

/// What is to be done once the lock is open again.
pub(crate) struct AfterFree {
    /// An event that cannot be recorded later.
    fence: Option<(Arc<Timeline>, u64)>,
    freed: Freed,
    reports: Option<Reports>,
    retired: Option<Retired>,
}

/// Events that somebody waits for, with their places. By the time they are told the shell may serve
/// another stream.
struct Reports {
    pool: Arc<Inner>,
    /// The stream's number.
    stream: u32,
    freed: Option<Ticket>,
    completed: Option<Ticket>,
}

impl Reports {
    fn tell(self, freed: &Freed) {
        let Self { pool, stream, .. } = self;
        let Place { address, asked } = freed.place;
        for (ticket, action) in [(self.freed, Action::Free), (self.completed, Action::Complete)] {
            pool.report(ticket, action, stream, address, asked.bytes(), asked.tag());
        }
    }
}

/// A shell of a closed pool, which is told when a use of a pending block has ended.
struct Closed(&'static Home, Arc<Inner>);

impl LastUse for Closed {
    fn ended(&self) {
        self.0.close(&self.1);
    }
}

/// What is left of a shell's service when its last block has come home: to be dropped outside the
/// lock.
pub(crate) struct Retired {
    heap: Heap,
    serving: Option<Serving>,
}

impl Home {
    /// A shell that serves `timeline` for `pool`.
    pub(crate) fn open(pool: Arc<Inner>, timeline: Arc<Timeline>, number: usize) -> &'static Home {
        let old = RETIRED.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let home = old.unwrap_or_else(|| {
            Box::leak(Box::new(Home {
                state: CachePadded::new(Spin::new(State {
                    heap: Heap::new(Config::device()),
                    pending: Vec::new(),
                    settling: 0,
                    skip: 0,
                    account: Account::default(),
                    last_free: 0,
                    serving: None,
                    last: None,
                    last_waits: false,
                    attention: false,
                    raw: crate::raw::Table::default(),
                })),
            }))
        });
        home.serve(pool, timeline, number);
        home
    }

    /// Serves `timeline` from now on. Nobody knows the shell.
    fn serve(&'static self, pool: Arc<Inner>, timeline: Arc<Timeline>, number: usize) {
        self.state.with(|s| {
            s.attention = pool.is_recorded() || timeline.fences_at_once();
            s.serving = Some(Serving { pool, number, timeline, open: true });
        });
    }

    /// Runs `work` under the lock. Never a driver call in there.
    pub(crate) fn with<R>(&self, work: impl FnOnce(&mut State) -> R) -> R {
        self.state.with(|s| {
            s.give_up_last();
            work(s)
        })
    }

    /// As [`Home::with`], where the block that was freed last may wait on: for what looks neither
    /// at the heap nor at the account.
    #[inline]
    pub(crate) fn with_last<R>(&self, work: impl FnOnce(&mut State) -> R) -> R {
        self.state.with(work)
    }

    /// The stream it serves.
    pub(crate) fn timeline(&self) -> Arc<Timeline> {
        // A shell serves a stream as long as a block or an open pool refers to it, and only those
        // call this.
        self.with_last(|s| s.serving.as_ref().map(|serving| serving.timeline.clone()))
            .unwrap_or_else(|| unreachable!("a block outlived its shell's service"))
    }

    /// The streams of its pool.
    pub(crate) fn streams(&self) -> Option<StreamPool> {
        self.with_last(|s| s.serving.as_ref().map(|serving| serving.pool.streams().clone()))
    }

    /// A block out of the cache, if it has room. The hot path where nobody listens.
    #[inline]
    pub(crate) fn quick_alloc(&'static self, request: &Request) -> Option<Block> {
        self.state.with(|s| s.take(self, request).map(Block::at_home))
    }

    /// As [`Home::quick_alloc`], and whoever wants to know of it is told. Not for what comes from
    /// the commons.
    pub(crate) fn try_alloc(&'static self, pool: &Inner, request: &Request) -> Option<Block> {
        if pool.leasing.takes_over(request.size()) {
            return None;
        }
        let (freed, ticket) = self.state.with(|s| {
            let freed = *s.take(self, request)?;
            Some((freed, pool.ticket()))
        })?;
        Some(pool.hand_out(self, &freed, ticket))
    }

    /// Bytes that a block of this cache holds.
    pub(crate) fn size_of(&self, address: u64, key: Key) -> u64 {
        self.with(|s| s.heap.size_of_keyed(address, key)).unwrap_or(0)
    }

    /// Takes a block back that nobody else uses. The hot path.
    #[inline]
    pub(crate) fn put_back(&'static self, way: &Way, place: &Place) {
        let after = self.state.with(|s| s.put_back(way, place));
        self.attend(after);
    }

    /// Does what a free has left to do.
    #[inline]
    pub(crate) fn attend(&'static self, after: Option<Box<AfterFree>>) {
        if let Some(after) = after {
            self.attend_to(after);
        }
    }

    #[cold]
    fn attend_to(&'static self, after: Box<AfterFree>) {
        if let Some((timeline, epoch)) = after.fence {
            // A refusal leaves the range without a proof, so nobody else gets it before a later
            // event covers it.
            let _ = timeline.fence_at_once(epoch);
        }
        if let Some(reports) = after.reports {
            reports.tell(&after.freed);
        }
        if let Some(retired) = after.retired {
            self.finish(retired);
        }
    }

    /// Takes a block back that others may use, or that somebody wants to know of.
    #[cold]
    pub(crate) fn put_back_with_extras(
        &'static self,
        freed: Freed,
        uses: &mut UseList,
        extras: Rare<Extras>,
    ) {
        let timeline = self.timeline();
        let uses = uses.take(&timeline);
        // Live bytes end here, behind everything else.
        let Extras { generation, until_free, live: _live } = extras.or_default();
        let range = DeviceRange {
            device: timeline.raw().device(),
            address: freed.place.address,
            bytes: if generation == 0 {
                0
            } else {
                self.size_of(freed.place.address, freed.way.key)
            },
        };
        if uses.is_empty() {
            note(timeline.driver(), generation, range, Ownership::Free);
            drop(until_free);
            return self.put_back(&freed.way, &freed.place);
        }
        if generation != 0 {
            let users: Vec<RawStream> = uses.iter().map(|u| u.on().raw()).collect();
            note(timeline.driver(), generation, range, Ownership::Pending { users: &users });
        }
        let epoch = timeline.open();
        // A refusal leaves the range without a proof, so nobody else gets it before a later event
        // covers it.
        let _ = timeline.fence_at_once(epoch);
        let (reports, closed) = self.with(|s| {
            let bytes = s.heap.size_of_keyed(freed.place.address, freed.way.key).unwrap_or(0);
            s.account.freed(freed.place.asked);
            s.account.pending += bytes;
            s.account.pending_blocks += 1;
            // The block's own work ends in this epoch, so the next fence of this stream has to
            // cover it.
            s.last_free = s.last_free.max(epoch);
            s.pending.push(Pending { freed, bytes, generation, epoch, uses, until_free });
            let closed = s.serving.as_ref().filter(|serving| !serving.open);
            (s.reports(true, false), closed.map(|serving| serving.pool.clone()))
        });
        if let Some(reports) = reports {
            reports.tell(&freed);
        }
        if let Some(pool) = closed {
            // Nobody else looks at it again.
            self.close(&pool);
        }
    }

    /// [`Home::settle`] with [`Settle::Done`], at a cost for each call that does not grow with the
    /// number of pending blocks: a walk that has released nothing is not repeated in the next
    /// calls, one for each [`STEPS_A_CALL`] blocks that it went over. Returns the bytes.
    pub(crate) fn settle_now_and_then(&'static self) -> aquifer_core::Result<u64> {
        let due = self.with(|s| {
            let due = s.skip == 0;
            s.skip = s.skip.saturating_sub(1);
            due.then_some(s.pending.len())
        });
        let Some(pending) = due else { return Ok(0) };
        let (bytes, _) = self.settle(Settle::Done)?;
        if bytes == 0 {
            self.with(|s| s.skip = pending / STEPS_A_CALL);
        }
        Ok(bytes)
    }

    /// Puts pending blocks into the heap whose other uses are over. Answers with the bytes, and
    /// with the waits it had to queue. Calls the driver, never under the lock.
    pub(crate) fn settle(&'static self, how: Settle) -> aquifer_core::Result<(u64, u64)> {
        let (mut pending, timeline) = {
            let taken = self.with(|s| {
                let serving = s.serving.as_ref()?;
                if s.pending.is_empty() {
                    return None;
                }
                let timeline = serving.timeline.clone();
                s.settling += 1;
                Some((mem::take(&mut s.pending), timeline))
            });
            let Some(taken) = taken else { return Ok((0, 0)) };
            taken
        };
        // A stream that is fenced at once may be gone by now, and is not called for.
        let may_wait =
            how == Settle::Wait && !timeline.fences_at_once() && timeline.waits_unasked();
        // Meanwhile these blocks are nobody's: no other thread can settle them twice.
        let (mut waits, mut bytes) = (0, 0);
        let mut outcome = Ok(());
        let over = pending.extract_if(.., |entry| {
            entry.uses.forget_done();
            let waited_for =
                |u: Noted| u.epoch().is_some_and(|epoch| u.on().is_waited_for_unasked(epoch));
            if may_wait && outcome.is_ok() && entry.uses.iter().all(waited_for) {
                for noted in entry.uses.iter() {
                    match noted
                        .epoch()
                        .map_or(Ok(false), |epoch| timeline.wait_for(noted.on(), epoch))
                    {
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
            entry.uses.is_empty()
        });
        for entry in over {
            bytes += entry.bytes;
            self.complete(&timeline, entry);
        }
        let retired = self.with(|s| {
            if s.pending.is_empty() {
                // With its room, so that the next block that is held back makes none.
                mem::swap(&mut s.pending, &mut pending);
            } else {
                s.pending.append(&mut pending);
            }
            s.settling -= 1;
            s.retire_if_done()
        });
        if let Some(retired) = retired {
            self.finish(retired);
        }
        outcome.map(|()| (bytes, waits))
    }

    /// Whether another stream may be made to wait for what is free here: see
    /// [`Timeline::is_waited_for_unasked`].
    pub(crate) fn is_waited_for(&self) -> bool {
        let (timeline, last_free) = self.with(|s| (s.timeline().cloned(), s.last_free));
        timeline.is_some_and(|timeline| timeline.is_waited_for_unasked(last_free))
    }

    /// A pending block's last use is over.
    fn complete(&'static self, timeline: &Arc<Timeline>, entry: Pending) {
        let Pending { freed, bytes, generation, epoch, until_free, .. } = entry;
        let range =
            DeviceRange { device: timeline.raw().device(), address: freed.place.address, bytes };
        note(timeline.driver(), generation, range, Ownership::Free);
        let kept = until_free.is_some();
        drop(until_free);
        let reports = self.with(|s| {
            if let Some(serving) = s.serving.as_ref().filter(|_| kept) {
                serving.pool.apart.note_end();
            }
            s.account.pending -= bytes;
            s.account.pending_blocks -= 1;
            let reports = s.reports(false, true);
            s.give_to_heap(&freed, epoch);
            reports
        });
        if let Some(reports) = reports {
            reports.tell(&freed);
        }
    }

    /// `pool` is closed: if the shell serves it still, it retires when its last block has come
    /// home, perhaps now.
    pub(crate) fn close(&'static self, pool: &Arc<Inner>) {
        // Uses that nobody has finished cannot be waited for: their blocks, and this shell, stay
        // until the last of them ends, and says so. By then another use's end may have let the
        // shell go, to serve another pool.
        let whom: Arc<dyn LastUse> = Arc::new(Closed(self, pool.clone()));
        let serves = self.with(|s| {
            let serves = s.serves(pool);
            for pending in s.pending.iter().filter(|_| serves) {
                let _open = pending.uses.tell(&whom);
            }
            serves
        });
        if !serves {
            return;
        }
        // Whoever else uses a pending block must be waited for, or its memory could not go.
        loop {
            match self.wait_for_pending(None) {
                Ok(true) => {}
                Ok(false) => break,
                Err(MemoryError::DeviceLost { .. }) => {
                    // Nothing runs there any more.
                    let users: Vec<Arc<Timeline>> = self.with(|s| {
                        s.pending
                            .iter()
                            .flat_map(|p| p.uses.iter())
                            .map(|u| u.on().clone())
                            .collect()
                    });
                    users.iter().for_each(|user| user.abandon());
                    let _ = self.settle(Settle::Done);
                    break;
                }
                Err(MemoryError::Driver(_)) => {
                    end_later(Unended::Close(self, pool.clone()));
                    break;
                }
                Err(_) => break,
            }
        }
        let retired = self.with(|s| {
            if !s.serves(pool) {
                return None;
            }
            if let Some(serving) = &mut s.serving {
                serving.open = false;
            }
            s.attention = true;
            s.retire_if_done()
        });
        if let Some(retired) = retired {
            self.finish(retired);
        }
    }

    /// Waits for the oldest stamped uses of pending blocks, then settles. Says whether there was
    /// one to wait for.
    pub(crate) fn wait_for_pending(
        &'static self,
        deadline: Option<std::time::Instant>,
    ) -> aquifer_core::Result<bool> {
        let oldest: Past = self.with(|s| {
            let first = s.pending.iter().find(|p| !p.uses.is_open());
            first.into_iter().flat_map(|p| p.uses.stamped()).collect()
        });
        for (timeline, epoch) in &oldest {
            timeline.wait(*epoch, deadline)?;
        }
        if !oldest.is_empty() {
            self.settle(Settle::Done)?;
        }
        Ok(!oldest.is_empty())
    }

    /// Ends a shell's service: everything queued on its stream is waited for, and its ranges go
    /// back to the pool.
    #[cold]
    pub(crate) fn finish(&'static self, mut retired: Retired) {
        if let Some(serving) = retired.serving.take() {
            let Serving { pool, timeline, .. } = &serving;
            match timeline.quiesce() {
                Ok(()) => pool.take_home_back(self, timeline, &retired.heap),
                Err(MemoryError::DeviceLost { .. }) => {
                    // Nothing runs there any more.
                    timeline.abandon();
                    pool.take_home_back(self, timeline, &retired.heap);
                }
                // Work may still run on this memory, so it stays mapped and charged until the
                // driver is asked again.
                Err(MemoryError::Driver(_)) => {
                    retired.serving = Some(serving);
                    return end_later(Unended::Finish(self, Box::new(retired)));
                }
                // Nor can it ever be told when that work is done.
                Err(_) => pool.keep_home(self, timeline),
            }
            let Serving { pool, timeline, .. } = serving;
            drop(timeline);
            drop(pool);
        }
        drop(retired.heap);
        RETIRED.lock().unwrap_or_else(PoisonError::into_inner).push(self);
    }
}

impl State {
    /// A block for `request`: the one that was freed last if that is what was asked for then, or
    /// out of the heap. A loop that allocates and frees one block would have the heap merge and cut
    /// it each time.
    #[inline]
    pub(crate) fn take(&mut self, home: &'static Home, request: &Request) -> Option<&Freed> {
        let fits = |last: &Freed| {
            last.place.asked == Asked::new(request.size(), request.owner())
                && request.alignment() == BLOCK_ALIGN
        };
        if self.last_waits && self.last.as_ref().is_some_and(fits) {
            // Nothing has changed since it was its owner's: no other account, and no peak.
            self.account.allocations += 1;
        } else {
            self.find(home, request)?;
        }
        self.last_waits = false;
        self.last.as_ref()
    }

    /// Has the heap find a block for `request`, and puts it where the one that was freed last
    /// stood.
    #[inline(never)]
    fn find(&mut self, home: &'static Home, request: &Request) -> Option<()> {
        self.give_up_last();
        let found = self.allocate(request)?;
        self.last = Some(Freed::found(home, &found, request));
        Some(())
    }

    /// Ends the block that was freed last by every account.
    #[inline]
    fn give_up_last(&mut self) {
        if mem::take(&mut self.last_waits) {
            self.give_up();
        }
    }

    #[inline(never)]
    fn give_up(&mut self) {
        if let Some(last) = self.last {
            self.account.freed(last.place.asked);
            // No free has come since, so this is its own epoch, or a later one.
            self.give_to_heap(&last, self.last_free);
        }
    }

    /// A range for `request` out of the heap, and counted.
    #[inline]
    pub(crate) fn allocate(&mut self, request: &Request) -> Option<aquifer_heap::Block> {
        let place = self.heap.alloc(request.size(), request.alignment())?;
        self.count(request);
        Some(place)
    }

    /// As [`State::allocate`], in exactly this free range.
    pub(crate) fn allocate_at(
        &mut self,
        range: Range,
        request: &Request,
    ) -> Option<aquifer_heap::Block> {
        let place = self.heap.alloc_at(range).ok()?;
        self.count(request);
        Some(place)
    }

    /// Counts a block that the heap has just made.
    #[inline]
    fn count(&mut self, request: &Request) {
        let live = self.live();
        let account = &mut self.account;
        account.peak_live = account.peak_live.max(live);
        account.allocations += 1;
        account.requested += request.size();
        account.peak_requested = account.peak_requested.max(account.requested);
        if request.owner() != Tag::NONE {
            let holding = account.holding(request.owner());
            holding.bytes += request.size();
            holding.blocks += 1;
        }
    }

    /// The open epoch of the stream.
    #[inline]
    fn open_epoch(&self) -> u64 {
        self.serving.as_ref().map_or(0, |serving| serving.timeline.open())
    }

    /// Takes a block back. What is answered is to be attended to.
    #[inline]
    pub(crate) fn put_back(&mut self, way: &Way, place: &Place) -> Option<Box<AfterFree>> {
        self.give_up_last();
        self.last = Some(Freed { way: *way, place: *place });
        self.last_free = self.last_free.max(self.open_epoch());
        self.last_waits = true;
        if self.attention { self.after_free() } else { None }
    }

    /// Remembers for the pool that an address of this cache is out.
    pub(crate) fn note_raw(&self, address: u64) {
        if let Some(serving) = &self.serving {
            serving.pool.directory.note(address, serving.number);
        }
    }

    #[inline]
    fn give_to_heap(&mut self, freed: &Freed, epoch: u64) {
        self.last_free = self.last_free.max(epoch);
        // A block is freed once, by the token that owns it; should the heap refuse all the same,
        // the bytes stay out of use, which is the one outcome that corrupts nothing.
        let freed = self.heap.free_keyed(freed.place.address, freed.way.key, epoch);
        debug_assert!(freed.is_ok(), "the heap refused a block's only token: {freed:?}");
    }

    /// What a free has to do where something else depends on it. Boxed, since hardly any has.
    #[cold]
    fn after_free(&mut self) -> Option<Box<AfterFree>> {
        self.give_up_last();
        let freed = self.last?;
        let reports = self.reports(true, true);
        let fence =
            self.timeline().filter(|t| t.fences_at_once()).map(|t| (t.clone(), self.last_free));
        Some(Box::new(AfterFree { fence, freed, reports, retired: self.retire_if_done() }))
    }

    /// Places in the order of events for a free, for its completion, or for both, if anybody
    /// listens.
    fn reports(&self, freed: bool, completed: bool) -> Option<Reports> {
        let Serving { pool, timeline, .. } = self.serving.as_ref()?;
        if !pool.is_recorded() {
            return None;
        }
        let ticket = |wanted: bool| if wanted { pool.ticket() } else { None };
        let (freed, completed) = (ticket(freed), ticket(completed));
        Some(Reports { pool: pool.clone(), stream: timeline.number(), freed, completed })
    }

    fn serves(&self, pool: &Arc<Inner>) -> bool {
        self.serving.as_ref().is_some_and(|serving| Arc::ptr_eq(&serving.pool, pool))
    }

    /// The stream it serves, if any.
    pub(crate) fn timeline(&self) -> Option<&Arc<Timeline>> {
        self.serving.as_ref().map(|serving| &serving.timeline)
    }

    /// Adds memory in order with the stream from `stamp` on. The caller has made sure that it is
    /// nobody's.
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
        if !over || self.blocks() > 0 || !self.pending.is_empty() || self.settling > 0 {
            return None;
        }
        self.account = Account::default();
        self.last_free = 0;
        self.attention = false;
        let heap = mem::replace(&mut self.heap, Heap::new(Config::device()));
        Some(Retired { heap, serving: self.serving.take() })
    }
}

impl Account {
    #[inline]
    fn freed(&mut self, asked: Asked) {
        self.requested -= asked.bytes();
        if asked.tag() != Tag::NONE {
            let holding = self.holding(asked.tag());
            holding.bytes -= asked.bytes();
            holding.blocks -= 1;
        }
    }

    #[inline]
    fn holding(&mut self, tag: Tag) -> &mut Holding {
        if self.tagged.get(self.last).is_none_or(|h| h.tag != tag) {
            self.last = self.find(tag);
        }
        &mut self.tagged[self.last]
    }

    /// Few tags, so a search from the front.
    #[inline(never)]
    fn find(&mut self, tag: Tag) -> usize {
        self.tagged.iter().position(|h| h.tag == tag).unwrap_or_else(|| {
            self.tagged.push(Holding { tag, bytes: 0, blocks: 0 });
            self.tagged.len() - 1
        })
    }
}

/// Refuses a stream of another device or machine.
pub(crate) fn check_home(
    driver: &dyn Driver,
    expected: DeviceId,
    stream: &Timeline,
) -> aquifer_core::Result<()> {
    let actual = stream.raw().device();
    if expected != actual {
        return Err(MemoryError::WrongDevice { expected, actual });
    }
    same_machine(driver, &**stream.driver())
}

/// Tells a driver that checks whose a range is.
pub(crate) fn note(
    driver: &Arc<dyn Driver>,
    generation: u64,
    range: DeviceRange,
    owner: Ownership<'_>,
) {
    if generation != 0
        && let Some(observer) = driver.observer()
    {
        observer.block(BlockNote { range, owner });
    }
}

impl fmt::Debug for Home {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.with(|s| {
            f.debug_struct("Home")
                .field("live", &s.live())
                .field("pending", &s.account.pending)
                .field("stream", &s.timeline().map(|t| t.number()))
                .finish_non_exhaustive()
        })
    }
}
