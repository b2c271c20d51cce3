//! The handles for a mapping plan: spare ones, new ones of the driver, those under free memory, and
//! those made from other handles.

use super::{Attempt, Claim, Effort, Mapped, Reach, offers::Stolen};
use crate::{
    home::Home,
    physical::{
        handle::{Funds, Handle, NoHandle},
        slots::Mapping,
    },
};
use aquifer_core::{
    Charge, Result,
    scratch::{Bump, List},
};
use std::{cmp::Reverse, sync::Arc};

/// The memory that an attempt holds. None of it is in a cache.
pub(super) struct Stock<'s> {
    /// Handles that are not mapped.
    loose: List<'s, Loose>,
    /// Charged bytes without a handle, such as those of melted handles.
    pot: Option<Charge>,
    /// Bytes of the pot that this attempt has charged to the budget.
    new: u64,
    /// The handles and their planned slots.
    pub(super) planned: List<'s, Planned>,
    /// Mappings whose work is not done. Their handles are mapped a second time.
    pub(super) busy: List<'s, Stolen<'s>>,
    /// Mappings made by this attempt that the driver refused to remove.
    pub(super) stuck: List<'s, Mapping>,
}

pub(super) struct Loose {
    handle: Arc<Handle>,
    /// Created by this attempt.
    fresh: bool,
    /// Still mapped elsewhere, so it cannot be melted.
    busy: bool,
}

/// A handle and the slots that it is to be mapped at.
pub(super) struct Planned {
    pub(super) first: u64,
    pub(super) count: u64,
    pub(super) loose: Loose,
}

impl Planned {
    pub(super) fn mapping(&self) -> Mapping {
        Mapping { first: self.first, count: self.count, handle: self.loose.handle.clone() }
    }
}

impl<'s> Stock<'s> {
    pub(super) fn new(bump: &'s Bump) -> Self {
        Self {
            loose: List::new_in(bump),
            pot: None,
            new: 0,
            planned: List::new_in(bump),
            busy: List::new_in(bump),
            stuck: List::new_in(bump),
        }
    }

    /// Returns the allocator of its lists.
    fn bump(&self) -> &'s Bump {
        self.loose.allocator()
    }

    fn bytes(&self) -> u64 {
        let pot = self.pot.as_ref().map_or(0, Charge::bytes);
        pot + self.loose.iter().map(|loose| loose.handle.bytes()).sum::<u64>()
    }

    /// Adds a charge to the pot. A pool has one budget, so charges always merge.
    fn pay(&mut self, charge: Charge) {
        match &mut self.pot {
            Some(pot) => drop(pot.merge(charge)),
            None => self.pot = Some(charge),
        }
    }

    /// Takes a charge of `bytes` from the pot, with the part of it that is new.
    fn draw(&mut self, bytes: u64) -> Option<(Charge, u64)> {
        let charge = self.pot.as_mut()?.split(bytes)?;
        let new = bytes.min(self.new);
        self.new -= new;
        Some((charge, new))
    }

    /// Returns to the budget the new charge for which no handle was created.
    fn drop_new(&mut self) {
        drop(self.draw(self.new));
    }

    /// Discards the plan and keeps its handles.
    fn unplan(&mut self) {
        self.loose.extend(self.planned.drain(..).map(|planned| planned.loose));
    }

    /// Releases the handles that this attempt has created to the driver.
    pub(super) fn forget_fresh(&mut self) {
        self.unplan();
        self.loose.retain(|loose| !loose.fresh);
    }

    /// Takes the mappings whose work is not done: those whose handles were mapped a second time,
    /// and the others.
    pub(super) fn take_busy(&mut self) -> (List<'s, Stolen<'s>>, List<'s, Stolen<'s>>) {
        let (mut used, mut unused) = (List::new_in(self.bump()), List::new_in(self.bump()));
        for stolen in self.busy.drain(..) {
            let handle = &stolen.mapping.handle;
            let is_loose =
                self.loose.iter().any(|loose| loose.busy && Arc::ptr_eq(&loose.handle, handle));
            if is_loose { &mut unused } else { &mut used }.push(stolen);
        }
        (used, unused)
    }

    /// Returns the index of the largest loose handle of at most `bytes`.
    fn largest_within(&self, bytes: u64) -> Option<usize> {
        let fitting =
            self.loose.iter().enumerate().filter(|(_, loose)| loose.handle.bytes() <= bytes);
        fitting.max_by_key(|(_, loose)| (loose.busy, loose.handle.bytes())).map(|(at, _)| at)
    }

    /// Melts loose handles, the smallest first, until the pot holds `bytes`. Returns whether it
    /// does.
    fn melt(&mut self, bytes: u64) -> bool {
        self.loose.sort_unstable_by_key(|loose| Reverse(loose.handle.bytes()));
        loop {
            if self.pot.as_ref().map_or(0, Charge::bytes) >= bytes {
                return true;
            }
            let Some(at) = self.loose.iter().rposition(|loose| !loose.busy) else { return false };
            let Loose { handle, .. } = self.loose.remove(at);
            let Some(charge) = Handle::melt(handle) else { continue };
            self.pay(charge);
        }
    }
}

impl Mapped {
    /// Collects handles for the missing slots of the claim, as a plan in `stock`. Returns whether
    /// there were enough.
    pub(super) fn gather(
        &self,
        givers: &[&'static Home],
        claim: &Claim<'_>,
        how: Attempt,
        stock: &mut Stock<'_>,
        effort: &mut Effort<'_>,
    ) -> Result<bool> {
        let need = claim.window.need() * self.slot;
        if need == 0 {
            return Ok(true);
        }
        let as_loose = |handle| Loose { handle, fresh: false, busy: false };
        stock.loose.extend(self.slots().spare.drain(..).map(as_loose));
        let funds = Funds { budget: &self.budget, reserved: effort.reserved };
        let mut room = if how.grow { funds.remaining() } else { 0 };
        let mut grows = how.grow;
        if self.compact && how.steal {
            // Takes as much as there is. Only what is still missing then is new.
            let short = need.saturating_sub(stock.bytes());
            effort.moves += self.steal(givers, claim, short, Reach::Done, stock)?;
        }
        loop {
            let short = need.saturating_sub(stock.bytes() + room);
            if short > 0 {
                if how.grow {
                    effort.refused =
                        effort.refused.or(funds.refusal(need - stock.bytes().min(need)));
                }
                if !how.steal {
                    return Ok(false);
                }
                effort.moves += self.steal(givers, claim, short, how.reach, stock)?;
                if stock.bytes() + room < need {
                    return Ok(false);
                }
            }
            let missing = need.saturating_sub(stock.bytes());
            // All or nothing: if two threads compete for the last bytes, neither is left with a
            // part of them. A reservation may cover only some of the handles, so it is drawn from
            // for each.
            if grows && missing > 0 && effort.reserved.is_none() {
                match self.budget.charge(missing) {
                    Ok(charge) => {
                        stock.pay(charge);
                        stock.new = missing;
                    }
                    Err(refused) => {
                        effort.refused = Some(NoHandle::Budget(refused));
                        (grows, room) = (false, 0);
                        continue;
                    }
                }
            }
            match self.cut(claim, stock, if grows { Some(funds) } else { None }, effort) {
                Ok(()) => return Ok(true),
                Err(Some(refused)) if refused.is_out_of_memory() => effort.refused = Some(refused),
                Err(Some(refused)) => return Err(refused.into_error(self.device)),
                Err(None) => {}
            }
            stock.unplan();
            stock.drop_new();
            if !grows {
                return Ok(false);
            }
            (grows, room) = (false, 0);
        }
    }

    /// Plans a handle for every missing slot: one from the stock unless it is too small, otherwise
    /// a new one as large as the claim allows. Returns `Err(None)` if nothing in the stock fits.
    fn cut(
        &self,
        claim: &Claim<'_>,
        stock: &mut Stock<'_>,
        funds: Option<Funds<'_>>,
        effort: &mut Effort<'_>,
    ) -> Result<(), Option<NoHandle>> {
        for &(mut first, mut left) in &claim.window.missing {
            while left > 0 {
                let mut wanted = left.min(claim.largest);
                let fitting = stock.largest_within(left * self.slot);
                let good = |at: &usize| {
                    let loose = &stock.loose[*at];
                    // A new handle would be one mapping instead of four or more.
                    loose.busy || loose.handle.bytes() * 4 > wanted * self.slot
                };
                let loose = match fitting.filter(good) {
                    Some(at) => stock.loose.swap_remove(at),
                    None => loop {
                        match self.make(wanted, stock, funds, effort) {
                            Ok(handle) => break Loose { handle, fresh: true, busy: false },
                            // The stock may still suffice in smaller parts, or as it is.
                            Err(refused) if refused.is_none_or(|r| r.is_out_of_memory()) => {
                                if let Some(at) = stock.largest_within(left * self.slot) {
                                    break stock.loose.swap_remove(at);
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
                let count = loose.handle.bytes() / self.slot;
                stock.planned.push(Planned { first, count, loose });
                (first, left) = (first + count, left - count);
            }
        }
        Ok(())
    }

    /// Creates a handle over `slots`, paid from the pot, the budget, or melted handles.
    fn make(
        &self,
        slots: u64,
        stock: &mut Stock<'_>,
        funds: Option<Funds<'_>>,
        effort: &mut Effort<'_>,
    ) -> Result<Arc<Handle>, Option<NoHandle>> {
        let bytes = slots * self.slot;
        let mut refused = None;
        // If no handle is created, the charge is returned to its source.
        let mut drawn = true;
        let paid = match stock.draw(bytes) {
            Some(paid) => Some(paid),
            None => match funds.map(|funds| funds.charge(bytes)) {
                Some(Ok(charge)) => {
                    drawn = false;
                    Some((charge, bytes))
                }
                other => {
                    refused = other.and_then(Result::err).map(NoHandle::Budget);
                    if stock.melt(bytes) { stock.draw(bytes) } else { None }
                }
            },
        };
        let Some((charge, grown)) = paid else { return Err(refused) };
        match Handle::create(&self.driver, self.device, charge, &self.held) {
            Ok(handle) => {
                effort.grown += grown;
                Ok(handle)
            }
            Err((error, charge)) => {
                if drawn {
                    stock.pay(charge);
                    stock.new += grown;
                }
                Err(Some(NoHandle::Driver(error)))
            }
        }
    }

    /// Takes handles of at least `bytes` in all from under free memory, and unmaps those whose work
    /// is done. Returns their number. Finished ones are taken first, and among those the ones at
    /// high addresses, since blocks are placed at low ones.
    fn steal(
        &self,
        givers: &[&'static Home],
        claim: &Claim<'_>,
        bytes: u64,
        reach: Reach,
        stock: &mut Stock<'_>,
    ) -> Result<u64> {
        let offers = self.offers(stock.bump(), givers, None, reach);
        let mut candidates = self.candidates(&offers);
        let longest = claim.window.missing.iter().map(|&(_, count)| count).max().unwrap_or(0);
        // A busy handle cannot be melted, so it must fit.
        candidates.retain(|c| !c.busy || c.count <= longest);
        candidates.sort_unstable_by_key(|c| (c.busy, Reverse(c.first)));
        let (mut got, mut moved, mut done) = (0, 0, List::new_in(stock.bump()));
        for candidate in &candidates {
            if got >= bytes {
                break;
            }
            let Some(stolen) = self.take(candidate, &offers, reach) else { continue };
            got += stolen.mapping.handle.bytes();
            moved += 1;
            if stolen.is_done() {
                done.push(stolen);
            } else {
                let handle = stolen.mapping.handle.clone();
                stock.loose.push(Loose { handle, fresh: false, busy: true });
                stock.busy.push(stolen);
            }
        }
        let (loose, outcome) = self.unmap_done(done);
        stock.loose.extend(loose.into_iter().map(|handle| Loose {
            handle,
            fresh: false,
            busy: false,
        }));
        outcome.map(|()| moved)
    }

    /// Returns what was not needed: handles become spare, and the pot is returned to the budget.
    /// Busy handles stay mapped where they were.
    pub(super) fn put_aside(&self, stock: &mut Stock<'_>) {
        stock.unplan();
        let spare = stock.loose.drain(..).filter(|loose| !loose.busy).map(|loose| loose.handle);
        self.slots().spare.extend(spare);
        drop(stock.pot.take());
    }
}
