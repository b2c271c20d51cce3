//! The address spaces of devices: reservations, mappings, and the uses of each mapping.
//!
//! Two kinds of records are kept. The *history* of a physical object records the accesses to its
//! bytes, at any address, so that aliases conflict. The *uses* of a mapping record the work through
//! these addresses, so that an unmap can be checked: the host must know that this work is done.
#![expect(unsafe_code, reason = "reserves, maps and unmaps addresses of the store")]

use super::{
    access_history::{AccessHistory, Action, ActionKind},
    clock::Clock,
    codes::{self, ErrorCode},
    handle_table::HandleTable,
    store::{Extent, ExtentName, Store},
    violation::{Finding, ViolationKind},
};
use crate::{DeviceId, DeviceRange, ExportTypes};
use std::collections::BTreeMap;

/// The purpose of a reservation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum ReservationPurpose {
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
    pub(crate) purpose: ReservationPurpose,
    /// Bytes reserved in the store, including the guard.
    span: u64,
}

/// Physical memory.
#[derive(Debug)]
pub(crate) struct PhysicalObject {
    pub(crate) device: DeviceId,
    pub(crate) bytes: u64,
    extent: Extent,
    history: AccessHistory,
    mapping_count: u32,
    /// The number of handles: one after creation, one more for each import.
    pub(crate) handle_count: u32,
    /// The supported export types.
    pub(crate) export_types: ExportTypes,
    /// Whether another process may have it, or it is another process's.
    is_shared: bool,
    /// Bytes of the device that it takes: none of another process's.
    charged: u64,
}

impl PhysicalObject {
    fn new(device: DeviceId, bytes: u64, extent: Extent, export_types: ExportTypes) -> Self {
        Self {
            device,
            bytes,
            extent,
            history: AccessHistory::new(bytes),
            mapping_count: 0,
            handle_count: 1,
            export_types,
            is_shared: false,
            charged: bytes,
        }
    }
}

/// A mapping of a whole physical object at an address.
#[derive(Debug)]
struct Mapping {
    bytes: u64,
    object: u64,
    /// One bit for each device that may read.
    access: u64,
    /// One bit for each device that may write.
    write_access: u64,
    /// The last use through it by each stream.
    uses: Vec<Action>,
}

impl Mapping {
    fn permits(&self, u: &DeviceUse) -> bool {
        let access = if u.writes { self.write_access } else { self.access };
        access & u.devices != 0
    }
}

/// The record of a removed mapping.
#[derive(Debug)]
struct RemovedMapping {
    bytes: u64,
    cause: Action,
}

/// The parameters of one access.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct DeviceUse {
    pub(crate) range: DeviceRange,
    pub(crate) writes: bool,
    pub(crate) generation: Option<u64>,
    /// Any of these devices must have access. For a kernel this is the stream's device. Copies may
    /// use any device that has access.
    pub(crate) devices: u64,
}

impl DeviceUse {
    pub(crate) fn action_kind(&self) -> ActionKind {
        if self.writes { ActionKind::Write } else { ActionKind::Read }
    }
}

#[derive(Debug)]
pub(crate) struct AddressSpace {
    pub(crate) store: Store,
    reservations: BTreeMap<u64, Reservation>,
    mappings: BTreeMap<u64, Mapping>,
    removed: BTreeMap<u64, RemovedMapping>,
    objects: HandleTable<PhysicalObject>,
}

/// Whether ranges, in ascending order of their starts, have no address in common.
fn are_disjoint(ranges: impl Iterator<Item = (u64, u64)>) -> bool {
    let mut end = 0;
    ranges.into_iter().all(|(start, bytes)| {
        let begins_behind = start >= end;
        end = start.saturating_add(bytes);
        begins_behind
    })
}

impl AddressSpace {
    /// Checks that ranges are disjoint, and that each mapping is of a whole object in a reservation.
    pub(crate) fn check(&self) {
        let reserved = self.reservations.iter().map(|(&start, it)| (start, it.bytes));
        debug_assert!(are_disjoint(reserved), "reservations overlap");
        let mapped = self.mappings.iter().map(|(&start, it)| (start, it.bytes));
        debug_assert!(are_disjoint(mapped), "mappings overlap");
        for (start, mapping) in &self.mappings {
            let object = self.objects.get(mapping.object);
            debug_assert!(
                object.is_some_and(|it| it.mapping_count > 0 && it.bytes == mapping.bytes),
                "the mapping at {start:#x} is of an object that does not know it"
            );
            let around = self.reservations.range(..=start).next_back();
            debug_assert!(
                around.is_some_and(|(from, it)| start + mapping.bytes <= from + it.bytes),
                "the mapping at {start:#x} is outside of the reservations"
            );
        }
    }
}

/// The maximum number of records of removed mappings. Beyond it, those of the lowest addresses are
/// dropped. They only serve to report the unmap.
const MAX_REMOVED_MAPPINGS: usize = 1 << 17;

impl AddressSpace {
    pub(crate) fn new(store: Store) -> Self {
        Self {
            store,
            reservations: BTreeMap::new(),
            mappings: BTreeMap::new(),
            removed: BTreeMap::new(),
            objects: HandleTable::default(),
        }
    }

    /// Reserves `bytes`, followed by a guard of `guard` bytes that stays empty.
    pub(crate) fn reserve(
        &mut self,
        device: DeviceId,
        bytes: u64,
        align: u64,
        guard: u64,
        purpose: ReservationPurpose,
    ) -> Result<u64, ErrorCode> {
        let span = bytes.checked_add(guard).ok_or(codes::OUT_OF_MEMORY)?;
        let address = self.store.reserve(span, align)?;
        self.discard_removed(address, span);
        self.reservations.insert(address, Reservation { bytes, device, purpose, span });
        Ok(address)
    }

    /// Returns the reservation that starts here.
    pub(crate) fn reservation(&self, address: u64) -> Option<&Reservation> {
        self.reservations.get(&address)
    }

    fn reservation_containing(&self, address: u64) -> Option<&Reservation> {
        let (start, reservation) = self.reservations.range(..=address).next_back()?;
        (address < start + reservation.bytes).then_some(reservation)
    }

    /// Returns the device of the reservation that contains an address.
    pub(crate) fn device_of(&self, address: u64) -> Option<DeviceId> {
        self.reservation_containing(address).map(|reservation| reservation.device)
    }

    /// Returns whether an address of a device lies in one allocation of the driver that is not of
    /// its pools. `None` if nothing is reserved there.
    pub(crate) fn is_plain_allocation(&self, device: DeviceId, address: u64) -> Option<bool> {
        let found = self.reservation_containing(address).filter(|found| found.device == device)?;
        Some(matches!(found.purpose, ReservationPurpose::Allocation { pool: false, .. }))
    }

    /// Returns whether a range lies in one reservation of [`ReservationPurpose::Range`].
    pub(crate) fn is_in_range_reservation(&self, address: u64, bytes: u64) -> bool {
        let Some(end) = address.checked_add(bytes) else { return false };
        let before = self.reservations.range(..=address).next_back();
        before.is_some_and(|(start, reservation)| {
            end <= start + reservation.bytes && reservation.purpose == ReservationPurpose::Range
        })
    }

    /// Returns whether nothing is mapped in a range.
    pub(crate) fn is_empty(&self, address: u64, bytes: u64) -> bool {
        self.overlapping(address, address.saturating_add(bytes)).next().is_none()
    }

    /// Frees a reservation in which nothing is mapped.
    pub(crate) fn unreserve(&mut self, address: u64, cause: Action) {
        if let Some(reservation) = self.reservations.remove(&address) {
            self.discard_removed(address, reservation.bytes);
            self.record_removed(address, RemovedMapping { bytes: reservation.bytes, cause });
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
        export_types: ExportTypes,
    ) -> Result<u64, ErrorCode> {
        let extent = self.store.allocate_extent(bytes)?;
        Ok(self.objects.insert(PhysicalObject::new(device, bytes, extent, export_types)))
    }

    /// Returns the bytes of an exported object, and where another process finds them. From then on
    /// they are kept until the store is dropped, since that process may have mapped them.
    pub(crate) fn name(&mut self, handle: u64) -> Option<(u64, ExtentName)> {
        let object = self.objects.get_mut(handle)?;
        let name = self.store.name(&object.extent)?;
        object.is_shared = true;
        Some((object.bytes, name))
    }

    /// Creates a handle of memory of another process's store. It takes nothing of this device.
    pub(crate) fn import_from_elsewhere(
        &mut self,
        device: DeviceId,
        bytes: u64,
        name: &ExtentName,
    ) -> Result<u64, ErrorCode> {
        if !self.store.has_bytes() {
            return Err(codes::INVALID_VALUE);
        }
        let extent = Extent::elsewhere(name, bytes)?;
        let mut object = PhysicalObject::new(device, bytes, extent, ExportTypes::NONE);
        (object.is_shared, object.charged) = (true, 0);
        Ok(self.objects.insert(object))
    }

    /// Adds a handle to an exported object.
    pub(crate) fn import(&mut self, device: DeviceId, handle: u64) -> Result<(), ErrorCode> {
        match self.objects.get_mut(handle) {
            Some(object) if object.device == device && object.handle_count > 0 => {
                object.handle_count += 1;
                Ok(())
            }
            _ => Err(codes::INVALID_VALUE),
        }
    }

    pub(crate) fn object(&self, handle: u64) -> Option<&PhysicalObject> {
        self.objects.get(handle)
    }

    /// Releases one handle of an object. Returns the bytes that the device regains now.
    pub(crate) fn release(&mut self, handle: u64) -> u64 {
        if let Some(object) = self.objects.get_mut(handle) {
            object.handle_count = object.handle_count.saturating_sub(1);
        }
        self.free_if_unused(handle)
    }

    /// Frees an object without handles and mappings.
    fn free_if_unused(&mut self, handle: u64) -> u64 {
        if self
            .objects
            .get(handle)
            .is_some_and(|object| object.handle_count == 0 && object.mapping_count == 0)
            && let Some(object) = self.objects.remove(handle)
        {
            if !object.is_shared {
                self.store.free_extent(&object.extent, object.bytes);
            }
            return object.charged;
        }
        0
    }

    /// Maps a whole object.
    pub(crate) fn map(&mut self, address: u64, bytes: u64, handle: u64) -> Result<(), ErrorCode> {
        let end = address.checked_add(bytes).ok_or(codes::INVALID_VALUE)?;
        if self.object(handle).ok_or(codes::INVALID_HANDLE)?.bytes != bytes {
            return Err(codes::NOT_SUPPORTED);
        }
        let inside =
            self.reservations.range(..=address).next_back().is_some_and(|(start, reservation)| {
                end <= start + reservation.bytes
                    && (bytes == reservation.bytes
                        || reservation.purpose == ReservationPurpose::Range)
            });
        if !inside || !self.is_empty(address, bytes) {
            return Err(codes::INVALID_VALUE);
        }
        let object = self.objects.get_mut(handle).ok_or(codes::INVALID_HANDLE)?;
        // SAFETY: 1. The range lies in a reservation and nothing is mapped in it. Both were checked
        // above.
        unsafe { self.store.map(address, bytes, &object.extent) }?;
        object.mapping_count += 1;
        self.discard_removed(address, bytes);
        let (access, write_access, uses) = (0, 0, Vec::new());
        self.mappings
            .insert(address, Mapping { bytes, object: handle, access, write_access, uses });
        Ok(())
    }

    /// Gives devices access, to read or also to write, to a range that begins and ends with whole
    /// mappings, up to the first hole.
    pub(crate) fn set_access(
        &mut self,
        address: u64,
        bytes: u64,
        devices: u64,
        writable: bool,
    ) -> Result<(), ErrorCode> {
        let end = address.checked_add(bytes).ok_or(codes::INVALID_VALUE)?;
        self.check_whole_mappings(address, end)?;
        let last = self.mappings.range(address..end).next_back();
        if last.is_none_or(|(start, mapping)| start + mapping.bytes != end) {
            return Err(codes::INVALID_VALUE);
        }
        let hole = self.contiguous_end(address, end);
        if hole == address {
            return Err(codes::INVALID_VALUE);
        }
        // SAFETY: 1. Mappings created by `map` fill the range up to the hole.
        unsafe { self.store.make_accessible(address, hole - address) }?;
        for (_, mapping) in self.mappings.range_mut(address..hole) {
            mapping.access |= devices;
            mapping.write_access &= !devices;
            mapping.write_access |= if writable { devices } else { 0 };
        }
        Ok(())
    }

    /// Returns the end of the contiguous mappings that begin at `address`, limited to `end`.
    fn contiguous_end(&self, address: u64, end: u64) -> u64 {
        self.mappings.range(address..end).fold(address, |cursor, (&start, mapping)| {
            if start == cursor { cursor + mapping.bytes } else { cursor }
        })
    }

    /// Refuses a range with an end inside a mapping.
    fn check_whole_mappings(&self, address: u64, end: u64) -> Result<(), ErrorCode> {
        let whole = |edge| {
            let before = self.mappings.range(..edge).next_back();
            before.is_none_or(|(start, mapping)| start + mapping.bytes <= edge)
        };
        if whole(address) && whole(end) { Ok(()) } else { Err(codes::INVALID_VALUE) }
    }

    /// Reports uses in a range that are not known to be done by `host`.
    pub(crate) fn report_in_flight(
        &self,
        address: u64,
        bytes: u64,
        kind: ViolationKind,
        host: &Clock,
        findings: &mut Vec<Finding>,
    ) {
        for (&start, mapping) in self.overlapping(address, address.saturating_add(bytes)) {
            for earlier in mapping.uses.iter().filter(|action| !action.precedes(host)) {
                findings.push(Finding {
                    kind,
                    earlier: Some(*earlier),
                    address: start,
                    bytes: mapping.bytes,
                });
            }
        }
    }

    /// Removes the mappings in a range, if there are any. The caller has checked that the range
    /// lies in one reservation. Returns for each mapping its device, and the bytes that
    /// the device regains.
    pub(crate) fn unmap(
        &mut self,
        address: u64,
        bytes: u64,
        cause: Action,
    ) -> Result<Vec<(DeviceId, u64)>, ErrorCode> {
        let end = address.checked_add(bytes).ok_or(codes::INVALID_VALUE)?;
        self.check_whole_mappings(address, end)?;
        let mut unmapped = Vec::new();
        if self.is_empty(address, bytes) {
            return Ok(unmapped);
        }
        // SAFETY: 1. The range lies in one reservation, and the caller has waited until no work
        // runs.
        unsafe { self.store.unmap(address, bytes) }?;
        while let Some((&start, _)) = self.mappings.range(address..end).next() {
            let Some(Mapping { bytes, object, .. }) = self.mappings.remove(&start) else { break };
            self.record_removed(start, RemovedMapping { bytes, cause });
            let device = self.objects.get_mut(object).map(|object| {
                object.mapping_count -= 1;
                object.device
            });
            if let Some(device) = device {
                unmapped.push((device, self.free_if_unused(object)));
            }
        }
        Ok(unmapped)
    }

    fn record_removed(&mut self, address: u64, removed_mapping: RemovedMapping) {
        self.removed.insert(address, removed_mapping);
        if self.removed.len() > MAX_REMOVED_MAPPINGS {
            self.removed.pop_first();
        }
    }

    /// Drops the records of removed mappings in a range.
    fn discard_removed(&mut self, address: u64, bytes: u64) {
        let first = match self.removed.range(..=address).next_back() {
            Some((&start, removed_mapping)) if start + removed_mapping.bytes > address => start,
            _ => address,
        };
        while let Some((&start, _)) = self.removed.range(first..address + bytes).next() {
            self.removed.remove(&start);
        }
    }

    fn overlapping(&self, address: u64, end: u64) -> impl Iterator<Item = (&u64, &Mapping)> {
        self.mappings.range(self.start_containing(address)..end.max(address))
    }

    /// Returns the start of the mapping that contains `address`, or else `address`.
    fn start_containing(&self, address: u64) -> u64 {
        match self.mappings.range(..=address).next_back() {
            Some((&start, mapping)) if start + mapping.bytes > address => start,
            _ => address,
        }
    }

    /// Records a use of a range by `action`, whose stream has `clock`. Returns whether the whole
    /// range can be accessed.
    pub(crate) fn record_use(
        &mut self,
        u: &DeviceUse,
        action: &Action,
        clock: &Clock,
        findings: &mut Vec<Finding>,
    ) -> bool {
        let inaccessible = self.inaccessible(u);
        let accessible = inaccessible.is_empty();
        findings.extend(inaccessible);
        self.record(u.range, Some(u), action, clock, findings);
        accessible
    }

    /// Records the allocation of a block: an action on its bytes, not a use of its addresses.
    /// Unmapped parts are skipped.
    pub(crate) fn record_bytes(
        &mut self,
        range: DeviceRange,
        action: &Action,
        clock: &Clock,
        findings: &mut Vec<Finding>,
    ) {
        self.record(range, None, action, clock, findings);
    }

    fn record(
        &mut self,
        range: DeviceRange,
        as_use: Option<&DeviceUse>,
        action: &Action,
        clock: &Clock,
        findings: &mut Vec<Finding>,
    ) {
        let (address, end) = (range.address, range.address.saturating_add(range.bytes));
        for (&start, mapping) in self.mappings.range_mut(self.start_containing(address)..end) {
            if let Some(u) = as_use {
                if !mapping.permits(u) {
                    continue;
                }
                match mapping.uses.iter_mut().find(|it| it.component == action.component) {
                    Some(earlier) => *earlier = *action,
                    None => mapping.uses.push(*action),
                }
            }
            let from = start.max(address);
            let to = end.min(start + mapping.bytes);
            if let Some(object) = self.objects.get_mut(mapping.object) {
                object.history.record(start, from - start, to - from, action, clock, findings);
            }
        }
    }

    /// Returns the parts of a range that cannot be accessed.
    fn inaccessible(&self, u: &DeviceUse) -> Vec<Finding> {
        let DeviceRange { device, address, bytes } = u.range;
        let Some(end) = address.checked_add(bytes) else {
            return vec![unmapped_finding(&self.removed, address, bytes)];
        };
        let (mut found, mut cursor) = (Vec::new(), address);
        for (&start, mapping) in self.overlapping(address, end) {
            if start > cursor {
                found.push(unmapped_finding(&self.removed, cursor, start - cursor));
            }
            let from = start.max(address);
            cursor = end.min(start + mapping.bytes);
            if !mapping.permits(u) {
                let kind = ViolationKind::NoAccess { device };
                found.push(Finding { kind, earlier: None, address: from, bytes: cursor - from });
            }
        }
        if cursor < end {
            found.push(unmapped_finding(&self.removed, cursor, end - cursor));
        }
        found
    }

    /// Returns the first part of a range that cannot be accessed, if any.
    pub(crate) fn first_inaccessible(&self, u: &DeviceUse) -> Option<Finding> {
        self.inaccessible(u).into_iter().next()
    }

    /// Returns the bytes of a range, if it can be accessed. No work may run.
    pub(crate) fn read(&self, u: &DeviceUse) -> Option<Vec<u8>> {
        if !self.store.has_bytes() || self.first_inaccessible(u).is_some() {
            return None;
        }
        // SAFETY: 1. The range is mapped and accessible, as just checked, and no running work can
        // write it.
        Some(unsafe { self.store.read(u.range.address, u.range.bytes) })
    }

    /// Removes all records of accesses.
    pub(crate) fn clear_records(&mut self) {
        self.removed.clear();
        self.mappings.values_mut().for_each(|mapping| mapping.uses.clear());
        self.objects
            .iter_mut()
            .for_each(|object| object.history = AccessHistory::new(object.bytes));
    }

    /// Counts the physical objects, mappings and reservations of a device that still exist, by
    /// purpose.
    pub(crate) fn count_objects(&self, device: DeviceId) -> ObjectCounts {
        let of_device =
            self.reservations.values().filter(|reservation| reservation.device == device);
        let mut counts = ObjectCounts::default();
        let mut internal = 0;
        for reservation in of_device {
            match reservation.purpose {
                ReservationPurpose::Range => counts.reservations += 1,
                ReservationPurpose::Allocation { pool, .. } => {
                    internal += 1;
                    counts.allocations += u64::from(!pool);
                }
            }
        }
        let objects = self.objects.iter().filter(|object| object.device == device);
        for object in objects {
            counts.handles += u64::from(object.handle_count);
            counts.mappings += u64::from(object.mapping_count);
        }
        counts.handles -= internal;
        counts.mappings -= internal;
        counts
    }
}

/// The numbers of existing objects.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct ObjectCounts {
    pub(crate) reservations: u64,
    pub(crate) allocations: u64,
    pub(crate) handles: u64,
    pub(crate) mappings: u64,
}

/// Creates the finding for a use of unmapped addresses, with the unmap if it is recorded.
fn unmapped_finding(removed: &BTreeMap<u64, RemovedMapping>, address: u64, bytes: u64) -> Finding {
    let removed_mapping = removed.range(..address.saturating_add(bytes)).next_back();
    let earlier = removed_mapping
        .filter(|(start, removed_mapping)| **start + removed_mapping.bytes > address)
        .map(|(_, removed_mapping)| removed_mapping.cause);
    Finding { kind: ViolationKind::Unmapped, earlier, address, bytes }
}

impl Drop for AddressSpace {
    fn drop(&mut self) {
        for (&address, reservation) in &self.reservations {
            // SAFETY: 1. The span came from the store. No work can use it: queues are dropped with
            // the space, and no kernel runs, since a running kernel keeps the simulator alive.
            unsafe { self.store.release(address, reservation.span) };
        }
    }
}
