//! The steps that never block, in the orders that the sharing policy chooses.

use crate::physical::options::{Granularity, PlaceOptions, Readiness};

/// A step of the slow path.
#[derive(Clone, Copy)]
pub(super) enum Step {
    /// Search all caches that share.
    FromAll(PlaceOptions),
    /// Search the stream's own cache only.
    FromOwn(PlaceOptions),
    /// Make each stream wait on the device for the other users of what it has freed.
    Wait,
}

const fn options(
    readiness: Readiness,
    granularity: Granularity,
    grow: bool,
    move_handles: bool,
) -> PlaceOptions {
    PlaceOptions { readiness, granularity, grow, move_handles }
}

/// Whole slots in any cache that are free, and whose work is done.
const ADOPT: PlaceOptions = options(Readiness::Completed, Granularity::Slots, false, false);

/// As [`ADOPT`], by the unit.
const ADOPT_UNITS: PlaceOptions = options(Readiness::Completed, Granularity::Units, false, false);

/// As [`ADOPT_UNITS`], and memory still in use: the stream waits for it on the device.
const ADOPT_IN_USE: PlaceOptions = options(Readiness::MayWait, Granularity::Units, false, false);

/// New memory where it is missing.
pub(super) const GROW: PlaceOptions =
    options(Readiness::Completed, Granularity::Slots, true, false);

/// Handles from under free memory where it is missing.
const MOVE: PlaceOptions = options(Readiness::Completed, Granularity::Units, false, true);

/// As [`MOVE`], also from under memory that is still in use.
const MOVE_IN_USE: PlaceOptions = options(Readiness::MayWait, Granularity::Units, false, true);

/// New memory, and handles where new memory is refused.
const GROW_AND_MOVE: PlaceOptions = options(Readiness::Completed, Granularity::Units, true, true);

/// All of the above.
const ALL: PlaceOptions = options(Readiness::MayWait, Granularity::Units, true, true);

/// While memory is ample, streams stay separate: a stream takes new memory before that of others.
pub(super) const GROW_FIRST: &[Step] = &[
    Step::FromOwn(GROW),
    Step::FromAll(ADOPT),
    Step::FromAll(GROW),
    Step::FromAll(ADOPT_UNITS),
    Step::FromAll(GROW_AND_MOVE),
    Step::Wait,
    Step::FromAll(ALL),
];

/// As [`GROW_FIRST`], where memory has been enough before: shared free ranges come first, also with
/// a wait on the device.
pub(super) const SHARED_FIRST: &[Step] = &[
    Step::FromOwn(ADOPT_UNITS),
    Step::FromOwn(ADOPT_IN_USE),
    Step::FromOwn(GROW),
    Step::FromAll(ADOPT),
    Step::FromAll(GROW),
    Step::FromAll(ADOPT_UNITS),
    Step::FromAll(GROW_AND_MOVE),
    Step::Wait,
    Step::FromAll(ALL),
];

/// Where much memory is idle: it is used before new memory, even if the stream has to wait for
/// another.
pub(super) const REUSE_FIRST: &[Step] = &[
    Step::FromAll(ADOPT_UNITS),
    Step::Wait,
    Step::FromAll(ADOPT_IN_USE),
    Step::FromAll(GROW),
    Step::FromAll(GROW_AND_MOVE),
    Step::FromAll(ALL),
];

/// Where most memory is idle, or on request: handles move as well.
pub(super) const COMPACT_FIRST: &[Step] = &[
    Step::FromAll(ADOPT_UNITS),
    Step::Wait,
    Step::FromAll(ADOPT_IN_USE),
    Step::FromAll(MOVE),
    Step::FromAll(MOVE_IN_USE),
    Step::FromAll(GROW_AND_MOVE),
    Step::FromAll(ALL),
];

/// Where all free memory is shared, and has been searched already.
pub(super) const SHARED_ONLY: &[Step] =
    &[Step::FromAll(GROW_AND_MOVE), Step::Wait, Step::FromAll(ALL)];
