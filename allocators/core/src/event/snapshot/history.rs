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

use super::Word;
use crate::{Action, Event, Tag};
use std::{
    collections::{BTreeMap, HashSet},
    ops::Range,
    panic::Location,
};

/// An entry of a snapshot.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Told {
    pub(super) action: Word,
    pub(super) at_ns: u64,
    pub(super) address: u64,
    pub(super) bytes: u64,
    pub(super) stream: u32,
    pub(super) tag: Tag,
}

/// A block that exists at the end.
#[derive(Clone, Copy, Debug)]
pub(super) struct Live {
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
    told: Vec<Told>,
    live: BTreeMap<u64, Live>,
    /// Every address that an entry names.
    named: HashSet<u64>,
    /// The ranges of blocks that existed before the first event.
    early: Vec<Range<u64>>,
}

fn range(address: u64, bytes: u64) -> Range<u64> {
    address..address.saturating_add(bytes)
}

impl History {
    /// Returns the entries, in order.
    pub(super) fn told(&self) -> &[Told] {
        &self.told
    }

    /// Returns the ranges of blocks that existed before the first event.
    pub(super) fn early(&self) -> &[Range<u64>] {
        &self.early
    }

    /// An iterator over the blocks in this address range that exist at the end, lowest first.
    pub(super) fn live_in(&self, addresses: Range<u64>) -> impl Iterator<Item = (u64, &Live)> {
        self.live.range(addresses).map(|(&address, live)| (address, live))
    }

    /// Processes the next event.
    pub(super) fn take(&mut self, event: &Event) {
        let Event { at_ns, action, stream, address, bytes, tag, .. } = *event;
        let told = |action| Told { action, at_ns, address, bytes, stream, tag };
        match action {
            Action::Fail => self.told.push(told(Word::Oom)),
            _ if bytes == 0 => {}
            Action::Allocate => {
                for (address, live) in self.overlapping(&range(address, bytes)) {
                    self.end(address, live, at_ns);
                }
                self.live.insert(address, Live { bytes, stream, tag, freed: false, at: None });
                self.tell(told(Word::Alloc));
            }
            Action::Free => match self.live.get_mut(&address) {
                Some(live) if live.freed => {}
                Some(live) => {
                    live.freed = true;
                    let told = Told { bytes: live.bytes, ..told(Word::FreeRequested) };
                    self.tell(told);
                }
                None => {
                    if self.was_there(address, bytes) {
                        self.live
                            .insert(address, Live { bytes, stream, tag, freed: true, at: None });
                        self.tell(told(Word::FreeRequested));
                    }
                }
            },
            Action::Complete => match self.live.get(&address).copied() {
                Some(live) => self.end(address, live, at_ns),
                None => {
                    if self.was_there(address, bytes) {
                        self.tell(told(Word::FreeCompleted));
                    }
                }
            },
            // Without addresses these are of no use to a viewer.
            Action::Grow | Action::Reap | Action::Move | Action::Adopt | Action::Finding => {}
        }
    }

    /// Adds a block that is live at the end, unless events contradict it: they name its address, or
    /// have a block that overlaps it.
    pub(super) fn hold(&mut self, address: u64, live: Live) {
        if live.bytes > 0 && self.was_there(address, live.bytes) {
            self.live.insert(address, live);
        }
    }

    /// Returns whether a block that no event has named may have existed before the first event. If
    /// so, records its range.
    fn was_there(&mut self, address: u64, bytes: u64) -> bool {
        let early = range(address, bytes);
        let can = !self.named.contains(&address) && self.overlapping(&early).is_empty();
        if can {
            self.early.push(early);
        }
        can
    }

    fn overlapping(&self, range: &Range<u64>) -> Vec<(u64, Live)> {
        let before = self.live.range(..range.end).rev();
        // Existing blocks are disjoint, so the first one that ends before the range is the last to
        // visit.
        before
            .take_while(|(address, live)| address.saturating_add(live.bytes) > range.start)
            .map(|(&address, &live)| (address, live))
            .collect()
    }

    /// Records the end of a block, and its free if that was not seen.
    fn end(&mut self, address: u64, live: Live, at_ns: u64) {
        let Live { bytes, stream, tag, freed, .. } = live;
        let told = |action| Told { action, at_ns, address, bytes, stream, tag };
        if !freed {
            self.tell(told(Word::FreeRequested));
        }
        self.tell(told(Word::FreeCompleted));
        self.live.remove(&address);
    }

    fn tell(&mut self, told: Told) {
        self.named.insert(told.address);
        self.told.push(told);
    }
}
