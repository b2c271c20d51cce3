//! The same program on two drivers: do they agree?
//!
//! The simulated GPU is only as good as its likeness to a real one. A [`Program`] is made from a
//! seed, or from any bytes: some sixty operations on two or three streams (fills, copies in all
//! directions, whole and row by row, events, mappings of one handle at several addresses, pool
//! allocations, captures and launches of what they make) with mistakes in between that a driver
//! refuses or passes over ([`Fault`]). It is *free of races by construction*: the generator keeps a
//! vector clock for each stream and the host, and puts an event, a synchronisation or
//! a poll in front of whatever needs one. So what it leaves in memory is determined, on any driver
//! and in any timing, and so is the code of each call: an [`Outcome`].
//!
//! ```
//! use aquifer_programs::agree::Program;
//!
//! let program = Program::from_seed(7);
//! assert_eq!(program, Program::from_seed(7));
//! assert!(program.operations().len() > 40);
//! ```
//!
//! [`Program::careless`] is the same program without its waits between streams, for the negative
//! control: an oracle that does not object to it sees nothing.
#![expect(clippy::panic, reason = "a broken promise is told by a panic")]

mod execute;
mod faults;
mod generate;
mod host;

use crate::program::{count_operations, seeded};
use aquifer_driver::{
    CaptureMode, DeviceId, Pattern, Rows,
    sim::{Sim, ViolationKind},
};
use std::fmt;

/// The unit of physical memory and of mappings, in bytes. A device's own granularity must divide
/// it.
pub const GRANULE: u64 = 2 << 20;
/// The size of the one address range that a program maps into, in granules.
pub const RANGE: u64 = 12;
/// Events that a program has, and records again and again.
pub const EVENTS: usize = 6;
/// Host buffers: two from the driver, the two halves of a range registered apart, and one that is
/// not pinned.
pub const HOSTS: [usize; 5] = [64 << 10, 64 << 10, 32 << 10, 32 << 10, 64 << 10];
/// The first of the two halves that are registered apart; the next one is the second.
pub const FIRST_HALF: usize = 2;
/// The host buffer that is not pinned.
pub const PAGEABLE: usize = 4;

/// Where on the device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Place {
    /// In the block of this slot.
    Block(usize),
    /// Through the mapping that starts at this granule of the range.
    Mapping(u64),
}

/// A part of what lies at a place.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Part {
    /// Where.
    pub place: Place,
    /// First byte, from the start of the block or mapping.
    pub offset: u64,
    /// Bytes, at least one.
    pub bytes: u64,
}

/// A part of a host buffer, by its index in [`HOSTS`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct HostPart {
    /// Which.
    pub host: usize,
    /// First byte.
    pub offset: usize,
    /// Bytes, at least one.
    pub bytes: usize,
}

/// One thing that a program does. Streams, events, slots and handles are indices.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[expect(missing_docs, reason = "the fields are what the driver's calls take, by the same names")]
#[non_exhaustive]
pub enum Operation {
    /// A whole allocation.
    Allocate { slot: usize, bytes: u64 },
    /// Its end. The host knows that nothing queued touches it.
    Free { slot: usize },
    /// An allocation of the driver's pool, in stream order.
    PoolAllocate { slot: usize, stream: usize, bytes: u64 },
    /// Its end, in stream order.
    PoolFree { slot: usize, stream: usize },
    /// Physical memory.
    Create { handle: usize, granules: u64 },
    /// Lets go of it; it lives on while it is mapped.
    Release { handle: usize },
    /// Maps a whole handle and lets the device use it.
    Map { handle: usize, at: u64, granules: u64 },
    /// Takes a mapping away. The host knows that nothing queued goes through it.
    Unmap { at: u64, granules: u64 },
    /// Fills device memory.
    Fill { stream: usize, to: Part, byte: u8 },
    /// Host to device.
    Upload { stream: usize, from: HostPart, to: Part },
    /// Device to host.
    Download { stream: usize, from: Part, to: HostPart },
    /// Device to device; the two never overlap.
    Copy { stream: usize, from: Part, to: Part },
    /// Fills device memory with elements, aligned to their size.
    FillWith { stream: usize, to: Part, pattern: Pattern },
    /// Fills rows, each `rows.width` elements, that lie in a part of device memory.
    FillRows { stream: usize, to: Part, pattern: Pattern, pitch: u64, rows: Rows },
    /// Rows in a host buffer to rows on the device.
    UploadRows {
        stream: usize,
        from: HostPart,
        from_pitch: u64,
        to: Part,
        to_pitch: u64,
        rows: Rows,
    },
    /// Rows on the device to rows in a host buffer.
    DownloadRows {
        stream: usize,
        from: Part,
        from_pitch: u64,
        to: HostPart,
        to_pitch: u64,
        rows: Rows,
    },
    /// Rows on the device to others; the two parts never overlap.
    CopyRows { stream: usize, from: Part, from_pitch: u64, to: Part, to_pitch: u64, rows: Rows },
    /// The CPU writes a host buffer, with bytes that follow from the seed.
    Write { to: HostPart, seed: u64 },
    /// Puts an event behind what is queued.
    Record { event: usize, stream: usize },
    /// Makes a stream wait for an event.
    Wait { stream: usize, event: usize },
    /// The host waits for a stream.
    Synchronize { stream: usize },
    /// The host waits for an event.
    SynchronizeEvent { event: usize },
    /// The host asks until a stream is idle.
    Poll { stream: usize },
    /// The host asks until an event has passed.
    PollEvent { event: usize },
    /// Opens a capture on a stream. Copies, fills, records and waits from here to its end become
    /// part of it.
    CaptureBegin { stream: usize, mode: CaptureMode },
    /// Ends it, and makes an executable of it.
    CaptureEnd { stream: usize, graph: usize },
    /// Launches an executable.
    Launch { graph: usize, stream: usize },
    /// Ends an executable, launches under way or not.
    GraphEnd { graph: usize },
    /// Something that a driver refuses or passes over, at no cost to anything else.
    Mistake(Fault),
}

/// What makes no sense, and is refused, or passed over where no harm comes of it.
///
/// Not among them is what a GPU answers by what happens to lie next door: to map, or unmap, across
/// the end of the range.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[expect(missing_docs, reason = "the fields are what the driver's calls take, by the same names")]
#[non_exhaustive]
pub enum Fault {
    /// No bytes of addresses.
    ReserveNothing,
    /// Addresses by half a granule.
    ReserveOffGranule,
    /// No bytes of physical memory.
    CreateNothing,
    /// Physical memory by half a granule.
    CreateOffGranule,
    /// More physical memory than any device has.
    CreateTooMuch,
    /// A handle where another, or the same, is mapped.
    MapTwice { handle: usize, at: u64, granules: u64 },
    /// A handle at addresses that nobody has reserved.
    MapUnreserved { handle: usize, granules: u64 },
    /// Nothing is mapped there, and that is no error.
    UnmapNothing { at: u64 },
    /// Access to where nothing is mapped.
    AccessNothing { at: u64 },
    /// No bytes.
    AllocateNothing,
    /// More than any device has.
    AllocateTooMuch,
    /// A free of an address inside a block.
    FreeInside { slot: usize },
    /// No bytes from the pool, which it has to give.
    PoolAllocateNothing { stream: usize },
    /// More from the pool than any device has.
    PoolAllocateTooMuch { stream: usize },
    /// A registration of what is registered.
    RegisterTwice,
    /// The end of a registration that is none.
    UnregisterNothing,
    /// A copy from two registrations at once.
    UploadAcross { stream: usize, slot: usize },
    /// A copy to two registrations at once.
    DownloadAcross { stream: usize, slot: usize },
    /// A device that is not there.
    NoSuchDevice,
    /// The end of a capture that was not begun.
    EndNothing { stream: usize },
    /// A capture of what captures.
    CaptureTwice { stream: usize },
    /// A question about a stream that captures, which breaks the capture.
    QueryCapturing { stream: usize },
    /// A wait for an event from outside the capture, which breaks it.
    WaitFromOutside { stream: usize, event: usize },
    /// The end of a capture, while work of another stream that takes part is not waited for.
    LeaveUnjoined { stream: usize, other: usize, event: usize, slot: usize },
    /// A question about an event that was recorded in a capture.
    QueryCaptured { stream: usize, event: usize },
}

/// Runs the program that `bytes` choose on simulated devices that differ in when they do queued
/// work, and in whether they keep bytes at all.
///
/// # Panics
/// When two of them differ in what they answer or leave behind, when the oracle objects to a
/// program without races, or when something is not given back.
pub fn run(bytes: &[u8]) {
    let program = Program::from_bytes(bytes);
    let seed =
        bytes.iter().fold(0, |seed: u64, &byte| seed.wrapping_mul(257).wrapping_add(byte.into()));
    let run_on = |how: &str, sim: Sim| {
        count_operations(program.operations.len());
        let outcome = match program.run(&sim.driver(), DeviceId(0)) {
            Ok(outcome) => outcome,
            Err(refused) => panic!("{how}: {refused}"),
        };
        // Programs copy across registrations on purpose; the oracle reports that beside the error.
        let violations = sim.violations();
        let other = violations
            .iter()
            .find(|violation| violation.kind != ViolationKind::AcrossRegistrations);
        assert!(other.is_none(), "{how}: {}", violations[0]);
        assert!(sim.outstanding().is_empty(), "{how}: {}", sim.outstanding());
        outcome
    };
    let sim = || Sim::h200(1).capacity(1 << 30);
    let eager = run_on("eager", sim());
    for (how, sim) in [("seeded", sim().seeded(seed)), ("paced", sim().seeded(!seed).paced(64))] {
        let late = run_on(how, sim);
        let differences = eager.differences(&late, &program);
        assert!(differences.is_empty(), "eager and {how}:\n{differences}");
    }
    let symbolic = run_on("symbolic", sim().symbolic());
    assert_eq!(eager.codes, symbolic.codes, "{}", eager.differences(&symbolic, &program));
}

/// A program for a driver.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Program {
    streams: usize,
    operations: Vec<Operation>,
}

impl Program {
    /// The program of a seed: always the same.
    #[must_use]
    pub fn from_seed(seed: u64) -> Self {
        // More than any program has choices to make.
        Self::from_bytes(&seeded(seed, 16 << 10))
    }

    /// The program that `bytes` choose. Any bytes do.
    #[must_use]
    pub fn from_bytes(bytes: &[u8]) -> Self {
        generate::generate(bytes)
    }

    /// How many streams it uses.
    #[must_use]
    pub fn streams(&self) -> usize {
        self.streams
    }

    /// What it does, in order.
    #[must_use]
    pub fn operations(&self) -> &[Operation] {
        &self.operations
    }

    /// The same without any stream waiting for another: with races, as a rule. For a simulated
    /// device only.
    #[must_use]
    pub fn careless(&self) -> Self {
        let kept = |operation: &&Operation| !matches!(operation, Operation::Wait { .. });
        Self {
            streams: self.streams,
            operations: self.operations.iter().filter(kept).copied().collect(),
        }
    }
}

/// A driver call that a program made.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Made {
    /// The index of its operation; those of the set-up and of the end are beyond all operations.
    pub operation: usize,
    /// What was called, as the trait's method is.
    pub call: &'static str,
}

/// What a program leaves behind.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Outcome {
    /// A digest of the final contents of each block, each mapping and each host buffer, eight
    /// bytes each.
    pub bytes: Vec<u8>,
    /// The code of each driver call, 0 for success and [`SKIPPED`](Self::SKIPPED) where an earlier
    /// failure left nothing to call with.
    pub codes: Vec<u32>,
    /// Which call each code is of.
    pub made: Vec<Made>,
}

impl Outcome {
    /// The code of a call that could not be made.
    pub const SKIPPED: u32 = u32::MAX;

    /// Where the codes of two runs of `program` differ, and how many contents do.
    #[must_use]
    pub fn differences(&self, other: &Self, program: &Program) -> Differences {
        let mut codes = Vec::new();
        for (i, made) in self.made.iter().enumerate() {
            let (ours, theirs) = (self.codes.get(i).copied(), other.codes.get(i).copied());
            if ours != theirs {
                codes.push(Difference {
                    made: *made,
                    operation: program.operations.get(made.operation).copied(),
                    ours,
                    theirs,
                });
            }
        }
        let contents = self
            .bytes
            .chunks(8)
            .zip(other.bytes.chunks(8))
            .filter(|(ours, theirs)| ours != theirs)
            .count()
            + self.bytes.len().abs_diff(other.bytes.len()) / 8;
        Differences { codes, contents }
    }
}

/// A call whose codes differ.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Difference {
    /// The call.
    pub made: Made,
    /// The operation it was made for, unless it belongs to the set-up or the end.
    pub operation: Option<Operation>,
    /// The code in the one run; `None` where it made fewer calls.
    pub ours: Option<u32>,
    /// The code in the other.
    pub theirs: Option<u32>,
}

/// How two runs of one program differ. Its text is a table.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Differences {
    /// The calls.
    pub codes: Vec<Difference>,
    /// How many blocks, mappings and buffers have other contents.
    pub contents: usize,
}

impl Differences {
    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.codes.is_empty() && self.contents == 0
    }
}

impl fmt::Display for Differences {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shown = |code: Option<u32>| match code {
            Some(Outcome::SKIPPED) => "skip".to_owned(),
            Some(code) => code.to_string(),
            None => "-".to_owned(),
        };
        for difference in &self.codes {
            let Difference { made, operation, ours, theirs } = difference;
            write!(f, "{:>5} {:>5}  {:<16}", shown(*ours), shown(*theirs), made.call)?;
            match operation {
                Some(operation) => writeln!(f, "  {}: {operation:?}", made.operation)?,
                None => writeln!(f)?,
            }
        }
        if self.contents > 0 {
            writeln!(f, "{} contents differ", self.contents)?;
        }
        Ok(())
    }
}
