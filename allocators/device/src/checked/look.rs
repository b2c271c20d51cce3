//! The checks of freed and live blocks, and the release of freed ones.

use super::{
    CANARY, Checked, Fault, Finding, Freed, Held, Live, POISON_FREED, can_be_used,
    guards::first_wrong,
};
use crate::pool::Inner;
use aquifer_core::{MemoryError, Result};
use aquifer_stream::Stream;
use std::{
    sync::PoisonError,
    thread,
    time::{Duration, Instant},
};

/// Pause between two checks whether another thread is done.
const PAUSE: Duration = Duration::from_micros(50);

/// What to do with a freed block that cannot be read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Unseen {
    /// It stays for one more attempt, and is released after that. Otherwise it would keep all
    /// blocks behind it.
    Stays,
    /// It is released, and that is reported.
    Goes,
}

impl Checked {
    /// Moves blocks whose other uses are done from the waiting list into the quarantine. Records
    /// events behind the other streams where there are none, and polls them. Never blocks.
    pub(super) fn settle(&self) {
        self.settle_by(false);
    }

    /// As [`Checked::settle`]. With `wait`, the owner stream waits for stamped uses on the device,
    /// which ends them.
    fn settle_by(&self, wait: bool) {
        let waiting = {
            let mut state = self.state();
            if state.waiting.is_empty() {
                return;
            }
            state.looking += 1;
            std::mem::take(&mut state.waiting)
        };
        let mut still = Vec::new();
        for mut freed in waiting {
            for (on, epoch) in freed.uses.stamped().filter(|(on, epoch)| !on.is_done(*epoch)) {
                // After a refusal the block stays on the list, and the next call tries again.
                let _ = on.fence(epoch).and_then(|_| on.poll());
            }
            freed.uses.forget_done();
            // No new use of a freed block is opened, so the stamped uses are all there are.
            if wait && !freed.uses.is_open() {
                let home = &freed.held.home;
                // After a refusal the block stays on the list.
                if freed.uses.stamped().all(|(on, epoch)| home.wait_for(&on, epoch).is_ok()) {
                    freed.uses.clear();
                }
            }
            if freed.uses.is_empty() {
                self.unused(freed);
            } else {
                still.push(freed);
            }
        }
        let mut state = self.state();
        state.waiting.append(&mut still);
        state.looking -= 1;
    }

    /// Processes a freed block whose last use is over.
    fn unused(&self, mut freed: Freed) {
        // Without debugging the memory would be free now, and charges of wrappers must end at the
        // same time.
        drop(freed.until_free.take());
        self.fill_kept(&mut freed);
        if self.settings.looks_at_freed() {
            self.state().keep(freed);
        } else {
            self.go_home(freed);
        }
    }

    /// Releases the oldest blocks of the quarantine until it is within its bound. Blocks until the
    /// work before their frees is done. A block that cannot be read stays for a later call.
    pub(super) fn keep_bound(&self) {
        while let Some(freed) = self.take_oldest(self.settings.quarantine) {
            if !self.let_out(freed, Unseen::Stays) {
                break;
            }
        }
    }

    /// Releases blocks until `bytes` have been returned to the pool or none is left. Returns the
    /// bytes. Blocks. Waits for other streams' uses of freed blocks on the device. If streams may
    /// not wait for each other, the host waits up to the pool's deadline instead.
    pub(crate) fn give_way(&self, bytes: u64) -> u64 {
        let before = self.state().gone;
        let enough = || self.state().gone - before >= bytes;
        self.settle();
        while !enough()
            && let Some(freed) = self.take_oldest(0)
        {
            self.let_out(freed, Unseen::Goes);
        }
        if !enough() {
            if !self.waits {
                self.wait_for_uses(Instant::now().checked_add(self.patience));
            }
            self.settle_by(self.waits);
            while !enough()
                && let Some(freed) = self.take_oldest(0)
            {
                self.let_out(freed, Unseen::Goes);
            }
        }
        // Blocks that other threads are reading are returned as well.
        while !enough() && self.state().looking > 0 {
            thread::sleep(PAUSE);
        }
        self.state().gone - before
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

    /// Removes the oldest block of a quarantine that holds more than `bound` bytes. The caller must
    /// release it.
    fn take_oldest(&self, bound: u64) -> Option<Freed> {
        let mut state = self.state();
        if state.quarantined <= bound {
            return None;
        }
        let freed = state.quarantine.pop_front()?;
        state.quarantined -= freed.capacity;
        state.looking += 1;
        Some(freed)
    }

    /// Reads a block and releases it. Returns whether it was released.
    fn let_out(&self, mut freed: Freed, unseen: Unseen) -> bool {
        let looked = self.look_at_freed(&mut freed);
        let goes = match looked {
            Ok(_) => true,
            // A lost device cannot be read.
            Err(MemoryError::DeviceLost { .. }) => unseen == Unseen::Goes,
            Err(_) if unseen == Unseen::Stays && !freed.refused => false,
            Err(error) => {
                self.report(Fault::Unchecked { error }, freed.record.clone());
                true
            }
        };
        if goes {
            self.go_home(freed);
            self.state().looking -= 1;
        } else {
            freed.refused = true;
            let mut state = self.state();
            state.quarantined += freed.capacity;
            state.quarantine.push_front(freed);
            state.looking -= 1;
        }
        goes
    }

    /// Reports the faults of a freed block. Blocks.
    fn look_at_freed(&self, freed: &mut Freed) -> Result<Vec<Finding>> {
        let body = self.settings.quarantine > 0 && freed.filled;
        let mut faults = Vec::new();
        let looked = match self.reader() {
            Some(reader) => freed.held.look(&reader.stream, body, &mut faults),
            None => Ok(()),
        };
        let found =
            faults.into_iter().map(|fault| self.report(fault, freed.record.clone())).collect();
        looked.map(|()| found)
    }

    /// Checks the guards of live blocks and all blocks in quarantine. Returns the faults that were
    /// not reported before. Blocks until the work queued on the blocks' own streams is done.
    pub(crate) fn check(&self) -> Result<Vec<Finding>> {
        let mut found = Vec::new();
        self.settle();
        let numbers: Vec<(u64, u64)> = {
            let state = self.state();
            let live = |(&address, live): (&u64, &Live)| (address, live.record.number);
            if self.settings.canaries { state.live.iter().map(live).collect() } else { Vec::new() }
        };
        for (address, number) in numbers {
            found.append(&mut self.look_at_live(address, number)?);
        }
        // Blocks that are freed during this call are left for a later one.
        let newest =
            self.state().quarantine.iter().map(|freed| freed.record.number).collect::<Vec<_>>();
        for number in newest {
            let taken = {
                let mut state = self.state();
                let at = state.quarantine.iter().position(|freed| freed.record.number == number);
                let taken = at.and_then(|at| Some((at, state.quarantine.remove(at)?)));
                if let Some((_, freed)) = &taken {
                    state.quarantined -= freed.capacity;
                    state.looking += 1;
                }
                taken
            };
            let Some((at, mut freed)) = taken else { continue };
            let looked = self.look_at_freed(&mut freed);
            {
                let mut state = self.state();
                state.quarantined += freed.capacity;
                // Other threads may have released older blocks in between.
                let at = at.min(state.quarantine.len());
                state.quarantine.insert(at, freed);
                state.looking -= 1;
            }
            found.append(&mut looked?);
        }
        Ok(found)
    }

    /// Reports the faults of a live block's guards. Its user may free it during the check: the free
    /// is then processed afterwards.
    fn look_at_live(&self, address: u64, number: u64) -> Result<Vec<Finding>> {
        let Some(reader) = self.reader() else { return Ok(Vec::new()) };
        let taken = {
            let mut state = self.state();
            let live = state.live.get_mut(&address).filter(|live| live.record.number == number);
            let live = live.filter(|l| l.held.as_ref().is_some_and(|held| can_be_used(&held.home)));
            live.and_then(|live| Some((live.held.take()?, live.record.clone())))
        };
        // The block is gone, or another thread reads it.
        let Some((mut held, record)) = taken else { return Ok(Vec::new()) };
        let mut faults = Vec::new();
        let looked = held.look(&reader.stream, false, &mut faults);
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
            self.freed(live, deferred);
        }
        let found = faults.into_iter().map(|fault| self.report(fault, record.clone())).collect();
        looked.map(|()| found)
    }

    /// Gives free memory back to the driver, also from the quarantine, until the pool holds at most
    /// `keep` bytes.
    pub(crate) fn trim(&self, pool: &Inner, keep: u64) -> Result<u64> {
        self.settle();
        let mut given = self.under.trim(pool, keep)?;
        // One block at a time, so that no more are released than necessary.
        while self.under.stats(pool).physical > keep
            && let Some(freed) = self.take_oldest(0)
        {
            if !self.let_out(freed, Unseen::Stays) {
                break;
            }
            given += self.under.trim(pool, keep)?;
        }
        Ok(given)
    }

    /// Checks and releases all freed blocks, and reports live ones. Blocks.
    pub(crate) fn close(&self) {
        self.state().closed = true;
        self.wait_for_uses(None);
        self.settle();
        while let Some(freed) = self.take_oldest(0) {
            self.let_out(freed, Unseen::Goes);
        }
        // Blocks with open uses return to the pool with them, where they stay pending.
        let waiting = std::mem::take(&mut self.state().waiting);
        waiting.into_iter().for_each(|freed| self.go_home(freed));
        for group in self.leaks().unwrap_or_default().groups() {
            for block in &group.blocks {
                self.report(Fault::Leak, block.clone());
            }
        }
        let reader = self.reader.lock().unwrap_or_else(PoisonError::into_inner).take();
        drop(reader);
    }
}

impl Held {
    /// Adds the faults of the guards, and of the body if it was filled at the free. Blocks.
    fn look(&mut self, reader: &Stream, body: bool, faults: &mut Vec<Fault>) -> Result<()> {
        let looked = self.read(reader, body, faults);
        if looked.is_ok() {
            // The reader has been waited for, and no other stream has used this memory.
            let home = self.home.clone();
            let _over = self.memory.block_mut().uses.take(&home);
        }
        looked
    }

    fn read(&mut self, reader: &Stream, body: bool, faults: &mut Vec<Fault>) -> Result<()> {
        let Self { memory, layout, told, .. } = self;
        let start = layout.front;
        if let Some(part) = layout.before().filter(|_| !told.before)
            && let Some((at, found)) = first_wrong(memory, reader, part, CANARY)?
        {
            told.before = true;
            faults.push(Fault::Underrun { offset: at.cast_signed() - start.cast_signed(), found });
        }
        if body
            && !told.body
            && let Some((at, found)) = first_wrong(memory, reader, layout.body(), POISON_FREED)?
        {
            told.body = true;
            faults.push(Fault::LateWrite { offset: at - start, found });
        }
        if let Some(part) = layout.behind().filter(|_| !told.behind)
            && let Some((at, found)) = first_wrong(memory, reader, part, CANARY)?
        {
            told.behind = true;
            faults.push(Fault::Overrun { offset: at - start, found });
        }
        Ok(())
    }
}
