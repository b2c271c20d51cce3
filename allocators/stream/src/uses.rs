//! Who uses a block besides its home stream.
//!
//! A block lives on the stream it was allocated for, and needs no account of what that stream does with it. Every other
//! stream's use is noted here, and decides at the free when the block may be given out again.
//!
//! A use is *open* while its work may still be queued, then *stamped* with an epoch of its stream:
//!
//! - [`UseList::prepare`] opens one and answers with a [`Use`]; whoever holds it queues the work and then finishes. A
//!   prepared write excludes every other prepare: a conflict is [`MemoryError::Busy`].
//! - [`UseList::lend`] notes one whose end is the end of a borrow, which cannot be seen from here; it is stamped when
//!   the block is freed or used in conflict, both of which the borrow forbids while it lasts.
//! - [`UseList::record`] notes one whose work has been queued already.

use crate::{Spin, Timeline};
use aquifer_core::{MemoryError, Result};
use aquifer_driver::Access;
use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

/// No epoch: the use is open, and its holder will finish it.
const OPEN: u64 = 0;
/// No epoch: the use ends with a borrow.
const LENT: u64 = u64::MAX;
/// An epoch that is always done: the use was called off.
const CALLED_OFF: u64 = 0x8000_0000_0000_0000;

/// One stream's use of one block.
struct State {
    on: Arc<Timeline>,
    access: Access,
    /// The epoch that covers the use's work, or one of the three above.
    stamp: AtomicU64,
}

/// A use that has been noted, as the block's pool sees it.
#[derive(Clone)]
pub struct Noted(Arc<State>);

impl Noted {
    /// The stream.
    #[must_use]
    pub fn on(&self) -> &Arc<Timeline> {
        &self.0.on
    }

    /// Whether its holder has not finished it.
    #[must_use]
    pub fn is_open(&self) -> bool {
        self.0.stamp.load(Ordering::Acquire) == OPEN
    }

    /// The epoch of its stream that covers it; `None` while it is open, 0 if it was called off.
    #[must_use]
    pub fn epoch(&self) -> Option<u64> {
        match self.0.stamp.load(Ordering::Acquire) {
            OPEN | LENT => None,
            CALLED_OFF => Some(0),
            epoch => Some(epoch),
        }
    }

    /// Whether all of its work is known to be done. Makes no driver call.
    #[must_use]
    pub fn is_done(&self) -> bool {
        self.epoch().is_some_and(|epoch| self.0.on.is_done(epoch))
    }

    /// Whether it ends with a borrow, which has not been seen to be over.
    fn is_lent(&self) -> bool {
        self.0.stamp.load(Ordering::Acquire) == LENT
    }

    /// Ends a lent use, whose borrow is over.
    fn end_borrow(&self) {
        if self.is_lent() {
            self.0.stamp.store(self.0.on.open(), Ordering::Release);
        }
    }
}

impl fmt::Debug for Noted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Noted")
            .field("stream", &self.0.on.number())
            .field("access", &self.0.access)
            .field("epoch", &self.epoch())
            .finish()
    }
}

/// A use that has been prepared and not finished. While it is held, the block's bytes stay the block's, even if the
/// block is freed.
///
/// Dropping it finishes it, which is right whether its work was queued or not; forgetting it keeps the block's memory
/// for good.
#[must_use = "a use that is dropped at once covers no work"]
pub struct Use {
    noted: Noted,
}

impl Use {
    /// Ends the use: all of its work is queued.
    ///
    /// # Errors
    /// The driver's, if the stream has to be fenced at once; the use is ended all the same.
    pub fn finish(self) -> Result<()> {
        self.end()
    }

    /// Stamps the use, unless it has been called off, and fences its stream where that cannot be done later.
    fn end(&self) -> Result<()> {
        let state = &self.noted.0;
        if state.stamp.load(Ordering::Acquire) != OPEN {
            return Ok(());
        }
        let epoch = state.on.open();
        state.stamp.store(epoch, Ordering::Release);
        state.on.fence_at_once(epoch)
    }

    /// Ends the use without any work of it having been queued.
    pub fn abort(self) {
        self.noted.0.stamp.store(CALLED_OFF, Ordering::Release);
    }

    /// The stream it is on.
    #[must_use]
    pub fn on(&self) -> &Arc<Timeline> {
        self.noted.on()
    }
}

impl Drop for Use {
    fn drop(&mut self) {
        // A refusal leaves the use without a proof, so the block is held back until the stream is retired.
        let _ = self.end();
    }
}

impl fmt::Debug for Use {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Use").field(&self.noted).finish()
    }
}

/// Boxed, since most blocks have none and a block's token is to be small.
type Listed = Option<Box<Vec<Noted>>>;

/// The uses of one live block by streams other than its home.
#[derive(Default)]
pub struct UseList {
    list: Spin<Listed>,
}

impl UseList {
    /// No uses.
    #[must_use]
    pub fn new() -> Self {
        Self { list: Spin::new(None) }
    }

    /// Makes `on` wait for what must come before `access`, and opens a use. Does not block.
    ///
    /// # Errors
    /// `Busy` with `address` if a use is open that this one conflicts with; the driver's. Nothing is noted then.
    pub fn prepare(
        &self,
        address: u64,
        home: &Arc<Timeline>,
        on: &Arc<Timeline>,
        access: Access,
    ) -> Result<Use> {
        let noted = self.enter(address, home, on, access, OPEN, true)?;
        Ok(Use { noted })
    }

    /// Makes `on` wait for what must come before `access`, and notes a use that ends with a borrow. Does not block.
    ///
    /// # Errors
    /// As [`UseList::prepare`].
    pub fn lend(&self, address: u64, home: &Arc<Timeline>, on: &Arc<Timeline>, access: Access) -> Result<()> {
        self.enter(address, home, on, access, LENT, true).map(drop)
    }

    /// As [`UseList::lend`], where borrows that this one conflicts with need not be over: those of other parts of the
    /// block. What is queued for them by now is waited for, and they go on to be used.
    ///
    /// # Errors
    /// As [`UseList::prepare`].
    pub fn lend_beside(
        &self,
        address: u64,
        home: &Arc<Timeline>,
        on: &Arc<Timeline>,
        access: Access,
    ) -> Result<()> {
        self.enter(address, home, on, access, LENT, false).map(drop)
    }

    /// Notes a use whose work has been queued on `on`, in order with what came before it.
    ///
    /// # Errors
    /// The driver's, if the stream has to be fenced at once; the use is noted all the same.
    pub fn record(&self, home: &Arc<Timeline>, on: &Arc<Timeline>, access: Access) -> Result<()> {
        if Arc::ptr_eq(home, on) {
            return Ok(());
        }
        let epoch = on.open();
        let noted = Noted(Arc::new(State { on: on.clone(), access, stamp: AtomicU64::new(epoch) }));
        self.list.with(|list| Self::push(list, noted));
        on.fence_at_once(epoch)
    }

    /// Notes the use first, so that of two conflicting ones only one can pass, and takes it back if a wait fails.
    fn enter(
        &self,
        address: u64,
        home: &Arc<Timeline>,
        on: &Arc<Timeline>,
        access: Access,
        stamp: u64,
        ends_borrows: bool,
    ) -> Result<Noted> {
        let noted = Noted(Arc::new(State { on: on.clone(), access, stamp: AtomicU64::new(stamp) }));
        let at_home = Arc::ptr_eq(home, on);
        let before = self.list.with(|list| {
            let mut before: Vec<(Arc<Timeline>, u64)> = Vec::new();
            let uses = list.get_or_insert_default();
            if uses.iter().any(|u| u.is_open() && u.0.access.conflicts(access)) {
                return Err(MemoryError::Busy { address });
            }
            for other in uses.iter().filter(|u| u.0.access.conflicts(access)) {
                if other.is_lent() && !ends_borrows {
                    before.push((other.0.on.clone(), other.0.on.open()));
                    continue;
                }
                other.end_borrow();
                if let Some(epoch) = other.epoch() {
                    before.push((other.0.on.clone(), epoch));
                }
            }
            uses.retain(|u| !u.is_done());
            // The home stream's own borrows need no note: the block goes back to that stream. Nor does one that is
            // noted already and has not ended: its end will cover both.
            let covered = |u: &Noted| Arc::ptr_eq(&u.0.on, on) && u.0.access == access && u.is_lent();
            if !(stamp == LENT && (at_home || uses.iter().any(covered))) {
                uses.push(noted.clone());
            }
            Ok(before)
        })?;
        let waits = || -> Result<()> {
            if !at_home {
                on.wait_for(home, home.open())?;
            }
            for (other, epoch) in &before {
                on.wait_for(other, *epoch)?;
            }
            Ok(())
        };
        if let Err(error) = waits() {
            self.list.with(|list| {
                if let Some(uses) = list {
                    uses.retain(|u| !Arc::ptr_eq(&u.0, &noted.0));
                }
            });
            return Err(error);
        }
        Ok(noted)
    }

    fn push(list: &mut Listed, noted: Noted) {
        let uses = list.get_or_insert_default();
        // One note for one stream and kind of access is enough: the later epoch covers the earlier.
        let same = |u: &Noted| {
            Arc::ptr_eq(&u.0.on, &noted.0.on) && u.0.access == noted.0.access && u.epoch().is_some()
        };
        match uses.iter_mut().find(|u| same(u)) {
            Some(earlier) => *earlier = noted,
            None => uses.push(noted),
        }
    }

    /// Whether no use has been noted since the last conflicting one.
    #[inline]
    pub fn is_empty(&mut self) -> bool {
        self.list.get_mut().is_none()
    }

    /// The uses that are not known to be done, as [`UseList::take`] would answer with them; they stay noted. For a part
    /// of a block that is given back while the rest stays: all borrows are over then as well.
    #[must_use]
    pub fn current(&mut self, home: &Arc<Timeline>) -> Vec<Noted> {
        let still = self.take(home);
        if !still.is_empty() {
            *self.list.get_mut() = Some(Box::new(still.clone()));
        }
        still
    }

    /// Takes over uses that were noted elsewhere and taken from there: of memory that this block's holder had lent on, and
    /// that comes back under them.
    pub fn take_over(&self, uses: Vec<Noted>) {
        if !uses.is_empty() {
            self.list.with(|list| list.get_or_insert_default().extend(uses));
        }
    }

    /// Takes the uses that are not known to be done, when the block is freed. All borrows are over then. Uses of the
    /// home stream itself are left out unless they are open: it is in order with itself.
    #[must_use]
    pub fn take(&mut self, home: &Arc<Timeline>) -> Vec<Noted> {
        let Some(mut uses) = self.list.get_mut().take() else { return Vec::new() };
        for noted in uses.iter() {
            noted.end_borrow();
            if let Some(epoch) = noted.epoch() {
                // A refusal leaves the use without a proof, so the block is held back until the stream is retired.
                let _ = noted.0.on.fence_at_once(epoch);
            }
        }
        uses.retain(|u| u.is_open() || !(Arc::ptr_eq(&u.0.on, home) || u.is_done()));
        *uses
    }
}

impl fmt::Debug for UseList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("UseList").field(&self.list.with(|list| list.clone())).finish()
    }
}
