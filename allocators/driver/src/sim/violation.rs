//! What the oracle says, and to whom it points.

use super::{
    agents::{Agent, Components},
    ledger::{Act, Mark},
    reporting,
};
use crate::{DeviceId, DeviceRange};
use std::{collections::HashMap, fmt, panic::Location};

/// What is wrong between two parties.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum ViolationKind {
    /// Two writes that nothing orders.
    WriteWrite,
    /// A read that nothing orders after a write.
    WriteRead,
    /// A write that nothing orders after a read.
    ReadWrite,
    /// A block given out on one stream while nothing orders that after another's use of its bytes.
    Reuse,
    /// A use on another stream than the block's, which nothing orders after the allocation.
    BeforeReady,
    /// A use of memory that its owner has freed.
    UseAfterFree,
    /// A use of bytes right before or right behind a block, where its pool has put a guard.
    OutsideBlock,
    /// Work made for a block that is gone: its bytes belong to another by now.
    StaleBlock {
        /// The block that the work declares.
        declared: u64,
        /// The block that is there.
        live: u64,
    },
    /// A use of addresses with nothing behind them.
    Unmapped,
    /// A use by a device that was not given access to the mapping.
    NoAccess {
        /// The device.
        device: DeviceId,
    },
    /// A mapping taken away while the host does not know that work on it is done.
    UnmapInFlight,
    /// A mapping made where the host does not know that work on the mapping before it is done.
    MapInFlight,
    /// A mapping made or taken away, or memory freed, while somebody outside keeps its addresses.
    MovedWhileRegistered,
    /// Memory freed, or its registration ended, while nothing orders that after queued work on it.
    FreeInFlight,
    /// A copy whose host side does not lie in one registration.
    AcrossRegistrations,
    /// A copy into host memory that was registered to be read only.
    WriteToReadOnly,
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
            Self::MapInFlight => "mapped under queued work",
            Self::MovedWhileRegistered => "moved under a registration",
            Self::FreeInFlight => "freed under queued work",
            Self::AcrossRegistrations => "a copy across the border of a registration",
            Self::WriteToReadOnly => "a write to memory registered to be read only",
        })
    }
}

/// One of the two.
///
/// Its example is that of [`Violation`].
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Party {
    /// Who.
    pub agent: Agent,
    /// Doing what: the kernel's name, `copy to device`, `unmap`.
    pub work: &'static str,
    /// The line of the program that asked for it; for a node of a graph, where it was captured.
    pub site: &'static Location<'static>,
    /// For a node of a graph, the line that launched the graph.
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

/// Which bytes it is about.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum Place {
    /// Device memory.
    Device(DeviceRange),
    /// Host memory.
    Host {
        /// Its first address.
        address: u64,
        /// Bytes.
        bytes: u64,
    },
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Device(range) => {
                write!(f, "{} bytes at {:#x} on {}", range.bytes, range.address, range.device)
            }
            Self::Host { address, bytes } => write!(f, "{bytes} bytes at {address:#x} on the host"),
        }
    }
}

/// Something that a real GPU would answer with wrong bytes, some day.
///
/// Its text names both parties with their source lines:
///
/// ```text
/// unordered read after write: kernel sum by stream 2 of device 0 at src/step.rs:41,
///   not ordered after kernel scale by stream 1 of device 0 at src/step.rs:38 (4096 bytes at 0x10000000000 on device 0)
/// ```
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Violation {
    /// What is wrong.
    pub kind: ViolationKind,
    /// Who acted first. `None` where there was nobody: memory that has never been mapped.
    pub earlier: Option<Party>,
    /// Who acted on it out of turn.
    pub later: Party,
    /// The bytes, those of the first time.
    pub place: Place,
    /// How often these two lines met this way.
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
                | ViolationKind::AcrossRegistrations
                | ViolationKind::WriteToReadOnly => "after",
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

/// A fault as the checks find it, before anybody is named.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Finding {
    pub(crate) kind: ViolationKind,
    pub(crate) earlier: Option<Mark>,
    pub(crate) address: u64,
    pub(crate) bytes: u64,
}

impl Finding {
    /// Two actions on the same bytes that nothing orders.
    pub(crate) fn race(earlier: Mark, later: Act, address: u64, bytes: u64) -> Self {
        let kind = match (earlier.act, later) {
            (_, Act::Free) => ViolationKind::FreeInFlight,
            (_, Act::Allocate) => ViolationKind::Reuse,
            (Act::Allocate, _) => ViolationKind::BeforeReady,
            (Act::Read, _) => ViolationKind::ReadWrite,
            (_, Act::Read) => ViolationKind::WriteRead,
            _ => ViolationKind::WriteWrite,
        };
        Self { kind, earlier: Some(earlier), address, bytes }
    }
}

/// Faults told apart by kind and lines. Beyond this many nobody reads on.
const MOST: usize = 1000;

/// What has been found so far.
#[derive(Default, Debug)]
pub(crate) struct Reports {
    list: Vec<Violation>,
    places: HashMap<Key, usize>,
    /// How many of the list, from its start, the program has taken or standard error has been
    /// given.
    told: usize,
    /// Whether each is to be written to standard error as it is found.
    pub(crate) at_once: bool,
}

type Key = (std::mem::Discriminant<ViolationKind>, Option<Line>, Line);
type Line = (&'static str, u32, u32);

fn line(site: &'static Location<'static>) -> Line {
    (site.file(), site.line(), site.column())
}

impl Reports {
    /// Adds a finding against `later`; one that is known is counted.
    pub(crate) fn add(
        &mut self,
        components: &Components,
        finding: Finding,
        later: Mark,
        on: Option<DeviceId>,
    ) {
        let key = (
            std::mem::discriminant(&finding.kind),
            finding.earlier.map(|mark| line(mark.site)),
            line(later.site),
        );
        if let Some(&known) = self.places.get(&key) {
            self.list[known].count += 1;
            return;
        }
        if self.list.len() >= MOST {
            return;
        }
        let Finding { kind, earlier, address, bytes } = finding;
        let place = match on {
            Some(device) => Place::Device(DeviceRange { device, address, bytes }),
            None => Place::Host { address, bytes },
        };
        self.places.insert(key, self.list.len());
        self.list.push(Violation {
            kind,
            earlier: earlier.map(|mark| mark.party(components)),
            later: later.party(components),
            place,
            count: 1,
        });
        if self.at_once {
            reporting::write(&self.untold());
        }
    }

    /// Everything found so far, which counts as told from now on.
    pub(crate) fn list(&mut self) -> &[Violation] {
        self.told = self.list.len();
        &self.list
    }

    pub(crate) fn take(&mut self) -> Vec<Violation> {
        self.places.clear();
        self.told = 0;
        std::mem::take(&mut self.list)
    }

    /// What has not been told yet, which counts as told from now on.
    pub(crate) fn untold(&mut self) -> Vec<Violation> {
        let from = std::mem::replace(&mut self.told, self.list.len());
        self.list[from..].to_vec()
    }
}
