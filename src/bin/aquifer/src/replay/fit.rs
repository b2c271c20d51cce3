//! The search for the smallest budget that completes a trace.
//!
//! - Whether a trace fits is determined by playing it with all checks, as without a search.
//! - The search bisects between a budget that fails and one that holds until they are one physical
//!   handle apart.
//! - A larger budget does not always hold where a smaller one does, since blocks are placed
//!   differently. The result must therefore also hold with 0.5 % and 2 % more, for every timed
//!   round, and for the counted rounds with work on the streams. Otherwise the search continues
//!   above the size that failed.
//! - Once a budget has held for one round and not for all, every later candidate is tried for all
//!   rounds. For a trace that needs slightly more in each round, single steps upward would take too
//!   long.

use super::{
    bench::ReplayBench,
    report::{Fit, ReplayReport, Round, Timing},
    work::{TOLD, Violations},
};
use aquifer_benches::console::progress::ProgressLine;
use aquifer_core::Result;

/// How many results may fail verification before the search gives up.
const PATIENCE: u32 = 16;

/// The result of a search.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Found {
    /// The smallest budget, or none if no budget holds.
    pub(crate) fit: Option<Fit>,
    /// Violations found in all passes, complete or not.
    pub(crate) violations: Violations,
}

/// Searches for the smallest budget. `whole` is the report of a pass without a limit.
///
/// # Errors
/// If the allocator or its streams cannot be created.
pub(crate) fn search(
    bench: &ReplayBench<'_>,
    whole: &ReplayReport,
    repeat: u32,
    progress: &mut ProgressLine,
) -> Result<Found> {
    let step = bench.place.granularity();
    let sizes = Sizes {
        step,
        least: bench.trace.peak_live.div_ceil(step) * step,
        likely: whole.peak_physical.div_ceil(step) * step,
        most: bench.place.memory() / step * step,
    };
    let mut passes = Passes { bench, repeat, progress, violations: Violations::default() };
    let found = smallest(sizes, &mut passes)?;
    let fit = found.map(|(bytes, (timing, rounds))| Fit { bytes, timing, rounds });
    Ok(Found { fit, violations: passes.violations })
}

/// The bounds of the search in bytes. All are multiples of `step`.
#[derive(Clone, Copy, Debug)]
struct Sizes {
    step: u64,
    /// The lower bound: no smaller size can hold.
    least: u64,
    /// A size that has held, or nearly.
    likely: u64,
    /// The upper bound: no larger size is available.
    most: u64,
}

/// A way to try a size.
trait Trial {
    /// The measurement of a size that holds.
    type Measure;

    /// Returns whether the trace completes with `bytes`, once or for all rounds. `left` is the
    /// number of sizes that may still be the result.
    fn holds(&mut self, bytes: u64, left: u64, rounds: Rounds) -> Result<bool>;

    /// Measures a size. Returns `None` if it does not hold for the whole measurement.
    fn measure(&mut self, bytes: u64) -> Result<Option<Self::Measure>>;
}

/// How many rounds a size has to hold for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Rounds {
    /// One round from empty.
    One,
    /// All timed rounds.
    All,
}

/// Returns the smallest size that holds and for which 0.5 % and 2 % more hold as well.
fn smallest<T: Trial>(sizes: Sizes, trial: &mut T) -> Result<Option<(u64, T::Measure)>> {
    let Sizes { step, least, likely, most } = sizes;
    let up = |bytes: u64| bytes.div_ceil(step) * step;
    if least > most {
        return Ok(None);
    }
    let mut fails = least.saturating_sub(step);
    let mut rounds = Rounds::One;
    let Some(mut holds) = first_that_holds(sizes, likely.max(least).min(most), rounds, trial)?
    else {
        return Ok(None);
    };
    for _ in 0..PATIENCE {
        debug_assert!(fails < holds && (holds - fails).is_multiple_of(step));
        while holds - fails > step {
            let left = (holds - fails) / step;
            let middle = fails + left / 2 * step;
            if trial.holds(middle, left, rounds)? {
                holds = middle;
            } else {
                fails = middle;
            }
        }
        let mut failed = None;
        for above in [holds + holds / 200, holds + holds / 50] {
            let above = up(above).min(most);
            if !trial.holds(above, 1, Rounds::One)? {
                failed = Some(above);
            }
        }
        fails = match failed {
            Some(above) => above,
            None => match trial.measure(holds)? {
                Some(measure) => return Ok(Some((holds, measure))),
                None => {
                    rounds = Rounds::All;
                    holds
                }
            },
        };
        if fails >= most {
            break;
        }
        match first_that_holds(sizes, fails + step, rounds, trial)? {
            Some(bytes) => holds = bytes,
            None => break,
        }
    }
    Ok(None)
}

/// Returns a size of at least `bytes` that holds. Each try is an eighth larger. The last try uses
/// everything.
fn first_that_holds<T: Trial>(
    sizes: Sizes,
    mut bytes: u64,
    rounds: Rounds,
    trial: &mut T,
) -> Result<Option<u64>> {
    let Sizes { step, most, .. } = sizes;
    loop {
        if trial.holds(bytes, (most - bytes) / step + 1, rounds)? {
            return Ok(Some(bytes));
        }
        if bytes >= most {
            return Ok(None);
        }
        bytes = (bytes + (bytes / 8 / step).max(1) * step).min(most);
    }
}

/// Tries sizes by passes over the trace.
struct Passes<'a, 'b> {
    bench: &'a ReplayBench<'b>,
    repeat: u32,
    progress: &'a mut ProgressLine,
    violations: Violations,
}

impl Trial for Passes<'_, '_> {
    type Measure = (Timing, Vec<Round>);

    fn holds(&mut self, bytes: u64, left: u64, rounds: Rounds) -> Result<bool> {
        if left > 1 {
            self.progress.phase(format_args!("searching, {left} sizes left:"));
        } else {
            self.progress.phase("verifying:");
        }
        let checked = self.bench.check(Some(bytes), self.progress)?;
        let found = checked.verdict.violations;
        self.violations.count += found.count;
        let room = TOLD.saturating_sub(self.violations.first.len());
        self.violations.first.extend(found.first.into_iter().take(room));
        if checked.failure.is_some() {
            return Ok(false);
        }
        Ok(rounds == Rounds::One || self.measure(bytes)?.is_some())
    }

    fn measure(&mut self, bytes: u64) -> Result<Option<Self::Measure>> {
        Ok(self.bench.measure(Some(bytes), self.repeat, self.progress)?.ok())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sizes that hold by a rule, and sizes that cannot be measured.
    struct Ruled<F> {
        rule: F,
        unmeasurable: Vec<u64>,
        tries: u32,
    }

    impl<F: Fn(u64) -> bool> Trial for Ruled<F> {
        type Measure = ();
        fn holds(&mut self, bytes: u64, _left: u64, rounds: Rounds) -> Result<bool> {
            self.tries += 1;
            let lasts = rounds == Rounds::One || !self.unmeasurable.contains(&bytes);
            Ok((self.rule)(bytes) && lasts)
        }
        fn measure(&mut self, bytes: u64) -> Result<Option<()>> {
            Ok((!self.unmeasurable.contains(&bytes)).then_some(()))
        }
    }

    const SIZES: Sizes = Sizes { step: 2, least: 1000, likely: 2000, most: 4000 };

    fn found(rule: impl Fn(u64) -> bool, unmeasurable: &[u64]) -> (Option<u64>, u32) {
        let mut trial = Ruled { rule, unmeasurable: unmeasurable.to_vec(), tries: 0 };
        let found = smallest(SIZES, &mut trial).unwrap().map(|(bytes, ())| bytes);
        (found, trial.tries)
    }

    #[test]
    fn the_smallest_size_is_found_in_few_tries() {
        for border in [1, 1000, 1002, 1234, 1999, 2000, 3998, 4000] {
            let (bytes, tries) = found(|bytes| bytes >= border, &[]);
            assert_eq!(bytes, Some(border.max(1000).next_multiple_of(2)), "{border}");
            assert!(tries <= 24, "{border}: {tries}");
        }
    }

    #[test]
    fn no_size_is_an_answer_where_none_holds() {
        assert_eq!(found(|_| false, &[]).0, None);
        let sizes = Sizes { least: 4002, ..SIZES };
        let mut trial = Ruled { rule: |_| true, unmeasurable: Vec::new(), tries: 0 };
        assert_eq!(smallest(sizes, &mut trial).unwrap(), None, "more than there is");
    }

    #[test]
    fn a_size_with_a_failure_just_above_it_is_no_answer() {
        // 1500 holds, but 2 % more does not.
        let (bytes, _) = found(|bytes| bytes >= 1500 && !(1520..=1600).contains(&bytes), &[]);
        assert_eq!(bytes, Some(1602));
    }

    #[test]
    fn a_size_that_does_not_last_is_no_answer() {
        assert_eq!(found(|bytes| bytes >= 1500, &[1500, 1502]).0, Some(1504));
    }

    #[test]
    fn a_size_that_lasts_is_found_far_above_one_that_does_not() {
        let (bytes, tries) = found(|bytes| bytes >= 1500, &(1500..1700).collect::<Vec<_>>());
        assert_eq!(bytes, Some(1700));
        assert!(tries <= 48, "{tries}");
    }

    #[test]
    fn a_search_that_never_settles_ends() {
        let (bytes, tries) = found(|bytes| bytes % 4 == 0, &(0..=4000).collect::<Vec<_>>());
        assert_eq!(bytes, None);
        assert!(tries < 400, "{tries}");
    }
}
