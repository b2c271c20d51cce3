//! Thread-local state: the runtime that a thread used last, and its streams by handle.
//!
//! - A stream that the thread has used before is found without a lock and without a reference
//!   count.
//! - The state is valid while the runtime's version is unchanged. Retiring a stream and destroying
//!   the runtime change the version.
//! - The state keeps the runtime and the streams alive, so a call under way never sees a destroyed
//!   one.

use crate::{
    entry::CallResult,
    table::{self, ResolvedStream, SharedRuntime, aq_runtime},
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
    static THREAD_STATE: RefCell<Option<ThreadState>> = const { RefCell::new(None) };
}

struct ThreadState {
    shared: Arc<SharedRuntime>,
    version: u64,
    streams: [Option<StreamEntry>; STREAMS],
}

struct StreamEntry {
    device: u32,
    handle: u64,
    resolved: ResolvedStream,
}

/// Returns the slot of a stream. Handles are addresses or small numbers.
#[inline]
fn index_of(device: u32, handle: u64) -> usize {
    (handle ^ handle >> 4 ^ handle >> 12 ^ u64::from(device)) as usize % STREAMS
}

impl ThreadState {
    #[inline]
    fn is_for(&self, runtime: aq_runtime) -> bool {
        self.shared.id == runtime && self.shared.version.load(Ordering::Acquire) == self.version
    }

    /// Returns a remembered stream, if the handle still denotes it.
    #[inline]
    fn stream_entry(&self, device: u32, handle: u64) -> Option<&StreamEntry> {
        let entry = self.streams[index_of(device, handle)].as_ref()?;
        (entry.handle == handle && entry.device == device && entry.resolved.is_current())
            .then_some(entry)
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
unsafe fn current<'a>() -> Option<Ref<'a, ThreadState>> {
    let state = THREAD_STATE.try_with(ptr::from_ref).ok()?;
    // SAFETY: 1. The value exists until the thread ends, which is after the current call. 2. Only
    // this thread has access to it.
    let state = unsafe { &*state };
    Ref::filter_map(state.try_borrow().ok()?, Option::as_ref).ok()
}

/// Runs `work` with an open runtime.
#[inline(always)]
#[expect(unsafe_code, reason = "asks what the thread knows")]
pub(crate) fn with<R>(
    runtime: aq_runtime,
    work: impl FnOnce(&Arc<SharedRuntime>) -> CallResult<R>,
) -> CallResult<R> {
    // SAFETY: 1. The result is dropped in this function.
    match unsafe { current() } {
        Some(state) if state.is_for(runtime) => return work(&state.shared),
        _ => {}
    }
    work(&load(runtime)?)
}

/// Runs `work` with an open runtime, the pool of a device, and the stream that a raw handle
/// denotes.
///
/// # Safety
/// As [`SharedRuntime::stream`].
#[inline(always)]
#[expect(unsafe_code, reason = "passes a caller's promise on")]
pub(crate) unsafe fn with_stream<R>(
    runtime: aq_runtime,
    device: u32,
    handle: u64,
    work: impl FnOnce(&Arc<SharedRuntime>, &DevicePool, &Stream) -> CallResult<R>,
) -> CallResult<R> {
    // SAFETY: 1. The result is dropped in this function.
    match unsafe { current() } {
        Some(state) if state.is_for(runtime) => {
            if let Some(entry) = state.stream_entry(device, handle) {
                return work(&state.shared, state.shared.pool(device)?, &entry.resolved.stream);
            }
        }
        _ => {}
    }
    // SAFETY: 1. 2. Guaranteed by the caller.
    let (shared, resolved) = unsafe { load_with_stream(runtime, device, handle) }?;
    work(&shared, shared.pool(device)?, &resolved.stream)
}

/// Looks up a runtime and a stream, and remembers them.
///
/// # Safety
/// As [`SharedRuntime::stream`].
#[cold]
#[expect(unsafe_code, reason = "passes a caller's promise on")]
unsafe fn load_with_stream(
    runtime: aq_runtime,
    device: u32,
    handle: u64,
) -> CallResult<(Arc<SharedRuntime>, ResolvedStream)> {
    let shared = load(runtime)?;
    // SAFETY: 1. 2. Guaranteed by the caller.
    let resolved = unsafe { shared.stream(device, handle) }?;
    store_stream(&shared, StreamEntry { device, handle, resolved: resolved.clone() });
    Ok((shared, resolved))
}

/// Looks up a runtime, and remembers it.
#[cold]
fn load(runtime: aq_runtime) -> CallResult<Arc<SharedRuntime>> {
    let found = table::open(runtime);
    let before = THREAD_STATE.try_with(|state| {
        let mut state = state.try_borrow_mut().ok()?;
        if state.as_ref().is_some_and(|state| state.is_for(runtime)) {
            return None;
        }
        // The version is read before `closed` is checked below: a destruction sets `closed` first,
        // and then changes the version.
        let new = found.as_ref().ok().map(|shared| ThreadState {
            shared: shared.clone(),
            version: shared.version.load(Ordering::Acquire),
            streams: Default::default(),
        });
        // An invalid number does not replace a valid runtime.
        let stale = state
            .as_ref()
            .is_some_and(|state| state.version != state.shared.version.load(Ordering::Acquire));
        if new.is_some() || stale { std::mem::replace(&mut *state, new) } else { None }
    });
    // This may be the last reference to a runtime, whose drop calls the driver.
    drop(before);
    let shared = found?;
    if shared.closed.load(Ordering::Acquire) {
        clear(runtime);
        return table::open(runtime);
    }
    Ok(shared)
}

/// Remembers a stream, if its runtime is the one remembered.
fn store_stream(shared: &Arc<SharedRuntime>, entry: StreamEntry) {
    let before = THREAD_STATE.try_with(|state| {
        let mut state = state.try_borrow_mut().ok()?;
        let state = state.as_mut().filter(|state| state.is_for(shared.id))?;
        state.streams[index_of(entry.device, entry.handle)].replace(entry)
    });
    drop(before);
}

/// Removes a runtime from this thread's state.
pub(crate) fn clear(runtime: aq_runtime) {
    let before = THREAD_STATE.try_with(|state| {
        let mut state = state.try_borrow_mut().ok()?;
        if state.as_ref().is_some_and(|state| state.shared.id == runtime) {
            state.take()
        } else {
            None
        }
    });
    drop(before);
}
