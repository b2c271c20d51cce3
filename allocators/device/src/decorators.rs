//! Resources that wrap another and add one thing each.

use crate::{Block, Request, Resource};
use aquifer_core::{Action, Budget, DeviceId, MemoryError, PoolStats, Recorder, Result, event::Place};
use aquifer_stream::Stream;
use std::{any::Any, fmt, sync::Arc};

/// Refuses what would exceed a budget of live bytes: a tenant's, a tag's, a part of the program's.
///
/// Charged are the bytes asked for, from the allocation until the memory is really free, which for a block that another
/// stream still uses is later than its drop.
#[derive(Clone, Debug)]
pub struct Limit<R> {
    inner: R,
    budget: Budget,
}

impl<R: Resource> Limit<R> {
    /// `inner` under `budget`.
    pub fn new(inner: R, budget: Budget) -> Self {
        Self { inner, budget }
    }

    /// The budget.
    pub fn budget(&self) -> &Budget {
        &self.budget
    }
}

impl<R: Resource> Resource for Limit<R> {
    fn device(&self) -> DeviceId {
        self.inner.device()
    }
    #[track_caller]
    fn allocate(&self, stream: &Stream, request: Request) -> Result<Block> {
        // Before the inner resource is asked: a request that is refused never reaches it.
        let charge = self.budget.charge(request.size())?;
        let mut block = self.inner.allocate(stream, request)?;
        block.keep_until_free(Box::new(charge));
        Ok(block)
    }
    fn stats(&self) -> PoolStats {
        self.inner.stats()
    }
    fn trim(&self, keep: u64) -> Result<u64> {
        self.inner.trim(keep)
    }
}

/// Reports every allocation, free and failure of another resource.
#[derive(Clone, Debug)]
pub struct Log<R> {
    inner: R,
    recorder: Arc<Recorder>,
}

impl<R: Resource> Log<R> {
    /// `inner`, reported to `recorder`.
    pub fn new(inner: R, recorder: Arc<Recorder>) -> Self {
        Self { inner, recorder }
    }

    fn report(&self, action: Action, stream: u32, address: u64, request: &Request) {
        let place = Place::Device(self.inner.device());
        let event = self.recorder.event(action, place, stream, address, request.size(), request.owner());
        self.recorder.record(self.recorder.ticket(), event);
    }
}

/// Reports the end of a block when it is dropped with it.
struct Ends {
    recorder: Arc<Recorder>,
    place: Place,
    stream: u32,
    address: u64,
    request: Request,
}

impl Drop for Ends {
    fn drop(&mut self) {
        let Self { recorder, place, stream, address, request } = self;
        for action in [Action::Free, Action::Complete] {
            let event = recorder.event(action, *place, *stream, *address, request.size(), request.owner());
            recorder.record(recorder.ticket(), event);
        }
    }
}

impl<R: Resource> Resource for Log<R> {
    fn device(&self) -> DeviceId {
        self.inner.device()
    }
    #[track_caller]
    fn allocate(&self, stream: &Stream, request: Request) -> Result<Block> {
        match self.inner.allocate(stream, request) {
            Ok(mut block) => {
                let (stream, address) = (stream.number(), block.address());
                self.report(Action::Allocate, stream, address, &request);
                let place = Place::Device(self.inner.device());
                let ends: Box<dyn Any + Send + Sync> =
                    Box::new(Ends { recorder: self.recorder.clone(), place, stream, address, request });
                block.keep_until_free(ends);
                Ok(block)
            }
            Err(error) => {
                self.report(Action::Fail, stream.number(), 0, &request);
                Err(error)
            }
        }
    }
    fn stats(&self) -> PoolStats {
        self.inner.stats()
    }
    fn trim(&self, keep: u64) -> Result<u64> {
        self.inner.trim(keep)
    }
}

/// What to do about a failed allocation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum OnFailure {
    /// Something was freed: ask again.
    Retry,
    /// Answer with the error.
    GiveUp,
}

/// Asks a callback when an allocation fails, and tries again if it says so.
pub struct FailureCallback<R, F> {
    inner: R,
    callback: F,
    /// Tries after the first, at most: a callback that always says retry must not hang its program.
    tries: u32,
}

impl<R, F> FailureCallback<R, F>
where
    R: Resource,
    F: Fn(&Request, &MemoryError) -> OnFailure + Send + Sync,
{
    /// `inner`, with `callback` asked after each failure, for at most `tries` more tries.
    pub fn new(inner: R, tries: u32, callback: F) -> Self {
        Self { inner, callback, tries }
    }
}

impl<R, F> Resource for FailureCallback<R, F>
where
    R: Resource,
    F: Fn(&Request, &MemoryError) -> OnFailure + Send + Sync,
{
    fn device(&self) -> DeviceId {
        self.inner.device()
    }
    #[track_caller]
    fn allocate(&self, stream: &Stream, request: Request) -> Result<Block> {
        let mut left = self.tries;
        loop {
            match self.inner.allocate(stream, request) {
                Err(error) if left > 0 && (self.callback)(&request, &error) == OnFailure::Retry => left -= 1,
                answer => return answer,
            }
        }
    }
    fn stats(&self) -> PoolStats {
        self.inner.stats()
    }
    fn trim(&self, keep: u64) -> Result<u64> {
        self.inner.trim(keep)
    }
}

impl<R: fmt::Debug, F> fmt::Debug for FailureCallback<R, F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FailureCallback")
            .field("inner", &self.inner)
            .field("tries", &self.tries)
            .finish_non_exhaustive()
    }
}

// A resource behind a pointer is one too, so that wrappers compose over `Arc<dyn Resource>`.
impl<R: Resource + ?Sized> Resource for Arc<R> {
    fn device(&self) -> DeviceId {
        (**self).device()
    }
    #[track_caller]
    fn allocate(&self, stream: &Stream, request: Request) -> Result<Block> {
        (**self).allocate(stream, request)
    }
    fn stats(&self) -> PoolStats {
        (**self).stats()
    }
    fn trim(&self, keep: u64) -> Result<u64> {
        (**self).trim(keep)
    }
}
