//! What is known about blocks: their records, and the list of those that bypass the checks.

use aquifer_core::{Bytes, Tag};
use aquifer_driver::site;
use aquifer_stream::Timeline;
use std::{
    backtrace::Backtrace,
    collections::BTreeMap,
    fmt,
    panic::Location,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicU64, Ordering},
    },
    time::Instant,
};

/// The debugging record of a block.
///
/// See [`LeakReport`](crate::LeakReport) for an example.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct BlockRecord {
    /// The block's first address.
    pub address: u64,
    /// Number of bytes requested.
    pub bytes: u64,
    /// The tag of the request.
    pub tag: Tag,
    /// The number of blocks that the pool had allocated with this one, itself included.
    pub number: u64,
    /// The driver's number of the owner stream (`cuStreamGetId`), which the simulated GPU uses
    /// too.
    pub stream: u64,
    /// The number of that stream in its pool, which recorders and snapshots use.
    pub(crate) of_pool: u32,
    /// When it was allocated.
    pub born: Instant,
    /// The line that allocated it.
    pub allocated_at: &'static Location<'static>,
    /// The line that freed it, if it was freed by [`DevicePool::free`](crate::DevicePool::free) or
    /// inside a function of this library. A plain drop does not pass its line.
    pub freed_at: Option<&'static Location<'static>>,
    /// The call stack of the allocation, with
    /// [`Debugging::backtraces`](crate::Debugging::backtraces).
    pub allocated_by: Option<Arc<Backtrace>>,
    /// The call stack of the free, likewise.
    pub freed_by: Option<Arc<Backtrace>>,
}

impl fmt::Display for BlockRecord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { address, bytes, tag, number, stream, .. } = self;
        write!(
            f,
            "block {number} at {address:#x}, {} for \"{tag}\" on stream {stream}",
            Bytes(*bytes)
        )
    }
}

impl BlockRecord {
    /// Writes where the block was allocated and freed.
    pub(crate) fn write_details(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "\n  block       {self}\n  allocated   {}", self.allocated_at)?;
        if let Some(stack) = &self.allocated_by {
            write!(f, "\n  allocated by\n{}", stack.to_string().trim_end())?;
        }
        if let Some(freed_at) = self.freed_at {
            write!(f, "\n  freed       {freed_at}")?;
        }
        if let Some(stack) = &self.freed_by {
            write!(f, "\n  freed by\n{}", stack.to_string().trim_end())?;
        }
        Ok(())
    }
}

/// Returns the number by which findings name a stream: the driver's own, which violations of the
/// simulated GPU use too. A stream without one, since it captures, is named by its number in its
/// pool.
pub(crate) fn stream_of(stream: &Timeline) -> u64 {
    stream.id().unwrap_or_else(|| u64::from(stream.number()))
}

/// Addresses of which a part is committed.
pub(crate) trait CommittedBytes: Send + Sync {
    /// Returns the committed bytes.
    fn committed_bytes(&self) -> u64;
}

/// The live blocks of a pool that bypass its checks: stable and reserved memory, memory of graphs
/// and parkable memory. Numbers all blocks of the pool.
#[derive(Default)]
pub(crate) struct LiveBlockList {
    numbers: AtomicU64,
    backtraces: bool,
    live: Mutex<BTreeMap<u64, UncheckedBlock>>,
}

/// A block that bypasses the checks.
struct UncheckedBlock {
    record: BlockRecord,
    /// For reserved memory, what is committed.
    committed: Option<Weak<dyn CommittedBytes>>,
}

/// Removes its block from the listing when it is dropped.
pub(crate) struct LiveBlockEntry {
    listing: Arc<LiveBlockList>,
    number: u64,
}

impl Drop for LiveBlockEntry {
    fn drop(&mut self) {
        let listed = self.listing.live().remove(&self.number);
        debug_assert!(listed.is_some(), "a block was removed twice");
    }
}

impl LiveBlockList {
    pub(crate) fn new(backtraces: bool) -> Self {
        Self { backtraces, ..Self::default() }
    }

    fn live(&self) -> MutexGuard<'_, BTreeMap<u64, UncheckedBlock>> {
        self.live.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the call stack, if stacks are kept.
    pub(crate) fn backtrace(&self) -> Option<Arc<Backtrace>> {
        self.backtraces.then(|| Arc::new(Backtrace::force_capture()))
    }

    /// Returns the record of the next block.
    pub(crate) fn record(
        &self,
        (address, bytes): (u64, u64),
        tag: Tag,
        owner_stream: &Timeline,
        allocated_at: &'static Location<'static>,
    ) -> BlockRecord {
        BlockRecord {
            address,
            bytes,
            tag,
            number: self.numbers.fetch_add(1, Ordering::Relaxed) + 1,
            stream: stream_of(owner_stream),
            of_pool: owner_stream.number(),
            born: Instant::now(),
            allocated_at,
            freed_at: None,
            allocated_by: self.backtrace(),
            freed_by: None,
        }
    }

    /// Lists a block of `bytes`, or of the committed bytes, until the returned value is dropped.
    #[track_caller]
    pub(crate) fn list(
        self: &Arc<Self>,
        range: (u64, u64),
        tag: Tag,
        owner_stream: &Timeline,
        committed: Option<Arc<dyn CommittedBytes>>,
    ) -> LiveBlockEntry {
        let record = self.record(range, tag, owner_stream, site::current());
        let number = record.number;
        let committed = committed.as_ref().map(Arc::downgrade);
        let before = self.live().insert(number, UncheckedBlock { record, committed });
        debug_assert!(before.is_none(), "two blocks have one number");
        LiveBlockEntry { listing: self.clone(), number }
    }

    /// Returns the live blocks. Reserved memory counts with its committed bytes, and is left out if
    /// it has none.
    pub(crate) fn records(&self) -> Vec<BlockRecord> {
        let live = self.live();
        let records = live.values().filter_map(|block| {
            let committed = block.committed.as_ref().map(Weak::upgrade);
            let bytes = match committed {
                None => block.record.bytes,
                Some(memory) => memory?.committed_bytes(),
            };
            (bytes > 0).then(|| BlockRecord { bytes, ..block.record.clone() })
        });
        records.collect()
    }
}
