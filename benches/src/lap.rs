//! Timing.
//!
//! ```text
//!   warm up: ever longer laps, until one takes long enough     then: a lap each, in turn, until the time is up
//!   A  ▪ ▪▪ ▪▪▪▪ ▪▪▪▪▪▪▪▪                                       A ▪▪▪▪▪▪▪▪          ▪▪▪▪▪▪▪▪
//!   B                      ▪ ▪▪ ▪▪▪▪ ▪▪▪▪▪▪▪▪                    B          ▪▪▪▪▪▪▪▪          ▪▪▪▪▪▪▪▪
//! ```
//!
//! - A lap contains only work that was generated before. The clock is read only at its ends, since
//!   a clock read costs more than a call of a pool.
//! - The result is the median of the laps.
//! - The warm-up also allocates the memory that the work needs.

use crate::console::figures::median;
use std::time::{Duration, Instant};

/// How much time is spent on measuring.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Pace {
    /// The minimum time of a lap. Short enough that few laps are interrupted on a busy machine,
    /// and long enough that the clock reads do not matter.
    lap: Duration,
    /// The maximum time of all laps of one contender, beyond [`LEAST_LAPS`].
    time: Duration,
    /// The maximum number of laps.
    laps: usize,
    /// The maximum number of pieces of work per lap.
    pieces: u64,
}

impl Pace {
    /// For results that can be published.
    pub(crate) const FULL: Self = Self {
        lap: Duration::from_micros(250),
        time: Duration::from_millis(250),
        laps: 501,
        pieces: 1 << 20,
    };
    /// For a check that everything runs.
    pub(crate) const QUICK: Self = Self {
        lap: Duration::from_micros(100),
        time: Duration::from_millis(4),
        laps: 15,
        pieces: 1 << 16,
    };

    /// Returns the requested pace.
    pub(crate) fn of(quick: bool) -> Self {
        if quick { Self::QUICK } else { Self::FULL }
    }

    /// Returns a pace with exactly `laps` turns, however long they take.
    pub(crate) fn turns(self, laps: usize) -> Self {
        Self { laps, time: Duration::from_secs(3600), ..self }
    }

    /// Returns a pace for laps of several threads, which take some time to start.
    pub(crate) fn together(self) -> Self {
        Self { lap: self.lap * 8, ..self }
    }
}

/// The minimum number of laps before the first that counts. With random sizes up to 4 GiB a pool
/// still moves handles in the sixth.
const WARM_UP: u32 = 8;
/// The minimum number of laps that count, if the pace allows as many: a contender beside a slow one
/// has few.
const LEAST_LAPS: usize = 3;

/// Failed calls.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub(crate) struct Failed {
    /// The number of failures.
    pub(crate) count: u64,
    /// The message of the first one.
    pub(crate) first: Option<String>,
}

impl Failed {
    /// Counts one more failure.
    #[cold]
    pub(crate) fn note(&mut self, said: &dyn ToString) {
        self.count += 1;
        self.first.get_or_insert_with(|| said.to_string());
    }

    /// Adds the failures of `other`.
    pub(crate) fn add(&mut self, other: Self) {
        self.count += other.count;
        self.first = self.first.take().or(other.first);
    }
}

/// The times of one lap, in nanoseconds per operation.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Lap {
    /// The time from the first thread's begin to the last one's end.
    pub(crate) took: Duration,
    /// The same, divided by the operations of all threads.
    pub(crate) over_all: f64,
    /// The mean over the threads of a thread's own time per operation.
    pub(crate) each: f64,
    /// Failed calls of the lap.
    pub(crate) failed: Failed,
}

/// The medians of a contender's laps.
#[derive(Clone, PartialEq, Default, Debug)]
pub(crate) struct Outcome {
    /// The median of [`Lap::over_all`].
    pub(crate) over_all: f64,
    /// The median of [`Lap::each`].
    pub(crate) each: f64,
    /// [`Lap::each`] of all laps, in order.
    pub(crate) laps: Vec<f64>,
    /// All failed calls, including those of the warm-up.
    pub(crate) failed: Failed,
}

/// Runs a lap with the given number of pieces of work.
pub(crate) type Contender<'a> = Box<dyn FnMut(u64) -> Lap + 'a>;

/// Lets contenders take turns, and returns their outcomes in the given order.
pub(crate) fn contest(pace: Pace, mut contenders: Vec<Contender<'_>>) -> Vec<Outcome> {
    let mut failed: Vec<_> = contenders.iter().map(|_| Failed::default()).collect();
    let mut pieces = Vec::new();
    for (contender, failed) in contenders.iter_mut().zip(&mut failed) {
        pieces.push(warm_up(pace, contender, failed));
    }
    let mut laps: Vec<(Vec<f64>, Vec<f64>)> =
        contenders.iter().map(|_| Default::default()).collect();
    let (begun, time) = (Instant::now(), pace.time * contenders.len() as u32);
    for lap_number in 1..=pace.laps {
        for (place, contender) in contenders.iter_mut().enumerate() {
            let lap = contender(pieces[place]);
            laps[place].0.push(lap.over_all);
            laps[place].1.push(lap.each);
            failed[place].add(lap.failed);
        }
        if begun.elapsed() > time && lap_number >= LEAST_LAPS {
            break;
        }
    }
    let outcomes = laps.into_iter().zip(failed).map(|((over_all, each), failed)| Outcome {
        over_all: median(over_all).unwrap_or_default(),
        each: median(each.clone()).unwrap_or_default(),
        laps: each,
        failed,
    });
    outcomes.collect()
}

/// Returns how many pieces make a lap of sufficient length. Runs at least [`WARM_UP`] laps, since
/// the first ones may have to allocate from the driver.
fn warm_up(pace: Pace, contender: &mut Contender<'_>, failed: &mut Failed) -> u64 {
    let mut pieces = 1;
    for round in 0.. {
        let lap = contender(pieces);
        failed.add(lap.failed);
        let enough = lap.took >= pace.lap || pieces >= pace.pieces;
        if enough && round + 1 >= WARM_UP {
            break;
        }
        if !enough {
            // Aims at the full length, but limits the growth after a short lap to a factor of
            // sixteen.
            let factor = pace.lap.as_secs_f64() / lap.took.as_secs_f64().max(1e-9);
            pieces = (pieces as f64 * (factor * 1.2).clamp(1.5, 16.0)).ceil() as u64;
            pieces = pieces.min(pace.pieces);
        }
    }
    pieces
}

/// Repeats work that cannot run in laps, since each repetition needs its own state, until the time
/// is up. Returns the median of each result. The first repetition is a warm-up.
///
/// # Errors
/// The first of `work`.
pub(crate) fn repeat<const N: usize, E>(
    pace: Pace,
    mut work: impl FnMut() -> Result<[f64; N], E>,
) -> Result<[f64; N], E> {
    let mut medians = [0.0; N];
    repeat_into(pace, &mut medians, &mut |figures| {
        figures.copy_from_slice(&work()?);
        Ok(())
    })?;
    Ok(medians)
}

/// Writes the median of each result of `work` into `medians`. `work` writes its results into the
/// slice that it gets, which is as long.
fn repeat_into<E>(
    pace: Pace,
    medians: &mut [f64],
    work: &mut dyn FnMut(&mut [f64]) -> Result<(), E>,
) -> Result<(), E> {
    work(medians)?;
    let mut figures = vec![Vec::new(); medians.len()];
    let begun = Instant::now();
    for _ in 0..pace.laps {
        work(medians)?;
        for (all, figure) in figures.iter_mut().zip(&*medians) {
            all.push(*figure);
        }
        if begun.elapsed() > pace.time {
            break;
        }
    }
    for (all, middle) in figures.into_iter().zip(medians) {
        *middle = median(all).unwrap_or_default();
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem;

    /// Returns a contender that reports a millisecond per piece and records how many pieces each
    /// lap had.
    fn counted<'a>(asked: &'a mut Vec<u64>, ns: &'a [f64]) -> Contender<'a> {
        Box::new(move |pieces| {
            let over_all = ns[asked.len() % ns.len()];
            asked.push(pieces);
            let mut failed = Failed::default();
            failed.note(&format!("lap {}", asked.len()));
            Lap { took: Duration::from_millis(pieces), over_all, each: over_all * 2.0, failed }
        })
    }

    const PACE: Pace = Pace {
        lap: Duration::from_millis(40),
        time: Duration::from_secs(60),
        laps: 5,
        pieces: 1 << 20,
    };

    #[test]
    fn laps_grow_until_they_are_long_enough_and_then_stay() {
        let mut asked = Vec::new();
        contest(PACE, vec![counted(&mut asked, &[1.0])]);
        let warm = asked.len() - 5;
        assert!(warm >= 2 && asked[..warm].is_sorted(), "{asked:?}");
        assert!(asked[warm..].iter().all(|&n| n == asked[warm - 1] && n >= 40), "{asked:?}");
    }

    #[test]
    fn contenders_take_turns_and_the_median_counts() {
        let (mut a, mut b) = (Vec::new(), Vec::new());
        let outcomes =
            contest(PACE, vec![counted(&mut a, &[5.0]), counted(&mut b, &[1.0, 9.0, 2.0])]);
        assert_eq!((outcomes[0].over_all, outcomes[0].each), (5.0, 10.0));
        assert_eq!(outcomes[1].over_all, 2.0);
    }

    #[test]
    fn a_refusal_is_counted_wherever_it_comes() {
        let mut asked = Vec::new();
        let outcomes = contest(PACE, vec![counted(&mut asked, &[1.0])]);
        assert_eq!(
            outcomes[0].failed,
            Failed { count: asked.len() as u64, first: Some("lap 1".into()) }
        );
    }

    #[test]
    fn a_slow_contender_still_has_three_laps() {
        let slow: Contender<'_> = Box::new(|_| {
            std::thread::sleep(Duration::from_millis(2));
            Lap {
                took: Duration::from_millis(2),
                over_all: 7.0,
                each: 7.0,
                failed: Failed::default(),
            }
        });
        let pace = Pace { lap: Duration::from_millis(1), time: Duration::ZERO, ..PACE };
        let outcome = contest(pace, vec![slow]).remove(0);
        assert_eq!((outcome.over_all, outcome.laps.len()), (7.0, LEAST_LAPS));
    }

    #[test]
    fn what_is_repeated_has_a_warm_up_that_does_not_count() {
        let mut first = true;
        let [figure] =
            repeat(PACE, || Ok::<_, ()>([if mem::take(&mut first) { 1e9 } else { 3.0 }])).unwrap();
        assert_eq!(figure, 3.0);
        assert_eq!(repeat(PACE, || Err::<[f64; 1], _>("no")), Err("no"));
    }
}
