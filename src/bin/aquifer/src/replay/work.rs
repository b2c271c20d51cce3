//! The work that a replay performs on its blocks.

use aquifer_core::{MemoryError, Result};
use aquifer_device::Block;
use aquifer_driver::{
    Access, Call, DeviceRange,
    sim::{Party, Sim, SimKernel, Violation},
};
use aquifer_formats::trace::{Trace, TraceAction, TraceStep};
use aquifer_stream::Stream;
use std::{
    collections::VecDeque,
    fmt::{Debug, Write},
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU32, Ordering},
    },
};

/// The number of violations that are described.
pub(crate) const TOLD: usize = 4;

/// Violations that the checks found.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub(crate) struct Violations {
    /// The number of violating accesses.
    pub(crate) count: u64,
    /// Descriptions of the first few.
    pub(crate) first: Vec<String>,
}

/// Lengths in reads and writes. See the [module documentation](super::tally).
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(crate) struct Paths {
    /// The length of the longest stream.
    pub(crate) longest_stream: u64,
    /// The longest chain in the order that the trace requires.
    pub(crate) needed: u64,
    /// The longest chain as queued.
    pub(crate) taken: u64,
}

impl Paths {
    /// Returns the factor by which the allocator's waits lengthen the work, at least 1.
    pub(crate) fn cost(&self) -> f64 {
        self.taken.max(self.needed).max(1) as f64 / self.needed.max(1) as f64
    }
}

/// The location of a block on the device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Spot {
    /// Its first address.
    pub(crate) address: u64,
    /// Its requested size.
    pub(crate) bytes: u64,
    /// Distinguishes blocks that have had the same address, for the checks.
    pub(crate) generation: u64,
}

impl Spot {
    /// Returns the location of `block`.
    #[inline]
    pub(crate) fn of(block: &Block) -> Self {
        Self { address: block.address(), bytes: block.bytes(), generation: block.generation() }
    }
}

/// Work on blocks. Implementations queue it and return at once.
pub(crate) trait Work: Debug + Send + Sync + 'static {
    /// Announces that the following calls belong to this step of the trace.
    fn at(&self, _step: TraceStep) {}

    /// The block's own stream writes all of it.
    fn write(&self, block: u32, spot: Spot, stream: &Stream) -> Result<()>;

    /// A stream reads all of it.
    fn read(&self, block: u32, spot: Spot, stream: &Stream) -> Result<()>;

    /// Records that `stream` is ordered after all work queued on `home` so far, because the trace
    /// requires it.
    fn follows(&self, _stream: &Stream, _home: &Stream) {}

    /// Returns the lengths of the work so far, or `None` if they are unknown.
    fn paths(&self) -> Option<Paths> {
        None
    }

    /// Returns the driver calls that it has made itself.
    fn driver_calls(&self) -> Vec<(Call, u64)> {
        Vec::new()
    }

    /// Waits for all queued work and returns the result of the checks.
    ///
    /// # Errors
    /// The driver's, if the work itself failed.
    fn verdict(&self) -> Result<Verdict>;
}

/// The result of the checks.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub(crate) struct Verdict {
    /// Reads and writes that were checked.
    pub(crate) checked: u64,
    /// The violations.
    pub(crate) violations: Violations,
}

/// No work, for passes that time the allocator.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Idle;

impl Work for Idle {
    #[inline]
    fn write(&self, _: u32, _: Spot, _: &Stream) -> Result<()> {
        Ok(())
    }

    #[inline]
    fn read(&self, _: u32, _: Spot, _: &Stream) -> Result<()> {
        Ok(())
    }

    fn verdict(&self) -> Result<Verdict> {
        Ok(Verdict::default())
    }
}

/// Reads and writes that are declared to the simulator's oracle.
#[derive(Debug)]
pub(crate) struct Declared {
    sim: Sim,
    /// How many operations of the trace the device runs behind.
    lag: u32,
    /// What was queued when each of the last `lag` operations began, the oldest first.
    marks: Mutex<VecDeque<Vec<u64>>>,
    lanes: Mutex<Vec<StreamLane>>,
    /// The names of each row's work in reports, or none if reports are not read.
    labels: Option<Labels>,
    row: AtomicU32,
}

/// Names for the reads and writes of each row. The oracle needs names of static lifetime, so they
/// are leaked. A process replays one trace.
#[derive(Debug)]
struct Labels(Vec<[&'static str; 2]>);

impl Labels {
    fn of(trace: &Trace) -> Self {
        let (unit, mut text, mut ends) = (trace.unit(), String::new(), Vec::new());
        let last = trace.steps.iter().map(|step| step.row).max().unwrap_or(0);
        for row in 0..=last {
            for what in ["read", "write"] {
                // Writing to a string does not fail.
                let _ = write!(text, "the {what} of {unit} {row}");
                ends.push(text.len());
            }
        }
        let text: &'static str = text.leak();
        let starts = std::iter::once(0).chain(ends.iter().copied());
        let names: Vec<&'static str> =
            starts.zip(&ends).map(|(start, end)| &text[start..*end]).collect();
        Self(names.chunks_exact(2).map(|pair| [pair[0], pair[1]]).collect())
    }

    fn name(&self, row: u32, access: Access) -> &'static str {
        let rows = self.0.get(row as usize).or(self.0.last());
        rows.map_or("work", |[read, write]| if access.writes() { write } else { read })
    }
}

/// Describes a violation, with rows of the trace in place of source locations.
fn told(violation: &Violation) -> String {
    let party = |party: &Party| format!("{} by {}", party.work, party.agent);
    let mut text = format!("{}: {}", violation.kind, party(&violation.later));
    if let Some(earlier) = &violation.earlier {
        // Writing to a string does not fail.
        let _ = write!(text, ", after {}", party(earlier));
    }
    let _ = write!(text, " ({})", violation.place);
    if violation.count > 1 {
        let _ = write!(text, ", {} times", violation.count);
    }
    text
}

/// The reads and writes of one stream.
#[derive(Clone, Copy, Default, Debug)]
struct StreamLane {
    own: u64,
    /// The longest chain that ends with the last of them, in the order that the trace requires.
    needed: u64,
}

impl Declared {
    /// Creates work that is declared to `sim`, a stepped one, which runs it `lag` operations of the
    /// trace behind.
    pub(crate) fn new(sim: &Sim, lag: u32) -> Self {
        Self {
            sim: sim.clone(),
            lag,
            marks: Mutex::default(),
            lanes: Mutex::default(),
            labels: None,
            row: AtomicU32::new(0),
        }
    }

    /// As [`Declared::new`], with work that is named by the rows of `trace`.
    pub(crate) fn with_rows(sim: &Sim, lag: u32, trace: &Trace) -> Self {
        Self { labels: Some(Labels::of(trace)), ..Self::new(sim, lag) }
    }

    fn lanes(&self, streams: &[&Stream]) -> MutexGuard<'_, Vec<StreamLane>> {
        let mut lanes = self.lanes.lock().unwrap_or_else(PoisonError::into_inner);
        let most = streams.iter().map(|stream| stream.number() as usize + 1).max().unwrap_or(0);
        if lanes.len() < most {
            lanes.resize(most, StreamLane::default());
        }
        lanes
    }

    #[track_caller]
    fn tell(&self, spot: Spot, stream: &Stream, access: Access) -> Result<()> {
        let device = stream.device();
        let range = DeviceRange { device, address: spot.address, bytes: spot.bytes };
        let lane = &mut self.lanes(&[stream])[stream.number() as usize];
        (lane.own, lane.needed) = (lane.own + 1, lane.needed + 1);
        let told = match &self.labels {
            Some(labels) => {
                let name = labels.name(self.row.load(Ordering::Relaxed), access);
                self.sim.launch(
                    stream.raw(),
                    SimKernel::new(name).touches(range, access, Some(spot.generation)),
                )
            }
            None => self.sim.access(stream.raw(), range, access, Some(spot.generation)),
        };
        told.map_err(|e| MemoryError::driver(device, e))
    }
}

impl Work for Declared {
    fn at(&self, step: TraceStep) {
        self.row.store(step.row, Ordering::Relaxed);
        if step.action != TraceAction::Complete {
            let mut marks = self.marks.lock().unwrap_or_else(PoisonError::into_inner);
            marks.push_back(self.sim.mark());
            if marks.len() > self.lag as usize {
                marks.pop_front().iter().for_each(|mark| self.sim.run_to(mark));
            }
        }
    }

    fn write(&self, _: u32, spot: Spot, stream: &Stream) -> Result<()> {
        self.tell(spot, stream, Access::Write)
    }

    fn read(&self, _: u32, spot: Spot, stream: &Stream) -> Result<()> {
        self.tell(spot, stream, Access::Read)
    }

    fn follows(&self, stream: &Stream, home: &Stream) {
        // Work that has already run delays nothing.
        if self.sim.pending(home.raw()) > 0 {
            let mut lanes = self.lanes(&[stream, home]);
            let before = lanes[home.number() as usize].needed;
            let lane = &mut lanes[stream.number() as usize];
            lane.needed = lane.needed.max(before);
        }
    }

    fn paths(&self) -> Option<Paths> {
        let lanes = self.lanes(&[]);
        Some(Paths {
            longest_stream: lanes.iter().map(|lane| lane.own).max().unwrap_or(0),
            needed: lanes.iter().map(|lane| lane.needed).max().unwrap_or(0),
            taken: self.sim.longest_path(),
        })
    }

    fn verdict(&self) -> Result<Verdict> {
        let found = self.sim.violations();
        let count = found.iter().map(|violation| violation.count).sum();
        let first = found.iter().take(TOLD).map(told).collect();
        Ok(Verdict {
            checked: self.sim.accesses_checked(),
            violations: Violations { count, first },
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use aquifer_device::{DevicePool, PoolConfig, Request};
    use aquifer_driver::{DeviceId, sim::OnViolation};

    #[test]
    fn the_paths_tell_the_order_of_the_trace_from_that_of_the_allocator() {
        // The pool does not know the order of `v` after `u`.
        let sim = Sim::h200(1).symbolic().stepped().on_violation(OnViolation::Quiet);
        let pool = DevicePool::open(sim.driver(), DeviceId(0), PoolConfig::default()).unwrap();
        let streams = [(); 3].map(|()| pool.stream().unwrap());
        let [s, u, v] = &streams;
        let work = Declared::new(&sim, 0);
        let block = pool.alloc(s, Request::bytes(512)).unwrap();
        let spot = Spot::of(&block);
        for _ in 0..4 {
            work.write(0, spot, s).unwrap();
        }
        assert_eq!(work.paths(), Some(Paths { longest_stream: 4, needed: 4, taken: 4 }));
        // The trace orders u after s and declares it.
        let used = block.prepare(u, Access::Read).unwrap();
        work.follows(u, s);
        work.read(0, spot, u).unwrap();
        assert_eq!(work.paths(), Some(Paths { longest_stream: 4, needed: 5, taken: 5 }));
        // An order of v after u that the trace does not require: only an allocator adds it.
        let event = pool.driver().event_create(DeviceId(0)).unwrap();
        pool.driver().event_record(event, u.raw()).unwrap();
        pool.driver().stream_wait_event(v.raw(), event).unwrap();
        work.read(0, spot, v).unwrap();
        let paths = work.paths().unwrap();
        assert_eq!(paths, Paths { longest_stream: 4, needed: 5, taken: 6 });
        assert_eq!(paths.cost(), 1.2);
        used.finish().unwrap();
    }
}
