//! Copies and fills.
#![expect(unsafe_code, reason = "implements copies between raw addresses")]

use crate::{
    Call, Copies, Pattern, Pitched, RawStream, Result, Rows,
    sim::{
        access_history::ActionKind,
        codes::{self, ErrorCode},
        machine::{Machine, StateGuard, error_of},
        machine_state::MachineState,
        pinned::HostMemoryKind,
        violation::{Finding, ViolationKind},
    },
    site::Site,
};
use std::ptr::NonNull;

impl MachineState {
    /// Classifies the host side of a copy. Refuses a copy across the end of a registration, or into
    /// a read-only one.
    pub(crate) fn classify_host_range(
        &mut self,
        (address, bytes): (u64, u64),
        kind: ActionKind,
        name: &'static str,
        site: Site,
    ) -> Result<HostMemoryKind, ErrorCode> {
        let side = self.pinned.classify(address, bytes);
        let protected = kind == ActionKind::Write
            && self.pinned.containing(address).is_some_and(|it| it.read_only);
        let kind = match side {
            HostMemoryKind::Straddling => ViolationKind::AcrossRegistrations,
            HostMemoryKind::Pinned if protected => ViolationKind::WriteToReadOnly,
            _ => return Ok(side),
        };
        if self.oracle {
            let action = self.current_host_action(ActionKind::Read, name, site);
            let mut findings = std::mem::take(&mut self.findings);
            let earlier = self.pinned.containing(address).map(|pinned| pinned.cause);
            findings.push(Finding { kind, earlier, address, bytes });
            self.report(findings, action, None);
        }
        Err(codes::INVALID_VALUE)
    }
}

/// Returns `bytes` as one row that begins at `start`.
fn one_row<T>(start: T, bytes: u64) -> (Pitched<T>, Rows) {
    (Pitched { start, pitch: bytes }, Rows { width: bytes, height: 1 })
}

// SAFETY: 1. and 2. A copy is one task of its stream's queue, and is checked before it is queued.
unsafe impl Copies for Machine {
    unsafe fn copy_to_device(
        &self,
        stream: RawStream,
        to: u64,
        from: NonNull<u8>,
        bytes: usize,
    ) -> Result<()> {
        let ((to, rows), (from, _)) = (one_row(to, bytes as u64), one_row(from, bytes as u64));
        // SAFETY: 1. and 2. are promised by the caller.
        unsafe { self.copy_rows_to_device(Call::CopyToDevice, stream, to, from, rows) }
    }

    unsafe fn copy_to_host(
        &self,
        stream: RawStream,
        to: NonNull<u8>,
        from: u64,
        bytes: usize,
    ) -> Result<()> {
        let ((to, rows), (from, _)) = (one_row(to, bytes as u64), one_row(from, bytes as u64));
        // SAFETY: 1. and 2. are promised by the caller.
        unsafe { self.copy_rows_to_host(Call::CopyToHost, stream, to, from, rows) }
    }

    unsafe fn copy_on_device(
        &self,
        stream: RawStream,
        to: u64,
        from: u64,
        bytes: u64,
    ) -> Result<()> {
        let ((to, rows), (from, _)) = (one_row(to, bytes), one_row(from, bytes));
        self.copy_rows_on_device(Call::CopyOnDevice, stream, to, from, rows)
    }

    unsafe fn copy_2d_to_device(
        &self,
        stream: RawStream,
        to: Pitched<u64>,
        from: Pitched<NonNull<u8>>,
        rows: Rows,
    ) -> Result<()> {
        // SAFETY: 1. and 2. are promised by the caller.
        unsafe { self.copy_rows_to_device(Call::Copy2d, stream, to, from, rows) }
    }

    unsafe fn copy_2d_to_host(
        &self,
        stream: RawStream,
        to: Pitched<NonNull<u8>>,
        from: Pitched<u64>,
        rows: Rows,
    ) -> Result<()> {
        // SAFETY: 1. and 2. are promised by the caller.
        unsafe { self.copy_rows_to_host(Call::Copy2d, stream, to, from, rows) }
    }

    unsafe fn copy_2d_on_device(
        &self,
        stream: RawStream,
        to: Pitched<u64>,
        from: Pitched<u64>,
        rows: Rows,
    ) -> Result<()> {
        self.copy_rows_on_device(Call::Copy2d, stream, to, from, rows)
    }

    unsafe fn fill_with(
        &self,
        stream: RawStream,
        to: u64,
        pattern: Pattern,
        count: u64,
    ) -> Result<()> {
        let pitch = count.saturating_mul(pattern.bytes());
        let (call, _) = Call::fill_calls(pattern);
        let rows = Rows { width: count, height: 1 };
        self.fill_rows(call, stream, Pitched { start: to, pitch }, pattern, rows)
    }

    unsafe fn fill_2d(
        &self,
        stream: RawStream,
        to: Pitched<u64>,
        pattern: Pattern,
        rows: Rows,
    ) -> Result<()> {
        let (_, call) = Call::fill_calls(pattern);
        self.fill_rows(call, stream, to, pattern, rows)
    }
}

impl Machine {
    /// Makes a call that queues work and returns. `queue` is called with the stream's index.
    pub(crate) fn queue_call<'a>(
        &'a self,
        call: Call,
        stream: RawStream,
        queue: impl FnOnce(StateGuard<'a>, usize) -> Result<StateGuard<'a>, ErrorCode>,
    ) -> Result<()> {
        let mut state = self.enter(call, Some(stream.device()))?;
        let index = state.stream(stream).map_err(error_of(call))?;
        drop(queue(state, index).map_err(error_of(call))?);
        Ok(())
    }
}
