//! What stands behind a region, and its end.
//!
//! Ending can fail: the driver keeps a registration, the kernel a mapping. Memory that the driver may still reach must
//! not be unmapped, nor its charge released, so what is left goes to a list of the process's, to be tried again.
#![expect(unsafe_code, reason = "ends registrations and driver allocations")]

use super::{Cause, Reach, RegionError, Step, mapping::Mapping, window};
use crate::kernel::{Span, pointer};
use aquifer_core::{Charge, DriverError};
use aquifer_driver::Relaxed;
use std::{
    mem,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
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
}

#[derive(Debug)]
pub(super) enum Memory {
    Mapped(Arc<Mapping>),
    Driver(DriverBlock),
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
    /// Answers for `span` from now on. If it could not be told from foreign memory later it is freed, and the charge
    /// comes back, unless the block was stranded with it.
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
        // SAFETY: 1. it came from this driver, and the charge says that it has not been freed. 2. whoever had the region
        // has ended.
        let freed = unsafe { self.reach.driver.host_free(self.reach.device, address) };
        freed.or_else(forgive)?;
        window::forget_outside(self.span);
        Ok(self.charge.take())
    }
}

impl Drop for DriverBlock {
    fn drop(&mut self) {
        if self.end().is_err() {
            let charge = self.charge.take();
            strand(Remains::DriverBlock(Self { span: self.span, reach: self.reach.clone(), charge }));
        }
    }
}

/// A driver that has gone, at the end of the process, has ended everything; and what it never heard of needs no end.
fn forgive(error: DriverError) -> Result<(), DriverError> {
    const NOT_INITIALIZED: u32 = 3;
    const DEINITIALIZED: u32 = 4;
    const NOT_REGISTERED: u32 = 713;
    match error.code {
        NOT_INITIALIZED | DEINITIALIZED | NOT_REGISTERED => Ok(()),
        _ => Err(error),
    }
}

impl Backing {
    pub(super) fn mapped(mapping: Arc<Mapping>, reach: Option<Reach>) -> Self {
        Self { registrations: Vec::new(), reach, memory: Some(Memory::Mapped(mapping)) }
    }

    pub(super) fn driver(block: DriverBlock) -> Self {
        Self { registrations: vec![block.span()], reach: None, memory: Some(Memory::Driver(block)) }
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
        let (Some(reach), Some(address)) = (&self.reach, pointer(part.start)) else { return Ok(()) };
        let _relaxed = Relaxed::enter(&*reach.driver);
        // SAFETY: 1. the part is populated and stays mapped until `unregister` has ended the registration.
        unsafe { reach.driver.host_register(reach.device, address, part.len, flags)? };
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
                // SAFETY: 1. the start of a registration that has not been ended. 2. whoever had the region has ended.
                let ended = unsafe { reach.driver.host_unregister(reach.device, address) };
                ended.or_else(forgive)?;
            }
            self.registrations.pop();
        }
        Ok(())
    }

    /// Ends everything and answers with the charge, if nobody else holds the memory.
    ///
    /// # Errors
    /// What would not end, which is stranded then.
    pub(super) fn end(&mut self) -> Result<Option<Charge>, RegionError> {
        self.unregister().map_err(|e| RegionError::new(Step::Register, Cause::Driver(e)))?;
        match self.memory.take() {
            None => Ok(None),
            Some(Memory::Mapped(mapping)) => match Arc::into_inner(mapping) {
                // A worker is at it still, and gives it back.
                None => Ok(None),
                Some(mut mapping) => mapping.end().map_err(|e| RegionError::new(Step::Map, Cause::System(e))),
            },
            Some(Memory::Driver(mut block)) => {
                block.end().map_err(|e| RegionError::new(Step::Register, Cause::Driver(e)))
            }
        }
    }

    /// Ends the registrations and answers with the mapping; `None` if the driver keeps one, or a worker is at it.
    pub(super) fn into_mapping(mut self) -> Option<Mapping> {
        self.unregister().ok()?;
        match self.memory.take()? {
            Memory::Mapped(mapping) => Arc::into_inner(mapping),
            Memory::Driver(_) => None,
        }
    }

    pub(super) fn close(mut self) -> Result<(), RegionError> {
        let ended = self.end().map(drop);
        // What is left would be tried once more by Drop, and might end after the error has been told.
        if self.memory.is_some() {
            self.strand();
        }
        ended
    }

    fn strand(&mut self) {
        strand(Remains::Backing(Self {
            registrations: mem::take(&mut self.registrations),
            reach: self.reach.take(),
            memory: self.memory.take(),
        }));
    }
}

impl Drop for Backing {
    fn drop(&mut self) {
        if self.memory.is_some() && self.end().is_err() && self.memory.is_some() {
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

static STRANDED: Mutex<Vec<(u64, Remains)>> = Mutex::new(Vec::new());
static STRANDED_BYTES: AtomicU64 = AtomicU64::new(0);

fn stranded() -> MutexGuard<'static, Vec<(u64, Remains)>> {
    STRANDED.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(super) fn strand(remains: Remains) {
    let bytes = match &remains {
        Remains::Mapping(mapping) => mapping.span().len,
        Remains::DriverBlock(block) => block.span.len,
        Remains::Backing(backing) => match &backing.memory {
            Some(Memory::Mapped(mapping)) => mapping.span().len,
            Some(Memory::Driver(block)) => block.span.len,
            None => 0,
        },
    } as u64;
    STRANDED_BYTES.fetch_add(bytes, Ordering::Relaxed);
    stranded().push((bytes, remains));
}

/// Bytes of regions of this process that driver or kernel would not take back. They stay charged.
#[must_use]
pub fn stranded_bytes() -> u64 {
    STRANDED_BYTES.load(Ordering::Relaxed)
}

/// Tries again to give back what is stranded, and answers with what still is, in bytes. Making a region does it too.
/// Blocks while devices are busy, if there is anything to do.
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
