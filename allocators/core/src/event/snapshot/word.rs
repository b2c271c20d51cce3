//! The strings of a snapshot that mean something.

macro_rules! words {
    ($($word:ident = $text:literal),+ $(,)?) => {
        /// A key or a value of a snapshot that says what happened, where, or in what state a block is.
        ///
        /// Who writes snapshots and who reads them has the same list.
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
            /// The word that is written so, if there is one.
            #[must_use]
            pub fn of(text: &[u8]) -> Option<Self> {
                match text {
                    $(text if text == $text.as_bytes() => Some(Self::$word),)+
                    _ => None,
                }
            }

            /// As it is written.
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
