//! Threads at work, each with its own source.

use super::{source::Source, work::WorkPlan};
use crate::lap::{Contender, Failed, Lap};
use std::{
    hint::black_box,
    mem,
    sync::atomic::{AtomicUsize, Ordering},
    thread,
    time::{Duration, Instant},
};

/// One thread's source and its blocks.
#[derive(Debug)]
pub(crate) struct Lane<S: Source> {
    source: S,
    slots: Vec<Option<S::Held>>,
    failed: Failed,
}

impl<S: Source> Lane<S> {
    /// Creates a lane without blocks.
    pub(crate) fn new(source: S) -> Self {
        Self { source, slots: Vec::new(), failed: Failed::default() }
    }

    /// Returns a block, or `None` after counting a failure.
    ///
    /// Inlined into the timed loop, as where a collection allocates. Otherwise the row would
    /// include the cost of a call and of a result that is passed through memory.
    #[inline(always)]
    pub(crate) fn take(&mut self, bytes: u64) -> Option<S::Held> {
        match self.source.take(bytes) {
            Ok(held) => Some(held),
            Err(refused) => {
                self.failed.note(&refused);
                None
            }
        }
    }

    /// Frees a block. Inlined as [`Lane::take`] is.
    #[inline(always)]
    pub(crate) fn give(&mut self, held: S::Held) {
        if let Err(refused) = self.source.give(held) {
            self.failed.note(&refused);
        }
    }

    /// Allocates and frees `count` times.
    pub(crate) fn pairs(&mut self, bytes: u64, count: u64) {
        for _ in 0..count {
            if let Some(held) = self.take(black_box(bytes)) {
                black_box(&held);
                self.give(held);
            }
        }
    }

    /// Runs `work` `times` times.
    pub(crate) fn play(&mut self, work: &WorkPlan, times: u64) {
        if self.slots.len() < work.slots {
            self.slots.resize_with(work.slots, || None);
        }
        for _ in 0..times {
            for step in &work.operations {
                let slot = step.slot as usize;
                if step.allocates {
                    self.slots[slot] = self.take(step.bytes);
                } else if let Some(held) = self.slots[slot].take() {
                    self.give(held);
                }
            }
        }
    }

    /// Waits until no work is queued.
    pub(crate) fn rest(&mut self) {
        if let Err(refused) = self.source.rest() {
            self.failed.note(&refused);
        }
    }

    /// Returns the failures since the last call.
    pub(crate) fn failed(&mut self) -> Failed {
        mem::take(&mut self.failed)
    }

    /// Runs a lap of this thread: `job`, which performs `operations` operations.
    pub(crate) fn lap(&mut self, operations: u64, job: &mut dyn FnMut(&mut Self)) -> Lap {
        let begun = Instant::now();
        job(self);
        let took = begun.elapsed();
        self.rest();
        let each = took.as_nanos() as f64 / operations.max(1) as f64;
        Lap { took, over_all: each, each, failed: self.failed() }
    }
}

/// Runs a lap of several threads that begin together. `job` gets the number of its thread and
/// performs `operations` operations in each. A single lane runs on the calling thread.
pub(crate) fn crew<S, J>(lanes: &mut [Lane<S>], operations: u64, job: J) -> Lap
where
    S: Source + Send,
    S::Held: Send,
    J: Fn(usize, &mut Lane<S>) + Sync,
{
    if let [only] = lanes {
        return only.lap(operations, &mut |lane| job(0, lane));
    }
    let (gate, job) = (Gate::new(lanes.len()), &job);
    let bodies = lanes.iter_mut().enumerate().map(|(number, lane)| {
        let gate = &gate;
        let body: Body<'_> = Box::new(move || {
            // The first driver call of a thread performs one-time initialisation.
            lane.rest();
            gate.pass();
            let begun = Instant::now();
            job(number, lane);
            (begun, Instant::now())
        });
        body
    });
    let (spans, mut failed) = together(bodies.collect(), &gate);
    for lane in lanes.iter_mut() {
        lane.rest();
        failed.add(lane.failed());
    }
    lap_of(&spans, operations * lanes.len() as u64, failed)
}

/// Returns a contender of pairs on one thread. A pair counts as one operation.
pub(crate) fn pairs<'a, S: Source + 'a>(source: S, bytes: u64) -> Contender<'a> {
    let mut lane = Lane::new(source);
    Box::new(move |count| lane.lap(count, &mut |lane| lane.pairs(bytes, count)))
}

/// Returns a contender that plays a work on one thread.
pub(crate) fn plays<'a, S: Source + 'a>(source: S, work: &'a WorkPlan) -> Contender<'a> {
    let mut lane = Lane::new(source);
    let operations = work.operations.len() as u64;
    Box::new(move |times| lane.lap(operations * times, &mut |lane| lane.play(work, times)))
}

/// Returns a contender with a thread for each source. They run one work each, or pairs of `bytes`
/// if `works` is empty. A piece is a work, or as many pairs as make a suitable lap.
pub(crate) fn crew_of<'a, S>(sources: Vec<S>, bytes: u64, works: &'a [WorkPlan]) -> Contender<'a>
where
    S: Source + Send + 'a,
    S::Held: Send,
{
    let mut lanes: Vec<_> = sources.into_iter().map(Lane::new).collect();
    match works {
        [] => {
            Box::new(move |pairs| crew(&mut lanes, 2 * pairs, |_, lane| lane.pairs(bytes, pairs)))
        }
        [first, ..] => {
            let operations = first.operations.len() as u64;
            Box::new(move |times| {
                crew(&mut lanes, operations * times, |number, lane| {
                    lane.play(&works[number], times);
                })
            })
        }
    }
}

/// What a thread does, and when it began and ended.
type Body<'a> = Box<dyn FnOnce() -> (Instant, Instant) + Send + 'a>;

/// Runs a thread for each body. All pass `gate`.
fn together(bodies: Vec<Body<'_>>, gate: &Gate) -> (Vec<(Instant, Instant)>, Failed) {
    let count = bodies.len();
    let mut failed = Failed::default();
    let spans = thread::scope(|scope| {
        let mut threads = Vec::new();
        for (number, body) in bodies.into_iter().enumerate() {
            match thread::Builder::new().spawn_scoped(scope, body) {
                Ok(thread) => threads.push(thread),
                Err(refused) => {
                    failed.note(&format!("thread {number} of {count} cannot begin: {refused}"));
                    // The threads that wait continue without the missing one.
                    gate.open();
                    break;
                }
            }
        }
        threads.into_iter().filter_map(|thread| thread.join().ok()).collect::<Vec<_>>()
    });
    if spans.len() < count && failed.count == 0 {
        failed.note(&"a thread ended early");
    }
    (spans, failed)
}

/// Returns the times of a lap of several threads that performed `operations` operations together.
fn lap_of(spans: &[(Instant, Instant)], operations: u64, failed: Failed) -> Lap {
    let first = spans.iter().map(|span| span.0).min();
    let last = spans.iter().map(|span| span.1).max();
    let took = first.zip(last).map_or(Duration::ZERO, |(first, last)| last.duration_since(first));
    let own: f64 =
        spans.iter().map(|(begun, ended)| ended.duration_since(*begun).as_nanos() as f64).sum();
    let all = operations.max(1) as f64;
    Lap { took, over_all: took.as_nanos() as f64 / all, each: own / all, failed }
}

/// A barrier for one use. Threads spin and yield, since waking a sleeping thread takes longer than
/// some laps.
struct Gate {
    parties: usize,
    there: AtomicUsize,
}

impl Gate {
    fn new(parties: usize) -> Self {
        Self { parties, there: AtomicUsize::new(0) }
    }

    fn pass(&self) {
        self.there.fetch_add(1, Ordering::AcqRel);
        while self.there.load(Ordering::Acquire) < self.parties {
            thread::yield_now();
        }
    }

    fn open(&self) {
        self.there.fetch_add(self.parties, Ordering::AcqRel);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;

    /// A source of numbers that fails every third request and counts live ones.
    #[derive(Debug, Default)]
    struct Numbers {
        asked: Cell<u64>,
        out: Cell<i64>,
        most: Cell<i64>,
    }

    impl Source for Numbers {
        type Held = u64;
        type Refused = &'static str;
        fn take(&self, bytes: u64) -> Result<u64, &'static str> {
            self.asked.set(self.asked.get() + 1);
            if self.asked.get().is_multiple_of(3) {
                return Err("the third");
            }
            self.out.set(self.out.get() + 1);
            self.most.set(self.most.get().max(self.out.get()));
            Ok(bytes)
        }
        fn give(&self, _: u64) -> Result<(), &'static str> {
            self.out.set(self.out.get() - 1);
            Ok(())
        }
    }

    #[test]
    fn a_refused_block_is_counted_and_not_freed() {
        let mut lane = Lane::new(Numbers::default());
        lane.play(&WorkPlan::batch(6, 1), 1);
        assert_eq!((lane.source.out.get(), lane.source.most.get()), (0, 4));
        assert_eq!(lane.failed(), Failed { count: 2, first: Some("the third".into()) });
        assert_eq!(lane.failed(), Failed::default());
    }

    #[test]
    fn every_thread_of_a_crew_does_its_part_and_its_failures_count() {
        let mut lanes: Vec<_> = (0..4).map(|_| Lane::new(Numbers::default())).collect();
        let lap = crew(&mut lanes, 14, |number, lane| lane.pairs(1, 4 + number as u64));
        let asked: Vec<_> = lanes.iter().map(|lane| lane.source.asked.get()).collect();
        assert_eq!(asked, [4, 5, 6, 7]);
        assert_eq!(lap.failed.count, 1 + 1 + 2 + 2);
        assert!(lap.each > 0.0 && lap.over_all > 0.0 && lap.took > Duration::ZERO);
    }
}
