//! A cache of the epochs that a stream has waited for, so that it need not wait again.

use crate::Spin;

/// The number of other streams that are remembered.
const MAX_ENTRIES: usize = 64;

/// The newest epoch of each other stream that was waited for, by that stream's serial.
pub(crate) struct WaitCache(Spin<Vec<(u64, u64)>>);

impl WaitCache {
    pub(crate) fn new() -> Self {
        Self(Spin::new(Vec::new()))
    }

    pub(crate) fn covers(&self, serial: u64, epoch: u64) -> bool {
        self.0.with(|entries| {
            entries.iter().any(|&(other, newest)| other == serial && epoch <= newest)
        })
    }

    pub(crate) fn record(&self, serial: u64, epoch: u64) {
        self.0.with(|entries| match entries.iter_mut().find(|(other, _)| *other == serial) {
            Some((_, newest)) => *newest = (*newest).max(epoch),
            None => {
                if entries.len() == MAX_ENTRIES {
                    // Evicting an entry may cost a redundant wait.
                    entries.remove(0);
                }
                entries.push((serial, epoch));
            }
        });
    }
}
