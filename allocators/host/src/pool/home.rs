//! The shell that allocators point to: made once, never freed, used again with a new generation.

use super::{
    Shared,
    state::{Freed, Released, State},
};
use crate::kernel::pointer;
use aquifer_core::{Action, Gate, MemoryError, Result, Tag, event::Ticket};
use aquifer_driver::HostAccess;
use aquifer_stream::Spin;
use std::{
    alloc::Layout,
    cell::Cell,
    fmt,
    num::NonZeroUsize,
    ptr::NonNull,
    sync::{
        Arc, Condvar, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

/// A pool's shell.
pub(super) struct Home {
    state: Spin<State>,
    /// Whether somebody checks what the host does with this pool's memory: asked on each free, and not under the lock.
    observed: AtomicBool,
    /// Whether somebody makes a region for this pool now.
    pub(super) growing: Mutex<bool>,
    /// Somebody has made one, or failed to.
    pub(super) grown: Condvar,
}

/// Frees by allocators whose shell has gone on to another life.
static STALE_FREES: AtomicU64 = AtomicU64::new(0);

/// Frees, in this process so far, by allocators whose pool was gone with all its blocks (a count): each was a second
/// free, or of a block that was never theirs, and was ignored. Those that a pool refused are in its own
/// [`PinnedStats::refused_frees`](super::PinnedStats::refused_frees).
#[must_use]
pub fn stale_frees() -> u64 {
    STALE_FREES.load(Ordering::Relaxed)
}

/// Shells without a pool.
static RETIRED: Mutex<Vec<&'static Home>> = Mutex::new(Vec::new());

thread_local! {
    // Const and without a destructor, so that an allocator may read it at any time of a thread's life.
    static AT_WORK: Cell<bool> = const { Cell::new(false) };
}

/// While it lives, this thread is at work for a pool, and pools refuse its allocations: see the module's surprises.
pub(super) struct AtWork(());

impl AtWork {
    /// `None` if the thread is at work for a pool already.
    pub(super) fn begin() -> Option<Self> {
        (!AT_WORK.replace(true)).then_some(Self(()))
    }
}

impl Drop for AtWork {
    fn drop(&mut self) {
        AT_WORK.set(false);
    }
}

impl Home {
    /// A shell for a new pool, and the generation of its allocators.
    pub(super) fn open(shared: Arc<Shared>) -> (&'static Self, u32) {
        super::sweep();
        let retired = RETIRED.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let home = retired.unwrap_or_else(|| {
            Box::leak(Box::new(Self {
                state: Spin::new(State::new()),
                observed: AtomicBool::new(false),
                growing: Mutex::new(false),
                grown: Condvar::new(),
            }))
        });
        home.observed.store(shared.observed, Ordering::Relaxed);
        let generation = home.with(|state| {
            state.open = true;
            state.shared = Some(shared);
            state.generation
        });
        (home, generation)
    }

    /// Looks into the books. `work` must not wait, ask the driver, or run what users wrote.
    #[inline]
    pub(super) fn with<R>(&self, work: impl FnOnce(&mut State) -> R) -> R {
        let _at_work = AtWork::begin();
        self.state.with(work)
    }

    /// Serves no more allocations of this generation, and gives back what nobody holds.
    pub(super) fn close(&'static self, generation: u32) {
        let shared = self.with(|state| {
            let shared = state.open_as(generation).ok().cloned();
            if shared.is_some() {
                state.open = false;
            }
            shared
        });
        if let Some(shared) = shared {
            self.poll_all();
            self.reap(&shared, 0, None);
            self.retire_or_linger();
        }
    }

    /// Puts the shell of a closed pool aside if nothing of the pool is left.
    pub(super) fn retire_or_linger(&'static self) {
        let (over, old) = self.with(|state| {
            let over = state.is_over() && state.shared.is_some();
            (over, if over { state.renew() } else { None })
        });
        drop(old);
        if over {
            RETIRED.lock().unwrap_or_else(PoisonError::into_inner).push(self);
        } else if self.with(|state| !state.open && state.holds_back()) {
            super::pending::linger(self);
        }
    }

    /// A block, by the whole chain.
    pub(super) fn allocate(&'static self, generation: u32, layout: Layout) -> Result<NonNull<[u8]>> {
        if layout.size() == 0 {
            // No memory stands behind it, and none is looked for when it comes back.
            let address = NonZeroUsize::new(layout.align()).unwrap_or(NonZeroUsize::MIN);
            return Ok(NonNull::slice_from_raw_parts(NonNull::without_provenance(address), 0));
        }
        let (bytes, align) = (layout.size() as u64, layout.align() as u64);
        if AT_WORK.get() {
            return Err(MemoryError::Busy { address: 0 });
        }
        let taken = match self.try_take(generation, bytes, align)? {
            Some(taken) => taken,
            None => self.take_by_chain(generation, layout)?,
        };
        self.tell(&taken.shared, taken.ticket, Action::Allocate, taken.address, bytes);
        // A block begins where something is mapped, and nothing is mapped at zero.
        let start =
            pointer(taken.address as usize).ok_or(MemoryError::ForeignBlock { address: taken.address })?;
        Ok(NonNull::slice_from_raw_parts(start, layout.size()))
    }

    /// A block from what is there, after a look at the oldest pending ones.
    pub(super) fn try_take(&'static self, generation: u32, bytes: u64, align: u64) -> Result<Option<Taken>> {
        // A few at a time: each may cost a query of the driver, and all are asked before the pool grows.
        const A_FEW: usize = 4;
        let (first, asked) = self.with(|state| -> Result<_> {
            state.open_as(generation)?;
            if state.has_pending() {
                return Ok((None, Some(state.ask(A_FEW))));
            }
            Ok((Self::take(state, bytes, align), None))
        })?;
        let Some(asked) = asked else { return Ok(first) };
        self.settle(asked);
        self.with(|state| {
            state.open_as(generation)?;
            Ok(Self::take(state, bytes, align))
        })
    }

    fn take(state: &mut State, bytes: u64, align: u64) -> Option<Taken> {
        let address = state.take(bytes, align)?;
        let recorder = state.shared.as_ref().and_then(|shared| shared.config.recorder.as_ref());
        let ticket = recorder.map(|recorder| recorder.ticket());
        // The count is touched only where somebody wants to be told.
        let shared = ticket.is_some().then(|| state.shared.clone()).flatten();
        Some(Taken { address, ticket, shared })
    }

    /// Takes a block back.
    pub(super) fn deallocate(&'static self, generation: u32, address: NonNull<u8>, layout: Layout) {
        if layout.size() == 0 {
            return;
        }
        let block = Freed { address: address.addr().get() as u64, requested: layout.size() as u64 };
        if self.observed.load(Ordering::Relaxed) {
            self.observe_free(generation, block);
        }
        let (released, open, ticket, shared) = self.with(|state| {
            if state.generation != generation {
                STALE_FREES.fetch_add(1, Ordering::Relaxed);
                return (Released::Refused, true, None, None);
            }
            let released = state.release(block);
            let recorder = state.shared.as_ref().and_then(|shared| shared.config.recorder.as_ref());
            let told = recorder.filter(|_| released != Released::Refused);
            let tickets = told.map(|r| (r.ticket(), (released == Released::Free).then(|| r.ticket())));
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
            self.poll_all();
            self.reap(&shared, 0, None);
            self.retire_or_linger();
        }
    }

    /// Tells whoever checks that the host gives up a block that no gate holds back.
    #[cold]
    fn observe_free(&self, generation: u32, block: Freed) {
        let shared = self.with(|state| {
            let live =
                state.generation == generation && state.live_size(block.address, block.requested).is_some();
            let free = live && !state.has_gates(block.address);
            free.then(|| state.shared.clone()).flatten()
        });
        if let Some(shared) = shared {
            shared.observe(block, HostAccess::Free);
        }
    }

    /// Makes a block larger or smaller where it is; says whether that could be done.
    pub(super) fn resize(&self, generation: u32, address: NonNull<u8>, old: usize, new: usize) -> bool {
        let address = address.addr().get() as u64;
        self.with(|state| state.generation == generation && state.resize(address, old as u64, new as u64))
    }

    /// Notes a gate on the live block that holds `address`.
    pub(super) fn defer(&self, generation: u32, address: NonNull<u8>, gate: Arc<dyn Gate>) -> Result<()> {
        let address = address.addr().get() as u64;
        // A block that is copied for ever without being freed does not collect gates for ever.
        const MANY: usize = 16;
        let (start, gates) = self.with(|state| -> Result<_> {
            let start = if state.generation == generation { state.block_at(address) } else { None };
            let start = start.ok_or(MemoryError::ForeignBlock { address })?;
            let count = state.note(start, gate);
            Ok((start, if count.is_multiple_of(MANY) { state.gates(start) } else { Vec::new() }))
        })?;
        let open: Vec<_> = gates.into_iter().filter(|gate| super::pending::is_open(&**gate)).collect();
        if !open.is_empty() {
            drop(self.with(|state| state.forget(start, &open)));
        }
        Ok(())
    }

    /// Hands an event to the recorder, outside the lock.
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
            recorder
                .record(ticket, recorder.event(action, shared.place(), 0, address, bytes, Tag::current()));
        }
    }
}

impl Shared {
    /// Tells whoever checks what the host does with a block.
    pub(super) fn observe(&self, block: Freed, access: HostAccess) {
        if let Some(observer) = self.host.reach.as_ref().and_then(|reach| reach.driver.observer()) {
            observer.host(block.address, block.requested, access);
        }
    }
}

/// A block that was found.
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
