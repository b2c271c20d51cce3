//! Memory that is reset between the steps of a loop.

use crate::Result;

/// Memory that serves one step of a loop and is then reset for another. A ring of frames holds
/// several of them.
///
/// See the example of `Frames` in aquifer-adapters, which is a ring of such memory.
pub trait StepMemory {
    /// Ends the step: all work that uses the memory has been queued. Records the end of that work,
    /// so that [`reset`](StepMemory::reset) waits for it and not for work queued later. May call
    /// the driver (`cuEventRecord`). Never blocks. Repeated calls have no effect.
    ///
    /// # Errors
    /// The driver's error. The call can be repeated.
    fn end_step(&mut self) -> Result<()>;

    /// Frees everything after the work that uses it is done. Blocks until then.
    ///
    /// # Errors
    /// The driver's error, or that of a use that was not ended. Nothing has changed then.
    fn reset(&mut self) -> Result<()>;

    /// Like [`reset`](StepMemory::reset), but only if the work is done. Returns whether it was.
    /// Never blocks.
    ///
    /// # Errors
    /// See [`reset`](StepMemory::reset).
    fn try_reset(&mut self) -> Result<bool>;
}
