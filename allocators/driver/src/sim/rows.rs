//! Copies and fills, by rows. A contiguous one has one row.
#![expect(unsafe_code, reason = "implements copies between raw addresses")]

use super::{
    access_history::ActionKind,
    address_space::DeviceUse,
    codes::{self, ErrorCode},
    machine::{Machine, caller_site},
    machine_state::MachineState,
    pinned::HostMemoryKind,
    queue::{HostUse, Task, Work},
    store::Store,
};
use crate::{Call, DeviceRange, HostAccess, Pattern, Pitched, RawStream, Result, Rows};
use std::{ptr::NonNull, sync::Arc};

/// The largest pitch of an H200 (`CU_DEVICE_ATTRIBUTE_MAX_PITCH`), in bytes.
const LARGEST_PITCH: u64 = 0x7fff_ffff;

/// A copy or fill.
pub(crate) struct RowWork {
    /// The uses of all rows on a device.
    pub(crate) uses: Vec<DeviceUse>,
    to: Pitched<u64>,
    from: RowSource,
    /// In bytes.
    rows: Rows,
}

/// The source of rows.
enum RowSource {
    /// Other rows, of a device or of pinned memory, by address.
    Rows(Pitched<u64>),
    /// Contiguous rows of pageable memory, with the bytes at the time the copy was queued.
    Staged(Box<[u8]>),
    /// A pattern.
    Pattern(Pattern),
}

impl RowWork {
    /// Returns whether this is a fill and not a copy.
    pub(crate) fn is_fill(&self) -> bool {
        matches!(self.from, RowSource::Pattern(_))
    }

    /// # Safety
    /// 1. With bytes, the source's rows are readable and the destination's writable.
    /// 2. There is no other access to the destination's rows, and no write to the source's, during
    ///    the call.
    pub(crate) unsafe fn execute(&self, store: &Store) {
        if !store.has_bytes() {
            return;
        }
        let width = self.rows.width;
        for row in 0..self.rows.height {
            let to = self.to.start + row * self.to.pitch;
            match &self.from {
                // SAFETY: 1. and 2. are promised by the caller.
                RowSource::Rows(from) => unsafe {
                    store.copy(to, from.start + row * from.pitch, width);
                },
                // SAFETY: 1. `bytes` holds as many rows of this width. The caller promises the
                // rest, and 2.
                RowSource::Staged(bytes) => unsafe {
                    store.copy(to, bytes.as_ptr() as u64 + row * width, width);
                },
                // SAFETY: 1. and 2. are promised by the caller, and the alignment of the address
                // was checked.
                RowSource::Pattern(pattern) => unsafe { store.fill(to, *pattern, width) },
            }
        }
    }
}

impl Rows {
    fn is_empty(self) -> bool {
        self.width == 0 || self.height == 0
    }
}

/// Returns the bytes from the start of the first row to the end of the last.
fn row_span(start: u64, pitch: u64, rows: Rows) -> Result<u64, ErrorCode> {
    if rows.is_empty() {
        return Ok(0);
    }
    if rows.height == 1 && pitch == rows.width {
        // Contiguous: any length is valid, and a range past the last address is reported.
        return Ok(rows.width);
    }
    if pitch < rows.width || pitch > LARGEST_PITCH {
        return Err(codes::INVALID_VALUE);
    }
    let span = pitch.checked_mul(rows.height - 1).and_then(|before| before.checked_add(rows.width));
    span.filter(|&span| start.checked_add(span).is_some()).ok_or(codes::INVALID_VALUE)
}

/// Returns the first byte and the length of each row. Contiguous rows are returned as one.
fn row_ranges(start: u64, pitch: u64, rows: Rows) -> impl Iterator<Item = (u64, u64)> {
    let (count, width) = match rows {
        _ if rows.is_empty() => (0, 0),
        Rows { width, height } if width == pitch => (1, width * height),
        Rows { width, height } => (height, width),
    };
    (0..count).map(move |row| (start + row * pitch, width))
}

impl MachineState {
    /// Returns the device side of a copy on a stream. Access by any device is sufficient for copies.
    fn row_uses(
        &self,
        stream: usize,
        at: Pitched<u64>,
        rows: Rows,
        writes: bool,
    ) -> Vec<DeviceUse> {
        let device = self.space.device_of(at.start).unwrap_or(self.streams[stream].device);
        let to_use = |(address, bytes)| DeviceUse {
            range: DeviceRange { device, address, bytes },
            writes,
            generation: None,
            devices: u64::MAX,
        };
        row_ranges(at.start, at.pitch, rows).map(to_use).collect()
    }
}

/// Returns the host accesses of a copy of rows, row by row. Memory that is not pinned has none.
fn pinned_uses(pinned: bool, start: u64, pitch: u64, rows: Rows, kind: ActionKind) -> Vec<HostUse> {
    let row = |(address, bytes)| HostUse { address, bytes, kind };
    if pinned { row_ranges(start, pitch, rows).map(row).collect() } else { Vec::new() }
}

impl Machine {
    /// Copies rows to the device.
    ///
    /// # Safety
    /// As of [`Copies::copy_2d_to_device`](crate::Copies::copy_2d_to_device).
    pub(crate) unsafe fn copy_rows_to_device(
        &self,
        call: Call,
        stream: RawStream,
        to: Pitched<u64>,
        from: Pitched<NonNull<u8>>,
        rows: Rows,
    ) -> Result<()> {
        let (name, site) = ("copy to the device", caller_site());
        let start = from.start.as_ptr() as u64;
        self.queue_call(call, stream, |mut state, stream| {
            row_span(to.start, to.pitch, rows)?;
            let range = (start, row_span(start, from.pitch, rows)?);
            let pinned = state.classify_host_range(range, ActionKind::Read, name, site)?
                == HostMemoryKind::Pinned;
            let uses = state.row_uses(stream, to, rows, true);
            // A captured copy reads host memory when it is launched, pinned or not.
            let staged = !pinned && state.streams[stream].capture.is_none();
            let source = if staged && state.space.store.has_bytes() {
                let mut staged = Vec::new();
                for (address, bytes) in row_ranges(start, from.pitch, rows) {
                    // SAFETY: 1. The caller promises that each row is readable and is not written.
                    staged.extend_from_slice(unsafe {
                        std::slice::from_raw_parts(address as *const u8, bytes as usize)
                    });
                }
                RowSource::Staged(staged.into())
            } else {
                RowSource::Rows(Pitched { start, pitch: from.pitch })
            };
            let host = pinned_uses(pinned, start, from.pitch, rows, ActionKind::Read);
            let work = Work::Rows(Arc::new(RowWork { uses, to, from: source, rows }));
            let mut state = self.submit(state, stream, Task { name, site, host, work })?;
            if staged {
                // The host reads before the call returns.
                for (address, bytes) in row_ranges(start, from.pitch, rows) {
                    state.check_host_access(address, bytes, HostAccess::Read, Some(site), site);
                }
            }
            Ok(state)
        })
    }

    /// Copies rows to the host. For pageable memory the driver returns when the bytes have arrived.
    ///
    /// # Safety
    /// As of [`Copies::copy_2d_to_host`](crate::Copies::copy_2d_to_host).
    pub(crate) unsafe fn copy_rows_to_host(
        &self,
        call: Call,
        stream: RawStream,
        to: Pitched<NonNull<u8>>,
        from: Pitched<u64>,
        rows: Rows,
    ) -> Result<()> {
        let (name, site, device) = ("copy to the host", caller_site(), stream.device());
        let start = to.start.as_ptr() as u64;
        self.queue_call(call, stream, |mut state, stream| {
            row_span(from.start, from.pitch, rows)?;
            let range = (start, row_span(start, to.pitch, rows)?);
            let pinned = state.classify_host_range(range, ActionKind::Write, name, site)?
                == HostMemoryKind::Pinned;
            let uses = state.row_uses(stream, from, rows, false);
            let host = pinned_uses(pinned, start, to.pitch, rows, ActionKind::Write);
            let to = Pitched { start, pitch: to.pitch };
            let from = RowSource::Rows(from);
            let work = Work::Rows(Arc::new(RowWork { uses, to, from, rows }));
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

    /// Copies rows on the device.
    pub(crate) fn copy_rows_on_device(
        &self,
        call: Call,
        stream: RawStream,
        to: Pitched<u64>,
        from: Pitched<u64>,
        rows: Rows,
    ) -> Result<()> {
        let site = caller_site();
        self.queue_call(call, stream, |state, stream| {
            row_span(to.start, to.pitch, rows)?;
            row_span(from.start, from.pitch, rows)?;
            let mut uses = state.row_uses(stream, from, rows, false);
            uses.append(&mut state.row_uses(stream, to, rows, true));
            let from = RowSource::Rows(from);
            let work = Work::Rows(Arc::new(RowWork { uses, to, from, rows }));
            self.submit(state, stream, Task::new("copy on the device", site, work))
        })
    }

    /// Fills rows, whose width is in elements.
    pub(crate) fn fill_rows(
        &self,
        call: Call,
        stream: RawStream,
        to: Pitched<u64>,
        pattern: Pattern,
        rows: Rows,
    ) -> Result<()> {
        let (site, element) = (caller_site(), pattern.bytes());
        self.queue_call(call, stream, |state, stream| {
            let width = rows.width.checked_mul(element).ok_or(codes::INVALID_VALUE)?;
            let rows = Rows { width, ..rows };
            if !to.start.is_multiple_of(element)
                || (rows.height > 1 && !to.pitch.is_multiple_of(element))
            {
                return Err(codes::INVALID_VALUE);
            }
            row_span(to.start, to.pitch, rows)?;
            let uses = state.row_uses(stream, to, rows, true);
            let from = RowSource::Pattern(pattern);
            let work = Work::Rows(Arc::new(RowWork { uses, to, from, rows }));
            self.submit(state, stream, Task::new("fill", site, work))
        })
    }
}
