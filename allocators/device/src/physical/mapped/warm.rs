//! Mapping memory ahead of need.

use super::{Attempt, Claim, Effort, Grain, Mapped, Reach, Stock};
use crate::{
    leasing::Fit,
    physical::{commons::Past, window},
};
use aquifer_core::{MemoryError, Result, scratch::List};
use aquifer_heap::Range;

/// Only new memory.
const NEW: Attempt = Attempt { reach: Reach::Done, grain: Grain::Slots, grow: true, steal: false };

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
                taken: List::new_in(&pass),
                largest: self.largest_handle(0),
                _transit: self.transit(),
            }
        };
        let (mut stock, mut effort) = (Stock::new(&pass), Effort::default());
        let backed = self.gather(&[], &claim, NEW, &mut stock, &mut effort);
        let backed = backed.and_then(|enough| {
            if enough {
                self.map_all(&mut stock)?;
            }
            Ok(enough)
        });
        match backed {
            Ok(true) => {
                self.put_aside(&mut stock);
                let mut commons = self.commons();
                for &(first, count) in &claim.window.missing {
                    commons.add(self.range(first, count), Past::new());
                }
                Ok(effort.grown)
            }
            Ok(false) => {
                stock.forget_fresh();
                self.put_aside(&mut stock);
                let Range { len, .. } = claim.window.block;
                self.unclaim(claim);
                Err(match effort.refused {
                    Some(refused) => refused.into_error(self.device),
                    None => MemoryError::TooLarge { requested: len, limit: self.bytes },
                })
            }
            Err(error) => {
                stock.forget_fresh();
                self.put_aside(&mut stock);
                self.unclaim_but(claim, &stock.stuck);
                self.zombify_mappings(stock.stuck);
                Err(error)
            }
        }
    }
}
