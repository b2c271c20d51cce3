//! A dedicated range of addresses, and the memory mapped there.
#![expect(unsafe_code, reason = "maps, unmaps and frees")]

use crate::{
    backing::{
        handle::{Handle, HeldBytes},
        window::Grid,
    },
    base::{
        extent::UntilFree,
        pending::{PartsWork, PendingUses},
        record::CommittedBytes,
    },
};
use aquifer_core::{
    Charge, DeviceId, DriverError, MemoryError, Result, budget::StrandedCount, event::BlockKind,
};
use aquifer_driver::{Access, Driver, Relaxed, leftovers};
use aquifer_stream::Timeline;
use std::{
    collections::BTreeMap,
    mem::ManuallyDrop,
    ops::Range,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

/// Where spans are mapped.
pub(super) struct SpanContext {
    pub(super) driver: Arc<dyn Driver>,
    pub(super) device: DeviceId,
    /// The devices that mappings grant access to.
    pub(super) accessors: Arc<[DeviceId]>,
}

/// The memory behind a slot.
pub(crate) enum SpanMemory {
    /// A physical handle, mapped whole.
    Handle(Arc<Handle>),
    /// Imported handles, mapped one behind the other.
    Imported(Vec<Arc<Handle>>),
    /// An allocation of the driver, with its addresses.
    Allocation { charge: Charge, held: Arc<HeldBytes> },
}

/// Slots that are retiring: their owner has freed them, and they are still mapped.
pub(crate) struct RetiringSlots {
    pub(crate) slots: Vec<(u64, SpanMemory)>,
    /// The work that must be over before they are unmapped.
    work: PartsWork,
    until_free: UntilFree,
}

/// A range of device addresses, and the memory mapped there.
///
/// In aquifer-host, `kernel::Span` is a plain range of host addresses, and a `SlabSpan` describes a
/// slab or a block of a pinned pool.
///
/// Memory that the driver refuses to release when the span is dropped stays mapped and charged.
pub(crate) struct Span {
    driver: Arc<dyn Driver>,
    device: DeviceId,
    accessors: Arc<[DeviceId]>,
    /// The kind of block that the span is for.
    kind: BlockKind,
    pub(crate) address: u64,
    /// Bytes of the address range.
    pub(crate) bytes: u64,
    /// Bytes of a slot, and of every handle in it.
    pub(crate) slot: u64,
    /// Whether the addresses were reserved, and are not those of an allocation.
    reserved: bool,
    /// Whether untracked work may use the range, so that it must outlive all work queued on the
    /// device.
    synchronize: AtomicBool,
    /// Number of registrations of the address. It does not rise again after the owner has freed
    /// the span and it has been 0.
    registrations: AtomicU64,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Memory by slot.
    mapped: BTreeMap<u64, SpanMemory>,
    retiring: Vec<RetiringSlots>,
    /// Slots that their owner has freed, and that stay mapped until memory is needed.
    idle: BTreeMap<u64, RetiringSlots>,
    /// Number of threads that have removed retiring slots from the list to unmap them.
    reaping: u32,
    /// Whether the owner is gone. The addresses are freed when nothing is mapped any more.
    closed: bool,
    /// Whether the addresses have been freed.
    freed: bool,
}

impl RetiringSlots {
    /// Returns the streams and epochs of its work, except for open uses.
    fn work(&self) -> Vec<(Arc<Timeline>, u64)> {
        self.work.queued().filter(|(timeline, epoch)| !timeline.is_done(*epoch)).collect()
    }
}

impl Span {
    /// Makes a span of reserved addresses with nothing mapped.
    pub(super) fn mapped(
        place: SpanContext,
        kind: BlockKind,
        address: u64,
        bytes: u64,
        slot: u64,
    ) -> Self {
        Self::new(place, kind, address, bytes, slot, None)
    }

    fn new(
        place: SpanContext,
        kind: BlockKind,
        address: u64,
        bytes: u64,
        slot: u64,
        whole: Option<SpanMemory>,
    ) -> Self {
        let reserved = whole.is_none();
        let mapped = whole.into_iter().map(|memory| (0, memory)).collect();
        Self {
            driver: place.driver,
            device: place.device,
            accessors: place.accessors,
            kind,
            address,
            bytes,
            slot,
            reserved,
            synchronize: AtomicBool::new(false),
            registrations: AtomicU64::new(0),
            state: Mutex::new(State { mapped, ..State::default() }),
        }
    }

    /// Makes a span of an allocation of the driver.
    pub(super) fn whole(
        place: SpanContext,
        kind: BlockKind,
        address: u64,
        bytes: u64,
        charge: Charge,
        held: &Arc<HeldBytes>,
    ) -> Self {
        let allocation = SpanMemory::Allocation { charge, held: held.clone() };
        Self::new(place, kind, address, bytes, bytes, Some(allocation))
    }

    /// Returns the kind of block that the span is for.
    pub(crate) fn kind(&self) -> BlockKind {
        self.kind
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Registers a holder of the address.
    pub(crate) fn add_registration(&self) {
        self.registrations.fetch_add(1, Ordering::Relaxed);
    }

    /// Removes a holder that was registered by [`Span::add_registration`].
    pub(crate) fn remove_registration(&self) {
        let before = self.registrations.fetch_sub(1, Ordering::Release);
        debug_assert!(before > 0, "a registration was removed twice");
    }

    pub(crate) fn registrations(&self) -> u64 {
        self.registrations.load(Ordering::Acquire)
    }

    /// Returns whether the span can be released without a wait.
    pub(crate) fn reaps_without_blocking(&self) -> bool {
        self.reserved
    }

    /// Returns whether the device must be synchronised before the span is released.
    pub(super) fn needs_synchronize(&self) -> bool {
        self.synchronize.load(Ordering::Relaxed)
    }

    /// Untracked work may use this range: the device is synchronised before it is unmapped.
    pub(crate) fn require_synchronize(&self) {
        self.synchronize.store(true, Ordering::Relaxed);
    }

    /// Waits for the device if untracked work may use the range (`cuCtxSynchronize`). Blocks.
    pub(super) fn synchronize_if_required(&self) -> Result<()> {
        if self.needs_synchronize() {
            let _relaxed = Relaxed::enter(&*self.driver);
            let waited = self.driver.device_synchronize(self.device);
            waited.map_err(|e| MemoryError::driver(self.device, e))?;
            self.synchronize.store(false, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Returns the handles behind a range of mapped slots, and the offset of the range in the
    /// first. `None` if any of it is no handle.
    pub(crate) fn handles(&self, address: u64, bytes: u64) -> Option<(Vec<Arc<Handle>>, u64)> {
        let offset = address.checked_sub(self.address)?;
        let slots = offset / self.slot..(offset + bytes).div_ceil(self.slot);
        let state = self.state();
        let handles = slots.map(|slot| match state.mapped.get(&slot) {
            Some(SpanMemory::Handle(handle)) => Some(handle.clone()),
            _ => None,
        });
        Some((handles.collect::<Option<_>>()?, offset % self.slot))
    }

    /// Maps imported handles of these sizes one behind the other, which fill the span, and grants
    /// the devices access. On failure nothing stays mapped, except for what the driver refuses to
    /// unmap: that is kept for a later sweep, and the span must not be used.
    pub(super) fn map_imported(
        &self,
        parts: Vec<(u64, Arc<Handle>)>,
        access: Access,
    ) -> Result<(), DriverError> {
        let mut end = self.address;
        let mapped = parts.iter().try_for_each(|(bytes, handle)| {
            // SAFETY: 1. The span is new: nothing is mapped in it, and no work is queued for it.
            unsafe { self.driver.map(end, *bytes, handle.raw()) }?;
            end += bytes;
            Ok(())
        });
        let mapped = mapped.and_then(|()| {
            let bytes = end - self.address;
            if access.writes() {
                self.driver.set_access(self.address, bytes, &self.accessors)
            } else {
                self.driver.set_read_access(self.address, bytes, &self.accessors)
            }
        });
        let handles: Vec<_> = parts.into_iter().map(|(_, handle)| handle).collect();
        if mapped.is_ok() {
            self.state().mapped.insert(0, SpanMemory::Imported(handles));
        } else if end > self.address {
            let (driver, device, address) = (self.driver.clone(), self.device, self.address);
            leftovers::release(&self.driver, move || {
                let _mapped_until_then = &handles;
                // SAFETY: 1. No work has been queued for these addresses.
                unsafe { driver.unmap(device, address, end - address) }
            });
        }
        mapped
    }

    /// Returns the bytes that are mapped and charged.
    pub(crate) fn charged_bytes(&self) -> u64 {
        self.state().mapped.values().map(|memory| memory.charged(self.slot)).sum()
    }

    /// Counts all memory of the span as stranded until the returned values are dropped.
    pub(super) fn count_stranded(&self) -> Vec<StrandedCount> {
        let state = self.state();
        let retiring = state.retiring.iter().flat_map(|r| r.slots.iter().map(|(_, memory)| memory));
        state.mapped.values().chain(retiring).filter_map(SpanMemory::count_stranded).collect()
    }

    /// Returns the bytes that the owner has freed and that are still charged.
    pub(crate) fn retiring_bytes(&self) -> u64 {
        let state = self.state();
        state
            .retiring
            .iter()
            .flat_map(|retiring| &retiring.slots)
            .map(|(_, memory)| memory.charged(self.slot))
            .sum()
    }

    /// Returns the runs of mapped slots, as addresses and bytes.
    pub(crate) fn ranges(&self) -> Vec<(u64, u64)> {
        let runs = self.runs();
        runs.into_iter()
            .map(|run| (self.address + run.start * self.slot, (run.end - run.start) * self.slot))
            .collect()
    }

    /// Returns the layout of its slots.
    pub(crate) fn grid(&self) -> Grid {
        Grid { base: self.address, slot: self.slot }
    }

    /// Returns the runs of mapped slots.
    pub(crate) fn runs(&self) -> Vec<Range<u64>> {
        self.runs_in(0..u64::MAX)
    }

    /// Returns the runs of mapped slots in a range that does not end before it begins.
    pub(crate) fn runs_in(&self, slots: Range<u64>) -> Vec<Range<u64>> {
        runs(self.state().mapped.range(slots).map(|(slot, _)| *slot))
    }

    /// Returns the slots of a range that have no memory.
    pub(crate) fn missing(&self, slots: Range<u64>) -> Vec<u64> {
        let state = self.state();
        slots.filter(|slot| !state.mapped.contains_key(slot)).collect()
    }

    /// Maps handles at empty slots, and grants the devices access. On failure nothing stays mapped,
    /// except for what the driver refuses to unmap: those slots become retiring, and their bytes
    /// are returned with the error.
    pub(super) fn map(&self, parts: Vec<(u64, Arc<Handle>)>) -> Result<(), (DriverError, u64)> {
        let mut mapped = Vec::with_capacity(parts.len());
        match self.map_each(parts, &mut mapped) {
            Ok(()) => {
                let memory =
                    mapped.into_iter().map(|(slot, handle)| (slot, SpanMemory::Handle(handle)));
                self.state().mapped.extend(memory);
                Ok(())
            }
            Err(error) => {
                let memory =
                    mapped.into_iter().map(|(slot, handle)| (slot, SpanMemory::Handle(handle)));
                let (_, stuck, _) = self.unmap_slots(memory.collect());
                let bytes = stuck.iter().map(|(_, memory)| memory.charged(self.slot)).sum();
                if !stuck.is_empty() {
                    self.add_retiring(stuck, PartsWork::default());
                }
                Err((error, bytes))
            }
        }
    }

    fn map_each(
        &self,
        parts: Vec<(u64, Arc<Handle>)>,
        mapped: &mut Vec<(u64, Arc<Handle>)>,
    ) -> Result<(), DriverError> {
        for (slot, handle) in parts {
            debug_assert!((slot + 1) * self.slot <= self.bytes, "a slot beyond its span");
            debug_assert!(!self.state().mapped.contains_key(&slot), "a slot has memory already");
            // SAFETY: 1. The owner has exclusive access to the slot and found nothing mapped there.
            // No work is queued for addresses without memory.
            unsafe { self.driver.map(self.address + slot * self.slot, self.slot, handle.raw()) }?;
            mapped.push((slot, handle));
        }
        self.enable_access(mapped.iter().map(|(slot, _)| *slot))
    }

    /// Grants the device and its peers access to mapped slots, which are ascending.
    fn enable_access(&self, slots: impl Iterator<Item = u64>) -> Result<(), DriverError> {
        for run in runs(slots) {
            let (address, bytes) =
                (self.address + run.start * self.slot, (run.end - run.start) * self.slot);
            self.driver.set_access(address, bytes, &self.accessors)?;
        }
        Ok(())
    }

    /// Makes slots that were taken again ready for the stream `owner_stream`, which waits on the
    /// device for uses by other streams that are not done.
    pub(crate) fn prepare_reuse(
        &self,
        again: &[RetiringSlots],
        owner_stream: &Timeline,
    ) -> Result<()> {
        for retiring in again {
            if retiring.work.own.is_empty() {
                // The slots may leave because a step after their mapping failed, perhaps this one.
                let opened = self.enable_access(retiring.slots.iter().map(|(slot, _)| *slot));
                opened.map_err(|e| MemoryError::driver(self.device, e))?;
            }
            retiring.work.uses.order_before(owner_stream, self.address)?;
        }
        Ok(())
    }

    /// Adds slots to those that are retiring.
    pub(crate) fn add_retiring(&self, slots: Vec<(u64, SpanMemory)>, work: PartsWork) {
        self.state().retiring.push(RetiringSlots { slots, work, until_free: None });
    }

    /// Returns whether the slot at an address has memory, in use or retiring.
    pub(super) fn has_memory_at(&self, address: u64) -> bool {
        let slot = address.saturating_sub(self.address) / self.slot;
        let state = self.state();
        let retiring = state.retiring.iter().flat_map(|retiring| &retiring.slots);
        let is_kept = state.mapped.contains_key(&slot) || state.idle.contains_key(&slot);
        is_kept || retiring.map(|(slot, _)| *slot).any(|each| each == slot)
    }

    /// Makes the mapped slots of a range retiring. `until_free` is dropped when their memory is
    /// free.
    pub(crate) fn retire(&self, slots: Range<u64>, work: PartsWork, until_free: UntilFree) {
        let mut state = self.state();
        let rest = state.mapped.split_off(&slots.end);
        let these = state.mapped.split_off(&slots.start);
        state.mapped.extend(rest);
        let slots = these.into_iter().collect();
        state.retiring.push(RetiringSlots { slots, work, until_free });
    }

    /// Makes mapped slots idle. The values are dropped when their memory is free.
    pub(crate) fn make_idle(&self, slots: Vec<(u64, UntilFree)>, work: &PartsWork) {
        let mut state = self.state();
        for (slot, until_free) in slots {
            if let Some(memory) = state.mapped.remove(&slot) {
                let slots = vec![(slot, memory)];
                state.idle.insert(slot, RetiringSlots { slots, work: work.clone(), until_free });
            }
        }
    }

    /// Returns the bytes of idle slots.
    pub(crate) fn idle_bytes(&self) -> u64 {
        self.state().idle.len() as u64 * self.slot
    }

    /// Takes up to `most` idle slots whose work is done, the highest first. Returns them, and the
    /// work of those that were passed over. Makes no driver call. Give what is taken to
    /// [`Span::retire_taken`]: a commit of the slots waits for it.
    pub(crate) fn take_idle(
        &self,
        most: u64,
    ) -> (Option<RetiringSlots>, Vec<(Arc<Timeline>, u64)>) {
        let (mut numbers, mut unfinished) = (Vec::new(), Vec::new());
        let mut state = self.state();
        for (&slot, idle) in state.idle.iter_mut().rev() {
            if numbers.len() as u64 == most {
                break;
            }
            if idle.work.is_over() {
                numbers.push(slot);
            } else {
                unfinished.extend(idle.work());
            }
        }
        let mut taken: Option<RetiringSlots> = None;
        for idle in numbers.iter().filter_map(|slot| state.idle.remove(slot)) {
            let Some(all) = &mut taken else {
                taken = Some(idle);
                continue;
            };
            all.slots.extend(idle.slots);
            if let Some(values) = idle.until_free {
                all.until_free.get_or_insert_default().extend(*values);
            }
        }
        state.reaping += u32::from(taken.is_some());
        (taken, unfinished)
    }

    /// Makes slots from [`Span::take_idle`] retiring.
    pub(crate) fn retire_taken(&self, taken: RetiringSlots) {
        let mut state = self.state();
        state.retiring.push(taken);
        state.reaping -= 1;
    }

    /// Takes all idle slots, whatever their work.
    pub(crate) fn take_all_idle(&self) -> Vec<RetiringSlots> {
        std::mem::take(&mut self.state().idle).into_values().collect()
    }

    /// Makes all mapped slots retiring, and closes the span.
    pub(crate) fn retire_whole(&self, work: PartsWork, until_free: UntilFree) {
        let mut state = self.state();
        debug_assert!(!state.closed, "a span is freed twice");
        state.closed = true;
        let slots = std::mem::take(&mut state.mapped).into_iter().collect();
        state.retiring.push(RetiringSlots { slots, work, until_free });
    }

    /// Closes the span: the addresses are freed when nothing is mapped there any more.
    pub(super) fn close(&self) {
        self.state().closed = true;
    }

    /// Takes those of `slots` that are retiring or idle, for the owner to use again. Waits for
    /// threads that are unmapping slots at this moment, a few driver calls at most. Returns them,
    /// and the bytes that were idle.
    pub(crate) fn take_back_retiring(&self, slots: &[u64]) -> (Vec<RetiringSlots>, u64) {
        loop {
            let mut state = self.state();
            if state.reaping > 0 {
                drop(state);
                std::thread::yield_now();
                continue;
            }
            let mut again: Vec<_> =
                slots.iter().filter_map(|slot| state.idle.remove(slot)).collect();
            let idle = again.len() as u64 * self.slot;
            for retiring in &mut state.retiring {
                let wanted = |&(slot, _): &(u64, SpanMemory)| slots.binary_search(&slot).is_ok();
                let (taken, rest) =
                    std::mem::take(&mut retiring.slots).into_iter().partition(wanted);
                retiring.slots = rest;
                let taken: Vec<_> = taken;
                if !taken.is_empty() {
                    let work = retiring.work.clone();
                    again.push(RetiringSlots { slots: taken, work, until_free: None });
                }
            }
            state
                .retiring
                .retain(|retiring| !retiring.slots.is_empty() || retiring.until_free.is_some());
            return (again, idle);
        }
    }

    /// Returns slots from [`Span::take_back_retiring`] to the list of retiring slots.
    pub(crate) fn return_retiring(&self, again: Vec<RetiringSlots>) {
        self.state().retiring.extend(again);
    }

    /// Makes slots from [`Span::take_back_retiring`] the owner's again.
    pub(crate) fn restore(&self, again: Vec<RetiringSlots>) {
        let mut over = Vec::new();
        let mut state = self.state();
        for retiring in again {
            over.push(retiring.until_free);
            for (slot, memory) in retiring.slots {
                let before = state.mapped.insert(slot, memory);
                debug_assert!(before.is_none(), "a slot is mapped twice");
            }
        }
        // These may take the lock.
        drop(state);
        drop(over);
    }

    /// Returns whether nothing of the span is left to be released.
    pub(super) fn is_over(&self) -> bool {
        let state = self.state();
        state.retiring.is_empty() && (!state.closed || state.freed)
    }

    /// Returns the work that retiring slots wait for, except for open uses.
    pub(super) fn retiring_work(&self) -> Vec<(Arc<Timeline>, u64)> {
        self.state().retiring.iter().flat_map(RetiringSlots::work).collect()
    }

    /// Waits by `wait` for the work of retiring slots. Returns whether there was any.
    pub(crate) fn wait(&self, wait: impl Fn(&Timeline, u64) -> Result<bool>) -> Result<bool> {
        if self.registrations() > 0 {
            return Ok(false);
        }
        let work = self.retiring_work();
        for (timeline, epoch) in &work {
            wait(timeline, *epoch)?;
        }
        Ok(!work.is_empty())
    }

    /// Releases retiring slots whose work is done, unless the address is registered. Returns the
    /// bytes no longer charged, and the driver's first refusal.
    pub(super) fn reap(&self) -> (u64, Result<()>) {
        if self.registrations() > 0 {
            return (0, Ok(()));
        }
        let retiring = {
            let mut state = self.state();
            state.reaping += 1;
            std::mem::take(&mut state.retiring)
        };
        let (mut released, mut outcome, mut rest, mut over) = (0, Ok(()), Vec::new(), Vec::new());
        for mut entry in retiring {
            match entry.work.poll() {
                // After the loss of the device no work runs on it.
                Err(MemoryError::DeviceLost { .. }) => {}
                Ok(()) if entry.work.is_over() && !self.needs_synchronize() => {}
                polled => {
                    outcome = outcome.and(polled);
                    rest.push(entry);
                    continue;
                }
            }
            let (bytes, stuck, refused) = self.unmap_slots(std::mem::take(&mut entry.slots));
            released += bytes;
            outcome =
                outcome.and(refused.map_or(Ok(()), |e| Err(MemoryError::driver(self.device, e))));
            if stuck.is_empty() {
                over.push(entry.until_free);
            } else {
                entry.slots = stuck;
                rest.push(entry);
            }
        }
        let last = {
            let mut state = self.state();
            state.retiring.append(&mut rest);
            state.reaping -= 1;
            let last = state.closed
                && !state.freed
                && state.reaping == 0
                && state.retiring.is_empty()
                && state.mapped.is_empty();
            state.freed |= last;
            last
        };
        drop(over);
        if last && self.reserved {
            // SAFETY: 1. The range was reserved for this span. Nothing is mapped in it, and its
            // owner is gone.
            match unsafe { self.driver.address_free(self.device, self.address, self.bytes) } {
                Err(e) if !e.is_device_lost() => {
                    self.state().freed = false;
                    outcome = outcome.and(Err(MemoryError::driver(self.device, e)));
                }
                _ => {}
            }
        }
        (released, outcome)
    }

    /// Unmaps slots for which no work is queued any more, and releases their memory. Returns the
    /// bytes no longer charged, the slots that the driver refused, and its first refusal.
    fn unmap_slots(
        &self,
        mut slots: Vec<(u64, SpanMemory)>,
    ) -> (u64, Vec<(u64, SpanMemory)>, Option<DriverError>) {
        slots.sort_unstable_by_key(|(slot, _)| *slot);
        let numbers = runs(slots.iter().map(|(slot, _)| *slot));
        let mut slots = slots.into_iter();
        let (mut released, mut stuck, mut refused) = (0, Vec::new(), None);
        for run in numbers {
            let count = run.end - run.start;
            let these: Vec<_> = slots.by_ref().take(count as usize).collect();
            let address = self.address + run.start * self.slot;
            let ended = if self.reserved {
                // SAFETY: 1. The callers have seen all work done that used these slots, or there
                // was none.
                unsafe { self.driver.unmap(self.device, address, count * self.slot) }
            } else {
                let _relaxed = Relaxed::enter(&*self.driver);
                // SAFETY: 1. The address came from `mem_alloc`, and has left the table. 2. As
                // above.
                unsafe { self.driver.mem_free(self.device, address) }
            };
            match ended {
                Err(e) if !e.is_device_lost() => {
                    refused = refused.or(Some(e));
                    stuck.extend(these);
                }
                _ => {
                    for (_, memory) in these {
                        released += memory.charged(self.slot);
                        memory.end(self.slot);
                    }
                }
            }
        }
        (released, stuck, refused)
    }
}

impl CommittedBytes for Span {
    fn committed_bytes(&self) -> u64 {
        self.charged_bytes()
    }
}

impl SpanMemory {
    /// Returns the bytes that the pool is charged for.
    fn charged(&self, slot: u64) -> u64 {
        match self {
            Self::Handle(handle) => handle.bytes(),
            Self::Imported(_) => 0,
            Self::Allocation { .. } => slot,
        }
    }

    fn count_stranded(&self) -> Option<StrandedCount> {
        match self {
            Self::Handle(handle) => handle.count_stranded(),
            Self::Imported(_) => None,
            Self::Allocation { charge, .. } => Some(charge.budget().count_stranded(charge.bytes())),
        }
    }

    /// Ends memory that has been unmapped or freed.
    fn end(self, slot: u64) {
        match self {
            Self::Handle(handle) => drop(handle),
            Self::Imported(handles) => drop(handles),
            Self::Allocation { charge, held } => {
                held.sub(slot);
                drop(charge);
            }
        }
    }
}

/// Merges ascending slots into runs.
fn runs(slots: impl Iterator<Item = u64>) -> Vec<Range<u64>> {
    let mut runs: Vec<Range<u64>> = Vec::new();
    for slot in slots {
        match runs.last_mut() {
            Some(run) if run.end == slot => run.end += 1,
            _ => runs.push(slot..slot + 1),
        }
    }
    runs
}

impl Drop for Span {
    fn drop(&mut self) {
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        let _still_mapped = ManuallyDrop::new(std::mem::take(&mut state.mapped));
        let _still_retiring = ManuallyDrop::new(std::mem::take(&mut state.retiring));
        let _still_idle = ManuallyDrop::new(std::mem::take(&mut state.idle));
    }
}
