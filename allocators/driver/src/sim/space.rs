//! The address spaces of devices: reservations, mappings, and the uses of each mapping.
//!
//! Two kinds of records are kept. The *ledger* of a physical object records the accesses to its
//! bytes, at any address, so that aliases conflict. The *uses* of a mapping record the work through
//! these addresses, so that an unmap can be checked: the host must know that this work is done.
#![expect(unsafe_code, reason = "tells the store which addresses are whose")]

use super::{
    clock::Clock,
    codes,
    ledger::{Act, Ledger, Mark},
    store::Store,
    table::Table,
    violation::{Finding, ViolationKind},
};
use crate::{DeviceId, DeviceRange, ExportTypes};
use std::collections::BTreeMap;

/// The purpose of a reservation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Purpose {
    /// Reserved by the caller to map memory in it.
    Range,
    /// For one allocation of the driver, or a segment of one of its pools, with the physical object
    /// mapped there.
    Allocation { object: u64, pool: bool },
}

#[derive(Debug)]
pub(crate) struct Reservation {
    pub(crate) bytes: u64,
    pub(crate) device: DeviceId,
    pub(crate) purpose: Purpose,
    /// Bytes reserved in the store, including the guard.
    span: u64,
}

/// Physical memory.
#[derive(Debug)]
pub(crate) struct Object {
    pub(crate) device: DeviceId,
    pub(crate) bytes: u64,
    extent: u64,
    ledger: Ledger,
    mappings: u32,
    /// The number of handles: one after creation, one more for each import.
    pub(crate) handles: u32,
    /// The supported export types.
    pub(crate) types: ExportTypes,
}

/// A mapping of a whole physical object at an address.
#[derive(Debug)]
struct Mapping {
    bytes: u64,
    object: u64,
    /// One bit for each device that has access.
    access: u64,
    /// The last use through it by each stream.
    uses: Vec<Mark>,
}

/// The record of a removed mapping.
#[derive(Debug)]
struct Ghost {
    bytes: u64,
    by: Mark,
    /// The uses through it that were not known to be done when it was removed.
    uses: Vec<Mark>,
}

/// The parameters of one access.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Use {
    pub(crate) range: DeviceRange,
    pub(crate) writes: bool,
    pub(crate) generation: Option<u64>,
    /// Any of these devices must have access. For a kernel this is the stream's device. Copies may
    /// use any device that has access.
    pub(crate) reach: u64,
}

impl Use {
    pub(crate) fn act(&self) -> Act {
        if self.writes { Act::Write } else { Act::Read }
    }
}

#[derive(Debug)]
pub(crate) struct Space {
    pub(crate) store: Store,
    reservations: BTreeMap<u64, Reservation>,
    mappings: BTreeMap<u64, Mapping>,
    ghosts: BTreeMap<u64, Ghost>,
    objects: Table<Object>,
}

/// The maximum number of records of removed mappings. Beyond it, those of the lowest addresses are
/// dropped. They only serve to report the unmap.
const GHOSTS: usize = 1 << 17;

type Refused = u32;

impl Space {
    pub(crate) fn new(store: Store) -> Self {
        Self {
            store,
            reservations: BTreeMap::new(),
            mappings: BTreeMap::new(),
            ghosts: BTreeMap::new(),
            objects: Table::default(),
        }
    }

    /// Reserves `bytes`, followed by a guard of `guard` bytes that stays empty.
    pub(crate) fn reserve(
        &mut self,
        device: DeviceId,
        bytes: u64,
        align: u64,
        guard: u64,
        purpose: Purpose,
    ) -> Result<u64, Refused> {
        let span = bytes.checked_add(guard).ok_or(codes::OUT_OF_MEMORY)?;
        let address = self.store.reserve(span, align)?;
        self.bury(address, span);
        self.reservations.insert(address, Reservation { bytes, device, purpose, span });
        Ok(address)
    }

    /// Returns the reservation that starts here.
    pub(crate) fn reservation(&self, address: u64) -> Option<&Reservation> {
        self.reservations.get(&address)
    }

    fn around(&self, address: u64) -> Option<&Reservation> {
        let (start, there) = self.reservations.range(..=address).next_back()?;
        (address < start + there.bytes).then_some(there)
    }

    /// Returns the device of the reservation that contains an address.
    pub(crate) fn device_of(&self, address: u64) -> Option<DeviceId> {
        self.around(address).map(|there| there.device)
    }

    /// Returns whether a range lies in one reservation of [`Purpose::Range`].
    pub(crate) fn is_range(&self, address: u64, bytes: u64) -> bool {
        let Some(end) = address.checked_add(bytes) else { return false };
        let before = self.reservations.range(..=address).next_back();
        before.is_some_and(|(start, there)| {
            end <= start + there.bytes && there.purpose == Purpose::Range
        })
    }

    /// Returns whether nothing is mapped in a range.
    pub(crate) fn is_empty(&self, address: u64, bytes: u64) -> bool {
        self.overlapping(address, address.saturating_add(bytes)).next().is_none()
    }

    /// Frees a reservation in which nothing is mapped.
    pub(crate) fn unreserve(&mut self, address: u64, by: Mark) {
        if let Some(reservation) = self.reservations.remove(&address) {
            self.bury(address, reservation.bytes);
            self.haunt(address, Ghost { bytes: reservation.bytes, by, uses: Vec::new() });
            // SAFETY: 1. `reserve` got this span from the store. Nothing is mapped in it, so it is
            // not in use.
            unsafe { self.store.release(address, reservation.span) };
        }
    }

    /// Creates physical memory. The caller has already charged the device for it.
    pub(crate) fn create(
        &mut self,
        device: DeviceId,
        bytes: u64,
        types: ExportTypes,
    ) -> Result<u64, Refused> {
        let extent = self.store.extent(bytes)?;
        let ledger = Ledger::new(bytes);
        Ok(self.objects.insert(Object {
            device,
            bytes,
            extent,
            ledger,
            mappings: 0,
            handles: 1,
            types,
        }))
    }

    /// Adds a handle to an exported object.
    pub(crate) fn import(&mut self, device: DeviceId, handle: u64) -> Result<(), Refused> {
        match self.objects.get_mut(handle) {
            Some(object) if object.device == device && object.handles > 0 => {
                object.handles += 1;
                Ok(())
            }
            _ => Err(codes::INVALID_VALUE),
        }
    }

    pub(crate) fn object(&self, handle: u64) -> Option<&Object> {
        self.objects.get(handle)
    }

    /// Releases one handle of an object. Returns the bytes that the device regains now.
    pub(crate) fn release(&mut self, handle: u64) -> u64 {
        if let Some(object) = self.objects.get_mut(handle) {
            object.handles = object.handles.saturating_sub(1);
        }
        self.collect(handle)
    }

    /// Frees an object without handles and mappings.
    fn collect(&mut self, handle: u64) -> u64 {
        if self
            .objects
            .get(handle)
            .is_some_and(|object| object.handles == 0 && object.mappings == 0)
            && let Some(object) = self.objects.remove(handle)
        {
            self.store.drop_extent(object.extent, object.bytes);
            return object.bytes;
        }
        0
    }

    /// Maps a whole object. `host` is the clock of the calling host agent: uses through an earlier
    /// mapping that are not known to be done by that clock are reported.
    pub(crate) fn map(
        &mut self,
        address: u64,
        bytes: u64,
        handle: u64,
        host: &Clock,
        found: &mut Vec<Finding>,
    ) -> Result<(), Refused> {
        let end = address.checked_add(bytes).ok_or(codes::INVALID_VALUE)?;
        if self.object(handle).ok_or(codes::INVALID_HANDLE)?.bytes != bytes {
            return Err(codes::NOT_SUPPORTED);
        }
        let inside =
            self.reservations.range(..=address).next_back().is_some_and(|(start, reservation)| {
                end <= start + reservation.bytes
                    && (bytes == reservation.bytes || reservation.purpose == Purpose::Range)
            });
        if !inside || !self.is_empty(address, bytes) {
            return Err(codes::INVALID_VALUE);
        }
        let object = self.objects.get_mut(handle).ok_or(codes::INVALID_HANDLE)?;
        // SAFETY: 1. The range lies in a reservation and nothing is mapped in it. Both were checked
        // above.
        unsafe { self.store.map(address, bytes, object.extent) }?;
        object.mappings += 1;
        for (start, ghost) in
            self.ghosts.range(..end).rev().take_while(|(start, g)| **start + g.bytes > address)
        {
            for earlier in ghost.uses.iter().filter(|mark| !mark.before(host)) {
                let kind = ViolationKind::MapInFlight;
                found.push(Finding {
                    kind,
                    earlier: Some(*earlier),
                    address: *start,
                    bytes: ghost.bytes,
                });
            }
        }
        self.bury(address, bytes);
        self.mappings
            .insert(address, Mapping { bytes, object: handle, access: 0, uses: Vec::new() });
        Ok(())
    }

    /// Gives devices access to a range that begins and ends with whole mappings, up to the first
    /// hole. Returns the sizes of the mappings.
    pub(crate) fn set_access(
        &mut self,
        address: u64,
        bytes: u64,
        devices: u64,
    ) -> Result<Vec<u64>, Refused> {
        let end = address.checked_add(bytes).ok_or(codes::INVALID_VALUE)?;
        self.cuts_nothing(address, end)?;
        let last = self.mappings.range(address..end).next_back();
        if last.is_none_or(|(start, mapping)| start + mapping.bytes != end) {
            return Err(codes::INVALID_VALUE);
        }
        let hole = self.run_from(address, end);
        if hole == address {
            return Err(codes::INVALID_VALUE);
        }
        // SAFETY: 1. Mappings created by `map` fill the range up to the hole.
        unsafe { self.store.open(address, hole - address) }?;
        let mappings = self.mappings.range_mut(address..hole).map(|(_, mapping)| {
            mapping.access |= devices;
            mapping.bytes
        });
        Ok(mappings.collect())
    }

    /// Returns the end of the contiguous mappings that begin at `address`, limited to `end`.
    fn run_from(&self, address: u64, end: u64) -> u64 {
        self.mappings.range(address..end).fold(address, |cursor, (&start, mapping)| {
            if start == cursor { cursor + mapping.bytes } else { cursor }
        })
    }

    /// Refuses a range with an end inside a mapping.
    fn cuts_nothing(&self, address: u64, end: u64) -> Result<(), Refused> {
        let whole = |edge| {
            let before = self.mappings.range(..edge).next_back();
            before.is_none_or(|(start, mapping)| start + mapping.bytes <= edge)
        };
        if whole(address) && whole(end) { Ok(()) } else { Err(codes::INVALID_VALUE) }
    }

    /// Reports uses in a range that are not known to be done by `host`.
    pub(crate) fn in_flight(
        &self,
        address: u64,
        bytes: u64,
        kind: ViolationKind,
        host: &Clock,
        found: &mut Vec<Finding>,
    ) {
        for (&start, mapping) in self.overlapping(address, address.saturating_add(bytes)) {
            for earlier in mapping.uses.iter().filter(|mark| !mark.before(host)) {
                found.push(Finding {
                    kind,
                    earlier: Some(*earlier),
                    address: start,
                    bytes: mapping.bytes,
                });
            }
        }
    }

    /// Removes the mappings in a range, if there are any. The caller has checked that the range
    /// lies in one reservation. Returns for each mapping its size, its device, and the bytes that
    /// the device regains.
    pub(crate) fn unmap(
        &mut self,
        address: u64,
        bytes: u64,
        by: Mark,
        host: &Clock,
    ) -> Result<Vec<(u64, DeviceId, u64)>, Refused> {
        let end = address.checked_add(bytes).ok_or(codes::INVALID_VALUE)?;
        self.cuts_nothing(address, end)?;
        let mut gone = Vec::new();
        if self.is_empty(address, bytes) {
            return Ok(gone);
        }
        // SAFETY: 1. The range lies in one reservation, and the caller has waited until no work
        // runs.
        unsafe { self.store.unmap(address, bytes) }?;
        while let Some((&start, _)) = self.mappings.range(address..end).next() {
            let Some(Mapping { bytes, object, mut uses, .. }) = self.mappings.remove(&start) else {
                break;
            };
            uses.retain(|mark| !mark.before(host));
            self.haunt(start, Ghost { bytes, by, uses });
            let device = self.objects.get_mut(object).map(|object| {
                object.mappings -= 1;
                object.device
            });
            if let Some(device) = device {
                gone.push((bytes, device, self.collect(object)));
            }
        }
        Ok(gone)
    }

    fn haunt(&mut self, address: u64, ghost: Ghost) {
        self.ghosts.insert(address, ghost);
        if self.ghosts.len() > GHOSTS {
            self.ghosts.pop_first();
        }
    }

    /// Drops the records of removed mappings in a range.
    fn bury(&mut self, address: u64, bytes: u64) {
        let first = match self.ghosts.range(..=address).next_back() {
            Some((&start, ghost)) if start + ghost.bytes > address => start,
            _ => address,
        };
        while let Some((&start, _)) = self.ghosts.range(first..address + bytes).next() {
            self.ghosts.remove(&start);
        }
    }

    fn overlapping(&self, address: u64, end: u64) -> impl Iterator<Item = (&u64, &Mapping)> {
        self.mappings.range(self.first(address)..end.max(address))
    }

    /// Returns the start of the mapping that contains `address`, or else `address`.
    fn first(&self, address: u64) -> u64 {
        match self.mappings.range(..=address).next_back() {
            Some((&start, mapping)) if start + mapping.bytes > address => start,
            _ => address,
        }
    }

    /// Records a use of a range by `mark`, whose stream has `clock`. Returns whether the whole
    /// range can be accessed.
    pub(crate) fn touch(
        &mut self,
        u: &Use,
        mark: &Mark,
        clock: &Clock,
        found: &mut Vec<Finding>,
    ) -> bool {
        let DeviceRange { device, address, bytes } = u.range;
        let Some(end) = address.checked_add(bytes) else {
            found.push(nobody(&self.ghosts, address, bytes));
            return false;
        };
        let mut cursor = address;
        let mut reached = true;
        for (&start, mapping) in self.mappings.range_mut(self.first(address)..end) {
            if start > cursor {
                found.push(nobody(&self.ghosts, cursor, start - cursor));
                reached = false;
            }
            let from = start.max(address);
            let to = end.min(start + mapping.bytes);
            cursor = to;
            if mapping.access & u.reach == 0 {
                let kind = ViolationKind::NoAccess { device };
                found.push(Finding { kind, earlier: None, address: from, bytes: to - from });
                reached = false;
                continue;
            }
            match mapping.uses.iter_mut().find(|earlier| earlier.slot == mark.slot) {
                Some(earlier) => *earlier = *mark,
                None => mapping.uses.push(*mark),
            }
            if let Some(object) = self.objects.get_mut(mapping.object) {
                object.ledger.act(start, from - start, to - from, mark, clock, found);
            }
        }
        if cursor < end {
            found.push(nobody(&self.ghosts, cursor, end - cursor));
            reached = false;
        }
        reached
    }

    /// Records the allocation of a block: an action on its bytes, not a use of its addresses.
    /// Unmapped parts are skipped.
    pub(crate) fn hand_over(
        &mut self,
        address: u64,
        bytes: u64,
        mark: &Mark,
        clock: &Clock,
        found: &mut Vec<Finding>,
    ) {
        let end = address.saturating_add(bytes);
        for (&start, mapping) in self.mappings.range(self.first(address)..end) {
            let from = start.max(address);
            let to = end.min(start + mapping.bytes);
            if let Some(object) = self.objects.get_mut(mapping.object) {
                object.ledger.act(start, from - start, to - from, mark, clock, found);
            }
        }
    }

    /// Returns the first part of a range that cannot be accessed, if any.
    pub(crate) fn unreachable(&self, u: &Use) -> Option<Finding> {
        let DeviceRange { device, address, bytes } = u.range;
        let Some(end) = address.checked_add(bytes) else {
            return Some(nobody(&self.ghosts, address, bytes));
        };
        let mut cursor = address;
        for (&start, mapping) in self.overlapping(address, end) {
            if start > cursor {
                return Some(nobody(&self.ghosts, cursor, start - cursor));
            }
            if mapping.access & u.reach == 0 {
                let kind = ViolationKind::NoAccess { device };
                return Some(Finding { kind, earlier: None, address: start, bytes: mapping.bytes });
            }
            cursor = start + mapping.bytes;
        }
        (cursor < end).then(|| nobody(&self.ghosts, cursor, end - cursor))
    }

    /// Returns the bytes of a range, if it can be accessed. No work may run.
    pub(crate) fn read(&self, u: &Use) -> Option<Vec<u8>> {
        if !self.store.has_bytes() || self.unreachable(u).is_some() {
            return None;
        }
        // SAFETY: 1. The range is mapped and accessible, as just checked, and no running work can
        // write it.
        Some(unsafe { self.store.read(u.range.address, u.range.bytes) })
    }

    /// Removes all records of accesses.
    pub(crate) fn forget(&mut self) {
        self.ghosts.clear();
        self.mappings.values_mut().for_each(|mapping| mapping.uses.clear());
        self.objects.iter_mut().for_each(|object| object.ledger = Ledger::new(object.bytes));
    }

    /// Counts the physical objects, mappings and reservations of a device that still exist, by
    /// purpose.
    pub(crate) fn held(&self, device: DeviceId) -> Held {
        let of_device =
            self.reservations.values().filter(|reservation| reservation.device == device);
        let mut held = Held::default();
        let mut internal = 0;
        for reservation in of_device {
            match reservation.purpose {
                Purpose::Range => held.reservations += 1,
                Purpose::Allocation { pool, .. } => {
                    internal += 1;
                    held.allocations += u64::from(!pool);
                }
            }
        }
        let objects = self.objects.iter().filter(|object| object.device == device);
        for object in objects {
            held.handles += u64::from(object.handles);
            held.mappings += u64::from(object.mappings);
        }
        held.handles -= internal;
        held.mappings -= internal;
        held
    }
}

/// The numbers of existing objects.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct Held {
    pub(crate) reservations: u64,
    pub(crate) allocations: u64,
    pub(crate) handles: u64,
    pub(crate) mappings: u64,
}

/// Creates the finding for a use of unmapped addresses, with the unmap if it is recorded.
fn nobody(ghosts: &BTreeMap<u64, Ghost>, address: u64, bytes: u64) -> Finding {
    let ghost = ghosts.range(..address.saturating_add(bytes)).next_back();
    let earlier =
        ghost.filter(|(start, ghost)| **start + ghost.bytes > address).map(|(_, ghost)| ghost.by);
    Finding { kind: ViolationKind::Unmapped, earlier, address, bytes }
}

impl Drop for Space {
    fn drop(&mut self) {
        for (&address, reservation) in &self.reservations {
            // SAFETY: 1. The span came from the store. No work can use it: queues are dropped with
            // the space, and no kernel runs, since a running kernel keeps the simulator alive.
            unsafe { self.store.release(address, reservation.span) };
        }
    }
}
