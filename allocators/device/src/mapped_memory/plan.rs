//! The handles for a claimed window: spare ones, new ones of the driver, those under free memory,
//! and those made from other handles; and their mapping.
#![expect(unsafe_code, reason = "maps and unmaps")]

use super::{
    MappedMemory,
    free_ranges::{Reach, TakenMapping},
    search::{Claim, PlaceOutcome, Supply},
};
use crate::backing::{
    handle::{Funds, Handle, HandleError},
    slots::{Mapping, runs},
};
use aquifer_core::{
    Charge, MemoryError, Result,
    scratch::{Bump, List},
};
use aquifer_driver::ExportTypes;
use std::{cmp::Reverse, sync::Arc};

/// The memory that an attempt holds. None of it is in a cache.
pub(super) struct MappingPlan<'s> {
    /// Handles that are not mapped.
    unmapped: List<'s, UnmappedHandle>,
    /// Charged bytes without a handle: the charge for all missing bytes of the window, which is
    /// taken at once, and those of handles released for their charge. The charge of each new
    /// handle is split off it. If it is too small for a handle, unmapped handles are released for
    /// theirs. If these are too few as well, or there is a reservation, that handle is charged on
    /// its own.
    unspent: Option<Charge>,
    /// Bytes of `unspent` that this attempt has charged to the budget.
    unspent_new: u64,
    /// The handles and their planned slots.
    pub(super) planned: List<'s, PlannedMapping>,
    /// The slots at the end of the window that no planned handle covers.
    pub(super) unused: u64,
    /// Mappings whose work is not done. Their handles are mapped a second time.
    pub(super) busy: List<'s, TakenMapping<'s>>,
    /// Mappings made by this attempt that the driver refused to remove.
    pub(super) stuck: List<'s, Mapping>,
}

pub(super) struct UnmappedHandle {
    handle: Arc<Handle>,
    /// Created by this attempt.
    new: bool,
    /// Still mapped elsewhere, so it cannot be released.
    busy: bool,
}

impl From<Arc<Handle>> for UnmappedHandle {
    /// A handle that is mapped nowhere, and was not created by this attempt.
    fn from(handle: Arc<Handle>) -> Self {
        Self { handle, new: false, busy: false }
    }
}

/// A handle and the slots that it is to be mapped at.
pub(super) struct PlannedMapping {
    pub(super) first: u64,
    pub(super) count: u64,
    pub(super) unmapped: UnmappedHandle,
}

impl PlannedMapping {
    pub(super) fn mapping(&self) -> Mapping {
        Mapping { first: self.first, count: self.count, handle: self.unmapped.handle.clone() }
    }
}

impl<'s> MappingPlan<'s> {
    pub(super) fn new(bump: &'s Bump) -> Self {
        Self {
            unmapped: List::new_in(bump),
            unspent: None,
            unspent_new: 0,
            planned: List::new_in(bump),
            unused: 0,
            busy: List::new_in(bump),
            stuck: List::new_in(bump),
        }
    }

    /// Returns the allocator of its lists.
    fn bump(&self) -> &'s Bump {
        self.unmapped.allocator()
    }

    fn bytes(&self) -> u64 {
        let unspent = self.unspent.as_ref().map_or(0, Charge::bytes);
        unspent + self.unmapped.iter().map(|unmapped| unmapped.handle.bytes()).sum::<u64>()
    }

    /// Adds a charge to `unspent`. A pool has one budget, so charges always merge.
    fn deposit(&mut self, charge: Charge) {
        match &mut self.unspent {
            Some(unspent) => drop(unspent.merge(charge)),
            None => self.unspent = Some(charge),
        }
    }

    /// Takes a charge of `bytes` from `unspent`, with the part of it that is new.
    fn draw(&mut self, bytes: u64) -> Option<(Charge, u64)> {
        let charge = self.unspent.as_mut()?.split(bytes)?;
        debug_assert_eq!(charge.bytes(), bytes, "a charge is split exactly");
        let new = bytes.min(self.unspent_new);
        self.unspent_new -= new;
        Some((charge, new))
    }

    /// Returns to the budget the new charge for which no handle was created.
    fn drop_new(&mut self) {
        drop(self.draw(self.unspent_new));
    }

    /// Plans a handle at the slot `first`. Returns the number of slots of `slot` bytes it covers.
    pub(super) fn map_at(&mut self, first: u64, unmapped: UnmappedHandle, slot: u64) -> u64 {
        debug_assert!(unmapped.handle.bytes().is_multiple_of(slot), "a handle has whole slots");
        let count = unmapped.handle.bytes() / slot;
        self.planned.push(PlannedMapping { first, count, unmapped });
        count
    }

    /// Discards the plan and keeps its handles.
    fn unplan(&mut self) {
        self.unmapped.extend(self.planned.drain(..).map(|planned| planned.unmapped));
    }

    /// Releases the handles that this attempt has created to the driver, with their charges. For an
    /// attempt that fails with an error, and for warming; where only room is missing, they become
    /// spare.
    pub(super) fn forget_new(&mut self) {
        self.unplan();
        self.unmapped.retain(|unmapped| !unmapped.new);
    }

    /// Takes the mappings whose work is not done: those whose handles were mapped a second time,
    /// and the others.
    pub(super) fn split_busy(
        &mut self,
    ) -> (List<'s, TakenMapping<'s>>, List<'s, TakenMapping<'s>>) {
        let (mut used, mut unused) = (List::new_in(self.bump()), List::new_in(self.bump()));
        for taken in self.busy.drain(..) {
            let handle = &taken.mapping.handle;
            let is_unmapped = self
                .unmapped
                .iter()
                .any(|unmapped| unmapped.busy && Arc::ptr_eq(&unmapped.handle, handle));
            if is_unmapped { &mut unused } else { &mut used }.push(taken);
        }
        (used, unused)
    }

    /// Returns the index of the largest unmapped handle of at most `bytes`.
    fn largest_within(&self, bytes: u64) -> Option<usize> {
        let fitting = self
            .unmapped
            .iter()
            .enumerate()
            .filter(|(_, unmapped)| unmapped.handle.bytes() <= bytes);
        fitting
            .max_by_key(|(_, unmapped)| (unmapped.busy, unmapped.handle.bytes()))
            .map(|(at, _)| at)
    }

    /// Returns the bytes that `unspent` holds and could hold after the release of unmapped handles.
    fn spendable(&self) -> u64 {
        let unspent = self.unspent.as_ref().map_or(0, Charge::bytes);
        let releasable = self.unmapped.iter().filter(|unmapped| !unmapped.busy);
        unspent + releasable.map(|unmapped| unmapped.handle.bytes()).sum::<u64>()
    }

    /// Releases unmapped handles, the smallest first, until `unspent` holds `bytes`. Returns
    /// whether it does.
    fn release_until(&mut self, bytes: u64) -> bool {
        self.unmapped.sort_unstable_by_key(|unmapped| Reverse(unmapped.handle.bytes()));
        loop {
            if self.unspent.as_ref().map_or(0, Charge::bytes) >= bytes {
                return true;
            }
            let Some(at) = self.unmapped.iter().rposition(|unmapped| !unmapped.busy) else {
                return false;
            };
            let UnmappedHandle { handle, .. } = self.unmapped.remove(at);
            let Some(charge) = Handle::release_keeping_charge(handle) else { continue };
            self.deposit(charge);
        }
    }
}

impl MappedMemory {
    /// Collects handles for the missing slots of the claim in `plan`. Returns whether
    /// there were enough.
    pub(super) fn gather_handles(
        &self,
        claim: &Claim<'_>,
        supply: &Supply<'_>,
        plan: &mut MappingPlan<'_>,
        outcome: &mut PlaceOutcome,
    ) -> Result<bool> {
        let options = supply.options;
        let need = (claim.window.need() - claim.overhang) * self.slot;
        if need == 0 {
            return Ok(true);
        }
        plan.unmapped.extend(self.slots().spare.drain(..).map(UnmappedHandle::from));
        let funds = Funds { budget: &self.budget, reserved: supply.reserved };
        let growth = supply.max_growth;
        let mut room = if options.grow { funds.remaining().min(growth) } else { 0 };
        let mut grows = options.grow;
        if options.moves_first && options.move_handles {
            // Takes as much as there is. Only what is still missing then is new.
            let short = need.saturating_sub(plan.bytes());
            self.take_mappings(claim, supply, short, plan, outcome)?;
        }
        loop {
            let short = need.saturating_sub(plan.bytes() + room);
            if short > 0 {
                if options.grow {
                    outcome.refused =
                        outcome.refused.or(funds.refusal(need - plan.bytes().min(need)));
                }
                if !options.move_handles {
                    return Ok(false);
                }
                self.take_mappings(claim, supply, short, plan, outcome)?;
                if plan.bytes() + room < need {
                    return Ok(false);
                }
            }
            let missing = need.saturating_sub(plan.bytes());
            // All or nothing: if two threads compete for the last bytes, neither is left with a
            // part of them. A reservation may cover only some of the handles, so it is drawn from
            // for each.
            if grows && missing > 0 && supply.reserved.is_none() {
                match self.budget.charge(missing) {
                    Ok(charge) => {
                        plan.deposit(charge);
                        plan.unspent_new = missing;
                    }
                    Err(refused) => {
                        outcome.refused = Some(HandleError::Budget(refused));
                        (grows, room) = (false, 0);
                        continue;
                    }
                }
            }
            let new = grows.then_some((funds, growth));
            match self.plan_mappings(claim, plan, new, outcome) {
                Ok(()) => {
                    let covered: u64 = plan.planned.iter().map(|planned| planned.count).sum();
                    debug_assert_eq!(covered + plan.unused, claim.window.need(), "all slots");
                    return Ok(true);
                }
                Err(Some(refused)) if refused.is_out_of_memory() => outcome.refused = Some(refused),
                Err(Some(refused)) => return Err(refused.into_error(self.device)),
                Err(None) => {}
            }
            plan.unplan();
            plan.drop_new();
            if !grows {
                return Ok(false);
            }
            (grows, room) = (false, 0);
        }
    }

    /// Plans a handle for every missing slot: an unmapped one unless it is too small, otherwise
    /// a new one as large as the claim allows, if there are funds for new ones, up to some bytes.
    /// Returns `Err(None)` if no unmapped handle fits.
    fn plan_mappings(
        &self,
        claim: &Claim<'_>,
        plan: &mut MappingPlan<'_>,
        new: Option<(Funds<'_>, u64)>,
        outcome: &mut PlaceOutcome,
    ) -> Result<(), Option<HandleError>> {
        for &(mut first, mut left) in &claim.window.missing {
            while left > claim.overhang {
                let mut wanted = (left - claim.overhang).min(claim.largest);
                let unmapped = match plan.largest_within(left * self.slot) {
                    Some(at) => plan.unmapped.swap_remove(at),
                    None => loop {
                        match self.create_handle(wanted, plan, new, outcome) {
                            Ok(handle) => break UnmappedHandle { handle, new: true, busy: false },
                            // The plan may still suffice in smaller parts, or as it is.
                            Err(refused) if refused.is_none_or(|r| r.is_out_of_memory()) => {
                                if let Some(at) = plan.largest_within(left * self.slot) {
                                    break plan.unmapped.swap_remove(at);
                                }
                                if wanted == 1 {
                                    return Err(refused);
                                }
                                wanted /= 2;
                            }
                            Err(refused) => return Err(refused),
                        }
                    },
                };
                let count = plan.map_at(first, unmapped, self.slot);
                (first, left) = (first + count, left - count);
            }
            plan.unused = left;
        }
        Ok(())
    }

    /// Creates a handle over `slots`. It is paid from `unspent`, else by the release of unmapped
    /// handles, which are too small for the place, and only then from the budget: what the attempt
    /// holds is charged already.
    fn create_handle(
        &self,
        slots: u64,
        plan: &mut MappingPlan<'_>,
        new: Option<(Funds<'_>, u64)>,
        outcome: &mut PlaceOutcome,
    ) -> Result<Arc<Handle>, Option<HandleError>> {
        let bytes = slots * self.slot;
        let mut refused = None;
        // If no handle is created, the charge is returned to its source.
        let mut drawn = true;
        let mut paid = plan.draw(bytes);
        if paid.is_none() && plan.spendable() >= bytes && plan.release_until(bytes) {
            paid = plan.draw(bytes);
        }
        if paid.is_none() {
            let new = new.filter(|(_, most)| bytes <= most.saturating_sub(outcome.grown));
            match new.map(|(funds, _)| funds.charge(bytes)) {
                Some(Ok(charge)) => {
                    drawn = false;
                    paid = Some((charge, bytes));
                }
                Some(Err(no)) => refused = Some(HandleError::Budget(no)),
                None => {}
            }
        }
        let Some((charge, grown)) = paid else { return Err(refused) };
        let types = (ExportTypes::NONE, self.export);
        let created = Handle::create(&self.driver, self.device, types, charge, &self.held);
        match created {
            Ok(handle) => {
                outcome.grown += grown;
                Ok(handle)
            }
            Err((error, charge)) => {
                if drawn {
                    plan.deposit(charge);
                    plan.unspent_new += grown;
                }
                Err(Some(HandleError::Driver(error)))
            }
        }
    }

    /// Takes handles of at least `bytes` in all from under free memory, and unmaps those whose work
    /// is done. Counts them in `outcome`, also those taken before an error. Finished ones are taken
    /// first, and among those the ones at high addresses, since blocks are placed at low ones.
    /// Handles that the driver refuses to unmap stay where they were, and others are taken instead.
    ///
    /// # Errors
    /// The loss of the device.
    fn take_mappings(
        &self,
        claim: &Claim<'_>,
        supply: &Supply<'_>,
        bytes: u64,
        plan: &mut MappingPlan<'_>,
        outcome: &mut PlaceOutcome,
    ) -> Result<()> {
        let may_wait = supply.options.may_wait;
        let reach = Reach { least: self.slot, ..Reach::default() };
        let free_ranges = self.free_ranges(plan.bump(), supply.donors, None, may_wait, reach);
        let mut candidates = self.candidates(&free_ranges);
        let longest = claim.window.missing.iter().map(|&(_, count)| count).max().unwrap_or(0);
        // A busy handle cannot be released, so it must fit.
        candidates.retain(|c| !c.busy || c.count <= longest);
        candidates.sort_unstable_by_key(|c| (c.busy, Reverse(c.first)));
        let (mut got, mut candidates) = (0, candidates.iter());
        while got < bytes {
            let mut done = List::new_in(plan.bump());
            let mut done_bytes = 0;
            while got + done_bytes < bytes
                && let Some(candidate) = candidates.next()
            {
                let Some(taken) = self.take_mapping(candidate, &free_ranges, may_wait) else {
                    continue;
                };
                let handle = &taken.mapping.handle;
                if taken.is_done() {
                    done_bytes += handle.bytes();
                    done.push(taken);
                } else {
                    got += handle.bytes();
                    outcome.count_move(handle);
                    let handle = handle.clone();
                    plan.unmapped.push(UnmappedHandle { handle, new: false, busy: true });
                    plan.busy.push(taken);
                }
            }
            let (unmapped, unmapping) = self.unmap_done(done);
            for handle in unmapped {
                got += handle.bytes();
                outcome.count_move(&handle);
                plan.unmapped.push(handle.into());
            }
            match unmapping {
                // Nothing more is needed, or nothing more is there.
                Ok(()) => break,
                Err(MemoryError::Driver(refused)) => {
                    outcome.unreleased.get_or_insert(refused);
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Releases a claim after an error, with what `plan` has gathered for it: handles that the
    /// attempt has created go back to the driver, and others become spare. What the driver refuses
    /// to unmap stays claimed.
    pub(super) fn abandon(&self, claim: Claim<'_>, mut plan: MappingPlan<'_>) {
        self.restore_mappings(plan.busy.drain(..));
        plan.forget_new();
        self.stash_spare(&mut plan);
        self.unclaim_except(claim, &plan.stuck);
        self.zombify_mappings(plan.stuck);
    }

    /// Returns what was not needed: handles become spare and stay charged, and `unspent` is
    /// returned to the budget. Busy handles stay mapped where they were. Ends every attempt,
    /// successful or not.
    pub(super) fn stash_spare(&self, plan: &mut MappingPlan<'_>) {
        plan.unplan();
        let spare = plan
            .unmapped
            .drain(..)
            .filter(|unmapped| !unmapped.busy)
            .map(|unmapped| unmapped.handle);
        self.slots().spare.extend(spare);
        drop(plan.unspent.take());
    }

    /// Maps the planned handles and grants access to the device and its peers. If that fails, no
    /// new mapping remains and the plan is complete, except for mappings that the driver refused
    /// to remove, which are in `stuck`.
    pub(super) fn map_all(&self, plan: &mut MappingPlan<'_>) -> Result<()> {
        let mut mapped = 0;
        let outcome = self.map_planned(plan, &mut mapped);
        if outcome.is_err() {
            for planned in &plan.planned[..mapped] {
                let (address, bytes) = (self.address(planned.first), planned.count * self.slot);
                // SAFETY: 1. mapped above, and not handed out.
                if unsafe { self.driver.unmap(self.device, address, bytes) }.is_err() {
                    plan.stuck.push(planned.mapping());
                }
            }
            let stuck = &plan.stuck;
            plan.planned
                .retain(|planned| stuck.iter().all(|mapping| mapping.first != planned.first));
            return outcome;
        }
        let mut slots = self.slots();
        for planned in plan.planned.drain(..) {
            slots.map(planned.mapping());
        }
        Ok(())
    }

    fn map_planned(&self, plan: &MappingPlan<'_>, mapped: &mut usize) -> Result<()> {
        for planned in &plan.planned {
            let mapping = planned.mapping();
            let (address, bytes) = (self.address(planned.first), planned.count * self.slot);
            // SAFETY: 1. this attempt has claimed the slots: nothing is mapped there, and no other
            // code uses them.
            let done = unsafe { self.driver.map(address, bytes, mapping.handle.raw()) };
            done.map_err(|e| self.driver_error(e))?;
            *mapped += 1;
        }
        for (first, count) in
            runs(plan.planned.iter().map(|planned| (planned.first, planned.count)))
        {
            self.driver
                .set_access(self.address(first), count * self.slot, &self.accessors)
                .map_err(|e| self.driver_error(e))?;
        }
        Ok(())
    }
}
