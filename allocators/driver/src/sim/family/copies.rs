//! Copies and fills.
#![expect(unsafe_code, reason = "implements copies between raw addresses")]

use crate::{
    Call, Copies, DeviceRange, HostAccess, Pattern, RawStream, Result, Rows,
    sim::{
        access_history::ActionKind,
        address_space::DeviceUse,
        codes::{self, ErrorCode},
        machine::{Machine, StateGuard, caller_site, error_of},
        machine_state::MachineState,
        pinned::HostMemoryKind,
        queue::{HostUse, Task, Work},
        store::Store,
        violation::{Finding, ViolationKind},
    },
    site::Site,
};
use std::{ptr::NonNull, sync::Arc};

/// The longest pitch that an H200 accepts (`CU_DEVICE_ATTRIBUTE_MAX_PITCH`).
const LONGEST_PITCH: u64 = (1 << 31) - 1;

/// A copy or fill.
pub(crate) struct CopyWork {
    /// The uses on a device.
    pub(crate) uses: Vec<DeviceUse>,
    to: u64,
    from: CopySource,
    bytes: u64,
}

/// The source of a copy or fill.
enum CopySource {
    /// Memory of a device, or pinned memory.
    Address(u64),
    /// Rows of a device's memory.
    Rows(u64, Rows),
    /// The bytes of pageable memory at the time the copy was queued.
    Staged(Box<[u8]>),
    /// A pattern.
    Pattern(Pattern),
}

impl CopyWork {
    /// Returns whether this is a fill and not a copy.
    pub(crate) fn is_fill(&self) -> bool {
        matches!(self.from, CopySource::Pattern(_))
    }

    /// # Safety
    /// 1. With bytes, the source is readable and the destination writable.
    /// 2. There is no other access to the destination, and no write to the source, during the call.
    pub(crate) unsafe fn execute(&self, store: &Store) {
        match &self.from {
            // SAFETY: 1. and 2. are promised by the caller.
            CopySource::Address(from) => unsafe { store.copy(self.to, *from, self.bytes) },
            CopySource::Rows(from, rows) => {
                for (to, of) in rows.offsets() {
                    // SAFETY: 1. and 2. are promised by the caller.
                    unsafe { store.copy(self.to + to, from + of, rows.width) }
                }
            }
            // SAFETY: 1. There are as many staged bytes. The caller promises the rest, and 2.
            CopySource::Staged(bytes) => unsafe {
                store.copy(self.to, bytes.as_ptr() as u64, self.bytes);
            },
            // SAFETY: 1. and 2. are promised by the caller, and the alignment of the address was
            // checked.
            CopySource::Pattern(pattern) => unsafe { store.fill(self.to, *pattern, self.bytes) },
        }
    }
}

/// Returns the access of a copy to host memory, or none to memory that is not pinned.
fn host_uses(pinned: bool, address: u64, bytes: u64, kind: ActionKind) -> Vec<HostUse> {
    if pinned && bytes > 0 { vec![HostUse { address, bytes, kind }] } else { Vec::new() }
}

impl MachineState {
    /// Classifies the host side of a copy. Refuses a copy across the end of a registration.
    pub(crate) fn classify_host_range(
        &mut self,
        (address, bytes): (u64, u64),
        name: &'static str,
        site: Site,
    ) -> Result<HostMemoryKind, ErrorCode> {
        let side = self.pinned.classify(address, bytes);
        if side != HostMemoryKind::Straddling {
            return Ok(side);
        }
        if self.oracle {
            let action = self.current_host_action(ActionKind::Read, name, site);
            let mut findings = Vec::new();
            let earlier = self.pinned.containing(address).map(|pinned| pinned.cause);
            let kind = ViolationKind::AcrossRegistrations;
            findings.push(Finding { kind, earlier, address, bytes });
            self.report(findings, action, None);
        }
        Err(codes::INVALID_VALUE)
    }

    /// Returns the device side of a copy on a stream. Access by any device is sufficient for
    /// copies.
    fn copy_use(&self, stream: usize, address: u64, bytes: u64, writes: bool) -> Vec<DeviceUse> {
        let device = self.space.device_of(address).unwrap_or(self.streams[stream].device);
        let range = DeviceRange { device, address, bytes };
        let u = DeviceUse { range, writes, generation: None, devices: u64::MAX };
        if bytes > 0 { vec![u] } else { Vec::new() }
    }
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
        let (name, site) = ("copy to the device", caller_site());
        let (start, length) = (from.as_ptr() as u64, bytes as u64);
        self.queue_call(Call::CopyToDevice, stream, |mut state, stream| {
            let pinned =
                state.classify_host_range((start, length), name, site)? == HostMemoryKind::Pinned;
            let uses = state.copy_use(stream, to, length, true);
            // A captured copy reads host memory when it is launched, pinned or not.
            let staged = !pinned && state.streams[stream].capture.is_none();
            let from = if staged && bytes > 0 && state.space.store.has_bytes() {
                // SAFETY: 1. The caller promises that the range is readable and is not written.
                CopySource::Staged(
                    unsafe { std::slice::from_raw_parts(from.as_ptr(), bytes) }.into(),
                )
            } else {
                CopySource::Address(start)
            };
            let host = host_uses(pinned, start, length, ActionKind::Read);
            let work = Work::Copy(Arc::new(CopyWork { uses, to, from, bytes: length }));
            let mut state = self.submit(state, stream, Task { name, site, host, work })?;
            if staged {
                // The host reads before the call returns.
                state.check_host_access(start, length, HostAccess::Read, Some(site), site);
            }
            Ok(state)
        })
    }

    /// For pageable memory the driver returns when the bytes have arrived.
    unsafe fn copy_to_host(
        &self,
        stream: RawStream,
        to: NonNull<u8>,
        from: u64,
        bytes: usize,
    ) -> Result<()> {
        let (name, site, device) = ("copy to the host", caller_site(), stream.device());
        let (to, bytes) = (to.as_ptr() as u64, bytes as u64);
        self.queue_call(Call::CopyToHost, stream, |mut state, stream| {
            let pinned =
                state.classify_host_range((to, bytes), name, site)? == HostMemoryKind::Pinned;
            let uses = state.copy_use(stream, from, bytes, false);
            let host = host_uses(pinned, to, bytes, ActionKind::Write);
            let from = CopySource::Address(from);
            let work = Work::Copy(Arc::new(CopyWork { uses, to, from, bytes }));
            let mut state = self.submit(state, stream, Task { name, site, host, work })?;
            if !pinned && state.streams[stream].capture.is_none() {
                let point = state.point(stream);
                state = self.run_until(state, point.stream, point.count);
                state.device(device)?;
                state.order_host_after(&point.clock);
            }
            Ok(state)
        })
    }

    unsafe fn copy_on_device(
        &self,
        stream: RawStream,
        to: u64,
        from: u64,
        bytes: u64,
    ) -> Result<()> {
        let site = caller_site();
        self.queue_call(Call::CopyOnDevice, stream, |state, stream| {
            let mut uses = state.copy_use(stream, from, bytes, false);
            uses.append(&mut state.copy_use(stream, to, bytes, true));
            let from = CopySource::Address(from);
            let work = Work::Copy(Arc::new(CopyWork { uses, to, from, bytes }));
            self.submit(state, stream, Task::new("copy on the device", site, work))
        })
    }

    unsafe fn copy_rows(&self, stream: RawStream, to: u64, from: u64, rows: Rows) -> Result<()> {
        let site = caller_site();
        self.queue_call(Call::CopyRows, stream, |state, stream| {
            let spans = (rows.span(rows.from_pitch), rows.span(rows.to_pitch));
            let longest = rows.from_pitch.max(rows.to_pitch);
            let (Some(_), Some(bytes), true) = (spans.0, spans.1, longest <= LONGEST_PITCH) else {
                return Err(codes::INVALID_VALUE);
            };
            let mut uses = Vec::new();
            for (to_row, from_row) in rows.offsets() {
                let (to, from) = (to.saturating_add(to_row), from.saturating_add(from_row));
                uses.append(&mut state.copy_use(stream, from, rows.width, false));
                uses.append(&mut state.copy_use(stream, to, rows.width, true));
            }
            let from = CopySource::Rows(from, rows);
            let work = Work::Copy(Arc::new(CopyWork { uses, to, from, bytes }));
            self.submit(state, stream, Task::new("copy of rows", site, work))
        })
    }

    unsafe fn fill_with(
        &self,
        stream: RawStream,
        to: u64,
        pattern: Pattern,
        count: u64,
    ) -> Result<()> {
        let (site, element) = (caller_site(), pattern.bytes());
        self.queue_call(Call::of_fill(pattern), stream, |state, stream| {
            let bytes = count.checked_mul(element).ok_or(codes::INVALID_VALUE)?;
            if !to.is_multiple_of(element) {
                return Err(codes::INVALID_VALUE);
            }
            let uses = state.copy_use(stream, to, bytes, true);
            let from = CopySource::Pattern(pattern);
            let work = Work::Copy(Arc::new(CopyWork { uses, to, from, bytes }));
            self.submit(state, stream, Task::new("fill", site, work))
        })
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
