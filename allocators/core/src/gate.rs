//! Something that opens when queued work is done.

use crate::Result;
use std::{fmt::Debug, time::Instant};

/// A condition that becomes true once and stays so: an event has passed, a use has ended.
///
/// Arenas wait for gates before they reset, allocators before they give a block out again.
///
/// ```
/// use aquifer_core::{Gate, Result};
/// use std::{sync::atomic::{AtomicBool, Ordering}, thread, time::Instant};
/// /// Opens when another thread says so.
/// #[derive(Debug)]
/// struct Flag(AtomicBool);
/// impl Gate for Flag {
///     fn is_open(&self) -> bool { self.0.load(Ordering::Acquire) }
///     fn wait(&self, deadline: Option<Instant>) -> Result<bool> {
///         while !self.is_open() && deadline.is_none_or(|at| Instant::now() < at) {
///             thread::yield_now();
///         }
///         Ok(self.is_open())
///     }
/// }
/// let flag = Flag(AtomicBool::new(false));
/// assert!(!flag.wait(Some(Instant::now()))?);
/// flag.0.store(true, Ordering::Release);
/// assert!(flag.wait(None)?);
/// # Ok::<(), aquifer_core::MemoryError>(())
/// ```
pub trait Gate: Debug + Send + Sync {
    /// Whether it is open now. Never blocks; an error of the driver counts as not open and is told
    /// by [`Gate::wait`].
    fn is_open(&self) -> bool;

    /// Blocks until it is open or `deadline` has passed; `None` waits as long as it takes. Says
    /// whether it is open.
    ///
    /// # Errors
    /// The driver's, when it can no longer tell: the device is lost.
    fn wait(&self, deadline: Option<Instant>) -> Result<bool>;
}
