//! Thread-local state: the runtime that a thread used last, and its streams by handle.
//!
//! - A stream that the thread has used before is found without a lock and without a reference
//!   count.
//! - The state is valid while the runtime's version is unchanged. Retiring a stream and destroying
//!   the runtime change the version.
//! - The state keeps the runtime and the streams alive, so a call under way never sees a destroyed
//!   one.

use crate::{
    entry::Answer,
    runtime::{self, Known, Shared, aq_runtime},
};
use aquifer::{DevicePool, Stream};
use std::{
    cell::{Ref, RefCell},
    ptr,
    sync::{Arc, atomic::Ordering},
};

/// Number of streams that a thread remembers. Further ones replace them.
const STREAMS: usize = 16;

thread_local! {
    static HERE: RefCell<Option<Here>> = const { RefCell::new(None) };
}

struct Here {
    shared: Arc<Shared>,
    version: u64,
    streams: [Option<Seen>; STREAMS],
}

struct Seen {
    device: u32,
    handle: u64,
    known: Known,
}

/// Returns the slot of a stream. Handles are addresses or small numbers.
#[inline]
fn place(device: u32, handle: u64) -> usize {
    (handle ^ handle >> 4 ^ handle >> 12 ^ u64::from(device)) as usize % STREAMS
}

impl Here {
    #[inline]
    fn is(&self, runtime: aq_runtime) -> bool {
        self.shared.id == runtime && self.shared.version.load(Ordering::Acquire) == self.version
    }

    /// Returns a remembered stream, if the handle still denotes it.
    #[inline]
    fn seen(&self, device: u32, handle: u64) -> Option<&Seen> {
        let seen = self.streams[place(device, handle)].as_ref()?;
        (seen.handle == handle && seen.device == device && seen.known.is_current()).then_some(seen)
    }
}

/// Borrows this thread's state, unless it is empty or the thread is ending. The state cannot change
/// while the result is held.
///
/// The work is not done within `LocalKey::with`: the compiler does not inline a closure of that
/// size, which would cost every call another function call with its arguments in memory.
///
/// # Safety
/// 1. The result does not outlive the current call of the library.
#[inline(always)]
#[expect(unsafe_code, reason = "takes a thread's own value out of the closure that sees it")]
unsafe fn known<'a>() -> Option<Ref<'a, Here>> {
    let here = HERE.try_with(ptr::from_ref).ok()?;
    // SAFETY: 1. The value exists until the thread ends, which is after the current call. 2. Only
    // this thread has access to it.
    let here = unsafe { &*here };
    Ref::filter_map(here.try_borrow().ok()?, Option::as_ref).ok()
}

/// Runs `work` with an open runtime.
#[inline(always)]
#[expect(unsafe_code, reason = "asks what the thread knows")]
pub(crate) fn with<R>(
    runtime: aq_runtime,
    work: impl FnOnce(&Arc<Shared>) -> Answer<R>,
) -> Answer<R> {
    // SAFETY: 1. The result is dropped in this function.
    match unsafe { known() } {
        Some(here) if here.is(runtime) => return work(&here.shared),
        _ => {}
    }
    work(&remember(runtime)?)
}

/// Runs `work` with an open runtime, the pool of a device, and the stream that a raw handle
/// denotes.
///
/// # Safety
/// As [`Shared::stream`].
#[inline(always)]
#[expect(unsafe_code, reason = "passes a caller's promise on")]
pub(crate) unsafe fn with_stream<R>(
    runtime: aq_runtime,
    device: u32,
    handle: u64,
    work: impl FnOnce(&Arc<Shared>, &DevicePool, &Stream) -> Answer<R>,
) -> Answer<R> {
    // SAFETY: 1. The result is dropped in this function.
    match unsafe { known() } {
        Some(here) if here.is(runtime) => {
            if let Some(seen) = here.seen(device, handle) {
                return work(&here.shared, here.shared.pool(device)?, &seen.known.stream);
            }
        }
        _ => {}
    }
    // SAFETY: 1. 2. Guaranteed by the caller.
    let (shared, known) = unsafe { remember_with_stream(runtime, device, handle) }?;
    work(&shared, shared.pool(device)?, &known.stream)
}

/// Looks up a runtime and a stream, and remembers them.
///
/// # Safety
/// As [`Shared::stream`].
#[cold]
#[expect(unsafe_code, reason = "passes a caller's promise on")]
unsafe fn remember_with_stream(
    runtime: aq_runtime,
    device: u32,
    handle: u64,
) -> Answer<(Arc<Shared>, Known)> {
    let shared = remember(runtime)?;
    // SAFETY: 1. 2. Guaranteed by the caller.
    let known = unsafe { shared.stream(device, handle) }?;
    remember_stream(&shared, Seen { device, handle, known: known.clone() });
    Ok((shared, known))
}

/// Looks up a runtime, and remembers it.
#[cold]
fn remember(runtime: aq_runtime) -> Answer<Arc<Shared>> {
    let found = runtime::open(runtime);
    let before = HERE.try_with(|here| {
        let mut here = here.try_borrow_mut().ok()?;
        if here.as_ref().is_some_and(|here| here.is(runtime)) {
            return None;
        }
        // The version is read before `closed` is checked below: a destruction sets `closed` first,
        // and then changes the version.
        let new = found.as_ref().ok().map(|shared| Here {
            shared: shared.clone(),
            version: shared.version.load(Ordering::Acquire),
            streams: Default::default(),
        });
        // An invalid number does not replace a valid runtime.
        let stale = here
            .as_ref()
            .is_some_and(|here| here.version != here.shared.version.load(Ordering::Acquire));
        if new.is_some() || stale { std::mem::replace(&mut *here, new) } else { None }
    });
    // This may be the last reference to a runtime, whose drop calls the driver.
    drop(before);
    let shared = found?;
    if shared.closed.load(Ordering::Acquire) {
        forget(runtime);
        return runtime::open(runtime);
    }
    Ok(shared)
}

/// Remembers a stream, if its runtime is the one remembered.
fn remember_stream(shared: &Arc<Shared>, seen: Seen) {
    let before = HERE.try_with(|here| {
        let mut here = here.try_borrow_mut().ok()?;
        let here = here.as_mut().filter(|here| here.is(shared.id))?;
        here.streams[place(seen.device, seen.handle)].replace(seen)
    });
    drop(before);
}

/// Removes a runtime from this thread's state.
pub(crate) fn forget(runtime: aq_runtime) {
    let before = HERE.try_with(|here| {
        let mut here = here.try_borrow_mut().ok()?;
        if here.as_ref().is_some_and(|here| here.shared.id == runtime) { here.take() } else { None }
    });
    drop(before);
}
