//! The thresholds of the pool's policies.
//!
//! They decide how tightly memory is packed and how often streams wait for each other, never
//! whether memory is used correctly. `src/guide/inside/thresholds.md` has how they were chosen.

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
    };
}

policy_params! {
    /// Up to this size, blocks always come from the stream's own cache: fewer slow paths against
    /// tighter packing.
    own_cache_max: 64 * KIB,
    /// A pool whose slack is not set below the default may always hold this much more than the
    /// peak: fewer slow paths where little memory is at stake.
    least_slack: 64 * MIB,
    /// A stream counts as one of several that share if it holds more than this part of all memory,
    /// or more than half of an equal share if there are many streams: a small stream next to a
    /// large one keeps its fast path.
    holder_part: 8,
    /// The maximum size of a handle. Beyond it the cost hardly falls, and the memory that one
    /// block pins grows.
    largest_handle: 64 * MIB,
    /// A handle is at most this part of what the pool could still provide: the memory that one
    /// live block pins against the number of driver calls.
    headroom_parts: 1024,
    /// A handle is also at most this part of what is held, or less if the slack is set below the
    /// default: the memory that one live block pins against the number of driver calls in the first
    /// round.
    held_parts: 64,
    /// A handle may be this part of a new block, or of the mean live block if that is smaller,
    /// however little is left: growth near the limit against the memory that a small block pins
    /// where a large one was.
    block_parts: 16,
}

/// Returns the thresholds that all pools use.
#[inline]
pub(crate) const fn policy() -> &'static PolicyParams {
    &POLICY
}

/// Returns `bytes * parts / whole`, rounded down, or `u64::MAX` if it is more.
#[inline]
pub(crate) const fn fraction(bytes: u64, parts: u64, whole: u64) -> u64 {
    (bytes / whole).saturating_mul(parts).saturating_add(bytes % whole * parts / whole)
}
