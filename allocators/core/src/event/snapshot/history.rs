//! What became of the blocks of one device, by the events that were kept.
//!
//! A ring keeps the last events, so the first that are there are those of a program which had been
//! running for a while, and one that was emptied while it was written to may lack some in between.
//! A viewer follows a snapshot backwards from its end and stops at the first thing that cannot have
//! happened, so what is missing is made up for here:
//!
//! | seen | told |
//! |---|---|
//! | a free or a completion of an address that no event named before | as it is: the block was live, or freed, before the first event |
//! | an allocation over a block that is still live | the end of that block, then the allocation |
//! | a completion of a block that was not freed | the free, then the completion |
//! | anything else of a block that is not there | nothing |

use super::Word;
use crate::{Action, Event, Tag};
use std::{
    collections::{BTreeMap, HashSet},
    ops::Range,
    panic::Location,
};

/// Something that a snapshot tells.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Told {
    pub(super) action: Word,
    pub(super) at_ns: u64,
    pub(super) address: u64,
    pub(super) bytes: u64,
    pub(super) stream: u32,
    pub(super) tag: Tag,
}

/// A block that is there at the end.
#[derive(Clone, Copy, Debug)]
pub(super) struct Live {
    pub(super) bytes: u64,
    pub(super) stream: u32,
    pub(super) tag: Tag,
    /// Whether it is freed, and only held back for a use.
    pub(super) freed: bool,
    pub(super) at: Option<&'static Location<'static>>,
}

/// The blocks of one device. Those that are there never overlap.
#[derive(Clone, Default, Debug)]
pub(super) struct History {
    told: Vec<Told>,
    live: BTreeMap<u64, Live>,
    /// Every address that an event was told of.
    named: HashSet<u64>,
    /// What was there before the first event.
    early: Vec<Range<u64>>,
}

fn range(address: u64, bytes: u64) -> Range<u64> {
    address..address.saturating_add(bytes)
}

impl History {
    /// What is told, in order.
    pub(super) fn told(&self) -> &[Told] {
        &self.told
    }

    /// Where blocks lay before the first event.
    pub(super) fn early(&self) -> &[Range<u64>] {
        &self.early
    }

    /// Blocks of these addresses that are there at the end, lowest first.
    pub(super) fn live_in(&self, addresses: Range<u64>) -> impl Iterator<Item = (u64, &Live)> {
        self.live.range(addresses).map(|(&address, live)| (address, live))
    }

    /// Takes the next event.
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
            // Where memory came from and went, which no viewer asks for without addresses, and
            // findings.
            Action::Grow | Action::Reap | Action::Move | Action::Adopt | Action::Finding => {}
        }
    }

    /// A block that is live at the end. What events say of its address, or of a block over it,
    /// counts more.
    pub(super) fn hold(&mut self, address: u64, live: Live) {
        if live.bytes > 0 && self.was_there(address, live.bytes) {
            self.live.insert(address, live);
        }
    }

    /// Whether a block that no event has named can have been there from before the first; then it
    /// is noted.
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
        // They do not overlap each other: the first that ends before is the last to look at.
        before
            .take_while(|(address, live)| address.saturating_add(live.bytes) > range.start)
            .map(|(&address, &live)| (address, live))
            .collect()
    }

    /// The last of a block, and its free where that was not seen.
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
