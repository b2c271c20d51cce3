//! A condition that becomes true when queued work is done.

use crate::Result;
use std::{fmt::Debug, time::Instant};

/// A condition that becomes true once and stays true, such as a completed event.
///
/// Arenas wait for gates before a reset, and allocators before they reuse a block.
///
/// ```
/// use aquifer::{Gate, error::Result};
/// use std::{sync::atomic::{AtomicBool, Ordering}, thread, time::Instant};
/// /// Opens when another thread sets it.
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
/// # Ok::<(), aquifer::MemoryError>(())
/// ```
pub trait Gate: Debug + Send + Sync {
    /// Returns whether the gate is open now. Never blocks. An error of the driver counts as not
    /// open, and is returned by [`Gate::wait`].
    fn is_open(&self) -> bool;

    /// Blocks until the gate is open or `deadline` has passed (`None`: without a limit). Returns
    /// whether it is open.
    ///
    /// # Errors
    /// The driver's error if the state is unknown because the device is lost.
    fn wait(&self, deadline: Option<Instant>) -> Result<bool>;
}
