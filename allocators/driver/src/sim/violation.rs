//! Violations that the oracle reports.

use super::{
    access_history::{Action, ActionKind},
    agents::{Agent, ClockComponents},
};
use crate::{DeviceId, DeviceRange};
use std::{collections::HashMap, fmt, panic::Location};

/// The kind of a violation between two parties.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum ViolationKind {
    /// Two unordered writes.
    WriteWrite,
    /// A read that is not ordered after a write.
    WriteRead,
    /// A write that is not ordered after a read.
    ReadWrite,
    /// A block allocated on one stream without order after another stream's use of its bytes.
    Reuse,
    /// A use on a stream other than the block's, without order after the allocation.
    BeforeReady,
    /// A use of memory that its owner has freed.
    UseAfterFree,
    /// A use of bytes directly before or after a block, where its pool has put a guard.
    OutsideBlock,
    /// Work for a block that is gone: its bytes belong to another block now.
    StaleBlock {
        /// The block that the work declares.
        declared: u64,
        /// The block that is there now.
        live: u64,
    },
    /// A use of unmapped addresses.
    Unmapped,
    /// A use by a device that was not given access to the mapping.
    NoAccess {
        /// The device.
        device: DeviceId,
    },
    /// A mapping removed while the host does not know that work on it is done.
    UnmapInFlight,
    /// A mapping created or removed, or memory freed, while its addresses are registered outside.
    MovedWhileRegistered,
    /// Memory freed or unregistered without order after queued work on it.
    FreeInFlight,
    /// A copy whose host side does not lie in one registration.
    AcrossRegistrations,
}

impl ViolationKind {
    /// Returns whether the host has changed or freed memory under queued work.
    fn is_in_flight(self) -> bool {
        matches!(self, Self::UnmapInFlight | Self::FreeInFlight)
    }
}

impl fmt::Display for ViolationKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::WriteWrite => "unordered write after write",
            Self::WriteRead => "unordered read after write",
            Self::ReadWrite => "unordered write after read",
            Self::Reuse => "memory reused before its last use is done",
            Self::BeforeReady => "use before the allocation is ready",
            Self::UseAfterFree => "use after free",
            Self::OutsideBlock => "use of bytes outside of a block",
            Self::StaleBlock { declared, live } => {
                return write!(
                    f,
                    "work for block {declared} on memory that is block {live} by now"
                );
            }
            Self::Unmapped => "use of unmapped addresses",
            Self::NoAccess { device } => return write!(f, "use without access by {device}"),
            Self::UnmapInFlight => "unmapped under queued work",
            Self::MovedWhileRegistered => "moved under a registration",
            Self::FreeInFlight => "freed under queued work",
            Self::AcrossRegistrations => "a copy across the border of a registration",
        })
    }
}

/// One of the two sides of a violation.
///
/// See [`Sim`](super::Sim) for an example.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Party {
    /// The stream or the host.
    pub agent: Agent,
    /// The name of its work: the kernel's name, `copy to device`, `unmap`.
    pub work: &'static str,
    /// The source line of the program that queued it. For a node of a graph, the line of the
    /// capture.
    pub site: &'static Location<'static>,
    /// For a node of a graph, the line of the launch.
    pub launch: Option<&'static Location<'static>>,
}

impl fmt::Display for Party {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} by {} at {}:{}", self.work, self.agent, self.site.file(), self.site.line())?;
        match self.launch {
            Some(launch) => {
                write!(f, " in a graph launched at {}:{}", launch.file(), launch.line())
            }
            None => Ok(()),
        }
    }
}

/// The memory of a violation.
///
/// See [`Sim`](super::Sim) for an example.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum ViolationLocation {
    /// Device memory.
    Device(DeviceRange),
    /// Host memory.
    Host {
        /// The first address.
        address: u64,
        /// Bytes.
        bytes: u64,
    },
}

impl fmt::Display for ViolationLocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Device(range) => {
                write!(f, "{} bytes at {:#x} on {}", range.bytes, range.address, range.device)
            }
            Self::Host { address, bytes } => write!(f, "{bytes} bytes at {address:#x} on the host"),
        }
    }
}

/// An unordered or invalid access, which a real GPU would not report.
///
/// Its text contains both parties with their source lines:
///
/// ```text
/// unordered read after write: kernel sum by stream 2 of device 0 at src/step.rs:41,
///   not ordered after kernel scale by stream 1 of device 0 at src/step.rs:38 (4096 bytes at 0x10000000000 on device 0)
/// ```
///
/// See [`Sim`](super::Sim) for an example.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Violation {
    /// The kind.
    pub kind: ViolationKind,
    /// The earlier party. `None` if there is none, such as for memory that has never been mapped.
    pub earlier: Option<Party>,
    /// The later party, whose access is reported.
    pub later: Party,
    /// The bytes of the first occurrence.
    pub place: ViolationLocation,
    /// The number of occurrences between these two source lines.
    pub count: u64,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.kind, self.later)?;
        if let Some(earlier) = &self.earlier {
            let relation = match self.kind {
                ViolationKind::OutsideBlock => "beside",
                ViolationKind::UseAfterFree
                | ViolationKind::StaleBlock { .. }
                | ViolationKind::Unmapped
                | ViolationKind::NoAccess { .. }
                | ViolationKind::MovedWhileRegistered
                | ViolationKind::AcrossRegistrations => "after",
                _ => "not ordered after",
            };
            write!(f, ",\n  {relation} {earlier}")?;
        }
        write!(f, " ({})", self.place)?;
        if self.count > 1 {
            write!(f, ", {} times", self.count)?;
        }
        Ok(())
    }
}

/// A violation as found by the checks, before its parties are named.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Finding {
    pub(crate) kind: ViolationKind,
    pub(crate) earlier: Option<Action>,
    pub(crate) address: u64,
    pub(crate) bytes: u64,
}

impl Finding {
    /// Creates the finding for two unordered actions on the same bytes.
    pub(crate) fn race(earlier: Action, later: ActionKind, address: u64, bytes: u64) -> Self {
        let kind = match (earlier.kind, later) {
            (_, ActionKind::Free) => ViolationKind::FreeInFlight,
            (_, ActionKind::Allocate) => ViolationKind::Reuse,
            (ActionKind::Allocate, _) => ViolationKind::BeforeReady,
            (ActionKind::Read, _) => ViolationKind::ReadWrite,
            (_, ActionKind::Read) => ViolationKind::WriteRead,
            _ => ViolationKind::WriteWrite,
        };
        Self { kind, earlier: Some(earlier), address, bytes }
    }
}

/// The maximum number of distinct violations, by kind and lines. Further ones are dropped.
const MAX_VIOLATIONS: usize = 1000;

/// The violations found so far.
#[derive(Default, Debug)]
pub(crate) struct ViolationLog {
    list: Vec<Violation>,
    index_of: HashMap<ReportKey, usize>,
    /// The actions that findings have named, by component and count, and whether one of these
    /// findings was not [in flight](ViolationKind::is_in_flight) only. What follows from a reported
    /// action is not reported again, even after the program has taken the report.
    named: HashMap<(u32, u64), bool>,
    /// The number of violations, from the start of the list, that were taken or written to
    /// standard error.
    reported: usize,
}

type ReportKey = (std::mem::Discriminant<ViolationKind>, Option<SourceLine>, SourceLine);
type SourceLine = (&'static str, u32, u32);

fn line(site: &'static Location<'static>) -> SourceLine {
    (site.file(), site.line(), site.column())
}

impl ViolationLog {
    /// Returns whether a finding has named this action.
    pub(crate) fn has_named(&self, action: &Action) -> bool {
        self.named.contains_key(&(action.component, action.count))
    }

    /// Forgets which actions were named, since no record of them is left.
    pub(crate) fn clear_named(&mut self) {
        self.named.clear();
    }

    /// Adds a finding against `later`. A known one is only counted.
    ///
    /// Work that was reported, since it waits for too little, is work that no pool waits for
    /// either. So when the memory below it goes, that is not reported as another violation.
    pub(crate) fn add(
        &mut self,
        components: &ClockComponents,
        finding: Finding,
        later: Action,
        device: Option<DeviceId>,
    ) {
        let in_flight = finding.kind.is_in_flight();
        let number = |action: &Action| (action.component, action.count);
        if in_flight
            && let Some(earlier) = &finding.earlier
            && self.named.get(&number(earlier)) == Some(&true)
        {
            return;
        }
        for action in finding.earlier.iter().chain([&later]) {
            *self.named.entry(number(action)).or_default() |= !in_flight;
        }
        let key = (
            std::mem::discriminant(&finding.kind),
            finding.earlier.map(|action| line(action.site)),
            line(later.site),
        );
        if let Some(&known) = self.index_of.get(&key) {
            self.list[known].count += 1;
            return;
        }
        if self.list.len() >= MAX_VIOLATIONS {
            return;
        }
        let Finding { kind, earlier, address, bytes } = finding;
        let place = match device {
            Some(device) => ViolationLocation::Device(DeviceRange { device, address, bytes }),
            None => ViolationLocation::Host { address, bytes },
        };
        self.index_of.insert(key, self.list.len());
        self.list.push(Violation {
            kind,
            earlier: earlier.map(|action| action.party(components)),
            later: later.party(components),
            place,
            count: 1,
        });
    }

    /// Returns all violations found so far and marks them as reported.
    pub(crate) fn list(&mut self) -> &[Violation] {
        self.reported = self.list.len();
        &self.list
    }

    pub(crate) fn take(&mut self) -> Vec<Violation> {
        self.index_of.clear();
        self.reported = 0;
        std::mem::take(&mut self.list)
    }

    /// Returns the violations that have not been reported yet and marks them as reported.
    pub(crate) fn take_unreported(&mut self) -> Vec<Violation> {
        let from = std::mem::replace(&mut self.reported, self.list.len());
        self.list[from..].to_vec()
    }
}
