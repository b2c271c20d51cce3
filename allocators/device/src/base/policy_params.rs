//! The thresholds of the pool's policies.
//!
//! They decide how tightly memory is packed and how often streams wait for each other, never
//! whether memory is used correctly. `src/guide/inside/thresholds.md` has a sweep of each.

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;

/// Defines [`PolicyParams`], and [`POLICY`] with the values.
macro_rules! policy_params {
    ($($(#[doc = $doc:literal])+ $name:ident: $value:expr,)+) => {
        /// The thresholds of the pool's policies. Sizes are in bytes. Each line names what the
        /// value trades.
        pub(crate) struct PolicyParams {
            $($(#[doc = $doc])+ pub(crate) $name: u64,)+
        }

        /// The thresholds that all pools use.
        pub(crate) const POLICY: PolicyParams = PolicyParams { $($name: $value,)+ };

        #[cfg(feature = "sweep")]
        impl PolicyParams {
            /// Sets a threshold by its name. Returns whether there is one of that name.
            fn set(&mut self, name: &str, value: u64) -> bool {
                match name {
                    $(stringify!($name) => self.$name = value,)+
                    _ => return false,
                }
                true
            }
        }
    };
}

policy_params! {
    /// Up to this size, blocks always come from the stream's own cache: fewer slow paths against
    /// tighter packing.
    own_cache_max: 64 * KIB,
    /// From this size on, blocks reuse other streams' memory instead of new memory, if as much has
    /// been in use before: less held memory against the cost of the search.
    medium_block: 8 * MIB,
    /// From this size on, blocks are worth searching the other streams' memory whenever much of it
    /// is idle. For smaller ones the search costs more than it saves, and streams that allocate at
    /// the same time would take the same ranges from each other forever.
    large_block: 16 * MIB,
    /// Streams share free memory from these sixteenths of the budget in use: packing against waits.
    share_above: 8,
    /// Sharing streams separate again below these sixteenths: the hysteresis that keeps a loop at
    /// the border from oscillating.
    separate_below: 6,
    /// While streams share, free ranges of at most `own_cache_max` stay in the caches until more
    /// than these sixteenths of the budget are live: fewer slow paths against packing.
    drain_above: 8,
    /// A stream counts as one of several that share if it holds more than this part of all memory,
    /// or more than half of an equal share if there are many streams: a small stream beside a
    /// large one keeps its fast path.
    holder_part: 8,
    /// Memory is spacious up to these sixteenths of the budget in use: streams stay apart against
    /// less held memory.
    spacious_up_to: 8,
    /// Memory is ample while at most these sixteenths of the live bytes are idle: growth against
    /// waits for other streams.
    ample_idle: 8,
    /// Up to this size, blocks take new memory beyond the loose bound: fewer slow paths
    /// against less held memory.
    unbounded_max: MIB,
    /// A pool holds these sixteenths of the high-water mark at most, unless that costs too much: it
    /// behaves as if they were its limit. Less held memory against slow paths and moves.
    least_bound: 17,
    /// Where that costs too much, the bound of a pool that does not compact rises up to these
    /// sixteenths.
    most_bound: 19,
    /// A pool that does not compact may always hold so much more than the high-water mark: fewer
    /// slow paths where little memory is at stake.
    bound_min: 96 * MIB,
    /// The bound rises where it makes more than one handle move, or more than one thread meet
    /// another, for so many blocks: time against held memory.
    rise_price: 128,
    /// Where it can rise no more, it yields if it costs more than one of these for so many blocks.
    /// Less than `rise_price`: a rise costs a 64th of the high-water mark, and this much more.
    yield_price: 16,
    /// By how many blocks the cost must exceed that before the bound rises or yields: a costly
    /// phase, such as the first round, against the time until then.
    bound_debt: 16384,
    /// How many blocks are allocated before a bound that has yielded applies again, the first time.
    bound_rest: 1 << 20,
    /// After the bound has yielded, handles move under a block above `unbounded_max` before the
    /// pool holds more than these sixteenths of the high-water mark: less held memory against
    /// moves.
    loose_bound: 28,
    /// While free memory is shared and at most half of the budget is live, one slow path of so many
    /// polls events before it searches the shared free list: packing against time.
    poll_every: 8,
    /// After a search that found no room in what is free, so many poll first: what is known to be
    /// done is packed tighter, and fewer searches look at all memory, against the cost of polls.
    polls_without_room: 64,
    /// Memory is tight when less than this part of the budget is left or free: the place that pins
    /// the fewest handles against the lowest address.
    tight_part: 10,
    /// Gaps that moves leave are closed where the budget leaves at most this part of the high-water
    /// mark beyond it: what is lost beside gaps against more moves.
    gap_part: 32,
    /// Only gaps up to this size are closed: fewer moves, since a large block leaves a large gap,
    /// which loses no more than a small one.
    gap_max: 128 * MIB,
    /// Gaps are closed while at least this part of what is held is free: the moves that it costs
    /// against the blocks that are allocated around gaps before.
    gap_free_part: 8,
    /// The maximum size of a handle. Beyond it the cost hardly falls, and the memory that one
    /// block pins grows.
    largest_handle: 64 * MIB,
    /// A handle is at most this part of what the pool could still provide: the memory that one
    /// live block pins against the number of driver calls.
    headroom_parts: 4096,
    /// A handle is also at most this part of what is held: the memory that one live block pins
    /// against the number of driver calls in the first round.
    held_parts: 64,
    /// A handle may be this part of a new block, or of the mean live block if that is smaller,
    /// however little is left: growth near the limit against the memory that a small block pins
    /// where a large one was.
    block_parts: 16,
}

/// Returns the thresholds in use.
#[cfg(not(feature = "sweep"))]
#[inline]
pub(crate) const fn policy() -> &'static PolicyParams {
    &POLICY
}

/// Returns the thresholds in use: those that `AQUIFER_SWEEP` names, as `name=value,…`, and else
/// those of [`POLICY`].
///
/// # Panics
/// If it names no threshold or no number. A sweep of the wrong values would prove nothing.
#[cfg(feature = "sweep")]
pub(crate) fn policy() -> &'static PolicyParams {
    static SWEPT: std::sync::LazyLock<PolicyParams> = std::sync::LazyLock::new(|| {
        let mut params = POLICY;
        let text = std::env::var("AQUIFER_SWEEP").unwrap_or_default();
        for part in text.split(',').filter(|part| !part.is_empty()) {
            let set = part.split_once('=').is_some_and(|(name, value)| {
                value.parse().is_ok_and(|value| params.set(name, value))
            });
            assert!(set, "AQUIFER_SWEEP has no threshold {part:?}");
        }
        params
    });
    &SWEPT
}

/// Returns so many sixteenths of `bytes`, rounded down.
#[inline]
pub(crate) const fn sixteenths(bytes: u64, parts: u64) -> u64 {
    (bytes / 16).saturating_mul(parts).saturating_add(bytes % 16 * parts / 16)
}
