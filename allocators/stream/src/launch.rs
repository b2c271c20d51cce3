//! A launch: all blocks that one piece of work uses, ordered and stamped together.
//!
//! ```text
//!   host     preflight: record all uses, wait for each stream once      launch     commit: one epoch for all
//!            │                                                           │          │
//!   stream   ┴─ waits for every owner stream and every conflicting use ──┴─ kernel ─┴──────────────────────
//! ```

use crate::{
    Stream, Timeline, Use, UseList,
    use_table::ConflictingBorrows,
    uses::{Predecessors, UnorderedUse},
};
use aquifer_core::{MemoryError, Result};
use aquifer_driver::{Access, DeviceRange, Operand, same_machine, site};
use smallvec::SmallVec;
use std::{fmt, sync::Arc};

/// Most kernels use at most this many blocks. More elements go to the heap.
type OperandVec<T> = SmallVec<[T; 8]>;

/// An [`Operand`] whose uses a [`Launch`] can record: blocks, buffers, and parts of them.
#[diagnostic::on_unimplemented(
    message = "a launch cannot keep account of `{Self}`",
    label = "a block or a buffer of a pool is needed here",
    note = "pass a `Block` or a `DeviceBuffer`"
)]
pub trait TrackUses: Operand {
    /// Returns the use records of the block, which all parts of a block share.
    #[doc(hidden)]
    fn account(&self) -> Account<'_>;
}

/// The place where the uses of a block are recorded.
///
/// See [`Launch`] for an example.
#[derive(Clone)]
pub struct Account<'a> {
    /// The block's address, for error messages.
    pub address: u64,
    /// The owner stream of the block.
    pub home: Arc<Timeline>,
    /// The uses of the block.
    pub uses: &'a UseList,
    /// Whether a shared borrow of this operand proves that no part of the block is mutably
    /// borrowed. `false` for one of several parts of which some may be written.
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

/// A block, and all its accesses in the launch.
struct LaunchEntry<'a> {
    account: Account<'a>,
    access: Access,
    /// The listed parts of the block, with their accesses. Only a strict launch compares them.
    parts: SmallVec<[(DeviceRange, Access); 1]>,
}

/// The blocks that work about to be queued will use.
///
/// List them with their accesses, order them together with [`Launch::preflight`], and stamp them
/// together when the work is queued. A block that is listed twice is one entry: read in one place
/// and written in another, it counts as read and written.
///
/// ```
/// use aquifer::{Stream, error::Result, stream::{Launch, TrackUses}};
///
/// fn add(s: &Stream, a: &impl TrackUses, b: &impl TrackUses, sum: &impl TrackUses) -> Result<()> {
///     let ready = Launch::on(s).reads(a).reads(b).writes(sum).preflight()?;
///     // … the kernel is launched on `s.raw()` …
///     ready.commit()
/// }
/// ```
#[must_use = "nothing is ordered before `preflight`"]
pub struct Launch<'a> {
    on: &'a Stream,
    entries: OperandVec<LaunchEntry<'a>>,
    strict: bool,
}

impl<'a> Launch<'a> {
    /// Creates a launch on `stream` that uses no blocks yet.
    pub fn on(stream: &'a Stream) -> Self {
        Self { on: stream, entries: SmallVec::new(), strict: false }
    }

    /// Refuses overlapping ranges unless both are only read: a kernel that assumes distinct
    /// arguments would compute wrong results. Parts of one block that do not overlap are allowed.
    pub fn strict(mut self) -> Self {
        self.strict = true;
        self
    }

    /// Adds an operand that the work reads.
    pub fn reads(self, operand: &'a (impl TrackUses + ?Sized)) -> Self {
        self.uses(operand, Access::Read)
    }

    /// Adds an operand that the work overwrites without reading its old contents.
    pub fn writes(self, operand: &'a (impl TrackUses + ?Sized)) -> Self {
        self.uses(operand, Access::Write)
    }

    /// Adds an operand that the work reads and writes.
    pub fn updates(self, operand: &'a (impl TrackUses + ?Sized)) -> Self {
        self.uses(operand, Access::ReadWrite)
    }

    /// Adds an operand with this access.
    pub fn uses(mut self, operand: &'a (impl TrackUses + ?Sized), access: Access) -> Self {
        let (account, part) = (operand.account(), (operand.range(), access));
        match self.entries.iter_mut().find(|entry| std::ptr::eq(entry.account.uses, account.uses)) {
            Some(entry) => {
                entry.access = if entry.access == access { access } else { Access::ReadWrite };
                // The proof covers the whole block.
                entry.account.alone |= account.alone;
                entry.parts.push(part);
            }
            None => {
                self.entries.push(LaunchEntry {
                    account,
                    access,
                    parts: SmallVec::from_iter([part]),
                });
            }
        }
        self
    }

    /// Checks all operands, opens a use of every block, and makes the stream wait once for each
    /// other stream with conflicting work (`cuEventRecord` there, `cuStreamWaitEvent` here). The
    /// host does not wait.
    ///
    /// # Errors
    /// [`MemoryError::WrongDevice`], [`MemoryError::ListedTwice`] if the launch is
    /// [strict](Launch::strict), [`MemoryError::Busy`] for a block with a conflicting open use, and
    /// those of [`Timeline::wait_for`]. No use is recorded then. Waits that were already queued
    /// stay queued, and are harmless.
    #[track_caller]
    pub fn preflight(self) -> Result<PreparedLaunch> {
        let _site = site::enter();
        self.validate()?;
        let on = self.on.timeline();
        let (mut entered, mut predecessors) =
            (OperandVec::<UnorderedUse>::new(), OperandVec::<Predecessors>::new());
        let mut record_all = || -> Result<()> {
            for LaunchEntry { account, access, .. } in &self.entries {
                let mut conflicting = Predecessors::new();
                let Account { address, home: owner, uses, alone } = account;
                // A declared write proves nothing, so shared borrows may continue.
                let borrows = ConflictingBorrows::ended_if(*alone && !access.writes());
                entered.push(uses.open_use(
                    *address,
                    owner,
                    on,
                    *access,
                    borrows,
                    &mut conflicting,
                )?);
                predecessors.push(conflicting);
            }
            self.order(on, &predecessors)
        };
        if let Err(error) = record_all() {
            entered.iter().for_each(UnorderedUse::withdraw);
            return Err(error);
        }
        let mut uses = OperandVec::new();
        for ((entered, predecessors), entry) in
            entered.into_iter().zip(&predecessors).zip(&self.entries)
        {
            if Arc::ptr_eq(&entry.account.home, on) {
                entered.remove_waited(predecessors);
            }
            uses.push(entered.into_use(on));
        }
        Ok(PreparedLaunch { on: on.clone(), uses })
    }

    fn validate(&self) -> Result<()> {
        let device = self.on.device();
        for LaunchEntry { account, parts, .. } in &self.entries {
            let expected = account.home.raw().device();
            if expected != device {
                return Err(MemoryError::WrongDevice { expected, actual: device });
            }
            same_machine(&**account.home.driver(), &**self.on.driver())?;
            if !self.strict {
                continue;
            }
            for (at, (first, first_access)) in parts.iter().enumerate() {
                for (second, second_access) in &parts[at + 1..] {
                    let overlap = first.address < second.address + second.bytes
                        && second.address < first.address + first.bytes;
                    if overlap && first_access.conflicts(*second_access) {
                        return Err(MemoryError::ListedTwice { address: account.address });
                    }
                }
            }
        }
        Ok(())
    }

    /// Makes the stream wait for every owner stream and every conflicting use.
    fn order(&self, on: &Arc<Timeline>, predecessors: &[Predecessors]) -> Result<()> {
        // The newest epoch of a stream covers its earlier ones.
        let mut newest: OperandVec<(&Arc<Timeline>, u64)> = SmallVec::new();
        let owners = self.entries.iter().map(|entry| &entry.account.home);
        let owners = owners.map(|owner| (owner, owner.open()));
        for (other, epoch) in
            owners.chain(predecessors.iter().flatten().map(|(other, epoch)| (other, *epoch)))
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
/// Until it ends, the memory of its blocks is not reused, even if they are freed, and conflicting
/// uses are refused. Dropping it ends it as [`PreparedLaunch::commit`] does, which is correct
/// whether or not the work was queued. Forgetting it leaks the blocks' memory.
///
/// See [`Launch`] for an example.
#[must_use = "a launch that is dropped at once covers no work"]
pub struct PreparedLaunch {
    on: Arc<Timeline>,
    uses: OperandVec<Use>,
}

impl PreparedLaunch {
    /// Ends all uses in one epoch. Call it after the work is queued. Records at most one event, and
    /// only on a stream that must be fenced immediately.
    ///
    /// # Errors
    /// As [`Timeline::fence_at_once`]. The uses end even then.
    pub fn commit(mut self) -> Result<()> {
        self.end()
    }

    fn end(&mut self) -> Result<()> {
        let epoch = self.on.open();
        let mut result = Ok(());
        for used in &mut self.uses {
            result = result.and(used.end_in(epoch));
        }
        self.uses.clear();
        result
    }

    /// Aborts all uses. Call it if no work was queued.
    pub fn abort(mut self) {
        self.uses.drain(..).for_each(Use::abort);
    }

    /// Returns the stream of the launch.
    #[must_use]
    pub fn on(&self) -> &Arc<Timeline> {
        &self.on
    }
}

impl Drop for PreparedLaunch {
    fn drop(&mut self) {
        // After an error nothing proves the uses, so their blocks are held back until the stream is
        // retired.
        let _ = self.end();
    }
}

impl fmt::Debug for PreparedLaunch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ready")
            .field("stream", &self.on.number())
            .field("blocks", &self.uses.len())
            .finish()
    }
}
