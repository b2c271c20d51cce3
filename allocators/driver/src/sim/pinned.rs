//! Host memory that devices can access, and its last accesses.

use super::{
    clock::Clock,
    ledger::{Ledger, Mark},
    violation::Finding,
};
use crate::DeviceId;
use std::collections::BTreeMap;

/// How memory was pinned, which decides how it is unpinned.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Origin {
    /// Allocated by the driver, with the requested size.
    Allocated,
    /// Memory of the program that was registered.
    Registered,
}

#[derive(Debug)]
pub(crate) struct Pinned {
    pub(crate) bytes: u64,
    pub(crate) device: DeviceId,
    pub(crate) origin: Origin,
    /// Whether devices may only read it.
    pub(crate) read_only: bool,
    /// The action that pinned it.
    pub(crate) by: Mark,
    ledger: Ledger,
}

/// The kind of a host range in a copy.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Side {
    /// Inside one registration.
    Pinned,
    /// In no registration.
    Pageable,
    /// It begins in a registration and extends past its end.
    Across,
}

/// All registrations, by address. They do not overlap.
#[derive(Default, Debug)]
pub(crate) struct PinnedMemory {
    ranges: BTreeMap<u64, Pinned>,
}

impl PinnedMemory {
    /// Adds a registration. Returns `false` if any part of it is already registered.
    pub(crate) fn add(
        &mut self,
        address: u64,
        bytes: u64,
        device: DeviceId,
        origin: Origin,
        by: Mark,
    ) -> bool {
        if self.overlapping(address, bytes).next().is_some() {
            return false;
        }
        let ledger = Ledger::new(bytes);
        self.ranges.insert(address, Pinned { bytes, device, origin, read_only: false, by, ledger });
        true
    }

    /// Makes the registration that starts here read-only for devices.
    pub(crate) fn protect(&mut self, address: u64) {
        if let Some(pinned) = self.ranges.get_mut(&address) {
            pinned.read_only = true;
        }
    }

    /// Returns the registration that contains an address.
    pub(crate) fn holding(&self, address: u64) -> Option<&Pinned> {
        let (&start, pinned) = self.ranges.range(..=address).next_back()?;
        (start + pinned.bytes > address).then_some(pinned)
    }

    /// Returns the registration that starts here.
    pub(crate) fn get(&self, address: u64) -> Option<&Pinned> {
        self.ranges.get(&address)
    }

    pub(crate) fn remove(&mut self, address: u64) {
        self.ranges.remove(&address);
    }

    pub(crate) fn side(&self, address: u64, bytes: u64) -> Side {
        match self.ranges.range(..=address).next_back() {
            Some((&start, pinned)) if start + pinned.bytes > address => {
                if address.saturating_add(bytes) <= start + pinned.bytes {
                    Side::Pinned
                } else {
                    Side::Across
                }
            }
            _ => Side::Pageable,
        }
    }

    fn first(&self, address: u64) -> u64 {
        match self.ranges.range(..=address).next_back() {
            Some((&start, pinned)) if start + pinned.bytes > address => start,
            _ => address,
        }
    }

    fn overlapping(&self, address: u64, bytes: u64) -> impl Iterator<Item = (&u64, &Pinned)> {
        self.ranges.range(self.first(address)..address.saturating_add(bytes))
    }

    /// Returns whether any part of a range is pinned in this way.
    pub(crate) fn overlaps(&self, address: u64, bytes: u64, origin: Origin) -> bool {
        self.overlapping(address, bytes).any(|(_, pinned)| pinned.origin == origin)
    }

    /// Records an action on the pinned parts of a range.
    pub(crate) fn act(
        &mut self,
        address: u64,
        bytes: u64,
        mark: &Mark,
        clock: &Clock,
        found: &mut Vec<Finding>,
    ) {
        let end = address.saturating_add(bytes);
        for (&start, pinned) in self.ranges.range_mut(self.first(address)..end) {
            let from = start.max(address);
            let to = end.min(start + pinned.bytes);
            pinned.ledger.act(start, from - start, to - from, mark, clock, found);
        }
    }

    /// Removes all records of accesses.
    pub(crate) fn forget(&mut self) {
        self.ranges.values_mut().for_each(|pinned| pinned.ledger = Ledger::new(pinned.bytes));
    }

    /// Returns the number of registrations of a device with this origin.
    pub(crate) fn count(&self, device: DeviceId, origin: Origin) -> u64 {
        self.ranges
            .values()
            .filter(|pinned| pinned.device == device && pinned.origin == origin)
            .count() as u64
    }
}
