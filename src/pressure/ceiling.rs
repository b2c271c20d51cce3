//! A limit that follows what the outside leaves.

use aquifer_core::Budget;

/// A budget above all that this process charges for one memory. Only whoever watches that memory sets its limit, so that
/// limits below it stay the program's own.
#[derive(Clone, Debug)]
pub(crate) struct Ceiling {
    budget: Budget,
}

impl Ceiling {
    /// None yet, below `above` if there is something.
    pub(crate) fn new(above: Option<&Budget>, name: &'static str) -> Self {
        let budget = match above {
            Some(above) => above.child(name, u64::MAX),
            None => Budget::unlimited(name),
        };
        Self { budget }
    }

    pub(crate) fn budget(&self) -> &Budget {
        &self.budget
    }

    /// Reads what is free by `free` and sets the limit so that all but `keep` of it may be taken, or that as much must be
    /// given back first as is missing.
    ///
    /// Bytes that are charged or released while `free` looks are in neither sum or in both; of the counts before and after
    /// the lower is taken, so that what is granted is rather too little, until the next look.
    pub(crate) fn follow<T, E>(&self, keep: u64, free: impl FnOnce() -> Result<(T, u64), E>) -> Result<T, E> {
        let before = self.budget.used();
        let (read, free) = free()?;
        let used = before.min(self.budget.used());
        self.set(used.saturating_add(free).saturating_sub(keep));
        Ok(read)
    }

    /// No limit any more.
    pub(crate) fn lift(&self) {
        self.set(u64::MAX);
    }

    fn set(&self, limit: u64) {
        // Setting one wakes whoever waits and takes back what leases have spare.
        if self.budget.limit() != limit {
            self.budget.set_limit(limit);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn follow(ceiling: &Ceiling, keep: u64, free: u64) -> u64 {
        ceiling.follow(keep, || Ok::<_, ()>(((), free))).unwrap();
        ceiling.budget().limit()
    }

    #[test]
    fn the_limit_moves_with_neighbours_and_not_with_our_own_growth() {
        let ceiling = Ceiling::new(None, "beside neighbours");
        let pool = ceiling.budget().child("the pool", u64::MAX);
        assert_eq!(follow(&ceiling, 20, 100), 80);
        let held = pool.charge(50).unwrap();
        assert_eq!(follow(&ceiling, 20, 50), 80, "what used gains, free loses");
        assert_eq!(follow(&ceiling, 20, 10), 40, "a neighbour has taken 40");
        assert!(pool.charge(1).is_err());
        drop(held);
        assert!(pool.charge(41).is_err() && pool.charge(40).is_ok());
        assert_eq!(follow(&ceiling, 20, 10), 0, "never below nothing");
        ceiling.lift();
        assert!(pool.charge(1000).is_ok());
    }

    #[test]
    fn bytes_that_come_or_go_during_the_look_are_not_granted_twice() {
        let ceiling = Ceiling::new(None, "beside neighbours");
        let mut held = Some(ceiling.budget().charge(50).unwrap());
        let read = ceiling.follow(0, || {
            held = None;
            Ok::<_, ()>(((), 100))
        });
        read.unwrap();
        assert_eq!(ceiling.budget().limit(), 100, "the 50 are among what is free");
        let read = ceiling.follow(0, || {
            held = ceiling.budget().charge(50).ok();
            Ok::<_, ()>(((), 50))
        });
        read.unwrap();
        assert_eq!(ceiling.budget().limit(), 50);
        assert!(held.is_some());
    }
}
