//! The steps that never block, in the orders that the sharing policy chooses.
//!
//! Each step but [`Step::Wait`] is a search. Besides the caches that it names, every search sees
//! the shared free list, with the free memory of streams that have no lease and the memory that was
//! mapped ahead of need. It takes the place where the fewest slots are missing. What is missing
//! there is backed by spare handles first, which are held but mapped nowhere. New handles come
//! after them. So a step that may grow uses warmed memory before it creates a handle. The exception
//! is a block that [grows as a whole]: [`GROW`] then looks at unclaimed addresses only.
//!
//! Two settings and the stream itself restrict the lists:
//!
//! - With [`Adoption::Never`], "all caches" is the stream's own cache, and [`SHARED_ONLY`] is never
//!   chosen.
//! - Without [`Adoption::Wait`], and for a stream that is isolated or captures, [`Step::Wait`] and
//!   all searches in memory that is still in use are skipped.
//!
//! [grows as a whole]: crate::sharing_policy::SharingPolicy::grows_whole_blocks
//! [`Adoption::Never`]: crate::Adoption::Never
//! [`Adoption::Wait`]: crate::Adoption::Wait

/// What a search for a place may use and do.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct PlaceOptions {
    /// Whether memory that is still in use may be taken: the receiving stream waits for it on the
    /// device. Otherwise only memory whose last work the host has seen done.
    pub(crate) may_wait: bool,
    /// Whether memory of other caches and of the shared free list is taken in whole slots, so that
    /// caches stay separate. A slot is the smallest handle, usually 2 MiB. Otherwise pieces may
    /// have any length, down to the heap's unit of 512 bytes. What the stream's own cache has is
    /// used in pieces of any length.
    pub(crate) whole_slots: bool,
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

/// No new memory, no moves and no waits: only whole slots that are free.
const NOTHING_ELSE: PlaceOptions = PlaceOptions {
    may_wait: false,
    whole_slots: true,
    grow: false,
    move_handles: false,
    moves_first: false,
    bounded: false,
    apart: false,
};

/// Whole slots in any cache that are free, and whose work is done.
const ADOPT: PlaceOptions = NOTHING_ELSE;

/// As [`ADOPT`], in pieces of any length.
const ADOPT_UNITS: PlaceOptions = PlaceOptions { whole_slots: false, ..ADOPT };

/// As [`ADOPT_UNITS`], and memory still in use: the stream waits for it on the device.
const ADOPT_IN_USE: PlaceOptions = PlaceOptions { may_wait: true, ..ADOPT_UNITS };

/// New memory where it is missing.
pub(crate) const GROW: PlaceOptions = PlaceOptions { grow: true, ..ADOPT };

/// As [`GROW`], next to free pieces of any length.
const GROW_UNITS: PlaceOptions = PlaceOptions { grow: true, ..ADOPT_UNITS };

/// New memory, and handles where new memory is refused.
const GROW_AND_MOVE: PlaceOptions = PlaceOptions { move_handles: true, ..GROW_UNITS };

/// As [`GROW_AND_MOVE`], also with memory that is still in use.
const ALL: PlaceOptions = PlaceOptions { may_wait: true, ..GROW_AND_MOVE };

/// Handles, and new memory for the rest.
const MOVE_AND_GROW: PlaceOptions = PlaceOptions { moves_first: true, ..GROW_AND_MOVE };

/// As [`MOVE_AND_GROW`], also from under memory that is still in use.
const MOVE_IN_USE_AND_GROW: PlaceOptions = PlaceOptions { moves_first: true, ..ALL };

/// As [`ALL`], and handles also where new memory would exceed the bound.
const ALL_IN_BOUND: PlaceOptions = PlaceOptions { bounded: true, ..ALL };

/// While memory is ample, streams stay separate: a stream takes new memory before that of others.
///
/// The order: new memory, next to the stream's own free memory; whole free slots of all caches; new
/// memory next to such slots; free pieces of any length; new memory next to those, and handles from
/// under free memory where new memory is refused; pending frees that their streams wait for on the
/// device; everything, also from memory that is still in use.
pub(crate) const GROW_FIRST: &[Step] = &[
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
///
/// The order: free pieces of all caches; pending frees that their streams wait for on the device;
/// free pieces that are still in use; new memory, next to whole free slots; new memory next to free
/// pieces, and handles from under free memory where new memory is refused; everything, also from
/// memory that is still in use.
pub(crate) const REUSE_FIRST: &[Step] = &[
    Step::FromAll(ADOPT_UNITS),
    Step::Wait,
    Step::FromAll(ADOPT_IN_USE),
    Step::FromAll(GROW),
    Step::FromAll(GROW_AND_MOVE),
    Step::FromAll(ALL),
];

/// Handles, also from under memory that is still in use, at addresses of their own.
const MOVE_APART: PlaceOptions = PlaceOptions { move_handles: true, apart: true, ..ADOPT_IN_USE };

/// Where most memory is idle, or new memory would exceed the bound of what is held: handles move as
/// well.
///
/// The order: whole free slots of all caches, so that the next small blocks of the stream find room
/// in its own; free pieces; pending frees that their streams wait for on the device; free pieces
/// that are still in use; handles, also from under memory that is still in use, after new memory up
/// to the bound; such handles alone, at addresses of their own. If these are not enough, memory
/// grows beyond the bound: all such handles, and new memory for the rest; the same without waits.
pub(crate) const COMPACT_FIRST: &[Step] = &[
    Step::FromAll(ADOPT),
    Step::FromAll(ADOPT_UNITS),
    Step::Wait,
    Step::FromAll(ADOPT_IN_USE),
    Step::FromAll(ALL_IN_BOUND),
    Step::FromAll(MOVE_APART),
    Step::FromAll(MOVE_IN_USE_AND_GROW),
    Step::FromAll(MOVE_AND_GROW),
];

/// Where all free memory is shared, and has been searched already. A wait on the device comes
/// before a move: it costs the host a few driver calls, and a block of many handles as many moves.
///
/// The order: new memory; pending frees that their streams wait for on the device; free pieces that
/// are still in use; everything, in the place that needs the fewest handles, also from memory that
/// is still in use; the same without waits.
pub(crate) const SHARED_ONLY: &[Step] = &[
    Step::FromAll(GROW_UNITS),
    Step::Wait,
    Step::FromAll(ADOPT_IN_USE),
    Step::FromAll(ALL),
    Step::FromAll(GROW_AND_MOVE),
];
