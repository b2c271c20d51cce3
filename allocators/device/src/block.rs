//! A block of device memory, as its owner holds it.

use crate::{backend::Backed, home::Home};
use aquifer_core::{DeviceId, MemoryError, Result, Tag};
use aquifer_driver::{Access, DeviceRange, KeepAlive, Operand, OperandMut, RawStream, site};
use aquifer_stream::{Stream, StreamPool, Timeline, Use, UseList};
use std::{any::Any, fmt, sync::Arc};

/// A block of device memory that goes home when it is dropped.
///
/// It belongs to the stream it was allocated for: work on that stream may use it at once and until the drop. Work on any
/// other stream goes through [`Block::prepare`], or is noted by [`Block::record_use`]; the pool gives the bytes to
/// somebody else only after it.
///
/// Dropping it never calls the driver and never blocks, except for the last block of a pool that has been closed.
/// Forgetting it leaks the memory. The bytes are not initialised.
pub struct Block {
    pub(crate) address: u64,
    pub(crate) requested: u64,
    pub(crate) tag: Tag,
    pub(crate) owner: Owner,
    pub(crate) uses: UseList,
    /// Tells it from every other block that will be or has been at its address, where somebody watches; 0 where not.
    pub(crate) generation: u64,
    /// What ends when the memory is really free: charges of wrappers.
    pub(crate) until_free: UntilFree,
}

/// What ends when a block's memory is really free.
pub(crate) type UntilFree = Option<Box<Vec<Box<dyn Any + Send + Sync>>>>;

/// The way home.
pub(crate) enum Owner {
    /// A stream's cache in a caching pool.
    Pool(&'static Home, aquifer_heap::Block),
    /// The driver's own allocators.
    Backend(Box<Backed>),
}

impl Block {
    /// Its first address on the device.
    #[inline]
    #[must_use]
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Bytes that were asked for.
    #[inline]
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.requested
    }

    /// Bytes that it holds, at least as many.
    #[must_use]
    pub fn capacity(&self) -> u64 {
        match &self.owner {
            Owner::Pool(_, place) => place.bytes,
            Owner::Backend(backed) => backed.bytes,
        }
    }

    /// Who it is for.
    #[must_use]
    pub fn tag(&self) -> Tag {
        self.tag
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
            Owner::Pool(home, _) => home.timeline(),
            Owner::Backend(backed) => backed.timeline.clone(),
        }
    }

    /// A number that no other block at this address has, on a driver that checks; 0 on others.
    #[must_use]
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// Makes `stream` wait for what must come before `access`, and keeps the block's bytes its own until the answer is
    /// finished or dropped, even if the block is freed meanwhile. The host does not wait.
    ///
    /// # Errors
    /// [`MemoryError::Busy`] if a prepared use conflicts; [`MemoryError::WrongDevice`]; the driver's.
    #[track_caller]
    pub fn prepare(&self, stream: &Stream, access: Access) -> Result<Use> {
        let _site = site::enter();
        let home = self.home();
        self.check_device(&home, stream.device())?;
        self.uses.prepare(self.address(), &home, stream.timeline(), access)
    }

    /// Notes that work queued on `stream` uses the block. That work must have been ordered with the block's other uses:
    /// by `stream` waiting for the block's own stream, or by [`Block::prepare`].
    ///
    /// # Errors
    /// [`MemoryError::WrongDevice`]; the driver's, where the stream has to be fenced at once.
    #[track_caller]
    pub fn record_use(&self, stream: &Stream, access: Access) -> Result<()> {
        let _site = site::enter();
        let home = self.home();
        self.check_device(&home, stream.device())?;
        self.uses.record(&home, stream.timeline(), access)
    }

    fn check_device(&self, home: &Timeline, device: DeviceId) -> Result<()> {
        let expected = home.raw().device();
        if device == expected { Ok(()) } else { Err(MemoryError::WrongDevice { expected, actual: device }) }
    }

    /// Orders a use whose end is the end of a borrow. `alone`: every borrow that it conflicts with is over.
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

    /// Keeps `thing` until the block's memory is really free.
    pub(crate) fn keep_until_free(&mut self, thing: Box<dyn Any + Send + Sync>) {
        self.until_free.get_or_insert_default().push(thing);
    }
}

#[expect(unsafe_code, reason = "makes the promises of an operand")]
// SAFETY: 1. the range is the block's own until it is dropped, and its pool gives it to nobody else before.
// 2. `UseList::lend` makes the stream wait for the home stream and for conflicting uses, and the pool holds the bytes
// back until every noted use is done.
unsafe impl Operand for Block {
    fn range(&self) -> DeviceRange {
        DeviceRange { device: self.device(), address: self.address(), bytes: self.requested }
    }

    fn order(&self, stream: RawStream, alive: Option<KeepAlive>, access: Access) -> Result<()> {
        // Whoever may read knows that no borrow to be written lives; whoever says that he writes proves nothing by it.
        self.order_as(stream, alive, access, !access.writes())
    }
}

#[expect(unsafe_code, reason = "makes the promises of an operand")]
// SAFETY: 1. a block is its owner's alone, and its parts borrow it.
unsafe impl OperandMut for Block {
    fn order_mut(&mut self, stream: RawStream, alive: Option<KeepAlive>, access: Access) -> Result<()> {
        self.order_as(stream, alive, access, true)
    }
}

impl Owner {
    /// The streams of the pool that the block came from.
    fn streams(&self) -> Result<StreamPool> {
        match self {
            Self::Pool(home, _) => home.streams().ok_or(MemoryError::Closed),
            Self::Backend(backed) => Ok(backed.streams.clone()),
        }
    }
}

impl Drop for Block {
    #[inline]
    fn drop(&mut self) {
        match &self.owner {
            Owner::Pool(home, place) => {
                let freed = Freed {
                    place: *place,
                    requested: self.requested,
                    tag: self.tag,
                    generation: self.generation,
                };
                home.take_back(freed, &mut self.uses, &mut self.until_free);
            }
            Owner::Backend(backed) => {
                let uses = if self.uses.is_empty() { Vec::new() } else { self.uses.take(&backed.timeline) };
                backed.release(self.address, self.generation, uses, self.until_free.take());
            }
        }
    }
}

/// What comes home.
#[derive(Clone, Copy)]
pub(crate) struct Freed {
    pub(crate) place: aquifer_heap::Block,
    pub(crate) requested: u64,
    pub(crate) tag: Tag,
    pub(crate) generation: u64,
}

impl fmt::Debug for Block {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Block")
            .field("address", &format_args!("{:#x}", self.address()))
            .field("bytes", &self.requested)
            .field("tag", &self.tag)
            .finish_non_exhaustive()
    }
}
