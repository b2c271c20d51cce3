//! The layout of a ledger, version 2.
//!
//! ```text
//!   0       header: magic, version, capacity, use by others, tickets, and two futex words
//!   4 KiB   256 slots of 256 bytes, one for each member
//!   68 KiB  end
//! ```
//!
//! All numbers are words of eight bytes in the byte order of the machine. The first line of a slot
//! is all that a claim reads of it.

/// `AQUIFERL`, read as a word.
pub(crate) const MAGIC: u64 = u64::from_ne_bytes(*b"AQUIFERL");
/// The version of this layout.
pub(crate) const VERSION: u64 = 2;

pub(crate) const WORD: usize = 8;
pub(crate) const HEADER_BYTES: usize = 4096;
pub(crate) const HEADER_WORDS: usize = HEADER_BYTES / WORD;
pub(crate) const SLOTS: usize = 256;
pub(crate) const SLOT_BYTES: usize = 256;
pub(crate) const SLOT_WORDS: usize = SLOT_BYTES / WORD;
pub(crate) const FILE_BYTES: usize = HEADER_BYTES + SLOTS * SLOT_BYTES;

/// The end of the name of a ledger.
pub(crate) const SUFFIX: &str = ".ledger";

/// Words of the header.
pub(crate) mod header {
    pub(crate) const MAGIC: usize = 0;
    pub(crate) const VERSION: usize = 1;
    /// The bytes of the memory.
    pub(crate) const CAPACITY: usize = 2;
    /// Bytes in use by processes that are no members, as the last measurement found them.
    pub(crate) const UNACCOUNTED: usize = 3;
    /// One more than the highest number of a slot that may be in use.
    pub(crate) const SLOTS_USED: usize = 4;
    /// The process that has the right to join, or 0. For display only.
    pub(crate) const JOINING: usize = 5;
    /// The number of wishes so far.
    pub(crate) const TICKETS: usize = 8;
    /// A futex of four bytes, changed by each new wish.
    pub(crate) const WISHES: usize = 16;
    /// A futex of four bytes, changed by each release.
    pub(crate) const RELEASES: usize = 24;
}

/// Words of a slot.
pub(crate) mod slot {
    /// What the member has claimed with the claim that is being decided, or 0 if none is. See
    /// [`held`](crate::ledger::protocol::held).
    pub(crate) const PENDING: usize = 0;
    /// Bytes that are claimed.
    pub(crate) const CLAIMED: usize = 1;
    /// Bytes of the guarantee that are kept for the member even while it does not use them.
    pub(crate) const RESERVED: usize = 2;
    /// Bytes that the member waits for, or 0.
    pub(crate) const WANTED: usize = 3;
    /// How often the slot was joined.
    pub(crate) const JOINED: usize = 4;
    /// The rank of the wish, see [`Rank`](crate::ledger::protocol::Rank).
    pub(crate) const RANK: usize = 5;
    /// The number of the wish.
    pub(crate) const TICKET: usize = 6;
    /// When the wish was renewed, in nanoseconds of [`now_ns`](crate::ledger::system::now_ns).
    pub(crate) const RENEWED: usize = 7;

    /// When the wish began.
    pub(crate) const WISHED: usize = 8;
    pub(crate) const GUARANTEE: usize = 9;
    pub(crate) const LIMIT: usize = 10;
    /// The priority, as an `i64`.
    pub(crate) const PRIORITY: usize = 11;
    /// Bytes that the member could give back soon, as it has last estimated them.
    pub(crate) const RECLAIMABLE: usize = 12;
    /// The process, for display only.
    pub(crate) const PROCESS: usize = 13;
    /// The command: a text of at most [`COMMAND_BYTES`].
    pub(crate) const COMMAND: usize = 16;
    pub(crate) const COMMAND_BYTES: usize = 120;
}

const _: () = assert!(slot::COMMAND + 1 + slot::COMMAND_BYTES / WORD <= SLOT_WORDS);
const _: () = assert!(FILE_BYTES.is_multiple_of(4096));
