//! The keys and values of a snapshot.

macro_rules! words {
    ($($word:ident = $text:literal),+ $(,)?) => {
        /// A key or a value of a snapshot: an action, a location or the state of a block.
        ///
        /// Writers and readers of snapshots share this list.
        ///
        /// ```
        /// use aquifer_core::event::snapshot::Word;
        /// assert_eq!(Word::FreeCompleted.text(), "free_completed");
        /// assert_eq!(Word::of(b"free_completed"), Some(Word::FreeCompleted));
        /// ```
        #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
        #[non_exhaustive]
        pub enum Word { $(#[doc = concat!("`", $text, "`")] $word),+ }

        impl Word {
            /// Returns the word with this text, if there is one.
            #[must_use]
            pub fn of(text: &[u8]) -> Option<Self> {
                match text {
                    $(text if text == $text.as_bytes() => Some(Self::$word),)+
                    _ => None,
                }
            }

            /// Returns the text of the word.
            #[must_use]
            pub fn text(self) -> &'static str {
                match self { $(Self::$word => $text),+ }
            }
        }
    };
}

words! {
    Segments = "segments",
    DeviceTraces = "device_traces",
    Action = "action",
    Addr = "addr",
    Size = "size",
    Stream = "stream",
    Device = "device",
    Blocks = "blocks",
    State = "state",
    Address = "address",
    RequestedSize = "requested_size",
    Alloc = "alloc",
    FreeRequested = "free_requested",
    FreeCompleted = "free_completed",
    SegmentAlloc = "segment_alloc",
    SegmentFree = "segment_free",
    SegmentMap = "segment_map",
    SegmentUnmap = "segment_unmap",
    Snapshot = "snapshot",
    Oom = "oom",
    UserDefined = "user_defined",
    WorkspaceSnapshot = "workspace_snapshot",
    ActiveAllocated = "active_allocated",
    ActivePendingFree = "active_pending_free",
    ActiveAwaitingFree = "active_awaiting_free",
    Inactive = "inactive",
}
