//! What one slow path has tried so far.

use crate::{backing::handle::HandleError, base::released::Released};
use aquifer_core::{DriverError, MemoryError, OutOfBudget, Reservation, error::Tried};
use smallvec::SmallVec;
use std::sync::Mutex;

/// Number of steps recorded without a heap allocation: the steps of one slow path, and some of
/// reclaimers.
const INLINE_STEPS: usize = 16;

/// The numbers of transfers begun and ended.
pub(super) type TransferCounts = (u64, u64);

/// The state of a slow path.
#[derive(Default)]
pub(super) struct Progress<'a> {
    pub(super) reserved: Option<&'a Mutex<Reservation>>,
    /// Whether events were polled, and the policy has decided by what is in use now.
    pub(super) polled: bool,
    /// The counts when the last search began.
    pub(super) transfer_counts: TransferCounts,
    /// Number of transfers that this slow path itself has begun since.
    pub(super) own_transfers: u64,
    pub(super) tried: SmallVec<[Tried; INLINE_STEPS]>,
    pub(super) refused: Option<HandleError>,
    /// The driver's first refusal to release memory.
    pub(super) unreleased: Option<DriverError>,
}

impl Progress<'_> {
    /// Adds the bytes that a step gave.
    pub(super) fn record(&mut self, step: &'static str, gave: u64) {
        match self.tried.iter_mut().find(|t| t.step == step) {
            Some(tried) => tried.gave += gave,
            None => self.tried.push(Tried { step, gave }),
        }
    }

    /// Returns the refusal of the budget, if a budget refused last.
    pub(super) fn refused_by_budget(&self) -> Option<&OutOfBudget> {
        match &self.refused {
            Some(HandleError::Budget(refused)) => Some(refused),
            _ => None,
        }
    }

    /// Adds what was given back to the driver, and its refusal. Returns the bytes.
    pub(super) fn record_released(&mut self, released: Released) -> u64 {
        self.record("give back what is free", released.bytes);
        self.record_refusal(&released);
        released.bytes
    }

    /// Keeps the driver's refusal to release memory, for the error.
    pub(super) fn record_refusal(&mut self, released: &Released) {
        if let Some(MemoryError::Driver(refused)) = released.refused {
            self.unreleased.get_or_insert(refused);
        }
    }
}
