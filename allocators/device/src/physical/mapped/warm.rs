//! Mapping memory ahead of need.

use super::{Mapped, claim::Claim, plan::MappingPlan};
use crate::{
    base::dependencies::StreamDeps,
    physical::{
        options::{PlaceOptions, PlaceOutcome, Readiness},
        window,
    },
    sharing_policy::{Fit, Granularity},
};
use aquifer_core::{MemoryError, Result, scratch::List};
use aquifer_heap::Range;

/// Only new memory.
const NEW: PlaceOptions = PlaceOptions {
    readiness: Readiness::Completed,
    granularity: Granularity::Slots,
    grow: true,
    move_handles: false,
    moves_first: false,
    bounded: false,
    apart: true,
};

impl Mapped {
    /// Takes memory from the driver until `bytes` are held, rounded up to slots, and adds it to the
    /// shared free list. Returns the bytes taken. If it fails, no more is held than before.
    pub(crate) fn warm(&self, bytes: u64) -> Result<u64> {
        let need = bytes.saturating_sub(self.held.now()).div_ceil(self.slot) * self.slot;
        if need == 0 {
            return Ok(0);
        }
        let pass = self.scratch.begin();
        let claim = {
            let mut slots = self.slots();
            let window = window::best(
                &pass,
                std::iter::empty(),
                slots.free_runs(),
                self.grid(),
                need,
                self.slot,
                Fit::Lowest,
            );
            let window =
                window.ok_or(MemoryError::TooLarge { requested: bytes, limit: self.bytes })?;
            for &(first, count) in &window.missing {
                slots.claim(first, count);
            }
            Claim {
                window,
                pieces: List::new_in(&pass),
                largest: self.largest_handle(bytes, 0, 0),
                overhang: 0,
                _move: self.begin_move(),
            }
        };
        let (mut plan, mut outcome) = (MappingPlan::new(&pass), PlaceOutcome::default());
        let backed = self.gather_handles(&[], &claim, NEW, &mut plan, &mut outcome);
        let backed = backed.and_then(|enough| {
            if enough {
                self.map_all(&mut plan)?;
            }
            Ok(enough)
        });
        match backed {
            Ok(true) => {
                self.stash_spare(&mut plan);
                let mut shared_free = self.shared_free();
                for &(first, count) in &claim.window.missing {
                    shared_free.add(self.range(first, count), StreamDeps::new());
                }
                Ok(outcome.grown)
            }
            Ok(false) => {
                plan.forget_new();
                self.stash_spare(&mut plan);
                let Range { len, .. } = claim.window.block;
                self.unclaim(claim);
                Err(match outcome.refused {
                    Some(refused) => refused.into_error(self.device),
                    None => MemoryError::TooLarge { requested: len, limit: self.bytes },
                })
            }
            Err(error) => {
                self.abandon(claim, plan);
                Err(error)
            }
        }
    }
}
