//! Makes room for dedicated memory: stable, reserved and planned blocks, and those of bypass mode.

use super::progress::Progress;
use crate::{
    backing::handle::{Funds, HandleError},
    dedicated::Span,
    pool_core::PoolCore,
};
use aquifer_core::{MemoryError, Reservation, Result, Tag, event::BlockKind};
use aquifer_driver::ExportTypes;
use aquifer_stream::Timeline;
use std::{
    collections::BTreeSet,
    sync::{Arc, Mutex, PoisonError},
};

impl PoolCore {
    /// Calls `take` for `wanted` bytes until it succeeds. `take` draws from `reserved` first.
    /// Between the calls it makes room: it gives retiring and cached memory back to the driver,
    /// then reclaims from others, then waits for queued work. The last two steps block.
    ///
    /// # Errors
    /// [`MemoryError::OutOfMemory`] if all steps made no room; the driver's.
    pub(crate) fn with_room<T>(
        &self,
        kind: BlockKind,
        wanted: u64,
        tag: Tag,
        reserved: Option<&Mutex<Reservation>>,
        mut take: impl FnMut(Funds<'_>) -> Result<T, HandleError>,
    ) -> Result<T> {
        if let Some(error) = self.refuse_oversized(wanted, tag) {
            self.publish();
            return Err(error);
        }
        let mut attempt =
            |progress: &mut Progress<'_>| match take(Funds { budget: self.budget(), reserved }) {
                Ok(taken) => Ok(Some(taken)),
                Err(no) if no.is_out_of_memory() => {
                    progress.refused = Some(no);
                    Ok(None)
                }
                Err(no) => Err(no.into_error(self.info.device)),
            };
        let mut progress = Progress::default();
        let taken = self.retry_with_reclaim(wanted, None, &mut progress, |progress| {
            if let Some(taken) = attempt(progress)? {
                return Ok(Some(taken));
            }
            // If a limit was lowered below what is used, that excess has to be released as well.
            let short = match progress.refused {
                Some(HandleError::Budget(_)) => self.budget().shortfall(wanted),
                _ => wanted,
            };
            let gave = self.trim_under_pressure(self.held().saturating_sub(short))?;
            if progress.record_released(gave) > 0 { attempt(progress) } else { Ok(None) }
        });
        self.report_held(kind);
        if !matches!(taken, Ok(Some(_))) {
            self.report_outside();
            let by_budget = progress.refused_by_budget().filter(|_| taken.is_ok());
            let by_budget = by_budget.map(|refused| (self.budget(), refused));
            self.dedicated.record_failure(kind, wanted, tag, by_budget);
        }
        self.publish();
        match taken? {
            Some(taken) => Ok(taken),
            None => {
                let mut error = self.explain(wanted, None, progress);
                error.of_whole_handles = !self.dedicated.is_plain();
                Err(MemoryError::OutOfMemory(Box::new(error)))
            }
        }
    }

    /// Runs `work` with a reservation of `bytes`: what `held` has of them, and the rest charged to
    /// the budget. If the budget refuses the rest, `work` runs with what `held` has.
    ///
    /// If `work` fails, `held` is as before, unless other threads have taken what a failing driver
    /// call gave back.
    pub(crate) fn with_reservation<T>(
        &self,
        held: &Mutex<Reservation>,
        bytes: u64,
        work: impl FnOnce(&Mutex<Reservation>) -> Result<T>,
    ) -> Result<T> {
        let inside = || held.lock().unwrap_or_else(PoisonError::into_inner);
        let taken = {
            let mut held = inside();
            let most = bytes.min(held.remaining());
            held.draw(most)
        };
        let mut funds = taken.map(Reservation::from)?;
        let had = funds.remaining();
        if had < bytes {
            // Without these bytes the charge for the rest would be for all of `bytes`, and those of
            // `held` would be unused.
            let lacks = || self.budget().charge(bytes - had);
            let more = lacks().or_else(|refused| {
                let short = self.budget().shortfall(bytes - had);
                let keep = self.held().saturating_sub(short);
                let _released = self.trim_under_pressure(keep).map_err(|_| refused)?;
                lacks()
            });
            if let Ok(more) = more {
                // A charge of the same budget joins the reservation. Any other is dropped here, and
                // charged again later.
                let _ = funds.put_back(more);
            }
        }
        let funds = Mutex::new(funds);
        let done = work(&funds);
        let mut left = funds.into_inner().unwrap_or_else(PoisonError::into_inner);
        if done.is_err() {
            let gone = had.saturating_sub(left.remaining());
            let back =
                left.draw(had - gone).ok().into_iter().chain(self.budget().charge(gone).ok());
            let mut held = inside();
            // The charges belong to the budget that they were drawn from.
            back.for_each(|charge| drop(held.put_back(charge)));
        }
        done
    }

    /// Puts memory behind all slots in `missing`, which is ascending: retiring and idle memory of
    /// the span, for whose other users `owner_stream` waits, and new handles. Makes room as
    /// [`PoolCore::with_room`] does. Returns the bytes that are new.
    ///
    /// # Errors
    /// As [`PoolCore::with_room`]; [`MemoryError::Busy`] if retiring memory still has an open use.
    /// Nothing has changed then.
    pub(crate) fn back_slots(
        &self,
        span: &Arc<Span>,
        owner_stream: &Timeline,
        tag: Tag,
        missing: &[u64],
        reserved: Option<&Mutex<Reservation>>,
    ) -> Result<u64> {
        let (again, idle) = span.take_back_retiring(missing);
        if idle > 0 {
            self.dedicated.slots_retired(span.kind(), idle);
        }
        let known: BTreeSet<u64> =
            again.iter().flat_map(|retiring| &retiring.slots).map(|(slot, _)| *slot).collect();
        let new: Vec<u64> = missing.iter().copied().filter(|slot| !known.contains(slot)).collect();
        let outcome = span
            .prepare_reuse(&again, owner_stream)
            .and_then(|()| self.back_new_slots(span, tag, &new, reserved));
        match outcome {
            Ok(()) => {
                span.restore(again);
                Ok(new.len() as u64 * span.slot)
            }
            Err(error) => {
                if !again.is_empty() {
                    span.return_retiring(again);
                    // The span may have been removed from the list while nothing in it was
                    // retiring.
                    self.dedicated.enqueue_retiring(span);
                }
                Err(error)
            }
        }
    }

    fn back_new_slots(
        &self,
        span: &Arc<Span>,
        tag: Tag,
        slots: &[u64],
        reserved: Option<&Mutex<Reservation>>,
    ) -> Result<()> {
        if slots.is_empty() {
            return Ok(());
        }
        let (step, wanted) = (span.slot, slots.len() as u64 * span.slot);
        let take = |funds: Funds<'_>| {
            // Charged as a whole, so that a refusal states the whole need.
            let mut paid = funds.charge(wanted).map_err(HandleError::Budget)?;
            let mut parts = Vec::with_capacity(slots.len());
            for (&slot, charge) in slots.iter().zip(std::iter::from_fn(|| paid.split(step))) {
                parts.push((slot, self.dedicated.handle(charge, ExportTypes::NONE)?));
            }
            self.dedicated.map(span, parts).map_err(HandleError::Driver)
        };
        match reserved {
            Some(held) => self.with_reservation(held, wanted, |funds| {
                self.with_room(span.kind(), wanted, tag, Some(funds), take)
            }),
            None => self.with_room(span.kind(), wanted, tag, None, take),
        }
    }
}
