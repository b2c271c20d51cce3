//! A block of device memory, as its owner holds it.

use crate::{Request, backend::Backed, checked::Listed, home::Home};
use aquifer_core::{
    DeviceId, MemoryError, OpaqueBlock, Result, Tag, budget::Leased, panics::Contained,
};
use aquifer_driver::{
    Access, DeviceRange, KeepAlive, Operand, OperandMut, RawStream, same_machine, site,
};
use aquifer_heap::Key;
use aquifer_stream::{Account, Stream, StreamPool, Timeline, Tracked, Use, UseList};
use std::{any::Any, fmt, sync::Arc};

/// A block of device memory that goes home when it is dropped.
///
/// It belongs to the stream it was allocated for: work on that stream may use it at once and until
/// the drop. Work on any other stream goes through [`Block::prepare`], or is noted by
/// [`Block::record_use`]; the pool gives the bytes to somebody else only after it.
///
/// A kernel that touches several blocks is ordered with all of them by one
/// [`Launch`](aquifer_stream::Launch):
///
/// ```
/// use aquifer_device::{DevicePool, PoolConfig, Request};
/// use aquifer_driver::{DeviceId, Operand, sim::{Kernel, Sim}};
/// use aquifer_stream::Launch;
/// let sim = Sim::h200(1);
/// let pool = DevicePool::open(sim.driver(), DeviceId(0), PoolConfig::default())?;
/// let (s, u) = (pool.stream()?, pool.stream()?);
/// let (a, b) = (pool.alloc(&s, Request::bytes(4096))?, pool.alloc(&u, Request::bytes(4096))?);
/// let ready = Launch::on(&u).reads(&a).updates(&b).preflight()?; // `u` waits for `s`
/// let kernel = Kernel::new("add").reads(a.range(), None).writes(b.range(), None);
/// sim.launch(u.raw(), kernel).map_err(aquifer_core::MemoryError::Driver)?;
/// ready.commit()?;
/// drop(a); // and its bytes are given out again when the kernel is done with them
/// assert!(sim.violations().is_empty());
/// # Ok::<(), aquifer_core::MemoryError>(())
/// ```
///
/// Dropping it never calls the driver and never blocks, except once its pool has been closed: then
/// for the last block, and for one that other streams use.
/// Forgetting it leaks the memory. The bytes are not initialised.
pub struct Block {
    pub(crate) owner: Owner,
    pub(crate) place: Place,
    pub(crate) uses: UseList,
    /// Made when a block first needs it: most never do.
    pub(crate) extras: Rare<Extras>,
}

/// What is hardly ever there, and costs a comparison in place to drop where it is not.
pub(crate) struct Rare<T>(Option<Box<T>>);

impl<T> Rare<T> {
    pub(crate) const NONE: Self = Self(None);

    pub(crate) fn new(there: T) -> Self {
        Self(Some(Box::new(there)))
    }

    #[inline]
    pub(crate) fn is_none(&self) -> bool {
        self.0.is_none()
    }

    pub(crate) fn get(&self) -> Option<&T> {
        self.0.as_deref()
    }

    pub(crate) fn take(&mut self) -> Self {
        Self(self.0.take())
    }

    pub(crate) fn get_or_default(&mut self) -> &mut T
    where
        T: Default,
    {
        self.0.get_or_insert_default()
    }

    /// What is there, or its default.
    pub(crate) fn or_default(mut self) -> T
    where
        T: Default,
    {
        self.0.take().map_or_else(T::default, |there| *there)
    }
}

impl<T> Drop for Rare<T> {
    #[inline]
    fn drop(&mut self) {
        if let Some(there) = self.0.take() {
            discard(there);
        }
    }
}

/// Out of line, or every drop would carry it.
#[cold]
#[inline(never)]
fn discard<T>(there: Box<T>) {
    drop(there);
}

/// Where a block lies and what was asked for.
///
/// This and [`Way`] are what a cache keeps of a block, two halves of sixteen bytes. Each is copied
/// whole: one that is stored in parts, and loaded whole where the block is moved on, is waited for
/// until the parts have left the store buffer, some 8 ns.
#[derive(Clone, Copy)]
pub(crate) struct Place {
    pub(crate) address: u64,
    pub(crate) asked: Asked,
}

/// How many bytes were asked for, and for whom, in eight bytes: no request reaches 2⁴⁸.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Asked {
    low: u32,
    high: u16,
    tag: Tag,
}

impl Asked {
    #[inline]
    pub(crate) fn new(bytes: u64, tag: Tag) -> Self {
        debug_assert!(bytes < 1 << 48, "a request was not checked");
        Self { low: bytes as u32, high: (bytes >> 32) as u16, tag }
    }

    #[inline]
    pub(crate) fn bytes(self) -> u64 {
        u64::from(self.high) << 32 | u64::from(self.low)
    }

    #[inline]
    pub(crate) fn tag(self) -> Tag {
        self.tag
    }
}

/// What few blocks have.
#[derive(Default)]
pub(crate) struct Extras {
    /// Tells it from every other block that will be or has been at its address, where somebody
    /// watches; 0 where not.
    pub(crate) generation: u64,
    /// What ends when the memory is really free: charges of wrappers.
    pub(crate) until_free: UntilFree,
    /// Live bytes of a tenant and of a tag: they end with the block, whoever still uses its
    /// memory.
    pub(crate) live: LiveBytes,
}

/// Whose live bytes a block counts as.
#[derive(Default)]
pub(crate) struct LiveBytes {
    pub(crate) of_tenant: Option<Leased>,
    pub(crate) of_tag: Option<Leased>,
    /// Its place in the list of live blocks, where leaks are reported and no cache is asked.
    pub(crate) listed: Option<Listed>,
}

impl LiveBytes {
    /// Whether neither is charged.
    pub(crate) fn is_none(&self) -> bool {
        self.of_tenant.is_none() && self.of_tag.is_none()
    }

    /// Takes `bytes` of each charge off, where it has as many.
    pub(crate) fn split(&mut self, bytes: u64) -> Self {
        let split = |charge: &mut Option<Leased>| charge.as_mut()?.split(bytes);
        Self {
            of_tenant: split(&mut self.of_tenant),
            of_tag: split(&mut self.of_tag),
            listed: None,
        }
    }
}

impl Extras {
    /// Whether the cache has nothing to do with it.
    fn is_account_only(&self) -> bool {
        self.generation == 0 && self.until_free.is_none()
    }
}

/// What ends when a block's memory is really free.
///
/// A panic as one of them is dropped ends there: the pool may be within a drop itself.
pub(crate) type UntilFree = Option<Box<Vec<Contained<Box<dyn Any + Send + Sync>>>>>;

/// A stream's cache in a caching pool, and where that keeps the block's record.
#[derive(Clone, Copy)]
pub(crate) struct Way {
    pub(crate) home: &'static Home,
    pub(crate) key: Key,
}

/// The way home.
pub(crate) enum Owner {
    /// A stream's cache in a caching pool.
    Pool(Way),
    /// The driver's own allocators.
    Backend(Box<Backed>),
}

impl Block {
    /// The token of a block that nobody watches.
    #[inline]
    pub(crate) fn at_home(freed: &Freed) -> Self {
        Self {
            owner: Owner::Pool(freed.way),
            place: freed.place,
            uses: UseList::new(),
            extras: Rare::NONE,
        }
    }

    /// The token of a block that goes home another way than a cache's.
    pub(crate) fn backed(address: u64, asked: Asked, backed: Backed, generation: u64) -> Self {
        let extras = if generation == 0 {
            Rare::NONE
        } else {
            Rare::new(Extras { generation, ..Extras::default() })
        };
        let place = Place { address, asked };
        Self { owner: Owner::Backend(Box::new(backed)), place, uses: UseList::new(), extras }
    }

    /// What is noted of it beside its address.
    pub(crate) fn extras_mut(&mut self) -> &mut Extras {
        self.extras.get_or_default()
    }

    /// Ends these live bytes of its tag with it.
    pub(crate) fn count_for_tag(&mut self, bytes: Option<Leased>) {
        if let Some(bytes) = bytes {
            self.extras_mut().live.of_tag = Some(bytes);
        }
    }

    /// Its first address on the device.
    #[inline]
    #[must_use]
    pub fn address(&self) -> u64 {
        self.place.address
    }

    /// Bytes that were asked for.
    #[inline]
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.place.asked.bytes()
    }

    /// Bytes that it holds, at least as many. Looked up under the lock of the stream's cache.
    #[must_use]
    pub fn capacity(&self) -> u64 {
        match &self.owner {
            Owner::Pool(Way { home, key }) => home.size_of(self.place.address, *key),
            Owner::Backend(backed) => backed.bytes,
        }
    }

    /// Who it is for.
    #[must_use]
    pub fn tag(&self) -> Tag {
        self.place.asked.tag()
    }

    /// The device.
    #[must_use]
    pub fn device(&self) -> DeviceId {
        self.home().raw().device()
    }

    /// The stream that it belongs to.
    #[must_use]
    pub fn home(&self) -> Arc<Timeline> {
        match &self.owner {
            Owner::Pool(Way { home, .. }) => home.timeline(),
            Owner::Backend(backed) => backed.timeline.clone(),
        }
    }

    /// A number that no other block at this address has, on a driver that checks; 0 on others.
    #[must_use]
    pub fn generation(&self) -> u64 {
        self.extras.get().map_or(0, |extras| extras.generation)
    }

    /// Makes `stream` wait for what must come before `access`, and keeps the block's bytes its own
    /// until the answer is finished or dropped, even if the block is freed meanwhile. The host does
    /// not wait.
    ///
    /// # Errors
    /// [`MemoryError::Busy`] if a prepared use conflicts; [`MemoryError::WrongDevice`]; the
    /// driver's.
    #[track_caller]
    pub fn prepare(&self, stream: &Stream, access: Access) -> Result<Use> {
        let _site = site::enter();
        let home = self.home();
        self.check_stream(&home, stream)?;
        self.uses.prepare(self.address(), &home, stream.timeline(), access)
    }

    /// Notes that work queued on `stream` uses the block. That work must have been ordered with the
    /// block's other uses: by `stream` waiting for the block's own stream, or by
    /// [`Block::prepare`].
    ///
    /// # Errors
    /// [`MemoryError::WrongDevice`]; the driver's, where the stream has to be fenced at once.
    #[track_caller]
    pub fn record_use(&self, stream: &Stream, access: Access) -> Result<()> {
        let _site = site::enter();
        let home = self.home();
        self.check_stream(&home, stream)?;
        self.uses.record(&home, stream.timeline(), access)
    }

    fn check_stream(&self, home: &Timeline, stream: &Stream) -> Result<()> {
        self.check_device(home, stream.device())?;
        same_machine(&**home.driver(), &**stream.driver())
    }

    fn check_device(&self, home: &Timeline, device: DeviceId) -> Result<()> {
        let expected = home.raw().device();
        if device == expected {
            Ok(())
        } else {
            Err(MemoryError::WrongDevice { expected, actual: device })
        }
    }

    /// Orders a use whose end is the end of a borrow. `alone`: every borrow that it conflicts with
    /// is over.
    pub(crate) fn order_as(
        &self,
        stream: RawStream,
        alive: Option<KeepAlive>,
        access: Access,
        alone: bool,
    ) -> Result<()> {
        let home = self.home();
        self.check_device(&home, stream.device())?;
        let on = if stream == home.raw() {
            home.clone()
        } else {
            self.owner.streams()?.timeline(stream, alive)?
        };
        let lend = if alone { UseList::lend } else { UseList::lend_beside };
        lend(&self.uses, self.address(), &home, &on, access)
    }
}

impl OpaqueBlock for Block {
    fn keep_until_free(&mut self, thing: Box<dyn Any + Send + Sync>) {
        self.extras_mut().until_free.get_or_insert_default().push(Contained::new(thing));
    }
}

#[expect(unsafe_code, reason = "makes the promises of an operand")]
// SAFETY: 1. the range is the block's own until it is dropped, and its pool gives it to nobody else
// before.
// 2. `UseList::lend` makes the stream wait for the home stream and for conflicting uses, and the
//    pool holds the bytes
// back until every noted use is done. 3. a stream that is not fenced at once is good until it is
// retired.
// 4. it is the driver's that the memory comes from.
unsafe impl Operand for Block {
    fn range(&self) -> DeviceRange {
        DeviceRange { device: self.device(), address: self.address(), bytes: self.bytes() }
    }

    fn machine(&self) -> Option<u64> {
        Some(self.home().driver().machine())
    }

    fn home_stream(&self) -> Option<RawStream> {
        let home = self.home();
        // Those that are fenced at once are for their own threads, or may be gone by now.
        (!home.fences_at_once() && !home.is_retired()).then(|| home.raw())
    }

    fn order(&self, stream: RawStream, alive: Option<KeepAlive>, access: Access) -> Result<()> {
        // Whoever may read knows that no borrow to be written lives; whoever says that he writes
        // proves nothing by it.
        self.order_as(stream, alive, access, !access.writes())
    }
}

#[expect(unsafe_code, reason = "makes the promises of an operand")]
// SAFETY: 1. a block is its owner's alone, and its parts borrow it.
unsafe impl OperandMut for Block {
    fn order_mut(
        &mut self,
        stream: RawStream,
        alive: Option<KeepAlive>,
        access: Access,
    ) -> Result<()> {
        self.order_as(stream, alive, access, true)
    }
}

impl Tracked for Block {
    fn account(&self) -> Account<'_> {
        // Whoever may read the block knows that nobody has borrowed it to be written.
        Account { address: self.address(), home: self.home(), uses: &self.uses, alone: true }
    }
}
impl Owner {
    /// The streams of the pool that the block came from.
    fn streams(&self) -> Result<StreamPool> {
        match self {
            Self::Pool(Way { home, .. }) => home.streams().ok_or(MemoryError::Closed),
            Self::Backend(backed) => Ok(backed.streams.clone()),
        }
    }
}

impl Drop for Block {
    #[inline]
    fn drop(&mut self) {
        if let Owner::Pool(way) = &self.owner
            && self.uses.is_empty()
            && self.extras.is_none()
        {
            return way.home.put_back(way, &self.place);
        }
        self.end();
    }
}

impl Block {
    /// Ends a block that is more than a place in a cache.
    #[inline(never)]
    fn end(&mut self) {
        match &self.owner {
            Owner::Pool(way)
                if self.uses.is_empty()
                    && self.extras.get().is_some_and(Extras::is_account_only) =>
            {
                let live = self.extras.take();
                way.home.put_back(way, &self.place);
                // After the memory is there again: whoever is granted these bytes finds it.
                drop(live);
            }
            Owner::Pool(way) => {
                let freed = Freed { way: *way, place: self.place };
                way.home.put_back_with_extras(freed, &mut self.uses, self.extras.take());
            }
            Owner::Backend(backed) => {
                backed.ledger.ending(self.place.address);
                let uses = self.uses.take(&backed.timeline);
                let extras = self.extras.take().or_default();
                backed.release(self.place.address, extras.generation, uses, extras.until_free);
            }
        }
    }
}

/// What of a block comes home, and is all that a cache gives out.
#[derive(Clone, Copy)]
pub(crate) struct Freed {
    pub(crate) way: Way,
    pub(crate) place: Place,
}

impl Freed {
    /// What the heap of `home` has found for `request`.
    #[inline]
    pub(crate) fn found(
        home: &'static Home,
        found: &aquifer_heap::Block,
        request: &Request,
    ) -> Self {
        let asked = Asked::new(request.size(), request.owner());
        let place = Place { address: found.address, asked };
        Self { way: Way { home, key: found.key }, place }
    }
}

impl fmt::Debug for Block {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Block")
            .field("address", &format_args!("{:#x}", self.address()))
            .field("bytes", &self.bytes())
            .field("tag", &self.tag())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_six_words() {
        assert_eq!(size_of::<Block>(), 48);
    }

    #[test]
    fn what_was_asked_for_comes_back_from_eight_bytes() {
        assert_eq!(size_of::<Asked>(), 8);
        for bytes in [0, 1, 511, u64::from(u32::MAX), 1 << 32, crate::request::MAX_BYTES] {
            let asked = Asked::new(bytes, Tag::OTHER);
            assert_eq!((asked.bytes(), asked.tag()), (bytes, Tag::OTHER));
        }
    }
}
