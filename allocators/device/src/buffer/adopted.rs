//! Memory of other libraries as buffers of this crate.
//!
//! - The stream that the other library uses its memory on becomes the owner stream of a block. So
//!   everything that works for a pool's block works here: uses on other streams are recorded,
//!   waited for, and ordered before later uses.
//! - At the end the memory does not enter a cache. It returns to its library, behind all of its
//!   uses.

use crate::{
    Block, Declined, DeviceBuffer, DeviceSlice, DeviceSliceMut,
    base::{
        extent::PackedRequest,
        pending::{DeferredFree, PendingUses, PendingWork},
    },
    block::{DriverBlock, ReleaseBlock},
};
use aquifer_core::{MemoryError, Result, Tag};
use aquifer_driver::{
    Access, DeviceRange, Foreign, KeepAlive, Operand, OperandMut, RawStream, Typed, site,
};
use aquifer_stream::{Account, StreamPool, Timeline, TrackUses, Uses};
use bytemuck::Pod;
use std::{
    any::Any,
    fmt,
    ops::Range,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

/// Memory of another library, handed over by value: [`External`](aquifer_driver::External) by its
/// address, or a `CudaSlice` of cudarc.
///
/// Copies, fills, other streams and kernels accept it like a [`DeviceBuffer`]. Its owner stream is
/// that of its library, so the library's work on that stream is ordered with all work here. No pool
/// counts or charges it. For this memory the oracle of a simulated GPU checks order and mapping,
/// not ownership.
///
/// The drop returns the memory to its library in stream order, without a wait of the host, unless
/// it ends at once ([`Foreign::ends_at_once`]). While a [`Use`](aquifer_stream::Use) is open, the
/// memory is kept, and polled whenever another value of this type is created or dropped. Forgetting
/// the value leaks the memory.
///
/// ```
/// use aquifer::{
///     Adopted, DeviceId, DevicePool, DeviceRange, PoolConfig, driver::External, sim::Sim,
/// };
/// use std::sync::Arc;
///
/// let sim = Sim::h200(1);
/// let driver = sim.driver();
/// let pool = DevicePool::open(driver.clone(), DeviceId(0), PoolConfig::default())?;
/// // The stream and the memory of another library, and the guard that frees the memory.
/// let theirs = driver.stream_create(DeviceId(0), 0)?;
/// let range = DeviceRange { device: DeviceId(0), address: driver.mem_alloc(DeviceId(0), 400)?, bytes: 400 };
/// # #[expect(unsafe_code)]
/// // SAFETY: 1. No other code has the address. 2. No work is queued. 3. The guard frees nothing.
/// // 4. The stream is never destroyed.
/// let external = unsafe { External::<f32, _>::new(range, theirs, Some(Arc::new(())), "their tensor") };
///
/// let s = pool.stream()?;
/// let mut x = Adopted::new(pool.streams(), external)?;
/// s.fill(&mut x, 1.5)?; // waits for `theirs`
/// let external = x.into_inner()?; // and `theirs` waits for `s`
/// assert_eq!(external.into_guard(), "their tensor");
/// assert!(sim.violations().is_empty());
/// # Ok::<(), aquifer::MemoryError>(())
/// ```
pub struct Adopted<F: Foreign> {
    buffer: DeviceBuffer<F::Item>,
    owner: Arc<ForeignOwner<F>>,
}

/// The foreign value, which is returned to its library once.
struct ForeignOwner<F: Foreign> {
    /// The library's stream.
    timeline: Arc<Timeline>,
    ends_at_once: bool,
    foreign: Mutex<Option<F>>,
}

/// Dropped memory that still had open uses, or for which a wait was refused.
struct PendingForeign {
    address: u64,
    timeline: Arc<Timeline>,
    ends_at_once: bool,
    uses: Uses,
    foreign: Box<dyn Any + Send>,
}

/// All kept memory of the process.
static PENDING: Mutex<Vec<PendingForeign>> = Mutex::new(Vec::new());

fn pending() -> MutexGuard<'static, Vec<PendingForeign>> {
    PENDING.lock().unwrap_or_else(PoisonError::into_inner)
}

impl PendingForeign {
    /// Makes the library's stream wait for every use, and returns the memory to the library.
    fn try_release(mut self) -> Result<(), Self> {
        match order_behind(self.address, &self.timeline, &mut self.uses, self.ends_at_once) {
            // After the loss of the device no work runs, and its memory ends with its context.
            Ok(()) | Err(MemoryError::DeviceLost { .. }) => {
                drop(self.foreign);
                Ok(())
            }
            Err(_) => Err(self),
        }
    }

    /// Retries all kept memory.
    fn retry_all() {
        let waiting = std::mem::take(&mut *pending());
        for one in waiting {
            if let Err(still) = one.try_release() {
                pending().push(still);
            }
        }
    }
}

/// Makes the owner stream wait for every use, and the host for the owner stream if required.
fn order_behind(
    address: u64,
    owner_stream: &Timeline,
    uses: &mut Uses,
    ends_at_once: bool,
) -> Result<()> {
    if !uses.are_over() {
        uses.order_before(owner_stream, address)?;
    }
    if ends_at_once {
        owner_stream.wait(owner_stream.open(), None)?;
    }
    Ok(())
}

impl<F: Foreign> ForeignOwner<F> {
    fn take(&self) -> Option<F> {
        self.foreign.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

impl<F: Foreign> ReleaseBlock for ForeignOwner<F> {
    fn release(&self, block: DeferredFree) {
        PendingForeign::retry_all();
        // `into_inner` has taken the value.
        let Some(foreign) = self.take() else { return };
        let DeferredFree { address, work: PendingWork { uses, .. }, .. } = block;
        let (timeline, ends_at_once) = (self.timeline.clone(), self.ends_at_once);
        let foreign =
            PendingForeign { address, timeline, ends_at_once, uses, foreign: Box::new(foreign) };
        if let Err(still) = foreign.try_release() {
            pending().push(still);
        }
    }
}

impl<F: Foreign> Adopted<F> {
    /// Adopts `foreign`, for use with the streams of `streams`. The host does not wait.
    ///
    /// # Errors
    /// [`Declined`] with `foreign` in it: [`MemoryError::WrongDevice`]; [`MemoryError::ZeroSize`];
    /// [`MemoryError::UnknownId`] for a stream that has neither a keep-alive nor been adopted; the
    /// library's.
    #[track_caller]
    pub fn new(streams: &StreamPool, mut foreign: F) -> Result<Self, Declined<F>> {
        let _site = site::enter();
        PendingForeign::retry_all();
        let range = foreign.range();
        let taken = (|| {
            if range.device != streams.device() {
                return Err(MemoryError::WrongDevice {
                    expected: streams.device(),
                    actual: range.device,
                });
            }
            if size_of::<F::Item>() == 0 || (1..size_of::<F::Item>() as u64).contains(&range.bytes)
            {
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
        let owner = Arc::new(ForeignOwner {
            timeline: timeline.clone(),
            ends_at_once,
            foreign: Mutex::new(Some(foreign)),
        });
        let driver_block = DriverBlock {
            releaser: owner.clone(),
            timeline,
            streams: streams.clone(),
            bytes: range.bytes,
            key: 0,
        };
        let block = Block::from_driver_block(
            range.address,
            PackedRequest::new(range.bytes, Tag::NONE),
            driver_block,
            0,
        );
        let buffer = DeviceBuffer { block, len, elements: std::marker::PhantomData };
        Ok(Self { buffer, owner })
    }

    /// Returns the memory, with its library's stream ordered behind all of its uses. The host does
    /// not wait, unless the memory [ends at once](Foreign::ends_at_once).
    ///
    /// # Errors
    /// [`Declined`] with this value in it: [`MemoryError::Busy`] while a use is open; the driver's;
    /// the library's.
    #[track_caller]
    #[expect(clippy::result_large_err, reason = "it gives the whole value back")]
    pub fn into_inner(mut self) -> Result<F, Declined<Self>> {
        let _site = site::enter();
        let owner_stream = self.owner.timeline.clone();
        let alive = Some(owner_stream.keep_alive());
        let mut ordered = self.buffer.order_mut(owner_stream.raw(), alive, Access::ReadWrite);
        if self.owner.ends_at_once {
            ordered = ordered.and_then(|()| owner_stream.wait(owner_stream.open(), None).map(drop));
        }
        if let Err(error) = ordered {
            return Err(Declined { value: self, error });
        }
        // The value is present from construction until here.
        let Some(mut foreign) = self.owner.take() else {
            return Err(Declined { value: self, error: MemoryError::Closed });
        };
        if let Err(error) = foreign.leave() {
            *self.owner.foreign.lock().unwrap_or_else(PoisonError::into_inner) = Some(foreign);
            return Err(Declined { value: self, error });
        }
        Ok(foreign)
    }

    /// Returns the memory as a shared buffer.
    #[must_use]
    pub fn buffer(&self) -> &DeviceBuffer<F::Item> {
        &self.buffer
    }
}

impl<F: Foreign<Item: Pod>> Adopted<F> {
    /// Returns the elements in `range` as a shared slice.
    ///
    /// # Errors
    /// [`MemoryError::OutOfRange`].
    pub fn slice(&self, range: Range<usize>) -> Result<DeviceSlice<'_, F::Item>> {
        self.buffer.slice(range)
    }

    /// Returns the elements in `range` as a mutable slice.
    ///
    /// # Errors
    /// [`MemoryError::OutOfRange`].
    pub fn slice_mut(&mut self, range: Range<usize>) -> Result<DeviceSliceMut<'_, F::Item>> {
        self.buffer.slice_mut(range)
    }
}

#[expect(unsafe_code, reason = "makes the promises of an operand")]
// SAFETY: 1. The library has handed its memory over, by the contract of `Foreign`. 2. As for the
// underlying block. The memory returns to the library behind every recorded use. 3. As for the
// block.
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
// SAFETY: 1. The owner has exclusive access to the value, and its slices borrow it.
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

impl<F: Foreign> TrackUses for Adopted<F> {
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
            .field("home", &self.owner.timeline.raw())
            .finish_non_exhaustive()
    }
}
