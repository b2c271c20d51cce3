//! The result of a replay on one screen: at most 24 lines of 80 columns.

use super::{
    report::{ReplayFailure, ReplayReport, Round, Search, Timing},
    tally::Tally,
};
use crate::{
    cli::{Allocator, DEFAULT_LAG},
    output::{WIDTH, row},
};
use aquifer_benches::console::{
    figures::{Count, Nanoseconds, Of},
    layout::{clip, clip_middle, wrap},
};
use aquifer_core::Bytes;

/// Lines of the screen.
#[cfg(test)]
const HEIGHT: usize = 24;
/// Maximum lines for the reason of a failure.
const REASON: usize = 5;
/// Maximum lines for the first violations.
const EXAMPLES: usize = 3;
/// Indentation of both.
const INDENT: usize = 4;

impl ReplayReport {
    /// Returns the screen, without a newline after the last line.
    pub(crate) fn to_screen(&self) -> String {
        let mut lines = vec![self.title(), self.subtitle(), String::new()];
        if let Some(failure) = &self.failure {
            self.failed(failure, &mut lines);
        }
        self.memory(&mut lines);
        self.cost(&mut lines);
        self.checks(&mut lines);
        lines.join("\n")
    }

    fn title(&self) -> String {
        let label = "aquifer replay  ";
        format!("{label}{}", clip_middle(&self.trace, WIDTH - label.len()))
    }

    fn subtitle(&self) -> String {
        let budget = match self.budget {
            Some(bytes) => format!(", budget {}", Bytes(bytes)),
            None => String::new(),
        };
        let order = if self.ignore_order { ", use tracking off" } else { "" };
        let split = self.split.map_or(String::new(), |streams| {
            format!(", split over {}", Of(streams.into(), "stream"))
        });
        let change = self.change.map_or(String::new(), |of| format!(", {of} % changed"));
        let lag = self.lag_named().map_or(String::new(), |lag| format!(", lag {lag}"));
        clip(
            &format!(
                "on the {}{lag}, {}{split}{change}{budget}{order}",
                self.device_title,
                named(self.allocator)
            ),
            WIDTH,
        )
    }

    /// Returns the lag of the simulated device, unless it is the default.
    fn lag_named(&self) -> Option<u32> {
        self.lag.filter(|&lag| lag != DEFAULT_LAG)
    }

    fn failed(&self, failure: &ReplayFailure, lines: &mut Vec<String>) {
        let round = match failure.round {
            1 => String::new(),
            round => format!(" of round {round}"),
        };
        let done = format!("{} operations{round} went well, then:", Count(failure.operations));
        row(lines, "completed", "no", &done);
        lines.extend(reason(&failure.said));
    }

    fn memory(&self, lines: &mut Vec<String>) {
        row(
            lines,
            "operations",
            &Count(self.operations).to_string(),
            &format!(
                "{}, {}, {}",
                Of(self.allocations, "allocation"),
                Of(self.frees, "free"),
                Of(self.streams.into(), "stream")
            ),
        );
        // Shown only if there is neither a failure nor a violation: the screen has no room for all.
        if let (Some(device), None, 0) = (self.of_device, &self.failure, self.violations.count)
            && device > 0
        {
            row(lines, "recorded on", &format!("device {device}"), "");
        }
        row(
            lines,
            "peak live",
            &Bytes(self.peak_live).to_string(),
            &format!("{} bytes; {} live or in use", Count(self.peak_live), Bytes(self.peak_active)),
        );
        let times =
            |bytes: u64| format!("{:.4} x live", bytes as f64 / self.peak_live.max(1) as f64);
        let (worst, round) = self.worst_physical();
        let remark = match (&self.failure, round) {
            // The trace's peak may be in the part that was not played.
            (Some(_), _) => "until then".to_owned(),
            (None, Some(round)) => {
                let first = self.peak_physical as f64 / self.peak_live.max(1) as f64;
                format!("{} in round {round}; {first:.4} x when checked", times(worst))
            }
            (None, None) => times(worst),
        };
        row(lines, "peak physical", &Bytes(worst).to_string(), &remark);
        if let Some(plan) = self.plan {
            let all = plan.hits + plan.strays;
            let hits = format!("{:.1} %", plan.hits as f64 / all.max(1) as f64 * 100.0);
            let remark = format!(
                "{} of {}; {}, {}",
                Count(plan.hits),
                Of(all, "allocation"),
                Of(plan.overlaps, "overlap"),
                Of(plan.resynchronisations, "resynchronisation"),
            );
            row(lines, "plan hits", &hits, &remark);
        }
        match &self.fit {
            Some(Search::Found(fit)) => {
                let ratio = fit.bytes as f64 / self.peak_live.max(1) as f64;
                row(
                    lines,
                    "fits in",
                    &Bytes(fit.bytes).to_string(),
                    &format!("{ratio:.4} x live; holds at +0.5 % and +2 % as well"),
                );
                row(
                    lines,
                    "  at that size",
                    &per_operation(fit.timing.warm),
                    &format!(
                        "warm; first round {}, {}",
                        Nanoseconds(fit.timing.first),
                        moves(&fit.rounds)
                    ),
                );
                order(lines, &fit.rounds);
            }
            Some(Search::Nothing) => {
                row(lines, "fits in", "nothing", "not even the whole device is enough");
            }
            None => {}
        }
    }

    fn cost(&self, lines: &mut Vec<String>) {
        match self.timing {
            Some(Timing { first, warm, rounds: 1 }) => {
                debug_assert!(first == warm);
                row(
                    lines,
                    "time",
                    &per_operation(first),
                    "from empty, inside the allocator's calls",
                );
            }
            Some(Timing { first, warm, .. }) => {
                let remark =
                    format!("warm, inside the allocator; first round {}", Nanoseconds(first));
                row(lines, "time", &per_operation(warm), &remark);
            }
            None => {}
        }
        if self.fit.is_none() {
            order(lines, &self.rounds);
        }
        let total = self.driver_calls.iter().map(|(_, count)| count).sum();
        row(lines, "driver calls", &Count(total).to_string(), &self.calls());
        // The last round is the closest to a steady state.
        if let (Some(last), None) = (self.rounds.get(1..).and_then(<[_]>::last), &self.fit) {
            let (round, tally) = (self.rounds.len(), last.tally);
            let remark = format!(
                "in round {round}: {} memory, {} event calls",
                Count(tally.memory_calls),
                Count(tally.event_calls)
            );
            row(lines, "  settled", &Count(tally.driver_calls).to_string(), &remark);
        }
    }

    /// Returns the most frequent kinds of calls, as many as fit into two lines of remarks.
    fn calls(&self) -> String {
        let mut kinds = self.driver_calls.clone();
        kinds.sort_by_key(|&(name, count)| (std::cmp::Reverse(count), name));
        let (shown, more) = kinds.split_at(kinds.len().min(3));
        let mut text = shown
            .iter()
            .map(|(name, count)| format!("{name}\u{a0}{}", Count(*count)))
            .collect::<Vec<_>>();
        let rest: u64 = more.iter().map(|(_, count)| count).sum();
        if rest > 0 {
            text.push(format!("others\u{a0}{}", Count(rest)));
        }
        text.join(", ")
    }

    fn checks(&self, lines: &mut Vec<String>) {
        let early = match self.early_completions {
            0 => String::new(),
            early => format!(", {} ended early", Count(early)),
        };
        let remark =
            format!("checked; {} across streams{early}", Of(self.cross_stream_uses, "use"));
        row(lines, "accesses", &Count(self.accesses_checked).to_string(), &remark);
        let told = self.failure.is_none() && !self.violations.first.is_empty();
        let found = if told { "for example:" } else { "" };
        row(lines, "violations", &Count(self.violations.count).to_string(), found);
        let examples = self.violations.first.iter().flat_map(|violation| {
            // The violation's own line breaks are for a wider page.
            indented(&violation.split_whitespace().collect::<Vec<_>>().join(" "), INDENT)
        });
        // The reason of a failure and the result of a search take precedence.
        let room = match (&self.failure, &self.fit) {
            (Some(_), _) => 0,
            (None, Some(_)) => EXAMPLES - 1,
            (None, None) => EXAMPLES,
        };
        lines.extend(examples.take(room));
        let kept = match self.live_at_end {
            0 => String::new(),
            _ if self.failure.is_some() => String::new(),
            bytes => format!("after the replay freed the trace's last {}", Bytes(bytes)),
        };
        row(lines, "left at the end", &Bytes(self.leaked).to_string(), &kept);
    }
}

/// Describes the moves of the first round and of each later one.
fn moves(rounds: &[Round]) -> String {
    let Some((first, later)) = rounds.split_first() else { return "no move".to_owned() };
    let first = Of(first.tally.moves, "move");
    match later.len() as u64 {
        0 => first.to_string(),
        count => {
            let sum: u64 = later.iter().map(|round| round.tally.moves).sum();
            format!("{first}, then {}", Count(sum / count))
        }
    }
}

/// Describes the fences and waits of all rounds together.
fn order(lines: &mut Vec<String>, rounds: &[Round]) {
    let sum = |of: fn(&Tally) -> u64| rounds.iter().map(|round| of(&round.tally)).sum::<u64>();
    let operations = sum(|tally| tally.operations);
    if operations == 0 {
        return;
    }
    let per_thousand = |count: u64| match count as f64 * 1000.0 / operations as f64 {
        few if few < 9.95 => format!("{few:.1}"),
        many => format!("{many:.0}"),
    };
    let remark = format!(
        "per 1,000: {} fences, {} stream, {} host waits",
        per_thousand(sum(|tally| tally.fences)),
        per_thousand(sum(|tally| tally.stream_waits)),
        per_thousand(sum(|tally| tally.host_waits))
    );
    let waits = sum(|tally| tally.stream_waits + tally.host_waits);
    row(lines, "waits", &Count(waits).to_string(), &remark);
}

/// Returns the allocator's name in words.
fn named(allocator: Allocator) -> &'static str {
    match allocator {
        Allocator::Pool => "caching pool",
        Allocator::Async => "the driver's stream-ordered allocator",
        Allocator::Direct => "a driver allocation for each block",
    }
}

fn per_operation(ns: f64) -> String {
    format!("{}/op", Nanoseconds(ns))
}

/// Returns the reason of a failure: its first lines, and its last one, which says what to do.
fn reason(said: &str) -> Vec<String> {
    let mut said: Vec<_> =
        said.lines().filter(|line| !line.trim().is_empty()).map(labelled).collect();
    let last = said.pop().map_or(Vec::new(), |line| indented(&line, INDENT));
    let room = REASON.saturating_sub(last.len());
    let mut lines = Vec::new();
    for line in said {
        let more = indented(&line, INDENT);
        if lines.len() + more.len() > room {
            break;
        }
        lines.extend(more);
    }
    lines.extend(last);
    lines.truncate(REASON);
    lines
}

/// Reformats a line of an error whose label is in a column of its own: `  do          free some`
/// becomes `  do: free some`.
fn labelled(line: &str) -> String {
    let text = line.trim_start();
    match text.split_once("  ") {
        Some((label, rest)) => {
            format!("{}{label}: {}", &line[..line.len() - text.len()], rest.trim_start())
        }
        None => line.to_owned(),
    }
}

/// Wraps `text` into lines indented by `by` columns, and by two more for continuation lines.
fn indented(text: &str, by: usize) -> Vec<String> {
    let own = text.len() - text.trim_start().len();
    let lines = wrap(text, WIDTH - by - own - 2).into_iter().enumerate();
    lines
        .map(|(at, line)| format!("{:1$}{line}", "", by + own + if at == 0 { 0 } else { 2 }))
        .collect()
}

#[cfg(test)]
mod tests;
