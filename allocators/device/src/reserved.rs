//! Growable memory: elements at fixed addresses, with memory that is committed and decommitted.

mod idle;

use crate::{
    Block, DevicePool, DeviceSlice, DeviceSliceMut, Request,
    base::{
        driver::owner_of_freed,
        extent::{AttachedValue, LiveCharges},
        pending::PartsWork,
        waits::begin_request,
    },
    dedicated::{DedicatedPool, Span},
    limits::LiveLimit,
    pool_core::PoolCore,
    request::MAX_BYTES,
    stable::bounds,
};
use aquifer_core::{
    DeviceId, MemoryError, Reservation, Result, Tag, budget::HookRegistration, event::BlockKind,
};
use aquifer_driver::{Access, Ownership, RawStream, site};
use aquifer_stream::{Stream, Use};
use bytemuck::Pod;
use idle::IdleSteps;
use std::{
    collections::BTreeMap,
    fmt,
    marker::PhantomData,
    ops::Range,
    sync::{Arc, Mutex, Weak},
    time::Instant,
};

/// Address space for `max_len` elements of `T` at a fixed address, with memory for the committed
/// ones.
///
/// Growing moves nothing, so pointers that kernels keep stay valid and nothing is copied. Addresses
/// cost no memory. Committed memory is charged exactly, in steps: the pool's
/// [`handle_bytes`](crate::PoolConfig::handle_bytes), usually 2 MiB, or the step of
/// [`DevicePool::reserve_in_steps`].
///
/// Committing calls the driver, about 30 µs a step on an H200 regardless of its size, and does not
/// wait for the device. [`Reserved::decommit`] and dropping make no driver call and never block:
/// the memory stays mapped and charged until the pool's next slow path or trim finds the work that
/// used it done. Memory that is committed again before then is the same memory. Elements are not
/// initialised.
///
/// [`Tenant::reserve`](crate::Tenant::reserve) counts committed steps as a tenant's live bytes.
///
/// The example is a cache of keys and values that grows by a token at a time, and is truncated when
/// a sequence ends:
///
/// ```
/// use aquifer::{DeviceId, DevicePool, PoolConfig, sim::Sim};
/// const STEP: usize = (2 << 20) / size_of::<f32>();
/// let sim = Sim::h200(1);
/// let pool = DevicePool::open(sim.driver(), DeviceId(0), PoolConfig::default())?;
/// let stream = pool.stream()?;
/// let mut keys = pool.reserve::<f32>(&stream, 1 << 28)?; // room for 1 GiB, and no memory yet
/// let address = keys.address();
/// let mut tokens = 0;
/// for token in 0..3 {
///     let values = vec![token as f32; 300_000];
///     keys.commit_to(tokens + values.len())?;
///     let mut room = keys.slice_mut(tokens..tokens + values.len())?;
///     stream.try_scope(|c| c.upload(&values, &mut room))?;
///     tokens += values.len();
/// }
/// assert_eq!((keys.address(), keys.committed()), (address, vec![0..2 * STEP]));
/// assert_eq!(pool.budget().used(), 4 << 20);
/// assert!(keys.slice(0..3 * STEP).is_err());             // the last third has no memory
///
/// keys.decommit(STEP..keys.max_len())?;
/// stream.synchronize()?;
/// pool.trim(pool.budget().used())?;
/// assert_eq!(pool.budget().used(), 2 << 20);
/// # Ok::<(), aquifer::MemoryError>(())
/// ```
pub struct Reserved<T> {
    /// Covers all addresses. Never lent as a whole, since not all of it can be accessed.
    block: Block,
    span: Arc<Span>,
    dedicated: Arc<DedicatedPool>,
    pool: Weak<PoolCore>,
    stream: Stream,
    max_len: usize,
    /// What is charged besides the pool's budget.
    account: StepCharges,
    /// The charges of the tenant and the tag for committed steps, by step number. Steps that are
    /// charged to neither are not listed.
    live: BTreeMap<u64, LiveCharges>,
    /// The idle steps, once there were any.
    idle: Option<(Arc<IdleSteps>, HookRegistration)>,
    elements: PhantomData<T>,
}

/// What is charged for committed steps besides the pool's budget.
#[derive(Default)]
pub(crate) struct StepCharges {
    /// The tenant of these live bytes.
    pub(crate) tenant: Option<Arc<LiveLimit>>,
    /// The reservation that new memory is drawn from before the pool's budget is charged. Its
    /// owner may drop it at any time.
    pub(crate) held: Weak<Mutex<Reservation>>,
}

impl StepCharges {
    /// Charges `request`'s bytes to the limits of the tenant and of the tag. If the second refuses,
    /// the first charge is returned.
    fn charge(&self, pool: &PoolCore, stream: &Stream, request: &Request) -> Result<LiveCharges> {
        let of_tenant =
            self.tenant.as_ref().map(|limit| limit.charge(pool, stream, request)).transpose()?;
        Ok(LiveCharges { of_tenant, of_tag: pool.charge_tag(stream, request)?, listed: None })
    }
}

impl DevicePool {
    /// Reserves addresses for `max_len` elements without memory, for work on `stream`
    /// (`cuMemAddressReserve`). Memory is committed in steps of the pool's handle size.
    ///
    /// # Errors
    /// [`MemoryError::ZeroSize`], [`MemoryError::TooLarge`], [`MemoryError::WrongDevice`];
    /// [`MemoryError::Unsupported`] on devices without virtual memory management; the driver's.
    #[track_caller]
    pub fn reserve<T: Pod>(&self, stream: &Stream, max_len: usize) -> Result<Reserved<T>> {
        let _site = site::enter();
        self.reserve_in_steps(stream, max_len, self.core().dedicated.step())
    }

    /// Like [`DevicePool::reserve`], with steps of `step` bytes, rounded up to the device's
    /// granularity. Fewer and larger steps are cheaper to commit, but a step is decommitted only as
    /// a whole.
    ///
    /// # Errors
    /// As [`DevicePool::reserve`].
    #[track_caller]
    pub fn reserve_in_steps<T: Pod>(
        &self,
        stream: &Stream,
        max_len: usize,
        step: u64,
    ) -> Result<Reserved<T>> {
        let _site = site::enter();
        self.reserve_for(stream, max_len, step, StepCharges::default())
    }

    /// Like [`DevicePool::reserve_in_steps`], but each commit draws from `held` before it charges
    /// the budget, as long as another owner keeps `held`. Decommitted memory returns to the budget,
    /// not to `held`. If `step` is `None`, the step is the pool's handle size.
    ///
    /// # Errors
    /// As [`DevicePool::reserve`].
    #[track_caller]
    pub fn reserve_drawing<T: Pod>(
        &self,
        stream: &Stream,
        max_len: usize,
        step: Option<u64>,
        held: &Arc<Mutex<Reservation>>,
    ) -> Result<Reserved<T>> {
        let _site = site::enter();
        let step = step.unwrap_or(self.core().dedicated.step());
        self.reserve_for(
            stream,
            max_len,
            step,
            StepCharges { tenant: None, held: Arc::downgrade(held) },
        )
    }

    pub(crate) fn reserve_for<T: Pod>(
        &self,
        stream: &Stream,
        max_len: usize,
        step: u64,
        account: StepCharges,
    ) -> Result<Reserved<T>> {
        self.check_stream(stream)?;
        let core = self.core();
        let dedicated = &core.dedicated;
        if dedicated.step() == 0 {
            return Err(MemoryError::Unsupported {
                feature: "virtual memory management (cuMemAddressReserve)",
            });
        }
        let requested = (max_len as u64).saturating_mul(size_of::<T>() as u64);
        if requested == 0 {
            return Err(MemoryError::ZeroSize);
        }
        if requested > MAX_BYTES || step > MAX_BYTES {
            return Err(MemoryError::TooLarge { requested: requested.max(step), limit: MAX_BYTES });
        }
        dedicated.reap_nonblocking();
        let step = step.max(1).next_multiple_of(self.info().granularity);
        let span = dedicated.reserve_span(
            BlockKind::Reserved,
            requested.next_multiple_of(step),
            step,
            0,
        )?;
        let mut block = self.dedicated_block(stream, &span, requested, Tag::current(), None);
        core.list_for_leaks(&mut block, Some(span.clone()));
        let (dedicated, pool, stream) = (dedicated.clone(), Arc::downgrade(core), stream.clone());
        let live = BTreeMap::new();
        Ok(Reserved {
            block,
            span,
            dedicated,
            pool,
            stream,
            max_len,
            account,
            live,
            idle: None,
            elements: PhantomData,
        })
    }
}

impl<T: Pod> Reserved<T> {
    /// Commits memory for the elements in `range` that have none, in whole steps, so neighbouring
    /// elements may be committed too. Makes room as [`DevicePool::alloc_stable`] does, and may
    /// block like it.
    ///
    /// # Errors
    /// [`MemoryError::OutOfRange`]; [`MemoryError::OutOfMemory`], also if the limit of the tenant
    /// or of the tag refuses; [`MemoryError::Closed`] if the pool is closed; [`MemoryError::Busy`]
    /// if memory that was just decommitted has an unfinished prepared use; the driver's. In each
    /// case nothing has changed.
    #[track_caller]
    pub fn commit(&mut self, range: Range<usize>) -> Result<()> {
        let _site = site::enter();
        let (offset, len) = bounds::<T>(&range, self.block.bytes())?;
        if len == 0 {
            return Ok(());
        }
        let slots = self.slots_around(offset, offset + len as u64 * size_of::<T>() as u64);
        let missing = self.span.missing(slots);
        if missing.is_empty() {
            return Ok(());
        }
        let pool = self.pool.upgrade().ok_or(MemoryError::Closed)?;
        let dedicated = &pool.dedicated;
        let step = self.span.slot;
        let total = missing.len() as u64 * step;
        let request = Request::bytes(total).tag(self.block.tag());
        // One deadline for the limits and for the pool.
        let _request = begin_request();
        let mut charged = self.account.charge(&pool, &self.stream, &request)?;
        let held = self.account.held.upgrade();
        let new = pool.back_slots(
            &self.span,
            &self.block.home(),
            self.block.tag(),
            &missing,
            held.as_deref(),
        )?;
        if !charged.is_none() {
            self.live.extend(missing.iter().map(|&slot| (slot, charged.split(step))));
        }
        dedicated.record_commit(new, total - new, self.block.tag());
        let (stream, generation) = (self.block.home().noted(), self.block.generation());
        for &slot in &missing {
            let address = self.span.address + slot * step;
            dedicated.notify_observer(
                generation,
                address,
                step,
                Ownership::Live { stream, generation },
            );
        }
        let steps = missing.iter().map(|slot| self.span.address + slot * step);
        dedicated.report_committed(steps, step, self.stream.number(), self.block.tag());
        Ok(())
    }

    /// Commits the first `len` elements.
    ///
    /// # Errors
    /// As [`Reserved::commit`].
    #[track_caller]
    pub fn commit_to(&mut self, len: usize) -> Result<()> {
        let _site = site::enter();
        self.commit(0..len)
    }

    /// Decommits the steps that lie wholly in `range`. If `range` contains the last element, the
    /// last step counts as wholly in it. The contents are lost. Returns the bytes, which stay
    /// charged until the work that used them is done and the pool has released them. Makes no
    /// driver call, unless a stream has to be fenced at once, and never blocks.
    ///
    /// # Errors
    /// [`MemoryError::OutOfRange`].
    #[track_caller]
    pub fn decommit(&mut self, range: Range<usize>) -> Result<u64> {
        let _site = site::enter();
        let runs = self.whole_steps(&range)?;
        let Some((first, last)) = runs.first().zip(runs.last()) else { return Ok(0) };
        let slots = first.start..last.end;
        let (bytes, work) = self.end_use(&runs);
        let completes = self.report_freed(runs.into_iter().map(|run| self.range_of(run)).collect());
        self.span.retire(slots, work, completes.map(|completes| Box::new(vec![completes])));
        self.dedicated.enqueue_retiring(&self.span);
        Ok(bytes)
    }

    /// Marks the steps that lie wholly in `range`, as for [`Reserved::decommit`], as idle: they
    /// hold nothing now. The contents are lost, and the elements count as uncommitted. Returns the
    /// bytes, which stay mapped and charged until memory is needed under the same root of budgets,
    /// also by another process that shares the device. Then they are given back, those with the
    /// highest addresses first, and only those whose work is done. A commit before then has the
    /// same memory again, and calls the driver only where another stream than its own has used it;
    /// one that fails leaves the steps decommitted.
    ///
    /// [`Reserved::release_idle`] gives them back at once. A trim of the pool does not. Once the
    /// pool is closed, this is a decommit. Makes no driver call, unless a stream has to be fenced
    /// at once, and never blocks.
    ///
    /// # Errors
    /// [`MemoryError::OutOfRange`].
    #[track_caller]
    pub fn idle(&mut self, range: Range<usize>) -> Result<u64> {
        let _site = site::enter();
        let Some(pool) = self.pool.upgrade() else { return self.decommit(range) };
        let runs = self.whole_steps(&range)?;
        if self.idle.is_none() {
            let (dedicated, span) = (self.dedicated.clone(), self.span.clone());
            let steps = Arc::new(IdleSteps { dedicated, span });
            let registration = pool.budget().on_need(&steps);
            self.idle = Some((steps, registration));
        }
        let (bytes, work) = self.end_use(&runs);
        // Each is recorded as done by itself.
        let steps = runs.into_iter().flatten().map(|slot| {
            let completes = self.report_freed(vec![self.range_of(slot..slot + 1)]);
            (slot, completes.map(|completes| Box::new(vec![completes])))
        });
        let steps = steps.collect();
        self.dedicated.slot_block_collected(BlockKind::Reserved, bytes);
        self.span.make_idle(steps, &work);
        Ok(bytes)
    }

    /// Returns the runs of steps with memory that lie wholly in a range.
    fn whole_steps(&self, range: &Range<usize>) -> Result<Vec<Range<u64>>> {
        let (offset, len) = bounds::<T>(range, self.block.bytes())?;
        let step = self.span.slot;
        let end = if range.end == self.max_len {
            self.span.bytes
        } else {
            offset + len as u64 * size_of::<T>() as u64
        };
        let first = offset.div_ceil(step);
        Ok(self.span.runs_in(first..first.max(end / step)))
    }

    /// Ends the use of steps with memory, in the accounts. Returns their bytes, and the work that
    /// may use them.
    fn end_use(&mut self, runs: &[Range<u64>]) -> (u64, PartsWork) {
        let bytes = runs.iter().map(|run| (run.end - run.start) * self.span.slot).sum();
        let owner_stream = self.block.home();
        let uses = self.block.uses.current(&owner_stream);
        let users: Vec<RawStream> = uses.iter().map(|u| u.on().noted()).collect();
        let owner = owner_of_freed(&users);
        let dedicated = &self.dedicated;
        dedicated.update_usage(|a| a.record_free(bytes, bytes, self.block.tag()));
        for run in runs {
            self.live.retain(|slot, _| !run.contains(slot));
            let (address, bytes) = self.range_of(run.clone());
            dedicated.notify_observer(self.block.generation(), address, bytes, owner);
        }
        let work = PartsWork::new(&owner_stream, uses);
        work.fence_at_once();
        (bytes, work)
    }

    /// Records that steps were freed. The returned value records their completion.
    fn report_freed(&self, ranges: Vec<(u64, u64)>) -> Option<AttachedValue> {
        let (stream, tag, step) = (self.stream.number(), self.block.tag(), self.span.slot);
        let ranges = (ranges, step);
        self.dedicated.report_freed(&self.span, BlockKind::Reserved, ranges, stream, tag)
    }

    /// Returns the ranges of committed elements, ascending.
    #[must_use]
    pub fn committed(&self) -> Vec<Range<usize>> {
        let (step, size) = (self.span.slot, size_of::<T>() as u64);
        let elements = |run: Range<u64>| {
            let first = (run.start * step).div_ceil(size);
            let end = (run.end * step / size).min(self.max_len as u64);
            first as usize..end as usize
        };
        self.span.runs().into_iter().map(elements).filter(|range| !range.is_empty()).collect()
    }

    /// Returns a view of `range` for reading. All its elements must be committed.
    ///
    /// # Errors
    /// [`MemoryError::OutOfRange`]; [`MemoryError::Uncommitted`] with the first part without
    /// memory.
    pub fn slice(&self, range: Range<usize>) -> Result<DeviceSlice<'_, T>> {
        let (offset, len) = self.check_committed(&range)?;
        Ok(DeviceSlice::of(&self.block, offset, len))
    }

    /// Returns a view of `range` for writing. All its elements must be committed.
    ///
    /// # Errors
    /// As [`Reserved::slice`].
    pub fn slice_mut(&mut self, range: Range<usize>) -> Result<DeviceSliceMut<'_, T>> {
        let (offset, len) = self.check_committed(&range)?;
        Ok(DeviceSliceMut::of(&self.block, offset, len))
    }

    fn check_committed(&self, range: &Range<usize>) -> Result<(u64, usize)> {
        let (offset, len) = bounds::<T>(range, self.block.bytes())?;
        let end = offset + len as u64 * size_of::<T>() as u64;
        let missing = self.span.missing(self.slots_around(offset, end));
        let Some(&first) = missing.first() else { return Ok((offset, len)) };
        let run =
            missing.iter().zip(first..).take_while(|&(&slot, expected)| slot == expected).count()
                as u64;
        let step = self.span.slot;
        let (from, to) = ((first * step).max(offset), ((first + run) * step).min(end));
        Err(MemoryError::Uncommitted { offset: from, len: to - from })
    }

    /// Returns the slots of the bytes from `offset` to `end`.
    fn slots_around(&self, offset: u64, end: u64) -> Range<u64> {
        if offset == end { 0..0 } else { offset / self.span.slot..end.div_ceil(self.span.slot) }
    }
}

impl<T> Reserved<T> {
    /// Returns its first device address, which never changes.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.block.address()
    }

    /// Returns the number of elements that have addresses.
    #[must_use]
    pub fn max_len(&self) -> usize {
        self.max_len
    }

    /// Returns the size of a commit step in bytes.
    #[must_use]
    pub fn step(&self) -> u64 {
        self.span.slot
    }

    /// Returns the committed bytes, which are charged.
    #[must_use]
    pub fn committed_bytes(&self) -> u64 {
        self.span.charged_bytes()
    }

    /// Returns the bytes of [idle](Reserved::idle) steps, which are charged.
    #[must_use]
    pub fn idle_bytes(&self) -> u64 {
        self.span.idle_bytes()
    }

    /// Gives at least `bytes` of [idle](Reserved::idle) steps back to the driver (`cuMemUnmap`), or
    /// all. Before `deadline` it waits for the work that used them (`None`: no deadline). Returns
    /// the bytes.
    #[track_caller]
    pub fn release_idle(&self, bytes: u64, deadline: Option<Instant>) -> u64 {
        let _site = site::enter();
        self.idle.as_ref().map_or(0, |(steps, _)| steps.release(bytes, deadline))
    }

    /// Makes the end of this wait for all work of the device: work that is not recorded may use the
    /// memory. Its memory then goes back at the next trim, or when memory is needed. Does not
    /// block.
    pub fn outlive_device_work(&self) {
        self.span.require_synchronize();
    }

    /// Returns the address and the bytes of slots.
    fn range_of(&self, slots: Range<u64>) -> (u64, u64) {
        let step = self.span.slot;
        (self.span.address + slots.start * step, (slots.end - slots.start) * step)
    }

    /// Returns the device.
    #[must_use]
    pub fn device(&self) -> DeviceId {
        self.block.device()
    }

    /// Returns the stream that it belongs to.
    #[must_use]
    pub fn stream(&self) -> &Stream {
        &self.stream
    }

    /// Returns a unique number of this use of its addresses on a validating driver, 0 on others.
    #[must_use]
    pub fn generation(&self) -> u64 {
        self.block.generation()
    }

    /// Like [`Block::prepare`], for work that is launched with the address. It counts as a use of
    /// all committed memory.
    ///
    /// # Errors
    /// As [`Block::prepare`].
    #[track_caller]
    pub fn prepare(&self, stream: &Stream, access: Access) -> Result<Use> {
        self.block.prepare(stream, access)
    }

    /// Like [`Block::record_use`], for work that was launched with the address.
    ///
    /// # Errors
    /// As [`Block::record_use`].
    #[track_caller]
    pub fn record_use(&self, stream: &Stream, access: Access) -> Result<()> {
        self.block.record_use(stream, access)
    }
}

impl<T> fmt::Debug for Reserved<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reserved")
            .field("address", &format_args!("{:#x}", self.address()))
            .field("max_len", &self.max_len)
            .field("committed_bytes", &self.committed_bytes())
            .finish_non_exhaustive()
    }
}
