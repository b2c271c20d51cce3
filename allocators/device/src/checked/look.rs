//! When freed blocks are looked at and go home, and what live ones' guards look like.

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

/// Between two looks whether another thread is done.
const PAUSE: Duration = Duration::from_micros(50);

/// What to do with a freed block that cannot be looked at.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Unseen {
    /// It stays for one more try, and goes after that, or one that cannot be read would keep all
    /// behind it.
    Stays,
    /// It goes home, and that is reported.
    Goes,
}

impl Checked {
    /// Moves blocks whose other uses are done by now from waiting into the quarantine. Records
    /// events behind the other streams where there are none, and looks which have passed; never
    /// blocks.
    pub(super) fn settle(&self) {
        self.settle_by(false);
    }

    /// The same; where streams `wait` for each other, uses that are stamped are waited for on the
    /// device, and over.
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
                // A refusal leaves the block waiting; the next look tries again.
                let _ = on.fence(epoch).and_then(|_| on.poll());
            }
            freed.uses.forget_done();
            // No use of a freed block is opened any more, so what is stamped then is all.
            if wait && !freed.uses.is_open() {
                let home = &freed.held.home;
                // A refusal leaves the block waiting.
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

    /// A freed block's last use is over.
    fn unused(&self, mut freed: Freed) {
        // Without debugging the memory would be free now; limits of wrappers are not to notice the
        // difference.
        drop(freed.until_free.take());
        self.fill_kept(&mut freed);
        if self.settings.looks_at_freed() {
            self.state().keep(freed);
        } else {
            self.go_home(freed);
        }
    }

    /// Lets the oldest blocks out of the quarantine until it is within its bound. Blocks until the
    /// work before their frees is done. A block that cannot be read back stays until another time.
    pub(super) fn keep_bound(&self) {
        while let Some(freed) = self.take_oldest(self.settings.quarantine) {
            if !self.let_out(freed, Unseen::Stays) {
                break;
            }
        }
    }

    /// Lets blocks out until so many bytes have gone home, or nothing is left that can; answers
    /// with how many have. Blocks. Other streams' uses of freed blocks are waited for on the
    /// device, or up to the pool's deadline on the host where streams are not to wait for each
    /// other.
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
        // What other threads have in hand comes home as well.
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
            // A refusal leaves the block waiting.
            let _ = on.wait(epoch, deadline);
        }
    }

    /// The oldest block of a quarantine that holds more than `bound` bytes. It is to be let out.
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

    /// Looks at a block and lets it go home. Says whether it went.
    fn let_out(&self, mut freed: Freed, unseen: Unseen) -> bool {
        let looked = self.look_at_freed(&mut freed);
        let goes = match looked {
            Ok(_) => true,
            // Nothing can be learned from a device that is gone.
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

    /// Reports what is wrong with a freed block. Blocks.
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

    /// Looks at the guards of live blocks and at all of the quarantine, and answers with what is
    /// wrong and has not been reported before. Blocks until the work queued on the blocks' own
    /// streams is done.
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
        // Those that are freed meanwhile are for another time.
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
                // Others may have let older ones out meanwhile.
                let at = at.min(state.quarantine.len());
                state.quarantine.insert(at, freed);
                state.looking -= 1;
            }
            found.append(&mut looked?);
        }
        Ok(found)
    }

    /// Reports what is wrong with the guards of a live block. Its user may free it meanwhile: it is
    /// taken back afterwards.
    fn look_at_live(&self, address: u64, number: u64) -> Result<Vec<Finding>> {
        let Some(reader) = self.reader() else { return Ok(Vec::new()) };
        let taken = {
            let mut state = self.state();
            let live = state.live.get_mut(&address).filter(|live| live.record.number == number);
            let live = live.filter(|l| l.held.as_ref().is_some_and(|held| can_be_used(&held.home)));
            live.and_then(|live| Some((live.held.take()?, live.record.clone())))
        };
        // Gone, or another thread looks at it.
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

    /// Free memory back to the driver, the quarantine's included, until the pool holds no more than
    /// `keep` bytes.
    pub(crate) fn trim(&self, pool: &Inner, keep: u64) -> Result<u64> {
        self.settle();
        let mut given = self.under.trim(pool, keep)?;
        // One after the other, so that what need not go stays.
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

    /// Looks at all that is freed and lets it go home, and reports what is live. Blocks.
    pub(crate) fn close(&self) {
        self.state().closed = true;
        self.wait_for_uses(None);
        self.settle();
        while let Some(freed) = self.take_oldest(0) {
            self.let_out(freed, Unseen::Goes);
        }
        // Uses that nobody has finished go home with their blocks, which are held back there.
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
    /// Adds what is wrong with the guards, and with the body if it is to be as it was filled at the
    /// free. Blocks.
    fn look(&mut self, reader: &Stream, body: bool, faults: &mut Vec<Fault>) -> Result<()> {
        let looked = self.read(reader, body, faults);
        if looked.is_ok() {
            // The reader has been waited for, and nobody else has used what is held.
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
