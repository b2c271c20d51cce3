//! The pool core that allocators point to. Cores are never freed, and are recycled with a new
//! generation.

use super::{
    classes::{self, LINE},
    context::PoolContext,
    depot::Depot,
    magazine::{LARGE_MAX, Magazine},
    page_map,
    slabs::SHARDS,
    span::{NO_CLASS, SlabSpan, SlotState},
    state::{FreeOutcome, FreedBlock, PoolState},
    stats::Tally,
    thread::{self, InsidePool, THREADS},
};
use crate::kernel::{is_forked_child, pointer};
use aquifer_core::{Action, Gate, MemoryError, Result, Tag, event::EventTicket};
use aquifer_driver::HostAccess;
use aquifer_status::PublishTimer;
use aquifer_stream::Spin;
use crossbeam_utils::CachePadded;
use std::{
    alloc::Layout,
    fmt,
    num::NonZeroUsize,
    panic::{AssertUnwindSafe, catch_unwind},
    ptr::NonNull,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
};

/// The core of a pool.
pub(super) struct PoolCore {
    /// By thread number.
    magazines: Box<[OnceLock<Box<Magazine>>]>,
    /// Free blocks that the magazines share.
    depot: Depot,
    /// Whether an observer is notified of the host's accesses to this pool's memory. Read on each
    /// free, without the lock.
    observed: AtomicBool,
    /// Whether blocks are pending, so that threads poll gates from time to time.
    must_poll: AtomicBool,
    /// Whether threads get magazines. A pool whose events are recorded has none.
    has_magazines: AtomicBool,
    /// On other cache lines than the flags, which every call reads.
    state: CachePadded<Spin<PoolState>>,
    /// When the figures were last published.
    pub(super) publish_timer: PublishTimer,
    /// One thread at a time drains the magazines.
    draining: Mutex<()>,
    /// Whether a thread is making a region for this pool.
    pub(super) growing: Mutex<bool>,
    /// Notified when that thread has made a region or failed.
    pub(super) grown: Condvar,
}

/// Cores without a pool.
static IDLE_CORES: Mutex<Vec<&'static PoolCore>> = Mutex::new(Vec::new());

/// The machines ([`Driver::machine`](aquifer_driver::Driver::machine)) that the open pools pin
/// memory for.
static OPEN: Mutex<Vec<u64>> = Mutex::new(Vec::new());

/// Cores of closed pools with pending blocks. No allocation polls their gates any more.
pub(super) static LINGERING: Mutex<Vec<&'static PoolCore>> = Mutex::new(Vec::new());

/// Locks one of these lists. Nothing unwinds while it is locked.
pub(super) fn lock<T>(list: &Mutex<Vec<T>>) -> MutexGuard<'_, Vec<T>> {
    list.lock().unwrap_or_else(PoisonError::into_inner)
}

fn linger(core: &'static PoolCore) {
    let mut lingering = lock(&LINGERING);
    if !lingering.iter().any(|other| std::ptr::eq(*other, core)) {
        lingering.push(core);
    }
}

/// Returns whether a gate is open. A gate that panics counts as shut, since allocators must not
/// unwind.
pub(super) fn is_open(gate: &dyn Gate) -> bool {
    catch_unwind(AssertUnwindSafe(|| gate.is_open())).unwrap_or(false)
}

impl PoolCore {
    /// Returns a core for a new pool, and the generation of its allocators.
    pub(super) fn open(shared: Arc<PoolContext>) -> (&'static Self, u64) {
        let idle = lock(&IDLE_CORES).pop();
        let core = idle.unwrap_or_else(|| {
            &*Box::leak(Box::new(Self {
                magazines: (0..THREADS).map(|_| OnceLock::new()).collect(),
                depot: Depot::new(),
                observed: AtomicBool::new(false),
                must_poll: AtomicBool::new(false),
                has_magazines: AtomicBool::new(false),
                state: CachePadded::new(Spin::new(PoolState::new())),
                publish_timer: PublishTimer::new(),
                draining: Mutex::new(()),
                growing: Mutex::new(false),
                grown: Condvar::new(),
            }))
        });
        if let Some(machine) = shared.machine() {
            lock(&OPEN).push(machine);
        }
        core.observed.store(shared.observed, Ordering::Relaxed);
        let has_magazines = shared.config.recorder.is_none()
            && shared.config.magazines
            && shared.host.kernel.offers_barrier();
        core.has_magazines.store(has_magazines, Ordering::Relaxed);
        let generation = core.with(|state| {
            state.open = true;
            state.shared = Some(shared);
            state.generation
        });
        (core, generation)
    }

    /// Runs `work` under the lock. `work` must not wait, call the driver, or run user code.
    #[inline]
    pub(super) fn with<R>(&self, work: impl FnOnce(&mut PoolState) -> R) -> R {
        self.with_uncounted(|state| {
            state.locked += 1;
            work(state)
        })
    }

    /// As [`PoolCore::with`], for figures that are shown only: the lock is not counted.
    #[inline]
    pub(super) fn with_uncounted<R>(&self, work: impl FnOnce(&mut PoolState) -> R) -> R {
        let _inside = InsidePool::enter();
        self.state.with(work)
    }

    /// Runs `work` under the lock, with the sums over all magazines and the depot.
    pub(super) fn with_tally<R>(&self, work: impl FnOnce(&mut PoolState, Tally) -> R) -> R {
        self.with_tally_uncounted(|state, all| {
            state.locked += 1;
            work(state, all)
        })
    }

    /// As [`PoolCore::with_tally`], for figures that are shown only: the lock is not counted.
    pub(super) fn with_tally_uncounted<R>(
        &self,
        work: impl FnOnce(&mut PoolState, Tally) -> R,
    ) -> R {
        self.with_uncounted(|state| {
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
        if !self.has_magazines.load(Ordering::Relaxed) || thread::is_inside_pool() {
            return None;
        }
        let number = thread::number()?;
        let place = self.magazines.get(number)?;
        let magazine = place.get_or_init(|| {
            // The magazine's memory must not come from a pool.
            let _inside = InsidePool::enter();
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
    pub(super) fn drain(&self, shared: &Arc<PoolContext>, close: bool) -> bool {
        let _one = self.draining.lock().unwrap_or_else(PoisonError::into_inner);
        let selected = |magazine: &&Magazine| {
            magazine.lock.contents_generation() != 0 && (close || magazine.tally().blocks > 0)
        };
        let magazines =
            || self.magazines.iter().filter_map(OnceLock::get).map(|magazine| &**magazine);
        let all = self.with(|state| {
            if !state.serves(shared) {
                return Some(false);
            }
            if !magazines().any(|magazine| selected(&magazine)) {
                return Some(self.empty_depot(state));
            }
            // All magazines that exist now, so that the same ones are reopened.
            magazines().for_each(|magazine| magazine.lock.begin_revocation(&mut state.proof));
            None
        });
        if let Some(any) = all {
            return any;
        }
        let mut any = false;
        if shared.host.kernel.barrier().is_ok() {
            for magazine in magazines() {
                if !magazine.lock.is_revoked() {
                    continue;
                }
                magazine.lock.wait_for_owner();
                self.with(|state| {
                    magazine.drain(|address| {
                        state.return_to_heap(address);
                        any = true;
                    });
                    if close {
                        state.absorb(magazine.tally());
                        magazine.reset_counts();
                        magazine.lock.mark_empty(&mut state.proof);
                    }
                });
            }
        }
        self.with(|state| {
            // After the magazines, because their owners put blocks into the depot.
            any |= self.empty_depot(state);
            let generation = if state.open { state.generation } else { 0 };
            magazines()
                .for_each(|magazine| magazine.lock.end_revocation(&mut state.proof, generation));
        });
        self.update_poll_flag();
        any
    }

    /// Moves the contents of the depot into the heap. Returns whether there was anything.
    fn empty_depot(&self, state: &mut PoolState) -> bool {
        let mut capacity = std::mem::take(&mut state.depot_capacity);
        self.depot.drain(&mut capacity, |address| state.return_to_heap(address))
    }

    /// Updates whether threads should poll gates.
    pub(super) fn update_poll_flag(&self) {
        self.with(|state| self.must_poll.store(state.has_pending(), Ordering::Relaxed));
    }

    /// Stops serving allocations of this generation, and releases all free regions.
    pub(super) fn close(&'static self, generation: u64) {
        if is_forked_child() {
            return;
        }
        let shared = self.with(|state| {
            let shared = state.open_as(generation).ok().cloned();
            if shared.is_some() {
                state.open = false;
                // Also if the barrier fails, in which case the magazines cannot be emptied yet.
                let magazines = self.magazines.iter().filter_map(OnceLock::get);
                magazines.for_each(|magazine| magazine.lock.disable(&mut state.proof));
            }
            shared
        });
        if let Some(shared) = shared {
            if let Some(machine) = shared.machine() {
                let mut open = lock(&OPEN);
                if let Some(own) = open.iter().position(|of| *of == machine) {
                    open.swap_remove(own);
                }
            }
            self.drain(&shared, true);
            self.poll_all();
            self.reap(&shared, 0, u64::MAX, None);
            self.publish(&shared);
            self.recycle_or_linger();
            if Self::is_last_of(&shared) {
                self.settle(&shared);
            }
        }
    }

    /// Returns whether no open pool pins memory for the machine of this closed one. No quiet point
    /// may then ever come.
    fn is_last_of(shared: &PoolContext) -> bool {
        !shared.machine().is_some_and(|machine| lock(&OPEN).contains(&machine))
    }

    /// Releases what the free of a block has left unused of a closed pool.
    fn release_after_close(&'static self, shared: &Arc<PoolContext>) {
        self.drain(shared, true);
        self.poll_all();
        let last = Self::is_last_of(shared);
        if last {
            self.reap(shared, 0, u64::MAX, None);
        } else {
            self.retire_unused(shared);
        }
        let ended = self.with(|state| state.serves(shared) && !state.has_live());
        self.recycle_or_linger();
        if last && ended {
            self.settle(shared);
        }
    }

    /// Recycles the core of a closed pool if nothing of the pool is left.
    pub(super) fn recycle_or_linger(&'static self) {
        let (over, old) = self.with(|state| {
            let over = state.is_finished()
                && state.shared.is_some()
                && !self.magazines_hold(state.generation);
            (over, if over { state.reset() } else { None })
        });
        drop(old);
        if over {
            lock(&IDLE_CORES).push(self);
        } else if self.with(|state| {
            !state.open && (state.has_gated_blocks() || self.magazines_hold(state.generation))
        }) {
            linger(self);
        }
    }

    /// Returns whether a magazine still holds blocks or counts of this generation, because the
    /// barrier failed when the pool was closed.
    fn magazines_hold(&self, generation: u64) -> bool {
        self.magazines
            .iter()
            .filter_map(OnceLock::get)
            .any(|magazine| magazine.lock.contents_generation() == generation)
    }

    /// Allocates a slot from this thread's magazine.
    #[inline(always)]
    pub(super) fn allocate_fast(&self, generation: u64, layout: Layout) -> Option<NonNull<u8>> {
        self.allocate_fast_from(thread::magazine(&generation)?, generation, layout)
    }

    /// As [`PoolCore::allocate_fast`], from a cached magazine that may serve another pool.
    #[inline(always)]
    pub(super) fn allocate_fast_from(
        &self,
        magazine: &Magazine,
        generation: u64,
        layout: Layout,
    ) -> Option<NonNull<u8>> {
        let class = classes::slotted(layout)?;
        magazine.pop(generation, class, layout.size() as u64, &self.must_poll)
    }

    /// Allocates a block of any size from this thread's magazine.
    fn allocate_from_magazine(
        &self,
        magazine: &Magazine,
        generation: u64,
        layout: Layout,
    ) -> Option<NonNull<u8>> {
        let requested = layout.size() as u64;
        if let Some(class) = classes::of(layout) {
            return if class < classes::SLOTTED {
                magazine.pop(generation, class, requested, &self.must_poll)
            } else {
                magazine.pop_shared(generation, class, requested, &self.must_poll, &self.depot)
            };
        }
        let bytes = classes::single(requested)?;
        // Requests of no bytes have no block. Blocks of a magazine do not suit alignments above a
        // line.
        if !(classes::MEDIUM_MAX as u64 + 1..=LARGE_MAX).contains(&bytes)
            || layout.align() as u64 > LINE
        {
            return None;
        }
        magazine.pop_large(generation, bytes, requested, &self.must_poll)
    }

    /// Frees a slot into a cached magazine that may serve another pool. Returns the span if the
    /// block is live but did not fit.
    #[inline(always)]
    pub(super) fn free_fast(
        magazine: &Magazine,
        generation: u64,
        address: NonNull<u8>,
        layout: Layout,
    ) -> std::result::Result<(), Option<&'static SlabSpan>> {
        let (address, bytes) = (address.addr().get() as u64, layout.size() as u64);
        let Some((span, slot)) = page_map::slot_starting_at(address) else { return Err(None) };
        if span.generation() != generation
            || bytes.wrapping_sub(1) >= span.slot_bytes()
            || span.get_raw(slot) != SlotState::Live as u8
        {
            return Err(None);
        }
        if magazine.push(address, (span, slot), bytes, generation) {
            Ok(())
        } else {
            Err(Some(span))
        }
    }

    /// Frees a block of a class with a depot, after [`PoolCore::free_fast`] did not. Returns
    /// whether it succeeded.
    #[inline]
    pub(super) fn free_fast_shared(
        &self,
        magazine: &Magazine,
        generation: u64,
        span: &'static SlabSpan,
        address: NonNull<u8>,
        layout: Layout,
    ) -> bool {
        let (address, bytes) = (address.addr().get() as u64, layout.size() as u64);
        magazine.push_shared(address, span, bytes, generation, &self.depot)
    }

    /// Frees a block into this thread's magazine, and makes room for it if necessary. Returns
    /// whether it succeeded.
    fn free_to_magazine(
        &self,
        magazine: &Magazine,
        generation: u64,
        address: u64,
        bytes: u64,
    ) -> bool {
        let Some((span, slot)) = page_map::block_starting_at(address) else { return false };
        if span.generation() != generation
            || bytes > span.slot_bytes()
            || span.get(slot) != SlotState::Live
        {
            return false;
        }
        let large = span.class() == NO_CLASS;
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
                if magazine.lock.is_revoked() || state.open_as(generation).is_err() {
                    return false;
                }
                state.assign(magazine);
                if large {
                    magazine.release_large(|address| state.return_to_heap(address));
                } else {
                    state.make_room(magazine, &self.depot, span.class() as usize);
                }
                true
            });
            if room {
                self.publish_sometimes(generation);
            }
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
        match self.allocate_fast(generation, layout) {
            Some(start) => Ok(NonNull::slice_from_raw_parts(start, layout.size())),
            None => self.allocate_slow(generation, layout),
        }
    }

    /// Explains a refusal to a collection, if the pool of this generation is open.
    #[cold]
    pub(super) fn explain_once(&'static self, generation: u64, refused: &MemoryError) {
        // Other refusals come from a forked child, or from inside of a pool.
        if matches!(refused, MemoryError::OutOfMemory(_))
            && let Ok(shared) = self.with(|state| state.open_as(generation).cloned())
        {
            shared.explain_once(refused);
        }
    }

    /// Allocates a block after the fast path failed.
    #[inline(never)]
    pub(super) fn allocate_slow(
        &'static self,
        generation: u64,
        layout: Layout,
    ) -> Result<NonNull<[u8]>> {
        if layout.size() == 0 {
            // The block has no memory, and its free is ignored.
            let address = NonZeroUsize::new(layout.align()).unwrap_or(NonZeroUsize::MIN);
            return Ok(NonNull::slice_from_raw_parts(NonNull::without_provenance(address), 0));
        }
        if is_forked_child() {
            return Err(MemoryError::OtherProcess);
        }
        if thread::is_inside_pool() {
            return Err(MemoryError::Busy { address: 0 });
        }
        // If the fast path refused a slot so that this thread polls gates, the magazine must not
        // serve the request before that.
        let cached = thread::magazine(&generation)
            .filter(|magazine| magazine.lock.generation() == generation);
        let tried = cached.is_some() && classes::slotted(layout).is_some();
        let magazine = if tried { None } else { cached.or_else(|| self.magazine(generation)) };
        if let Some(start) =
            magazine.and_then(|magazine| self.allocate_from_magazine(magazine, generation, layout))
        {
            return Ok(NonNull::slice_from_raw_parts(start, layout.size()));
        }
        let block = match self.try_allocate_block(generation, layout)? {
            Some(block) => block,
            None => self.allocate_by_slow_path(generation, layout)?,
        };
        self.publish_sometimes(generation);
        self.record(
            &block.shared,
            block.ticket,
            Action::Allocate,
            block.address,
            layout.size() as u64,
        );
        // No block begins at address zero.
        let start = pointer(block.address as usize)
            .ok_or(MemoryError::ForeignBlock { address: block.address })?;
        Ok(NonNull::slice_from_raw_parts(start, layout.size()))
    }

    /// Allocates a block from existing memory, after polling the oldest pending blocks.
    pub(super) fn try_allocate_block(
        &'static self,
        generation: u64,
        layout: Layout,
    ) -> Result<Option<AllocatedBlock>> {
        // A few at a time, since each gate may cost a driver query. All gates are polled before the
        // pool grows.
        const A_FEW: usize = 4;
        let magazine = self.magazine(generation);
        let (first, polled) = self.with(|state| -> Result<_> {
            state.open_as(generation)?;
            if state.has_pollable() {
                return Ok((None, Some(state.begin_poll(A_FEW))));
            }
            Ok((self.allocate_from_heap(state, magazine, layout), None))
        })?;
        let Some(polled) = polled else { return Ok(first) };
        self.poll_blocks(polled);
        self.with(|state| {
            state.open_as(generation)?;
            Ok(self.allocate_from_heap(state, magazine, layout))
        })
    }

    /// Allocates a block from the heap, and refills the magazine with blocks of its class.
    #[inline]
    pub(super) fn allocate_from_heap(
        &self,
        state: &mut PoolState,
        magazine: Option<&Magazine>,
        layout: Layout,
    ) -> Option<AllocatedBlock> {
        let magazine = magazine.filter(|magazine| !magazine.lock.is_revoked());
        let class = classes::of(layout);
        if let Some(magazine) = magazine
            && class.is_none()
        {
            // So that best fit considers all free memory, and free neighbours are merged.
            magazine.release_large(|address| state.return_to_heap(address));
        }
        let shard = magazine.map_or(0, Magazine::shard);
        let mut address = state.allocate(layout, shard);
        if address.is_none() && self.empty_depot(state) {
            address = state.allocate(layout, shard);
        }
        let address = address?;
        if let Some(magazine) = magazine {
            state.assign(magazine);
            if let Some(class) = class {
                state.refill(magazine, class);
            }
        }
        Some(Self::allocated(state, address))
    }

    pub(super) fn allocated(state: &PoolState, address: u64) -> AllocatedBlock {
        let recorder = state.shared.as_ref().and_then(|shared| shared.config.recorder.as_ref());
        let ticket = recorder.map(|recorder| recorder.ticket());
        // The reference count is touched only if there is a recorder.
        let shared = ticket.is_some().then(|| state.shared.clone()).flatten();
        AllocatedBlock { address, ticket, shared }
    }

    /// Frees a block that did not go into this thread's magazine by the fast path.
    #[inline(never)]
    pub(super) fn deallocate_slow(
        &'static self,
        generation: u64,
        address: NonNull<u8>,
        layout: Layout,
    ) {
        let block =
            FreedBlock { address: address.addr().get() as u64, requested: layout.size() as u64 };
        if block.requested == 0 || is_forked_child() {
            return;
        }
        if self.observed.load(Ordering::Relaxed) {
            self.observe_free(generation, block);
        }
        let cached = thread::magazine(&generation)
            .filter(|magazine| magazine.lock.generation() == generation);
        if let Some(magazine) = cached.or_else(|| self.magazine(generation))
            && self.free_to_magazine(magazine, generation, block.address, block.requested)
        {
            return;
        }
        let (released, open, ticket, shared) = self.with(|state| {
            if state.generation != generation {
                return (FreeOutcome::Refused, true, None, None);
            }
            let released = state.free(block);
            if released == FreeOutcome::Pending {
                self.must_poll.store(true, Ordering::Relaxed);
            }
            let recorder = state.shared.as_ref().and_then(|shared| shared.config.recorder.as_ref());
            let event_recorder = recorder.filter(|_| released != FreeOutcome::Refused);
            let tickets = event_recorder
                .map(|r| (r.ticket(), (released == FreeOutcome::Free).then(|| r.ticket())));
            let shared = (tickets.is_some() || !state.open).then(|| state.shared.clone()).flatten();
            (released, state.open, tickets, shared)
        });
        self.publish_sometimes(generation);
        if let Some((freed, completed)) = ticket {
            self.record(&shared, Some(freed), Action::Free, block.address, block.requested);
            self.record(&shared, completed, Action::Complete, block.address, block.requested);
        }
        if !open
            && released != FreeOutcome::Refused
            && let Some(shared) = shared
        {
            self.release_after_close(&shared);
        }
    }

    /// Reports to the observer that the host frees a block without gates.
    #[cold]
    fn observe_free(&self, generation: u64, block: FreedBlock) {
        let shared = self.with(|state| {
            let free =
                state.generation == generation && state.can_free(block.address, block.requested);
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
            && let Some((span, slot)) = page_map::block_starting_at(address)
            && !span.is_single()
            && span.generation() == generation
            && old <= span.slot_bytes()
            && span.get(slot).is_owned()
        {
            // A slot keeps its size.
            if new > span.slot_bytes() {
                return false;
            }
            if magazine.count_resize(old, new, generation) {
                return true;
            }
        }
        if is_forked_child() {
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
            self.record(&shared, Some(freed), Action::Free, address, old);
            self.record(&shared, Some(completed), Action::Complete, address, old);
            self.record(&shared, Some(allocated), Action::Allocate, address, new);
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
        if is_forked_child() {
            return Err(MemoryError::OtherProcess);
        }
        let (start, gates) = self.with(|state| -> Result<_> {
            let start = if state.generation == generation { state.block_at(address) } else { None };
            let start = start.ok_or(MemoryError::ForeignBlock { address })?;
            let count = state.add_gate(start, gate);
            Ok((start, if count.is_multiple_of(MANY) { state.gates(start) } else { Vec::new() }))
        })?;
        let open: Vec<_> = gates.into_iter().filter(|gate| is_open(&**gate)).collect();
        if !open.is_empty() {
            drop(self.with(|state| state.remove_gates(start, &open)));
        }
        Ok(())
    }

    /// Passes an event to the recorder, outside the lock.
    pub(super) fn record(
        &self,
        shared: &Option<Arc<PoolContext>>,
        ticket: Option<EventTicket>,
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

impl PoolContext {
    /// Reports the host's access to a block to the observer.
    pub(super) fn observe(&self, block: FreedBlock, access: HostAccess) {
        if let Some(observer) = self.host.reach.as_ref().and_then(|reach| reach.driver.observer()) {
            observer.host(block.address, block.requested, access);
        }
    }
}

/// An allocated block, and the ticket of its event.
pub(super) struct AllocatedBlock {
    pub(super) address: u64,
    ticket: Option<EventTicket>,
    shared: Option<Arc<PoolContext>>,
}

impl fmt::Debug for PoolCore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.with(|state| {
            f.debug_struct("PoolCore")
                .field("generation", &state.generation)
                .finish_non_exhaustive()
        })
    }
}
