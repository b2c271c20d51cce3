//! A dedicated range of addresses, and the memory mapped there.
#![expect(unsafe_code, reason = "maps, unmaps and frees")]

use super::Apart;
use crate::{
    block::UntilFree,
    physical::{
        commons::{self, Past},
        handle::{Handle, Held},
    },
};
use aquifer_core::{Charge, DeviceId, DriverError, MemoryError, Result, event::BlockKind};
use aquifer_driver::{Driver, Relaxed};
use aquifer_stream::{Noted, Timeline};
use std::{
    collections::BTreeMap,
    fmt,
    mem::ManuallyDrop,
    ops::Range,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Instant,
};

/// The memory behind a slot.
pub(crate) enum Memory {
    /// A physical handle, mapped whole.
    Handle(Arc<Handle>),
    /// An allocation of the driver, with its addresses.
    Allocation { charge: Charge, held: Arc<Held> },
}

/// Slots that their owner has freed.
pub(crate) struct Leaving {
    pub(crate) slots: Vec<(u64, Memory)>,
    /// The epochs that cover the work of the owner streams. Empty if there was none.
    pub(crate) until: Past,
    /// Uses by other streams.
    pub(crate) uses: Vec<Noted>,
    until_free: UntilFree,
}

/// A range of addresses, and the memory mapped there.
///
/// Memory that the driver refuses to release when the span is dropped stays mapped and charged.
pub(crate) struct Span {
    driver: Arc<dyn Driver>,
    device: DeviceId,
    reach: Arc<[DeviceId]>,
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
    outlasts: AtomicBool,
    /// Number of registrations of the address. It does not rise again after the owner has freed the
    /// span and it has been 0.
    tokens: AtomicU64,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Memory by slot.
    mapped: BTreeMap<u64, Memory>,
    leaving: Vec<Leaving>,
    /// Number of threads that have removed leaving slots from the list to unmap them.
    reaping: u32,
    /// Whether the owner is gone. The addresses are freed when nothing is mapped any more.
    closed: bool,
    /// Whether the addresses have been freed.
    freed: bool,
}

impl Leaving {
    /// Returns whether the host has seen all of its work done. Makes no driver call.
    fn is_over(&self) -> bool {
        commons::is_done(&self.until) && self.uses.iter().all(Noted::is_done)
    }

    /// Returns the streams and epochs of its work, except for open uses.
    fn work(&self) -> Vec<(Arc<Timeline>, u64)> {
        let uses = self.uses.iter().filter_map(|u| Some((u.on().clone(), u.epoch()?)));
        self.until
            .iter()
            .cloned()
            .chain(uses)
            .filter(|(timeline, epoch)| !timeline.is_done(*epoch))
            .collect()
    }

    /// Polls whether its work is done. Never blocks.
    fn poll(&self) -> Result<()> {
        for (timeline, epoch) in self.work() {
            timeline.fence(epoch)?;
            timeline.poll()?;
        }
        Ok(())
    }
}

impl Span {
    /// Makes a span of reserved addresses with nothing mapped.
    pub(super) fn mapped(
        apart: &Apart,
        kind: BlockKind,
        address: u64,
        bytes: u64,
        slot: u64,
    ) -> Self {
        Self::new(apart, kind, address, bytes, slot, None)
    }

    fn new(
        apart: &Apart,
        kind: BlockKind,
        address: u64,
        bytes: u64,
        slot: u64,
        whole: Option<Memory>,
    ) -> Self {
        let reserved = whole.is_none();
        let mapped = whole.into_iter().map(|memory| (0, memory)).collect();
        Self {
            driver: apart.driver.clone(),
            device: apart.device,
            reach: apart.reach.clone(),
            kind,
            address,
            bytes,
            slot,
            reserved,
            outlasts: AtomicBool::new(false),
            tokens: AtomicU64::new(0),
            state: Mutex::new(State { mapped, ..State::default() }),
        }
    }

    /// Makes a span of an allocation of the driver.
    pub(super) fn whole(
        apart: &Apart,
        kind: BlockKind,
        address: u64,
        bytes: u64,
        charge: Charge,
        held: &Arc<Held>,
    ) -> Self {
        let allocation = Memory::Allocation { charge, held: held.clone() };
        Self::new(apart, kind, address, bytes, bytes, Some(allocation))
    }

    /// Returns the kind of block that the span is for.
    pub(crate) fn kind(&self) -> BlockKind {
        self.kind
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Registers a holder of the address.
    pub(crate) fn keep(&self) {
        self.tokens.fetch_add(1, Ordering::Relaxed);
    }

    /// Removes a holder that was registered by [`Span::keep`].
    pub(crate) fn forget(&self) {
        self.tokens.fetch_sub(1, Ordering::Release);
    }

    pub(crate) fn kept_by(&self) -> u64 {
        self.tokens.load(Ordering::Acquire)
    }

    /// Returns whether the span can be released without a wait.
    pub(crate) fn goes_quietly(&self) -> bool {
        self.reserved
    }

    /// Returns whether the device must be synchronised before the span is released.
    pub(super) fn outlasts(&self) -> bool {
        self.outlasts.load(Ordering::Relaxed)
    }

    /// Untracked work may use this range: the device is synchronised before it is unmapped.
    pub(crate) fn outlast_everything(&self) {
        self.outlasts.store(true, Ordering::Relaxed);
    }

    /// Waits for the device if untracked work may use the range (`cuCtxSynchronize`). Blocks.
    pub(super) fn outlast(&self) -> Result<()> {
        if self.outlasts() {
            let _relaxed = Relaxed::enter(&*self.driver);
            let waited = self.driver.device_synchronize(self.device);
            waited.map_err(|e| MemoryError::driver(self.device, e))?;
            self.outlasts.store(false, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Returns the handle behind the first slot.
    pub(crate) fn handle(&self) -> Option<Arc<Handle>> {
        match self.state().mapped.get(&0) {
            Some(Memory::Handle(handle)) => Some(handle.clone()),
            _ => None,
        }
    }

    /// Returns the bytes that are mapped and charged.
    pub(crate) fn charged_bytes(&self) -> u64 {
        self.state().mapped.values().map(|memory| memory.charged(self.slot)).sum()
    }

    /// Returns the bytes that the owner has freed and that are still charged.
    pub(crate) fn leaving_bytes(&self) -> u64 {
        let state = self.state();
        state
            .leaving
            .iter()
            .flat_map(|leaving| &leaving.slots)
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

    /// Returns the runs of mapped slots.
    pub(crate) fn runs(&self) -> Vec<Range<u64>> {
        runs(self.state().mapped.keys().copied())
    }

    /// Returns the slots of a range that have no memory.
    pub(crate) fn missing(&self, slots: Range<u64>) -> Vec<u64> {
        let state = self.state();
        slots.filter(|slot| !state.mapped.contains_key(slot)).collect()
    }

    /// Maps handles at empty slots, and grants the devices access. On failure nothing stays mapped,
    /// except for what the driver refuses to unmap: those slots leave, and their bytes are returned
    /// with the error.
    pub(super) fn map(&self, parts: Vec<(u64, Arc<Handle>)>) -> Result<(), (DriverError, u64)> {
        let mut mapped = Vec::with_capacity(parts.len());
        match self.map_each(parts, &mut mapped) {
            Ok(()) => {
                let memory =
                    mapped.into_iter().map(|(slot, handle)| (slot, Memory::Handle(handle)));
                self.state().mapped.extend(memory);
                Ok(())
            }
            Err(error) => {
                let memory =
                    mapped.into_iter().map(|(slot, handle)| (slot, Memory::Handle(handle)));
                let (_, stuck, _) = self.take_down(memory.collect());
                let bytes = stuck.iter().map(|(_, memory)| memory.charged(self.slot)).sum();
                if !stuck.is_empty() {
                    self.add_leaving(stuck, Past::new(), Vec::new());
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
            // SAFETY: 1. The owner has exclusive access to the slot and found nothing mapped there.
            // No work is queued for addresses without memory.
            unsafe { self.driver.map(self.address + slot * self.slot, self.slot, handle.raw()) }?;
            mapped.push((slot, handle));
        }
        self.open(mapped.iter().map(|(slot, _)| *slot))
    }

    /// Grants the device and its peers access to mapped slots, which are ascending.
    fn open(&self, slots: impl Iterator<Item = u64>) -> Result<(), DriverError> {
        for run in runs(slots) {
            let (address, bytes) =
                (self.address + run.start * self.slot, (run.end - run.start) * self.slot);
            self.driver.set_access(address, bytes, &self.reach)?;
        }
        Ok(())
    }

    /// Makes slots that were taken again ready for the stream `home`, which waits on the device for
    /// uses by other streams that are not done.
    pub(crate) fn ready(&self, again: &[Leaving], home: &Timeline) -> Result<()> {
        for leaving in again {
            if leaving.until.is_empty() {
                // The slots may leave because a step after their mapping failed, perhaps this one.
                let opened = self.open(leaving.slots.iter().map(|(slot, _)| *slot));
                opened.map_err(|e| MemoryError::driver(self.device, e))?;
            }
            for noted in &leaving.uses {
                let epoch = noted.epoch().ok_or(MemoryError::Busy { address: self.address })?;
                home.wait_for(noted.on(), epoch)?;
            }
        }
        Ok(())
    }

    /// Adds slots to those that leave.
    pub(crate) fn add_leaving(&self, slots: Vec<(u64, Memory)>, until: Past, uses: Vec<Noted>) {
        self.state().leaving.push(Leaving { slots, until, uses, until_free: None });
    }

    /// Makes the mapped slots of a range leave.
    pub(crate) fn leave(&self, slots: Range<u64>, until: Past, uses: Vec<Noted>) {
        let mut state = self.state();
        let rest = state.mapped.split_off(&slots.end);
        let these = state.mapped.split_off(&slots.start);
        state.mapped.extend(rest);
        let slots = these.into_iter().collect();
        state.leaving.push(Leaving { slots, until, uses, until_free: None });
    }

    /// Makes all mapped slots leave, and closes the span.
    pub(crate) fn leave_whole(&self, until: Past, uses: Vec<Noted>, until_free: UntilFree) {
        let mut state = self.state();
        state.closed = true;
        let slots = std::mem::take(&mut state.mapped).into_iter().collect();
        state.leaving.push(Leaving { slots, until, uses, until_free });
    }

    /// Closes the span: the addresses are freed when nothing is mapped there any more.
    pub(super) fn close(&self) {
        self.state().closed = true;
    }

    /// Takes those of `slots` that are leaving off the list, for the owner to use again. Waits for
    /// threads that are unmapping slots at this moment, a few driver calls at most.
    pub(crate) fn take_again(&self, slots: &[u64]) -> Vec<Leaving> {
        loop {
            let mut state = self.state();
            if state.reaping > 0 {
                drop(state);
                std::thread::yield_now();
                continue;
            }
            let mut again = Vec::new();
            for leaving in &mut state.leaving {
                let wanted = |&(slot, _): &(u64, Memory)| slots.binary_search(&slot).is_ok();
                let (taken, rest) =
                    std::mem::take(&mut leaving.slots).into_iter().partition(wanted);
                leaving.slots = rest;
                let taken: Vec<_> = taken;
                if !taken.is_empty() {
                    let (until, uses) = (leaving.until.clone(), leaving.uses.clone());
                    again.push(Leaving { slots: taken, until, uses, until_free: None });
                }
            }
            state
                .leaving
                .retain(|leaving| !leaving.slots.is_empty() || leaving.until_free.is_some());
            return again;
        }
    }

    /// Returns slots from [`Span::take_again`] to the list of leaving slots.
    pub(crate) fn put_back(&self, again: Vec<Leaving>) {
        self.state().leaving.extend(again);
    }

    /// Makes slots from [`Span::take_again`] the owner's again.
    pub(crate) fn restore(&self, again: Vec<Leaving>) {
        self.state().mapped.extend(again.into_iter().flat_map(|leaving| leaving.slots));
    }

    /// Returns whether nothing of the span is left to be released.
    pub(super) fn is_over(&self) -> bool {
        let state = self.state();
        state.leaving.is_empty() && (!state.closed || state.freed)
    }

    /// Returns the work that leaving slots wait for, except for open uses.
    pub(super) fn leaving_work(&self) -> Vec<(Arc<Timeline>, u64)> {
        self.state().leaving.iter().flat_map(Leaving::work).collect()
    }

    /// Waits until `until` for the work of leaving slots. Returns whether there was any.
    pub(super) fn wait(&self, until: Option<Instant>) -> Result<bool> {
        if self.kept_by() > 0 {
            return Ok(false);
        }
        let work = self.leaving_work();
        for (timeline, epoch) in &work {
            timeline.wait(*epoch, until)?;
        }
        Ok(!work.is_empty())
    }

    /// Releases leaving slots whose work is done, unless the address is registered. Returns the
    /// bytes no longer charged, and the driver's first refusal.
    pub(super) fn reap(&self) -> (u64, Result<()>) {
        if self.kept_by() > 0 {
            return (0, Ok(()));
        }
        let leaving = {
            let mut state = self.state();
            state.reaping += 1;
            std::mem::take(&mut state.leaving)
        };
        let (mut gone, mut outcome, mut rest, mut over) = (0, Ok(()), Vec::new(), Vec::new());
        for mut entry in leaving {
            match entry.poll() {
                // After the loss of the device no work runs on it.
                Err(MemoryError::DeviceLost { .. }) => {}
                Ok(()) if entry.is_over() && !self.outlasts() => {}
                looked => {
                    outcome = outcome.and(looked);
                    rest.push(entry);
                    continue;
                }
            }
            let (bytes, stuck, refused) = self.take_down(std::mem::take(&mut entry.slots));
            gone += bytes;
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
            state.leaving.append(&mut rest);
            state.reaping -= 1;
            let last = state.closed
                && !state.freed
                && state.reaping == 0
                && state.leaving.is_empty()
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
        (gone, outcome)
    }

    /// Unmaps slots for which no work is queued any more, and releases their memory. Returns the
    /// bytes no longer charged, the slots that the driver refused, and its first refusal.
    fn take_down(
        &self,
        mut slots: Vec<(u64, Memory)>,
    ) -> (u64, Vec<(u64, Memory)>, Option<DriverError>) {
        slots.sort_unstable_by_key(|(slot, _)| *slot);
        let numbers = runs(slots.iter().map(|(slot, _)| *slot));
        let mut slots = slots.into_iter();
        let (mut gone, mut stuck, mut refused) = (0, Vec::new(), None);
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
                        gone += memory.charged(self.slot);
                        memory.end(self.slot);
                    }
                }
            }
        }
        (gone, stuck, refused)
    }
}

impl Memory {
    /// Returns the bytes that the pool is charged for.
    fn charged(&self, slot: u64) -> u64 {
        match self {
            Self::Handle(handle) => handle.bytes(),
            Self::Allocation { .. } => slot,
        }
    }

    /// Ends memory that has been unmapped or freed.
    fn end(self, slot: u64) {
        match self {
            Self::Handle(handle) => drop(handle),
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
        let _still_leaving = ManuallyDrop::new(std::mem::take(&mut state.leaving));
    }
}

impl fmt::Debug for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Span")
            .field("address", &format_args!("{:#x}", self.address))
            .field("bytes", &self.bytes)
            .field("kept_by", &self.kept_by())
            .finish_non_exhaustive()
    }
}
