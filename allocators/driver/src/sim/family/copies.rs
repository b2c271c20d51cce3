//! Copies and fills.
#![expect(unsafe_code, reason = "implements copies between raw addresses")]

use crate::{
    Call, Copies, DeviceId, DeviceRange, Pattern, Pitched, RawStream, Result, Rows,
    sim::{
        access_history::ActionKind,
        address_space::DeviceUse,
        codes::{self, ErrorCode},
        machine::{Machine, StateGuard, caller_site, error_of},
        machine_state::MachineState,
        pinned::HostMemoryKind,
        queue::{HostUse, Task, Work},
        violation::{Finding, ViolationKind},
    },
    site::Site,
};
use std::ptr::NonNull;

/// Returns the device side of a copy. Access by any device is sufficient for copies.
pub(crate) fn copy_use(device: DeviceId, address: u64, bytes: u64, writes: bool) -> DeviceUse {
    DeviceUse {
        range: DeviceRange { device, address, bytes },
        writes,
        generation: None,
        devices: u64::MAX,
    }
}

/// Returns the host access of a copy's pinned side. Memory that is not pinned has none.
pub(crate) fn pinned_uses(
    pinned: bool,
    address: u64,
    bytes: u64,
    kind: ActionKind,
) -> Vec<HostUse> {
    if pinned { vec![HostUse { address, bytes, kind, by_device: true }] } else { Vec::new() }
}

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

impl Machine {
    /// Queues a copy to the device. Returns whether its host side is pinned.
    ///
    /// # Safety
    /// As of [`Copies::copy_to_device`].
    pub(crate) unsafe fn queue_to_device<'a>(
        &'a self,
        mut state: StateGuard<'a>,
        stream: usize,
        to: u64,
        from: NonNull<u8>,
        bytes: usize,
        site: Site,
    ) -> Result<(StateGuard<'a>, bool), ErrorCode> {
        let name = "copy to the device";
        let address = from.as_ptr() as u64;
        let pinned =
            state.classify_host_range((address, bytes as u64), ActionKind::Read, name, site)?
                == HostMemoryKind::Pinned;
        let device = state.streams[stream].device;
        let to = copy_use(device, to, bytes as u64, true);
        // A captured copy reads host memory when it is launched, pinned or not.
        let staged = !pinned && state.streams[stream].capture.is_none();
        let work = if staged && state.space.store.has_bytes() {
            // SAFETY: 1. The caller promises that `from` is readable for `bytes` and is not
            // written.
            let staged = unsafe { std::slice::from_raw_parts(from.as_ptr(), bytes) };
            Work::CopyFromStaging { to, from: staged.into() }
        } else {
            Work::CopyFromHost { to, from: address }
        };
        let host = pinned_uses(pinned, address, bytes as u64, ActionKind::Read);
        let mut state = self.submit(state, stream, Task { name, site, host, work })?;
        if staged {
            // The host reads before the call returns.
            state.check_host_access(
                address,
                bytes as u64,
                crate::HostAccess::Read,
                Some(site),
                site,
            );
        }
        Ok((state, pinned))
    }

    /// Queues a copy to the host. Returns whether its host side is pinned.
    ///
    /// # Safety
    /// As of [`Copies::copy_to_host`].
    pub(crate) unsafe fn queue_to_host<'a>(
        &'a self,
        mut state: StateGuard<'a>,
        stream: usize,
        to: NonNull<u8>,
        from: u64,
        bytes: usize,
        site: Site,
    ) -> Result<(StateGuard<'a>, bool), ErrorCode> {
        let name = "copy to the host";
        let address = to.as_ptr() as u64;
        let pinned =
            state.classify_host_range((address, bytes as u64), ActionKind::Write, name, site)?
                == HostMemoryKind::Pinned;
        let device = state.streams[stream].device;
        let from = copy_use(device, from, bytes as u64, false);
        let work = Work::CopyToHost { to: address, from };
        let host = pinned_uses(pinned, address, bytes as u64, ActionKind::Write);
        Ok((self.submit(state, stream, Task { name, site, host, work })?, pinned))
    }

    /// Queues a copy on the device.
    pub(crate) fn queue_on_device<'a>(
        &'a self,
        state: StateGuard<'a>,
        stream: usize,
        to: u64,
        from: u64,
        bytes: u64,
        site: Site,
    ) -> Result<StateGuard<'a>, ErrorCode> {
        let own_device = state.streams[stream].device;
        let device = |address| state.space.device_of(address).unwrap_or(own_device);
        let (to, from) =
            (copy_use(device(to), to, bytes, true), copy_use(device(from), from, bytes, false));
        self.submit(
            state,
            stream,
            Task::new("copy on the device", site, Work::CopyOnDevice([from, to])),
        )
    }

    /// Queues a fill.
    pub(crate) fn queue_fill<'a>(
        &'a self,
        state: StateGuard<'a>,
        stream: usize,
        to: u64,
        pattern: Pattern,
        count: u64,
        site: Site,
    ) -> Result<StateGuard<'a>, ErrorCode> {
        let bytes = count.checked_mul(pattern.bytes()).ok_or(codes::INVALID_VALUE)?;
        if !to.is_multiple_of(pattern.bytes()) {
            return Err(codes::INVALID_VALUE);
        }
        let to = copy_use(state.streams[stream].device, to, bytes, true);
        self.submit(state, stream, Task::new("fill", site, Work::Fill { to, pattern }))
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
        let site = caller_site();
        let call = Call::CopyToDevice;
        self.queue_call(call, stream, bytes as u64, |state, index| {
            // SAFETY: 1. and 2. are promised by the caller.
            unsafe { self.queue_to_device(state, index, to, from, bytes, site) }
                .map(|(state, _)| state)
        })
    }

    unsafe fn copy_to_host(
        &self,
        stream: RawStream,
        to: NonNull<u8>,
        from: u64,
        bytes: usize,
    ) -> Result<()> {
        let site = caller_site();
        let call = Call::CopyToHost;
        let mut state = self.enter(call, Some(stream.device()))?;
        let index = state.stream(stream).map_err(error_of(call))?;
        // SAFETY: 1. and 2. are promised by the caller.
        let queued = unsafe { self.queue_to_host(state, index, to, from, bytes, site) };
        let (state, pinned) = queued.map_err(error_of(call))?;
        self.cost(call, bytes as u64);
        self.finish_copy_to_host(state, index, pinned, stream.device()).map_err(error_of(call))
    }

    unsafe fn copy_on_device(
        &self,
        stream: RawStream,
        to: u64,
        from: u64,
        bytes: u64,
    ) -> Result<()> {
        let site = caller_site();
        let call = Call::CopyOnDevice;
        self.queue_call(call, stream, bytes, |state, index| {
            self.queue_on_device(state, index, to, from, bytes, site)
        })
    }

    unsafe fn copy_2d_to_device(
        &self,
        stream: RawStream,
        to: Pitched<u64>,
        from: Pitched<NonNull<u8>>,
        rows: Rows,
    ) -> Result<()> {
        let site = caller_site();
        self.queue_call(
            Call::Copy2d,
            stream,
            rows.width.saturating_mul(rows.height),
            |state, index| {
                // SAFETY: 1. and 2. are promised by the caller.
                unsafe { self.queue_rows_to_device(state, index, to, from, rows, site) }
            },
        )
    }

    unsafe fn copy_2d_to_host(
        &self,
        stream: RawStream,
        to: Pitched<NonNull<u8>>,
        from: Pitched<u64>,
        rows: Rows,
    ) -> Result<()> {
        let site = caller_site();
        let call = Call::Copy2d;
        let mut state = self.enter(call, Some(stream.device()))?;
        let index = state.stream(stream).map_err(error_of(call))?;
        // SAFETY: 1. and 2. are promised by the caller.
        let queued = unsafe { self.queue_rows_to_host(state, index, to, from, rows, site) };
        let (state, pinned) = queued.map_err(error_of(call))?;
        self.cost(call, rows.width.saturating_mul(rows.height));
        self.finish_copy_to_host(state, index, pinned, stream.device()).map_err(error_of(call))
    }

    unsafe fn copy_2d_on_device(
        &self,
        stream: RawStream,
        to: Pitched<u64>,
        from: Pitched<u64>,
        rows: Rows,
    ) -> Result<()> {
        let site = caller_site();
        self.queue_call(
            Call::Copy2d,
            stream,
            rows.width.saturating_mul(rows.height),
            |state, index| self.queue_rows_on_device(state, index, to, from, rows, site),
        )
    }

    unsafe fn fill_with(
        &self,
        stream: RawStream,
        to: u64,
        pattern: Pattern,
        count: u64,
    ) -> Result<()> {
        let site = caller_site();
        let (call, _) = Call::fill_calls(pattern);
        self.queue_call(call, stream, count.saturating_mul(pattern.bytes()), |state, index| {
            self.queue_fill(state, index, to, pattern, count, site)
        })
    }

    unsafe fn fill_2d(
        &self,
        stream: RawStream,
        to: Pitched<u64>,
        pattern: Pattern,
        rows: Rows,
    ) -> Result<()> {
        let site = caller_site();
        let (_, call) = Call::fill_calls(pattern);
        self.queue_call(call, stream, rows.width.saturating_mul(rows.height), |state, index| {
            self.queue_row_fill(state, index, to, pattern, rows, site)
        })
    }
}

impl Machine {
    /// Makes a call that queues work and returns.
    fn queue_call<'a>(
        &'a self,
        call: Call,
        stream: RawStream,
        bytes: u64,
        queue: impl FnOnce(StateGuard<'a>, usize) -> Result<StateGuard<'a>, ErrorCode>,
    ) -> Result<()> {
        let mut state = self.enter(call, Some(stream.device()))?;
        let index = state.stream(stream).map_err(error_of(call))?;
        drop(queue(state, index).map_err(error_of(call))?);
        self.cost(call, bytes);
        Ok(())
    }

    /// Completes a copy to the host. For pageable memory the driver returns when the bytes have
    /// arrived.
    fn finish_copy_to_host(
        &self,
        state: StateGuard<'_>,
        index: usize,
        pinned: bool,
        device: DeviceId,
    ) -> Result<(), ErrorCode> {
        if !pinned && state.streams[index].capture.is_none() {
            let point = state.point(index);
            let mut state = self.run_until(state, point.stream, point.count);
            state.device(device)?;
            state.order_host_after(&point.clock);
        }
        Ok(())
    }
}
