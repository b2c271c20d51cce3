//! Memory for one step of a loop at a time.

use crate::Result;

/// Memory that serves one step of a loop and is then emptied for another: what a ring of frames
/// holds several of.
///
/// Its example is that of `Frames` in aquifer-adapters, which is a ring of any such memory.
pub trait StepMemory {
    /// The step is over: all work that uses the memory has been queued. Notes where that work ends,
    /// so that [`reset`](StepMemory::reset) waits for it and for nothing that is queued later. May
    /// call the driver (`cuEventRecord`), and never blocks. Further calls change nothing.
    ///
    /// # Errors
    /// The driver's; the call can be made again.
    fn end_step(&mut self) -> Result<()>;

    /// Takes everything back, once the work that uses it is done. Blocks until then.
    ///
    /// # Errors
    /// The driver's, or of a use that nobody has ended. Nothing has changed then.
    fn reset(&mut self) -> Result<()>;

    /// As [`reset`](StepMemory::reset), if the work is done: returns whether it was. Never blocks.
    ///
    /// # Errors
    /// As [`reset`](StepMemory::reset).
    fn try_reset(&mut self) -> Result<bool>;
}
