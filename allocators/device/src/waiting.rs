//! Allocations that wait for room without blocking a thread.

use crate::{Block, DevicePool, Request, Resource, Tenant, base::waits::without_waiting};
use aquifer_core::{MemoryError, OutOfMemory, Result, wake::Alarm};
use aquifer_stream::Stream;
use std::{
    fmt,
    future::Future,
    pin::Pin,
    task::{Context, Poll},
    time::{Duration, Instant},
};

/// The first pause before a request is retried, and the longest.
const PAUSES: (Duration, Duration) = (Duration::from_micros(100), Duration::from_millis(5));

/// A request for a block that waits for room. A `Future` that needs no async runtime: see
/// [`aquifer_core::wake`].
///
/// Each poll tries once, with every step of [`DevicePool::alloc`] that does not wait. It may call
/// the driver. Memory that becomes free between polls, by finished work or by blocks dropped on any
/// thread, is found within 5 ms. A request larger than the limit that refuses it, and any error
/// that is not about room, is returned at once. Each try without room counts as a failed allocation
/// in the pool's statistics.
///
/// Dropping it only ends the wait, since it holds no memory before it is ready.
///
/// ```
/// use aquifer::{Budget, DeviceId, DevicePool, MemoryError, PoolConfig, Request, sim::Sim};
/// use std::{future::Future, pin::pin, task::{Context, Poll, Waker}};
/// let config = PoolConfig::with_budget(Budget::new("small", 64 << 20));
/// let pool = DevicePool::open(Sim::h200(1).driver(), DeviceId(0), config)?;
/// let s = pool.stream()?;
/// let held = pool.alloc(&s, Request::bytes(48 << 20))?;
/// let mut context = Context::from_waker(Waker::noop());
/// let mut waiting = pin!(pool.alloc_async(&s, Request::bytes(32 << 20)));
/// assert!(waiting.as_mut().poll(&mut context).is_pending());
/// drop(held);
/// let Poll::Ready(block) = waiting.poll(&mut context) else { panic!("there is room") };
/// assert_eq!(block?.bytes(), 32 << 20);
/// # Ok::<(), MemoryError>(())
/// ```
#[must_use = "a future waits only while it is polled"]
pub struct Allocating<R> {
    resource: R,
    stream: Stream,
    request: Request,
    deadline: Deadline,
    pause: Duration,
    alarm: Alarm,
}

enum Deadline {
    /// This long after the first poll.
    After(Duration),
    /// At this time. `None` waits without limit.
    At(Option<Instant>),
}

impl<R> Allocating<R> {
    fn new(resource: R, stream: &Stream, request: Request, wait: Duration) -> Self {
        let (stream, deadline) = (stream.clone(), Deadline::After(wait));
        Self { resource, stream, request, deadline, pause: PAUSES.0, alarm: Alarm::new() }
    }

    /// Sets a deadline. A poll after it returns the refusal of that moment. `None` waits without
    /// limit. The default is the pool's [`wait`](crate::PoolConfig::wait), counted from the first
    /// poll.
    pub fn until(mut self, deadline: impl Into<Option<Instant>>) -> Self {
        self.deadline = Deadline::At(deadline.into());
        self
    }
}

/// Returns whether waiting may help: whether the refusing budget could grant the request if less
/// were in use.
fn may_become_free(refused: &OutOfMemory) -> bool {
    refused.refused.as_ref().is_none_or(|by| by.requested <= by.limit)
}

// No part of it is self-referential.
impl<R> Unpin for Allocating<R> {}

impl<R: Resource> Future for Allocating<R> {
    type Output = Result<Block>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<Block>> {
        let this = &mut *self;
        if let Deadline::After(wait) = this.deadline {
            this.deadline = Deadline::At(Instant::now().checked_add(wait));
        }
        let Deadline::At(deadline) = this.deadline else { return Poll::Pending };
        let tried = without_waiting(|| this.resource.allocate(&this.stream, this.request));
        let waits =
            matches!(&tried, Err(MemoryError::OutOfMemory(refused)) if may_become_free(refused));
        if !waits || deadline.is_some_and(|deadline| Instant::now() >= deadline) {
            this.alarm.clear();
            return Poll::Ready(tried);
        }
        let left = deadline.map_or(this.pause, |at| at.saturating_duration_since(Instant::now()));
        this.alarm.after(this.pause.min(left), context.waker());
        this.pause = (this.pause * 2).min(PAUSES.1);
        Poll::Pending
    }
}

impl<R: fmt::Debug> fmt::Debug for Allocating<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Allocating")
            .field("resource", &self.resource)
            .field("request", &self.request)
            .finish_non_exhaustive()
    }
}

impl DevicePool {
    /// Returns a future that allocates like [`DevicePool::alloc`], waits for room and blocks no
    /// thread.
    ///
    /// [`DeviceBuffer::from_block`](crate::DeviceBuffer::from_block) gives the block a type.
    pub fn alloc_async(&self, stream: &Stream, request: Request) -> Allocating<DevicePool> {
        Allocating::new(self.clone(), stream, request, self.core().config.wait)
    }
}

impl Tenant {
    /// Returns a future that allocates like [`Tenant::alloc`], waits until the tenant's budget and
    /// the pool have room, and blocks no thread.
    pub fn alloc_async(&self, stream: &Stream, request: Request) -> Allocating<Tenant> {
        Allocating::new(self.clone(), stream, request, self.pool().core().config.wait)
    }
}
