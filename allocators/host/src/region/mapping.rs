//! Memory of ours in the window, with its charge.
#![expect(unsafe_code, reason = "maps and unmaps its own range")]

use super::{
    PageTier,
    backing::{Remains, strand},
    stall::{Pages, Stall},
    window,
};
use crate::kernel::{Advice, Kernel, Span};
use aquifer_core::{Charge, SystemError};
use nix::libc;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// A range of the window and the memory in it.
///
/// Workers hold it while they populate, so the memory goes when the last of them is done with it,
/// whoever has given up waiting. The charge stands here for the same reason: it ends with the
/// memory.
#[derive(Debug)]
pub(super) struct Mapping {
    span: Span,
    kernel: Kernel,
    /// What the memory is of; `None` for memory of this process alone.
    file: Option<OwnedFd>,
    /// Whether memory is, or may be, mapped; the addresses alone are given back otherwise.
    mapped: bool,
    /// Whether it holds nothing but zeros yet. What others have written must not be written over.
    fresh: bool,
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
        align: usize,
        charge: Charge,
    ) -> Result<Self, (Charge, SystemError)> {
        match window::carve(kernel, bytes, align) {
            Ok(span) => Ok(Self {
                span,
                kernel: kernel.clone(),
                file: None,
                mapped: false,
                fresh: true,
                charge: Some(charge),
            }),
            Err(error) => Err((charge, error)),
        }
    }

    /// The file whose memory it is.
    pub(super) fn file(&self) -> Option<BorrowedFd<'_>> {
        self.file.as_ref().map(AsFd::as_fd)
    }

    pub(super) fn span(&self) -> Span {
        self.span
    }

    /// Maps fresh memory. A second call replaces what the first one mapped.
    pub(super) fn map(&mut self, tier: PageTier) -> Result<(), SystemError> {
        // SAFETY: 1. the range was carved for this mapping, and `&mut` says that no worker is at
        // it.
        unsafe { self.kernel.map(self.span, tier.map_pages())? };
        (self.mapped, self.fresh) = (true, true);
        self.file = None;
        Ok(())
    }

    /// Maps memory that other processes can map too: of a new file, or of `file`. A second call
    /// replaces what the first one mapped.
    pub(super) fn map_shared(
        &mut self,
        tier: PageTier,
        file: Option<OwnedFd>,
    ) -> Result<(), SystemError> {
        self.fresh = file.is_none();
        let file = match file {
            Some(file) => file,
            None => self.kernel.memory_file(self.span.len, tier.map_pages())?,
        };
        // SAFETY: 1. as above.
        unsafe { self.kernel.map_shared(self.span, file.as_fd())? };
        self.mapped = true;
        self.file = Some(file);
        Ok(())
    }

    pub(super) fn advise(&self, advice: Advice) -> Result<(), SystemError> {
        // SAFETY: 1. our own range.
        unsafe { self.kernel.advise(self.span, advice) }
    }

    /// Populates a part, which workers may do from several threads, each its own part.
    ///
    /// # Errors
    /// The kernel's. With huge pages of the pool there is no way around it: a page that is not
    /// there would be a signal.
    pub(super) fn populate(
        &self,
        offset: usize,
        len: usize,
        tier: PageTier,
        page: usize,
        stall: &Stall,
    ) -> Result<Populated, SystemError> {
        let len = len.min(self.span.len.saturating_sub(offset));
        let part = Span { start: self.span.start + offset, len };
        let pages = if tier == PageTier::Transparent { stall.next(len) } else { Pages::Base };
        if tier == PageTier::Transparent && pages == Pages::Base {
            // SAFETY: 1. our own range. A refusal leaves huge pages in it.
            let _ = unsafe { self.kernel.advise(part, Advice::NoHugePage) };
        }
        match self.kernel.populate(part) {
            Ok(took) => {
                stall.took(pages, len, took);
                Ok(Populated::ByKernel)
            }
            Err(e) if e.errno == libc::EINVAL && tier.page().is_none() && self.fresh => {
                // SAFETY: 1. inside our own mapping, which nobody has written yet: zeros over
                // zeros, by one worker each.
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
            // SAFETY: 1. our own range; `&mut` says that no worker is at it, and whoever used the
            // region has ended.
            unsafe { self.kernel.unmap(self.span)? };
            self.mapped = false;
        }
        self.file = None;
        window::give_back(self.span);
        Ok(self.charge.take())
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        if self.end().is_err() {
            let (span, kernel, file) = (self.span, self.kernel.clone(), self.file.take());
            strand(Remains::Mapping(Self {
                span,
                kernel,
                file,
                mapped: true,
                fresh: false,
                charge: self.charge.take(),
            }));
        }
    }
}
