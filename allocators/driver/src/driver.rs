//! A driver: all families of calls together.

use crate::{
    CallCounts, CaptureMode, Copies, Devices, Events, Graphs, HostMemory, Ipc, Memory, Observer,
    Physical, Streams, sim::Sim,
};
use std::sync::Arc;

/// A GPU driver: all families of calls, and its identity.
///
/// # Safety
/// 1. All families belong to one driver: a device, a handle or an address that one of them returns
///    means the same to the others.
#[expect(unsafe_code, reason = "declares a trait whose results are trusted; holds no unsafe block")]
pub unsafe trait Driver:
    Devices + Streams + Events + Graphs + Memory + Physical + Ipc + HostMemory + Copies
{
    /// Returns the driver's name: `cuda` or `sim`.
    fn name(&self) -> &'static str;

    /// Returns the number of times each call has been made since the driver was opened.
    #[doc(hidden)]
    fn calls(&self) -> &CallCounts;

    /// Returns the observer that checks the ownership of blocks. The simulated GPU has one, a real
    /// driver has none.
    #[doc(hidden)]
    fn observer(&self) -> Option<&dyn Observer> {
        None
    }

    /// Returns the number of the machine that the devices belong to: 0 for the GPUs of this host, a
    /// different number for each simulated machine. Streams and memory of two machines are
    /// unrelated, even if their numbers are equal.
    fn machine(&self) -> u64 {
        0
    }

    /// Returns the simulated machine of this driver, or `None` for any other driver.
    fn simulator(self: Arc<Self>) -> Option<Sim> {
        None
    }
}

/// Checks that both drivers belong to the same machine.
///
/// # Errors
/// [`MemoryError::OtherMachine`](aquifer_core::MemoryError::OtherMachine).
pub fn same_machine(expected: &dyn Driver, actual: &dyn Driver) -> aquifer_core::Result<()> {
    let (expected, actual) = (expected.machine(), actual.machine());
    if expected == actual {
        Ok(())
    } else {
        Err(aquifer_core::MemoryError::OtherMachine { expected, actual })
    }
}

/// Sets this thread's capture mode to relaxed while it lives: its calls neither fail because of an
/// open capture nor invalidate one.
///
/// An event query from *any* thread invalidates a capture in global mode, and the slow paths of
/// pools make such calls.
#[derive(Debug)]
pub struct Relaxed<'a> {
    driver: &'a dyn Driver,
    previous: Option<CaptureMode>,
}

impl<'a> Relaxed<'a> {
    /// Relaxes this thread's capture mode. If the driver refuses, nothing is changed and later
    /// calls return the errors.
    #[must_use = "the mode is restored when this is dropped"]
    pub fn enter(driver: &'a dyn Driver) -> Self {
        Self { driver, previous: driver.exchange_capture_mode(CaptureMode::Relaxed).ok() }
    }
}

impl Drop for Relaxed<'_> {
    fn drop(&mut self) {
        if let Some(mode) = self.previous {
            // If this is refused, the thread stays relaxed, which refuses fewer calls and breaks no
            // capture.
            let _ = self.driver.exchange_capture_mode(mode);
        }
    }
}
