//! Copies and fills.
#![expect(unsafe_code, reason = "implements copies between raw addresses")]

use crate::{
    Call, Copies, DeviceId, DeviceRange, Pattern, Pitched, RawStream, Result, Rows,
    sim::{
        codes,
        ledger::Act,
        pinned::Side,
        queue::{HostUse, Task, Work},
        shared::{Guard, Shared, at, here},
        space::Use,
        state::State,
        violation::{Finding, ViolationKind},
    },
};
use std::{panic::Location, ptr::NonNull};

type Site = &'static Location<'static>;

/// Returns the device side of a copy. Access by any device is sufficient for copies.
pub(crate) fn side(device: DeviceId, address: u64, bytes: u64, writes: bool) -> Use {
    Use { range: DeviceRange { device, address, bytes }, writes, generation: None, reach: u64::MAX }
}

/// Returns the host access of a copy's pinned side. Memory that is not pinned has none.
pub(crate) fn by_device(pinned: bool, address: u64, bytes: u64, act: Act) -> Vec<HostUse> {
    if pinned { vec![HostUse { address, bytes, act, by_device: true }] } else { Vec::new() }
}

impl State {
    /// Classifies the host side of a copy. Refuses a copy across the end of a registration, or into
    /// a read-only one.
    pub(crate) fn host_side(
        &mut self,
        (address, bytes): (u64, u64),
        act: Act,
        name: &'static str,
        site: Site,
    ) -> Result<Side, u32> {
        let side = self.pinned.side(address, bytes);
        let protected =
            act == Act::Write && self.pinned.holding(address).is_some_and(|it| it.read_only);
        let kind = match side {
            Side::Across => ViolationKind::AcrossRegistrations,
            Side::Pinned if protected => ViolationKind::WriteToReadOnly,
            _ => return Ok(side),
        };
        if self.oracle {
            let mark = self.host_name(Act::Read, name, site);
            let mut found = std::mem::take(&mut self.found);
            let earlier = self.pinned.holding(address).map(|pinned| pinned.by);
            found.push(Finding { kind, earlier, address, bytes });
            self.report(found, mark, None);
        }
        Err(codes::INVALID_VALUE)
    }
}

impl Shared {
    /// Queues a copy to the device. Returns whether its host side is pinned.
    ///
    /// # Safety
    /// As of [`Copies::copy_to_device`].
    pub(crate) unsafe fn queue_to_device<'a>(
        &'a self,
        mut state: Guard<'a>,
        stream: usize,
        to: u64,
        from: NonNull<u8>,
        bytes: usize,
        site: Site,
    ) -> Result<(Guard<'a>, bool), u32> {
        let name = "copy to the device";
        let address = from.as_ptr() as u64;
        let pinned =
            state.host_side((address, bytes as u64), Act::Read, name, site)? == Side::Pinned;
        let device = state.streams[stream].device;
        let to = side(device, to, bytes as u64, true);
        // A captured copy reads host memory when it is launched, pinned or not.
        let staged = !pinned && state.streams[stream].capture.is_none();
        let work = if staged && state.space.store.has_bytes() {
            // SAFETY: 1. The caller promises that `from` is readable for `bytes` and is not
            // written.
            let staged = unsafe { std::slice::from_raw_parts(from.as_ptr(), bytes) };
            Work::FromStaging { to, from: staged.into() }
        } else {
            Work::FromHost { to, from: address }
        };
        let host = by_device(pinned, address, bytes as u64, Act::Read);
        let mut state = self.submit(state, stream, Task { name, site, host, work })?;
        if staged {
            // The host reads before the call returns.
            state.host_touch(address, bytes as u64, crate::HostAccess::Read, site);
        }
        Ok((state, pinned))
    }

    /// Queues a copy to the host. Returns whether its host side is pinned.
    ///
    /// # Safety
    /// As of [`Copies::copy_to_host`].
    pub(crate) unsafe fn queue_to_host<'a>(
        &'a self,
        mut state: Guard<'a>,
        stream: usize,
        to: NonNull<u8>,
        from: u64,
        bytes: usize,
        site: Site,
    ) -> Result<(Guard<'a>, bool), u32> {
        let name = "copy to the host";
        let address = to.as_ptr() as u64;
        let pinned =
            state.host_side((address, bytes as u64), Act::Write, name, site)? == Side::Pinned;
        let device = state.streams[stream].device;
        let from = side(device, from, bytes as u64, false);
        let work = Work::ToHost { to: address, from };
        let host = by_device(pinned, address, bytes as u64, Act::Write);
        Ok((self.submit(state, stream, Task { name, site, host, work })?, pinned))
    }

    /// Queues a copy on the device.
    pub(crate) fn queue_on_device<'a>(
        &'a self,
        state: Guard<'a>,
        stream: usize,
        to: u64,
        from: u64,
        bytes: u64,
        site: Site,
    ) -> Result<Guard<'a>, u32> {
        let home = state.streams[stream].device;
        let device = |address| state.space.device_of(address).unwrap_or(home);
        let (to, from) =
            (side(device(to), to, bytes, true), side(device(from), from, bytes, false));
        self.submit(
            state,
            stream,
            Task::new("copy on the device", site, Work::OnDevice([from, to])),
        )
    }

    /// Queues a fill.
    pub(crate) fn queue_fill<'a>(
        &'a self,
        state: Guard<'a>,
        stream: usize,
        to: u64,
        pattern: Pattern,
        count: u64,
        site: Site,
    ) -> Result<Guard<'a>, u32> {
        let bytes = count.checked_mul(pattern.bytes()).ok_or(codes::INVALID_VALUE)?;
        if !to.is_multiple_of(pattern.bytes()) {
            return Err(codes::INVALID_VALUE);
        }
        let to = side(state.streams[stream].device, to, bytes, true);
        self.submit(state, stream, Task::new("fill", site, Work::Fill { to, pattern }))
    }
}

// SAFETY: 1. and 2. A copy is one task of its stream's queue, and is checked before it is queued.
unsafe impl Copies for Shared {
    unsafe fn copy_to_device(
        &self,
        stream: RawStream,
        to: u64,
        from: NonNull<u8>,
        bytes: usize,
    ) -> Result<()> {
        let site = here();
        let call = Call::CopyToDevice;
        self.queueing(call, stream, bytes as u64, |state, place| {
            // SAFETY: 1. and 2. are promised by the caller.
            unsafe { self.queue_to_device(state, place, to, from, bytes, site) }
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
        let site = here();
        let call = Call::CopyToHost;
        let mut state = self.enter(call, Some(stream.device()))?;
        let place = state.stream(stream).map_err(at(call))?;
        // SAFETY: 1. and 2. are promised by the caller.
        let queued = unsafe { self.queue_to_host(state, place, to, from, bytes, site) };
        let (state, pinned) = queued.map_err(at(call))?;
        self.cost(call, bytes as u64);
        self.back_to_host(state, place, pinned, stream.device()).map_err(at(call))
    }

    unsafe fn copy_on_device(
        &self,
        stream: RawStream,
        to: u64,
        from: u64,
        bytes: u64,
    ) -> Result<()> {
        let site = here();
        let call = Call::CopyOnDevice;
        self.queueing(call, stream, bytes, |state, place| {
            self.queue_on_device(state, place, to, from, bytes, site)
        })
    }

    unsafe fn copy_2d_to_device(
        &self,
        stream: RawStream,
        to: Pitched<u64>,
        from: Pitched<NonNull<u8>>,
        rows: Rows,
    ) -> Result<()> {
        let site = here();
        self.queueing(
            Call::Copy2d,
            stream,
            rows.width.saturating_mul(rows.height),
            |state, place| {
                // SAFETY: 1. and 2. are promised by the caller.
                unsafe { self.queue_rows_to_device(state, place, to, from, rows, site) }
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
        let site = here();
        let call = Call::Copy2d;
        let mut state = self.enter(call, Some(stream.device()))?;
        let place = state.stream(stream).map_err(at(call))?;
        // SAFETY: 1. and 2. are promised by the caller.
        let queued = unsafe { self.queue_rows_to_host(state, place, to, from, rows, site) };
        let (state, pinned) = queued.map_err(at(call))?;
        self.cost(call, rows.width.saturating_mul(rows.height));
        self.back_to_host(state, place, pinned, stream.device()).map_err(at(call))
    }

    unsafe fn copy_2d_on_device(
        &self,
        stream: RawStream,
        to: Pitched<u64>,
        from: Pitched<u64>,
        rows: Rows,
    ) -> Result<()> {
        let site = here();
        self.queueing(
            Call::Copy2d,
            stream,
            rows.width.saturating_mul(rows.height),
            |state, place| self.queue_rows_on_device(state, place, to, from, rows, site),
        )
    }

    unsafe fn fill_with(
        &self,
        stream: RawStream,
        to: u64,
        pattern: Pattern,
        count: u64,
    ) -> Result<()> {
        let site = here();
        let (call, _) = Call::fills(pattern);
        self.queueing(call, stream, count.saturating_mul(pattern.bytes()), |state, place| {
            self.queue_fill(state, place, to, pattern, count, site)
        })
    }

    unsafe fn fill_2d(
        &self,
        stream: RawStream,
        to: Pitched<u64>,
        pattern: Pattern,
        rows: Rows,
    ) -> Result<()> {
        let site = here();
        let (_, call) = Call::fills(pattern);
        self.queueing(call, stream, rows.width.saturating_mul(rows.height), |state, place| {
            self.queue_row_fill(state, place, to, pattern, rows, site)
        })
    }
}

impl Shared {
    /// Makes a call that queues work and returns.
    fn queueing<'a>(
        &'a self,
        call: Call,
        stream: RawStream,
        bytes: u64,
        queue: impl FnOnce(Guard<'a>, usize) -> Result<Guard<'a>, u32>,
    ) -> Result<()> {
        let mut state = self.enter(call, Some(stream.device()))?;
        let place = state.stream(stream).map_err(at(call))?;
        drop(queue(state, place).map_err(at(call))?);
        self.cost(call, bytes);
        Ok(())
    }

    /// Completes a copy to the host. For pageable memory the driver returns when the bytes have
    /// arrived.
    fn back_to_host(
        &self,
        state: Guard<'_>,
        place: usize,
        pinned: bool,
        device: DeviceId,
    ) -> Result<(), u32> {
        if !pinned && state.streams[place].capture.is_none() {
            let point = state.point(place);
            let mut state = self.run_until(state, point.stream, point.count);
            state.device(device)?;
            state.host_learns(&point.clock);
        }
        Ok(())
    }
}
