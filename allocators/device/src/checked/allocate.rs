//! Allocation of checked blocks.

use super::{
    CANARY, CheckedBlock, CheckedPool, Fault, GuardedBlock, POISON_ALLOCATED, ReportedFaults,
    guards::{self, GuardLayout},
};
use crate::{
    Block, DeviceBuffer, Request,
    base::{
        driver::notify_observer,
        errors::is_shortage,
        extent::PackedRequest,
        record::{BlockRecord, stream_of},
        waits::deadline,
    },
    block::DriverBlock,
};
use aquifer_core::{MemoryError, Reservation, Result};
use aquifer_driver::{DeviceRange, Ownership, site};
use aquifer_stream::{Stream, Timeline};
use std::{
    mem::ManuallyDrop,
    sync::{Arc, Mutex},
    time::Instant,
};

impl CheckedPool {
    /// Allocates a block with its guards. The request has been checked.
    #[track_caller]
    pub(crate) fn allocate(
        self: &Arc<Self>,
        stream: &Stream,
        request: Request,
        drawn: Option<&Mutex<Reservation>>,
    ) -> Result<Block> {
        let allocated_at = site::current();
        let layout = GuardLayout::new(&request, self.settings.canaries);
        let around = layout.around(&request);
        self.collect_waiting();
        self.enforce_bound();
        let held = loop {
            match self.source.allocate(stream, around, drawn, request.size()) {
                Ok(held) => break held,
                Err(error)
                    if is_shortage(&error)
                        && self.reclaim_quarantine(around.size(), deadline(self.wait)) > 0 => {}
                // Reports the user's sizes, not those with guards.
                Err(MemoryError::OutOfMemory(mut error)) => {
                    error.requested = request.size();
                    let users = self.state().own.live() + self.source.unchecked_live();
                    let held_back = error.live.saturating_sub(users);
                    error.live -= held_back;
                    error.pending += held_back;
                    return Err(MemoryError::OutOfMemory(error));
                }
                Err(error) => return Err(error),
            }
        };
        let (start, capacity, generation, owner_stream) =
            (held.address(), held.capacity(), held.generation(), held.home());
        let mut record = BlockRecord {
            address: start + layout.front,
            bytes: request.size(),
            tag: request.owner(),
            number: 0,
            stream: stream_of(&owner_stream),
            of_pool: owner_stream.number(),
            born: Instant::now(),
            allocated_at,
            freed_at: None,
            allocated_by: self.backtrace(),
            freed_by: None,
        };
        if let Err(other) = self.assign_number(start, start + capacity, &mut record) {
            // The block must not return to the pool, since it overlaps a live block.
            let _leaked = ManuallyDrop::new(held);
            let (address, held) = (record.address, other.address);
            self.report(Fault::Overlap { held: Box::new(other) }, record);
            return Err(MemoryError::BlockOverlap { address, held });
        }
        let filled = self.fill_new(&held, &owner_stream, &layout, generation);
        let held =
            filled.and_then(|()| DeviceBuffer::from_alloc(around.size() as usize, |_| Ok(held)));
        let memory = match held {
            Ok(memory) => memory,
            Err(error) => {
                self.forget_range(start);
                return Err(error);
            }
        };
        let address = record.address;
        let bytes = if self.settings.canaries { request.size() } else { capacity };
        let held = Some(GuardedBlock {
            memory,
            layout,
            owner_stream: owner_stream.clone(),
            reported: ReportedFaults::default(),
        });
        {
            let mut state = self.state();
            state.own.record_alloc(capacity, request.size());
            state.freed.remove(address);
            state.live.insert(address, CheckedBlock { record, capacity, held, freed: None });
        }
        let driver_block = DriverBlock {
            releaser: self.clone(),
            timeline: owner_stream,
            streams: self.streams.clone(),
            bytes,
            key: 0,
        };
        Ok(Block::from_driver_block(
            address,
            PackedRequest::new(request.size(), request.owner()),
            driver_block,
            generation,
        ))
    }

    /// Gives a block its number, and enters its range. Returns the record of the held block that it
    /// overlaps, if any.
    fn assign_number(
        &self,
        start: u64,
        end: u64,
        record: &mut BlockRecord,
    ) -> Result<(), BlockRecord> {
        record.number = self.listing.number();
        let mut state = self.state();
        if self.settings.overlap {
            state.ranges.insert(start, end, record.clone()).map_err(|held| held.clone())
        } else {
            Ok(())
        }
    }

    fn fill_new(
        &self,
        held: &Block,
        owner_stream: &Timeline,
        layout: &GuardLayout,
        generation: u64,
    ) -> Result<()> {
        for guard in [layout.before(), layout.behind()].into_iter().flatten() {
            guards::fill(held, owner_stream, guard.clone(), CANARY)?;
            let address = held.address() + guard.start;
            let range =
                DeviceRange { device: self.device, address, bytes: guard.end - guard.start };
            let readers = self.reader().map(|reader| reader.stream.raw());
            notify_observer(
                &self.driver,
                generation,
                range,
                Ownership::Guard { users: readers.as_slice() },
            );
        }
        if self.settings.poison {
            guards::fill(held, owner_stream, layout.body(), POISON_ALLOCATED)?;
        }
        Ok(())
    }
}
