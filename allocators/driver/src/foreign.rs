//! Device memory of other libraries.
#![expect(
    unsafe_code,
    reason = "declares an unsafe trait, and an unsafe constructor of what meets it"
)]

use crate::{DeviceRange, KeepAlive, RawStream};
use aquifer_core::Result;
use std::{fmt, marker::PhantomData};

/// Device memory that another library has handed over, whole: its slice, tensor or buffer, by
/// value.
///
/// It has a stream of that library's, in whose order it is used and freed there.
///
/// # Safety
/// 1. [`Foreign::range`] is device memory that holds whole elements, stays mapped while the value
///    lives, wherever that is moved, and is touched by nobody else meanwhile.
/// 2. Work queued on [`Foreign::stream`] after [`Foreign::enter`] has answered `Ok` comes after all
///    use that the library has made of the memory.
/// 3. When the value is dropped, or used again after [`Foreign::leave`] has answered `Ok`, the
///    library does nothing with the memory, on any stream, that does not come after what is queued
///    on that stream by then. Where [`Foreign::ends_at_once`], it may be dropped only when all of
///    that is done.
pub unsafe trait Foreign: Send + 'static {
    /// The elements' type.
    type Item: 'static;

    /// Where it lies.
    fn range(&self) -> DeviceRange;

    /// The stream that the library uses it in the order of, and what keeps that alive. Without that
    /// the stream must have been adopted before.
    fn stream(&self) -> (RawStream, Option<KeepAlive>);

    /// Puts that stream behind all that the library has queued for the memory. The host does not
    /// wait.
    ///
    /// # Errors
    /// The library's.
    fn enter(&mut self) -> Result<()> {
        Ok(())
    }

    /// Puts whatever the library does next behind what is queued on that stream. The host does not
    /// wait.
    ///
    /// # Errors
    /// The library's.
    fn leave(&mut self) -> Result<()> {
        Ok(())
    }

    /// Whether the memory ends as soon as the value does, whatever is queued: by an unmap, say. The
    /// host then waits first.
    fn ends_at_once(&self) -> bool {
        false
    }
}

/// Device memory by its address, of a library that is not known here: of another version of cudarc,
/// say.
///
/// ```
/// use aquifer_driver::{DeviceId, DeviceRange, External, Foreign, sim::Sim};
/// use std::sync::Arc;
///
/// let driver = Sim::h200(1).driver();
/// let device = DeviceId(0);
/// let stream = driver.stream_create(device, 0)?;
/// let range = DeviceRange { device, address: driver.mem_alloc(device, 4096)?, bytes: 4096 };
/// let theirs = vec![0; 4]; // what frees the memory when it is dropped
/// // SAFETY: 1. nobody else knows the address. 2. nothing is queued. 3. `theirs` frees nothing. 4. the stream is never
/// // destroyed.
/// let external: External<f32, _> = unsafe { External::new(range, stream, Some(Arc::new(())), theirs) };
/// assert_eq!(external.range(), range);
/// let theirs = external.into_guard();
/// # drop(theirs);
/// # Ok::<(), aquifer_driver::DriverError>(())
/// ```
pub struct External<T, G> {
    range: DeviceRange,
    stream: RawStream,
    alive: Option<KeepAlive>,
    guard: G,
    ends_at_once: bool,
    elements: PhantomData<fn() -> T>,
}

impl<T: 'static, G: Send + 'static> External<T, G> {
    /// Names memory that `guard` frees when it is dropped, in the order of `stream`. A stream of
    /// the driver's is [`RawStream::from_raw`] of its pointer.
    ///
    /// # Safety
    /// 1. `range` is device memory with whole, aligned elements of `T`, and stays mapped while
    ///    `guard` lives, wherever that is moved; nobody else touches it meanwhile.
    /// 2. What has been queued for it before comes before what is queued on `stream` from now on.
    /// 3. Dropping `guard` frees it behind what is queued on `stream` by then; so does whatever is
    ///    done with it after [`External::into_guard`].
    /// 4. `stream` is valid while `alive` lives; without `alive` it has been adopted by the pool
    ///    that this is given to, and its owner keeps to what was said there.
    #[must_use]
    pub unsafe fn new(
        range: DeviceRange,
        stream: RawStream,
        alive: Option<KeepAlive>,
        guard: G,
    ) -> Self {
        Self { range, stream, alive, guard, ends_at_once: false, elements: PhantomData }
    }

    /// Says that dropping the guard ends the memory at once, in no stream's order: whoever drops it
    /// waits until all work on it is done. Blocks there.
    #[must_use]
    pub fn ending_at_once(self) -> Self {
        Self { ends_at_once: true, ..self }
    }

    /// The guard. What is queued on the stream comes first; the memory is its own again.
    #[must_use]
    pub fn into_guard(self) -> G {
        self.guard
    }
}

// SAFETY: 1. to 3. are the promises of `External::new`.
unsafe impl<T: 'static, G: Send + 'static> Foreign for External<T, G> {
    type Item = T;
    fn range(&self) -> DeviceRange {
        self.range
    }
    fn stream(&self) -> (RawStream, Option<KeepAlive>) {
        (self.stream, self.alive.clone())
    }
    fn ends_at_once(&self) -> bool {
        self.ends_at_once
    }
}

impl<T, G> fmt::Debug for External<T, G> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("External")
            .field("range", &self.range)
            .field("stream", &self.stream)
            .field("ends_at_once", &self.ends_at_once)
            .finish_non_exhaustive()
    }
}
