//! Heaps and regions, from the announcements of pools.
//!
//! # Invariants
//! - Heaps do not overlap, and neither do regions.
//! - Every region lies in one heap, and ends before it.
//! - A handle of the tool that is used has been returned by it and not been ended.

use super::tool::{HeapHandle, MemoryTool};
use aquifer_core::{
    Action, Event, Tag,
    event::{
        BlockKind, MemoryLocation,
        announcement::{Announcement, Announcer},
    },
};
use std::{
    collections::BTreeMap,
    ffi::{CStr, CString},
    ops::Range,
};

/// The most characters of a name that compute-sanitizer accepts.
const NAME_CHARACTERS: usize = 49;

/// Announces the heaps and regions of all pools to a tool.
#[derive(Debug)]
pub(super) struct PoolAnnouncer {
    tool: MemoryTool,
    /// By address.
    heaps: BTreeMap<u64, AnnouncedHeap>,
    /// By address.
    regions: BTreeMap<u64, AnnouncedRegion>,
    /// Whether the tool has refused a heap, which is reported once.
    refused: bool,
}

#[derive(Clone, Copy, Debug)]
struct AnnouncedHeap {
    end: u64,
    handle: HeapHandle,
}

/// A block, or a part of a graph's block that no earlier block has occupied.
#[derive(Debug)]
struct AnnouncedRegion {
    end: u64,
    /// Whether its owner has freed it.
    freed: bool,
}

impl PoolAnnouncer {
    pub(super) fn new(tool: MemoryTool) -> Self {
        Self { tool, heaps: BTreeMap::new(), regions: BTreeMap::new(), refused: false }
    }

    fn supply(&mut self, range: Range<u64>) {
        // Two simulated machines may use the same addresses.
        self.withdraw(range.clone());
        match self.tool.register_heap(range.start, range.end - range.start) {
            Some(handle) => {
                self.heaps.insert(range.start, AnnouncedHeap { end: range.end, handle });
            }
            None if !self.refused => {
                self.refused = true;
                tracing::warn!(
                    target: "aquifer",
                    "the tool has refused {range:#x?} as a heap: blocks there are not checked"
                );
            }
            None => {}
        }
    }

    fn withdraw(&mut self, range: Range<u64>) {
        self.end_regions(&range);
        while let Some((&address, &heap)) = self.heaps.range(..range.end).next_back()
            && heap.end > range.start
        {
            self.heaps.remove(&address);
            self.tool.unregister_heap(heap.handle);
        }
    }

    /// Returns the heap that contains a range.
    fn heap_of(&self, range: &Range<u64>) -> Option<HeapHandle> {
        let (_, heap) = self.heaps.range(..=range.start).next_back()?;
        (heap.end >= range.end).then_some(heap.handle)
    }

    /// Ends the regions that overlap a range. A range is allocated again only when its last block
    /// has ended, but the event of that end may still be under way.
    fn end_regions(&mut self, range: &Range<u64>) {
        while let Some((&address, region)) = self.regions.range(..range.end).next_back()
            && region.end > range.start
        {
            self.end_region(address);
        }
    }

    fn end_region(&mut self, address: u64) {
        if self.regions.remove(&address).is_some() {
            self.tool.unregister_region(address);
        }
    }

    fn allocate(&mut self, event: &Event) {
        let range = event.address..event.address.saturating_add(event.bytes);
        let name = region_name(event.tag);
        if event.kind == BlockKind::Graph {
            for gap in self.gaps_in(&range) {
                self.begin_region(gap, name.as_deref());
            }
        } else {
            self.end_regions(&range);
            self.begin_region(range, name.as_deref());
        }
    }

    /// Registers a range that overlaps no region, if its memory is announced.
    fn begin_region(&mut self, range: Range<u64>, name: Option<&CStr>) {
        // Imported memory has no bytes here.
        let Some(heap) = self.heap_of(&range).filter(|_| !range.is_empty()) else { return };
        self.tool.register_region(heap, range.start, range.end - range.start);
        if let Some(name) = name {
            self.tool.name_region(range.start, name);
        }
        self.regions.insert(range.start, AnnouncedRegion { end: range.end, freed: false });
    }

    /// Returns the parts of a range that are in no region, by address.
    fn gaps_in(&self, range: &Range<u64>) -> Vec<Range<u64>> {
        let before = self.regions.range(..range.start).next_back();
        let mut at = before.map_or(range.start, |(_, region)| region.end.max(range.start));
        let mut gaps = Vec::new();
        for (&address, region) in self.regions.range(range.clone()) {
            if at < address {
                gaps.push(at..address);
            }
            at = region.end;
        }
        if at < range.end {
            gaps.push(at..range.end);
        }
        gaps
    }

    fn record(&mut self, event: &Event) {
        match event.action {
            Action::Allocate => self.allocate(event),
            // Launches access what was freed when the graph was captured.
            Action::Free | Action::Complete if event.kind == BlockKind::Graph => {}
            Action::Free => {
                if let Some(region) = self.regions.get_mut(&event.address) {
                    region.freed = true;
                }
            }
            // An end that comes after the next block's begin is not that block's.
            Action::Complete
                if self.regions.get(&event.address).is_some_and(|region| region.freed) =>
            {
                self.end_region(event.address);
            }
            _ => {}
        }
    }
}

impl Announcer for PoolAnnouncer {
    fn announce(&mut self, announcement: &Announcement) {
        match announcement {
            Announcement::Supplied(range) => {
                self.supply(range.address..range.address.saturating_add(range.bytes));
            }
            Announcement::Withdrawn(range) => {
                self.withdraw(range.address..range.address.saturating_add(range.bytes));
            }
            Announcement::Event(event) if matches!(event.place, MemoryLocation::Device(_)) => {
                self.record(event);
            }
            _ => {}
        }
    }
}

/// Returns the name of a tag's regions, in the characters that tools accept.
fn region_name(tag: Tag) -> Option<CString> {
    if tag == Tag::NONE {
        return None;
    }
    let printable = |c: char| if c == ' ' || c.is_ascii_graphic() { c as u8 } else { b'_' };
    let name: Vec<u8> = tag.name().chars().take(NAME_CHARACTERS).map(printable).collect();
    CString::new(name).ok().filter(|name| !name.is_empty())
}
