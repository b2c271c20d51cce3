//! The source of ranges that a user writes, and the work that a freed range waits for.
#![expect(unsafe_code, reason = "declares an unsafe trait; holds no unsafe block")]

use crate::base::pending::DeferredFree;
use aquifer_core::{BLOCK_ALIGN, DeviceId, MemoryError, Result};
use aquifer_driver::DeviceRange;
use aquifer_stream::Stream;
use std::{fmt, time::Instant};

/// A source of ranges of device memory, to be used through a [`SourcePool`](crate::SourcePool).
///
/// This example hands out the slots of another library's allocation:
///
/// ```
/// use aquifer::{
///     Dependencies, DeviceBuffer, DeviceId, DeviceRange, Driver, MemoryError, RangeSource,
///     SourcePool, Stream, StreamPool, error::Result, sim::Sim,
/// };
/// use std::sync::{Mutex, PoisonError};
///
/// const SLOT: u64 = 1 << 20;
/// #[derive(Debug)]
/// struct Slab { range: DeviceRange, free: Mutex<Vec<u64>> }
///
/// // SAFETY: 1. a slot lies in the slab, is free, and is removed from the list. 2. the slab is
/// // never freed here. 3. and 4. a slot is on the list only when its work is done.
/// unsafe impl RangeSource for Slab {
///     fn device(&self) -> DeviceId { self.range.device }
///     fn allocate(&self, _stream: &Stream, bytes: u64) -> Result<u64> {
///         if bytes > SLOT {
///             return Err(MemoryError::TooLarge { requested: bytes, limit: SLOT });
///         }
///         let slot = self.free.lock().unwrap_or_else(PoisonError::into_inner).pop();
///         slot.ok_or_else(|| MemoryError::OutOfMemory(Box::new(aquifer::OutOfMemory::new("the slab".into(), bytes))))
///     }
///     fn deallocate(&self, range: DeviceRange, after: &Dependencies<'_>) -> Result<()> {
///         if !after.is_done()? {
///             return Err(MemoryError::Busy { address: range.address }); // offered again later
///         }
///         self.free.lock().unwrap_or_else(PoisonError::into_inner).push(range.address);
///         Ok(())
///     }
/// }
///
/// let driver = Sim::h200(1).driver();
/// let address = driver.mem_alloc(DeviceId(0), 8 * SLOT)?; // another library's allocation
/// let range = DeviceRange { device: DeviceId(0), address, bytes: 8 * SLOT };
/// let free = Mutex::new((0..8).map(|slot| address + slot * SLOT).collect());
/// let streams = StreamPool::new(driver, DeviceId(0), 4);
/// let pool = SourcePool::new(Slab { range, free }, streams.clone(), None)?;
/// let stream = streams.lease()?;
/// let mut x = DeviceBuffer::<f32>::new_in(&pool, &stream, 1000)?;
/// stream.fill(&mut x, 1.0)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Safety
/// 1. [`allocate`](RangeSource::allocate) returns the first address of `bytes` bytes of memory of
///    [`device`](RangeSource::device), mapped in its primary context and aligned to
///    [`alignment`](RangeSource::alignment). They overlap no other range that has not been
///    returned, and no memory that anything else uses.
/// 2. The range stays so until [`deallocate`](RangeSource::deallocate) has returned `Ok` for it. If
///    the source is dropped before, it stays so forever.
/// 3. Work that is queued on the `stream` of an allocation from then on comes after every earlier
///    use of the memory.
/// 4. `deallocate` neither unmaps, writes nor reuses a range before its dependencies are over, or
///    before a stream has been made to wait for them and only work of that stream gets the memory.
pub unsafe trait RangeSource: fmt::Debug + Send + Sync + 'static {
    /// Returns the device.
    fn device(&self) -> DeviceId;

    /// Returns the alignment of every range, in bytes: a power of two, at least [`BLOCK_ALIGN`].
    /// Requests for more are refused.
    fn alignment(&self) -> u64 {
        BLOCK_ALIGN
    }

    /// Returns the address of `bytes` bytes for work that is queued on `stream` from now on.
    /// `bytes` is not zero. May call the driver.
    ///
    /// # Errors
    /// Out of memory; the driver's. Nothing has changed.
    fn allocate(&self, stream: &Stream, bytes: u64) -> Result<u64>;

    /// Takes back a range that was [allocated](RangeSource::allocate). The source may free or reuse
    /// it once `after` is over. May run in the drop of a block, so it should neither panic nor take
    /// long.
    ///
    /// # Errors
    /// Any error leaves the range with the pool, charged. It is offered again at the next
    /// allocation, free or trim. When the pool ends, it is offered a last time, and later only while
    /// the error is the driver's. Return [`MemoryError::Busy`] if the work is not done and the
    /// source does not wait.
    fn deallocate(&self, range: DeviceRange, after: &Dependencies<'_>) -> Result<()>;

    /// Returns the bytes held from the device, if they are more than those in blocks.
    fn reserved(&self) -> Option<u64> {
        None
    }

    /// Releases unused memory to the device until `keep` bytes are left, as far as that needs no
    /// waiting. Returns the released bytes.
    ///
    /// # Errors
    /// The driver's.
    fn trim(&self, keep: u64) -> Result<u64> {
        let _ = keep;
        Ok(0)
    }
}

/// The work that must be over before a freed range may be reused.
///
/// [`RangeSource`] has an example.
pub struct Dependencies<'a> {
    pub(crate) freed: &'a DeferredFree,
}

impl Dependencies<'_> {
    /// Waits on the host until the work is over. Returns at once on a lost device, where nothing
    /// runs any more.
    ///
    /// # Errors
    /// [`MemoryError::Capturing`]; the driver's.
    pub fn wait(&self) -> Result<()> {
        self.wait_until(None).map(drop)
    }

    /// Returns whether the work is over. Never blocks, but may call the driver.
    ///
    /// # Errors
    /// As [`Dependencies::wait`].
    pub fn is_done(&self) -> Result<bool> {
        self.wait_until(Some(Instant::now()))
    }

    fn wait_until(&self, deadline: Option<Instant>) -> Result<bool> {
        match self.freed.work.wait(deadline) {
            Err(MemoryError::DeviceLost { .. }) => Ok(true),
            waited => waited,
        }
    }

    /// Orders work that is queued on `stream` from now on after this work. The host does not wait.
    ///
    /// # Errors
    /// [`MemoryError::Capturing`]; the driver's.
    pub fn order(&self, stream: &Stream) -> Result<()> {
        self.freed.work.order_before(stream.timeline(), self.freed.address).map(drop)
    }
}

impl fmt::Debug for Dependencies<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Dependencies")
            .field("stream", &self.freed.timeline.number())
            .field("address", &format_args!("{:#x}", self.freed.address))
            .finish_non_exhaustive()
    }
}
