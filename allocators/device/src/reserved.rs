//! Elements at addresses that stay, while memory behind them comes and goes.

use crate::{
    Block, DevicePool, DeviceSlice, DeviceSliceMut, Request,
    apart::{Apart, Owned, Span},
    block::LiveBytes,
    pool::Inner,
    request::MAX_BYTES,
    stable::bounds,
    tenants::Share,
};
use aquifer_core::{DeviceId, MemoryError, Reservation, Result, Tag, event::BlockKind};
use aquifer_driver::{Access, Ownership, RawStream, site};
use aquifer_stream::{Stream, Use};
use bytemuck::Pod;
use smallvec::smallvec;
use std::{
    collections::BTreeMap,
    fmt,
    marker::PhantomData,
    ops::Range,
    sync::{Arc, Mutex, Weak},
};

/// Room for `max_len` elements of `T` at a fixed address, with memory behind those that are
/// committed.
///
/// Growing it moves nothing, so pointers that kernels keep stay right and nothing is copied.
/// Addresses cost no memory; what is committed is charged, exactly, by the steps it comes in: the
/// pool's [`handle_bytes`](crate::PoolConfig::handle_bytes), 2 MiB as a rule, or what
/// [`DevicePool::reserve_in_steps`] was told.
///
/// Committing calls the driver, about 30 µs a step on an H200 whatever its size, and waits for no
/// device. [`Reserved::decommit`] and dropping make no driver call and never block: the memory
/// stays mapped and charged until the pool's next slow path or trim finds that the work which used
/// it is done; what is committed again before then is the same memory. Elements are not
/// initialised.
///
/// [`Tenant::reserve`](crate::Tenant::reserve) counts committed steps as a tenant's live bytes.
///
/// A cache of keys and values that grows by a token at a time, and is cut back when a sequence
/// ends:
///
/// ```
/// use aquifer_device::{DevicePool, PoolConfig};
/// use aquifer_driver::{DeviceId, sim::Sim};
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
/// assert!(keys.slice(0..3 * STEP).is_err());             // nothing is behind the last third
///
/// keys.decommit(STEP..keys.max_len())?;
/// stream.synchronize()?;
/// pool.trim(pool.budget().used())?;
/// assert_eq!(pool.budget().used(), 2 << 20);
/// # Ok::<(), aquifer_core::MemoryError>(())
/// ```
pub struct Reserved<T> {
    /// Over all addresses. Not lent: not all of them can be touched.
    block: Block,
    span: Arc<Span>,
    apart: Arc<Apart>,
    pool: Weak<Inner>,
    stream: Stream,
    max_len: usize,
    /// Who is charged besides the pool's budget.
    account: StepAccount,
    /// What the tenant and the tag are charged for committed steps, by step number. Steps that are
    /// charged to neither are not listed.
    live: BTreeMap<u64, LiveBytes>,
    elements: PhantomData<T>,
}

/// Who is charged for committed steps besides the pool's budget.
#[derive(Default)]
pub(crate) struct StepAccount {
    /// The tenant whose live bytes they are.
    pub(crate) tenant: Option<Arc<Share>>,
    /// Bytes that new memory is drawn from before the pool's budget is asked. Their holder may
    /// drop the rest at any time.
    pub(crate) held: Weak<Mutex<Reservation>>,
}

impl StepAccount {
    /// Takes `request`'s bytes of the tenant's limit and of the tag's. A refusal by the second
    /// gives the first back.
    fn charge(&self, pool: &Inner, stream: &Stream, request: &Request) -> Result<LiveBytes> {
        let of_tenant =
            self.tenant.as_ref().map(|share| share.charge(pool, stream, request)).transpose()?;
        Ok(LiveBytes { of_tenant, of_tag: pool.charge_tag(stream, request)?, listed: None })
    }
}

impl DevicePool {
    /// Addresses for `max_len` elements, for work on `stream`, with no memory behind them
    /// (`cuMemAddressReserve`). It is committed in steps of the pool's handles.
    ///
    /// # Errors
    /// [`MemoryError::ZeroSize`], [`MemoryError::TooLarge`], [`MemoryError::WrongDevice`];
    /// [`MemoryError::Unsupported`] on devices without virtual memory management; the driver's.
    #[track_caller]
    pub fn reserve<T: Pod>(&self, stream: &Stream, max_len: usize) -> Result<Reserved<T>> {
        let _site = site::enter();
        self.reserve_in_steps(stream, max_len, self.inner().apart.step())
    }

    /// The same with steps of `step` bytes, rounded up to the device's granularity: fewer and
    /// larger ones are cheaper to commit, and what lies between two steps cannot go.
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
        self.reserve_for(stream, max_len, step, StepAccount::default())
    }

    /// As [`DevicePool::reserve_in_steps`], with the memory of each commit drawn from `held` before
    /// the budget is asked, as long as another owner keeps `held`. Memory that is decommitted goes
    /// back to the budget, not to `held`. The pool's handle size is the step where `step` is
    /// `None`.
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
        let step = step.unwrap_or(self.inner().apart.step());
        self.reserve_for(
            stream,
            max_len,
            step,
            StepAccount { tenant: None, held: Arc::downgrade(held) },
        )
    }

    pub(crate) fn reserve_for<T: Pod>(
        &self,
        stream: &Stream,
        max_len: usize,
        step: u64,
        account: StepAccount,
    ) -> Result<Reserved<T>> {
        self.check_stream(stream)?;
        let inner = self.inner();
        let apart = &inner.apart;
        if apart.step() == 0 {
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
        apart.reap_quietly();
        let step = step.max(1).next_multiple_of(self.info().granularity);
        let span = apart.reserve(BlockKind::Reserved, requested.next_multiple_of(step), step, 0)?;
        let mut block = self.apart_block(stream, &span, requested, Tag::current(), None);
        inner.list(&mut block, Some(&span));
        let (apart, pool, stream) = (apart.clone(), Arc::downgrade(inner), stream.clone());
        let live = BTreeMap::new();
        Ok(Reserved {
            block,
            span,
            apart,
            pool,
            stream,
            max_len,
            account,
            live,
            elements: PhantomData,
        })
    }
}

impl<T: Pod> Reserved<T> {
    /// Puts memory behind the elements in `range`, as far as there is none: whole steps, so that
    /// neighbours may come to have some too. Makes room as [`DevicePool::alloc_stable`] does, and
    /// may block as that may.
    ///
    /// # Errors
    /// [`MemoryError::OutOfBounds`]; [`MemoryError::OutOfMemory`], also where the limit of the
    /// tenant or of the tag refuses; [`MemoryError::Closed`] if the pool is gone;
    /// [`MemoryError::Busy`] if memory that was decommitted just now has a prepared use which is
    /// not finished; the driver's. Nothing has changed then.
    #[track_caller]
    pub fn commit(&mut self, range: Range<usize>) -> Result<()> {
        let _site = site::enter();
        let (offset, len) = bounds::<T>(&range, self.block.bytes())?;
        if len == 0 {
            return Ok(());
        }
        let slots = self.around(offset, offset + len as u64 * size_of::<T>() as u64);
        let missing = self.span.missing(slots);
        if missing.is_empty() {
            return Ok(());
        }
        let pool = self.pool.upgrade().ok_or(MemoryError::Closed)?;
        let apart = &pool.apart;
        let step = self.span.slot;
        let total = missing.len() as u64 * step;
        let request = Request::bytes(total).tag(self.block.tag());
        let mut charged = self.account.charge(&pool, &self.stream, &request)?;
        let held = self.account.held.upgrade();
        let new =
            pool.back(&self.span, &self.block.home(), self.block.tag(), &missing, held.as_deref())?;
        if !charged.is_none() {
            self.live.extend(missing.iter().map(|&slot| (slot, charged.split(step))));
        }
        apart.committed(new, total - new, self.block.tag());
        let (stream, generation) = (self.block.home().raw(), self.block.generation());
        for &slot in &missing {
            let address = self.span.address + slot * step;
            apart.note(generation, address, step, Ownership::Live { stream, generation });
        }
        let steps = missing.iter().map(|slot| self.span.address + slot * step);
        apart.report_committed(steps, step, self.stream.number(), self.block.tag());
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

    /// Lets go of the memory behind the elements in `range`: of the steps that lie wholly in it,
    /// the last one with what follows the last element. Their contents are lost. Answers with the
    /// bytes, which stay charged until the work that used them is done and the pool has given them
    /// back. Makes no driver call, unless a stream has to be fenced at once, and never blocks.
    ///
    /// # Errors
    /// [`MemoryError::OutOfBounds`].
    #[track_caller]
    pub fn decommit(&mut self, range: Range<usize>) -> Result<u64> {
        let _site = site::enter();
        let (offset, len) = bounds::<T>(&range, self.block.bytes())?;
        let step = self.span.slot;
        let end = if range.end == self.max_len {
            self.span.bytes
        } else {
            offset + len as u64 * size_of::<T>() as u64
        };
        let slots = offset.div_ceil(step)..end / step;
        let runs: Vec<Range<u64>> =
            self.span.runs().into_iter().filter_map(|run| both(&run, &slots)).collect();
        let bytes = runs.iter().map(|run| (run.end - run.start) * step).sum();
        if bytes == 0 {
            return Ok(0);
        }
        let home = self.block.home();
        let uses = self.block.uses.current(&home);
        let users: Vec<RawStream> = uses.iter().map(|u| u.on().raw()).collect();
        let owner =
            if users.is_empty() { Ownership::Free } else { Ownership::Pending { users: &users } };
        let apart = &self.apart;
        apart.count(|a| a.let_go(bytes, bytes, self.block.tag()));
        self.live.retain(|slot, _| !slots.contains(slot));
        let ranges: Vec<(u64, u64)> = runs
            .into_iter()
            .map(|run| (self.span.address + run.start * step, (run.end - run.start) * step))
            .collect();
        for &(address, bytes) in &ranges {
            apart.note(self.block.generation(), address, bytes, owner);
        }
        apart.decommitted(ranges, step, self.stream.number(), users.is_empty(), self.block.tag());
        self.span.leave(slots, smallvec![Owned::ends(&home)], uses);
        apart.leave(&self.span);
        Ok(bytes)
    }

    /// The elements that have memory behind them, ascending.
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

    /// The elements in `range`, all of them committed, to be read.
    ///
    /// # Errors
    /// [`MemoryError::OutOfBounds`]; [`MemoryError::Uncommitted`] with the first part that has no
    /// memory.
    pub fn slice(&self, range: Range<usize>) -> Result<DeviceSlice<'_, T>> {
        let (offset, len) = self.backed(&range)?;
        Ok(DeviceSlice::of(&self.block, offset, len))
    }

    /// The elements in `range`, all of them committed, to be written.
    ///
    /// # Errors
    /// As [`Reserved::slice`].
    pub fn slice_mut(&mut self, range: Range<usize>) -> Result<DeviceSliceMut<'_, T>> {
        let (offset, len) = self.backed(&range)?;
        Ok(DeviceSliceMut::of(&self.block, offset, len))
    }

    fn backed(&self, range: &Range<usize>) -> Result<(u64, usize)> {
        let (offset, len) = bounds::<T>(range, self.block.bytes())?;
        let end = offset + len as u64 * size_of::<T>() as u64;
        let missing = self.span.missing(self.around(offset, end));
        let Some(&first) = missing.first() else { return Ok((offset, len)) };
        let run =
            missing.iter().zip(first..).take_while(|&(&slot, expected)| slot == expected).count()
                as u64;
        let step = self.span.slot;
        let (from, to) = ((first * step).max(offset), ((first + run) * step).min(end));
        Err(MemoryError::Uncommitted { offset: from, len: to - from })
    }

    /// The slots that bytes from `offset` to `end` lie in.
    fn around(&self, offset: u64, end: u64) -> Range<u64> {
        if offset == end { 0..0 } else { offset / self.span.slot..end.div_ceil(self.span.slot) }
    }
}

impl<T> Reserved<T> {
    /// Its first address on the device, which never changes.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.block.address()
    }

    /// How many elements there are addresses for.
    #[must_use]
    pub fn max_len(&self) -> usize {
        self.max_len
    }

    /// Bytes that memory is committed by.
    #[must_use]
    pub fn step(&self) -> u64 {
        self.span.slot
    }

    /// Bytes that are committed, and charged for it.
    #[must_use]
    pub fn committed_bytes(&self) -> u64 {
        self.span.charged_bytes()
    }

    /// The device.
    #[must_use]
    pub fn device(&self) -> DeviceId {
        self.block.device()
    }

    /// The stream that it belongs to.
    #[must_use]
    pub fn stream(&self) -> &Stream {
        &self.stream
    }

    /// A number that nothing else at these addresses has, on a driver that checks; 0 on others.
    #[must_use]
    pub fn generation(&self) -> u64 {
        self.block.generation()
    }

    /// As [`Block::prepare`], for work that is launched with the address: a use of all that is
    /// committed.
    ///
    /// # Errors
    /// As [`Block::prepare`].
    #[track_caller]
    pub fn prepare(&self, stream: &Stream, access: Access) -> Result<Use> {
        self.block.prepare(stream, access)
    }

    /// As [`Block::record_use`], for work that was launched with the address.
    ///
    /// # Errors
    /// As [`Block::record_use`].
    #[track_caller]
    pub fn record_use(&self, stream: &Stream, access: Access) -> Result<()> {
        self.block.record_use(stream, access)
    }
}

/// What two ranges share.
fn both(a: &Range<u64>, b: &Range<u64>) -> Option<Range<u64>> {
    let range = a.start.max(b.start)..a.end.min(b.end);
    (!range.is_empty()).then_some(range)
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
