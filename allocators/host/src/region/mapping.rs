//! Memory of ours in the window, with its charge.
#![expect(unsafe_code, reason = "maps and unmaps its own range")]

use super::{
    PageTier,
    backing::{Remains, strand},
    window,
};
use crate::kernel::{Advice, Kernel, MapPages, Span};
use aquifer_core::{Charge, SystemError};
use nix::libc;

/// A range of the window and the memory in it.
///
/// Workers hold it while they populate, so the memory goes when the last of them is done with it, whoever has given up
/// waiting. The charge stands here for the same reason: it ends with the memory.
#[derive(Debug)]
pub(super) struct Mapping {
    span: Span,
    kernel: Kernel,
    /// Whether memory is, or may be, mapped; the addresses alone are given back otherwise.
    mapped: bool,
    /// `None` after [`Mapping::end`].
    charge: Option<Charge>,
}

/// How a piece was populated.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Populated {
    ByKernel,
    /// The kernel is too old; each page was written.
    ByTouch,
}

impl Mapping {
    /// Addresses for `charge`'s bytes. Gives the charge back if there are none.
    pub(super) fn reserve(
        kernel: &Kernel,
        bytes: usize,
        charge: Charge,
    ) -> Result<Self, (Charge, SystemError)> {
        match window::carve(kernel, bytes) {
            Ok(span) => Ok(Self { span, kernel: kernel.clone(), mapped: false, charge: Some(charge) }),
            Err(error) => Err((charge, error)),
        }
    }

    pub(super) fn span(&self) -> Span {
        self.span
    }

    /// Maps fresh memory. A second call replaces what the first one mapped.
    pub(super) fn map(&mut self, tier: PageTier) -> Result<(), SystemError> {
        let pages = match tier {
            PageTier::HugeTlb => MapPages::Huge2M,
            _ => MapPages::Ordinary,
        };
        // SAFETY: 1. the range was carved for this mapping, and `&mut` says that no worker is at it.
        unsafe { self.kernel.map(self.span, pages)? };
        self.mapped = true;
        Ok(())
    }

    pub(super) fn advise(&self, advice: Advice) -> Result<(), SystemError> {
        // SAFETY: 1. our own range.
        unsafe { self.kernel.advise(self.span, advice) }
    }

    /// Populates a part, which workers may do from several threads, each its own part.
    ///
    /// # Errors
    /// The kernel's. With huge pages of the pool there is no way around it: a page that is not there would be a signal.
    pub(super) fn populate(
        &self,
        offset: usize,
        len: usize,
        tier: PageTier,
        page: usize,
    ) -> Result<Populated, SystemError> {
        let len = len.min(self.span.len.saturating_sub(offset));
        let part = Span { start: self.span.start + offset, len };
        match self.kernel.populate(part) {
            Ok(()) => Ok(Populated::ByKernel),
            Err(e) if e.errno == libc::EINVAL && tier != PageTier::HugeTlb && self.mapped => {
                // SAFETY: 1. inside our own mapping, which nobody has written yet: zeros over zeros, by one worker each.
                // 2. not huge pages of the pool.
                unsafe { self.kernel.touch(part, page) };
                Ok(Populated::ByTouch)
            }
            Err(e) => Err(e),
        }
    }

    /// Gives memory and addresses back, and answers with the charge.
    ///
    /// # Errors
    /// The kernel's: everything stays, and is stranded when this is dropped.
    pub(super) fn end(&mut self) -> Result<Option<Charge>, SystemError> {
        if self.charge.is_none() {
            return Ok(None);
        }
        if self.mapped {
            // SAFETY: 1. our own range; `&mut` says that no worker is at it, and whoever used the region has ended.
            unsafe { self.kernel.unmap(self.span)? };
            self.mapped = false;
        }
        window::give_back(self.span);
        Ok(self.charge.take())
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        if self.end().is_err() {
            let (span, kernel) = (self.span, self.kernel.clone());
            strand(Remains::Mapping(Self { span, kernel, mapped: true, charge: self.charge.take() }));
        }
    }
}
