//! Values in memory that streams write and wait for.

use super::clock::Clock;
use std::collections::HashMap;

/// Every value that was ever written by a stream, by address.
#[derive(Default, Debug)]
pub(crate) struct Values {
    values: HashMap<u64, Value>,
}

#[derive(Default, Debug)]
struct Value {
    /// What is there now: what has run.
    now: u64,
    /// The writes queued so far, oldest first, with what each comes after.
    writes: Vec<(u64, Clock)>,
}

impl Values {
    /// A write is queued.
    pub(crate) fn queue_write(&mut self, address: u64, value: u64, clock: Clock) {
        let writes = &mut self.values.entry(address).or_default().writes;
        // What is below a later, lower value can no longer be what a wait reads.
        if writes.last().is_some_and(|&(last, _)| value < last) {
            writes.clear();
        }
        // A wait is ended by the first of equal ones, so that a graph may write one again and
        // again.
        if writes.last().is_none_or(|&(last, _)| value > last) {
            writes.push((value, clock));
        }
    }

    /// A write runs.
    pub(crate) fn write(&mut self, address: u64, value: u64) {
        self.values.entry(address).or_default().now = value;
    }

    /// Whether a wait for at least `value` is over.
    pub(crate) fn reached(&self, address: u64, value: u64) -> bool {
        self.values.get(&address).is_some_and(|there| there.now >= value)
    }

    /// What a wait for at least `value` comes after: the first write that can end it.
    pub(crate) fn comes_after(&self, address: u64, value: u64) -> Option<&Clock> {
        let writes = &self.values.get(&address)?.writes;
        writes.iter().find(|&&(written, _)| written >= value).map(|(_, clock)| clock)
    }
}
