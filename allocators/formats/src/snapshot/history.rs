//! The history of the blocks of one device, reconstructed from the events that were kept.
//!
//! A ring keeps only the last events, so earlier ones are missing, and a ring that was emptied
//! during writes may lack some in between. A viewer replays a snapshot backwards from its end and
//! stops at the first inconsistency, so missing entries are reconstructed here:
//!
//! - A free or a completion of an address that no earlier event named is written as it is: the
//!   block was live, or freed, before the first event.
//! - Before an allocation over a block that is still live, the end of that block is written.
//! - Before a completion of a block that was not freed, its free is written.
//! - Any other event of an unknown block is dropped.

use crate::pickle::Word;
use aquifer_core::{Action, Event, Tag};
use std::{
    collections::{BTreeMap, HashSet},
    ops::Range,
    panic::Location,
};

/// An entry of a snapshot.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct TraceEntry {
    pub(super) action: Word,
    pub(super) at_ns: u64,
    pub(super) address: u64,
    pub(super) bytes: u64,
    pub(super) stream: u32,
    pub(super) tag: Tag,
}

/// A block that exists at the end.
#[derive(Clone, Copy, Debug)]
pub(super) struct LiveBlock {
    pub(super) bytes: u64,
    pub(super) stream: u32,
    pub(super) tag: Tag,
    /// Whether it is freed and only pending on a use.
    pub(super) freed: bool,
    pub(super) at: Option<&'static Location<'static>>,
}

/// The blocks of one device. Existing blocks never overlap.
#[derive(Clone, Default, Debug)]
pub(super) struct History {
    entries: Vec<TraceEntry>,
    live: BTreeMap<u64, LiveBlock>,
    /// Every address that an entry names.
    known_addresses: HashSet<u64>,
    /// The ranges of blocks that existed before the first event.
    preexisting: Vec<Range<u64>>,
}

fn range(address: u64, bytes: u64) -> Range<u64> {
    address..address.saturating_add(bytes)
}

impl History {
    /// Returns the entries, in order.
    pub(super) fn entries(&self) -> &[TraceEntry] {
        &self.entries
    }

    /// Returns the ranges of blocks that existed before the first event.
    pub(super) fn preexisting(&self) -> &[Range<u64>] {
        &self.preexisting
    }

    /// An iterator over the blocks in this address range that exist at the end, lowest first.
    pub(super) fn live_in(&self, addresses: Range<u64>) -> impl Iterator<Item = (u64, &LiveBlock)> {
        self.live.range(addresses).map(|(&address, live)| (address, live))
    }

    /// Processes the next event.
    pub(super) fn apply(&mut self, event: &Event) {
        let Event { at_ns, action, stream, address, bytes, tag, .. } = *event;
        let entry = |action| TraceEntry { action, at_ns, address, bytes, stream, tag };
        match action {
            Action::Fail => self.entries.push(entry(Word::Oom)),
            _ if bytes == 0 => {}
            Action::Allocate => {
                for (address, live) in self.overlapping(&range(address, bytes)) {
                    self.end_block(address, live, at_ns);
                }
                self.live.insert(address, LiveBlock { bytes, stream, tag, freed: false, at: None });
                self.push(entry(Word::Alloc));
            }
            Action::Free => match self.live.get_mut(&address) {
                Some(live) if live.freed => {}
                Some(live) => {
                    live.freed = true;
                    let entry = TraceEntry { bytes: live.bytes, ..entry(Word::FreeRequested) };
                    self.push(entry);
                }
                None => {
                    if self.record_preexisting(address, bytes) {
                        self.live.insert(
                            address,
                            LiveBlock { bytes, stream, tag, freed: true, at: None },
                        );
                        self.push(entry(Word::FreeRequested));
                    }
                }
            },
            Action::Complete => match self.live.get(&address).copied() {
                Some(live) => self.end_block(address, live, at_ns),
                None => {
                    if self.record_preexisting(address, bytes) {
                        self.push(entry(Word::FreeCompleted));
                    }
                }
            },
            // All others are of no use to a viewer, since they have no addresses.
            _ => {}
        }
    }

    /// Adds a block that is live at the end, unless events contradict it: they name its address, or
    /// have a block that overlaps it.
    pub(super) fn add_live(&mut self, address: u64, live: LiveBlock) {
        if live.bytes > 0 && self.record_preexisting(address, live.bytes) {
            self.live.insert(address, live);
        }
    }

    /// Returns whether a block that no event has named may have existed before the first event. If
    /// so, records its range.
    fn record_preexisting(&mut self, address: u64, bytes: u64) -> bool {
        let preexisting = range(address, bytes);
        let possible =
            !self.known_addresses.contains(&address) && self.overlapping(&preexisting).is_empty();
        if possible {
            self.preexisting.push(preexisting);
        }
        possible
    }

    fn overlapping(&self, range: &Range<u64>) -> Vec<(u64, LiveBlock)> {
        let before = self.live.range(..range.end).rev();
        // Existing blocks are disjoint, so the first one that ends before the range is the last to
        // visit.
        before
            .take_while(|(address, live)| address.saturating_add(live.bytes) > range.start)
            .map(|(&address, &live)| (address, live))
            .collect()
    }

    /// Records the end of a block, and its free if that was not seen.
    fn end_block(&mut self, address: u64, live: LiveBlock, at_ns: u64) {
        let LiveBlock { bytes, stream, tag, freed, .. } = live;
        let entry = |action| TraceEntry { action, at_ns, address, bytes, stream, tag };
        if !freed {
            self.push(entry(Word::FreeRequested));
        }
        self.push(entry(Word::FreeCompleted));
        self.live.remove(&address);
    }

    fn push(&mut self, entry: TraceEntry) {
        self.known_addresses.insert(entry.address);
        self.entries.push(entry);
    }
}
