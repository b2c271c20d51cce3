//! A range of the window, with its memory and its charge, and memory whose release failed.
#![expect(unsafe_code, reason = "maps and unmaps its own range")]

use super::{
    PageTier,
    stall_detector::{Pages, StallDetector},
    window,
};
use crate::kernel::{Advice, Kernel, Span};
use aquifer_core::{Charge, SystemError};
use nix::libc;
use std::{
    any::Any,
    mem,
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

/// A range of the window and the memory in it.
///
/// Workers hold a reference while they populate. So the memory is released when the last worker is
/// done, even if no caller waits any more. The charge is stored here because it must end with the
/// memory.
#[derive(Debug)]
pub(super) struct Mapping {
    span: Span,
    kernel: Kernel,
    /// Whether the children of a fork have the same pages.
    inherited: bool,
    /// Whether memory is, or may be, mapped. Otherwise only the addresses are released.
    mapped: bool,
    /// `None` after [`Mapping::release`].
    charge: Option<Charge>,
}

/// How a piece was populated.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum PopulateMethod {
    ByKernel,
    /// The kernel is too old, so each page was written.
    ByTouch,
}

impl Mapping {
    /// Reserves addresses for the bytes of `charge`. Returns the charge on failure.
    pub(super) fn reserve(
        kernel: &Kernel,
        bytes: usize,
        charge: Charge,
    ) -> Result<Self, (Charge, SystemError)> {
        match window::carve(kernel, bytes) {
            Ok(span) => Ok(Self {
                span,
                kernel: kernel.clone(),
                inherited: false,
                mapped: false,
                charge: Some(charge),
            }),
            Err(error) => Err((charge, error)),
        }
    }

    pub(super) fn span(&self) -> Span {
        self.span
    }

    /// Maps new memory, and replaces an earlier mapping.
    pub(super) fn map(&mut self, tier: PageTier, inherited: bool) -> Result<(), SystemError> {
        let pages = tier.map_pages();
        // SAFETY: 1. the range was carved for this mapping, and `&mut` proves that no worker uses
        // it.
        unsafe {
            match inherited {
                false => self.kernel.map(self.span, pages)?,
                true => self.kernel.map_for_children(self.span, pages)?,
            }
        }
        (self.mapped, self.inherited) = (true, inherited);
        Ok(())
    }

    pub(super) fn advise(&self, advice: Advice) -> Result<(), SystemError> {
        // SAFETY: 1. the range belongs to this mapping. 2. no caller passes `Remove`.
        unsafe { self.kernel.advise(self.span, advice) }
    }

    /// Populates a part. Several workers may do this concurrently, for disjoint parts.
    ///
    /// # Errors
    /// Those of the kernel. There is no fallback for huge pages of the pool, since touching an
    /// unavailable page raises a signal.
    pub(super) fn populate(
        &self,
        offset: usize,
        len: usize,
        tier: PageTier,
        page: usize,
        stall: &StallDetector,
    ) -> Result<PopulateMethod, SystemError> {
        let len = len.min(self.span.len.saturating_sub(offset));
        let part = Span { start: self.span.start + offset, len };
        let pages = if tier == PageTier::Transparent { stall.next(len) } else { Pages::Base };
        if tier == PageTier::Transparent && pages == Pages::Base {
            // SAFETY: 1. the range belongs to this mapping. On failure it keeps huge pages.
            let _ = unsafe { self.kernel.advise(part, Advice::NoHugePage) };
        }
        match self.kernel.populate(part) {
            Ok(took) => {
                stall.record(pages, len, took);
                Ok(PopulateMethod::ByKernel)
            }
            Err(e) if e.errno == libc::EINVAL && tier.page().is_none() => {
                // SAFETY: 1. inside this mapping, which has not been written yet: zeros are written
                // over zeros, each page by one worker. 2. not huge pages of the pool.
                unsafe { self.kernel.touch(part, page) };
                Ok(PopulateMethod::ByTouch)
            }
            Err(e) => Err(e),
        }
    }

    /// Releases memory and addresses, and returns the charge.
    ///
    /// # Errors
    /// Those of the kernel. Everything is kept, and is stranded when this is dropped.
    pub(super) fn release(&mut self) -> Result<Option<Charge>, SystemError> {
        if self.charge.is_none() {
            return Ok(None);
        }
        if self.mapped {
            if self.inherited {
                // Children would keep the pages. Where the kernel refuses, they do.
                // SAFETY: 1. the range belongs to this mapping. 2. the region is no longer in use.
                let _ = unsafe { self.kernel.advise(self.span, Advice::Remove) };
            }
            // SAFETY: 1. the range belongs to this mapping, `&mut` proves that no worker uses it,
            // and the region is no longer in use.
            unsafe { self.kernel.unmap(self.span)? };
            self.mapped = false;
        }
        window::release(self.span);
        Ok(self.charge.take())
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        if self.release().is_err() {
            let (span, kernel, inherited) = (self.span, self.kernel.clone(), self.inherited);
            let charge = self.charge.take();
            strand(span.len as u64, Self { span, kernel, inherited, mapped: true, charge });
        }
    }
}

/// Something whose release failed. Dropping it tries again, and strands it again on failure.
type StrandedMemory = Box<dyn Any + Send>;

static STRANDED: Mutex<Vec<(u64, StrandedMemory)>> = Mutex::new(Vec::new());
static STRANDED_BYTES: AtomicU64 = AtomicU64::new(0);

fn stranded() -> MutexGuard<'static, Vec<(u64, StrandedMemory)>> {
    STRANDED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Keeps `memory` of this many bytes, whose drop retries its release.
pub(super) fn strand(bytes: u64, memory: impl Any + Send) {
    let memory: StrandedMemory = Box::new(memory);
    STRANDED_BYTES.fetch_add(bytes, Ordering::Relaxed);
    stranded().push((bytes, memory));
}

/// Returns the bytes of this process's regions that the driver or the kernel refused to release.
/// They stay charged.
///
/// See [`Region`](super::Region) for an example.
#[must_use]
pub fn stranded_bytes() -> u64 {
    STRANDED_BYTES.load(Ordering::Relaxed)
}

/// Tries again to release stranded memory, and returns the bytes that are still stranded.
///
/// Creating a region and every quiet point do this too. Blocks while devices are busy, if anything
/// is stranded.
///
/// See [`Region`](super::Region) for an example.
pub fn retry_stranded() -> u64 {
    if stranded_bytes() == 0 {
        return 0;
    }
    let waiting = mem::take(&mut *stranded());
    for (bytes, memory) in waiting {
        STRANDED_BYTES.fetch_sub(bytes, Ordering::Relaxed);
        // Its `Drop` tries again, without the lock.
        drop(memory);
    }
    stranded_bytes()
}
