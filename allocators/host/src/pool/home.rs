//! The pool core that allocators point to. Cores are never freed, and are recycled with a new
//! generation.

use super::{
    Shared,
    classes::{self, LINE},
    depot::Depot,
    magazine::{LARGE_MAX, Magazine, Tally},
    map,
    slabs::SHARDS,
    span::{EXACT, Slot, Span},
    state::{Freed, Released, State},
    thread::{self, AtWork, THREADS},
};
use crate::kernel::{ForkSafe, LockOrder, Process, pointer};
use aquifer_core::{Action, Gate, MemoryError, Result, Tag, event::Ticket};
use aquifer_driver::HostAccess;
use aquifer_stream::Spin;
use crossbeam_utils::CachePadded;
use std::{
    alloc::Layout,
    fmt,
    num::NonZeroUsize,
    ptr::NonNull,
    sync::{
        Arc, Condvar, Mutex, OnceLock, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

/// The core of a pool.
pub(super) struct Home {
    /// By thread number.
    magazines: Box<[OnceLock<Box<Magazine>>]>,
    /// Free blocks that the magazines share.
    depot: Depot,
    /// Whether an observer is notified of the host's accesses to this pool's memory. Read on each
    /// free, without the lock.
    observed: AtomicBool,
    /// Whether blocks are pending, so that threads poll gates from time to time.
    look: AtomicBool,
    /// The process that has the memory. A child of it inherits the metadata in an arbitrary state,
    /// but not the memory.
    process: Process,
    /// Whether threads get magazines. A pool whose events are recorded has none.
    stocked: AtomicBool,
    /// On other cache lines than the flags, which every call reads.
    state: CachePadded<Spin<State>>,
    /// One thread at a time drains the magazines.
    draining: Mutex<()>,
    /// Whether a thread is making a region for this pool.
    pub(super) growing: Mutex<bool>,
    /// Notified when that thread has made a region or failed.
    pub(super) grown: Condvar,
}

/// Frees by allocators of an older generation than their core.
static STALE_FREES: AtomicU64 = AtomicU64::new(0);

/// Returns the number of frees in this process whose pool no longer existed, with all its blocks (a
/// count). Each was a double free, or a free of a foreign block, and was ignored. Frees that a pool
/// refused are counted in its own
/// [`PinnedStats::refused_frees`](super::PinnedStats::refused_frees).
///
/// ```
/// assert_eq!(aquifer_host::pool::stale_frees(), 0, "no block was freed twice");
/// ```
#[must_use]
pub fn stale_frees() -> u64 {
    STALE_FREES.load(Ordering::Relaxed)
}

/// Cores without a pool.
static RETIRED: ForkSafe<Vec<&'static Home>> = ForkSafe::new(LockOrder::IdleCores, Vec::new());

impl Home {
    /// Returns a core for a new pool, and the generation of its allocators.
    pub(super) fn open(shared: Arc<Shared>) -> (&'static Self, u64) {
        super::sweep();
        let process = Process::current();
        let retired = || RETIRED.lock().pop();
        let retired = std::iter::from_fn(retired).find(|home| home.process == process);
        let home = retired.unwrap_or_else(|| {
            &*Box::leak(Box::new(Self {
                magazines: (0..THREADS).map(|_| OnceLock::new()).collect(),
                depot: Depot::new(),
                observed: AtomicBool::new(false),
                look: AtomicBool::new(false),
                process,
                stocked: AtomicBool::new(false),
                state: CachePadded::new(Spin::new(State::new())),
                draining: Mutex::new(()),
                growing: Mutex::new(false),
                grown: Condvar::new(),
            }))
        });
        home.observed.store(shared.observed, Ordering::Relaxed);
        let stocked = shared.config.recorder.is_none()
            && shared.config.magazines
            && shared.host.kernel.offers_barrier();
        home.stocked.store(stocked, Ordering::Relaxed);
        let generation = home.with(|state| {
            state.open = true;
            state.shared = Some(shared);
            state.generation
        });
        (home, generation)
    }

    /// Returns whether this process has the memory. A child must not touch the core, since a lock
    /// may be held forever.
    #[inline]
    pub(super) fn is_here(&self) -> bool {
        self.process.is_current()
    }

    /// Runs `work` under the lock. `work` must not wait, call the driver, or run user code.
    #[inline]
    pub(super) fn with<R>(&self, work: impl FnOnce(&mut State) -> R) -> R {
        let _at_work = AtWork::begin();
        self.state.with(|state| {
            state.locked += 1;
            work(state)
        })
    }

    /// Runs `work` under the lock, with the sums over all magazines and the depot.
    pub(super) fn with_tally<R>(&self, work: impl FnOnce(&mut State, Tally) -> R) -> R {
        self.with(|state| {
            let mut all = self.depot.tally();
            self.magazines
                .iter()
                .filter_map(OnceLock::get)
                .for_each(|magazine| all.add(magazine.tally()));
            work(state, all)
        })
    }

    /// Returns this thread's magazine, creates it if possible, and caches it for the next lookup.
    /// Returns `None` while the thread is inside a pool.
    fn magazine(&'static self, generation: u64) -> Option<&'static Magazine> {
        if !self.stocked.load(Ordering::Relaxed) || thread::is_at_work() {
            return None;
        }
        let number = thread::number()?;
        let place = self.magazines.get(number)?;
        let magazine = place.get_or_init(|| {
            // The magazine's memory must not come from a pool.
            let _at_work = AtWork::begin();
            Box::new(Magazine::new(number % SHARDS))
        });
        // An observer must see each free.
        if !self.observed.load(Ordering::Relaxed) {
            thread::set_magazine(generation, magazine);
        }
        Some(magazine)
    }

    /// Moves the contents of all magazines and of the depot into the heap. Returns whether there
    /// was anything. With `close`, the magazines no longer serve this pool. Issues a barrier on
    /// every thread of the process, which takes some microseconds. If the barrier fails, the
    /// magazines keep their blocks.
    pub(super) fn drain(&self, shared: &Shared, close: bool) -> bool {
        let _one = self.draining.lock().unwrap_or_else(PoisonError::into_inner);
        let wanted = |magazine: &&Magazine| {
            magazine.door.of() != 0 && (close || magazine.tally().blocks > 0)
        };
        let magazines =
            || self.magazines.iter().filter_map(OnceLock::get).map(|magazine| &**magazine);
        let all = self.with(|state| {
            if !magazines().any(|magazine| wanted(&magazine)) {
                return Some(self.empty_depot(state));
            }
            // All magazines that exist now, so that the same ones are reopened.
            magazines().for_each(|magazine| magazine.door.want(&mut state.key));
            None
        });
        if let Some(any) = all {
            return any;
        }
        let mut any = false;
        if shared.host.kernel.barrier().is_ok() {
            for magazine in magazines() {
                if !magazine.door.is_wanted() {
                    continue;
                }
                magazine.door.wait();
                self.with(|state| {
                    magazine.empty(|address| {
                        state.unstock(address);
                        any = true;
                    });
                    if close {
                        state.absorb(magazine.tally());
                        magazine.forget();
                        magazine.door.forget(&mut state.key);
                    }
                });
            }
        }
        self.with(|state| {
            // After the magazines, because their owners put blocks into the depot.
            any |= self.empty_depot(state);
            let life = if state.open { state.generation } else { 0 };
            magazines().for_each(|magazine| magazine.door.let_go(&mut state.key, life));
        });
        self.note_waiting();
        any
    }

    /// Moves the contents of the depot into the heap. Returns whether there was anything.
    fn empty_depot(&self, state: &mut State) -> bool {
        let mut room = std::mem::take(&mut state.depot);
        self.depot.empty(&mut room, |address| state.unstock(address))
    }

    /// Updates whether threads should poll gates.
    pub(super) fn note_waiting(&self) {
        self.with(|state| self.look.store(state.is_waiting(), Ordering::Relaxed));
    }

    /// Stops serving allocations of this generation, and releases all free regions.
    pub(super) fn close(&'static self, generation: u64) {
        if !self.is_here() {
            return;
        }
        let shared = self.with(|state| {
            let shared = state.open_as(generation).ok().cloned();
            if shared.is_some() {
                state.open = false;
                // Also if the barrier fails, in which case the magazines cannot be emptied yet.
                let magazines = self.magazines.iter().filter_map(OnceLock::get);
                magazines.for_each(|magazine| magazine.door.void(&mut state.key));
            }
            shared
        });
        if let Some(shared) = shared {
            self.drain(&shared, true);
            self.poll_all();
            self.reap(&shared, 0, u64::MAX, None);
            self.retire_or_linger();
        }
    }

    /// Recycles the core of a closed pool if nothing of the pool is left.
    pub(super) fn retire_or_linger(&'static self) {
        let (over, old) = self.with(|state| {
            let over =
                state.is_over() && state.shared.is_some() && !self.is_stocked(state.generation);
            (over, if over { state.renew() } else { None })
        });
        drop(old);
        if over {
            RETIRED.lock().push(self);
        } else if self
            .with(|state| !state.open && (state.holds_back() || self.is_stocked(state.generation)))
        {
            super::pending::linger(self);
        }
    }

    /// Returns whether a magazine still holds blocks or counts of this generation, because the
    /// barrier failed when the pool was closed.
    fn is_stocked(&self, generation: u64) -> bool {
        self.magazines
            .iter()
            .filter_map(OnceLock::get)
            .any(|magazine| magazine.door.of() == generation)
    }

    /// Allocates a slot from this thread's magazine.
    #[inline(always)]
    pub(super) fn quick(&self, generation: u64, layout: Layout) -> Option<NonNull<u8>> {
        self.quick_of(thread::magazine(&generation)?, generation, layout)
    }

    /// As [`Home::quick`], from a cached magazine that may serve another pool.
    #[inline(always)]
    pub(super) fn quick_of(
        &self,
        magazine: &Magazine,
        generation: u64,
        layout: Layout,
    ) -> Option<NonNull<u8>> {
        let class = classes::slotted(layout)?;
        magazine.pop(generation, class, layout.size() as u64, &self.look)
    }

    /// Allocates a block of any size from this thread's magazine.
    fn quick_from(
        &self,
        magazine: &Magazine,
        generation: u64,
        layout: Layout,
    ) -> Option<NonNull<u8>> {
        let asked = layout.size() as u64;
        if let Some(class) = classes::of(layout) {
            return if class < classes::SLOTTED {
                magazine.pop(generation, class, asked, &self.look)
            } else {
                magazine.pop_shared(generation, class, asked, &self.look, &self.depot)
            };
        }
        let bytes = classes::single(asked)?;
        // Requests of no bytes have no block. Blocks of a magazine do not suit alignments above a
        // line.
        if !(classes::MEDIUM_MAX as u64 + 1..=LARGE_MAX).contains(&bytes)
            || layout.align() as u64 > LINE
        {
            return None;
        }
        magazine.pop_large(generation, bytes, asked, &self.look)
    }

    /// Frees a slot into a cached magazine that may serve another pool. Returns the span if the
    /// block is live but did not fit.
    #[inline(always)]
    pub(super) fn quick_free(
        magazine: &Magazine,
        generation: u64,
        address: NonNull<u8>,
        layout: Layout,
    ) -> std::result::Result<(), Option<&'static Span>> {
        let (address, bytes) = (address.addr().get() as u64, layout.size() as u64);
        let Some((span, slot)) = map::slot_from(address) else { return Err(None) };
        if span.life() != generation
            || bytes.wrapping_sub(1) >= span.slot_bytes()
            || span.get_raw(slot) != Slot::Live as u8
        {
            return Err(None);
        }
        if magazine.push(address, (span, slot), bytes, generation) {
            Ok(())
        } else {
            Err(Some(span))
        }
    }

    /// Frees a block of a class with a depot, after [`Home::quick_free`] did not. Returns whether
    /// it succeeded.
    #[inline]
    pub(super) fn quick_free_shared(
        &self,
        magazine: &Magazine,
        generation: u64,
        span: &'static Span,
        address: NonNull<u8>,
        layout: Layout,
    ) -> bool {
        let (address, bytes) = (address.addr().get() as u64, layout.size() as u64);
        magazine.push_shared(address, span, bytes, generation, &self.depot)
    }

    /// Frees a block into this thread's magazine, and makes room for it if necessary. Returns
    /// whether it succeeded.
    fn quick_free_to(
        &self,
        magazine: &Magazine,
        generation: u64,
        address: u64,
        bytes: u64,
    ) -> bool {
        let Some((span, slot)) = map::block_from(address) else { return false };
        if span.life() != generation || bytes > span.slot_bytes() || span.get(slot) != Slot::Live {
            return false;
        }
        let large = span.class() == EXACT;
        if large && !(classes::MEDIUM_MAX as u64 + 1..=LARGE_MAX).contains(&span.slot_bytes()) {
            return false;
        }
        let push = || {
            if large {
                magazine.push_large(address, span, bytes, generation)
            } else {
                magazine.push(address, (span, slot), bytes, generation)
                    || magazine.push_shared(address, span, bytes, generation, &self.depot)
            }
        };
        push() || {
            let room = self.with(|state| {
                // Another thread is draining it, or the pool is closed.
                if magazine.door.is_wanted() || state.open_as(generation).is_err() {
                    return false;
                }
                state.ready(magazine);
                if large {
                    magazine.shed_large(|address| state.unstock(address));
                } else {
                    state.make_room(magazine, &self.depot, span.class() as usize);
                }
                true
            });
            room && push()
        }
    }

    /// Allocates a block, by the slow path if necessary.
    #[inline]
    pub(super) fn allocate(
        &'static self,
        generation: u64,
        layout: Layout,
    ) -> Result<NonNull<[u8]>> {
        match self.quick(generation, layout) {
            Some(start) => Ok(NonNull::slice_from_raw_parts(start, layout.size())),
            None => self.allocate_slowly(generation, layout, &Effort::Configured),
        }
    }

    /// Allocates a block after the fast path failed, with the given effort.
    #[inline(never)]
    pub(super) fn allocate_slowly(
        &'static self,
        generation: u64,
        layout: Layout,
        effort: &Effort,
    ) -> Result<NonNull<[u8]>> {
        if layout.size() == 0 {
            // The block has no memory, and its free is ignored.
            let address = NonZeroUsize::new(layout.align()).unwrap_or(NonZeroUsize::MIN);
            return Ok(NonNull::slice_from_raw_parts(NonNull::without_provenance(address), 0));
        }
        if !self.is_here() {
            return Err(MemoryError::OtherProcess);
        }
        if thread::is_at_work() {
            return Err(MemoryError::Busy { address: 0 });
        }
        // If the fast path refused a slot so that this thread polls gates, the magazine must not
        // serve the request before that.
        let known =
            thread::magazine(&generation).filter(|magazine| magazine.door.life() == generation);
        let asked = known.is_some() && classes::slotted(layout).is_some();
        let magazine = if asked { None } else { known.or_else(|| self.magazine(generation)) };
        if let Some(start) =
            magazine.and_then(|magazine| self.quick_from(magazine, generation, layout))
        {
            return Ok(NonNull::slice_from_raw_parts(start, layout.size()));
        }
        let taken = match self.try_take(generation, layout)? {
            Some(taken) => taken,
            None => self.take_by_chain(generation, layout, effort)?,
        };
        self.tell(
            &taken.shared,
            taken.ticket,
            Action::Allocate,
            taken.address,
            layout.size() as u64,
        );
        // No block begins at address zero.
        let start = pointer(taken.address as usize)
            .ok_or(MemoryError::ForeignBlock { address: taken.address })?;
        Ok(NonNull::slice_from_raw_parts(start, layout.size()))
    }

    /// Allocates a block from existing memory, after polling the oldest pending blocks.
    pub(super) fn try_take(
        &'static self,
        generation: u64,
        layout: Layout,
    ) -> Result<Option<Taken>> {
        // A few at a time, since each gate may cost a driver query. All gates are polled before the
        // pool grows.
        const A_FEW: usize = 4;
        let magazine = self.magazine(generation);
        let (first, asked) = self.with(|state| -> Result<_> {
            state.open_as(generation)?;
            if state.has_pending() {
                return Ok((None, Some(state.ask(A_FEW))));
            }
            Ok((self.take(state, magazine, layout), None))
        })?;
        let Some(asked) = asked else { return Ok(first) };
        self.settle(asked);
        self.with(|state| {
            state.open_as(generation)?;
            Ok(self.take(state, magazine, layout))
        })
    }

    /// Allocates a block from the heap, and refills the magazine with blocks of its class.
    #[inline]
    pub(super) fn take(
        &self,
        state: &mut State,
        magazine: Option<&Magazine>,
        layout: Layout,
    ) -> Option<Taken> {
        let magazine = magazine.filter(|magazine| !magazine.door.is_wanted());
        let class = classes::of(layout);
        if let Some(magazine) = magazine
            && class.is_none()
        {
            // So that best fit considers all free memory, and free neighbours are merged.
            magazine.shed_large(|address| state.unstock(address));
        }
        let shard = magazine.map_or(0, Magazine::shard);
        let mut address = state.take(layout, shard);
        if address.is_none() && self.empty_depot(state) {
            address = state.take(layout, shard);
        }
        let address = address?;
        if let Some(magazine) = magazine {
            state.ready(magazine);
            if let Some(class) = class {
                state.stock(magazine, class);
            }
        }
        Some(Self::taken(state, address))
    }

    pub(super) fn taken(state: &State, address: u64) -> Taken {
        let recorder = state.shared.as_ref().and_then(|shared| shared.config.recorder.as_ref());
        let ticket = recorder.map(|recorder| recorder.ticket());
        // The reference count is touched only if there is a recorder.
        let shared = ticket.is_some().then(|| state.shared.clone()).flatten();
        Taken { address, ticket, shared }
    }

    /// Frees a block that did not go into this thread's magazine by the fast path.
    #[inline(never)]
    pub(super) fn deallocate_slowly(
        &'static self,
        generation: u64,
        address: NonNull<u8>,
        layout: Layout,
    ) {
        let block = Freed { address: address.addr().get() as u64, requested: layout.size() as u64 };
        if block.requested == 0 || !self.is_here() {
            return;
        }
        if self.observed.load(Ordering::Relaxed) {
            self.observe_free(generation, block);
        }
        let known =
            thread::magazine(&generation).filter(|magazine| magazine.door.life() == generation);
        if let Some(magazine) = known.or_else(|| self.magazine(generation))
            && self.quick_free_to(magazine, generation, block.address, block.requested)
        {
            return;
        }
        let (released, open, ticket, shared) = self.with(|state| {
            if state.generation != generation {
                STALE_FREES.fetch_add(1, Ordering::Relaxed);
                return (Released::Refused, true, None, None);
            }
            let released = state.release(block);
            if released == Released::Pending {
                self.look.store(true, Ordering::Relaxed);
            }
            let recorder = state.shared.as_ref().and_then(|shared| shared.config.recorder.as_ref());
            let told = recorder.filter(|_| released != Released::Refused);
            let tickets =
                told.map(|r| (r.ticket(), (released == Released::Free).then(|| r.ticket())));
            let shared = (tickets.is_some() || !state.open).then(|| state.shared.clone()).flatten();
            (released, state.open, tickets, shared)
        });
        if let Some((freed, completed)) = ticket {
            self.tell(&shared, Some(freed), Action::Free, block.address, block.requested);
            self.tell(&shared, completed, Action::Complete, block.address, block.requested);
        }
        if !open
            && released != Released::Refused
            && let Some(shared) = shared
        {
            self.drain(&shared, true);
            self.poll_all();
            self.give_up(&shared);
            self.retire_or_linger();
        }
    }

    /// Reports to the observer that the host frees a block without gates.
    #[cold]
    fn observe_free(&self, generation: u64, block: Freed) {
        let shared = self.with(|state| {
            let free = state.generation == generation
                && state.is_free_to_go(block.address, block.requested);
            free.then(|| state.shared.clone()).flatten()
        });
        if let Some(shared) = shared {
            shared.observe(block, HostAccess::Free);
        }
    }

    /// Resizes a block in place. Returns whether it succeeded.
    pub(super) fn resize(
        &self,
        generation: u64,
        address: NonNull<u8>,
        old: usize,
        new: usize,
    ) -> bool {
        let (address, old, new) = (address.addr().get() as u64, old as u64, new as u64);
        if let Some(magazine) = thread::magazine(&generation)
            && let Some((span, slot)) = map::block_from(address)
            && !span.is_single()
            && span.life() == generation
            && old <= span.slot_bytes()
            && span.get(slot).is_owned()
        {
            // A slot keeps its size.
            if new > span.slot_bytes() {
                return false;
            }
            if magazine.resized(old, new, generation) {
                return true;
            }
        }
        if !self.is_here() {
            return false;
        }
        let (resized, shared, tickets) = self.with(|state| {
            if state.generation != generation || !state.resize(address, old, new) {
                return (false, None, None);
            }
            let recorder = state.shared.as_ref().and_then(|shared| shared.config.recorder.as_ref());
            let tickets = recorder.map(|recorder| [(); 3].map(|()| recorder.ticket()));
            (true, tickets.as_ref().and_then(|_| state.shared.clone()), tickets)
        });
        if let Some([freed, completed, allocated]) = tickets {
            // The recorder sees a free and an allocation at the same address.
            self.tell(&shared, Some(freed), Action::Free, address, old);
            self.tell(&shared, Some(completed), Action::Complete, address, old);
            self.tell(&shared, Some(allocated), Action::Allocate, address, new);
        }
        resized
    }

    /// Notes a gate on the live block that contains `address`.
    pub(super) fn defer(
        &self,
        generation: u64,
        address: NonNull<u8>,
        gate: Arc<dyn Gate>,
    ) -> Result<()> {
        let address = address.addr().get() as u64;
        // Open gates are dropped at every 16th one, so that a block that is copied again and again
        // does not collect gates without limit.
        const MANY: usize = 16;
        if !self.is_here() {
            return Err(MemoryError::OtherProcess);
        }
        let (start, gates) = self.with(|state| -> Result<_> {
            let start = if state.generation == generation { state.block_at(address) } else { None };
            let start = start.ok_or(MemoryError::ForeignBlock { address })?;
            let count = state.note(start, gate);
            Ok((start, if count.is_multiple_of(MANY) { state.gates(start) } else { Vec::new() }))
        })?;
        let open: Vec<_> =
            gates.into_iter().filter(|gate| super::pending::is_open(&**gate)).collect();
        if !open.is_empty() {
            drop(self.with(|state| state.forget(start, &open)));
        }
        Ok(())
    }

    /// Passes an event to the recorder, outside the lock.
    pub(super) fn tell(
        &self,
        shared: &Option<Arc<Shared>>,
        ticket: Option<Ticket>,
        action: Action,
        address: u64,
        bytes: u64,
    ) {
        if let (Some(shared), Some(ticket)) = (shared, ticket)
            && let Some(recorder) = &shared.config.recorder
        {
            recorder.record(
                ticket,
                recorder.event(action, shared.place(), 0, address, bytes, Tag::current()),
            );
        }
    }
}

impl Shared {
    /// Reports the host's access to a block to the observer.
    pub(super) fn observe(&self, block: Freed, access: HostAccess) {
        if let Some(observer) = self.host.reach.as_ref().and_then(|reach| reach.driver.observer()) {
            observer.host(block.address, block.requested, access);
        }
    }
}

/// An allocated block, and the ticket of its event.
pub(super) struct Taken {
    pub(super) address: u64,
    ticket: Option<Ticket>,
    shared: Option<Arc<Shared>>,
}

impl fmt::Debug for Home {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.with(|state| {
            f.debug_struct("Home").field("generation", &state.generation).finish_non_exhaustive()
        })
    }
}

/// What an allocation may do when no free block fits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Effort {
    /// The steps that the pool's settings allow.
    Configured,
    /// Nothing that grows the pool or waits.
    None,
    /// As `Configured`, then waiting until this time.
    Until(std::time::Instant),
}
