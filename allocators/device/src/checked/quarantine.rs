//! The checks of freed and live blocks, and the release of freed ones.

use super::{
    CANARY, CheckedBlock, CheckedPool, Fault, Finding, GuardedBlock, POISON_FREED,
    QuarantinedBlock, guards::first_wrong, is_usable,
};
use crate::base::pending::PendingUses;
use aquifer_core::{MemoryError, Result};
use aquifer_stream::Stream;
use std::{
    sync::PoisonError,
    thread,
    time::{Duration, Instant},
};

/// Pause between two checks whether another thread is done.
const INSPECTION_POLL: Duration = Duration::from_micros(50);

/// What to do with a freed block that cannot be read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum OnUnread {
    /// It stays for one more attempt, and is released after that. Otherwise it would keep all
    /// blocks behind it.
    Keep,
    /// It is released, and that is reported.
    Release,
}

impl CheckedPool {
    /// Moves blocks whose other uses are done from the waiting list into the quarantine. Records
    /// events behind the other streams where there are none, and polls them. Never blocks.
    pub(super) fn collect_waiting(&self) {
        self.collect_waiting_with(false);
    }

    /// As [`CheckedPool::collect_waiting`]. With `wait`, the owner stream waits for stamped uses on
    /// the device, which ends them.
    fn collect_waiting_with(&self, wait: bool) {
        let waiting = {
            let mut state = self.state();
            if state.waiting.is_empty() {
                return;
            }
            state.inspecting += 1;
            std::mem::take(&mut state.waiting)
        };
        let mut still = Vec::new();
        for mut freed in waiting {
            // After a refusal the block stays on the list, and the next call tries again.
            let _ = freed.uses.poll();
            let ordered = |freed: &QuarantinedBlock| {
                freed.uses.order_before(&freed.held.owner_stream, freed.record.address).is_ok()
            };
            if !freed.uses.are_over() && wait && ordered(&freed) {
                freed.uses.clear();
            }
            if freed.uses.is_empty() {
                self.retire_uses(freed);
            } else {
                still.push(freed);
            }
        }
        let mut state = self.state();
        state.waiting.append(&mut still);
        state.inspecting -= 1;
    }

    /// Processes a freed block whose last use is over.
    fn retire_uses(&self, mut freed: QuarantinedBlock) {
        // Without debugging the memory would be free now, and charges of wrappers must end at the
        // same time.
        drop(freed.until_free.take());
        self.fill_quarantined(&mut freed);
        if self.settings.inspects_freed() {
            self.state().enqueue(freed);
        } else {
            self.return_block(freed);
        }
    }

    /// Releases the oldest blocks of the quarantine until it is within its bound. Blocks until the
    /// work before their frees is done. A block that cannot be read stays for a later call.
    pub(super) fn enforce_bound(&self) {
        while let Some(freed) = self.pop_oldest(self.settings.quarantine) {
            if !self.inspect_and_release(freed, OnUnread::Keep) {
                break;
            }
        }
    }

    /// Releases blocks until `bytes` have been returned to the pool or none is left. Returns the
    /// bytes. Blocks. Waits for other streams' uses of freed blocks on the device. If streams may
    /// not wait for each other, the host waits until `deadline` instead.
    pub(crate) fn reclaim_quarantine(&self, bytes: u64, deadline: Option<Instant>) -> u64 {
        let before = self.state().returned;
        let enough = || self.state().returned - before >= bytes;
        self.collect_waiting();
        while !enough()
            && let Some(freed) = self.pop_oldest(0)
        {
            self.inspect_and_release(freed, OnUnread::Release);
        }
        if !enough() {
            if !self.waits {
                self.wait_for_uses(deadline);
            }
            self.collect_waiting_with(self.waits);
            while !enough()
                && let Some(freed) = self.pop_oldest(0)
            {
                self.inspect_and_release(freed, OnUnread::Release);
            }
        }
        // Blocks that other threads are reading are returned as well.
        while !enough() && self.state().inspecting > 0 {
            thread::sleep(INSPECTION_POLL);
        }
        self.state().returned - before
    }

    /// Waits for stamped uses of freed blocks.
    fn wait_for_uses(&self, deadline: Option<Instant>) {
        let uses: Vec<_> =
            self.state().waiting.iter().flat_map(|freed| freed.uses.stamped()).collect();
        for (on, epoch) in uses {
            // After a refusal the block stays on the list.
            let _ = on.wait(epoch, deadline);
        }
    }

    /// Removes the oldest block of a quarantine that holds more than `bound` bytes, and returns its
    /// place. The caller must release it.
    fn pop_oldest(&self, bound: u64) -> Option<(u64, QuarantinedBlock)> {
        let mut state = self.state();
        if state.quarantined <= bound {
            return None;
        }
        let taken = state.quarantine.pop_oldest()?;
        state.begin_inspection(&taken.1);
        Some(taken)
    }

    /// Removes the block that follows the one at `after` in the quarantine, up to that at `last`.
    /// The caller must put it back.
    fn take_next(&self, after: Option<u64>, last: u64) -> Option<(u64, QuarantinedBlock)> {
        let mut state = self.state();
        let taken = state.quarantine.take_next(after, last)?;
        state.begin_inspection(&taken.1);
        Some(taken)
    }

    /// Reads a block and releases it. Returns whether it was released.
    fn inspect_and_release(
        &self,
        (age, mut freed): (u64, QuarantinedBlock),
        on_unread: OnUnread,
    ) -> bool {
        let inspected = self.inspect_freed(&mut freed);
        let leaves = match inspected {
            Ok(_) => true,
            // A lost device cannot be read.
            Err(MemoryError::DeviceLost { .. }) => on_unread == OnUnread::Release,
            Err(_) if on_unread == OnUnread::Keep && !freed.refused => false,
            Err(error) => {
                self.report(Fault::Unchecked { error }, freed.record.clone());
                true
            }
        };
        if leaves {
            self.return_block(freed);
            self.state().inspecting -= 1;
        } else {
            freed.refused = true;
            self.state().end_inspection(age, freed);
        }
        leaves
    }

    /// Reports the faults of a freed block. Blocks.
    fn inspect_freed(&self, freed: &mut QuarantinedBlock) -> Result<Vec<Finding>> {
        let body = self.settings.quarantine > 0 && freed.filled;
        let mut faults = Vec::new();
        let inspected = match self.reader() {
            Some(reader) => freed.held.inspect(&reader.stream, body, &mut faults),
            None => Ok(()),
        };
        let found =
            faults.into_iter().map(|fault| self.report(fault, freed.record.clone())).collect();
        inspected.map(|()| found)
    }

    /// Checks the guards of live blocks and all blocks in quarantine. Returns the faults that were
    /// not reported before. Blocks until the work queued on the blocks' own streams is done.
    pub(crate) fn check(&self) -> Result<Vec<Finding>> {
        let mut found = Vec::new();
        self.collect_waiting();
        let numbers: Vec<(u64, u64)> = {
            let state = self.state();
            let live = |(&address, live): (&u64, &CheckedBlock)| (address, live.record.number);
            if self.settings.canaries { state.live.iter().map(live).collect() } else { Vec::new() }
        };
        for (address, number) in numbers {
            found.append(&mut self.inspect_live(address, number)?);
        }
        // Blocks that are freed during this call are left for a later one.
        let newest = self.state().quarantine.newest();
        let mut after = None;
        while let Some((age, mut freed)) = newest.and_then(|last| self.take_next(after, last)) {
            let inspected = self.inspect_freed(&mut freed);
            self.state().end_inspection(age, freed);
            found.append(&mut inspected?);
            after = Some(age);
        }
        Ok(found)
    }

    /// Reports the faults of a live block's guards. Its user may free it during the check: the free
    /// is then processed afterwards.
    fn inspect_live(&self, address: u64, number: u64) -> Result<Vec<Finding>> {
        let Some(reader) = self.reader() else { return Ok(Vec::new()) };
        let taken = {
            let mut state = self.state();
            let live = state.live.get_mut(&address).filter(|live| live.record.number == number);
            let live =
                live.filter(|l| l.held.as_ref().is_some_and(|held| is_usable(&held.owner_stream)));
            live.and_then(|live| Some((live.held.take()?, live.record.clone())))
        };
        // The block is gone, or another thread reads it.
        let Some((mut held, record)) = taken else { return Ok(Vec::new()) };
        let mut faults = Vec::new();
        let inspected = held.inspect(&reader.stream, false, &mut faults);
        let freed = {
            let mut state = self.state();
            if let Some(live) = state.live.get_mut(&address) {
                live.held = Some(held);
                live.freed
                    .take()
                    .and_then(|deferred| Some((state.live.remove(&address)?, deferred)))
            } else {
                None
            }
        };
        if let Some((live, deferred)) = freed {
            self.quarantine_freed(live, deferred);
        }
        let found = faults.into_iter().map(|fault| self.report(fault, record.clone())).collect();
        inspected.map(|()| found)
    }

    /// Gives free memory back to the driver, also from the quarantine, until the pool holds at most
    /// `keep` bytes.
    pub(crate) fn trim(&self, keep: u64) -> Result<u64> {
        self.collect_waiting();
        let mut given = self.source.trim(keep)?;
        // One block at a time, so that no more are released than necessary.
        while self.source.stats().physical > keep
            && let Some(freed) = self.pop_oldest(0)
        {
            if !self.inspect_and_release(freed, OnUnread::Keep) {
                break;
            }
            given += self.source.trim(keep)?;
        }
        Ok(given)
    }

    /// Checks and releases all freed blocks, and reports live ones. Blocks.
    pub(crate) fn close(&self) {
        self.state().closed = true;
        self.wait_for_uses(None);
        self.collect_waiting();
        while let Some(freed) = self.pop_oldest(0) {
            self.inspect_and_release(freed, OnUnread::Release);
        }
        // Blocks with open uses return to the pool with them, where they stay pending.
        let waiting = std::mem::take(&mut self.state().waiting);
        waiting.into_iter().for_each(|freed| self.return_block(freed));
        for group in self.leaks().unwrap_or_default().groups() {
            for block in &group.blocks {
                self.report(Fault::Leak, block.clone());
            }
        }
        let reader = self.reader.lock().unwrap_or_else(PoisonError::into_inner).take();
        drop(reader);
    }
}

impl GuardedBlock {
    /// Adds the faults of the guards, and of the body if it was filled at the free. Blocks.
    fn inspect(&mut self, reader: &Stream, body: bool, faults: &mut Vec<Fault>) -> Result<()> {
        let inspected = self.read(reader, body, faults);
        if inspected.is_ok() {
            // The reader has been waited for, and no other stream has used this memory.
            let owner_stream = self.owner_stream.clone();
            let _over = self.memory.block_mut().uses.take(&owner_stream);
        }
        inspected
    }

    fn read(&mut self, reader: &Stream, body: bool, faults: &mut Vec<Fault>) -> Result<()> {
        let Self { memory, layout, reported, .. } = self;
        let start = layout.front;
        if let Some(part) = layout.before().filter(|_| !reported.before)
            && let Some((at, found)) = first_wrong(memory, reader, part, CANARY)?
        {
            reported.before = true;
            faults.push(Fault::Underrun { offset: at.cast_signed() - start.cast_signed(), found });
        }
        if body
            && !reported.body
            && let Some((at, found)) = first_wrong(memory, reader, layout.body(), POISON_FREED)?
        {
            reported.body = true;
            faults.push(Fault::LateWrite { offset: at - start, found });
        }
        if let Some(part) = layout.behind().filter(|_| !reported.behind)
            && let Some((at, found)) = first_wrong(memory, reader, part, CANARY)?
        {
            reported.behind = true;
            faults.push(Fault::Overrun { offset: at - start, found });
        }
        Ok(())
    }
}
