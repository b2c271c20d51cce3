//! The values of a pickle, and the keys and values of a snapshot that have a meaning here.

macro_rules! words {
    ($($word:ident = $text:literal),+ $(,)?) => {
        /// A key or a value of a snapshot: an action, a location or the state of a block.
        ///
        /// The reader keeps these strings by number.
        #[derive(Clone, Copy, PartialEq, Eq, Debug)]
        pub(crate) enum Word { $(#[doc = concat!("`", $text, "`")] $word),+ }

        impl Word {
            /// Returns the word with this text, if there is one.
            pub(crate) fn of(text: &[u8]) -> Option<Self> {
                match text {
                    $(text if text == $text.as_bytes() => Some(Self::$word),)+
                    _ => None,
                }
            }

            /// Returns the text of the word.
            pub(crate) fn text(self) -> &'static str {
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
    Annotate = "annotate",
    HostSegments = "host_segments",
    HostTraces = "host_traces",
    ActiveAllocated = "active_allocated",
    ActivePendingFree = "active_pending_free",
    ActiveAwaitingFree = "active_awaiting_free",
    Inactive = "inactive",
    Frames = "frames",
    Name = "name",
    Filename = "filename",
    Line = "line",
    TimeUs = "time_us",
    Category = "category",
    UserMetadata = "user_metadata",
    DeviceFree = "device_free",
    ExternalAnnotations = "external_annotations",
    Stage = "stage",
    Start = "START",
    End = "END",
}

/// A value in a pickle.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Value {
    /// A whole number that fits into 64 bits.
    Int(i64),
    /// A known string.
    Word(Word),
    /// Another string, by its number.
    Text(u32),
    /// A call stack, by its number.
    Stack(u32),
    /// A list, or a tuple that contains objects, by its index.
    List(u32),
    /// A dictionary, by its index.
    Dict(u32),
    /// Anything else.
    Other,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_word_is_found_by_its_text() {
        assert_eq!(Word::of(b"segment_map"), Some(Word::SegmentMap));
        assert_eq!(Word::of(Word::FreeCompleted.text().as_bytes()), Some(Word::FreeCompleted));
        assert_eq!(Word::of(b"pool_id"), None);
    }
}
