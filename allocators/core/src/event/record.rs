//! The record of one operation on memory.

use crate::{Tag, ids::MemoryLocation};

/// The kind of an event.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize), serde(rename_all = "lowercase"))]
#[non_exhaustive]
pub enum Action {
    /// A block was allocated.
    Allocate,
    /// A block was freed by its owner. Its bytes may still be in use on other streams.
    Free,
    /// The last use of a freed block is done. Its bytes can be reused from here on.
    Complete,
    /// The pool allocated memory from the driver or the kernel.
    Grow,
    /// The pool released memory to the driver or the kernel.
    Reap,
    /// Physical handles were taken from under free memory, to be mapped elsewhere. One event for
    /// each search, without an address.
    Move,
    /// A free range moved from one stream's cache to another's.
    Adopt,
    /// An allocation failed.
    Fail,
    /// A debugging pool found an error: the bytes, the location or the owner of a block are wrong.
    Finding,
    /// The lowest limit among a pool's budget and those above it: when the pool is opened, and by
    /// the pool's next slow path after a change.
    Limit,
    /// What a device has in use beyond the memory of a pool, by the driver's count: before the
    /// pool's growth or failure, if it has changed since it was last recorded.
    Outside,
    /// A pool has dropped its plan, because more than a fifth of the allocations missed it in each
    /// of two steps in a row.
    DropPlan,
}

/// The kind of a block, by the way its memory is held.
///
/// ```
/// use aquifer::event::BlockKind;
/// assert_eq!(BlockKind::Reserved.name(), "reserved");
/// assert_eq!(BlockKind::from_name("reserved"), Some(BlockKind::Reserved));
/// ```
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize), serde(rename_all = "lowercase"))]
#[non_exhaustive]
pub enum BlockKind {
    /// Device memory of a stream's cache, or a driver allocation used instead.
    Cached,
    /// Device memory with its own physical memory and addresses.
    Stable,
    /// A committed step of reserved device memory. Commit allocates it, decommit frees it.
    Reserved,
    /// Device memory that can be parked. Parking frees it. Resuming allocates it again at the same
    /// address.
    Parkable,
    /// Device memory of captured graphs.
    Graph,
    /// Pinned host memory.
    Pinned,
    /// Memory of the global allocator.
    Global,
}

impl BlockKind {
    /// Every kind.
    pub const ALL: [Self; 7] = [
        Self::Cached,
        Self::Stable,
        Self::Reserved,
        Self::Parkable,
        Self::Graph,
        Self::Pinned,
        Self::Global,
    ];

    /// Returns the name that traces use.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Cached => "cached",
            Self::Stable => "stable",
            Self::Reserved => "reserved",
            Self::Parkable => "parkable",
            Self::Graph => "graph",
            Self::Pinned => "pinned",
            Self::Global => "global",
        }
    }

    /// Returns the kind with this name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.name() == name)
    }
}

/// One operation on memory.
///
/// See the example of [`Recorder`](crate::Recorder).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct Event {
    /// The time, in nanoseconds since the recorder was created.
    pub at_ns: u64,
    /// The action.
    pub action: Action,
    /// The location.
    pub place: MemoryLocation,
    /// The thread: a number unique in the process, from 1 on, in the order of the threads' first
    /// events.
    pub thread: u32,
    /// The stream's number in its pool, or 0 if there are no streams.
    pub stream: u32,
    /// The address of the block or range.
    pub address: u64,
    /// Bytes: the requested size for allocations, frees and completions, the limit for
    /// [`Limit`](Action::Limit) (`u64::MAX` if there is none), what is in use for
    /// [`Outside`](Action::Outside), the bytes of the plan's range for
    /// [`DropPlan`](Action::DropPlan), otherwise the size taken or released.
    pub bytes: u64,
    /// The kind of memory.
    pub kind: BlockKind,
    /// The tag.
    pub tag: Tag,
    /// The budget that refused, for a [`Fail`](Action::Fail): see [`Event::refused`]. Otherwise
    /// [`Tag::NONE`].
    #[cfg_attr(feature = "serde", serde(skip_serializing_if = "is_none"))]
    pub refused_by: Tag,
}

#[cfg(feature = "serde")]
fn is_none(tag: &Tag) -> bool {
    *tag == Tag::NONE
}

impl Event {
    /// Returns the event with another kind.
    #[inline]
    #[must_use]
    pub fn of_kind(self, kind: BlockKind) -> Self {
        Self { kind, ..self }
    }

    /// Returns the event of a request that the budget `by` refused, whose bytes are charged to the
    /// budget `charged`: the same one, or one below it. [`refused_by`](Event::refused_by) is then
    /// `by`, or both with a slash between them. It is interned as a tag's name is, and counts
    /// towards [`Tag::MAX`].
    ///
    /// ```
    /// use aquifer::{Budget, DeviceId, Tag};
    /// use aquifer::event::{Action, MemoryLocation, Recorder, TracingSink};
    /// let all = Budget::new("all tenants", 60);
    /// let tenant = all.child("tenant a", 100);
    /// let refused = tenant.charge(80).unwrap_err();
    /// let recorder = Recorder::new(std::sync::Arc::new(TracingSink));
    /// let place = MemoryLocation::Device(DeviceId(0));
    /// let event = recorder.event(Action::Fail, place, 0, 0, 80, Tag::NONE);
    /// let event = event.refused(refused.budget, tenant.name());
    /// assert_eq!(event.refused_by.name(), "all tenants/tenant a");
    /// ```
    #[must_use]
    pub fn refused(self, by: &str, charged: &str) -> Self {
        let refused_by =
            if by == charged { Tag::named(by) } else { Tag::named(&format!("{by}/{charged}")) };
        Self { refused_by, ..self }
    }
}
