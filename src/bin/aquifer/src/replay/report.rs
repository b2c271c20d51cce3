//! The result of a replay, and its JSON form.

use super::{tally::Tally, work::Violations};
use crate::cli::Allocator;
use aquifer_benches::console::json;
use aquifer_core::PoolStats;
use serde_json::{Value, json};

/// The complete result of a replay.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct ReplayReport {
    /// The trace, as named on the command line.
    pub(crate) trace: String,
    /// The device, as on the command line: `sim`, `cuda:0`.
    pub(crate) device: String,
    /// The device's display name: `simulated NVIDIA H200`.
    pub(crate) device_title: String,
    /// How many operations of the trace the device ran behind, or none if it is not simulated.
    pub(crate) lag: Option<u32>,
    /// The allocator.
    pub(crate) allocator: Allocator,
    /// The requested budget in bytes, or none for the allocator's default.
    pub(crate) budget: Option<u64>,
    /// Whether uses by other streams were hidden from the allocator.
    pub(crate) ignore_order: bool,
    /// Allocations and frees in the trace.
    pub(crate) operations: u64,
    /// Allocations in the trace.
    pub(crate) allocations: u64,
    /// Frees in the trace.
    pub(crate) frees: u64,
    /// Streams in the trace.
    pub(crate) streams: u32,
    /// The number of streams the trace was distributed over, or none if it was played as recorded.
    pub(crate) split: Option<u32>,
    /// How far the plan matched in one round from empty, if there is a plan.
    pub(crate) plan: Option<PlanMatch>,
    /// How many of a hundred allocations were changed.
    pub(crate) change: Option<u32>,
    /// The trace's peak of live bytes, in requested sizes.
    pub(crate) peak_live: u64,
    /// As `peak_live`, with a freed block counted until its recorded use by another stream is over.
    pub(crate) peak_active: u64,
    /// Bytes that the trace never frees.
    pub(crate) live_at_end: u64,
    /// The peak of bytes that the allocator held from the driver.
    pub(crate) peak_physical: u64,
    /// Where and why the trace did not complete, in the checked round or a later one, if it did
    /// not.
    pub(crate) failure: Option<ReplayFailure>,
    /// The time of the allocator's calls, or none if the trace did not complete.
    pub(crate) timing: Option<Timing>,
    /// The cost of each round besides memory. Empty if the trace did not complete.
    pub(crate) rounds: Vec<Round>,
    /// The driver calls of one round from empty, by name.
    pub(crate) driver_calls: Vec<(&'static str, u64)>,
    /// Reads and writes that were checked.
    pub(crate) accesses_checked: u64,
    /// Blocks that another stream used.
    pub(crate) cross_stream_uses: u64,
    /// Uses that were ended early because the allocator would have had to wait for memory.
    pub(crate) early_completions: u64,
    /// Accesses that were out of order or found another block's bytes.
    pub(crate) violations: Violations,
    /// Bytes that the allocator still held after all blocks were freed and it was trimmed.
    pub(crate) leaked: u64,
    /// The result of the search, if there was one.
    pub(crate) fit: Option<Search>,
    /// The device of the trace that was played, if the trace distinguishes devices.
    pub(crate) of_device: Option<u32>,
    /// Notes on the trace for the reader.
    pub(crate) notes: Vec<String>,
}

/// How far a plan matched, in counts of allocations.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct PlanMatch {
    pub(crate) hits: u64,
    pub(crate) strays: u64,
    pub(crate) overlaps: u64,
    pub(crate) resynchronisations: u64,
}

impl PlanMatch {
    pub(crate) fn of(stats: &PoolStats) -> Self {
        Self {
            hits: stats.plan_hits,
            strays: stats.plan_strays,
            overlaps: stats.plan_overlaps,
            resynchronisations: stats.plan_resynchronisations,
        }
    }

    fn to_json(self) -> Value {
        let Self { hits, strays, overlaps, resynchronisations } = self;
        json!({
            "hits": hits,
            "strays": strays,
            "overlaps": overlaps,
            "resynchronisations": resynchronisations,
        })
    }
}

/// Where and why a trace stopped.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct ReplayFailure {
    /// The round, counted from 1.
    pub(crate) round: u32,
    /// Successful allocations and frees of that round.
    pub(crate) operations: u64,
    /// The allocator's error message. It may have several lines.
    pub(crate) said: String,
}

/// The time of the allocator's calls, in nanoseconds per allocation or free.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) struct Timing {
    /// The first round, from empty.
    pub(crate) first: f64,
    /// The median of the later rounds, or the first round if it is the only one.
    pub(crate) warm: f64,
    /// The number of rounds.
    pub(crate) rounds: u32,
}

/// The cost of one round.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) struct Round {
    /// Nanoseconds per allocation or free, with no work on the streams.
    pub(crate) ns: f64,
    /// Calls, waits and moves, with work on the streams where possible.
    pub(crate) tally: Tally,
}

impl Round {
    /// Combines the timed and the counted results of each round.
    pub(crate) fn all(ns: &[f64], tallies: &[Tally]) -> Vec<Self> {
        ns.iter().zip(tallies).map(|(&ns, &tally)| Self { ns, tally }).collect()
    }

    fn to_json(self) -> Value {
        let Self { ns, tally } = self;
        json!({
            "ns_per_op": rounded(ns, 1),
            "driver_calls": tally.driver_calls,
            "memory_calls": tally.memory_calls,
            "event_calls": tally.event_calls,
            "fences": tally.fences,
            "stream_waits": tally.stream_waits,
            "host_waits": tally.host_waits,
            "moves": tally.moves,
            "peak_physical_bytes": tally.peak_physical,
        })
    }
}

/// Returns `value` rounded to `digits` decimal places.
fn rounded(value: f64, digits: i32) -> f64 {
    let scale = 10_f64.powi(digits);
    (value * scale).round() / scale
}

/// The result of the search for the smallest budget.
#[derive(Clone, PartialEq, Debug)]
pub(crate) enum Search {
    /// A budget that holds, and with which 0.5 % and 2 % more hold too.
    Found(Fit),
    /// No budget holds.
    Nothing,
}

/// The smallest budget that completes a trace.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Fit {
    /// The budget, in bytes.
    pub(crate) bytes: u64,
    /// The time of the allocator's calls with it.
    pub(crate) timing: Timing,
    /// The cost of each round with it. At least one entry.
    pub(crate) rounds: Vec<Round>,
}

impl Fit {
    /// Returns how many physical handles moved in the first round, from empty.
    pub(crate) fn moves(&self) -> u64 {
        self.rounds.first().map_or(0, |round| round.tally.moves)
    }
}

impl ReplayReport {
    /// Returns whether the trace ran to its end in every round.
    pub(crate) fn completed(&self) -> bool {
        self.failure.is_none() && self.fit != Some(Search::Nothing)
    }

    /// Returns whether the trace completed without violations and leaks.
    pub(crate) fn is_clean(&self) -> bool {
        self.completed() && self.violations.count == 0 && self.leaked == 0
    }

    /// Returns the peak of bytes held from the driver in any round, and that round, counted from 1.
    /// Returns the peak of the checked round and `None` if no round held more.
    pub(crate) fn worst_physical(&self) -> (u64, Option<usize>) {
        let rounds =
            (1..).zip(&self.rounds).map(|(round, tally)| (tally.tally.peak_physical, round));
        match rounds.max_by_key(|&(peak, round)| (peak, std::cmp::Reverse(round))) {
            Some((peak, round)) if peak > self.peak_physical => (peak, Some(round)),
            _ => (self.peak_physical, None),
        }
    }

    /// Returns the report as one JSON object.
    pub(crate) fn to_json(&self) -> String {
        let rounds = |rounds: &[Round]| rounds.iter().map(|round| round.to_json()).collect();
        let ns = |timing: Option<Timing>| timing.map_or(Value::Null, |t| json!(rounded(t.warm, 1)));
        let calls = self
            .driver_calls
            .iter()
            .map(|&(name, count)| (name.to_owned(), json!(count)))
            .collect();
        let mut fields = vec![
            ("trace", json!(self.trace)),
            ("device", json!(self.device)),
            ("lag", json!(self.lag)),
            ("allocator", json!(self.allocator.name())),
            ("ops", json!(self.operations)),
            ("allocs", json!(self.allocations)),
            ("frees", json!(self.frees)),
            ("streams", json!(self.streams)),
            ("split", json!(self.split)),
            ("changed_per_cent", json!(self.change)),
            ("plan", json!(self.plan.map(PlanMatch::to_json))),
            ("device_of_trace", json!(self.of_device)),
            ("notes", json!(self.notes)),
            ("peak_live_bytes", json!(self.peak_live)),
            ("peak_active_bytes", json!(self.peak_active)),
            ("peak_physical_bytes", json!(self.peak_physical)),
            ("peak_physical_bytes_of_all_rounds", json!(self.worst_physical().0)),
            ("completed", json!(self.completed())),
            ("failed_round", json!(self.failure.as_ref().map(|failure| failure.round))),
            ("ns_per_op", ns(self.timing)),
            ("driver_calls", Value::Object(calls)),
            ("accesses_checked", json!(self.accesses_checked)),
            ("cross_stream_uses", json!(self.cross_stream_uses)),
            ("early_completions", json!(self.early_completions)),
            ("violations", json!(self.violations.count)),
            ("leaked_bytes", json!(self.leaked)),
            ("rounds", rounds(&self.rounds)),
        ];
        if let Some(search) = &self.fit {
            let fit = match search {
                Search::Found(fit) => Some(fit),
                Search::Nothing => None,
            };
            fields.push(("fit_bytes", json!(fit.map(|f| f.bytes))));
            fields.push(("ns_per_op_at_fit", ns(fit.map(|f| f.timing))));
            fields.push(("moves_at_fit", json!(fit.map(Fit::moves))));
            fields.push(("rounds_at_fit", rounds(fit.map_or(&[], |f| &f.rounds))));
        }
        json::object(&fields)
    }
}
