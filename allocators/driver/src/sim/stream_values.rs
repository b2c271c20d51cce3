//! Values in memory that streams write and wait for.

use super::clock::Clock;
use std::collections::HashMap;

/// All values that streams have written, by address.
#[derive(Default, Debug)]
pub(crate) struct StreamValues {
    values: HashMap<u64, StreamValue>,
}

#[derive(Default, Debug)]
struct StreamValue {
    /// The current value, from the writes that have run.
    current: u64,
    /// The writes queued so far, oldest first, each with the clock that precedes it.
    writes: Vec<(u64, Clock)>,
}

impl StreamValues {
    /// Records that a write is queued.
    pub(crate) fn queue_write(&mut self, address: u64, value: u64, clock: Clock) {
        let writes = &mut self.values.entry(address).or_default().writes;
        // Writes before a later, lower value can no longer satisfy a wait.
        if writes.last().is_some_and(|&(last, _)| value < last) {
            writes.clear();
        }
        // The first of equal writes satisfies a wait, so a graph may write the same value
        // repeatedly.
        if writes.last().is_none_or(|&(last, _)| value > last) {
            writes.push((value, clock));
        }
    }

    /// Records that a write runs.
    pub(crate) fn write(&mut self, address: u64, value: u64) {
        self.values.entry(address).or_default().current = value;
    }

    /// Returns whether a wait for at least `value` is satisfied.
    pub(crate) fn reached(&self, address: u64, value: u64) -> bool {
        self.values.get(&address).is_some_and(|entry| entry.current >= value)
    }

    /// Returns the clock of the first queued write that satisfies a wait for at least `value`.
    pub(crate) fn satisfying_clock(&self, address: u64, value: u64) -> Option<&Clock> {
        let writes = &self.values.get(&address)?.writes;
        writes.iter().find(|&&(written, _)| written >= value).map(|(_, clock)| clock)
    }
}
