//! The checks: every use of memory is checked against the order, mappings and owners at the time it
//! is queued.

use super::{
    clock::Clock,
    inside,
    ledger::{Act, Mark},
    ownership::{Kept, Owner, Ownership as Owners},
    pinned::Side,
    queue::{HostUse, Kind},
    registered::Registered,
    space::Use,
    state::State,
    violation::{Finding, ViolationKind},
};
use crate::{BlockNote, DeviceId, DeviceRange, HostAccess, Ownership};
use std::panic::Location;

type Site = &'static Location<'static>;

impl State {
    /// Advances the clock of a stream for its next action, which comes after everything that its
    /// host agent knows and after everything in the stream. The stamp is the stream's own count.
    pub(crate) fn tail(&mut self, stream: usize, act: Act, work: &'static str, site: Site) -> Mark {
        self.settle(stream);
        let s = &mut self.streams[stream];
        if !self.oracle {
            return Mark { count: 0, slot: s.slot, act, work, site, launch: None };
        }
        Mark { count: s.clock.tick(s.slot), slot: s.slot, act, work, site, launch: None }
    }

    /// Checks one use of device memory by work with this mark at its stream's tail. Returns whether
    /// the bytes can be accessed.
    pub(crate) fn check(&mut self, stream: usize, u: &Use, mark: Mark) -> bool {
        if !self.oracle {
            return !self.space.store.has_bytes() || self.space.unreachable(u).is_none();
        }
        if u.range.bytes == 0 {
            return true;
        }
        self.checked += 1;
        let mark = Mark { act: u.act(), ..mark };
        let mut found = std::mem::take(&mut self.found);
        self.owners.check(u.range.address, u.range.bytes, u.generation, stream, &mut found);
        // Work on memory with another owner is reported once and leaves no record. Otherwise valid
        // work would race with it.
        let reached = if found.is_empty() {
            self.space.touch(u, &mark, &self.streams[stream].clock, &mut found)
        } else {
            self.space.unreachable(u).is_none()
        };
        self.report(found, mark, Some(u.range.device));
        reached
    }

    /// Checks one use by work of a launched graph, which refers to the memory as it was when it was
    /// captured. It may access memory that is kept for the graph, regardless of the current owner.
    pub(crate) fn check_captured(
        &mut self,
        stream: usize,
        u: &Use,
        mark: Mark,
        keepers: &[u64],
    ) -> bool {
        if !self.oracle || !self.kept.holds(u.range.address, u.range.bytes, keepers) {
            return self.check(stream, u, mark);
        }
        self.checked += 1;
        let mark = Mark { act: u.act(), ..mark };
        let mut found = std::mem::take(&mut self.found);
        let reached = self.space.touch(u, &mark, &self.streams[stream].clock, &mut found);
        self.report(found, mark, Some(u.range.device));
        reached
    }

    /// Splits the uses of work at the blocks that are there now. Each piece refers to its block.
    pub(crate) fn by_block(&self, uses: &[Use]) -> Vec<Use> {
        let mut pieces = Vec::with_capacity(uses.len());
        for u in uses {
            // A range that reaches past the last address is checked as a whole, and refused.
            if u.generation.is_some() || u.range.address.checked_add(u.range.bytes).is_none() {
                pieces.push(*u);
                continue;
            }
            self.owners.blocks(u.range.address, u.range.bytes, |address, bytes, generation| {
                pieces.push(Use {
                    range: DeviceRange { address, bytes, ..u.range },
                    generation,
                    ..*u
                });
            });
        }
        pieces
    }

    /// Returns whether a device can still access this host memory. If not, reports it.
    pub(crate) fn is_pinned_still(&mut self, u: &HostUse, mark: Mark) -> bool {
        let pinned = u.bytes == 0 || self.pinned.side(u.address, u.bytes) == Side::Pinned;
        if !pinned && self.oracle {
            let mut found = std::mem::take(&mut self.found);
            let (kind, address, bytes) = (ViolationKind::Unmapped, u.address, u.bytes);
            found.push(Finding { kind, earlier: None, address, bytes });
            self.report(found, Mark { act: u.act, ..mark }, None);
        }
        pinned
    }

    /// Checks the host side of a copy.
    pub(crate) fn check_host(
        &mut self,
        stream: usize,
        address: u64,
        bytes: u64,
        act: Act,
        mark: Mark,
    ) {
        if self.oracle && bytes > 0 {
            self.checked += 1;
            let mark = Mark { act, ..mark };
            let mut found = std::mem::take(&mut self.found);
            self.pinned.act(address, bytes, &mark, &self.streams[stream].clock, &mut found);
            self.report(found, mark, None);
        }
    }

    /// Names the parties of findings, and reclaims the scratch buffer.
    pub(crate) fn report(&mut self, mut found: Vec<Finding>, later: Mark, on: Option<DeviceId>) {
        // If one action conflicts with the same earlier one in several intervals, that is one
        // violation.
        found.dedup_by_key(|finding| {
            (
                finding.kind,
                finding.earlier.map(|mark| (mark.slot, mark.count, std::ptr::from_ref(mark.site))),
            )
        });
        for finding in found.drain(..) {
            self.reports.add(&self.components, finding, later, on);
        }
        self.found = found;
    }

    /// Checks a host access to memory that devices can reach. Accesses of a callback were checked
    /// when it was queued.
    pub(crate) fn host_touch(&mut self, address: u64, bytes: u64, access: HostAccess, site: Site) {
        if !self.oracle || bytes == 0 || inside::any() {
            return;
        }
        self.checked += 1;
        let (act, work) = match access {
            HostAccess::Read => (Act::Read, "CPU read"),
            HostAccess::Write => (Act::Write, "CPU write"),
            HostAccess::Free => (Act::Free, "free of host memory"),
        };
        let mark = self.host_mark(act, work, site);
        let mut found = std::mem::take(&mut self.found);
        let host = &self.hosts[self.agent()];
        self.pinned.act(address, bytes, &mark, &host.clock, &mut found);
        self.report(found, mark, None);
    }

    /// Records a pool's note on the owner of a range.
    ///
    /// A free without a line comes from a drop. It is reported with the line that allocated the
    /// block.
    pub(crate) fn note(&mut self, note: BlockNote<'_>, site: Option<Site>, own: Site) {
        let range = note.range;
        if !self.oracle || range.bytes == 0 {
            return;
        }
        let (freed, freed_at) = match (site, self.owners.site_at(range.address)) {
            (Some(site), _) => ("free", site),
            (None, Some(made)) => ("drop of the block allocated", made),
            (None, None) => ("free", own),
        };
        let site = site.unwrap_or(own);
        let (owner, by) = match note.owner {
            Ownership::Live { stream, generation } => {
                let by = match self.stream(stream) {
                    // Captured work accesses nothing now, and is checked at each launch.
                    Ok(place) if self.streams[place].capture.is_some() => {
                        self.host_name(Act::Allocate, "allocation", site)
                    }
                    Ok(place) => {
                        self.hand_over(place, range.address, range.bytes, generation, site)
                    }
                    // A stream of another library: its order is unknown.
                    Err(_) => self.host_name(Act::Allocate, "allocation", site),
                };
                (Owner::Live { generation: Some(generation) }, by)
            }
            Ownership::Pending { users } => {
                let users = users.iter().filter_map(|&user| self.stream(user).ok()).collect();
                (Owner::Pending { users }, self.host_name(Act::Free, freed, freed_at))
            }
            Ownership::Guard { users } => {
                let users = users.iter().filter_map(|&user| self.stream(user).ok()).collect();
                (
                    Owner::Guard { users },
                    self.host_name(Act::Allocate, "the block allocated", freed_at),
                )
            }
            Ownership::Free => (Owner::Free, self.host_name(Act::Free, freed, freed_at)),
        };
        self.owners.set(range.address, range.bytes, owner, by);
    }

    /// Records the start or the end of a registration of a range's addresses.
    pub(crate) fn note_registered(&mut self, range: DeviceRange, keeps: bool, site: Site) {
        if !self.oracle || range.bytes == 0 {
            return;
        }
        if keeps {
            let by = self.host_name(Act::Read, "registration", site);
            self.registered.add(range.address, range.bytes, by);
        } else {
            self.registered.remove(range.address, range.bytes);
        }
    }

    /// Makes a block available at a stream's tail, as a write of its bytes by that stream. Bytes
    /// that already belong to this block stay unchanged.
    fn hand_over(
        &mut self,
        stream: usize,
        address: u64,
        bytes: u64,
        generation: u64,
        site: Site,
    ) -> Mark {
        let mark = self.tail(stream, Act::Allocate, "allocation", site);
        let mut found = std::mem::take(&mut self.found);
        let (space, clock) = (&mut self.space, &self.streams[stream].clock);
        self.owners.not_yet(address, bytes, generation, |address, bytes| {
            space.hand_over(address, bytes, &mark, clock, &mut found);
        });
        let device = self.streams[stream].device;
        self.report(found, mark, Some(device));
        mark
    }

    /// Joins a stream's clock with everything that precedes its next item, without queueing an
    /// item.
    pub(crate) fn settle(&mut self, stream: usize) {
        if !self.oracle {
            return;
        }
        let agent = self.agent();
        let host = &self.hosts[agent];
        let seen = (agent as u32, host.version);
        if self.streams[stream].seen != seen {
            self.streams[stream].clock.join(&host.clock);
            self.streams[stream].seen = seen;
        }
    }

    /// Records that the host has seen a stream or an event reach this point.
    pub(crate) fn host_learns(&mut self, clock: &Clock) {
        if self.oracle {
            let agent = self.agent();
            self.hosts[agent].learn(clock);
        }
    }

    /// Records that the host has synchronised with the device.
    pub(crate) fn host_learns_device(&mut self, device: DeviceId) {
        if self.oracle {
            self.agent_learns_device(self.agent(), device);
        }
    }

    /// As [`State::host_learns_device`], for every host agent.
    pub(crate) fn all_learn_device(&mut self, device: DeviceId) {
        if self.oracle {
            (0..self.hosts.len()).for_each(|agent| self.agent_learns_device(agent, device));
        }
    }

    fn agent_learns_device(&mut self, agent: usize, device: DeviceId) {
        let host = &mut self.hosts[agent];
        let streams = self.streams.iter().filter(|stream| stream.device == device);
        streams.for_each(|stream| host.learn(&stream.clock));
        self.components.gone(device).for_each(|clock| host.learn(clock));
    }

    /// Returns the streams that a stream's next item implicitly waits for, by the legacy rule.
    pub(crate) fn implied(&self, stream: usize) -> Vec<usize> {
        let s = &self.streams[stream];
        match s.kind {
            Kind::NonBlocking | Kind::Branch => Vec::new(),
            Kind::Blocking => self.devices[s.device.0 as usize].legacy.into_iter().collect(),
            Kind::Legacy => {
                let blocking = |&other: &usize| {
                    let other = &self.streams[other];
                    other.kind == Kind::Blocking && other.device == s.device
                };
                (0..self.streams.len()).filter(blocking).collect()
            }
        }
    }

    /// Removes all records of accesses and owners, as if the host had just waited for every device.
    pub(crate) fn forget(&mut self) {
        self.space.forget();
        self.pinned.forget();
        self.owners = Owners::default();
        self.kept = Kept::default();
        self.registered = Registered::default();
    }
}
