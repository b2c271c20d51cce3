//! What a replay does with the memory it is given.

use super::{report::Violations, tally::Paths};
use crate::trace::Trace;
use aquifer_core::{MemoryError, Result};
use aquifer_device::Block;
use aquifer_driver::{
    Access, Call, DeviceRange,
    sim::{Kernel, Party, Sim, Violation},
};
use aquifer_stream::Stream;
use std::{
    fmt::{Debug, Write},
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU32, Ordering},
    },
};

/// Violations that are put into words.
pub(crate) const TOLD: usize = 4;

/// Where a block is, on the device of the streams that use it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Spot {
    /// Its first address.
    pub(crate) address: u64,
    /// Its size as asked for.
    pub(crate) bytes: u64,
    /// What tells it from every other block at that address, where somebody checks.
    pub(crate) generation: u64,
}

impl Spot {
    /// Where `block` is.
    #[inline]
    pub(crate) fn of(block: &Block) -> Self {
        Self { address: block.address(), bytes: block.bytes(), generation: block.generation() }
    }
}

/// Work on blocks. Implementations queue it and return at once.
pub(crate) trait Work: Debug + Send + Sync + 'static {
    /// What follows is of this row of the trace.
    fn at(&self, _row: u32) {}

    /// The block's own stream writes all of it.
    fn write(&self, block: u32, spot: Spot, stream: &Stream) -> Result<()>;

    /// A stream reads all of it.
    fn read(&self, block: u32, spot: Spot, stream: &Stream) -> Result<()>;

    /// From now on `stream` comes after all that `home` has been given so far: the order is the
    /// trace's own.
    fn follows(&self, _stream: &Stream, _home: &Stream) {}

    /// What the order of the work has come to so far, if anybody can tell.
    fn paths(&self) -> Option<Paths> {
        None
    }

    /// Driver calls that it has made itself.
    fn driver_calls(&self) -> Vec<(Call, u64)> {
        Vec::new()
    }

    /// Waits for everything that was queued, and answers with what the checks found.
    ///
    /// # Errors
    /// The driver's, if the work itself failed.
    fn verdict(&self) -> Result<Verdict>;
}

/// What the checks found.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub(crate) struct Verdict {
    /// Reads and writes that were checked.
    pub(crate) checked: u64,
    /// What was wrong.
    pub(crate) violations: Violations,
}

/// No work: for passes that time the allocator.
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

/// Reads and writes that the simulator's oracle is told of.
#[derive(Debug)]
pub(crate) struct Declared {
    sim: Sim,
    lanes: Mutex<Vec<Lane>>,
    /// What reports are to call the work of each row; nothing where they are not read.
    labels: Option<Labels>,
    row: AtomicU32,
}

/// Names for the reads and writes of each row. Work keeps its name for good, so these are never
/// freed; a process replays one trace.
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

/// A violation in words, with rows of the trace where it has lines of this program.
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
struct Lane {
    own: u64,
    /// The longest chain that ends with the last of them, by the order that the trace needs.
    needed: u64,
}

impl Declared {
    /// Tells `sim`.
    pub(crate) fn new(sim: &Sim) -> Self {
        Self { sim: sim.clone(), lanes: Mutex::default(), labels: None, row: AtomicU32::new(0) }
    }

    /// Tells `sim`, whose reports name the rows of `trace`.
    pub(crate) fn with_rows(sim: &Sim, trace: &Trace) -> Self {
        Self { labels: Some(Labels::of(trace)), ..Self::new(sim) }
    }

    fn lanes(&self, streams: &[&Stream]) -> MutexGuard<'_, Vec<Lane>> {
        let mut lanes = self.lanes.lock().unwrap_or_else(PoisonError::into_inner);
        let most = streams.iter().map(|stream| stream.number() as usize + 1).max().unwrap_or(0);
        if lanes.len() < most {
            lanes.resize(most, Lane::default());
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
                    Kernel::new(name).touches(range, access, Some(spot.generation)),
                )
            }
            None => self.sim.access(stream.raw(), range, access, Some(spot.generation)),
        };
        told.map_err(|e| MemoryError::driver(device, e))
    }
}

impl Work for Declared {
    fn at(&self, row: u32) {
        self.row.store(row, Ordering::Relaxed);
    }

    fn write(&self, _: u32, spot: Spot, stream: &Stream) -> Result<()> {
        self.tell(spot, stream, Access::Write)
    }

    fn read(&self, _: u32, spot: Spot, stream: &Stream) -> Result<()> {
        self.tell(spot, stream, Access::Read)
    }

    fn follows(&self, stream: &Stream, home: &Stream) {
        // What has run holds nobody up.
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
    use aquifer_driver::DeviceId;

    #[test]
    fn the_paths_tell_the_order_of_the_trace_from_that_of_the_allocator() {
        let sim = Sim::h200(1).symbolic().stepped();
        let pool = DevicePool::open(sim.driver(), DeviceId(0), PoolConfig::default()).unwrap();
        let streams = [(); 3].map(|()| pool.stream().unwrap());
        let [s, u, v] = &streams;
        let work = Declared::new(&sim);
        let block = pool.alloc(s, Request::bytes(512)).unwrap();
        let spot = Spot::of(&block);
        for _ in 0..4 {
            work.write(0, spot, s).unwrap();
        }
        assert_eq!(work.paths(), Some(Paths { longest_stream: 4, needed: 4, taken: 4 }));
        // The trace wants u behind s, and says so.
        let used = block.prepare(u, Access::Read).unwrap();
        work.follows(u, s);
        work.read(0, spot, u).unwrap();
        assert_eq!(work.paths(), Some(Paths { longest_stream: 4, needed: 5, taken: 5 }));
        // Nobody but an allocator wants v behind u.
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
