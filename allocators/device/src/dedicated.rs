//! Dedicated memory: blocks and reserved elements at addresses of their own, outside the caches.
//!
//! - Each is a [`Span`]: an exclusive range of addresses, and what is mapped there. Nothing in it
//!   is given to another stream, moved or recycled.
//! - What the owner frees becomes *retiring*: it stays mapped and charged until the host has seen
//!   the work done that used it and no registration keeps its address. A slow path of the pool, a
//!   trim or the end of the pool then unmaps it.
//! - So no drop calls the driver, and none waits.
//! - *Retiring* is the word for memory that is freed and still mapped. In statistics it is part of
//!   `pending`. Memory that the driver refuses to unmap stays retiring. Memory that is unmapped,
//!   and that the driver refuses to release, is *stranded*, and so is all that it refuses at the
//!   end.
//!
//! ```text
//!   address_reserve ──▶ nothing ──create, map, set access──▶ mapped ──owner frees──▶ retiring
//!                          ▲                                   ▲                        │   │
//!                          │                                   └──── committed again ───┘   │
//!                          └──────── unmap, release ◀── its work done, no registration ─────┘
//! ```

mod release;
mod slot_usage;
mod span;

pub(crate) use release::SpanRelease;
pub(crate) use span::Span;
use span::SpanContext;

use crate::{
    PoolConfig,
    backing::handle::{Funds, Handle, HandleError, HeldBytes},
    base::{
        addresses::FreedAddresses,
        driver::notify_observer,
        released::{Released, release_or_strand},
        usage::{LiveUsage, TagHoldings},
        waits::{has_passed, try_wait, wait_for_epoch},
    },
};
use aquifer_core::{
    Action, Budget, Charge, DeviceId, MemoryError, OutOfBudget, PoolStats, Recorder, Result, Tag,
    budget::Holding,
    event::{BlockKind, Event, EventTicket, MemoryLocation},
};
use aquifer_driver::{Access, DeviceInfo, DeviceRange, Driver, ExportTypes, Ownership, Relaxed};
use aquifer_status::{PoolFigures, PoolSlot};
use aquifer_stream::Timeline;
use std::{
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Instant,
};

/// The dedicated memory of one pool.
///
/// Owners hold a reference to it, and it holds the retiring spans. So it is dropped after the pool,
/// the blocks and the registrations, and then releases what is left.
pub(crate) struct DedicatedPool {
    pub(crate) driver: Arc<dyn Driver>,
    pub(crate) device: DeviceId,
    /// The devices that mappings grant access to.
    accessors: Arc<[DeviceId]>,
    /// Size and alignment of physical handles; 0 on devices without virtual memory.
    granularity: u64,
    /// Bytes by which reserved elements are committed.
    step: u64,
    /// Whether blocks come from `cuMemAlloc`: on devices without virtual memory, and in bypass
    /// mode, where memory checkers must see them.
    plain: bool,
    /// What stable blocks can be exported as.
    pub(crate) export: ExportTypes,
    /// What all memory can be exported as besides, if the system allows it.
    default_export: ExportTypes,
    held: Arc<HeldBytes>,
    recorder: Option<Arc<Recorder>>,
    observed: bool,
    generations: AtomicU64,
    /// Number of announced captures. While there are any, no thread may wait for the device.
    pub(crate) announced: AtomicU64,
    /// Number of times that a freed block may have dropped attached values.
    completions: AtomicU64,
    /// Numbers of releases begun, and of those that are counted in the usage.
    releases_begun: AtomicU64,
    releases_counted: AtomicU64,
    state: Mutex<State>,
    /// The pool's slot, and the slot of this part.
    status: Arc<PoolSlot>,
    part: OnceLock<PoolSlot>,
}

#[derive(Default)]
struct State {
    usage: DedicatedUsage,
    /// Spans with retiring memory.
    retiring: Vec<Arc<Span>>,
    /// Where blocks of bypass mode were freed.
    freed: FreedAddresses,
}

/// Statistics of dedicated memory, in bytes and counts.
#[derive(Default)]
pub(crate) struct DedicatedUsage {
    /// Live memory, and the blocks that are no reserved elements.
    pub(crate) live: LiveUsage,
    /// Retiring memory, whatever it waits for, and freed blocks of slot pools that other streams
    /// still use.
    pub(crate) pending: u64,
    /// Free parts of memory that several blocks share.
    cached: u64,
    /// Memory of graphs, live or free.
    pub(crate) graphs: u64,
    /// Free memory of graphs.
    pub(crate) free_of_graphs: u64,
    failures: u64,
    growths: u64,
    reaped: u64,
    /// Bytes that each tag has requested.
    by_tag: TagHoldings,
}

impl DedicatedUsage {
    /// Counts memory that becomes live.
    pub(crate) fn record_alloc(&mut self, live: u64, requested: u64, tag: Tag) {
        self.live.add_bytes(live, requested);
        self.by_tag.of_mut(tag).bytes += requested;
    }

    /// Counts live memory that its owner frees: it is pending until released.
    pub(crate) fn record_free(&mut self, live: u64, requested: u64, tag: Tag) {
        self.live.remove_bytes(live, requested);
        self.by_tag.of_mut(tag).bytes -= requested;
        self.pending += live;
    }
}

impl DedicatedPool {
    pub(crate) fn new(
        driver: &Arc<dyn Driver>,
        info: &DeviceInfo,
        config: &PoolConfig,
        accessors: Arc<[DeviceId]>,
        live: LiveUsage,
        held: HeldBytes,
        status: Arc<PoolSlot>,
    ) -> Arc<Self> {
        let granularity = if info.virtual_memory { info.granularity } else { 0 };
        let step = if granularity > 0 {
            config.handle_bytes.max(1).next_multiple_of(granularity)
        } else {
            0
        };
        Arc::new(Self {
            driver: driver.clone(),
            device: info.device,
            accessors,
            granularity,
            step,
            plain: granularity == 0 || (config.bypass && config.export == ExportTypes::NONE),
            export: config.export,
            default_export: config.default_export(info.export_types),
            held: Arc::new(held),
            recorder: config.recorder.clone(),
            observed: driver.observer().is_some(),
            generations: AtomicU64::new(1),
            announced: AtomicU64::new(0),
            completions: AtomicU64::new(0),
            releases_begun: AtomicU64::new(0),
            releases_counted: AtomicU64::new(0),
            state: Mutex::new(State {
                usage: DedicatedUsage { live, ..Default::default() },
                ..Default::default()
            }),
            status,
            part: OnceLock::new(),
        })
    }

    /// Returns the counter of bytes held from the driver.
    pub(crate) fn held(&self) -> &HeldBytes {
        &self.held
    }

    /// Returns the bytes by which reserved elements are committed, or 0 on devices without virtual
    /// memory.
    pub(crate) fn step(&self) -> u64 {
        self.step
    }

    /// Returns whether events are recorded.
    pub(crate) fn is_recorded(&self) -> bool {
        self.recorder.is_some()
    }

    pub(crate) fn is_plain(&self) -> bool {
        self.plain
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the statistics under the lock.
    pub(crate) fn update_usage(&self, change: impl FnOnce(&mut DedicatedUsage)) {
        let mut state = self.state();
        change(&mut state.usage);
        // Pools without dedicated memory need no slot for it.
        self.part.get_or_init(|| self.status.part());
        self.publish_usage(&state.usage);
    }

    /// Publishes the statistics, if there was any dedicated memory.
    pub(crate) fn publish(&self) {
        if self.part.get().is_some() {
            self.publish_usage(&self.state().usage);
        }
    }

    /// Writes to memory only. The lock is held.
    fn publish_usage(&self, usage: &DedicatedUsage) {
        if let Some(part) = self.part.get() {
            part.publish(|| {
                let mut stats = PoolStats::default();
                self.add_usage(usage, &mut stats);
                usage.live.peak().set_in(&mut stats);
                PoolFigures { stats, ..PoolFigures::default() }
            });
        }
    }

    pub(crate) fn add_to(&self, stats: &mut PoolStats) {
        self.add_usage(&self.state().usage, stats);
    }

    fn add_usage(&self, a: &DedicatedUsage, stats: &mut PoolStats) {
        debug_assert!(a.free_of_graphs <= a.graphs, "graphs have more free memory than memory");
        a.live.add_to(stats);
        stats.pending += a.pending + self.held.stuck();
        // Between the two updates of a free of a graph, its bytes are in one of the counts only.
        stats.cached += a.cached.saturating_sub(a.free_of_graphs);
        stats.graphs += a.graphs;
        stats.failures += a.failures;
        stats.growths += a.growths;
        stats.reaped += a.reaped;
        stats.physical += self.held.now();
    }

    /// Counts a block of bypass mode.
    pub(crate) fn plain_allocated(&self, address: u64, bytes: u64, tag: Tag) {
        self.state().freed.remove(address);
        self.record_block_alloc(bytes, bytes, tag);
        self.record_block(tag);
    }

    /// Counts the free of a block of bypass mode.
    pub(crate) fn plain_freed(&self, address: u64, bytes: u64, tag: Tag) {
        self.state().freed.insert(address);
        self.record_block_free(bytes, bytes, tag);
    }

    /// Returns whether a block of bypass mode was freed at this address, and none has been
    /// allocated there since.
    pub(crate) fn was_freed(&self, address: u64) -> bool {
        self.state().freed.contains(address)
    }

    /// Returns the bytes that owners have freed and the driver does not have back yet.
    pub(crate) fn retiring(&self) -> u64 {
        self.state().usage.pending + self.held.stuck()
    }

    /// Returns what each tag holds: stable blocks by their requested bytes, reserved elements by
    /// their committed bytes.
    pub(crate) fn holdings(&self) -> Vec<Holding> {
        self.state().usage.by_tag.iter().filter(|h| h.bytes > 0).copied().collect()
    }

    /// Turns an error of the driver into one of this device.
    pub(crate) fn driver_error(&self, error: aquifer_core::DriverError) -> MemoryError {
        MemoryError::driver(self.device, error)
    }

    /// Returns the size of a dedicated block for `bytes`.
    pub(crate) fn round_up(&self, bytes: u64) -> u64 {
        bytes.next_multiple_of(if self.plain { crate::BLOCK_ALIGN } else { self.granularity })
    }

    fn span_context(&self) -> SpanContext {
        let (driver, accessors) = (self.driver.clone(), self.accessors.clone());
        SpanContext { driver, device: self.device, accessors }
    }

    /// Reserves `bytes` of addresses in slots of `slot` bytes. Maps nothing.
    pub(crate) fn reserve_span(
        &self,
        kind: BlockKind,
        bytes: u64,
        slot: u64,
        align: u64,
    ) -> Result<Arc<Span>> {
        let align = align.max(self.granularity);
        let address = self
            .driver
            .address_reserve(self.device, bytes, align)
            .map_err(|e| self.driver_error(e))?;
        Ok(Arc::new(Span::mapped(self.span_context(), kind, address, bytes, slot)))
    }

    /// Creates a physical handle that can be exported at least as `required`.
    pub(crate) fn handle(
        &self,
        charge: Charge,
        required: ExportTypes,
    ) -> Result<Arc<Handle>, HandleError> {
        let types = (required, required.and(self.default_export));
        Handle::create(&self.driver, self.device, types, charge, &self.held)
            .map_err(|(error, _)| HandleError::Driver(error))
    }

    /// Allocates memory for a block of `bytes`, which is rounded: one handle at addresses of its
    /// own that can be exported at least as `export`, or one allocation of the driver.
    pub(crate) fn allocate_span(
        &self,
        kind: BlockKind,
        bytes: u64,
        align: u64,
        export: ExportTypes,
        funds: Funds<'_>,
    ) -> Result<Arc<Span>, HandleError> {
        debug_assert_eq!(bytes, self.round_up(bytes), "a size is not rounded");
        if self.plain {
            return self.allocate_whole(kind, bytes, funds);
        }
        let charge = funds.charge(bytes).map_err(HandleError::Budget)?;
        let handle = self.handle(charge, export)?;
        self.map_span(kind, handle, bytes, align).map_err(HandleError::Driver)
    }

    /// Allocates memory for a block of `bytes` as one allocation of the driver.
    pub(crate) fn allocate_whole(
        &self,
        kind: BlockKind,
        bytes: u64,
        funds: Funds<'_>,
    ) -> Result<Arc<Span>, HandleError> {
        let charge = funds.charge(bytes).map_err(HandleError::Budget)?;
        let _relaxed = Relaxed::enter(&*self.driver);
        let address = self.driver.mem_alloc(self.device, bytes).map_err(HandleError::Driver)?;
        self.held.add(bytes);
        let context = self.span_context();
        Ok(Arc::new(Span::whole(context, kind, address, bytes, charge, &self.held)))
    }

    /// Maps one whole handle at addresses of its own. On failure nothing stays mapped, except for
    /// what the driver refuses to unmap, which then retires.
    pub(crate) fn map_span(
        &self,
        kind: BlockKind,
        handle: Arc<Handle>,
        bytes: u64,
        align: u64,
    ) -> Result<Arc<Span>, aquifer_core::DriverError> {
        let align = align.max(self.granularity);
        let address = self.driver.address_reserve(self.device, bytes, align)?;
        let span = Arc::new(Span::mapped(self.span_context(), kind, address, bytes, bytes));
        self.close_unless(self.map(&span, vec![(0, handle)]), span)
    }

    /// Returns a new span that is mapped, or closes it.
    fn close_unless<E>(&self, mapped: Result<(), E>, span: Arc<Span>) -> Result<Arc<Span>, E> {
        if mapped.is_err() {
            span.close();
            self.enqueue_retiring(&span);
            self.reap_nonblocking();
        }
        mapped.map(|()| span)
    }

    /// Maps imported handles of these sizes, `bytes` in all, one behind the other at addresses of
    /// their own, to be read or also to be written. On failure nothing stays mapped, except for
    /// what the driver refuses to unmap.
    pub(crate) fn map_imported(
        &self,
        kind: BlockKind,
        parts: Vec<(u64, Arc<Handle>)>,
        bytes: u64,
        access: Access,
    ) -> Result<Arc<Span>, aquifer_core::DriverError> {
        let address = self.driver.address_reserve(self.device, bytes, self.granularity)?;
        let span = Arc::new(Span::mapped(self.span_context(), kind, address, bytes, bytes));
        self.close_unless(span.map_imported(parts, access), span)
    }

    /// Waits for the device and releases a span that its owner has freed. Returns whether it is
    /// released. Not while a capture is announced.
    pub(crate) fn release_now(&self, span: &Arc<Span>) -> Result<bool> {
        for (timeline, epoch) in span.retiring_work() {
            timeline.fence(epoch)?;
        }
        span.require_synchronize();
        if self.announced.load(Ordering::Relaxed) > 0 {
            return Ok(false);
        }
        span.synchronize_if_required()?;
        self.reap_span(span).refused.map_or(Ok(span.is_over()), Err)
    }

    /// Maps handles at empty slots of a span. On failure nothing stays mapped, except for what the
    /// driver refuses to unmap, which then retires.
    pub(crate) fn map(
        &self,
        span: &Arc<Span>,
        parts: Vec<(u64, Arc<Handle>)>,
    ) -> Result<(), aquifer_core::DriverError> {
        span.map(parts).map_err(|(error, stuck)| {
            if stuck > 0 {
                self.update_usage(|a| a.pending += stuck);
                self.enqueue_retiring(span);
            }
            error
        })
    }

    /// Lists a span with retiring memory.
    pub(crate) fn enqueue_retiring(&self, span: &Arc<Span>) {
        let mut state = self.state();
        if !state.retiring.iter().any(|other| Arc::ptr_eq(other, span)) {
            state.retiring.push(span.clone());
        }
    }

    /// Releases retiring memory whose work is done. Blocks until the device is idle if an
    /// allocation of the driver is freed.
    pub(crate) fn reap(&self) -> Released {
        self.reap_matching(|_| true)
    }

    /// As [`DedicatedPool::reap`], for memory whose release does not block. A refusal is ignored,
    /// since the next attempt meets it again.
    pub(crate) fn reap_nonblocking(&self) {
        let _ = self.reap_matching(Span::reaps_without_blocking);
    }

    /// As [`DedicatedPool::reap`], for the spans that `which` accepts.
    pub(crate) fn reap_matching(&self, which: impl Fn(&Span) -> bool) -> Released {
        let (spans, rest): (Vec<_>, Vec<_>) = {
            let mut state = self.state();
            if state.retiring.is_empty() {
                return Released::default();
            }
            std::mem::take(&mut state.retiring).into_iter().partition(|span| which(span))
        };
        for span in &rest {
            self.enqueue_retiring(span);
        }
        let mut released = Released::default();
        for span in spans {
            released += self.reap_span(&span);
        }
        released
    }

    /// Releases the retiring memory of a span whose work is done.
    pub(crate) fn reap_span(&self, span: &Arc<Span>) -> Released {
        let before = self.held.stuck();
        self.releases_begun.fetch_add(1, Ordering::SeqCst);
        let (released, outcome) = span.reap();
        // Unmapped, but not released by the driver: still held, and pending in the statistics.
        let stuck = self.held.stuck().saturating_sub(before).min(released);
        let given = released - stuck;
        if released > 0 {
            self.update_usage(|a| {
                a.pending -= released;
                a.reaped += given;
            });
        }
        self.releases_counted.fetch_add(1, Ordering::SeqCst);
        if !span.is_over() {
            self.enqueue_retiring(span);
        }
        if released > 0 {
            self.count_completion();
            if let Some(recorder) = &self.recorder {
                self.held.record_change(recorder, self.device, span.kind());
            }
            return Released { bytes: given, refused: outcome.err() };
        }
        Released { bytes: released, refused: outcome.err() }
    }

    /// Returns the numbers of releases begun and counted. Comparing them with a later result shows
    /// whether memory was released that the usage still had.
    pub(crate) fn release_counts(&self) -> (u64, u64) {
        // The second is read first, as in `MappedMemory::transfer_counts`.
        let counted = self.releases_counted.load(Ordering::SeqCst);
        (self.releases_begun.load(Ordering::SeqCst), counted)
    }

    /// Counts a freed block that may have dropped attached values.
    pub(crate) fn count_completion(&self) {
        self.completions.fetch_add(1, Ordering::Relaxed);
    }

    /// Repeats `round` while it completes blocks that may have kept other blocks alive.
    /// Those are freed after the round has fenced their streams, so the next round finds them done.
    /// A block keeps only blocks that existed before it, so the rounds end. Returns the sum of what
    /// the rounds return.
    pub(crate) fn repeat_until_stable(
        &self,
        mut round: impl FnMut() -> Result<Released>,
    ) -> Result<Released> {
        let mut sum = Released::default();
        loop {
            // Relaxed: a thread sees its own increments. Those of another thread cost one more
            // round.
            let before = self.completions.load(Ordering::Relaxed);
            sum += round()?;
            if self.completions.load(Ordering::Relaxed) == before {
                return Ok(sum);
            }
        }
    }

    /// Waits for the device if untracked work may use retiring memory, unless a capture is
    /// announced. Blocks.
    pub(crate) fn synchronize_untracked(&self) -> Result<()> {
        if self.announced.load(Ordering::Relaxed) > 0 {
            return Ok(());
        }
        let spans = self.state().retiring.clone();
        spans.iter().try_for_each(|span| span.synchronize_if_required())
    }

    /// Returns the work that retiring memory waits for, except for open uses.
    pub(crate) fn retiring_work(&self) -> Vec<(Arc<Timeline>, u64)> {
        let spans = self.state().retiring.clone();
        spans.iter().flat_map(|span| span.retiring_work()).collect()
    }

    /// Waits until `until` for the work of a retiring span. Returns whether there was any. Blocks.
    /// A wait for the device has no deadline, but does not begin after `until`.
    pub(crate) fn wait_for_freed_work(&self, until: Option<Instant>) -> Result<bool> {
        let spans = self.state().retiring.clone();
        for span in spans {
            if try_wait(|| span.wait(|timeline, epoch| wait_for_epoch(timeline, epoch, until)))? {
                return Ok(true);
            }
            if span.needs_synchronize()
                && self.announced.load(Ordering::Relaxed) == 0
                && !has_passed(until)
            {
                return span.synchronize_if_required().map(|()| true);
            }
        }
        Ok(false)
    }

    /// Returns a number for a block if the driver has an observer, or else 0.
    #[inline]
    pub(crate) fn generation(&self) -> u64 {
        if self.observed { self.generations.fetch_add(1, Ordering::Relaxed) } else { 0 }
    }

    /// Reports the owner of a range to the driver's observer, if the block has a generation.
    #[inline]
    pub(crate) fn notify_observer(
        &self,
        generation: u64,
        address: u64,
        bytes: u64,
        owner: Ownership<'_>,
    ) {
        notify_observer(
            &self.driver,
            generation,
            DeviceRange { device: self.device, address, bytes },
            owner,
        );
    }

    /// Records an event, if there is a recorder. Must be called without a lock.
    pub(crate) fn report(
        &self,
        kind: BlockKind,
        action: Action,
        stream: u32,
        address: u64,
        bytes: u64,
        tag: Tag,
    ) {
        self.send(self.event(kind, action, stream, address, bytes, tag));
    }

    /// Makes an event with its ticket, if there is a recorder. It is made under the lock that
    /// orders it, and sent without it.
    #[inline]
    pub(crate) fn event(
        &self,
        kind: BlockKind,
        action: Action,
        stream: u32,
        address: u64,
        bytes: u64,
        tag: Tag,
    ) -> Option<(EventTicket, Event)> {
        let recorder = self.recorder.as_ref()?;
        let event = recorder.event(
            action,
            MemoryLocation::Device(self.device),
            stream,
            address,
            bytes,
            tag,
        );
        Some((recorder.ticket(), event.of_kind(kind)))
    }

    pub(crate) fn send(&self, events: impl IntoIterator<Item = (EventTicket, Event)>) {
        if let Some(recorder) = &self.recorder {
            events.into_iter().for_each(|(ticket, event)| recorder.record(ticket, event));
        }
    }

    /// Counts a new block.
    pub(crate) fn record_block_alloc(&self, live: u64, requested: u64, tag: Tag) {
        self.update_usage(|a| {
            a.record_alloc(live, requested, tag);
            a.live.add_block();
            a.growths += u64::from(live > 0);
        });
    }

    /// Counts and records a failed request, with the charged budget and the refusal if a budget
    /// refused.
    pub(crate) fn record_failure(
        &self,
        kind: BlockKind,
        bytes: u64,
        tag: Tag,
        refused: Option<(&Budget, &OutOfBudget)>,
    ) {
        self.update_usage(|a| a.failures += 1);
        let failed = self.event(kind, Action::Fail, 0, 0, bytes, tag);
        self.send(failed.map(|(ticket, event)| match refused {
            Some((charged, refused)) => (ticket, event.refused(refused.budget, charged.name())),
            None => (ticket, event),
        }));
    }

    /// Counts a block of `tag`.
    pub(crate) fn record_block(&self, tag: Tag) {
        self.update_usage(|a| a.by_tag.of_mut(tag).blocks += 1);
    }

    /// Records that steps have been committed.
    pub(crate) fn report_committed(
        &self,
        steps: impl Iterator<Item = u64>,
        step: u64,
        stream: u32,
        tag: Tag,
    ) {
        if self.recorder.is_some() {
            steps.for_each(|at| {
                self.report(BlockKind::Reserved, Action::Allocate, stream, at, step, tag);
            });
        }
    }

    /// Counts committed elements.
    pub(crate) fn record_commit(&self, new: u64, again: u64, tag: Tag) {
        self.update_usage(|a| {
            a.pending -= again;
            a.record_alloc(new + again, new + again, tag);
            a.growths += u64::from(new > 0);
        });
    }
}

impl Drop for DedicatedPool {
    fn drop(&mut self) {
        let left = std::mem::take(
            &mut self.state.get_mut().unwrap_or_else(PoisonError::into_inner).retiring,
        );
        for span in left {
            // After a failed wait, the check below finds the work not done, and the memory is kept.
            let waited = span.wait(|timeline, epoch| timeline.wait(epoch, None));
            let _ = waited.and_then(|_| span.synchronize_if_required());
            // A later sweep retries what the driver refuses. Memory with open uses stays mapped and
            // charged.
            let reap = |span: &mut Arc<Span>| match span.reap() {
                (_, Err(MemoryError::Driver(refused))) => Err(refused),
                _ => Ok(()),
            };
            release_or_strand(&self.driver, span, reap, |span| span.count_stranded());
        }
    }
}
