//! The checks: every use of memory is checked against the order, mappings and owners at the time it
//! is queued. Races are found in `access_history`.

use super::{
    access_history::{Action, ActionKind},
    address_space::DeviceUse,
    clock::Clock,
    device_code,
    machine_state::MachineState,
    owner_map::{Owner, OwnerMap, RetainedRanges},
    pinned::HostMemoryKind,
    queue::{HostUse, StreamKind},
    registrations::Registrations,
    violation::{Finding, ViolationKind},
};
use crate::{BlockNote, DeviceId, DeviceRange, HostAccess, Ownership, site::Site};

impl MachineState {
    /// Advances the clock of a stream for its next action, which comes after everything that its
    /// host knows and after everything in the stream. The stamp is the stream's own count.
    pub(crate) fn next_stream_action(
        &mut self,
        stream: usize,
        kind: ActionKind,
        work: &'static str,
        site: Site,
    ) -> Action {
        self.join_host_clock(stream);
        let s = &mut self.streams[stream];
        let count = if self.oracle { s.clock.tick(s.component) } else { 0 };
        Action::new((s.component, count), kind, work, site)
    }

    /// Checks one use of device memory by work with this action at its stream's tail. Returns
    /// whether the bytes can be accessed.
    ///
    /// Work of a launched graph refers to the memory as it was when it was captured. It may access
    /// memory that is retained for these keepers, regardless of the current owner.
    pub(crate) fn check_use(
        &mut self,
        stream: usize,
        u: &DeviceUse,
        action: Action,
        keepers: &[u64],
    ) -> bool {
        if !self.oracle {
            return !self.space.store.has_bytes() || self.space.first_inaccessible(u).is_none();
        }
        if u.range.bytes == 0 {
            return true;
        }
        self.accesses_checked += 1;
        let action = Action { kind: u.action_kind(), ..action };
        let mut findings = Vec::new();
        let DeviceRange { address, bytes, .. } = u.range;
        if !self.retained.is_retained_for(address, bytes, keepers) {
            self.owners.check(address, bytes, u.generation, stream, &mut findings);
        }
        // Work on memory with another owner is reported once and leaves no record. Otherwise valid
        // work would race with it.
        let accessible = if findings.is_empty() {
            self.space.record_use(u, &action, &self.streams[stream].clock, &mut findings)
        } else {
            self.space.first_inaccessible(u).is_none()
        };
        self.report(findings, action, Some(u.range.device));
        accessible
    }

    /// Splits the uses of work at the blocks that are there now. Each piece refers to its block.
    pub(crate) fn split_by_block(&self, uses: &[DeviceUse]) -> Vec<DeviceUse> {
        let mut pieces = Vec::with_capacity(uses.len());
        for u in uses {
            // A range that reaches past the last address is checked as a whole, and refused.
            if u.generation.is_some() || u.range.address.checked_add(u.range.bytes).is_none() {
                pieces.push(*u);
                continue;
            }
            self.owners.for_each_block(
                u.range.address,
                u.range.bytes,
                |address, bytes, generation| {
                    pieces.push(DeviceUse {
                        range: DeviceRange { address, bytes, ..u.range },
                        generation,
                        ..*u
                    });
                },
            );
        }
        pieces
    }

    /// Returns whether a device can still access this host memory. If not, reports it.
    pub(crate) fn check_still_pinned(&mut self, u: &HostUse, action: Action) -> bool {
        let pinned =
            u.bytes == 0 || self.pinned.classify(u.address, u.bytes) == HostMemoryKind::Pinned;
        if !pinned && self.oracle {
            let mut findings = Vec::new();
            let (kind, address, bytes) = (ViolationKind::Unmapped, u.address, u.bytes);
            findings.push(Finding { kind, earlier: None, address, bytes });
            self.report(findings, Action { kind: u.kind, ..action }, None);
        }
        pinned
    }

    /// Checks the host side of a copy.
    pub(crate) fn check_host_side(
        &mut self,
        stream: usize,
        address: u64,
        bytes: u64,
        kind: ActionKind,
        action: Action,
    ) {
        if self.oracle && bytes > 0 {
            self.accesses_checked += 1;
            let action = Action { kind, ..action };
            let mut findings = Vec::new();
            self.pinned.record(address, bytes, &action, &self.streams[stream].clock, &mut findings);
            self.report(findings, action, None);
        }
    }

    /// Names the parties of findings.
    pub(crate) fn report(
        &mut self,
        mut findings: Vec<Finding>,
        later: Action,
        device: Option<DeviceId>,
    ) {
        // If one action conflicts with the same earlier one in several intervals, that is one
        // violation.
        findings.dedup_by_key(|finding| {
            (
                finding.kind,
                finding.earlier.map(|action| {
                    (action.component, action.count, std::ptr::from_ref(action.site))
                }),
            )
        });
        for finding in findings {
            self.violations.add(&self.components, finding, later, device);
        }
    }

    /// Checks a host access to memory that devices can reach. Kernels declare their own.
    ///
    /// A free without a line comes from a drop. It is reported with the line of the work that it is
    /// not ordered after.
    pub(crate) fn check_host_access(
        &mut self,
        address: u64,
        bytes: u64,
        access: HostAccess,
        site: Option<Site>,
        own: Site,
    ) {
        if !self.oracle || bytes == 0 || device_code::is_running() {
            return;
        }
        self.accesses_checked += 1;
        let (kind, work) = match access {
            HostAccess::Read => (ActionKind::Read, "CPU read"),
            HostAccess::Write => (ActionKind::Write, "CPU write"),
            HostAccess::Free => (ActionKind::Free, "free of host memory"),
        };
        let mut action = self.new_host_action(kind, work, site.unwrap_or(own));
        let mut findings = Vec::new();
        let host = &self.host;
        self.pinned.record(address, bytes, &action, &host.clock, &mut findings);
        if let (None, Some(earlier)) = (site, findings.first().and_then(|finding| finding.earlier))
        {
            action.work = "drop of host memory used";
            action.site = earlier.site;
        }
        self.report(findings, action, None);
    }

    /// Returns how a free is named, and its line: the line that was entered, or for a plain drop,
    /// which has none, that of the allocation or of what has ended it already.
    pub(crate) fn cause_of_free(
        &self,
        address: u64,
        entered: Option<Site>,
        own: Site,
    ) -> (&'static str, Site) {
        match (entered, self.owners.cause_at(address)) {
            (Some(site), _) => ("free", site),
            (None, Some(cause)) if cause.kind == ActionKind::Allocate => {
                ("drop of the block allocated", cause.site)
            }
            (None, Some(cause)) => (cause.work, cause.site),
            (None, None) => ("free", own),
        }
    }

    /// Records the owner of a range, as reported by its pool.
    ///
    /// A free without a line comes from a drop. It is reported with the line that allocated the
    /// block.
    pub(crate) fn record_owner(&mut self, note: BlockNote<'_>, site: Option<Site>, own: Site) {
        let range = note.range;
        if !self.oracle || range.bytes == 0 {
            return;
        }
        let (freed, freed_at) = self.cause_of_free(range.address, site, own);
        let site = site.unwrap_or(own);
        let (owner, cause) = match note.owner {
            Ownership::Live { stream, generation } => {
                let cause = match self.stream(stream) {
                    // Captured work accesses nothing now, and is checked at each launch.
                    Ok(index) if self.streams[index].capture.is_some() => {
                        self.current_host_action(ActionKind::Allocate, "allocation", site)
                    }
                    Ok(index) => self.record_block_allocation(
                        index,
                        range.address,
                        range.bytes,
                        generation,
                        site,
                    ),
                    // A stream of another library: its order is unknown.
                    Err(_) => self.current_host_action(ActionKind::Allocate, "allocation", site),
                };
                (Owner::Live { generation: Some(generation) }, cause)
            }
            Ownership::Pending { users } => {
                let users = users.iter().filter_map(|&user| self.stream(user).ok()).collect();
                (
                    Owner::Pending { users },
                    self.current_host_action(ActionKind::Free, freed, freed_at),
                )
            }
            Ownership::Guard { users } => {
                let users = users.iter().filter_map(|&user| self.stream(user).ok()).collect();
                (
                    Owner::Guard { users },
                    self.current_host_action(ActionKind::Allocate, "the block allocated", freed_at),
                )
            }
            Ownership::Free => {
                (Owner::Free, self.current_host_action(ActionKind::Free, freed, freed_at))
            }
        };
        self.owners.set(range.address, range.bytes, owner, cause);
    }

    /// Records the start or the end of a registration of a range's addresses.
    pub(crate) fn record_registration(&mut self, range: DeviceRange, begins: bool, site: Site) {
        if !self.oracle || range.bytes == 0 {
            return;
        }
        if begins {
            let cause = self.current_host_action(ActionKind::Read, "registration", site);
            self.registrations.add(range.address, range.bytes, cause);
        } else {
            self.registrations.remove(range.address, range.bytes);
        }
    }

    /// Makes a block available at a stream's tail, as a write of its bytes by that stream. Bytes
    /// that already belong to this block stay unchanged.
    fn record_block_allocation(
        &mut self,
        stream: usize,
        address: u64,
        bytes: u64,
        generation: u64,
        site: Site,
    ) -> Action {
        let action = self.next_stream_action(stream, ActionKind::Allocate, "allocation", site);
        let mut findings = Vec::new();
        let (space, clock) = (&mut self.space, &self.streams[stream].clock);
        let device = self.streams[stream].device;
        self.owners.for_each_part_outside(address, bytes, generation, |address, bytes| {
            let part = DeviceRange { device, address, bytes };
            space.record_bytes(part, &action, clock, &mut findings);
        });
        self.report(findings, action, Some(device));
        action
    }

    /// Joins a stream's clock with everything that precedes its next item, without queueing an
    /// item.
    pub(crate) fn join_host_clock(&mut self, stream: usize) {
        if !self.oracle {
            return;
        }
        let host = &self.host;
        let joined = host.version;
        if self.streams[stream].joined_host != joined {
            self.streams[stream].clock.join(&host.clock);
            self.streams[stream].joined_host = joined;
        }
    }

    /// Records that the host has seen a stream or an event reach this point.
    pub(crate) fn order_host_after(&mut self, clock: &Clock) {
        if self.oracle {
            self.host.join_clock(clock);
        }
    }

    /// Records that the host has synchronised with the device.
    pub(crate) fn order_host_after_device(&mut self, device: DeviceId) {
        if self.oracle {
            let host = &mut self.host;
            let streams = self.streams.iter().filter(|stream| stream.device == device);
            streams.for_each(|stream| host.join_clock(&stream.clock));
            self.components.released_clocks(device).for_each(|clock| host.join_clock(clock));
        }
    }

    /// Returns the streams that a stream's next item implicitly waits for, by the legacy rule.
    pub(crate) fn implied_streams(&self, stream: usize) -> Vec<usize> {
        let s = &self.streams[stream];
        match s.kind {
            StreamKind::NonBlocking | StreamKind::Branch { .. } => Vec::new(),
            StreamKind::Blocking => self.devices[s.device.0 as usize].legacy.into_iter().collect(),
            StreamKind::Legacy => {
                let blocking = |&other: &usize| {
                    let other = &self.streams[other];
                    other.kind == StreamKind::Blocking && other.device == s.device
                };
                (0..self.streams.len()).filter(blocking).collect()
            }
        }
    }

    /// Removes all records of accesses and owners, as if the host had just waited for every device.
    pub(crate) fn clear_records(&mut self) {
        self.space.clear_records();
        self.pinned.clear_records();
        self.violations.clear_named();
        self.owners = OwnerMap::default();
        self.retained = RetainedRanges::default();
        self.registrations = Registrations::default();
    }
}
