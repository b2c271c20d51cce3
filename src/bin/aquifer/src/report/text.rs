//! The report as text for logs: at most 60 lines of 80 columns.

use super::{
    data::ReportRun,
    failure,
    holders::{Holder, HolderGroup, signed},
};
pub(crate) use aquifer_benches::console::foreign::printable;
use aquifer_benches::console::{
    figures::{Count, Nanoseconds, Of},
    layout::{clip, clip_middle, wrap},
};
use aquifer_core::Bytes;
use aquifer_formats::history::{HistoryClock, MarkKind};
use std::collections::HashMap;

/// Columns.
const WIDTH: usize = 80;
/// Lines.
const HEIGHT: usize = 60;
/// The most holders that a table shows.
const HOLDERS: usize = 5;
/// Failures that are shown, and lines of each.
const FAILURES: usize = 2;
const FAILURE_LINES: usize = 8;
/// Notes that are shown.
const NOTES: usize = 2;

/// Returns the text, without a newline after the last line.
pub(crate) fn text(runs: &[ReportRun]) -> String {
    // Tables become shorter until all fits.
    let mut lines = compose(runs, HOLDERS);
    for holders in (0..HOLDERS).rev() {
        if lines.len() <= HEIGHT {
            break;
        }
        lines = compose(runs, holders);
    }
    lines.truncate(HEIGHT);
    let lines: Vec<_> = lines.iter().map(|line| clip(line, WIDTH)).collect();
    lines.join("\n")
}

fn compose(runs: &[ReportRun], holders: usize) -> Vec<String> {
    let mut lines = Vec::new();
    if let [first, second, _, ..] = runs {
        // A pair for each device: their differences alone fit.
        let names = [("aquifer report  ", first), ("           and  ", second)];
        lines.extend(names.map(|(label, run)| {
            format!("{label}{}", clip_middle(&printable(&run.name), WIDTH - label.len()))
        }));
    } else {
        for run in runs {
            if !lines.is_empty() {
                lines.push(String::new());
            }
            describe(run, holders, runs.len() == 1, &mut lines);
        }
    }
    for [first, second] in runs.as_chunks().0 {
        compare(first, second, holders, &mut lines);
    }
    lines
}

fn describe(run: &ReportRun, holders: usize, alone: bool, lines: &mut Vec<String>) {
    let (history, analysis) = (&run.history, &run.analysis);
    let peak = &analysis.peak;
    let label = "aquifer report  ";
    lines.push(format!("{label}{}", clip_middle(&run.name, WIDTH - label.len())));
    let mut facts = vec![
        Of(history.events, history.unit()).to_string(),
        Of(history.blocks.len() as u64, "block").to_string(),
    ];
    if let Some(device) = history.device {
        facts.push(format!("device {device}"));
    }
    if history.clock == HistoryClock::Microseconds {
        facts.push(format!("{}", Nanoseconds(history.end * 1000.0)));
    }
    lines.push(facts.join(", "));
    lines.push(String::new());
    let when = match history.clock {
        HistoryClock::Microseconds => format!(" at {}", Nanoseconds(peak.time * 1000.0)),
        HistoryClock::Events => String::new(),
    };
    let remark = format!(
        "in {}{when}, {} {}",
        Of(peak.blocks, "block"),
        history.unit(),
        Count(peak.event.into())
    );
    row(lines, "peak live", peak.live, &remark);
    let of = |bytes: u64| format!("{:.1} % of the peak", percent(bytes, peak.live));
    let parts = [
        ("rounding", peak.rounding, "what blocks occupy above their requested bytes"),
        (
            "pending",
            (peak.pending > 0).then_some(peak.pending),
            "freed, still in use by another stream",
        ),
        ("cached", peak.cached, "physical memory that no block occupies"),
        (
            "graphs",
            peak.graphs.filter(|bytes| *bytes > 0),
            "of the live bytes: blocks of captured graphs",
        ),
        ("physical", peak.physical, "held from the driver"),
        ("limit", peak.limit, "the most that may be held"),
        ("outside", peak.outside, "in use on the device beside that: contexts, others"),
        (
            "pinned",
            peak.pinned.filter(|bytes| *bytes > 0),
            "host memory at that time, not the device's",
        ),
    ];
    for (name, bytes, remark) in parts {
        if let Some(bytes) = bytes {
            row(lines, name, bytes, remark);
        }
    }
    let phases =
        history.phases.iter().filter(|phase| (phase.begin..=phase.end).contains(&peak.time));
    let mut phases: Vec<_> = phases.collect();
    phases.sort_by_key(|phase| phase.depth);
    if !phases.is_empty() {
        let names: Vec<_> = phases.iter().map(|phase| history.names.get(phase.name)).collect();
        lines.push(format!("{:<14}{}", "in phase", names.join(" > ")));
    }
    if let Some((free, largest)) = peak.free {
        row(lines, "free between", free, &format!("{} in one piece", Bytes(largest)));
    }
    if analysis.live_at_end > 0 {
        row(lines, "never freed", analysis.live_at_end, &of(analysis.live_at_end));
    }
    let marks = MarkKind::ALL.into_iter().filter_map(|kind| {
        let count = history.marks.iter().filter(|mark| mark.kind == kind).count() as u64;
        (count > 0).then(|| Of(count, kind.name()).to_string())
    });
    let marks: Vec<_> = marks.collect();
    if !marks.is_empty() {
        lines.push(format!("{:<14}{}", "marks", marks.join(", ")));
    }
    for failure in analysis.failures.iter().take(if alone { FAILURES } else { 1 }) {
        lines.push(String::new());
        let mut shown = Vec::new();
        for (place, line) in failure.text.iter().enumerate() {
            let (first, rest) = if place == 0 { ("failed  ", "        ") } else { ("  ", "    ") };
            for (part, text) in wrap(line, WIDTH - 8).into_iter().enumerate() {
                shown.push(format!("{}{text}", if part == 0 { first } else { rest }));
            }
        }
        shown.truncate(FAILURE_LINES);
        lines.extend(shown);
    }
    if analysis.failed > FAILURES && alone {
        let groups: Vec<_> = failure::groups(history)
            .iter()
            .take(HOLDERS)
            .map(|group| {
                let whose = match group.tag {
                    "" => format!("{} untagged", Count(group.count)),
                    tag => format!("{} for {tag}", Count(group.count)),
                };
                match group.refused_by {
                    "" => whose,
                    by => format!("{whose} refused by {by}"),
                }
            })
            .collect();
        let all = Of(analysis.failed as u64, "request");
        let line = format!("{all} failed in all: {}", groups.join(", "));
        for (part, text) in wrap(&line, WIDTH - 4).into_iter().enumerate() {
            lines.push(format!("{}{text}", if part == 0 { "  " } else { "    " }));
        }
    }
    for by in HolderGroup::ALL {
        let all = analysis.holders.by(by);
        // Where nothing has a name, or all is one group, a table tells nothing.
        let tells =
            by == HolderGroup::Size || all.len() > 1 || all.iter().any(|one| !one.name.is_empty());
        if tells && (alone || by == HolderGroup::Tag || by == HolderGroup::Size) {
            lines.push(String::new());
            table(by, all, peak.live, holders, lines);
        }
    }
    if alone {
        let mut notes = Vec::new();
        for note in history.notes.iter().chain(&analysis.notes).take(NOTES) {
            for (part, text) in wrap(note, WIDTH - 6).into_iter().enumerate() {
                notes.push(format!("{}{text}", if part == 0 { "note  " } else { "      " }));
            }
        }
        if !notes.is_empty() {
            lines.push(String::new());
            lines.extend(notes);
        }
    }
}

fn row(lines: &mut Vec<String>, name: &str, bytes: u64, remark: &str) {
    lines.push(format!("{name:<14}{:>12}  {remark}", Bytes(bytes).to_string()));
}

fn percent(part: u64, whole: u64) -> f64 {
    part as f64 * 100.0 / whole.max(1) as f64
}

fn table(by: HolderGroup, all: &[Holder], whole: u64, most: usize, lines: &mut Vec<String>) {
    lines.push(format!("at the peak, by {}", by.name()));
    for holder in all.iter().take(most) {
        let name = if holder.name.is_empty() { "none" } else { &holder.name };
        let (share, blocks) = (percent(holder.bytes, whole), Count(holder.blocks).to_string());
        let bytes = Bytes(holder.bytes).to_string();
        lines.push(format!("  {bytes:>12} {share:>5.1} % {blocks:>9}  {}", clip(name, 44)));
    }
    if let Some(rest) = all.get(most..).filter(|rest| !rest.is_empty()) {
        let bytes = rest.iter().map(|holder| holder.bytes).sum();
        let blocks: u64 = rest.iter().map(|holder| holder.blocks).sum();
        let (share, blocks) = (percent(bytes, whole), Count(blocks).to_string());
        let bytes = Bytes(bytes).to_string();
        lines.push(format!("  {bytes:>12} {share:>5.1} % {blocks:>9}  in {} more", rest.len()));
    }
}

fn compare(first: &ReportRun, second: &ReportRun, most: usize, lines: &mut Vec<String>) {
    let (a, b) = (&first.analysis, &second.analysis);
    lines.push(String::new());
    let peaks = [a.peak.live, b.peak.live];
    let device = first.device().map_or_else(String::new, |device| format!(" of device {device}"));
    lines.push(format!(
        "difference at the peaks{device}: {}, from {} to {}",
        difference(peaks),
        Bytes(peaks[0]),
        Bytes(peaks[1])
    ));
    for by in [HolderGroup::Tag, HolderGroup::Size] {
        let mut bytes: HashMap<&str, [u64; 2]> = HashMap::new();
        for (run, analysis) in [a, b].into_iter().enumerate() {
            for holder in analysis.holders.by(by) {
                bytes.entry(&holder.name).or_default()[run] += holder.bytes;
            }
        }
        let mut rows: Vec<_> = bytes.into_iter().filter(|(_, [a, b])| a != b).collect();
        rows.sort_unstable_by_key(|&(name, bytes)| {
            (std::cmp::Reverse(signed(bytes).unsigned_abs()), name)
        });
        for (name, bytes) in rows.into_iter().take(most) {
            let name = if name.is_empty() { "none" } else { name };
            let name = format!("{} {name}", by.name());
            lines.push(format!("  {:>13}  {}", difference(bytes), clip(&name, 60)));
        }
    }
}

fn difference(bytes: [u64; 2]) -> String {
    let by = signed(bytes);
    format!("{}{}", if by < 0 { "-" } else { "+" }, Bytes(by.unsigned_abs()))
}
