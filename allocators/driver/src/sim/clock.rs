//! Vector clocks: how much of each agent's work is known to be done.
//!
//! Each stream and each host agent owns one component and counts its own actions in it. The *stamp*
//! of an action is its owner's component and count. Another action comes after it, in an order that
//! the driver knows, exactly if that action's clock has reached this count. So one comparison of
//! two numbers decides, for any number of streams.

/// The known count of each component. A missing component is zero.
#[derive(Clone, Default, PartialEq, Eq, Debug)]
pub(crate) struct Clock {
    counts: Vec<u64>,
}

impl Clock {
    /// Returns the known count of one component.
    pub(crate) fn get(&self, slot: u32) -> u64 {
        self.counts.get(slot as usize).copied().unwrap_or(0)
    }

    /// Returns whether the action with this stamp comes before this clock.
    pub(crate) fn knows(&self, slot: u32, count: u64) -> bool {
        self.get(slot) >= count
    }

    /// Raises one component to at least `count`.
    pub(crate) fn raise(&mut self, slot: u32, count: u64) {
        let slot = slot as usize;
        if self.counts.len() <= slot {
            self.counts.resize(slot + 1, 0);
        }
        self.counts[slot] = self.counts[slot].max(count);
    }

    /// Counts one action of the component's owner and returns its count.
    pub(crate) fn tick(&mut self, slot: u32) -> u64 {
        let count = self.get(slot) + 1;
        self.raise(slot, count);
        count
    }

    /// Joins with `other`: each component becomes the maximum. Returns whether this clock changed.
    pub(crate) fn join(&mut self, other: &Clock) -> bool {
        if self.counts.len() < other.counts.len() {
            self.counts.resize(other.counts.len(), 0);
        }
        let mut learned = false;
        for (mine, theirs) in self.counts.iter_mut().zip(&other.counts) {
            if *mine < *theirs {
                *mine = *theirs;
                learned = true;
            }
        }
        learned
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clock_knows_what_it_joined_and_nothing_else() {
        let (mut a, mut b) = (Clock::default(), Clock::default());
        let first = a.tick(0);
        assert!(b.join(&a));
        let second = a.tick(0);
        assert!(b.knows(0, first));
        assert!(!b.knows(0, second));
        assert!(!b.join(&Clock::default()));
        assert!(!a.knows(7, 1));
    }
}
