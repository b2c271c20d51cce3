//! One pass over a trace.

use super::{
    engine::{Engine, Order, Played, streams_needed},
    report::{PlanMatch, ReplayFailure, Round, Timing},
    stamp::Stamped,
    tally::Tally,
    uses::{EndOldest, OpenUses},
    work::{Declared, Idle, Verdict, Work},
};
use crate::cli::Allocator;
use aquifer_benches::console::{
    figures::median,
    place::{Place, Session},
    progress::ProgressLine,
};
use aquifer_core::{Budget, MemoryError, PoolStats, Recorder, Result, budget::HookRegistration};
use aquifer_device::{
    DevicePool, Direct, FailureCallback, Log, OnFailure, PoolConfig, Request, Resource,
    StreamOrdered,
};
use aquifer_formats::plan::Plan;
use aquifer_formats::trace::Trace;
use aquifer_stream::{Stream, StreamPool};
use std::{sync::Arc, time::Duration};

/// A trace, a device and an allocator to play it with.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ReplayBench<'a> {
    /// The trace.
    pub(crate) trace: &'a Trace,
    /// The device.
    pub(crate) place: &'a Place,
    /// The allocator.
    pub(crate) allocator: Allocator,
    /// Whether the allocator learns which streams use a block.
    pub(crate) order: Order,
    /// The plan that the pool follows.
    pub(crate) plan: Option<&'a Arc<Plan>>,
    /// The per cent of the peak of live bytes that the pool may hold beyond it, if not the default.
    pub(crate) slack: Option<u32>,
    /// How many operations of the trace a simulated device runs behind.
    pub(crate) lag: u32,
}

/// The result of a checked pass.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Checked {
    /// The peak of bytes held from the driver.
    pub(crate) peak_physical: u64,
    /// Why the pass stopped early, if it did.
    pub(crate) failure: Option<ReplayFailure>,
    /// Driver calls from the first row to the last, without those of the checks.
    pub(crate) driver_calls: Vec<(&'static str, u64)>,
    /// The result of the checks.
    pub(crate) verdict: Verdict,
    /// Blocks that another stream used.
    pub(crate) crossings: u64,
    /// Uses that were ended early.
    pub(crate) early: u64,
    /// Bytes still held after all blocks were freed and the pool was trimmed.
    pub(crate) leaked: u64,
    /// How far the plan matched, if there is one.
    pub(crate) plan: Option<PlanMatch>,
}

/// What several rounds resulted in, or the first round that did not complete.
pub(crate) type Completion<T> = std::result::Result<T, ReplayFailure>;

/// Returns where and why the first round that did not complete stopped.
fn first_failure(rounds: &[Played]) -> Option<ReplayFailure> {
    (1..).zip(rounds).find_map(|(round, played)| {
        let said = played.failure.as_ref()?.to_string();
        Some(ReplayFailure { round, operations: played.operations, said })
    })
}

/// The result of any pass.
struct Pass {
    rounds: Vec<Played>,
    /// The cost of each round, including its end. As many entries as `rounds`.
    tallies: Vec<Tally>,
    /// Statistics after the first round.
    first: PoolStats,
    driver_calls: Vec<(&'static str, u64)>,
    verdict: Verdict,
    early: u64,
    leaked: u64,
}

/// The allocator of a pass.
#[derive(Debug)]
pub(super) enum Placer {
    Pool(DevicePool),
    Backend(Arc<dyn Resource>),
}

impl Placer {
    pub(super) fn resource(&self) -> &dyn Resource {
        match self {
            Self::Pool(pool) => pool,
            Self::Backend(backend) => &**backend,
        }
    }

    /// Registers `relief` with the pool's budget. Backends call their own handler instead.
    pub(super) fn relieved_by<W: Work>(
        &self,
        relief: &Arc<EndOldest<W>>,
    ) -> Option<HookRegistration> {
        match self {
            Self::Pool(pool) => Some(pool.budget().on_need(relief)),
            Self::Backend(_) => None,
        }
    }
}

impl ReplayBench<'_> {
    /// Plays the trace once from empty, with all checks.
    ///
    /// # Errors
    /// If the allocator or its streams cannot be created. A trace that does not fit is not an
    /// error.
    pub(crate) fn check(
        &self,
        budget: Option<u64>,
        progress: &mut ProgressLine,
    ) -> Result<Checked> {
        let session = self.place.begin_stepped(true);
        let pass = match &session.sim {
            Some(sim) => {
                let declared = Declared::with_rows(sim, self.lag, self.trace);
                self.pass(&session, budget, Arc::new(declared), 1, progress)?
            }
            None => {
                let stamps = Stamped::new(&session.driver, session.device, self.trace)?;
                self.pass(&session, budget, Arc::new(stamps), 1, progress)?
            }
        };
        let Pass { rounds, first, driver_calls, verdict, early, leaked, .. } = pass;
        let failure = first_failure(&rounds);
        let crossings = rounds.iter().map(|played| played.crossings).sum();
        Ok(Checked {
            peak_physical: first.peak_physical,
            failure,
            driver_calls,
            verdict,
            crossings,
            early,
            leaked,
            plan: self.plan.map(|_| PlanMatch::of(&first)),
        })
    }

    /// Measures the time of `rounds` rounds, and then what they cost besides.
    ///
    /// # Errors
    /// If the allocator or its streams cannot be created.
    pub(crate) fn measure(
        &self,
        budget: Option<u64>,
        rounds: u32,
        progress: &mut ProgressLine,
    ) -> Result<Completion<(Timing, Vec<Round>)>> {
        progress.phase("timing:");
        let (timing, each) = match self.time(budget, rounds, progress)? {
            Ok(timed) => timed,
            Err(failure) => return Ok(Err(failure)),
        };
        progress.phase("counting:");
        let tallies = self.count(budget, rounds, progress)?;
        Ok(tallies.map(|tallies| (timing, Round::all(&each, &tallies))))
    }

    /// Plays the trace `rounds` times with one allocator and measures the time, until a round does
    /// not fit. Also returns the time of each round, in nanoseconds per operation.
    ///
    /// # Errors
    /// If the allocator or its streams cannot be created.
    fn time(
        &self,
        budget: Option<u64>,
        rounds: u32,
        progress: &mut ProgressLine,
    ) -> Result<Completion<(Timing, Vec<f64>)>> {
        let session = self.place.begin();
        let pass = self.pass(&session, budget, Arc::new(Idle), rounds, progress)?;
        if let Some(failure) = first_failure(&pass.rounds) {
            return Ok(Err(failure));
        }
        let per_operation =
            |played: &Played| played.took.as_nanos() as f64 / played.operations.max(1) as f64;
        let each: Vec<_> = pass.rounds.iter().map(per_operation).collect();
        let first = each.first().copied().unwrap_or_default();
        let warm = median(each.iter().skip(1).copied().collect()).unwrap_or(first);
        Ok(Ok((Timing { first, warm, rounds }, each)))
    }

    /// Plays the trace `rounds` times with one allocator and counts what each round costs besides
    /// time, until a round does not fit. On the simulator the streams perform work meanwhile. On a
    /// GPU they have none.
    ///
    /// # Errors
    /// If the allocator or its streams cannot be created.
    fn count(
        &self,
        budget: Option<u64>,
        rounds: u32,
        progress: &mut ProgressLine,
    ) -> Result<Completion<Vec<Tally>>> {
        let session = self.place.begin_stepped(false);
        let pass = match &session.sim {
            Some(sim) => {
                let declared = Declared::new(sim, self.lag);
                self.pass(&session, budget, Arc::new(declared), rounds, progress)?
            }
            None => self.pass(&session, budget, Arc::new(Idle), rounds, progress)?,
        };
        Ok(first_failure(&pass.rounds).map_or(Ok(pass.tallies), Err))
    }

    fn pass<W: Work>(
        &self,
        session: &Session,
        budget: Option<u64>,
        work: Arc<W>,
        rounds: u32,
        progress: &mut ProgressLine,
    ) -> Result<Pass> {
        let uses = Arc::new(OpenUses::new());
        let relief = Arc::new(EndOldest { uses: uses.clone(), work: work.clone() });
        let (placer, streams) = self.open(session, budget, &relief, None)?;
        let relieved = placer.relieved_by(&relief);
        let pass = match &placer {
            // Called directly, without dynamic dispatch, as a program would call it.
            Placer::Pool(pool) => {
                self.rounds(session, pool, &streams, &*work, &uses, rounds, progress)
            }
            Placer::Backend(backend) => {
                self.rounds(session, &**backend, &streams, &*work, &uses, rounds, progress)
            }
        };
        let mut pass = pass?;
        let left = at_rest(placer.resource(), &streams)?;
        // The range of a plan stays until its pool is closed.
        let range =
            self.plan.map_or(0, |plan| plan.top().next_multiple_of(self.place.granularity()));
        let held = left.physical - range.min(left.cached).min(left.physical);
        pass.leaked = held.max(left.live + left.pending);
        // Dropping the allocator is checked too.
        drop((streams, relieved, placer));
        pass.verdict = work.verdict()?;
        Ok(pass)
    }

    /// Creates the allocator and as many streams as the trace needs. The allocator reports its
    /// events to `recorder`, if there is one.
    pub(super) fn open<W: Work>(
        &self,
        session: &Session,
        budget: Option<u64>,
        relief: &Arc<EndOldest<W>>,
        recorder: Option<Arc<Recorder>>,
    ) -> Result<(Placer, Vec<Stream>)> {
        let Session { driver, device, .. } = session;
        let count = streams_needed(self.trace);
        let budget = budget.map(|bytes| Budget::new("the replay", bytes));
        let (placer, streams) = match self.allocator {
            Allocator::Pool => {
                let mut config = PoolConfig::default();
                config.budget = budget;
                config.streams = config.streams.max(count);
                config.recorder = recorder;
                config.slack = self.slack.unwrap_or(config.slack);
                if session.sim.is_some() {
                    // The device runs only between operations and in a call that waits for it. A
                    // wait with a deadline would poll instead, until the deadline.
                    config.wait = Duration::MAX;
                }
                if let Some(plan) = self.plan {
                    config = config.with_plan(plan.clone());
                }
                let pool = DevicePool::open(driver.clone(), *device, config)?;
                let streams = pool.streams().clone();
                (Placer::Pool(pool), streams)
            }
            Allocator::Async => {
                let budget = match budget {
                    Some(budget) => budget,
                    // The pool's default, so that both get the same budget.
                    None => {
                        let free = driver
                            .memory_info(*device)
                            .map_err(|e| MemoryError::driver(*device, e))?
                            .free;
                        Budget::new("the device", free / 5 * 4)
                    }
                };
                let streams = StreamPool::new(driver.clone(), *device, count);
                let backend = StreamOrdered::new(driver.clone(), streams.clone(), budget)?;
                (Placer::Backend(recorded(relieved(backend, relief.clone()), recorder)), streams)
            }
            Allocator::Direct => {
                let streams = StreamPool::new(driver.clone(), *device, count);
                let backend = Direct::new(driver.clone(), streams.clone(), budget);
                (Placer::Backend(recorded(relieved(backend, relief.clone()), recorder)), streams)
            }
        };
        let streams = (0..count).map(|_| streams.lease()).collect::<Result<_>>()?;
        Ok((placer, streams))
    }

    #[expect(
        clippy::too_many_arguments,
        reason = "everything that a pass has, once, and nothing else"
    )]
    fn rounds<R: Resource + ?Sized, W: Work>(
        &self,
        session: &Session,
        allocator: &R,
        streams: &[Stream],
        work: &W,
        uses: &OpenUses,
        rounds: u32,
        progress: &mut ProgressLine,
    ) -> Result<Pass> {
        let calls = || session.driver.calls().made();
        let calls_before = calls();
        let mut operations = 0;
        let mut tally = |done: u64| {
            operations += done;
            Tally::now(operations, session.driver.calls(), &allocator.stats(), work)
        };
        let mut last = tally(0);
        let mut engine = Engine::new(self.trace, streams, allocator, work, uses, self.order);
        let mut played = vec![engine.play(progress)];
        let own = work.driver_calls();
        let driver_calls = calls().into_iter().filter_map(|(call, count)| {
            let before = calls_before.iter().chain(&own).filter(|(other, _)| *other == call);
            let made = count - before.map(|(_, count)| count).sum::<u64>().min(count);
            (made > 0).then_some((call.name(), made))
        });
        let driver_calls = driver_calls.collect();
        let (first, early) = (allocator.stats(), uses.early());
        engine.clear()?;
        let mut tallies = Vec::with_capacity(rounds as usize);
        let now = tally(played[0].operations);
        tallies.push(now - std::mem::replace(&mut last, now));
        for _ in 1..rounds {
            if played.iter().any(|p| p.failure.is_some()) {
                break;
            }
            let again = engine.play(progress);
            engine.clear()?;
            let now = tally(again.operations);
            tallies.push(now - std::mem::replace(&mut last, now));
            played.push(again);
        }
        Ok(Pass {
            rounds: played,
            tallies,
            first,
            driver_calls,
            verdict: Verdict::default(),
            early,
            leaked: 0,
        })
    }
}

/// Waits until all work is complete, trims the allocator and returns the remaining statistics.
///
/// Blocks with uses join the free list of their stream when the allocator polls them after the
/// stream's work is complete. This takes two rounds of synchronise and trim.
pub(super) fn at_rest(allocator: &dyn Resource, streams: &[Stream]) -> Result<PoolStats> {
    for _ in 0..2 {
        for stream in streams {
            stream.synchronize()?;
        }
        allocator.trim(0)?;
    }
    Ok(allocator.stats())
}

/// Wraps a driver allocator so that a failed allocation ends the oldest use and retries.
fn relieved<R: Resource, W: Work>(backend: R, relief: Arc<EndOldest<W>>) -> impl Resource {
    FailureCallback::new(backend, u32::MAX, move |_: &Request, _: &MemoryError| {
        match relief.end_one() {
            0 => OnFailure::GiveUp,
            _ => OnFailure::Retry,
        }
    })
}

/// Wraps `backend` so that it reports its events to `recorder`, if there is one.
fn recorded(
    backend: impl Resource + 'static,
    recorder: Option<Arc<Recorder>>,
) -> Arc<dyn Resource> {
    match recorder {
        Some(recorder) => Arc::new(Log::new(backend, recorder)),
        None => Arc::new(backend),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use aquifer_core::DeviceId;

    #[test]
    fn the_first_round_that_fails_is_named_with_what_it_had_done() {
        let played = |operations, failure| Played {
            operations,
            crossings: 0,
            took: Duration::ZERO,
            failure,
        };
        let lost = || Some(MemoryError::DeviceLost { device: DeviceId(0) });
        assert_eq!(first_failure(&[played(9, None), played(9, None)]), None);
        let rounds = [played(9, None), played(7, lost()), played(3, lost())];
        let failure = first_failure(&rounds).unwrap();
        assert_eq!((failure.round, failure.operations), (2, 7));
        assert_eq!(failure.said, lost().unwrap().to_string());
    }
}
