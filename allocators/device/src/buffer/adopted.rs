//! Memory of other libraries as our buffers.
//!
//! The stream in whose order the other library uses its memory becomes the block's home, so that
//! everything that a pool's block can do is there: uses on other streams are noted, waited for and
//! held against what comes next. What differs is the way home: instead of into a cache, the memory
//! goes back to its library, behind all of its uses.

use crate::{
    Block, DeviceBuffer, DeviceSlice, DeviceSliceMut,
    backend::{Backed, Deferred, Release},
    block::Asked,
};
use aquifer_core::{MemoryError, Result, Tag};
use aquifer_driver::{
    Access, DeviceRange, Foreign, KeepAlive, Operand, OperandMut, RawStream, Typed, site,
};
use aquifer_stream::{Account, StreamPool, Timeline, Tracked, Uses};
use bytemuck::Pod;
use std::{
    any::Any,
    error, fmt,
    ops::Range,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

/// Another library's memory, handed over by value: [`External`](aquifer_driver::External) by its
/// address, or a `CudaSlice` of cudarc.
///
/// Copies, fills, other streams and kernels take it like a [`DeviceBuffer`]. Its home is its
/// library's stream, so what that queues on it is in order with all that is done here. It is not
/// counted or charged by any pool, and the oracle of a simulated GPU checks order and mapping for
/// it, not ownership.
///
/// Dropped, it goes back to its library: in stream order, without a wait of the host, unless it
/// ends at once ([`Foreign::ends_at_once`]). While a [`Use`](aquifer_stream::Use) is still open, it
/// is kept, and looked at again whenever another one is made or dropped. Forgotten, it is leaked.
///
/// ```
/// use aquifer_device::{Adopted, DevicePool, PoolConfig};
/// use aquifer_driver::{DeviceId, DeviceRange, External, sim::Sim};
/// use std::sync::Arc;
///
/// let sim = Sim::h200(1);
/// let driver = sim.driver();
/// let pool = DevicePool::open(driver.clone(), DeviceId(0), PoolConfig::default())?;
/// // Another library's stream, memory, and what frees it.
/// let theirs = driver.stream_create(DeviceId(0), 0)?;
/// let range = DeviceRange { device: DeviceId(0), address: driver.mem_alloc(DeviceId(0), 400)?, bytes: 400 };
/// # #[expect(unsafe_code)]
/// // SAFETY: 1. nobody else knows the address. 2. nothing is queued. 3. the guard frees nothing. 4. the stream is never
/// // destroyed.
/// let external = unsafe { External::<f32, _>::new(range, theirs, Some(Arc::new(())), "their tensor") };
///
/// let s = pool.stream()?;
/// let mut x = Adopted::new(pool.streams(), external)?;
/// s.fill(&mut x, 1.5)?; // waits for `theirs`
/// let external = x.into_inner()?; // and `theirs` waits for `s`
/// assert_eq!(external.into_guard(), "their tensor");
/// assert!(sim.violations().is_empty());
/// # Ok::<(), aquifer_core::MemoryError>(())
/// ```
pub struct Adopted<F: Foreign> {
    buffer: DeviceBuffer<F::Item>,
    theirs: Arc<Theirs<F>>,
}

/// What could not be taken in, or given back yet, as it was handed in.
///
/// Its example is that of [`Adopted`].
pub struct Declined<V> {
    /// What was handed in.
    pub value: V,
    /// Why.
    pub error: MemoryError,
}

/// What is given back to its library: once.
struct Theirs<F: Foreign> {
    /// The stream that it is used in the order of.
    timeline: Arc<Timeline>,
    ends_at_once: bool,
    foreign: Mutex<Option<F>>,
}

/// Memory whose owner has let go of it while uses were open, or a wait was refused.
struct Kept {
    address: u64,
    timeline: Arc<Timeline>,
    ends_at_once: bool,
    uses: Uses,
    foreign: Box<dyn Any + Send>,
}

/// All of them.
static KEPT: Mutex<Vec<Kept>> = Mutex::new(Vec::new());

fn kept() -> MutexGuard<'static, Vec<Kept>> {
    KEPT.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Kept {
    /// Puts the home stream behind every use, and lets the library have its memory.
    fn go(mut self) -> Result<(), Self> {
        match behind(self.address, &self.timeline, &mut self.uses, self.ends_at_once) {
            // Nothing runs on a lost device, and its memory goes with its context.
            Ok(()) | Err(MemoryError::DeviceLost { .. }) => {
                drop(self.foreign);
                Ok(())
            }
            Err(_) => Err(self),
        }
    }

    /// Tries those again that could not go.
    fn retry() {
        let waiting = std::mem::take(&mut *kept());
        for one in waiting {
            if let Err(still) = one.go() {
                kept().push(still);
            }
        }
    }
}

/// Makes the home stream wait for every use, and the host for the home stream where it has to.
fn behind(address: u64, home: &Timeline, uses: &mut Uses, ends_at_once: bool) -> Result<()> {
    uses.forget_done();
    // No use of memory that has been let go of is opened any more, so what is stamped then is all.
    if uses.is_open() {
        return Err(MemoryError::Busy { address });
    }
    for (on, epoch) in uses.stamped() {
        home.wait_for(&on, epoch)?;
    }
    if ends_at_once {
        home.wait(home.open(), None)?;
    }
    Ok(())
}

impl<F: Foreign> Theirs<F> {
    fn take(&self) -> Option<F> {
        self.foreign.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

impl<F: Foreign> Release for Theirs<F> {
    fn release(&self, block: Deferred) {
        Kept::retry();
        // `into_inner` leaves nothing here.
        let Some(foreign) = self.take() else { return };
        let Deferred { address, uses, .. } = block;
        let (timeline, ends_at_once) = (self.timeline.clone(), self.ends_at_once);
        let going = Kept { address, timeline, ends_at_once, uses, foreign: Box::new(foreign) };
        if let Err(still) = going.go() {
            kept().push(still);
        }
    }
}

impl<F: Foreign> Adopted<F> {
    /// Takes `foreign` in, for use with the streams of `streams`. The host does not wait.
    ///
    /// # Errors
    /// [`Declined`] with `foreign` in it: [`MemoryError::WrongDevice`]; [`MemoryError::ZeroSize`];
    /// [`MemoryError::UnknownId`] for a stream that nobody keeps alive and that has not been
    /// adopted; the library's.
    #[track_caller]
    pub fn new(streams: &StreamPool, mut foreign: F) -> Result<Self, Declined<F>> {
        let _site = site::enter();
        Kept::retry();
        let range = foreign.range();
        let taken = (|| {
            if range.device != streams.device() {
                return Err(MemoryError::WrongDevice {
                    expected: streams.device(),
                    actual: range.device,
                });
            }
            if size_of::<F::Item>() == 0 || range.bytes < size_of::<F::Item>() as u64 {
                return Err(MemoryError::ZeroSize);
            }
            let (stream, alive) = foreign.stream();
            let timeline = streams.timeline(stream, alive)?;
            foreign.enter()?;
            Ok(timeline)
        })();
        let timeline = match taken {
            Ok(timeline) => timeline,
            Err(error) => return Err(Declined { value: foreign, error }),
        };
        let len = (range.bytes / size_of::<F::Item>() as u64) as usize;
        let ends_at_once = foreign.ends_at_once();
        let theirs = Arc::new(Theirs {
            timeline: timeline.clone(),
            ends_at_once,
            foreign: Mutex::new(Some(foreign)),
        });
        let backed = Backed {
            ledger: theirs.clone(),
            timeline,
            streams: streams.clone(),
            bytes: range.bytes,
        };
        let block = Block::backed(range.address, Asked::new(range.bytes, Tag::NONE), backed, 0);
        let buffer = DeviceBuffer { block, len, elements: std::marker::PhantomData };
        Ok(Self { buffer, theirs })
    }

    /// Gives the memory back, its library's stream behind all of its uses. The host does not wait,
    /// unless the memory [ends at once](Foreign::ends_at_once).
    ///
    /// # Errors
    /// [`Declined`] with this in it: [`MemoryError::Busy`] while a use is open; the driver's; the
    /// library's.
    #[track_caller]
    pub fn into_inner(mut self) -> Result<F, Declined<Self>> {
        let _site = site::enter();
        let home = self.theirs.timeline.clone();
        let mut ordered = self.buffer.order_mut(home.raw(), None, Access::ReadWrite);
        if self.theirs.ends_at_once {
            ordered = ordered.and_then(|()| home.wait(home.open(), None).map(drop));
        }
        if let Err(error) = ordered {
            return Err(Declined { value: self, error });
        }
        // It is there from the making to the end, and this is the end.
        let Some(mut foreign) = self.theirs.take() else {
            return Err(Declined { value: self, error: MemoryError::Closed });
        };
        if let Err(error) = foreign.leave() {
            *self.theirs.foreign.lock().unwrap_or_else(PoisonError::into_inner) = Some(foreign);
            return Err(Declined { value: self, error });
        }
        Ok(foreign)
    }

    /// As a buffer, to be read.
    #[must_use]
    pub fn buffer(&self) -> &DeviceBuffer<F::Item> {
        &self.buffer
    }
}

impl<F: Foreign<Item: Pod>> Adopted<F> {
    /// The elements in `range`, to be read.
    ///
    /// # Errors
    /// [`MemoryError::OutOfBounds`].
    pub fn slice(&self, range: Range<usize>) -> Result<DeviceSlice<'_, F::Item>> {
        self.buffer.slice(range)
    }

    /// The elements in `range`, to be written.
    ///
    /// # Errors
    /// [`MemoryError::OutOfBounds`].
    pub fn slice_mut(&mut self, range: Range<usize>) -> Result<DeviceSliceMut<'_, F::Item>> {
        self.buffer.slice_mut(range)
    }
}

#[expect(unsafe_code, reason = "makes the promises of an operand")]
// SAFETY: 1. the library has handed its memory over, by its own promise. 2. that of the block
// underneath; the memory goes back behind every noted use. 3. the block's own promise.
unsafe impl<F: Foreign> Operand for Adopted<F> {
    fn range(&self) -> DeviceRange {
        self.buffer.range()
    }
    fn machine(&self) -> Option<u64> {
        self.buffer.machine()
    }
    fn home_stream(&self) -> Option<RawStream> {
        self.buffer.home_stream()
    }
    fn order(&self, stream: RawStream, alive: Option<KeepAlive>, access: Access) -> Result<()> {
        self.buffer.order(stream, alive, access)
    }
}

#[expect(unsafe_code, reason = "makes the promises of an operand")]
// SAFETY: 1. it is its owner's alone, and its parts borrow it.
unsafe impl<F: Foreign> OperandMut for Adopted<F> {
    fn order_mut(
        &mut self,
        stream: RawStream,
        alive: Option<KeepAlive>,
        access: Access,
    ) -> Result<()> {
        self.buffer.order_mut(stream, alive, access)
    }
}

impl<F: Foreign> Tracked for Adopted<F> {
    fn account(&self) -> Account<'_> {
        self.buffer.account()
    }
}

impl<F: Foreign> Typed for Adopted<F> {
    type Item = F::Item;
    fn len(&self) -> usize {
        self.buffer.len()
    }
}

impl<F: Foreign> fmt::Debug for Adopted<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Adopted")
            .field("buffer", &self.buffer)
            .field("home", &self.theirs.timeline.raw())
            .finish_non_exhaustive()
    }
}

impl<V> fmt::Debug for Declined<V> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}
impl<V> fmt::Display for Declined<V> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}
impl<V> error::Error for Declined<V> {}
impl<V> From<Declined<V>> for MemoryError {
    fn from(declined: Declined<V>) -> Self {
        declined.error
    }
}
