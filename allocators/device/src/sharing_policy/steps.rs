//! The steps that never block, in the two orders that the sharing policy chooses.
//!
//! Each step but [`Step::Wait`] is a search. Besides the caches that it names, every search sees
//! the shared free list, with the free memory of streams that have no lease and the memory that was
//! mapped ahead of need. It takes the place where the fewest slots are missing, so it uses new
//! memory only for what free memory does not cover. What is missing is backed by spare handles
//! first, which are held but mapped nowhere. So a step that may grow uses warmed memory before it
//! creates a handle.
//!
//! Two settings and the stream itself restrict the lists:
//!
//! - With [`Adoption::Never`], "all caches" is the stream's own cache.
//! - Without [`Adoption::Wait`], and for a stream that is isolated or captures, [`Step::Wait`] and
//!   all searches in memory that is still in use are skipped.
//!
//! [`Adoption::Never`]: crate::Adoption::Never
//! [`Adoption::Wait`]: crate::Adoption::Wait

/// What a search for a place may use and do.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct PlaceOptions {
    /// Whether memory that is still in use may be taken: the receiving stream waits for it on the
    /// device. Otherwise only memory whose last work the host has seen done.
    pub(crate) may_wait: bool,
    /// Whether new memory may be taken from the driver.
    pub(crate) grow: bool,
    /// Whether handles may be taken from under free memory elsewhere.
    pub(crate) move_handles: bool,
    /// Whether all such handles are taken before new memory. Otherwise they are taken only where
    /// new memory is refused, or would exceed the bound.
    pub(crate) moves_first: bool,
    /// Whether new memory is limited to [what the bound has left].
    ///
    /// [what the bound has left]: super::SharingPolicy::growth_before_moves
    pub(crate) bounded: bool,
    /// Whether the block goes to unclaimed addresses, whatever is free elsewhere. Where handles may
    /// move, the last one may be longer than the block needs: one that is still in use cannot be
    /// replaced by a shorter one.
    pub(crate) apart: bool,
}

/// A step of the slow path.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Step {
    /// Search all caches that share.
    FromAll(PlaceOptions),
    /// Search the stream's own cache only.
    FromOwn(PlaceOptions),
    /// Make each stream wait on the device for the other users of what it has freed.
    Wait,
}

/// Free memory whose work is done.
const READY: PlaceOptions = PlaceOptions {
    may_wait: false,
    grow: false,
    move_handles: false,
    moves_first: false,
    bounded: false,
    apart: false,
};

/// Free memory that is still in use as well.
const IN_USE: PlaceOptions = PlaceOptions { may_wait: true, ..READY };

/// Free memory whose work is done, and new memory for the rest.
pub(crate) const GROW: PlaceOptions = PlaceOptions { grow: true, ..READY };

/// Everything: also memory that is still in use, and handles where new memory is refused.
const ALL: PlaceOptions = PlaceOptions { may_wait: true, move_handles: true, ..GROW };

/// As [`ALL`], and handles also where new memory would exceed the bound.
const ALL_IN_BOUND: PlaceOptions = PlaceOptions { bounded: true, ..ALL };

/// Handles alone, also from under memory that is still in use, at addresses of their own.
const MOVE_APART: PlaceOptions = PlaceOptions { apart: true, grow: false, ..ALL };

/// All handles, also from under memory that is still in use, and new memory for the rest.
const MOVE_IN_USE_AND_GROW: PlaceOptions = PlaceOptions { moves_first: true, ..ALL };

/// As [`MOVE_IN_USE_AND_GROW`], without waits.
const MOVE_AND_GROW: PlaceOptions = PlaceOptions { may_wait: false, ..MOVE_IN_USE_AND_GROW };

/// Where the block fits within the bound. The first step is left out once half of the bound is
/// held. Where new memory is refused, the third finds what is left of a page for a small block,
/// which would take a new page otherwise.
pub(crate) const WITHIN_BOUND: &[Step] = &[
    Step::FromOwn(GROW),
    Step::FromAll(GROW),
    Step::FromAll(READY),
    Step::Wait,
    Step::FromAll(IN_USE),
    Step::FromAll(ALL),
    Step::FromAll(MOVE_AND_GROW),
];

/// Where new memory for the block would exceed the bound. The last two steps exceed it.
pub(crate) const AT_BOUND: &[Step] = &[
    Step::FromAll(READY),
    Step::Wait,
    Step::FromAll(IN_USE),
    Step::FromAll(ALL_IN_BOUND),
    Step::FromAll(MOVE_APART),
    Step::FromAll(MOVE_IN_USE_AND_GROW),
    Step::FromAll(MOVE_AND_GROW),
];
