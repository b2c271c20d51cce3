//! Host memory that devices can reach, and who touched it last.

use super::{
    clock::Clock,
    ledger::{Ledger, Mark},
    violation::Finding,
};
use crate::DeviceId;
use std::collections::BTreeMap;

/// How memory came to be pinned, and so how that ends.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Origin {
    /// The driver's own, with the bytes asked for.
    Allocated,
    /// The program's, registered.
    Registered,
}

#[derive(Debug)]
pub(crate) struct Pinned {
    pub(crate) bytes: u64,
    pub(crate) device: DeviceId,
    pub(crate) origin: Origin,
    /// Whether devices may only read it.
    pub(crate) read_only: bool,
    /// Who pinned it.
    pub(crate) by: Mark,
    ledger: Ledger,
}

/// What the driver makes of a host range.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Side {
    /// In one registration.
    Pinned,
    /// In none.
    Pageable,
    /// It begins in a registration and reaches past its end.
    Across,
}

/// Every registration, by address; they do not overlap.
#[derive(Default, Debug)]
pub(crate) struct PinnedMemory {
    ranges: BTreeMap<u64, Pinned>,
}

impl PinnedMemory {
    /// Adds a registration. `false` if any of it is registered already.
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

    /// Devices may only read the registration that starts here.
    pub(crate) fn protect(&mut self, address: u64) {
        if let Some(pinned) = self.ranges.get_mut(&address) {
            pinned.read_only = true;
        }
    }

    /// The registration that holds an address.
    pub(crate) fn holding(&self, address: u64) -> Option<&Pinned> {
        let (&start, pinned) = self.ranges.range(..=address).next_back()?;
        (start + pinned.bytes > address).then_some(pinned)
    }

    /// The registration that starts here.
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

    /// Whether any of a range is pinned this way.
    pub(crate) fn overlaps(&self, address: u64, bytes: u64, origin: Origin) -> bool {
        self.overlapping(address, bytes).any(|(_, pinned)| pinned.origin == origin)
    }

    /// Notes an action on the pinned parts of a range.
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

    /// Forgets who touched what.
    pub(crate) fn forget(&mut self) {
        self.ranges.values_mut().for_each(|pinned| pinned.ledger = Ledger::new(pinned.bytes));
    }

    /// How many of each origin a device has.
    pub(crate) fn count(&self, device: DeviceId, origin: Origin) -> u64 {
        self.ranges
            .values()
            .filter(|pinned| pinned.device == device && pinned.origin == origin)
            .count() as u64
    }
}
