//! The analysis of one history: one pass for the peak, and one for everything else.
//!
//! - `live` counts requested bytes of allocated blocks, as `aquifer replay` does.
//! - `pending` counts bytes of freed blocks whose last use is not over.
//! - `cached` is physical memory less what live and pending blocks occupy.
//! - `free` and `largest_free` count what lies between blocks: in mapped ranges if the input tells
//!   them, else in the address ranges that were ever used.

use super::{
    curves::{CurveBuilder, CurveSet, Series},
    failure::{FailureNote, FailureState, tells_extents},
    holders::Holders,
};
use aquifer_benches::console::progress::ProgressLine;
use aquifer_core::event::BlockKind;
use aquifer_formats::history::{ExtentTree, HistoryAction, HistoryStep, MarkKind, MemoryHistory};
use serde_json::{Value, json};
use std::ops::Range;

/// The most failures that are explained.
const MOST_FAILURES: usize = 32;
/// Steps between two updates of the progress line.
const STRIDE: usize = 1 << 14;

/// The state at the peak of live bytes.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) struct PeakState {
    /// The time.
    pub(crate) time: f64,
    /// The row or event.
    pub(crate) event: u32,
    /// Requested bytes of allocated blocks.
    pub(crate) live: u64,
    /// What allocated blocks occupy above that, if the input tells of any block.
    pub(crate) rounding: Option<u64>,
    /// Allocated blocks of which the input tells what they occupy.
    pub(crate) exact: u64,
    /// Bytes of freed blocks whose last use is not over.
    pub(crate) pending: u64,
    /// Physical bytes that no block occupies, if known.
    pub(crate) cached: Option<u64>,
    /// Physical bytes, if known.
    pub(crate) physical: Option<u64>,
    /// Requested bytes of blocks of captured graphs, if the input tells kinds.
    pub(crate) graphs: Option<u64>,
    /// Pinned host memory at that time, if the input tells.
    pub(crate) pinned: Option<u64>,
    /// The limit at that time, if the input tells one.
    pub(crate) limit: Option<u64>,
    /// What the device had in use outside of the pool at that time, if the input tells.
    pub(crate) outside: Option<u64>,
    /// Allocated blocks.
    pub(crate) blocks: u64,
    /// Free bytes and the largest free extent, if addresses are known.
    pub(crate) free: Option<(u64, u64)>,
}

/// The result of the analysis.
#[derive(Debug)]
pub(crate) struct RunAnalysis {
    /// The peak.
    pub(crate) peak: PeakState,
    /// The holders at the peak.
    pub(crate) holders: Holders,
    /// The curves that change with each step.
    pub(crate) curves: CurveSet,
    /// The curves with times of their own, as far as the input tells them: the limit, what is in
    /// use outside of the pool, and pinned host memory.
    pub(crate) sparse: Vec<CurveSet>,
    /// The explained failures.
    pub(crate) failures: Vec<FailureNote>,
    /// The number of failures.
    pub(crate) failed: usize,
    /// Requested bytes of blocks that are never freed.
    pub(crate) live_at_end: u64,
    /// Notes for the reader.
    pub(crate) notes: Vec<String>,
}

/// Returns the peak of live bytes, the index of the step that first reaches it, and the number of
/// steps that change a curve.
pub(crate) fn find_peak(history: &MemoryHistory) -> (u64, usize, u64) {
    let (mut live, mut peak, mut at, mut changes) = (0_u64, 0, 0, 0);
    for (place, step) in history.steps.iter().enumerate() {
        changes += u64::from(changes_curves(history, *step));
        match step.action() {
            HistoryAction::Allocate => {
                live += history.blocks.requested[step.index()];
                if live > peak {
                    (peak, at) = (live, place);
                }
            }
            HistoryAction::Free | HistoryAction::Release => {
                live -= history.blocks.requested[step.index()];
            }
            HistoryAction::Complete | HistoryAction::Mark => {}
        }
    }
    (peak, at, changes)
}

fn changes_curves(history: &MemoryHistory, step: HistoryStep) -> bool {
    step.action() != HistoryAction::Mark
        || matches!(history.marks[step.index()].kind, MarkKind::Grow | MarkKind::Release)
}

/// Returns the curve of a value that is known at each of its changes. Returns `None` if there are
/// none.
fn sparse_curve(
    series: Series,
    changes: impl ExactSizeIterator<Item = (f64, Option<u64>)>,
) -> Option<CurveSet> {
    let points = changes.len();
    let mut curve = CurveBuilder::new(vec![series], points as u64);
    for (time, value) in changes {
        curve.push(time, [value.map_or(f64::NAN, |value| value as f64)]);
    }
    (points > 0).then(|| curve.finish())
}

impl RunAnalysis {
    /// Returns the sets of curves. Those of a set share their times.
    pub(crate) fn curve_sets(&self) -> impl Iterator<Item = &CurveSet> {
        [&self.curves].into_iter().chain(&self.sparse)
    }

    /// Analyses a history.
    pub(crate) fn of(history: &MemoryHistory, progress: &mut ProgressLine) -> Self {
        let (_, peak_at, changes) = find_peak(history);
        let mut state = Ledger::new(history);
        let series = state.series();
        let mut curves = CurveBuilder::new(series.clone(), changes);
        let mut failures = Vec::new();
        let mut failed = 0;
        let mut peak = None;
        for (place, step) in history.steps.iter().enumerate() {
            if place % STRIDE == 0 {
                progress.at(place as u64, history.steps.len() as u64);
            }
            state.apply(*step);
            if changes_curves(history, *step) {
                let values = series.iter().map(|series| state.value(*series) as f64);
                curves.push(history.time(*step), values);
            } else if history.marks[step.index()].kind == MarkKind::Fail {
                failed += 1;
                if failures.len() < MOST_FAILURES {
                    failures.push(state.explain(step.index()));
                }
            }
            if place == peak_at {
                let held = state.blocks_in(BlockState::Live);
                peak = Some((state.peak(*step, &held), Holders::of(history, &held)));
            }
        }
        // A history has at least one block, so the loop meets the peak.
        let (peak, holders) =
            peak.unwrap_or_else(|| (state.peak(history.steps[0], &[]), Holders::of(history, &[])));
        let mut notes = Vec::new();
        if peak.exact > 0 && peak.exact < peak.blocks {
            notes.push(format!(
                "what blocks occupy above their requested bytes is known of {} of the {} blocks at the peak",
                peak.exact, peak.blocks
            ));
        }
        if failed > failures.len() {
            notes.push(format!(
                "the first {} of {failed} failed requests are explained",
                failures.len()
            ));
        }
        let live_at_end = state.live;
        let curves = curves.finish();
        if curves.merged > 1 {
            notes.push(format!(
                "a point of the curves stands for {} changes: their least, greatest and last value",
                curves.merged
            ));
        }
        let outside = history.outside.iter().map(|&(time, bytes)| (time, Some(bytes)));
        let pinned = history.pinned.iter().flatten().map(|&(time, bytes)| (time, Some(bytes)));
        let pinned: Vec<_> = pinned.collect();
        let sparse = [
            sparse_curve(Series::Limit, history.limits.iter().copied()),
            sparse_curve(Series::Outside, outside),
            sparse_curve(Series::Pinned, pinned.into_iter()),
        ];
        let sparse = sparse.into_iter().flatten().collect();
        Self { peak, holders, curves, sparse, failures, failed, live_at_end, notes }
    }

    /// Returns where memory went at the peak, as JSON. The parts are disjoint.
    pub(crate) fn slack(&self) -> Value {
        let peak = &self.peak;
        json!({
            "at": peak.time,
            "live": peak.live - peak.graphs.unwrap_or(0),
            "rounding": peak.rounding,
            "pending": peak.pending,
            "cached": peak.cached,
            "graphs": peak.graphs,
            "pinned": peak.pinned,
            "outside": peak.outside,
        })
    }
}

/// The state of a block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum BlockState {
    Unborn,
    Live,
    Pending,
    Done,
}

/// The state of all memory after a step.
struct Ledger<'a> {
    history: &'a MemoryHistory,
    states: Vec<BlockState>,
    /// Requested bytes of live blocks, and what they occupy.
    live: u64,
    occupied: u64,
    pending: u64,
    physical: Option<u64>,
    /// Free ranges, if addresses are known.
    free: Option<ExtentTree>,
    /// Mapped ranges, if known.
    mapped: Option<ExtentTree>,
}

impl<'a> Ledger<'a> {
    fn new(history: &'a MemoryHistory) -> Self {
        let tree = |ranges: &mut dyn Iterator<Item = Range<u64>>| {
            let mut tree = ExtentTree::default();
            ranges.for_each(|range| tree.insert(range));
            tree
        };
        let mapped =
            history.mapped_at_start.as_ref().map(|mapped| tree(&mut mapped.iter().cloned()));
        let free = tells_extents(history).then(|| match &mapped {
            Some(mapped) => mapped.clone(),
            None => {
                let spans = history.spans.iter();
                tree(&mut spans.map(|span| span.start..span.start + span.bytes))
            }
        });
        Self {
            history,
            states: vec![BlockState::Unborn; history.blocks.len()],
            live: 0,
            occupied: 0,
            pending: 0,
            physical: history.physical_at_start,
            free,
            mapped,
        }
    }

    fn series(&self) -> Vec<Series> {
        let has_pending =
            self.history.steps.iter().any(|step| step.action() == HistoryAction::Free);
        [
            (Series::Live, true),
            (Series::Pending, has_pending),
            (Series::Cached, self.physical.is_some()),
            (Series::Physical, self.physical.is_some()),
            (Series::Free, self.free.is_some()),
            (Series::LargestFree, self.free.is_some()),
        ]
        .into_iter()
        .filter_map(|(series, is_known)| is_known.then_some(series))
        .collect()
    }

    fn value(&self, series: Series) -> u64 {
        match series {
            Series::Live => self.live,
            Series::Pending => self.pending,
            Series::Cached => self.cached().unwrap_or(0),
            Series::Physical => self.physical.unwrap_or(0),
            // Sets of their own.
            Series::Limit | Series::Outside | Series::Pinned => 0,
            Series::Free => self.free.as_ref().map_or(0, ExtentTree::total),
            Series::LargestFree => self.free.as_ref().map_or(0, ExtentTree::largest),
        }
    }

    fn cached(&self) -> Option<u64> {
        self.physical.map(|physical| physical.saturating_sub(self.occupied + self.pending))
    }

    fn apply(&mut self, step: HistoryStep) {
        let (history, index) = (self.history, step.index());
        if step.action() == HistoryAction::Mark {
            return self.apply_mark(index);
        }
        let (bytes, requested) = (history.blocks.bytes[index], history.blocks.requested[index]);
        let range = || history.blocks.range(index);
        match step.action() {
            HistoryAction::Allocate => {
                self.live += requested;
                self.occupied += bytes;
                self.states[index] = BlockState::Live;
                if let Some(free) = &mut self.free {
                    free.remove(range());
                }
            }
            HistoryAction::Free => {
                self.live -= requested;
                self.occupied -= bytes;
                self.pending += bytes;
                self.states[index] = BlockState::Pending;
            }
            HistoryAction::Complete => self.pending -= bytes,
            HistoryAction::Release => {
                self.live -= requested;
                self.occupied -= bytes;
            }
            HistoryAction::Mark => {}
        }
        if matches!(step.action(), HistoryAction::Complete | HistoryAction::Release) {
            self.states[index] = BlockState::Done;
            if let Some(free) = &mut self.free {
                free.insert(range());
            }
        }
    }

    fn apply_mark(&mut self, index: usize) {
        let mark = self.history.marks[index];
        let range = mark.address.map(|start| start..start.saturating_add(mark.bytes));
        let grows = match mark.kind {
            MarkKind::Grow => true,
            MarkKind::Release => false,
            MarkKind::Move | MarkKind::Fail | MarkKind::Finding | MarkKind::User => return,
        };
        if let Some(physical) = &mut self.physical {
            *physical = if grows {
                physical.saturating_add(mark.bytes)
            } else {
                physical.saturating_sub(mark.bytes)
            };
        }
        if let (Some(mapped), Some(range)) = (&mut self.mapped, range) {
            for tree in [Some(mapped), self.free.as_mut()].into_iter().flatten() {
                if grows {
                    tree.insert(range.clone());
                } else {
                    tree.remove(range.clone());
                }
            }
        }
    }

    fn blocks_in(&self, state: BlockState) -> Vec<u32> {
        // The number of a block fits: a history has fewer.
        let blocks = self.states.iter().zip(0_u32..);
        blocks.filter_map(|(each, block)| (*each == state).then_some(block)).collect()
    }

    fn explain(&self, mark: usize) -> FailureNote {
        let (held, lingering) =
            (self.blocks_in(BlockState::Live), self.blocks_in(BlockState::Pending));
        FailureNote::of(
            self.history,
            &FailureState {
                mark: self.history.marks[mark],
                live: self.live,
                pending: self.pending,
                physical: self.physical,
                limit: self.history.limit_at(self.history.marks[mark].time),
                outside: self.history.outside_at(self.history.marks[mark].time),
                cached: self.cached(),
                free: self.free.as_ref(),
                mapped: self.mapped.as_ref(),
                held: &held,
                lingering: &lingering,
            },
        )
    }

    fn peak(&self, step: HistoryStep, held: &[u32]) -> PeakState {
        let history = self.history;
        let time = history.time(step);
        let is_exact = |block: &&u32| history.blocks.is_exact.get(**block as usize) == Some(&true);
        let exact = held.iter().filter(is_exact).count() as u64;
        let of_graphs = held
            .iter()
            .map(|block| *block as usize)
            .filter(|block| history.blocks.kind[*block] == Some(BlockKind::Graph));
        let graphs = of_graphs.map(|block| history.blocks.requested[block]).sum();
        let pinned = history.pinned.as_ref().map(|levels| {
            let behind = levels.partition_point(|(at, _)| *at <= time);
            behind.checked_sub(1).map_or(0, |place| levels[place].1)
        });
        PeakState {
            time,
            event: history.blocks.row.get(step.index()).copied().unwrap_or(0),
            live: self.live,
            rounding: (exact > 0).then_some(self.occupied - self.live),
            exact,
            pending: self.pending,
            cached: self.cached(),
            physical: self.physical,
            graphs: history.tells_kinds.then_some(graphs),
            pinned,
            limit: history.limit_at(time),
            outside: history.outside_at(time),
            blocks: held.len() as u64,
            free: self.free.as_ref().map(|free| (free.total(), free.largest())),
        }
    }
}
