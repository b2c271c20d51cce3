//! Host memory that devices can access, and its last accesses.

use super::{
    access_history::{AccessHistory, Action},
    clock::Clock,
    violation::Finding,
};
use crate::DeviceId;
use std::collections::BTreeMap;

/// How memory was pinned, which decides how it is unpinned.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum PinKind {
    /// Allocated by the driver, with the requested size.
    Allocated,
    /// Memory of the program that was registered.
    Registered,
}

#[derive(Debug)]
pub(crate) struct PinnedRange {
    pub(crate) bytes: u64,
    pub(crate) device: DeviceId,
    pub(crate) kind: PinKind,
    /// The action that pinned it.
    pub(crate) cause: Action,
    history: AccessHistory,
}

/// The kind of a host range in a copy.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum HostMemoryKind {
    /// Inside one registration.
    Pinned,
    /// In no registration.
    Pageable,
    /// It begins in a registration and extends past its end.
    Straddling,
}

/// All registrations, by address. They do not overlap.
#[derive(Default, Debug)]
pub(crate) struct PinnedMemory {
    ranges: BTreeMap<u64, PinnedRange>,
}

impl PinnedMemory {
    /// Adds a registration. Returns `false` if any part of it is already registered.
    pub(crate) fn add(
        &mut self,
        address: u64,
        bytes: u64,
        device: DeviceId,
        kind: PinKind,
        cause: Action,
    ) -> bool {
        if self.overlapping(address, bytes).next().is_some() {
            return false;
        }
        let history = AccessHistory::new(bytes);
        self.ranges.insert(address, PinnedRange { bytes, device, kind, cause, history });
        true
    }

    /// Returns the registration that contains an address.
    pub(crate) fn containing(&self, address: u64) -> Option<&PinnedRange> {
        let (&start, pinned) = self.ranges.range(..=address).next_back()?;
        (start + pinned.bytes > address).then_some(pinned)
    }

    /// Returns the registration that starts here.
    pub(crate) fn get(&self, address: u64) -> Option<&PinnedRange> {
        self.ranges.get(&address)
    }

    pub(crate) fn remove(&mut self, address: u64) {
        self.ranges.remove(&address);
    }

    pub(crate) fn classify(&self, address: u64, bytes: u64) -> HostMemoryKind {
        match self.ranges.range(..=address).next_back() {
            Some((&start, pinned)) if start + pinned.bytes > address => {
                if address.saturating_add(bytes) <= start + pinned.bytes {
                    HostMemoryKind::Pinned
                } else {
                    HostMemoryKind::Straddling
                }
            }
            _ => HostMemoryKind::Pageable,
        }
    }

    fn start_containing(&self, address: u64) -> u64 {
        match self.ranges.range(..=address).next_back() {
            Some((&start, pinned)) if start + pinned.bytes > address => start,
            _ => address,
        }
    }

    fn overlapping(&self, address: u64, bytes: u64) -> impl Iterator<Item = (&u64, &PinnedRange)> {
        self.ranges.range(self.start_containing(address)..address.saturating_add(bytes))
    }

    /// Returns whether any part of a range is pinned in this way.
    pub(crate) fn overlaps(&self, address: u64, bytes: u64, kind: PinKind) -> bool {
        self.overlapping(address, bytes).any(|(_, pinned)| pinned.kind == kind)
    }

    /// Records an action on the pinned parts of a range.
    pub(crate) fn record(
        &mut self,
        address: u64,
        bytes: u64,
        action: &Action,
        clock: &Clock,
        findings: &mut Vec<Finding>,
    ) {
        let end = address.saturating_add(bytes);
        for (&start, pinned) in self.ranges.range_mut(self.start_containing(address)..end) {
            let from = start.max(address);
            let to = end.min(start + pinned.bytes);
            pinned.history.record(start, from - start, to - from, action, clock, findings);
        }
    }

    /// Removes all records of accesses.
    pub(crate) fn clear_records(&mut self) {
        self.ranges
            .values_mut()
            .for_each(|pinned| pinned.history = AccessHistory::new(pinned.bytes));
    }

    /// Returns the number of registrations of a device with this origin.
    pub(crate) fn count(&self, device: DeviceId, kind: PinKind) -> u64 {
        self.ranges.values().filter(|pinned| pinned.device == device && pinned.kind == kind).count()
            as u64
    }
}
