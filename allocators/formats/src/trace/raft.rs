//! Samples of the memory resources of RAFT, which cuVS's programs write too.
//!
//! `raft::memory_tracking_resources` (2026) writes a row when memory was allocated or freed, at
//! most one per interval: `timestamp_us`, four columns for each resource, `nvtx_depth` and
//! `nvtx_range`. The four are `NAME_current`, `NAME_peak` since the row before, `NAME_total_alloc`
//! and `NAME_total_freed`. The range is the innermost one of the thread that began the record. It
//! is quoted and may contain commas and quotes.
//!
//! The log has levels and no blocks. Each rise becomes one block, and what falls is freed from the
//! latest blocks. A peak above both levels becomes a block that is freed in the same row. The
//! peaks of several resources in one row count as simultaneous, so that the sum is never too low.
//!
//! | resource | memory |
//! |---|---|
//! | `host` | pageable: passed over |
//! | `pinned` | pinned host memory |
//! | others: `device`, `workspace`, `large_workspace`, `managed` | of the device, tagged by the name |

use super::{
    Fault, MAX_BLOCK, TraceDevice,
    builder::whole,
    log_event::{LogAction, LogEvent, LogPhase, LogSink, Skips, UNREADABLE},
};

/// A log that is being read.
#[derive(Debug)]
pub(crate) struct RaftReader {
    count: usize,
    time: usize,
    range: Option<usize>,
    depth: Option<usize>,
    resources: Vec<Resource>,
    notes: Vec<String>,
    first: Option<u64>,
    now: f64,
    next: u64,
    /// The phases that have begun, the outermost first: the name and its begin.
    open: Vec<(String, f64)>,
    phases: Vec<LogPhase>,
}

/// A resource and its blocks.
#[derive(Debug)]
struct Resource {
    name: String,
    current: usize,
    peak: Option<usize>,
    device: TraceDevice,
    level: u64,
    /// The names and sizes of its blocks, the latest last.
    blocks: Vec<(u64, u64)>,
}

impl RaftReader {
    /// Parses a header. Returns `None` if it is not one of this form.
    pub(crate) fn of(header: &str) -> Option<Self> {
        let names: Vec<&str> = header.split(',').collect();
        let at = |wanted: &str| names.iter().position(|name| *name == wanted);
        let time = at("timestamp_us")?;
        // The range is last, since it may contain commas.
        let range = at("nvtx_range").filter(|place| place + 1 == names.len());
        let levels = names.iter().enumerate().filter_map(|(place, column)| {
            let name = column.strip_suffix("_current")?;
            let device = match name {
                "pinned" => TraceDevice::Host(None),
                _ => TraceDevice::Gpu(0),
            };
            let peak = at(&format!("{name}_peak"));
            let (name, current) = (name.to_owned(), place);
            Some(Resource { name, current, peak, device, level: 0, blocks: Vec::new() })
        });
        let (pageable, resources): (Vec<_>, Vec<_>) =
            levels.partition(|resource| resource.name == "host");
        let mut notes = vec![
            "the log has levels and no blocks: each rise is shown as one block, and falls free the latest"
                .to_owned(),
        ];
        if !pageable.is_empty() {
            notes.push("pageable host memory of the log is not shown".to_owned());
        }
        (!resources.is_empty()).then(|| Self {
            count: names.len(),
            time,
            range,
            depth: at("nvtx_depth"),
            resources,
            notes,
            first: None,
            now: 0.0,
            next: 0,
            open: Vec::new(),
            phases: Vec::new(),
        })
    }

    /// Takes one row.
    pub(super) fn take(
        &mut self,
        row: u64,
        text: &str,
        skips: &mut Skips,
        sink: &mut LogSink<'_>,
    ) -> Result<(), Fault> {
        let fields: Vec<&str> = text.splitn(self.count, ',').collect();
        let (time, levels, depth) = match self.parse(&fields) {
            Ok(parsed) => parsed,
            Err(fault) => {
                skips.add_error(UNREADABLE, Some(row), fault);
                return Ok(());
            }
        };
        let first = *self.first.get_or_insert(time);
        self.now = self.now.max(time.saturating_sub(first) as f64);
        if let (Some(depth), Some(range)) = (depth, self.range) {
            let range = fields[range];
            let range = range.strip_prefix('"').unwrap_or(range);
            self.enter(depth, range.strip_suffix('"').unwrap_or(range));
        }
        self.change(row, &levels, sink)
    }

    /// Parses a row: its time, the level and the peak of each resource, and the depth of its range.
    #[expect(clippy::type_complexity, reason = "used once")]
    fn parse(&self, fields: &[&str]) -> Result<(u64, Vec<(u64, u64)>, Option<u64>), Fault> {
        if fields.len() != self.count {
            return Err(Fault::Fields { found: fields.len(), expected: self.count });
        }
        let time = whole("timestamp_us", fields[self.time], "microseconds, a whole number")?;
        let level = |place: usize| {
            // Counters of several threads may be below zero for a moment.
            let found = fields[place].to_owned();
            match found.parse::<i64>().map(|level| level.max(0) as u64) {
                Ok(level @ ..=MAX_BLOCK) => Ok(level),
                Ok(_) => Err(Fault::AbsurdSize { found }),
                Err(_) => Err(Fault::Field { name: "a level", found, expected: "a whole number" }),
            }
        };
        let levels = self.resources.iter().map(|resource| {
            let current = level(resource.current)?;
            let peak = resource.peak.map_or(Ok(0), level)?;
            Ok((current, peak))
        });
        let levels = levels.collect::<Result<_, Fault>>()?;
        let depth = self.depth.map(|place| whole("nvtx_depth", fields[place], "a whole number"));
        Ok((time, levels, depth.transpose()?))
    }

    /// Brings each resource to its level and back from its peak.
    fn change(
        &mut self,
        row: u64,
        levels: &[(u64, u64)],
        sink: &mut LogSink<'_>,
    ) -> Result<(), Fault> {
        let Self { resources, now, next, .. } = self;
        let mut tell = |action, resource: &Resource, (id, bytes): (u64, u64)| {
            let (device, tag) = (resource.device, resource.name.as_str());
            sink(&LogEvent { device, tag, ..LogEvent::new(action, row, *now, id, bytes) })
        };
        let mut block = |bytes| {
            *next += 1;
            (*next, bytes)
        };
        let mut passing = Vec::new();
        for (place, (resource, &(level, peak))) in resources.iter_mut().zip(levels).enumerate() {
            if level > resource.level {
                let rise = block(level - resource.level);
                tell(LogAction::Allocate, resource, rise)?;
                resource.blocks.push(rise);
                resource.level = level;
            }
            if peak > resource.level {
                let brief = block(peak - resource.level);
                tell(LogAction::Allocate, resource, brief)?;
                passing.push((place, brief));
            }
        }
        for (place, brief) in passing {
            tell(LogAction::Release, &resources[place], brief)?;
        }
        for (resource, &(level, _)) in resources.iter_mut().zip(levels) {
            while resource.level > level
                && let Some((id, bytes)) = resource.blocks.pop()
            {
                tell(LogAction::Release, resource, (id, bytes))?;
                resource.level -= bytes;
                if resource.level < level {
                    let rest = block(level - resource.level);
                    tell(LogAction::Allocate, resource, rest)?;
                    resource.blocks.push(rest);
                    resource.level = level;
                }
            }
        }
        Ok(())
    }

    /// Ends the phases that are over, and begins that of a row. The ranges around it are known if
    /// earlier rows were in them.
    fn enter(&mut self, depth: u64, range: &str) {
        let depth = usize::try_from(depth).unwrap_or(usize::MAX);
        let goes_on = depth > 0 && self.open.get(depth - 1).is_some_and(|(name, _)| name == range);
        let kept = if goes_on { depth } else { depth.saturating_sub(1) };
        self.close(kept);
        if depth > 0 && !goes_on && !range.is_empty() {
            self.open.push((range.to_owned(), self.now));
        }
    }

    /// Ends all phases from a depth on.
    fn close(&mut self, depth: usize) {
        while self.open.len() > depth
            && let Some((name, begin)) = self.open.pop()
        {
            // There are no more open ones than rows.
            self.phases.push((name, begin, self.now, self.open.len() as u32));
        }
    }

    /// Returns the phases and notes.
    pub(super) fn finish(mut self) -> (Vec<LogPhase>, Vec<String>) {
        self.close(0);
        (self.phases, self.notes)
    }
}
