//! The data of a page: a JSON header and arrays, and the same header for `--json`.
//!
//! The payload is the header's length (`u32`), the header, padded with spaces so that both are a
//! multiple of 8 bytes, and the arrays, each at a multiple of 8 from the end of the header. All
//! numbers are little-endian.

use super::{
    analysis::{PeakState, RunAnalysis},
    curves::{CurveLevel, Series},
    failure::{self, FailureGroup},
    holders,
    selection::BlockSelection,
};
use aquifer_formats::{
    history::{AddressSource, HistoryClock, HistoryMark, HistoryPhase, MarkKind, MemoryHistory},
    trace::TraceDevice,
};
use serde_json::{Value, json};
use std::collections::HashMap;

/// The most marks of a kind in a page, and the most phases.
const MOST_MARKS: usize = 5000;

/// One analysed input.
#[derive(Debug)]
pub(crate) struct ReportRun {
    /// The file's name.
    pub(crate) name: String,
    /// Its history.
    pub(crate) history: MemoryHistory,
    /// The analysis of it.
    pub(crate) analysis: RunAnalysis,
}

/// The peak of live bytes of one device in one input. `--fail-over` checks each.
#[derive(Debug)]
pub(crate) struct DevicePeak {
    /// The file's name.
    pub(crate) name: String,
    /// The device, if the input tells.
    pub(crate) device: Option<TraceDevice>,
    /// The bytes.
    pub(crate) live: u64,
}

/// Arrays behind a header.
#[derive(Default, Debug)]
pub(crate) struct ArrayStore {
    bytes: Vec<u8>,
}

impl ArrayStore {
    fn push<const N: usize>(&mut self, kind: &str, values: impl Iterator<Item = [u8; N]>) -> Value {
        self.bytes.resize(self.bytes.len().next_multiple_of(8), 0);
        let at = self.bytes.len();
        values.for_each(|value| self.bytes.extend(value));
        json!({ "type": kind, "at": at, "len": (self.bytes.len() - at) / N })
    }

    fn f64s(&mut self, values: impl Iterator<Item = f64>) -> Value {
        self.push("f64", values.map(f64::to_le_bytes))
    }

    fn u8s(&mut self, values: impl Iterator<Item = u8>) -> Value {
        self.push("u8", values.map(u8::to_le_bytes))
    }

    fn u32s(&mut self, values: impl Iterator<Item = u32>) -> Value {
        self.push("u32", values.map(u32::to_le_bytes))
    }

    /// Returns the payload.
    pub(crate) fn payload(self, header: &Value) -> Vec<u8> {
        let mut text = header.to_string().into_bytes();
        text.resize((text.len() + 4).next_multiple_of(8) - 4, b' ');
        // A header is far below 4 GiB: its parts are bounded, and texts are those of the input.
        let mut payload = u32::try_from(text.len()).unwrap_or(u32::MAX).to_le_bytes().to_vec();
        debug_assert!((payload.len() + text.len()).is_multiple_of(8), "arrays are aligned");
        payload.extend(text);
        payload.extend(self.bytes);
        payload
    }
}

/// The header. Runs that are compared follow each other.
fn header(runs: Vec<Value>, analysed: &[ReportRun]) -> Value {
    let compared = analysed.as_chunks().0.iter().map(|[first, second]: &[ReportRun; 2]| {
        let (a, b) = (&first.analysis, &second.analysis);
        let mut compared = holders::compare([a.peak.live, b.peak.live], [&a.holders, &b.holders]);
        compared["device"] = json!(first.device());
        compared
    });
    json!({
        "version": 2,
        "product": concat!("aquifer ", env!("CARGO_PKG_VERSION")),
        "runs": runs,
        "comparisons": compared.collect::<Vec<_>>(),
    })
}

impl ReportRun {
    /// Returns the device whose memory this is, if the input tells.
    pub(crate) fn device(&self) -> Option<String> {
        self.history.device.map(|device| device.to_string())
    }
}

/// Returns what `--json` prints: the header of the page, with names in the place of arrays and
/// numbers.
pub(crate) fn summary(runs: &[ReportRun], peaks: &[DevicePeak]) -> Value {
    let describe = |run: &ReportRun| {
        let mut value = common(run);
        let history = &run.history;
        let series = run.analysis.curve_sets().flat_map(|curves| {
            curves.series.iter().enumerate().filter_map(|(place, series)| {
                let [first, last, min, max] = curves.ends(place)?;
                let name = series.name();
                Some(json!({
                    "name": name, "unit": "bytes",
                    "first": first, "last": last, "min": min, "max": max,
                }))
            })
        });
        value["series"] = series.collect();
        value["blocks"] = json!(history.blocks.len());
        value["bands"] = Value::Null;
        value["holders"] = run.analysis.holders.to_json(|stack| {
            let frames = history.stacks.get(stack).iter();
            frames.map(|frame| history.names.get(*frame)).collect()
        });
        value
    };
    let mut header = header(runs.iter().map(describe).collect(), runs);
    header["peaks"] = peaks
        .iter()
        .map(|DevicePeak { name, device, live }| {
            json!({ "name": name, "device": device.map(|device| device.to_string()), "live": live })
        })
        .collect();
    header
}

/// Returns the payload of a page with the blocks of each run that are selected, and the levels of
/// curves from `finest` on.
pub(crate) fn payload(runs: &[ReportRun], selections: &[BlockSelection], finest: usize) -> Vec<u8> {
    let mut arrays = ArrayStore::default();
    let described = runs.iter().zip(selections);
    let described =
        described.map(|(run, selection)| describe(run, selection, finest, &mut arrays)).collect();
    arrays.payload(&header(described, runs))
}

/// The parts of a run that a page and `--json` share.
fn common(run: &ReportRun) -> Value {
    let ReportRun { name, history, analysis } = run;
    let (markers, left_out) = markers(history);
    let notes: Vec<_> = history.notes.iter().chain(&analysis.notes).collect();
    json!({
        "name": name,
        "format": history.format.name(),
        "device": run.device(),
        "devices": history.devices.iter().map(ToString::to_string).collect::<Vec<_>>(),
        "notes": notes,
        "clock": match history.clock {
            HistoryClock::Microseconds => "us",
            HistoryClock::Events => "events",
        },
        "start": 0,
        "end": history.end,
        "events": history.events,
        "addresses": match history.addresses {
            AddressSource::Recorded => "recorded",
            AddressSource::Packed => "packed",
        },
        "address_spans": history.spans.iter().map(|span| json!({
            "start": format!("{:#x}", span.start), "bytes": span.bytes, "at": span.at,
        })).collect::<Vec<_>>(),
        "address_height": history.address_height,
        "markers": markers,
        "markers_left_out": left_out,
        "phases": phases(history),
        "peak": peak(&analysis.peak),
        "slack": analysis.slack(),
        "fragmentation": {
            "at": analysis.peak.time,
            "free": analysis.peak.free.map(|(free, _)| free),
            "largest_free": analysis.peak.free.map(|(_, largest)| largest),
        },
        "failures": analysis.failures.iter().map(|failure| failure.to_json()).collect::<Vec<_>>(),
        "failures_left_out": analysis.failed - analysis.failures.len(),
        "failure_groups": failure::groups(history).iter().map(FailureGroup::to_json).collect::<Vec<_>>(),
        "live_at_end": analysis.live_at_end,
    })
}

fn peak(peak: &PeakState) -> Value {
    json!({
        "t": peak.time,
        "event": peak.event,
        "live": peak.live,
        "requested": peak.live,
        "pending": peak.pending,
        "cached": peak.cached,
        "physical": peak.physical,
        "limit": peak.limit,
        "outside": peak.outside,
        "blocks": peak.blocks,
    })
}

/// Returns the phases: the outermost and longest, if there are more than a page may have.
fn phases(history: &MemoryHistory) -> Vec<Value> {
    let mut phases: Vec<_> = history.phases.iter().collect();
    phases.sort_by(|a, b| {
        (a.depth.cmp(&b.depth)).then((b.end - b.begin).total_cmp(&(a.end - a.begin)))
    });
    phases.truncate(MOST_MARKS);
    phases.sort_by(|a, b| a.begin.total_cmp(&b.begin).then(a.depth.cmp(&b.depth)));
    let row = |phase: &&HistoryPhase| {
        let text = history.names.get(phase.name);
        json!({ "t": phase.begin, "end": phase.end, "depth": phase.depth, "text": text })
    };
    phases.iter().map(row).collect()
}

/// Returns the marks, at most as many of a kind as a page may have, and how many of each kind are
/// left out. Those that stay are spread evenly.
fn markers(history: &MemoryHistory) -> (Vec<Value>, Value) {
    let count = |kind| history.marks.iter().filter(|mark| mark.kind == kind).count();
    let counts: HashMap<MarkKind, usize> =
        MarkKind::ALL.into_iter().map(|kind| (kind, count(kind))).collect();
    let mut seen: HashMap<MarkKind, usize> = HashMap::new();
    let mut rows = Vec::new();
    for HistoryMark { time, kind, bytes, text, .. } in &history.marks {
        let place = seen.entry(*kind).or_default();
        let step = counts[kind].div_ceil(MOST_MARKS);
        if place.is_multiple_of(step) {
            let text = history.names.get(*text);
            rows.push(json!({ "t": time, "kind": kind.name(), "bytes": bytes, "text": text }));
        }
        *place += 1;
    }
    let left_out = MarkKind::ALL.into_iter().filter_map(|kind| {
        let all = counts[&kind];
        let shown = all.div_ceil(all.div_ceil(MOST_MARKS).max(1));
        (all > shown).then(|| (kind.name().to_owned(), json!(all - shown)))
    });
    (rows, Value::Object(left_out.collect()))
}

/// Texts and stacks of a page, numbered anew so that those of left out blocks are left out.
struct PageTexts<'a> {
    history: &'a MemoryHistory,
    texts: Vec<&'a str>,
    numbers: HashMap<&'a str, u32>,
    stacks: Vec<Vec<u32>>,
    stack_numbers: HashMap<u32, u32>,
}

impl<'a> PageTexts<'a> {
    fn new(history: &'a MemoryHistory) -> Self {
        let (texts, numbers) = (vec![""], HashMap::from([("", 0)]));
        let (stacks, stack_numbers) = (vec![Vec::new()], HashMap::from([(0, 0)]));
        Self { history, texts, numbers, stacks, stack_numbers }
    }

    fn text(&mut self, text: &'a str) -> u32 {
        let texts = &mut self.texts;
        // As many texts as a history has, whose numbers fit.
        *self.numbers.entry(text).or_insert_with(|| {
            texts.push(text);
            (texts.len() - 1) as u32
        })
    }

    fn name(&mut self, name: u32) -> u32 {
        self.text(self.history.names.get(name))
    }

    fn stack(&mut self, stack: u32) -> u32 {
        if let Some(&number) = self.stack_numbers.get(&stack) {
            return number;
        }
        let history = self.history;
        let frames = history.stacks.get(stack).iter().map(|frame| self.name(*frame)).collect();
        self.stacks.push(frames);
        let number = (self.stacks.len() - 1) as u32;
        self.stack_numbers.insert(stack, number);
        number
    }
}

fn describe(
    run: &ReportRun,
    selection: &BlockSelection,
    finest: usize,
    arrays: &mut ArrayStore,
) -> Value {
    let mut value = common(run);
    let (history, blocks) = (&run.history, &run.history.blocks);
    let kept = || selection.kept.iter().map(|block| *block as usize);
    let mut texts = PageTexts::new(history);
    let mut names =
        |column: &[u32]| -> Vec<u32> { kept().map(|block| texts.name(column[block])).collect() };
    let (stream, thread, tag) = (names(&blocks.stream), names(&blocks.thread), names(&blocks.tag));
    let metadata = names(&blocks.metadata);
    let stack: Vec<u32> = kept().map(|block| texts.stack(blocks.stack[block])).collect();
    let kind: Vec<u32> =
        kept().map(|block| texts.text(blocks.kind[block].map_or("", |kind| kind.name()))).collect();
    value["holders"] = run.analysis.holders.to_json(|stack| json!(texts.stack(stack)));
    value["blocks"] = json!({
        "birth": arrays.f64s(kept().map(|block| blocks.birth[block])),
        "freed": arrays.f64s(kept().map(|block| blocks.freed[block])),
        "end": arrays.f64s(kept().map(|block| blocks.end[block])),
        "offset": arrays.f64s(kept().map(|block| history.offset(blocks.address[block]) as f64)),
        "bytes": arrays.f64s(kept().map(|block| blocks.bytes[block] as f64)),
        "requested": arrays.f64s(kept().map(|block| blocks.requested[block] as f64)),
        "stream": arrays.u32s(stream.into_iter()),
        "thread": arrays.u32s(thread.into_iter()),
        "tag": arrays.u32s(tag.into_iter()),
        "stack": arrays.u32s(stack.into_iter()),
        "kind": arrays.u32s(kind.into_iter()),
        "metadata": arrays.u32s(metadata.into_iter()),
    });
    value["bands"] = match &selection.bands {
        None => Value::Null,
        Some(bands) => json!({
            "below": bands.below,
            "count": bands.count,
            "t": arrays.f64s(bands.times.iter().copied()),
            "live": arrays.f64s(bands.live.iter().copied()),
            "grid": bands.grid.as_ref().map(|grid| json!({
                "row_bytes": grid.row_bytes,
                "rows": arrays.f64s(grid.rows.iter().map(|row| *row as f64)),
                "columns": grid.columns,
                "counts": arrays.u32s(grid.counts.iter().copied()),
                "shares": arrays.u8s(grid.shares.iter().copied()),
            })),
        }),
    };
    if let (Some(bands), Some(notes)) = (&selection.bands, value["notes"].as_array_mut()) {
        notes.push(json!(bands.note()));
    }
    let levels = run.analysis.curves.levels_from(finest);
    let left_out = run.analysis.curves.levels.len() - levels.len();
    if let (1.., Some(notes)) = (left_out, value["notes"].as_array_mut()) {
        notes.push(json!(format!(
            "the finest levels of the curves are left out to keep this file small: {left_out}"
        )));
    }
    let mut all = series(&run.analysis.curves.series, levels, arrays);
    for set in &run.analysis.sparse {
        all.extend(series(&set.series, set.levels_from(finest), arrays));
    }
    value["series"] = all.into();
    value["strings"] = json!(texts.texts);
    value["stacks"] = json!(texts.stacks);
    value
}

fn series(series: &[Series], levels: &[CurveLevel], arrays: &mut ArrayStore) -> Vec<Value> {
    let times: Vec<Value> =
        levels.iter().map(|level| arrays.f64s(level.times.iter().copied())).collect();
    let series = series.iter().enumerate().map(|(place, series)| {
        let level = |(level, times): (&CurveLevel, &Value)| {
            let columns = &level.columns[place];
            let last = arrays.f64s(columns.last.iter().copied());
            let mut of = |values: &[f64]| match values {
                // Each point is a single change, so all columns are one.
                [] => last.clone(),
                values => arrays.f64s(values.iter().copied()),
            };
            let (min, max) = (of(&columns.min), of(&columns.max));
            json!({ "t": times, "min": min, "max": max, "last": last })
        };
        let levels: Vec<_> = levels.iter().zip(&times).map(level).collect();
        json!({ "name": series.name(), "unit": "bytes", "levels": levels })
    });
    series.collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::text;
    use aquifer_benches::console::progress::ProgressLine;

    #[test]
    fn phases_and_attached_texts_are_in_the_text_the_json_and_the_page() {
        let rows = "t_us,op,id,bytes,stream,kind,device,tag\n\
            0,a,1,10,0,cached,0,step\n2,a,2,30,0,cached,0,forward\n9,f,2,30,0,cached,0,forward\n";
        let mut history = MemoryHistory::from_reader(rows.as_bytes(), None).unwrap();
        // Their names are those of the tags.
        let [step, forward] = [0, 1].map(|block| history.blocks.tag[block]);
        let phase = |name, begin, end, depth| HistoryPhase { name, begin, end, depth };
        history.phases = vec![phase(step, 0.0, 9.0, 0), phase(forward, 2.0, 5.0, 1)];
        history.blocks.metadata = vec![0, step];
        let analysis = RunAnalysis::of(&history, &mut ProgressLine::on_terminal());
        let runs = [ReportRun { name: "a.csv".to_owned(), history, analysis }];
        let header = summary(&runs, &[]);
        let run = &header["runs"][0];
        let expected = json!([
            { "t": 0.0, "end": 9.0, "depth": 0, "text": "step" },
            { "t": 2.0, "end": 5.0, "depth": 1, "text": "forward" },
        ]);
        assert_eq!(run["phases"], expected);
        let expected = json!([
            { "name": "step", "bytes": 30, "blocks": 1 }, { "name": "", "bytes": 10, "blocks": 1 },
        ]);
        assert_eq!(run["holders"]["metadata"], expected);
        let text = text::text(&runs);
        assert!(text.contains("in phase      step > forward\n"), "{text}");
        assert!(text.contains("at the peak, by metadata\n"), "{text}");
        let payload = payload(&runs, &[BlockSelection::largest(&runs[0].history, 9, 0)], 0);
        let length = u32::from_le_bytes(payload[..4].try_into().unwrap()) as usize;
        let page: Value = serde_json::from_slice(&payload[4..4 + length]).unwrap();
        assert_eq!(page["runs"][0]["phases"], run["phases"]);
        let at =
            4 + length + page["runs"][0]["blocks"]["metadata"]["at"].as_u64().unwrap() as usize;
        let texts =
            payload[at..at + 8].as_chunks().0.iter().map(|bytes| u32::from_le_bytes(*bytes));
        let texts: Vec<_> =
            texts.map(|text| page["runs"][0]["strings"][text as usize].clone()).collect();
        assert_eq!(texts, ["", "step"]);
    }
}
