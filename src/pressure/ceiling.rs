//! A budget limit that follows what the outside leaves.

use aquifer_core::Budget;

/// The maximum number of consecutive readings. One is repeated if bytes were charged or released
/// during it.
const MAX_READINGS: u32 = 4;

/// A budget above all charges of this process for one memory. Only the watch of that memory sets
/// its limit, so that the limits below it stay the program's own.
#[derive(Clone, Debug)]
pub(crate) struct Ceiling {
    budget: Budget,
}

impl Ceiling {
    /// Creates a ceiling without a limit yet, as a child of `above` if there is one.
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

    /// Reads the free bytes with `read` and sets the limit so that all but `keep_free` of them may
    /// be taken. If less than `keep_free` is free, the limit lies below the used bytes, and the
    /// difference must be released first.
    ///
    /// Bytes charged or released during a reading are counted in neither sum or in both, so the
    /// reading is repeated. If this happens in [all of them](MAX_READINGS), our share lies between
    /// the counts before and after, and the limit moves only as far as these bounds prove. Our own
    /// growth takes from one sum what it adds to the other and is no reason to refuse any.
    ///
    /// Bytes that were charged before a reading but not yet taken from the memory are in both sums.
    /// Until the next reading, too much may be granted by that amount.
    pub(crate) fn follow<T, E>(
        &self,
        keep_free: u64,
        mut read: impl FnMut() -> Result<(T, u64), E>,
    ) -> Result<T, E> {
        let mut readings = 0;
        let mut before = self.budget.used();
        loop {
            let (value, free) = read()?;
            let after = self.budget.used();
            readings += 1;
            if before == after || readings == MAX_READINGS {
                let limit = |used: u64| used.saturating_add(free).saturating_sub(keep_free);
                let (least, most) = (limit(before.min(after)), limit(before.max(after)));
                self.set(self.budget.limit().clamp(least, most));
                return Ok(value);
            }
            before = after;
        }
    }

    /// Removes the limit.
    pub(crate) fn lift(&self) {
        self.set(u64::MAX);
    }

    fn set(&self, limit: u64) {
        // Setting a limit wakes waiters and reclaims unused bytes from leases.
        if self.budget.limit() != limit {
            self.budget.set_limit(limit);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use aquifer_core::Charge;

    fn follow(ceiling: &Ceiling, keep_free: u64, free: u64) -> u64 {
        ceiling.follow(keep_free, || Ok::<_, ()>(((), free))).unwrap();
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

    /// A memory of 100 bytes of which only the pool takes: 5 bytes in the middle of a reading,
    /// before or after the free bytes are read.
    fn follow_and_grow(
        ceiling: &Ceiling,
        held: &mut Vec<Charge>,
        mut growths: u32,
        then_read: bool,
    ) -> u64 {
        let read = ceiling.follow(20, || {
            let before = 100 - ceiling.budget().used();
            if growths > 0 {
                held.push(ceiling.budget().charge(5).unwrap());
                growths -= 1;
            }
            Ok::<_, ()>(((), if then_read { 100 - ceiling.budget().used() } else { before }))
        });
        read.unwrap();
        ceiling.budget().limit()
    }

    #[test]
    fn our_own_growth_during_readings_moves_no_limit() {
        for then_read in [false, true] {
            for growths in [1, MAX_READINGS - 1, MAX_READINGS] {
                let (ceiling, mut held) = (Ceiling::new(None, "beside neighbours"), Vec::new());
                assert_eq!(follow(&ceiling, 20, 100), 80);
                assert_eq!(
                    follow_and_grow(&ceiling, &mut held, growths, then_read),
                    80,
                    "{growths} growths"
                );
                assert_eq!(held.len(), growths as usize);
                held.pop();
                assert_eq!(follow_and_grow(&ceiling, &mut held, 0, then_read), 80);
            }
        }
    }

    #[test]
    fn the_first_limit_is_exact_after_an_undisturbed_reading_and_else_off_by_at_most_one_growth() {
        for then_read in [false, true] {
            for growths in [0, 1, MAX_READINGS - 1, MAX_READINGS] {
                let (ceiling, mut held) = (Ceiling::new(None, "beside neighbours"), Vec::new());
                let limit = follow_and_grow(&ceiling, &mut held, growths, then_read);
                let most = if growths == MAX_READINGS { 85 } else { 80 };
                assert!((80..=most).contains(&limit), "{limit} after {growths} growths");
            }
        }
    }

    #[test]
    fn memory_taken_by_neighbours_or_released_during_readings_is_not_granted_twice() {
        let ceiling = Ceiling::new(None, "beside neighbours");
        let mut held = Some(ceiling.budget().charge(50).unwrap());
        let read = ceiling.follow(0, || {
            held = None;
            Ok::<_, ()>(((), 100))
        });
        read.unwrap();
        assert_eq!(ceiling.budget().limit(), 100, "the 50 are among what is free");
        // A neighbour takes 40 while we take 5 in each reading.
        let mut held = Vec::new();
        let read = ceiling.follow(0, || {
            held.push(ceiling.budget().charge(5).unwrap());
            Ok::<_, ()>(((), 60 - 5 * held.len() as u64))
        });
        read.unwrap();
        let limit = ceiling.budget().limit();
        assert!((55..=60).contains(&limit), "{limit}");
    }
}
