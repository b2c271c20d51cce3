//! What a thread knows: the runtime it called for last, and streams by their handles.
//!
//! Nothing is locked or counted to find a stream that the thread has used before. What it remembers
//! is good while the runtime's version stays; retiring a stream and destroying the runtime change
//! that. Meanwhile a thread keeps what it remembers alive, so a call that has begun meets nothing
//! that has gone.

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

/// Streams that a thread remembers. More take turns.
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

/// Where a stream is remembered. Handles are addresses, or small numbers.
#[inline]
fn place(device: u32, handle: u64) -> usize {
    (handle ^ handle >> 4 ^ handle >> 12 ^ u64::from(device)) as usize % STREAMS
}

impl Here {
    #[inline]
    fn is(&self, runtime: aq_runtime) -> bool {
        self.shared.id == runtime && self.shared.version.load(Ordering::Acquire) == self.version
    }

    /// A stream that is remembered, if the handle still means it.
    #[inline]
    fn seen(&self, device: u32, handle: u64) -> Option<&Seen> {
        let seen = self.streams[place(device, handle)].as_ref()?;
        (seen.handle == handle && seen.device == device && seen.known.is_current()).then_some(seen)
    }
}

/// What this thread knows, unless it is ending or knows nothing. While the answer is held it knows
/// nothing else.
///
/// Work is not done within `LocalKey::with`: the compiler keeps a closure that long apart, and
/// every call would go through a function more, with its arguments in memory.
///
/// # Safety
/// 1. The answer does not outlive the call of the library that asks.
#[inline(always)]
#[expect(unsafe_code, reason = "takes a thread's own value out of the closure that sees it")]
unsafe fn known<'a>() -> Option<Ref<'a, Here>> {
    let here = HERE.try_with(ptr::from_ref).ok()?;
    // SAFETY: 1. it is there until the thread ends, which it does not before the call that it is in
    // is over. 2. nobody but this thread has it.
    let here = unsafe { &*here };
    Ref::filter_map(here.try_borrow().ok()?, Option::as_ref).ok()
}

/// Runs `work` with a runtime that is open.
#[inline(always)]
#[expect(unsafe_code, reason = "asks what the thread knows")]
pub(crate) fn with<R>(
    runtime: aq_runtime,
    work: impl FnOnce(&Arc<Shared>) -> Answer<R>,
) -> Answer<R> {
    // SAFETY: 1. it is dropped in here.
    match unsafe { known() } {
        Some(here) if here.is(runtime) => return work(&here.shared),
        _ => {}
    }
    work(&remember(runtime)?)
}

/// Runs `work` with a runtime that is open, the pool of a device and what a raw handle means there.
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
    // SAFETY: 1. it is dropped in here.
    match unsafe { known() } {
        Some(here) if here.is(runtime) => {
            if let Some(seen) = here.seen(device, handle) {
                return work(&here.shared, here.shared.pool(device)?, &seen.known.stream);
            }
        }
        _ => {}
    }
    // SAFETY: 1. 2. the caller's.
    let (shared, known) = unsafe { remember_with_stream(runtime, device, handle) }?;
    work(&shared, shared.pool(device)?, &known.stream)
}

/// Looks a runtime and a stream up, and remembers them.
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
    // SAFETY: 1. 2. the caller's.
    let known = unsafe { shared.stream(device, handle) }?;
    remember_stream(&shared, Seen { device, handle, known: known.clone() });
    Ok((shared, known))
}

/// Looks a runtime up, and remembers it.
#[cold]
fn remember(runtime: aq_runtime) -> Answer<Arc<Shared>> {
    let found = runtime::open(runtime);
    let before = HERE.try_with(|here| {
        let mut here = here.try_borrow_mut().ok()?;
        if here.as_ref().is_some_and(|here| here.is(runtime)) {
            return None;
        }
        // Before it is looked at whether the runtime is open: who closes it changes the version
        // afterwards.
        let new = found.as_ref().ok().map(|shared| Here {
            shared: shared.clone(),
            version: shared.version.load(Ordering::Acquire),
            streams: Default::default(),
        });
        // A number that is none is no reason to forget one that is good.
        let stale = here
            .as_ref()
            .is_some_and(|here| here.version != here.shared.version.load(Ordering::Acquire));
        if new.is_some() || stale { std::mem::replace(&mut *here, new) } else { None }
    });
    // The last of a runtime may go with it, which calls the driver.
    drop(before);
    let shared = found?;
    if shared.closed.load(Ordering::Acquire) {
        forget(runtime);
        return runtime::open(runtime);
    }
    Ok(shared)
}

/// Remembers a stream, if its runtime is the one that is remembered.
fn remember_stream(shared: &Arc<Shared>, seen: Seen) {
    let before = HERE.try_with(|here| {
        let mut here = here.try_borrow_mut().ok()?;
        let here = here.as_mut().filter(|here| here.is(shared.id))?;
        here.streams[place(seen.device, seen.handle)].replace(seen)
    });
    drop(before);
}

/// Lets go of a runtime, as far as this thread goes.
pub(crate) fn forget(runtime: aq_runtime) {
    let before = HERE.try_with(|here| {
        let mut here = here.try_borrow_mut().ok()?;
        if here.as_ref().is_some_and(|here| here.shared.id == runtime) { here.take() } else { None }
    });
    drop(before);
}
