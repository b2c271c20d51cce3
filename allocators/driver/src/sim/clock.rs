//! Vector clocks: how much of each agent's work is known to be done.
//!
//! Each stream and the host own one component and count their own actions in it. The *stamp*
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
    pub(crate) fn get(&self, component: u32) -> u64 {
        self.counts.get(component as usize).copied().unwrap_or(0)
    }

    /// Returns whether the action with this stamp comes before this clock.
    pub(crate) fn covers(&self, component: u32, count: u64) -> bool {
        self.get(component) >= count
    }

    /// Raises one component to at least `count`.
    pub(crate) fn raise(&mut self, component: u32, count: u64) {
        let component = component as usize;
        if self.counts.len() <= component {
            self.counts.resize(component + 1, 0);
        }
        self.counts[component] = self.counts[component].max(count);
    }

    /// Counts one action of the component's owner and returns its count.
    pub(crate) fn tick(&mut self, component: u32) -> u64 {
        let count = self.get(component) + 1;
        self.raise(component, count);
        count
    }

    /// Joins with `other`: each component becomes the maximum. Returns whether this clock changed.
    pub(crate) fn join(&mut self, other: &Clock) -> bool {
        if self.counts.len() < other.counts.len() {
            self.counts.resize(other.counts.len(), 0);
        }
        let mut changed = false;
        for (mine, theirs) in self.counts.iter_mut().zip(&other.counts) {
            if *mine < *theirs {
                *mine = *theirs;
                changed = true;
            }
        }
        changed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clock_covers_exactly_what_it_has_joined() {
        let (mut a, mut b) = (Clock::default(), Clock::default());
        let first = a.tick(0);
        assert!(b.join(&a));
        let second = a.tick(0);
        assert!(b.covers(0, first));
        assert!(!b.covers(0, second));
        assert!(!b.join(&Clock::default()));
        assert!(!a.covers(7, 1));
    }
}
