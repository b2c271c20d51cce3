//! A guard that relaxes the thread's capture mode.

use crate::{CaptureMode, Driver};

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
