//! The end of a public function that queues work or waits for it.

use super::Entered;
use crate::Driver;

impl Entered {
    /// Panics for violations of the simulated GPU, if
    /// [`OnViolation::Panic`](crate::sim::OnViolation::Panic) is set and no outer function has
    /// entered a site. Public functions that queue work or wait for it call this at their end,
    /// without holding a lock.
    #[track_caller]
    pub fn checkpoint(&self, driver: &dyn Driver) {
        if self.previous.is_none()
            && let Some(observer) = driver.observer()
        {
            observer.checkpoint();
        }
    }
}
