//! Copies of pageable memory to the device and back.
//!
//! A transfer owns a reference to its block. A block that is freed during the transfer returns to
//! its pool when the transfer ends.
#![expect(
    unsafe_code,
    reason = "exports functions to C, and lends what the caller's pointers name"
)]

use crate::{
    device::{foreign_block, handle},
    entry::{CallResult, enter, enter_with, lock, null, require, write_out},
    runtime::aq_runtime,
    status::{Failure, Status, aq_status},
    table::SharedRuntime,
    thread_state,
};
use aquifer::{
    Access, Block, DevicePool, DeviceRange, MemoryError, Operand, OperandMut, RawStream, Stream,
    Typed,
    driver::KeepAlive,
    error::Result,
    staging::{HostBuffer, StageError, Staged, Ticket},
};
use std::{
    collections::HashMap,
    ffi::c_void,
    ptr::NonNull,
    slice,
    sync::{
        Arc, Mutex, MutexGuard, OnceLock,
        atomic::{AtomicU64, Ordering},
    },
};

/// The number of a transfer.
pub type aq_ticket = u64;

/// A part of a block, used in the order of the caller's stream.
struct DevicePart {
    block: Arc<Block>,
    range: DeviceRange,
    pool: DevicePool,
    stream: Stream,
}

// SAFETY: 1. The range lies in a block that this reference keeps from being freed. If C code names
// overlapping parts, their contents are undefined. 2. As for the block. 3. A stream that may be
// destroyed at any time is not returned.
unsafe impl Operand for DevicePart {
    fn range(&self) -> DeviceRange {
        self.range
    }

    fn home_stream(&self) -> Option<RawStream> {
        let timeline = self.stream.timeline();
        (!timeline.fences_at_once() && !timeline.is_retired()).then(|| timeline.raw())
    }

    fn order(&self, stream: RawStream, alive: Option<KeepAlive>, access: Access) -> Result<()> {
        let expected = self.stream.timeline();
        let on = self.pool.streams().timeline(stream, alive.clone())?;
        on.wait_for(expected, expected.open())?;
        self.block.order(stream, alive, access)
    }
}

// SAFETY: 1. As above: overlapping parts have undefined contents.
unsafe impl OperandMut for DevicePart {}

impl Typed for DevicePart {
    type Item = u8;
    fn len(&self) -> usize {
        self.range.bytes as usize
    }
}

/// The caller's memory, lent for the duration of a transfer.
struct CallerBytes(NonNull<[u8]>);

// SAFETY: 1. The caller has lent the bytes until the transfer is finished, to any thread.
unsafe impl Send for CallerBytes {}

// SAFETY: 1. Bytes have no invalid values. They are lent exclusively to this value, and do not
// move.
unsafe impl HostBuffer for CallerBytes {
    type Item = u8;
    fn elements(&mut self) -> NonNull<[u8]> {
        self.0
    }
}

/// A transfer under way.
enum Transfer {
    Upload(Ticket<(CallerBytes, DevicePart)>),
    Download(Ticket<(DevicePart, CallerBytes)>),
    /// There was nothing to copy.
    Empty,
}

impl Transfer {
    fn watch(&self) -> Option<Staged> {
        match self {
            Self::Upload(ticket) => Some(ticket.watch()),
            Self::Download(ticket) => Some(ticket.watch()),
            Self::Empty => None,
        }
    }

    /// Cancels the transfer, waits for its end, and releases both sides. The outcome is ignored.
    fn end(self) {
        match self {
            Self::Upload(ticket) => {
                ticket.cancel();
                drop(ticket.wait());
            }
            Self::Download(ticket) => {
                ticket.cancel();
                drop(ticket.wait());
            }
            Self::Empty => {}
        }
    }
}

static TICKETS: OnceLock<Mutex<HashMap<aq_ticket, Transfer>>> = OnceLock::new();
static NEXT: AtomicU64 = AtomicU64::new(1);

fn tickets() -> MutexGuard<'static, HashMap<aq_ticket, Transfer>> {
    lock(TICKETS.get_or_init(Mutex::default))
}

fn watch(ticket: aq_ticket) -> CallResult<Option<Staged>> {
    tickets().get(&ticket).map(Transfer::watch).ok_or_else(|| no_ticket(ticket))
}

#[cold]
fn no_ticket(ticket: aq_ticket) -> Failure {
    Failure::new(Status::UnknownTicket, format!("{ticket} is no ticket, or has been freed"))
}

/// Both sides of a copy, as the caller gave them.
#[derive(Clone, Copy)]
struct CopyRequest {
    runtime: aq_runtime,
    device: u32,
    block: u64,
    offset: u64,
    host: *mut c_void,
    bytes: u64,
    stream: u64,
}

impl CopyRequest {
    fn host(&self) -> CallResult<NonNull<[u8]>> {
        let start = NonNull::new(self.host.cast::<u8>()).ok_or_else(|| null("host"))?;
        let limit = isize::MAX as u64;
        let bytes = usize::try_from(self.bytes).ok().filter(|_| self.bytes <= limit);
        let bytes = bytes.ok_or(MemoryError::TooLarge { requested: self.bytes, limit })?;
        Ok(NonNull::slice_from_raw_parts(start, bytes))
    }

    fn part(
        &self,
        shared: &SharedRuntime,
        pool: &DevicePool,
        stream: &Stream,
    ) -> CallResult<DevicePart> {
        let block = pool
            .share_raw(self.block)
            .map_err(|error| foreign_block(shared, self.device, error))?;
        let there = block.bytes();
        if self.offset > there || self.bytes > there - self.offset {
            let (offset, len, bytes) = (self.offset, self.bytes, there);
            return Err(MemoryError::OutOfBounds { offset, len, bytes }.into());
        }
        let address = self.block + self.offset;
        let range = DeviceRange { device: pool.device(), address, bytes: self.bytes };
        Ok(DevicePart { block, range, pool: pool.clone(), stream: stream.clone() })
    }

    /// Runs `work` with both sides, unless there is nothing to copy. No thread-local state is
    /// borrowed during `work`.
    ///
    /// # Safety
    /// 1. As [`aq_alloc_aligned`](crate::device::aq_alloc_aligned) for the stream.
    unsafe fn with<R>(
        self,
        empty: R,
        work: impl FnOnce(&SharedRuntime, DevicePart, NonNull<[u8]>) -> CallResult<R>,
    ) -> CallResult<R> {
        // SAFETY: 1. Guaranteed by the caller.
        let (shared, part) = unsafe {
            thread_state::with_stream(
                self.runtime,
                self.device,
                self.stream,
                |shared, pool, stream| Ok((shared.clone(), self.part(shared, pool, stream)?)),
            )
        }?;
        if self.bytes == 0 {
            return Ok(empty);
        }
        work(&shared, part, self.host()?)
    }
}

/// Copies to the device, and waits until the copy is done.
///
/// # Safety
/// 1. As [`aq_alloc_aligned`](crate::device::aq_alloc_aligned) for `stream`.
/// 2. `host` is null, or `bytes` bytes can be read there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_upload(
    runtime: aq_runtime,
    device: u32,
    block: u64,
    offset: u64,
    host: *const c_void,
    bytes: u64,
    stream: *mut c_void,
) -> aq_status {
    let (host, stream) = (host.cast_mut(), handle(stream));
    let copy = CopyRequest { runtime, device, block, offset, host, bytes, stream };
    enter(|| {
        // SAFETY: 1. Guaranteed by the caller.
        unsafe {
            copy.with((), |shared, mut part, host| {
                // SAFETY: 1. The caller's `bytes` readable bytes, not null, no more than
                // `isize::MAX`.
                let from = slice::from_raw_parts(host.as_ptr().cast::<u8>(), host.len());
                let staged = shared
                    .stager(device)?
                    .scope(|stage| stage.upload(from, &mut part).map(drop))?;
                Ok(staged?)
            })
        }
    })
}

/// Copies from the device, and waits until the copy is done.
///
/// # Safety
/// 1. As [`aq_alloc_aligned`](crate::device::aq_alloc_aligned) for `stream`.
/// 2. `host` is null, or `bytes` bytes can be written there that no other code uses.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_download(
    runtime: aq_runtime,
    device: u32,
    block: u64,
    offset: u64,
    host: *mut c_void,
    bytes: u64,
    stream: *mut c_void,
) -> aq_status {
    let copy = CopyRequest { runtime, device, block, offset, host, bytes, stream: handle(stream) };
    enter(|| {
        // SAFETY: 1. Guaranteed by the caller.
        unsafe {
            copy.with((), |shared, part, host| {
                // SAFETY: 1. The caller's `bytes` writable bytes, not null, no more than
                // `isize::MAX`, and exclusive.
                let to = slice::from_raw_parts_mut(host.as_ptr().cast::<u8>(), host.len());
                let staged =
                    shared.stager(device)?.scope(|stage| stage.download(&part, to).map(drop))?;
                Ok(staged?)
            })
        }
    })
}

fn begin<T>(
    outcome: std::result::Result<Ticket<T>, aquifer::staging::Failed<T>>,
) -> CallResult<Ticket<T>> {
    outcome.map_err(|failed| failed.error.into())
}

fn register(transfer: Transfer) -> aq_ticket {
    let ticket = NEXT.fetch_add(1, Ordering::Relaxed);
    tickets().insert(ticket, transfer);
    ticket
}

/// Begins a copy to the device.
///
/// # Safety
/// 1. As [`aq_alloc_aligned`](crate::device::aq_alloc_aligned) for `stream`.
/// 2. `host` is null, or `bytes` bytes can be read there until the ticket has been waited for or
///    freed.
/// 3. `ticket` is null, or points to an `aq_ticket` that the caller may write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_upload_begin(
    runtime: aq_runtime,
    device: u32,
    block: u64,
    offset: u64,
    host: *const c_void,
    bytes: u64,
    stream: *mut c_void,
    ticket: *mut aq_ticket,
) -> aq_status {
    let (host, stream) = (host.cast_mut(), handle(stream));
    let copy = CopyRequest { runtime, device, block, offset, host, bytes, stream };
    enter(|| {
        require(ticket, "ticket")?;
        // SAFETY: 1. Guaranteed by the caller.
        let transfer = unsafe {
            copy.with(Transfer::Empty, |shared, part, host| {
                Ok(Transfer::Upload(begin(shared.stager(device)?.upload(CallerBytes(host), part))?))
            })
        }?;
        // SAFETY: 1. Guaranteed by the caller.
        unsafe { write_out(ticket, register(transfer), "ticket") }
    })
}

/// Begins a copy from the device.
///
/// # Safety
/// 1. As [`aq_alloc_aligned`](crate::device::aq_alloc_aligned) for `stream`.
/// 2. `host` is null, or `bytes` bytes can be written there, and no other code uses them until the
///    ticket has been waited for or freed.
/// 3. `ticket` is null, or points to an `aq_ticket` that the caller may write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_download_begin(
    runtime: aq_runtime,
    device: u32,
    block: u64,
    offset: u64,
    host: *mut c_void,
    bytes: u64,
    stream: *mut c_void,
    ticket: *mut aq_ticket,
) -> aq_status {
    let copy = CopyRequest { runtime, device, block, offset, host, bytes, stream: handle(stream) };
    enter(|| {
        require(ticket, "ticket")?;
        // SAFETY: 1. Guaranteed by the caller.
        let transfer = unsafe {
            copy.with(Transfer::Empty, |shared, part, host| {
                Ok(Transfer::Download(begin(
                    shared.stager(device)?.download(part, CallerBytes(host)),
                )?))
            })
        }?;
        // SAFETY: 1. Guaranteed by the caller.
        unsafe { write_out(ticket, register(transfer), "ticket") }
    })
}

fn status_of(outcome: std::result::Result<(), StageError>) -> CallResult<Status> {
    outcome.map_err(Failure::from).map(|()| Status::Ok)
}

/// Returns whether a transfer has ended, and its outcome.
#[unsafe(no_mangle)]
pub extern "C" fn aq_ticket_poll(ticket: aq_ticket) -> aq_status {
    enter_with(|| match watch(ticket)? {
        Some(staged) => staged.try_wait().map_or(Ok(Status::NotReady), status_of),
        None => Ok(Status::Ok),
    })
}

/// Waits for the end of a transfer.
#[unsafe(no_mangle)]
pub extern "C" fn aq_ticket_wait(ticket: aq_ticket) -> aq_status {
    enter_with(|| match watch(ticket)? {
        Some(staged) => status_of(staged.wait()),
        None => Ok(Status::Ok),
    })
}

/// Frees a ticket. A transfer that has not ended is cancelled and waited for.
#[unsafe(no_mangle)]
pub extern "C" fn aq_ticket_free(ticket: aq_ticket) -> aq_status {
    enter(|| {
        if ticket == 0 {
            return Ok(());
        }
        let transfer = tickets().remove(&ticket).ok_or_else(|| no_ticket(ticket))?;
        transfer.end();
        Ok(())
    })
}
