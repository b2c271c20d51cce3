//! Something that opens when queued work is done.

use crate::Result;
use std::{fmt::Debug, time::Instant};

/// A condition that becomes true once and stays so: an event has passed, a use has ended.
///
/// Arenas wait for gates before they reset, allocators before they give a block out again.
pub trait Gate: Debug + Send + Sync {
    /// Whether it is open now. Never blocks; an error of the driver counts as not open and is told by [`Gate::wait`].
    fn is_open(&self) -> bool;

    /// Blocks until it is open or `deadline` has passed; `None` waits as long as it takes. Says whether it is open.
    ///
    /// # Errors
    /// The driver's, when it can no longer tell: the device is lost.
    fn wait(&self, deadline: Option<Instant>) -> Result<bool>;
}
