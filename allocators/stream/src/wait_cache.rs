//! A cache of the epochs that a stream has waited for, so that it need not wait again.

use crate::Spin;

/// The number of other streams that are remembered.
const REMEMBERED_WAITS: usize = 64;

/// The newest epoch of each other stream that was waited for, by that stream's serial.
pub(crate) struct Waited(Spin<Vec<(u64, u64)>>);

impl Waited {
    pub(crate) fn new() -> Self {
        Self(Spin::new(Vec::new()))
    }

    pub(crate) fn has(&self, serial: u64, epoch: u64) -> bool {
        self.0
            .with(|waited| waited.iter().any(|&(other, newest)| other == serial && epoch <= newest))
    }

    pub(crate) fn note(&self, serial: u64, epoch: u64) {
        self.0.with(|waited| match waited.iter_mut().find(|(other, _)| *other == serial) {
            Some((_, newest)) => *newest = (*newest).max(epoch),
            None => {
                if waited.len() == REMEMBERED_WAITS {
                    // Evicting an entry may cost a redundant wait.
                    waited.remove(0);
                }
                waited.push((serial, epoch));
            }
        });
    }
}
