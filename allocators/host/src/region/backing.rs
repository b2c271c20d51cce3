//! What stands behind a region, and its end.
//!
//! Ending can fail: the driver keeps a registration, the kernel a mapping. Memory that the driver
//! may still reach must not be unmapped, nor its charge released, so what is left goes to a list of
//! the process's, to be tried again.
#![expect(unsafe_code, reason = "ends registrations and driver allocations")]

use super::{Cause, Reach, RegionError, Step, claims, mapping::Mapping, retired::retire, window};
use crate::kernel::{AcrossForks, Guard, Of, Span, pointer};
use aquifer_core::{Charge, DriverError, Gate};
use aquifer_driver::Relaxed;
use std::{
    any::Any,
    mem,
    os::fd::BorrowedFd,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

/// Memory, what the driver knows of it, and its charge.
#[derive(Debug)]
pub(super) struct Backing {
    /// Alive registrations, in address order; ended from the back.
    registrations: Vec<Span>,
    reach: Option<Reach>,
    memory: Option<Memory>,
    /// Queued work may touch the memory until all of them are open.
    gates: Vec<Arc<dyn Gate>>,
}

#[derive(Debug)]
pub(super) enum Memory {
    Mapped(Arc<Mapping>),
    Driver(DriverBlock),
    Lent(Lent),
}

/// Somebody else's memory, which is only registered, and so whole pages of it.
#[derive(Debug)]
pub(super) struct Lent {
    /// Claimed, until this ends.
    pages: Span,
    /// `None` once it has ended.
    charge: Option<Charge>,
    /// Whoever owns it, if that was given to us. Dropped last.
    owner: Option<Box<dyn Any + Send>>,
}

impl Lent {
    /// Answers for `pages` from now on, which the caller has claimed.
    pub(super) fn new(pages: Span, charge: Charge) -> Self {
        Self { pages, charge: Some(charge), owner: None }
    }

    fn end(&mut self) -> Option<Charge> {
        let charge = self.charge.take()?;
        claims::give_back(self.pages);
        Some(charge)
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        drop(self.end());
    }
}

/// Memory that the driver allocated (`cuMemHostAlloc`).
#[derive(Debug)]
pub(super) struct DriverBlock {
    span: Span,
    reach: Reach,
    /// `None` once it has been freed.
    charge: Option<Charge>,
}

impl DriverBlock {
    /// Answers for `span` from now on. If it could not be told from foreign memory later it is
    /// freed, and the charge comes back, unless the block was stranded with it.
    pub(super) fn new(span: Span, reach: Reach, charge: Charge) -> Result<Self, Option<Charge>> {
        let mut block = Self { span, reach, charge: Some(charge) };
        if window::note_outside(span) { Ok(block) } else { Err(block.end().ok().flatten()) }
    }

    pub(super) fn span(&self) -> Span {
        self.span
    }

    fn end(&mut self) -> Result<Option<Charge>, DriverError> {
        if self.charge.is_none() {
            return Ok(None);
        }
        let Some(address) = pointer(self.span.start) else { return Ok(self.charge.take()) };
        let _relaxed = Relaxed::enter(&*self.reach.driver);
        // SAFETY: 1. it came from this driver, and the charge says that it has not been freed. 2.
        // the region's owner has ended.
        let freed = self.reach.call(|driver, device| unsafe { driver.host_free(device, address) });
        freed.or_else(forgive)?;
        window::forget_outside(self.span);
        Ok(self.charge.take())
    }
}

impl Drop for DriverBlock {
    fn drop(&mut self) {
        if self.end().is_err() {
            let charge = self.charge.take();
            strand(Remains::DriverBlock(Self {
                span: self.span,
                reach: self.reach.clone(),
                charge,
            }));
        }
    }
}

/// A driver that has gone, at the end of the process, has ended everything; and what it never heard
/// of needs no end.
fn forgive(error: DriverError) -> Result<(), DriverError> {
    const NOT_REGISTERED: u32 = 713;
    if error.is_driver_gone() || error.code == NOT_REGISTERED { Ok(()) } else { Err(error) }
}

impl Backing {
    pub(super) fn mapped(mapping: Arc<Mapping>, reach: Option<Reach>) -> Self {
        Self {
            registrations: Vec::new(),
            reach,
            memory: Some(Memory::Mapped(mapping)),
            gates: Vec::new(),
        }
    }

    pub(super) fn lent(lent: Lent, reach: Reach) -> Self {
        let memory = Some(Memory::Lent(lent));
        Self { registrations: Vec::new(), reach: Some(reach), memory, gates: Vec::new() }
    }

    pub(super) fn driver(block: DriverBlock) -> Self {
        let registrations = vec![block.span()];
        Self { registrations, reach: None, memory: Some(Memory::Driver(block)), gates: Vec::new() }
    }

    /// The memory's owner goes when it has ended.
    pub(super) fn keep(&mut self, owner: Box<dyn Any + Send>) {
        if let Some(Memory::Lent(lent)) = &mut self.memory {
            lent.owner = Some(owner);
        }
    }

    /// Nothing ends before `until` is open.
    pub(super) fn defer(&mut self, until: Arc<dyn Gate>) {
        self.gates.retain(|gate| !gate.is_open());
        self.gates.push(until);
    }

    /// Whether no queued work that we know of may touch it.
    pub(super) fn is_idle(&self) -> bool {
        self.gates.iter().all(|gate| gate.is_open())
    }

    /// The file whose memory it is.
    pub(super) fn file(&self) -> Option<BorrowedFd<'_>> {
        match &self.memory {
            Some(Memory::Mapped(mapping)) => mapping.file(),
            _ => None,
        }
    }

    /// Bytes that are charged for it.
    pub(super) fn bytes(&self) -> u64 {
        let span = match &self.memory {
            Some(Memory::Mapped(mapping)) => mapping.span(),
            Some(Memory::Driver(block)) => block.span,
            Some(Memory::Lent(lent)) => lent.pages,
            None => return 0,
        };
        span.len as u64
    }

    pub(super) fn registrations(&self) -> &[Span] {
        &self.registrations
    }

    /// Registers a part, which lies after those that are registered.
    ///
    /// # Errors
    /// The driver's; the part is not registered.
    pub(super) fn register(
        &mut self,
        part: Span,
        flags: aquifer_driver::HostFlags,
    ) -> Result<(), DriverError> {
        let (Some(reach), Some(address)) = (&self.reach, pointer(part.start)) else {
            return Ok(());
        };
        let _relaxed = Relaxed::enter(&*reach.driver);
        // SAFETY: 1. the part is populated and stays mapped until `unregister` has ended the
        // registration.
        reach.call(|driver, device| unsafe {
            driver.host_register(device, address, part.len, flags)
        })?;
        self.registrations.push(part);
        Ok(())
    }

    /// Ends the registrations, last first. Memory of the driver's has none of its own.
    fn unregister(&mut self) -> Result<(), DriverError> {
        let Some(reach) = &self.reach else {
            self.registrations.clear();
            return Ok(());
        };
        let _relaxed = Relaxed::enter(&*reach.driver);
        while let Some(part) = self.registrations.last() {
            if let Some(address) = pointer(part.start) {
                // SAFETY: 1. the start of a registration that has not been ended. 2. the region's
                // owner has ended.
                let ended =
                    reach.call(|driver, device| unsafe { driver.host_unregister(device, address) });
                ended.or_else(forgive)?;
            }
            self.registrations.pop();
        }
        Ok(())
    }

    /// Ends everything and answers with the charge, if nobody else holds the memory. Waits for
    /// queued work first.
    ///
    /// # Errors
    /// What would not end, which is stranded then.
    pub(super) fn end(&mut self) -> Result<Option<Charge>, RegionError> {
        // A gate that cannot tell belongs to a device that is lost, on which nothing runs any more:
        // what the driver makes of it is told below.
        let shut = self.gates.iter().any(|gate| gate.wait(None) == Ok(false));
        if shut {
            return Err(RegionError::new(Step::Register, Cause::InUse));
        }
        self.gates.clear();
        self.unregister().map_err(|e| RegionError::new(Step::Register, Cause::Driver(e)))?;
        let (left, answer) = match self.memory.take() {
            None => return Ok(None),
            Some(Memory::Lent(mut lent)) => return Ok(lent.end()),
            Some(Memory::Mapped(mapping)) => {
                // A worker is at it still, and gives it back.
                let Some(mut mapping) = Arc::into_inner(mapping) else { return Ok(None) };
                let answer =
                    mapping.end().map_err(|e| RegionError::new(Step::Map, Cause::System(e)));
                (answer.is_err().then(|| Memory::Mapped(Arc::new(mapping))), answer)
            }
            Some(Memory::Driver(mut block)) => {
                let answer =
                    block.end().map_err(|e| RegionError::new(Step::Register, Cause::Driver(e)));
                (answer.is_err().then_some(Memory::Driver(block)), answer)
            }
        };
        // Kept, and not tried again at once: what has been told to stay charged does.
        self.memory = left;
        answer
    }

    /// Ends the registrations and answers with the mapping; `None` if the driver keeps one, or a
    /// worker is at it.
    pub(super) fn into_mapping(mut self) -> Option<Mapping> {
        self.unregister().ok()?;
        match self.memory.take()? {
            Memory::Mapped(mapping) => Arc::into_inner(mapping),
            Memory::Driver(_) | Memory::Lent(_) => None,
        }
    }

    pub(super) fn close(mut self) -> Result<(), RegionError> {
        let ended = self.end().map(drop);
        // What is left would be tried once more by Drop, and might end after the error has been
        // told.
        if self.memory.is_some() {
            self.strand();
        }
        ended
    }

    pub(super) fn strand(&mut self) {
        strand(Remains::Backing(self.take()));
    }

    /// The same, for later: nothing is left here.
    pub(super) fn take(&mut self) -> Self {
        Self {
            registrations: mem::take(&mut self.registrations),
            reach: self.reach.take(),
            memory: self.memory.take(),
            gates: mem::take(&mut self.gates),
        }
    }
}

impl Drop for Backing {
    fn drop(&mut self) {
        if self.memory.is_none() {
            return;
        }
        if !self.is_idle() {
            // Whoever drops it did not ask to wait for the copies that are still on their way.
            retire(self.take());
        } else if self.end().is_err() && self.memory.is_some() {
            self.strand();
        }
    }
}

/// Something that would not end. Dropping it tries again, and puts it back here if it fails again.
#[derive(Debug)]
pub(super) enum Remains {
    Mapping(Mapping),
    DriverBlock(DriverBlock),
    Backing(Backing),
}

static STRANDED: AcrossForks<Vec<(u64, Remains)>> = AcrossForks::new(Of::Stranded, Vec::new());
static STRANDED_BYTES: AtomicU64 = AtomicU64::new(0);

fn stranded() -> Guard<'static, Vec<(u64, Remains)>> {
    STRANDED.lock()
}

pub(super) fn strand(remains: Remains) {
    let bytes = match &remains {
        Remains::Mapping(mapping) => mapping.span().len,
        Remains::DriverBlock(block) => block.span.len,
        Remains::Backing(backing) => backing.bytes() as usize,
    } as u64;
    STRANDED_BYTES.fetch_add(bytes, Ordering::Relaxed);
    stranded().push((bytes, remains));
}

/// Bytes of regions of this process that driver or kernel would not take back. They stay charged.
///
/// Its example is that of [`Region`](super::Region).
#[must_use]
pub fn stranded_bytes() -> u64 {
    STRANDED_BYTES.load(Ordering::Relaxed)
}

/// Tries again to give back what is stranded, and returns what still is, in bytes. Making a region
/// does it too, and every quiet point.
/// Blocks while devices are busy, if there is anything to do.
///
/// Its example is that of [`Region`](super::Region).
pub fn retry_stranded() -> u64 {
    if stranded_bytes() == 0 {
        return 0;
    }
    let waiting = mem::take(&mut *stranded());
    for (bytes, remains) in waiting {
        STRANDED_BYTES.fetch_sub(bytes, Ordering::Relaxed);
        // Its Drop tries, without the lock.
        drop(remains);
    }
    stranded_bytes()
}
