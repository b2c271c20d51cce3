//! The search for a place for a block that fits in no free backed range.
//!
//! A window is a stretch of addresses as long as the block in which every part is either free and
//! backed, in any cache, or unclaimed and not backed. Memory for unbacked parts is added by the
//! slot, so the best window is the one with the fewest slots to back. Among equals it is the
//! lowest.
//!
//! ```text
//!   caches    ▓▓▓▓▓░░░░▓▓▓▓▓▓▓▓░░░░░░░░▓▓       ▓ live   ░ free, backed
//!   nobody's           …       ········          · free, not backed
//!   window             ├───────────────┤         8 backed, 8 to be backed
//! ```
//!
//! The number of missing slots changes only where the window's start or end crosses a border. So it
//! is enough to try the windows that start or end at one.

use crate::base::lists::merged;
use aquifer_core::scratch::{Bump, List, list};
use aquifer_heap::Range;

/// A place for a block.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Window<'s> {
    /// The address range of the block.
    pub(crate) block: Range,
    /// Runs of slots to back, first and count, by address.
    pub(crate) missing: List<'s, (u64, u64)>,
}

impl Window<'_> {
    /// Returns the number of slots to back.
    pub(crate) fn need(&self) -> u64 {
        self.missing.iter().map(|&(_, count)| count).sum()
    }
}

/// A stretch of one kind.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct WindowPiece {
    start: u64,
    end: u64,
    backed: bool,
}

/// The layout of slots.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Grid {
    /// The start of the first slot.
    pub(crate) base: u64,
    /// The size of a slot in bytes.
    pub(crate) slot: u64,
}

impl Grid {
    /// Returns the addresses of a slot.
    pub(crate) fn slot_range(self, slot: u64) -> Range {
        Range { start: self.base + slot * self.slot, len: self.slot }
    }

    /// Returns the numbers of the slots that a range touches.
    pub(crate) fn slots(self, range: Range) -> std::ops::Range<u64> {
        let Self { base, slot } = self;
        (range.start - base) / slot..(range.end() - base).div_ceil(slot)
    }

    /// Returns the numbers of the slots that lie wholly within a range.
    pub(crate) fn slots_within(self, range: Range) -> std::ops::Range<u64> {
        let Self { base, slot } = self;
        (range.start - base).div_ceil(slot)..(range.end() - base) / slot
    }
}

/// Returns the window of `bytes` at `align` that needs the fewest slots, and of several the lowest,
/// so that free memory gathers at the other end. `backed` are free ranges and `bare` the runs of
/// unclaimed slots, each by address.
pub(crate) fn best<'s>(
    bump: &'s Bump,
    backed: impl Iterator<Item = Range>,
    bare: impl Iterator<Item = (u64, u64)>,
    grid: Grid,
    bytes: u64,
    align: u64,
) -> Option<Window<'s>> {
    let Grid { base, slot } = grid;
    debug_assert!(bytes > 0 && align > 0, "{bytes} bytes at {align}");
    let backed = backed.map(|r| WindowPiece { start: r.start, end: r.start + r.len, backed: true });
    let bare = bare.map(|(first, count)| {
        let start = base + first * slot;
        WindowPiece { start, end: start + count * slot, backed: false }
    });
    let pieces = list(bump, merged(backed, bare, |piece| piece.start));
    let (mut before, mut best) = (List::new_in(bump), None);
    let mut from = 0;
    while from < pieces.len() {
        let mut to = from + 1;
        while to < pieces.len() && pieces[to].start == pieces[to - 1].end {
            to += 1;
        }
        best_in_run(&pieces[from..to], grid, bytes, align, &mut before, &mut best);
        from = to;
    }
    let (_, start) = best?;
    debug_assert!(start.is_multiple_of(align), "{start:#x} is not aligned to {align}");
    let missing = list(bump, missing(&pieces, base, slot, start, bytes));
    Some(Window { block: Range { start, len: bytes }, missing })
}

/// The order of windows: missing slots, then the start.
type Rank = (u64, u64);

/// Compares the windows of one run of adjacent pieces with the best so far. `bare_before` is a
/// buffer for its prefix sums.
fn best_in_run(
    run: &[WindowPiece],
    grid: Grid,
    bytes: u64,
    align: u64,
    bare_before: &mut List<'_, u64>,
    best: &mut Option<Rank>,
) {
    let slot = grid.slot;
    let (Some(first), Some(last)) = (run.first(), run.last()) else { return };
    if last.end - first.start < bytes {
        return;
    }
    // Bare slots before each piece, so that the need of a window is a difference of two sums.
    bare_before.clear();
    let mut sum = 0;
    for piece in run {
        bare_before.push(sum);
        if !piece.backed {
            sum += (piece.end - piece.start) / slot;
        }
    }
    bare_before.push(sum);
    let slots_below = |address: u64, round_up: bool| {
        let at = run.partition_point(|p| p.end <= address);
        match run.get(at) {
            Some(piece) if !piece.backed && address > piece.start => {
                let into = address - piece.start;
                bare_before[at] + if round_up { into.div_ceil(slot) } else { into / slot }
            }
            _ => bare_before[at.min(run.len())],
        }
    };
    let mut consider = |start: u64| {
        let Some(start) = start.checked_next_multiple_of(align) else { return };
        let Some(end) = start.checked_add(bytes) else { return };
        if start < first.start || end > last.end {
            return;
        }
        let need = slots_below(end, true) - slots_below(start, false);
        let key = (need, start);
        if best.is_none_or(|best| key < best) {
            *best = Some(key);
        }
    };
    for piece in run {
        consider(piece.start);
        if let Some(start) = piece.end.checked_sub(bytes) {
            consider(start / align * align);
        }
    }
}

/// Returns the bare slots of a window.
fn missing(
    pieces: &[WindowPiece],
    base: u64,
    slot: u64,
    start: u64,
    bytes: u64,
) -> impl Iterator<Item = (u64, u64)> {
    let end = start + bytes;
    let bare = pieces.iter().filter(move |p| !p.backed && p.start < end && p.end > start);
    bare.map(move |piece| {
        let first = (piece.start.max(start) - base) / slot;
        (first, (piece.end.min(end) - base).div_ceil(slot) - first)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const SLOT: u64 = 100;

    fn find(
        backed: &[(u64, u64)],
        bare: &[(u64, u64)],
        bytes: u64,
    ) -> Option<(u64, Vec<(u64, u64)>)> {
        let backed = backed.iter().map(|&(start, len)| Range { start, len });
        let bump = Bump::new();
        best(&bump, backed, bare.iter().copied(), Grid { base: 0, slot: SLOT }, bytes, 1)
            .map(|w| (w.block.start, w.missing.to_vec()))
    }

    #[test]
    fn window_uses_backed_memory_on_both_sides() {
        // Backed 50–100 and 300–360, bare between them.
        assert_eq!(find(&[(50, 50), (300, 60)], &[(1, 2)], 150), Some((50, vec![(1, 1)])));
        assert_eq!(find(&[(50, 50), (300, 60)], &[(1, 2)], 310), Some((50, vec![(1, 2)])));
        assert_eq!(find(&[(50, 50), (300, 60)], &[(1, 2)], 311), None);
    }

    #[test]
    fn fewest_missing_slots_win_over_lowest_address() {
        // At 0 everything is bare; at 1000 half is backed.
        assert_eq!(find(&[(1000, 100)], &[(0, 4), (11, 4)], 200), Some((1000, vec![(11, 1)])));
    }

    #[test]
    fn partly_used_bare_slot_counts_as_missing() {
        assert_eq!(find(&[(0, 100)], &[(1, 3)], 101), Some((0, vec![(1, 1)])));
        assert_eq!(
            find(&[(400, 50)], &[(1, 3)], 60),
            Some((100, vec![(1, 1)])),
            "the lowest of those that need one"
        );
    }

    #[test]
    fn best_window_matches_exhaustive_search() {
        // All layouts of six slots, each live, backed or bare, compared with trying every start.
        for layout in 0..3u32.pow(6) {
            let kind = |slot: u32| layout / 3u32.pow(slot) % 3;
            let backed: Vec<(u64, u64)> =
                (0..6).filter(|&s| kind(s) == 1).map(|s| (u64::from(s) * SLOT, SLOT)).collect();
            let bare: Vec<(u64, u64)> =
                (0..6).filter(|&s| kind(s) == 2).map(|s| (u64::from(s), 1)).collect();
            for bytes in [30, 100, 130, 250] {
                let need = |start: u64| {
                    let slots = start / SLOT..(start + bytes).div_ceil(SLOT);
                    if slots.end > 6 || slots.clone().any(|s| kind(s as u32) == 0) {
                        return None;
                    }
                    Some(slots.filter(|&s| kind(s as u32) == 2).count())
                };
                let least = (0..600).step_by(10).filter_map(need).min();
                let found = find(&backed, &bare, bytes)
                    .map(|(_, missing)| missing.iter().map(|m| m.1 as usize).sum());
                assert_eq!(found, least, "layout {layout}, {bytes} bytes");
            }
        }
    }
}
