//! One launch and all the blocks that it touches.
//!
//! ```text
//!   host     preflight: note all uses, then wait for each stream once     launch     commit: one epoch for all
//!            │                                                           │          │
//!   stream   ┴─ waits for every home stream and every conflicting use ───┴─ kernel ─┴──────────────────────
//! ```

use crate::{
    Stream, Timeline, Use, UseList,
    uses::{Before, Entered, node::Borrows},
};
use aquifer_core::{MemoryError, Result};
use aquifer_driver::{Access, DeviceRange, Operand, same_machine, site};
use smallvec::SmallVec;
use std::{fmt, sync::Arc};

/// Most kernels touch no more blocks than this; the account of more goes to the heap.
type Several<T> = SmallVec<[T; 8]>;

/// An [`Operand`] whose owner lets a [`Launch`] note uses in its account: blocks, buffers, and
/// parts of them.
#[diagnostic::on_unimplemented(
    message = "a launch cannot keep account of `{Self}`",
    label = "a block or a buffer of a pool is needed here",
    note = "pass a `Block` or a `DeviceBuffer`"
)]
pub trait Tracked: Operand {
    /// The account, one and the same for all parts of a block.
    fn account(&self) -> Account<'_>;
}

/// Where the uses of a block are noted.
///
/// Its example is that of [`Launch`].
#[derive(Clone)]
pub struct Account<'a> {
    /// The block's address, which a conflict is reported with.
    pub address: u64,
    /// The stream it belongs to.
    pub home: Arc<Timeline>,
    /// Its uses.
    pub uses: &'a UseList,
    /// Whether no part of the block is borrowed to be written while this is held to be read: not
    /// so for one of several parts of which some are written.
    pub alone: bool,
}

impl fmt::Debug for Account<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Account")
            .field("address", &format_args!("{:#x}", self.address))
            .field("home", &self.home.number())
            .finish_non_exhaustive()
    }
}

/// A block, with everything that the launch does to it.
struct Entry<'a> {
    account: Account<'a>,
    access: Access,
    /// Its parts as they were listed, where that matters.
    parts: SmallVec<[(DeviceRange, Access); 1]>,
}

/// The blocks that work about to be queued will touch.
///
/// They are listed with what the work does to them, ordered all at once by [`Launch::preflight`],
/// and stamped all at once when the work is queued. A block that is listed twice is one: read here
/// and written there, it is read and written.
///
/// ```
/// use aquifer_core::Result;
/// use aquifer_stream::{Launch, Stream, Tracked};
///
/// fn add(s: &Stream, a: &impl Tracked, b: &impl Tracked, sum: &impl Tracked) -> Result<()> {
///     let ready = Launch::on(s).reads(a).reads(b).writes(sum).preflight()?;
///     // … the kernel is launched on `s.raw()` …
///     ready.commit()
/// }
/// ```
#[must_use = "nothing is ordered before `preflight`"]
pub struct Launch<'a> {
    on: &'a Stream,
    entries: Several<Entry<'a>>,
    strict: bool,
}

impl<'a> Launch<'a> {
    /// A launch on `stream` that touches nothing yet.
    pub fn on(stream: &'a Stream) -> Self {
        Self { on: stream, entries: SmallVec::new(), strict: false }
    }

    /// Refuses bytes that are listed twice, unless both only read them: a kernel that takes its
    /// arguments for distinct would compute nonsense. Parts of one block that do not overlap are
    /// distinct.
    pub fn strict(mut self) -> Self {
        self.strict = true;
        self
    }

    /// The work reads it.
    pub fn reads(self, operand: &'a (impl Tracked + ?Sized)) -> Self {
        self.uses(operand, Access::Read)
    }

    /// The work writes it, and reads nothing that was there before.
    pub fn writes(self, operand: &'a (impl Tracked + ?Sized)) -> Self {
        self.uses(operand, Access::Write)
    }

    /// The work reads and writes it.
    pub fn updates(self, operand: &'a (impl Tracked + ?Sized)) -> Self {
        self.uses(operand, Access::ReadWrite)
    }

    /// The work does this to it.
    pub fn uses(mut self, operand: &'a (impl Tracked + ?Sized), access: Access) -> Self {
        let (account, part) = (operand.account(), (operand.range(), access));
        match self.entries.iter_mut().find(|entry| std::ptr::eq(entry.account.uses, account.uses)) {
            Some(entry) => {
                entry.access = if entry.access == access { access } else { Access::ReadWrite };
                // It says something of the whole block.
                entry.account.alone |= account.alone;
                entry.parts.push(part);
            }
            None => {
                self.entries.push(Entry { account, access, parts: SmallVec::from_iter([part]) });
            }
        }
        self
    }

    /// Checks everything, opens a use of every block, and makes the stream wait for what must come
    /// before, once for each stream (`cuEventRecord` there, `cuStreamWaitEvent` here). The host
    /// does not wait.
    ///
    /// # Errors
    /// [`MemoryError::WrongDevice`]; [`MemoryError::ListedTwice`] if the launch is
    /// [strict](Launch::strict); [`MemoryError::Busy`] for a block with a conflicting use that is
    /// open; those of [`Timeline::wait_for`]. No use is noted then; waits that had been queued by
    /// then stay queued, and are harmless.
    #[track_caller]
    pub fn preflight(self) -> Result<Ready> {
        let site = site::enter();
        self.check()?;
        let on = self.on.timeline();
        let (mut entered, mut before) = (Several::<Entered>::new(), Several::<Before>::new());
        let mut noted = || -> Result<()> {
            for Entry { account, access, .. } in &self.entries {
                let mut conflicting = Before::new();
                let Account { address, home, uses, alone } = account;
                // Whoever says that he writes proves nothing by it: readers may go on.
                let borrows = Borrows::over_if(*alone && !access.writes());
                entered.push(uses.enter(*address, home, on, *access, borrows, &mut conflicting)?);
                before.push(conflicting);
            }
            self.order(on, &before)
        };
        if let Err(error) = noted() {
            entered.iter().for_each(Entered::withdraw);
            return Err(error);
        }
        let mut uses = Several::new();
        for ((entered, before), entry) in entered.into_iter().zip(&before).zip(&self.entries) {
            if Arc::ptr_eq(&entry.account.home, on) {
                entered.forget(before);
            }
            uses.push(entered.into_use(on));
        }
        site.checkpoint(&**self.on.driver());
        Ok(Ready { on: on.clone(), uses })
    }

    fn check(&self) -> Result<()> {
        let device = self.on.device();
        for Entry { account, parts, .. } in &self.entries {
            let expected = account.home.raw().device();
            if expected != device {
                return Err(MemoryError::WrongDevice { expected, actual: device });
            }
            same_machine(&**account.home.driver(), &**self.on.driver())?;
            if !self.strict {
                continue;
            }
            for (at, (first, one)) in parts.iter().enumerate() {
                for (second, other) in &parts[at + 1..] {
                    let overlap = first.address < second.address + second.bytes
                        && second.address < first.address + first.bytes;
                    if overlap && one.conflicts(*other) {
                        return Err(MemoryError::ListedTwice { address: account.address });
                    }
                }
            }
        }
        Ok(())
    }

    /// Makes the stream wait for every home stream and every conflicting use.
    fn order(&self, on: &Arc<Timeline>, before: &[Before]) -> Result<()> {
        // The newest epoch of each stream covers the others.
        let mut newest: Several<(&Arc<Timeline>, u64)> = SmallVec::new();
        let homes = self.entries.iter().map(|entry| &entry.account.home);
        let homes = homes.map(|home| (home, home.open()));
        for (other, epoch) in
            homes.chain(before.iter().flatten().map(|(other, epoch)| (other, *epoch)))
        {
            match newest.iter_mut().find(|(known, _)| Arc::ptr_eq(known, other)) {
                Some((_, known)) => *known = epoch.max(*known),
                None => newest.push((other, epoch)),
            }
        }
        newest.iter().try_for_each(|(other, epoch)| on.wait_for(other, *epoch).map(drop))
    }
}

impl fmt::Debug for Launch<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Launch")
            .field("on", &self.on)
            .field("blocks", &self.entries.len())
            .field("strict", &self.strict)
            .finish()
    }
}

/// A launch whose blocks are ordered: the work may be queued now.
///
/// Until it ends, its blocks' bytes stay theirs, even if they are freed, and conflicting uses are
/// refused. Dropping it ends it as [`Ready::commit`] does, which is right whether the work was
/// queued or not; forgetting it keeps the blocks' memory for good.
#[must_use = "a launch that is dropped at once covers no work"]
pub struct Ready {
    on: Arc<Timeline>,
    uses: Several<Use>,
}

impl Ready {
    /// The work is queued: ends all uses in one epoch. At most one event is recorded, and only on a
    /// stream that is fenced at once.
    ///
    /// # Errors
    /// Those of [`Timeline::fence_at_once`]; the uses are ended all the same.
    pub fn commit(mut self) -> Result<()> {
        self.end()
    }

    fn end(&mut self) -> Result<()> {
        let epoch = self.on.open();
        let mut ended = Ok(());
        for used in &mut self.uses {
            ended = ended.and(used.end_in(epoch));
        }
        self.uses.clear();
        ended
    }

    /// No work was queued: calls all uses off.
    pub fn abort(mut self) {
        self.uses.drain(..).for_each(Use::abort);
    }

    /// The stream.
    #[must_use]
    pub fn on(&self) -> &Arc<Timeline> {
        &self.on
    }
}

impl Drop for Ready {
    fn drop(&mut self) {
        // A refusal leaves the uses without a proof, so their blocks are held back until the stream
        // is retired.
        let _ = self.end();
    }
}

impl fmt::Debug for Ready {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ready")
            .field("stream", &self.on.number())
            .field("blocks", &self.uses.len())
            .finish()
    }
}
