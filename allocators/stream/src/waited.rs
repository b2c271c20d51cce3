//! What a stream has been made to wait for, so that it need not wait twice.

use crate::Spin;

/// How many other streams a stream remembers having waited for.
const REMEMBERED_WAITS: usize = 64;

/// The newest epoch of each other stream that was waited for, by the other's serial.
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
                    // Forgetting one costs a wait that was not needed.
                    waited.remove(0);
                }
                waited.push((serial, epoch));
            }
        });
    }
}
