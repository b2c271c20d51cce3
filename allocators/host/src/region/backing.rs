//! The resources behind a region, and their release, now or at a quiet point.
//!
//! A release can fail, because the driver keeps a registration or the kernel keeps a mapping.
//! Memory that the driver may still access must not be unmapped, and its charge must not be
//! released. Such memory is kept in a process-wide list of stranded memory, and its release is
//! retried.
#![expect(unsafe_code, reason = "ends registrations and driver allocations")]

use super::{
    Cause, Reach, RegionError,
    mapping::{Mapping, retry_stranded, strand, stranded_bytes},
};
use crate::kernel::{Span, is_forked_child, pointer};
use aquifer_core::{Charge, DriverError};
use aquifer_driver::{Driver, Relaxed};
use std::{
    mem,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

/// Memory, its registrations and its charge.
#[derive(Debug)]
pub(super) struct Backing {
    /// Live registrations in address order. They are ended from the back.
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
    /// `None` after the memory has been freed.
    charge: Option<Charge>,
}

impl DriverBlock {
    pub(super) fn new(span: Span, reach: Reach, charge: Charge) -> Self {
        Self { span, reach, charge: Some(charge) }
    }

    pub(super) fn span(&self) -> Span {
        self.span
    }

    fn release(&mut self) -> Result<Option<Charge>, DriverError> {
        if self.charge.is_none() {
            return Ok(None);
        }
        let Some(address) = pointer(self.span.start) else { return Ok(self.charge.take()) };
        let _relaxed = Relaxed::enter(&*self.reach.driver);
        // SAFETY: 1. it was allocated by this driver, and the charge proves that it has not been
        // freed. 2. the region is no longer in use.
        let free = |driver: &dyn Driver, device| unsafe { driver.host_free(device, address) };
        self.reach.call(free).or_else(ignore_benign)?;
        Ok(self.charge.take())
    }
}

impl Drop for DriverBlock {
    fn drop(&mut self) {
        if self.release().is_err() {
            let charge = self.charge.take();
            let block = Self { span: self.span, reach: self.reach.clone(), charge };
            strand(self.span.len as u64, block);
        }
    }
}

/// Ignores errors that need no action: a driver that is gone at process exit has released
/// everything, and unregistered memory needs no unregistration.
fn ignore_benign(error: DriverError) -> Result<(), DriverError> {
    const NOT_REGISTERED: u32 = 713;
    if error.is_driver_gone() || error.code == NOT_REGISTERED { Ok(()) } else { Err(error) }
}

impl Backing {
    pub(super) fn mapped(mapping: Arc<Mapping>, reach: Option<Reach>) -> Self {
        Self { registrations: Vec::new(), reach, memory: Some(Memory::Mapped(mapping)) }
    }

    pub(super) fn driver(block: DriverBlock) -> Self {
        let registrations = vec![block.span()];
        Self { registrations, reach: None, memory: Some(Memory::Driver(block)) }
    }

    /// Returns the number of charged bytes.
    pub(super) fn bytes(&self) -> u64 {
        let span = match &self.memory {
            Some(Memory::Mapped(mapping)) => mapping.span(),
            Some(Memory::Driver(block)) => block.span,
            None => return 0,
        };
        span.len as u64
    }

    pub(super) fn registrations(&self) -> &[Span] {
        &self.registrations
    }

    /// Registers a part, which must lie after all registered parts.
    ///
    /// # Errors
    /// Those of the driver. The part is then not registered.
    pub(super) fn register(&mut self, part: Span) -> Result<(), DriverError> {
        let (Some(reach), Some(address)) = (&self.reach, pointer(part.start)) else {
            return Ok(());
        };
        debug_assert!(
            self.registrations.last().is_none_or(|last| last.end() <= part.start),
            "the parts are registered in order"
        );
        let _relaxed = Relaxed::enter(&*reach.driver);
        // SAFETY: 1. the part is populated and stays mapped until `unregister` has ended the
        // registration.
        reach.call(|driver, device| unsafe { driver.host_register(device, address, part.len) })?;
        self.registrations.push(part);
        Ok(())
    }

    /// Ends the registrations, the last one first. Memory that the driver allocated has none of its
    /// own.
    fn unregister(&mut self) -> Result<(), DriverError> {
        let Some(reach) = &self.reach else {
            self.registrations.clear();
            return Ok(());
        };
        let _relaxed = Relaxed::enter(&*reach.driver);
        while let Some(part) = self.registrations.last() {
            if let Some(address) = pointer(part.start) {
                // SAFETY: 1. the start of a registration that has not been ended. 2. the region is
                // no longer in use.
                let ended =
                    reach.call(|driver, device| unsafe { driver.host_unregister(device, address) });
                ended.or_else(ignore_benign)?;
            }
            self.registrations.pop();
        }
        Ok(())
    }

    /// Releases everything, and returns the charge unless the memory has another holder.
    ///
    /// # Errors
    /// The failed release. The memory is then stranded.
    pub(super) fn release(&mut self) -> Result<Option<Charge>, RegionError> {
        self.unregister().map_err(|e| RegionError::new(Cause::Driver(e)))?;
        let (left, answer) = match self.memory.take() {
            None => return Ok(None),
            Some(Memory::Mapped(mapping)) => {
                // A worker still uses the mapping, and releases it.
                let Some(mut mapping) = Arc::into_inner(mapping) else { return Ok(None) };
                let answer = mapping.release().map_err(|e| RegionError::new(Cause::System(e)));
                (answer.is_err().then(|| Memory::Mapped(Arc::new(mapping))), answer)
            }
            Some(Memory::Driver(mut block)) => {
                let answer = block.release().map_err(|e| RegionError::new(Cause::Driver(e)));
                (answer.is_err().then_some(Memory::Driver(block)), answer)
            }
        };
        // Kept for a later retry: its charge must stay, as the error reports.
        self.memory = left;
        answer
    }

    /// Ends the registrations and returns the mapping. Returns `None` if the driver keeps a
    /// registration, or a worker still uses the mapping.
    pub(super) fn into_mapping(mut self) -> Option<Mapping> {
        self.unregister().ok()?;
        match self.memory.take()? {
            Memory::Mapped(mapping) => Arc::into_inner(mapping),
            Memory::Driver(_) => None,
        }
    }

    pub(super) fn close(mut self) -> Result<(), RegionError> {
        let ended = self.release().map(drop);
        // `Drop` would retry the release, and could succeed after an error has been reported.
        if self.memory.is_some() {
            self.strand();
        }
        ended
    }

    pub(super) fn strand(&mut self) {
        strand(self.bytes(), self.take());
    }

    /// Moves everything out, for a later release.
    pub(super) fn take(&mut self) -> Self {
        Self {
            registrations: mem::take(&mut self.registrations),
            reach: self.reach.take(),
            memory: self.memory.take(),
        }
    }
}

impl Drop for Backing {
    fn drop(&mut self) {
        if self.memory.is_some() && self.release().is_err() && self.memory.is_some() {
            self.strand();
        }
    }
}

/// Backings that are no longer used and not yet released. Ending a registration makes the driver
/// wait for the whole device, so it is deferred while a program is busy. Retired memory stays
/// mapped, registered and charged until a quiet point.
static RETIRED: Mutex<Vec<Backing>> = Mutex::new(Vec::new());
/// The bytes that it holds.
static RETIRED_BYTES: AtomicU64 = AtomicU64::new(0);

fn retired() -> MutexGuard<'static, Vec<Backing>> {
    RETIRED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Keeps the backing until a quiet point.
pub(super) fn retire(backing: Backing) {
    debug_assert!(backing.memory.is_some(), "nothing is left to release");
    RETIRED_BYTES.fetch_add(backing.bytes(), Ordering::Relaxed);
    retired().push(backing);
}

/// Returns the bytes that wait for [`end_retired`]. They stay charged.
#[must_use]
pub fn retired_bytes() -> u64 {
    RETIRED_BYTES.load(Ordering::Relaxed)
}

/// Releases retired and stranded memory, and returns the number of released bytes.
///
/// This includes everything that was [retired](super::Region::retire), and
/// [stranded memory](super::retry_stranded). Memory that the driver refuses to release is stranded
/// and not counted.
///
/// Call this at quiet points: it blocks until devices are idle, if there is anything to do. It also
/// runs before a budget refuses a new region.
///
/// ```
/// use aquifer_core::Budget;
/// use aquifer_host::{kernel::Kernel, region::{self, Host, Region, RegionRequest}, topology::Topology};
/// let host = Host::new(Topology::read()?, Kernel::new());
/// let budget = Budget::new("pinned", 1 << 20);
/// Region::new(&host, &budget, &RegionRequest::bytes(1 << 20))?.retire();
/// assert_eq!(budget.remaining(), 0);
/// region::end_retired();
/// assert_eq!(budget.used(), 0);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn end_retired() -> u64 {
    if is_forked_child() {
        return 0;
    }
    let stranded = stranded_bytes();
    let retried = stranded.saturating_sub(retry_stranded());
    if retired_bytes() == 0 {
        return retried;
    }
    let waiting = mem::take(&mut *retired());
    RETIRED_BYTES.fetch_sub(waiting.iter().map(Backing::bytes).sum(), Ordering::Relaxed);
    // Each is released, or stranded, without the lock.
    let end = |backing: Backing| {
        let bytes = backing.bytes();
        if backing.close().is_ok() { bytes } else { 0 }
    };
    retried + waiting.into_iter().map(end).sum::<u64>()
}
