//! Device memory of other libraries.
#![expect(
    unsafe_code,
    reason = "declares an unsafe trait, and an unsafe constructor of a type that implements it"
)]

use crate::{DeviceRange, KeepAlive, RawStream};
use aquifer_core::Result;
use std::{fmt, marker::PhantomData};

/// Device memory that another library has handed over whole and by value: a slice, tensor or
/// buffer.
///
/// It has a stream of that library, in whose order it is used and freed there.
///
/// # Safety
/// 1. [`Foreign::range`] is device memory that holds whole elements. It stays mapped while the
///    value lives, even if the value is moved, and has no other user in that time.
/// 2. Work queued on [`Foreign::stream`] after [`Foreign::enter`] has returned `Ok` runs after all
///    use that the library has made of the memory.
/// 3. When the value is dropped, or used again after [`Foreign::leave`] has returned `Ok`, every
///    later use of the memory by the library, on any stream, runs after the work queued on that
///    stream by then. If [`Foreign::ends_at_once`] is `true`, the value may be dropped only when
///    all of that work is done.
pub unsafe trait Foreign: Send + 'static {
    /// The elements' type.
    type Item: 'static;

    /// Returns the range of device memory.
    fn range(&self) -> DeviceRange;

    /// Returns the stream in whose order the library uses the memory, and a value that keeps the
    /// stream alive. Without that value the stream must have been adopted before.
    fn stream(&self) -> (RawStream, Option<KeepAlive>);

    /// Makes that stream wait for all work that the library has queued for the memory. The host
    /// does not wait.
    ///
    /// # Errors
    /// Errors of the library.
    fn enter(&mut self) -> Result<()> {
        Ok(())
    }

    /// Makes later work of the library wait for what is queued on that stream. The host does not
    /// wait.
    ///
    /// # Errors
    /// Errors of the library.
    fn leave(&mut self) -> Result<()> {
        Ok(())
    }

    /// Returns whether dropping the value frees the memory immediately, even if work is queued (for
    /// example by an unmap). The host then waits first.
    fn ends_at_once(&self) -> bool {
        false
    }
}

/// Device memory of a library that this crate does not support, given by its address. An example is
/// another version of cudarc.
///
/// ```
/// use aquifer::{DeviceId, DeviceRange, driver::{External, Foreign}, sim::Sim};
/// use std::sync::Arc;
///
/// let driver = Sim::h200(1).driver();
/// let device = DeviceId(0);
/// let stream = driver.stream_create(device, 0)?;
/// let range = DeviceRange { device, address: driver.mem_alloc(device, 4096)?, bytes: 4096 };
/// let theirs = vec![0; 4]; // a value that frees the memory when it is dropped
/// // SAFETY: 1. The address has no other user. 2. No work is queued. 3. `theirs` frees nothing.
/// // 4. The stream is never destroyed.
/// let external: External<f32, _> = unsafe { External::new(range, stream, Some(Arc::new(())), theirs) };
/// assert_eq!(external.range(), range);
/// let theirs = external.into_guard();
/// # drop(theirs);
/// # Ok::<(), aquifer::error::DriverError>(())
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
    /// Wraps memory that `guard` frees when it is dropped, in the order of `stream`. For a stream
    /// of the driver use [`RawStream::from_raw`] with its pointer.
    ///
    /// # Safety
    /// 1. `range` is device memory with whole, aligned elements of `T`. It stays mapped while
    ///    `guard` lives, even if `guard` is moved, and has no other user in that time.
    /// 2. Work queued for it earlier runs before the work queued on `stream` from now on.
    /// 3. Dropping `guard` frees the memory after the work queued on `stream` by then. The same
    ///    holds for any use of the guard after [`External::into_guard`].
    /// 4. `stream` is valid while `alive` lives. Without `alive`, the stream has been adopted by
    ///    the pool that this value is passed to, and its owner keeps the promises made there.
    #[must_use]
    pub unsafe fn new(
        range: DeviceRange,
        stream: RawStream,
        alive: Option<KeepAlive>,
        guard: G,
    ) -> Self {
        Self { range, stream, alive, guard, ends_at_once: false, elements: PhantomData }
    }

    /// Declares that dropping the guard frees the memory immediately, in no stream's order.
    /// Dropping the memory then blocks until all work on it is done.
    #[must_use]
    pub fn ending_at_once(self) -> Self {
        Self { ends_at_once: true, ..self }
    }

    /// Returns the guard, which owns the memory again. Work queued on the stream runs first.
    #[must_use]
    pub fn into_guard(self) -> G {
        self.guard
    }
}

// SAFETY: 1. to 3. are promised by the caller of `External::new`.
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
