//! A range of addresses that is somebody's own, and what is mapped there.
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

/// What is behind a slot.
pub(crate) enum Memory {
    /// A physical handle, mapped whole.
    Handle(Arc<Handle>),
    /// An allocation of the driver's, with its addresses.
    Allocation { charge: Charge, held: Arc<Held> },
}

/// Slots whose owner has let go of them.
pub(crate) struct Leaving {
    pub(crate) slots: Vec<(u64, Memory)>,
    /// What covers the work of the streams that it belonged to; nothing where there was none.
    pub(crate) until: Past,
    /// Uses by other streams.
    pub(crate) uses: Vec<Noted>,
    until_free: UntilFree,
}

/// Addresses, and what is mapped there.
///
/// What the driver would not take back when the span is dropped stays, and stays charged.
pub(crate) struct Span {
    driver: Arc<dyn Driver>,
    device: DeviceId,
    reach: Arc<[DeviceId]>,
    /// What it is for.
    kind: BlockKind,
    pub(crate) address: u64,
    /// Bytes of addresses.
    pub(crate) bytes: u64,
    /// Bytes of a slot, and of every handle in it.
    pub(crate) slot: u64,
    /// Whether its addresses are reserved, and not those of an allocation.
    reserved: bool,
    /// Whether there may be work on it that nobody has told of: it outlasts all that is queued on
    /// the device.
    outlasts: AtomicBool,
    /// Who keeps the addresses. None comes any more once the owner has let go and it has been 0.
    tokens: AtomicU64,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// By slot.
    mapped: BTreeMap<u64, Memory>,
    leaving: Vec<Leaving>,
    /// Threads that have taken leaving slots out to unmap them.
    reaping: u32,
    /// The owner is gone: so are the addresses, when nothing is mapped any more.
    closed: bool,
    /// The addresses have been given back.
    freed: bool,
}

impl Leaving {
    /// Whether the host has seen all of its work done. Makes no driver call.
    fn is_over(&self) -> bool {
        commons::is_done(&self.until) && self.uses.iter().all(Noted::is_done)
    }

    /// The streams and epochs of its work, but for uses that are still open.
    fn work(&self) -> Vec<(Arc<Timeline>, u64)> {
        let uses = self.uses.iter().filter_map(|u| Some((u.on().clone(), u.epoch()?)));
        self.until
            .iter()
            .cloned()
            .chain(uses)
            .filter(|(timeline, epoch)| !timeline.is_done(*epoch))
            .collect()
    }

    /// Looks whether its work is done. Never blocks.
    fn poll(&self) -> Result<()> {
        for (timeline, epoch) in self.work() {
            timeline.fence(epoch)?;
            timeline.poll()?;
        }
        Ok(())
    }
}

impl Span {
    /// Reserved addresses with nothing behind them.
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

    /// An allocation of the driver's.
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

    /// What it is for.
    pub(crate) fn kind(&self) -> BlockKind {
        self.kind
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Somebody keeps the addresses.
    pub(crate) fn keep(&self) {
        self.tokens.fetch_add(1, Ordering::Relaxed);
    }

    /// And does so no longer.
    pub(crate) fn forget(&self) {
        self.tokens.fetch_sub(1, Ordering::Release);
    }

    pub(crate) fn kept_by(&self) -> u64 {
        self.tokens.load(Ordering::Acquire)
    }

    /// Whether taking it down waits for nothing.
    pub(crate) fn goes_quietly(&self) -> bool {
        self.reserved
    }

    /// Whether the device has to be waited for before it goes.
    pub(super) fn outlasts(&self) -> bool {
        self.outlasts.load(Ordering::Relaxed)
    }

    /// There may be work on it that nobody has told of: before it goes the whole device is waited
    /// for.
    pub(crate) fn outlast_everything(&self) {
        self.outlasts.store(true, Ordering::Relaxed);
    }

    /// Waits for the device, if there may be work that nobody has told of (`cuCtxSynchronize`).
    /// Blocks.
    pub(super) fn outlast(&self) -> Result<()> {
        if self.outlasts() {
            let _relaxed = Relaxed::enter(&*self.driver);
            let waited = self.driver.device_synchronize(self.device);
            waited.map_err(|e| MemoryError::driver(self.device, e))?;
            self.outlasts.store(false, Ordering::Relaxed);
        }
        Ok(())
    }

    /// The handle behind the first slot.
    pub(crate) fn handle(&self) -> Option<Arc<Handle>> {
        match self.state().mapped.get(&0) {
            Some(Memory::Handle(handle)) => Some(handle.clone()),
            _ => None,
        }
    }

    /// Bytes that are mapped and charged.
    pub(crate) fn charged_bytes(&self) -> u64 {
        self.state().mapped.values().map(|memory| memory.charged(self.slot)).sum()
    }

    /// Bytes that are still charged though their owner has let go of them.
    pub(crate) fn leaving_bytes(&self) -> u64 {
        let state = self.state();
        state
            .leaving
            .iter()
            .flat_map(|leaving| &leaving.slots)
            .map(|(_, memory)| memory.charged(self.slot))
            .sum()
    }

    /// Runs of mapped slots, as addresses and bytes.
    pub(crate) fn ranges(&self) -> Vec<(u64, u64)> {
        let runs = self.runs();
        runs.into_iter()
            .map(|run| (self.address + run.start * self.slot, (run.end - run.start) * self.slot))
            .collect()
    }

    /// Runs of mapped slots.
    pub(crate) fn runs(&self) -> Vec<Range<u64>> {
        runs(self.state().mapped.keys().copied())
    }

    /// The slots of a range that have nothing behind them.
    pub(crate) fn missing(&self, slots: Range<u64>) -> Vec<u64> {
        let state = self.state();
        slots.filter(|slot| !state.mapped.contains_key(slot)).collect()
    }

    /// Maps handles at slots that have none, and lets the device at them. If that fails, none is
    /// mapped but for those that the driver would not unmap again: these leave, and their bytes are
    /// told.
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
            // SAFETY: 1. the slot is the owner's, who found nothing mapped there and whom nobody
            // else may commit for; no work is queued for addresses with nothing behind them.
            unsafe { self.driver.map(self.address + slot * self.slot, self.slot, handle.raw()) }?;
            mapped.push((slot, handle));
        }
        self.open(mapped.iter().map(|(slot, _)| *slot))
    }

    /// Lets the device and its peers at mapped slots, ascending.
    fn open(&self, slots: impl Iterator<Item = u64>) -> Result<(), DriverError> {
        for run in runs(slots) {
            let (address, bytes) =
                (self.address + run.start * self.slot, (run.end - run.start) * self.slot);
            self.driver.set_access(address, bytes, &self.reach)?;
        }
        Ok(())
    }

    /// Makes slots that were taken again ready for use by the stream `home`, which waits on the
    /// device for others' uses that are not done.
    pub(crate) fn ready(&self, again: &[Leaving], home: &Timeline) -> Result<()> {
        for leaving in again {
            if leaving.until.is_empty() {
                // It may leave because something failed after it was mapped, perhaps this.
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

    /// Puts slots among those that leave.
    pub(crate) fn add_leaving(&self, slots: Vec<(u64, Memory)>, until: Past, uses: Vec<Noted>) {
        self.state().leaving.push(Leaving { slots, until, uses, until_free: None });
    }

    /// The mapped slots of a range leave.
    pub(crate) fn leave(&self, slots: Range<u64>, until: Past, uses: Vec<Noted>) {
        let mut state = self.state();
        let rest = state.mapped.split_off(&slots.end);
        let these = state.mapped.split_off(&slots.start);
        state.mapped.extend(rest);
        let slots = these.into_iter().collect();
        state.leaving.push(Leaving { slots, until, uses, until_free: None });
    }

    /// All that is mapped leaves, and the addresses with it.
    pub(crate) fn leave_whole(&self, until: Past, uses: Vec<Noted>, until_free: UntilFree) {
        let mut state = self.state();
        state.closed = true;
        let slots = std::mem::take(&mut state.mapped).into_iter().collect();
        state.leaving.push(Leaving { slots, until, uses, until_free });
    }

    /// The addresses go when nothing is mapped there any more.
    pub(super) fn close(&self) {
        self.state().closed = true;
    }

    /// Takes those of `slots` that leave out again, for the owner, who wants them back. Waits for
    /// threads that are unmapping some just now, a few driver calls at most.
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

    /// Puts back what was taken again, as it was.
    pub(crate) fn put_back(&self, again: Vec<Leaving>) {
        self.state().leaving.extend(again);
    }

    /// Makes slots the owner's that were taken again.
    pub(crate) fn restore(&self, again: Vec<Leaving>) {
        self.state().mapped.extend(again.into_iter().flat_map(|leaving| leaving.slots));
    }

    /// Whether nothing of it is to go any more.
    pub(super) fn is_over(&self) -> bool {
        let state = self.state();
        state.leaving.is_empty() && (!state.closed || state.freed)
    }

    /// Returns what the slots that leave wait for, but for uses that are open.
    pub(super) fn leaving_work(&self) -> Vec<(Arc<Timeline>, u64)> {
        self.state().leaving.iter().flat_map(Leaving::work).collect()
    }

    /// Waits for the work of what leaves, until `until`. Says whether there was any to wait for.
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

    /// Takes down what leaves and whose work is done, unless somebody keeps the addresses. The
    /// bytes that are charged no more, and the driver's first refusal.
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
                // Nothing runs on a lost device any more.
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
            // SAFETY: 1. reserved for this span; nothing is mapped in it, and its owner is gone.
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

    /// Unmaps slots that nothing is queued for any more, and lets go of what was behind them. The
    /// bytes that are charged no more, what the driver would not take, and its first refusal.
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
                // SAFETY: 1. the callers have seen all work done that used these slots, or there
                // never was any.
                unsafe { self.driver.unmap(self.device, address, count * self.slot) }
            } else {
                let _relaxed = Relaxed::enter(&*self.driver);
                // SAFETY: 1. from `mem_alloc`, and gone from the table. 2. as above.
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
    /// Bytes that the pool is charged for.
    fn charged(&self, slot: u64) -> u64 {
        match self {
            Self::Handle(handle) => handle.bytes(),
            Self::Allocation { .. } => slot,
        }
    }

    /// It is mapped no more, or has been freed.
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

/// Merges slots, ascending, into runs.
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
