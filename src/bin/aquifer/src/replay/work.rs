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
        Mutex, PoisonError,
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

impl Declared {
    /// Creates work that is declared to `sim`, a stepped one, which runs it `lag` operations of the
    /// trace behind.
    pub(crate) fn new(sim: &Sim, lag: u32) -> Self {
        Self {
            sim: sim.clone(),
            lag,
            marks: Mutex::default(),
            labels: None,
            row: AtomicU32::new(0),
        }
    }

    /// As [`Declared::new`], with work that is named by the rows of `trace`.
    pub(crate) fn with_rows(sim: &Sim, lag: u32, trace: &Trace) -> Self {
        Self { labels: Some(Labels::of(trace)), ..Self::new(sim, lag) }
    }

    #[track_caller]
    fn tell(&self, spot: Spot, stream: &Stream, access: Access) -> Result<()> {
        let device = stream.device();
        let range = DeviceRange { device, address: spot.address, bytes: spot.bytes };
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
