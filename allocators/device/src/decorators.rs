//! Wrappers of resources that only device memory needs. General wrappers, such as limits, are in
//! aquifer-adapters.

use crate::{Block, Request, Resource};
use aquifer_core::{
    Action, DeviceId, MemoryError, Opaque, OpaqueBlock, PoolStats, Recorder, Result,
    event::{Event, MemoryLocation},
};
use aquifer_stream::Stream;
use std::{any::Any, fmt, sync::Arc};

/// A wrapper that records every allocation, free and failure of another resource.
///
/// A free is recorded when the last use of the block is over, since `inner` has the block back only
/// then. Empty blocks are not recorded.
///
/// ```
/// use aquifer::{
///     DeviceId, DevicePool, Log, Opaque, PoolConfig, Request, event::{Action, Recorder, RingSink},
///     sim::Sim,
/// };
/// use std::sync::Arc;
/// let pool = DevicePool::open(Sim::h200(1).driver(), DeviceId(0), PoolConfig::default())?;
/// let ring = Arc::new(RingSink::new(16));
/// let logged = Log::new(pool.clone(), Arc::new(Recorder::new(ring.clone())));
/// drop(logged.allocate(&pool.stream()?, Request::bytes(512))?);
/// let told: Vec<_> = ring.take().iter().map(|event| event.action).collect();
/// assert_eq!(told, [Action::Allocate, Action::Free, Action::Complete]);
/// # Ok::<(), aquifer::MemoryError>(())
/// ```
#[derive(Clone, Debug)]
pub struct Log<R> {
    inner: R,
    recorder: Arc<Recorder>,
}

impl<R: Resource> Log<R> {
    /// Wraps `inner`, and records its events with `recorder`.
    pub fn new(inner: R, recorder: Arc<Recorder>) -> Self {
        Self { inner, recorder }
    }

    fn event(&self, action: Action, stream: u32, address: u64, request: &Request) -> Event {
        let place = MemoryLocation::Device(self.inner.device());
        self.recorder.event(action, place, stream, address, request.size(), request.owner())
    }
}

/// Records the end of a block when it is dropped with the block.
struct RecordFreeOnDrop {
    recorder: Arc<Recorder>,
    place: MemoryLocation,
    stream: u32,
    address: u64,
    request: Request,
}

impl Drop for RecordFreeOnDrop {
    fn drop(&mut self) {
        let Self { recorder, place, stream, address, request } = self;
        for action in [Action::Free, Action::Complete] {
            let event =
                recorder.event(action, *place, *stream, *address, request.size(), request.owner());
            recorder.record(recorder.ticket(), event);
        }
    }
}

impl<R: Resource> Opaque for Log<R> {
    type Stream = Stream;
    type Block = Block;

    fn device(&self) -> DeviceId {
        self.inner.device()
    }
    #[track_caller]
    fn allocate(&self, stream: &Stream, request: Request) -> Result<Block> {
        match self.inner.allocate(stream, request) {
            Ok(block) if block.bytes() == 0 => Ok(block),
            Ok(mut block) => {
                let (stream, address) = (stream.number(), block.address());
                let event = self.event(Action::Allocate, stream, address, &request);
                self.recorder.record(self.recorder.ticket(), event);
                let place = MemoryLocation::Device(self.inner.device());
                let ends: Box<dyn Any + Send + Sync> = Box::new(RecordFreeOnDrop {
                    recorder: self.recorder.clone(),
                    place,
                    stream,
                    address,
                    request,
                });
                block.keep_until_free(ends);
                Ok(block)
            }
            Err(error) => {
                let mut event = self.event(Action::Fail, stream.number(), 0, &request);
                if let MemoryError::OutOfMemory(why) = &error
                    && let Some(refused) = why.refused
                {
                    event = event.refused(refused.budget, refused.budget);
                }
                self.recorder.record(self.recorder.ticket(), event);
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
///
/// See [`FailureCallback`] for an example.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum OnFailure {
    /// Try again, since something was freed.
    Retry,
    /// Return the error.
    GiveUp,
}

/// A wrapper that calls a callback when an allocation fails, and tries again if the callback says
/// so.
///
/// ```
/// use aquifer::{
///     Block, Budget, DeviceId, DevicePool, FailureCallback, Opaque, PoolConfig, Request,
///     device::OnFailure, sim::Sim,
/// };
/// use std::sync::Mutex;
/// let config = PoolConfig::with_budget(Budget::new("small", 64 << 20));
/// let pool = DevicePool::open(Sim::h200(1).driver(), DeviceId(0), config)?;
/// let stream = pool.stream()?;
/// let cache: Mutex<Vec<Block>> = Mutex::new(vec![pool.alloc(&stream, Request::bytes(48 << 20))?]);
/// let patient = FailureCallback::new(pool, 3, |_: &_, _: &_| match cache.lock().map(|mut held| held.pop()) {
///     Ok(Some(_let_go)) => OnFailure::Retry,
///     _ => OnFailure::GiveUp,
/// });
/// assert!(patient.allocate(&stream, Request::bytes(40 << 20)).is_ok());
/// assert!(patient.allocate(&stream, Request::bytes(80 << 20)).is_err());
/// # Ok::<(), aquifer::MemoryError>(())
/// ```
pub struct FailureCallback<R, F> {
    inner: R,
    callback: F,
    /// Maximum number of retries, so that a callback that always returns `Retry` cannot hang the
    /// program.
    tries: u32,
}

impl<R, F> FailureCallback<R, F>
where
    R: Resource,
    F: Fn(&Request, &MemoryError) -> OnFailure + Send + Sync,
{
    /// Wraps `inner`. Calls `callback` after each failure, and retries at most `tries` times.
    pub fn new(inner: R, tries: u32, callback: F) -> Self {
        Self { inner, callback, tries }
    }
}

impl<R, F> Opaque for FailureCallback<R, F>
where
    R: Resource,
    F: Fn(&Request, &MemoryError) -> OnFailure + Send + Sync,
{
    type Stream = Stream;
    type Block = Block;

    fn device(&self) -> DeviceId {
        self.inner.device()
    }
    #[track_caller]
    fn allocate(&self, stream: &Stream, request: Request) -> Result<Block> {
        let mut left = self.tries;
        loop {
            match self.inner.allocate(stream, request) {
                Err(error) if left > 0 && (self.callback)(&request, &error) == OnFailure::Retry => {
                    left -= 1;
                }
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
