//! The thresholds of the pool's policies.
//!
//! They decide how tightly memory is packed and how often streams wait for each other, never
//! whether memory is used correctly. `src/guide/inside/thresholds.md` has a sweep of each.

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;

/// The thresholds of the pool's policies. Sizes are in bytes. Each line names what the value
/// trades.
pub(crate) struct PolicyParams {
    /// Up to this size, blocks always come from the stream's own cache: fewer slow paths against
    /// tighter packing.
    pub(crate) own_cache_max: u64,
    /// From this size on, blocks reuse other streams' memory instead of new memory, if as much has
    /// been in use before: less held memory against the cost of the search.
    pub(crate) medium_block: u64,
    /// From this size on, blocks are worth searching the other streams' memory whenever much of it
    /// is idle. For smaller ones the search costs more than it saves, and streams that allocate at
    /// the same time would take the same ranges from each other forever.
    pub(crate) large_block: u64,
    /// Streams share free memory from these eighths of the budget in use: packing against waits.
    pub(crate) share_above: u64,
    /// Sharing streams separate again below these eighths: the hysteresis that keeps a loop at the
    /// border from oscillating.
    pub(crate) separate_below: u64,
    /// A stream counts as one of several that share if it holds more than this part of all memory,
    /// or more than half of an equal share if there are many streams: a small stream beside a
    /// large one keeps its fast path.
    pub(crate) holder_part: u64,
    /// Memory is spacious up to these eighths of the budget in use: streams stay apart against
    /// less held memory.
    pub(crate) spacious_up_to: u64,
    /// Memory is ample while at most these eighths of the live bytes are idle: growth against
    /// waits for other streams.
    pub(crate) ample_idle: u64,
    /// Large blocks come from the shared free list once these eighths of the high-water mark are
    /// held: large holes against slow paths.
    pub(crate) surplus: u64,
    /// Handles move before memory grows once these eighths of the high-water mark are held: less
    /// held memory against moves.
    pub(crate) compact_from: u64,
    /// Blocks that are not large also reuse other streams' memory once these eighths of the
    /// high-water mark are held.
    pub(crate) reuse_all_from: u64,
    /// Memory is tight when less than this part of the budget is left or free: the place that pins
    /// the fewest handles against the lowest address.
    pub(crate) tight_part: u64,
    /// The maximum size of a handle. Beyond it the cost hardly falls, and the memory that one
    /// block pins grows.
    pub(crate) largest_handle: u64,
    /// A handle is at most this part of what the pool could still provide: the memory that one
    /// live block pins against the number of driver calls.
    pub(crate) headroom_parts: u64,
    /// One new handle is preferred to this many spare ones: fewer mappings against a driver call.
    pub(crate) handles_replaced: u64,
}

/// The thresholds that all pools use.
pub(crate) const POLICY: PolicyParams = PolicyParams {
    own_cache_max: 64 * KIB,
    medium_block: 8 * MIB,
    large_block: 16 * MIB,
    share_above: 4,
    separate_below: 3,
    holder_part: 8,
    spacious_up_to: 4,
    ample_idle: 4,
    surplus: 10,
    compact_from: 14,
    reuse_all_from: 16,
    tight_part: 32,
    largest_handle: 64 * MIB,
    headroom_parts: 4096,
    handles_replaced: 4,
};

/// Returns so many eighths of `bytes`, rounded down.
#[inline]
pub(crate) const fn eighths(bytes: u64, parts: u64) -> u64 {
    (bytes / 8).saturating_mul(parts).saturating_add(bytes % 8 * parts / 8)
}
