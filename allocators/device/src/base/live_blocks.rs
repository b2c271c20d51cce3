//! The live blocks of a pool that bypass its checks.

use super::record::{BlockRecord, stream_of};
use aquifer_core::Tag;
use aquifer_driver::site;
use aquifer_stream::Timeline;
use std::{
    backtrace::Backtrace,
    collections::BTreeMap,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicU64, Ordering},
    },
    time::Instant,
};

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
        self.listing.live().remove(&self.number);
    }
}

impl LiveBlockList {
    pub(crate) fn new(backtraces: bool) -> Self {
        Self { backtraces, ..Self::default() }
    }

    fn live(&self) -> MutexGuard<'_, BTreeMap<u64, UncheckedBlock>> {
        self.live.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the number of the next block.
    pub(crate) fn number(&self) -> u64 {
        self.numbers.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// Lists a block of `bytes`, or of the committed bytes, until the returned value is dropped.
    #[track_caller]
    pub(crate) fn list(
        self: &Arc<Self>,
        (address, bytes): (u64, u64),
        tag: Tag,
        owner_stream: &Timeline,
        committed: Option<Arc<dyn CommittedBytes>>,
    ) -> LiveBlockEntry {
        let number = self.number();
        let record = BlockRecord {
            address,
            bytes,
            tag,
            number,
            stream: stream_of(owner_stream),
            of_pool: owner_stream.number(),
            born: Instant::now(),
            allocated_at: site::current(),
            freed_at: None,
            allocated_by: self.backtraces.then(|| Arc::new(Backtrace::force_capture())),
            freed_by: None,
        };
        let committed = committed.as_ref().map(Arc::downgrade);
        self.live().insert(number, UncheckedBlock { record, committed });
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
