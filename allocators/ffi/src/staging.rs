//! Pageable memory to the device and back.
//!
//! A transfer holds its block: one that is freed meanwhile goes home when the transfer has come to
//! its end.
#![expect(
    unsafe_code,
    reason = "exports functions to C, and lends what the caller's pointers name"
)]

use crate::{
    device::{handle, strange},
    entry::{Answer, enter, enter_with, null, put, wanted},
    here,
    runtime::{Shared, aq_runtime},
    status::{Failure, Status, aq_status},
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
        Arc, Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

/// A transfer's number.
pub type aq_ticket = u64;

/// A part of a block, as somebody uses it in the order of his stream.
struct Part {
    block: Arc<Block>,
    range: DeviceRange,
    pool: DevicePool,
    stream: Stream,
}

// SAFETY: 1. the range lies in a block that this keeps from being freed; C code that names a part
// twice is told that the bytes are then anybody's. 2. the block's own promise. 3. of a stream that
// may be gone at any time none is named.
unsafe impl Operand for Part {
    fn range(&self) -> DeviceRange {
        self.range
    }

    fn home_stream(&self) -> Option<RawStream> {
        let timeline = self.stream.timeline();
        (!timeline.fences_at_once() && !timeline.is_retired()).then(|| timeline.raw())
    }

    fn order(&self, stream: RawStream, alive: Option<KeepAlive>, access: Access) -> Result<()> {
        let asked = self.stream.timeline();
        if stream != asked.raw() {
            let on = self.pool.streams().timeline(stream, alive.clone())?;
            on.wait_for(asked, asked.open())?;
        }
        self.block.order(stream, alive, access)
    }
}

// SAFETY: 1. as above: who names overlapping parts gets bytes of either.
unsafe impl OperandMut for Part {}

impl Typed for Part {
    type Item = u8;
    fn len(&self) -> usize {
        self.range.bytes as usize
    }
}

/// The caller's memory, while he leaves it alone.
struct Lent(NonNull<[u8]>);

// SAFETY: 1. bytes that the caller has lent until the transfer is finished, on whichever thread.
unsafe impl Send for Lent {}

// SAFETY: 1. bytes are initialised as far as anybody can tell, lent to this alone, and stay where
// they are.
unsafe impl HostBuffer for Lent {
    type Item = u8;
    fn elements(&mut self) -> NonNull<[u8]> {
        self.0
    }
}

/// What is under way.
enum Under {
    Up(Ticket<(Lent, Part)>),
    Down(Ticket<(Part, Lent)>),
    /// It had nothing to do.
    Nothing,
}

impl Under {
    fn watch(&self) -> Option<Staged> {
        match self {
            Self::Up(ticket) => Some(ticket.watch()),
            Self::Down(ticket) => Some(ticket.watch()),
            Self::Nothing => None,
        }
    }

    /// Cancels it, waits for its end, and lets go of both sides: of what came of it nobody asks any
    /// more.
    fn end(self) {
        match self {
            Self::Up(ticket) => {
                ticket.cancel();
                drop(ticket.wait());
            }
            Self::Down(ticket) => {
                ticket.cancel();
                drop(ticket.wait());
            }
            Self::Nothing => {}
        }
    }
}

static TICKETS: OnceLock<Mutex<HashMap<aq_ticket, Under>>> = OnceLock::new();
static NEXT: AtomicU64 = AtomicU64::new(1);

fn tickets() -> MutexGuard<'static, HashMap<aq_ticket, Under>> {
    TICKETS.get_or_init(Mutex::default).lock().unwrap_or_else(PoisonError::into_inner)
}

fn watched(ticket: aq_ticket) -> Answer<Option<Staged>> {
    tickets().get(&ticket).map(Under::watch).ok_or_else(|| no_ticket(ticket))
}

#[cold]
fn no_ticket(ticket: aq_ticket) -> Failure {
    Failure::new(Status::UnknownTicket, format!("{ticket} is no ticket, or has been freed"))
}

/// Both sides of a copy as the caller named them.
#[derive(Clone, Copy)]
struct Copy {
    runtime: aq_runtime,
    device: u32,
    block: u64,
    offset: u64,
    host: *mut c_void,
    bytes: u64,
    stream: u64,
}

impl Copy {
    fn host(&self) -> Answer<NonNull<[u8]>> {
        let start = NonNull::new(self.host.cast::<u8>()).ok_or_else(|| null("host"))?;
        let limit = isize::MAX as u64;
        let bytes = usize::try_from(self.bytes).ok().filter(|_| self.bytes <= limit);
        let bytes = bytes.ok_or(MemoryError::TooLarge { requested: self.bytes, limit })?;
        Ok(NonNull::slice_from_raw_parts(start, bytes))
    }

    fn part(&self, shared: &Shared, pool: &DevicePool, stream: &Stream) -> Answer<Part> {
        let block =
            pool.share_raw(self.block).map_err(|error| strange(shared, self.device, error))?;
        let there = block.bytes();
        if self.offset > there || self.bytes > there - self.offset {
            let (offset, len, bytes) = (self.offset, self.bytes, there);
            return Err(MemoryError::OutOfBounds { offset, len, bytes }.into());
        }
        let address = self.block + self.offset;
        let range = DeviceRange { device: pool.device(), address, bytes: self.bytes };
        Ok(Part { block, range, pool: pool.clone(), stream: stream.clone() })
    }

    /// Does `work` with both sides, unless there is nothing to be copied. No thread's books are
    /// held meanwhile.
    ///
    /// # Safety
    /// 1. As [`aq_alloc_aligned`](crate::device::aq_alloc_aligned) for the stream.
    unsafe fn with<R>(
        self,
        nothing: R,
        work: impl FnOnce(&Shared, Part, NonNull<[u8]>) -> Answer<R>,
    ) -> Answer<R> {
        // SAFETY: 1. the caller's.
        let (shared, part) = unsafe {
            here::with_stream(self.runtime, self.device, self.stream, |shared, pool, stream| {
                Ok((shared.clone(), self.part(shared, pool, stream)?))
            })
        }?;
        if self.bytes == 0 {
            return Ok(nothing);
        }
        work(&shared, part, self.host()?)
    }
}

/// Copies to the device, and waits for it.
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
    let copy = Copy { runtime, device, block, offset, host, bytes, stream };
    enter(|| {
        // SAFETY: 1. the caller's.
        unsafe {
            copy.with((), |shared, mut part, host| {
                // SAFETY: 1. the caller's `bytes` readable bytes, not null, no more than
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

/// Copies from the device, and waits for it.
///
/// # Safety
/// 1. As [`aq_alloc_aligned`](crate::device::aq_alloc_aligned) for `stream`.
/// 2. `host` is null, or `bytes` bytes can be written there that nobody else uses.
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
    let copy = Copy { runtime, device, block, offset, host, bytes, stream: handle(stream) };
    enter(|| {
        // SAFETY: 1. the caller's.
        unsafe {
            copy.with((), |shared, part, host| {
                // SAFETY: 1. the caller's `bytes` writable bytes, not null, no more than
                // `isize::MAX`, and his alone.
                let to = slice::from_raw_parts_mut(host.as_ptr().cast::<u8>(), host.len());
                let staged =
                    shared.stager(device)?.scope(|stage| stage.download(&part, to).map(drop))?;
                Ok(staged?)
            })
        }
    })
}

fn begun<T>(
    begun: std::result::Result<Ticket<T>, aquifer::staging::Failed<T>>,
) -> Answer<Ticket<T>> {
    begun.map_err(|failed| failed.error.into())
}

fn keep(under: Under) -> aq_ticket {
    let ticket = NEXT.fetch_add(1, Ordering::Relaxed);
    tickets().insert(ticket, under);
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
    let copy = Copy { runtime, device, block, offset, host, bytes, stream };
    enter(|| {
        wanted(ticket, "ticket")?;
        // SAFETY: 1. the caller's.
        let under = unsafe {
            copy.with(Under::Nothing, |shared, part, host| {
                Ok(Under::Up(begun(shared.stager(device)?.upload(Lent(host), part))?))
            })
        }?;
        // SAFETY: 1. the caller's.
        unsafe { put(ticket, keep(under), "ticket") }
    })
}

/// Begins a copy from the device.
///
/// # Safety
/// 1. As [`aq_alloc_aligned`](crate::device::aq_alloc_aligned) for `stream`.
/// 2. `host` is null, or `bytes` bytes can be written there, by nobody else, until the ticket has
///    been waited for or freed.
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
    let copy = Copy { runtime, device, block, offset, host, bytes, stream: handle(stream) };
    enter(|| {
        wanted(ticket, "ticket")?;
        // SAFETY: 1. the caller's.
        let under = unsafe {
            copy.with(Under::Nothing, |shared, part, host| {
                Ok(Under::Down(begun(shared.stager(device)?.download(part, Lent(host)))?))
            })
        }?;
        // SAFETY: 1. the caller's.
        unsafe { put(ticket, keep(under), "ticket") }
    })
}

fn ended(outcome: std::result::Result<(), StageError>) -> Answer<Status> {
    outcome.map_err(Failure::from).map(|()| Status::Ok)
}

/// Whether a transfer has come to its end.
#[unsafe(no_mangle)]
pub extern "C" fn aq_ticket_poll(ticket: aq_ticket) -> aq_status {
    enter_with(|| match watched(ticket)? {
        Some(staged) => staged.try_wait().map_or(Ok(Status::NotReady), ended),
        None => Ok(Status::Ok),
    })
}

/// Waits for a transfer's end.
#[unsafe(no_mangle)]
pub extern "C" fn aq_ticket_wait(ticket: aq_ticket) -> aq_status {
    enter_with(|| match watched(ticket)? {
        Some(staged) => ended(staged.wait()),
        None => Ok(Status::Ok),
    })
}

/// Lets go of a ticket; its transfer, if it has not ended, is cancelled and waited for.
#[unsafe(no_mangle)]
pub extern "C" fn aq_ticket_free(ticket: aq_ticket) -> aq_status {
    enter(|| {
        if ticket == 0 {
            return Ok(());
        }
        let under = tickets().remove(&ticket).ok_or_else(|| no_ticket(ticket))?;
        under.end();
        Ok(())
    })
}
