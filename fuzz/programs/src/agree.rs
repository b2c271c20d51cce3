//! Compares two drivers by running the same program on both.
//!
//! The simulated GPU is useful only as far as it behaves like a real one. A [`Program`] is
//! generated from a seed, or from any bytes. It has some sixty operations on two or three streams:
//! fills, copies in all directions, whole and row by row, events, mappings of one handle at several
//! addresses, pool allocations, captures and their launches. Among them are mistakes that a driver
//! rejects or ignores ([`Fault`]). A program is *free of races by construction*: the generator
//! keeps a vector clock for each stream and the host, and inserts an event, a synchronisation or a
//! poll where one is needed. The final contents of memory and the code of each call are therefore
//! determined on any driver and in any timing: an [`Outcome`].
//!
//! ```
//! use aquifer_programs::agree::Program;
//!
//! let program = Program::from_seed(7);
//! assert_eq!(program, Program::from_seed(7));
//! assert!(program.operations().len() > 40);
//! ```
//!
//! [`Program::careless`] is the same program without its waits between streams. It is the negative
//! control: an oracle that accepts it detects nothing.
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
/// The size in granules of the address range that a program maps into.
pub const RANGE: u64 = 12;
/// Number of events. A program records each repeatedly.
pub const EVENTS: usize = 6;
/// Sizes of the host buffers: two allocated by the driver, two halves of a range that are
/// registered separately, and one that is not pinned.
pub const HOSTS: [usize; 5] = [64 << 10, 64 << 10, 32 << 10, 32 << 10, 64 << 10];
/// The index of the first of the two halves. The next index is the second.
pub const FIRST_HALF: usize = 2;
/// The index of the host buffer that is not pinned.
pub const PAGEABLE: usize = 4;

/// A location on the device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Place {
    /// The block in this slot.
    Block(usize),
    /// The mapping that starts at this granule of the range.
    Mapping(u64),
}

/// A part of a block or mapping.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Part {
    /// The block or mapping.
    pub place: Place,
    /// First byte, from the start of the block or mapping.
    pub offset: u64,
    /// Bytes, at least one.
    pub bytes: u64,
}

/// A part of a host buffer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct HostPart {
    /// The index of the buffer in [`HOSTS`].
    pub host: usize,
    /// First byte.
    pub offset: usize,
    /// Bytes, at least one.
    pub bytes: usize,
}

/// One operation of a program. Streams, events, slots and handles are indices.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[expect(missing_docs, reason = "the fields are what the driver's calls take, by the same names")]
#[non_exhaustive]
pub enum Operation {
    /// Allocates a block.
    Allocate { slot: usize, bytes: u64 },
    /// Frees a block. The host knows that no queued work uses it.
    Free { slot: usize },
    /// Allocates from the driver's pool, in stream order.
    PoolAllocate { slot: usize, stream: usize, bytes: u64 },
    /// Frees to the driver's pool, in stream order.
    PoolFree { slot: usize, stream: usize },
    /// Creates physical memory.
    Create { handle: usize, granules: u64 },
    /// Releases physical memory. It stays alive while it is mapped.
    Release { handle: usize },
    /// Maps a whole handle and gives the device access.
    Map { handle: usize, at: u64, granules: u64 },
    /// Unmaps a mapping. The host knows that no queued work uses it.
    Unmap { at: u64, granules: u64 },
    /// Fills device memory.
    Fill { stream: usize, to: Part, byte: u8 },
    /// Copies from host to device.
    Upload { stream: usize, from: HostPart, to: Part },
    /// Copies from device to host.
    Download { stream: usize, from: Part, to: HostPart },
    /// Copies on the device. The two parts never overlap.
    Copy { stream: usize, from: Part, to: Part },
    /// Fills device memory with elements. The part is aligned to their size.
    FillWith { stream: usize, to: Part, pattern: Pattern },
    /// Fills rows of `rows.width` elements in a part of device memory.
    FillRows { stream: usize, to: Part, pattern: Pattern, pitch: u64, rows: Rows },
    /// Copies rows from a host buffer to the device.
    UploadRows {
        stream: usize,
        from: HostPart,
        from_pitch: u64,
        to: Part,
        to_pitch: u64,
        rows: Rows,
    },
    /// Copies rows from the device to a host buffer.
    DownloadRows {
        stream: usize,
        from: Part,
        from_pitch: u64,
        to: HostPart,
        to_pitch: u64,
        rows: Rows,
    },
    /// Copies rows on the device. The two parts never overlap.
    CopyRows { stream: usize, from: Part, from_pitch: u64, to: Part, to_pitch: u64, rows: Rows },
    /// Writes a host buffer by the CPU, with bytes derived from the seed.
    Write { to: HostPart, seed: u64 },
    /// Records an event after the queued work.
    Record { event: usize, stream: usize },
    /// Makes a stream wait for an event.
    Wait { stream: usize, event: usize },
    /// Synchronizes the host with a stream.
    Synchronize { stream: usize },
    /// Synchronizes the host with an event.
    SynchronizeEvent { event: usize },
    /// Polls a stream on the host until it is idle.
    Poll { stream: usize },
    /// Polls an event on the host until it has completed.
    PollEvent { event: usize },
    /// Begins a capture on a stream. Copies, fills, records and waits up to its end become part of
    /// it.
    CaptureBegin { stream: usize, mode: CaptureMode },
    /// Ends a capture and instantiates an executable graph.
    CaptureEnd { stream: usize, graph: usize },
    /// Launches an executable graph.
    Launch { graph: usize, stream: usize },
    /// Destroys an executable graph, with or without pending launches.
    GraphEnd { graph: usize },
    /// Performs a call that a driver rejects or ignores without other effects.
    Mistake(Fault),
}

/// A mistake that a driver rejects, or ignores if it does no harm.
///
/// Mapping and unmapping across the end of the range are not included, since their result on a GPU
/// depends on the adjacent addresses.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[expect(missing_docs, reason = "the fields are what the driver's calls take, by the same names")]
#[non_exhaustive]
pub enum Fault {
    /// Reserves zero bytes of addresses.
    ReserveNothing,
    /// Reserves half a granule of addresses.
    ReserveOffGranule,
    /// Creates zero bytes of physical memory.
    CreateNothing,
    /// Creates half a granule of physical memory.
    CreateOffGranule,
    /// Creates more physical memory than any device has.
    CreateTooMuch,
    /// Maps a handle where another one, or the same, is mapped.
    MapTwice { handle: usize, at: u64, granules: u64 },
    /// Maps a handle at addresses that are not reserved.
    MapUnreserved { handle: usize, granules: u64 },
    /// Unmaps addresses without a mapping, which is no error.
    UnmapNothing { at: u64 },
    /// Sets access to addresses without a mapping.
    AccessNothing { at: u64 },
    /// Allocates zero bytes.
    AllocateNothing,
    /// Allocates more than any device has.
    AllocateTooMuch,
    /// Frees an address inside a block.
    FreeInside { slot: usize },
    /// Allocates zero bytes from the pool, which must succeed.
    PoolAllocateNothing { stream: usize },
    /// Allocates more from the pool than any device has.
    PoolAllocateTooMuch { stream: usize },
    /// Registers registered memory.
    RegisterTwice,
    /// Unregisters memory that is not registered.
    UnregisterNothing,
    /// Copies from two registrations at once.
    UploadAcross { stream: usize, slot: usize },
    /// Copies to two registrations at once.
    DownloadAcross { stream: usize, slot: usize },
    /// Uses a device that does not exist.
    NoSuchDevice,
    /// Ends a capture that was not begun.
    EndNothing { stream: usize },
    /// Begins a capture on a capturing stream.
    CaptureTwice { stream: usize },
    /// Queries a capturing stream, which invalidates the capture.
    QueryCapturing { stream: usize },
    /// Waits for an event from outside the capture, which invalidates it.
    WaitFromOutside { stream: usize, event: usize },
    /// Ends a capture before another participating stream is joined.
    LeaveUnjoined { stream: usize, other: usize, event: usize, slot: usize },
    /// Queries an event that was recorded in a capture.
    QueryCaptured { stream: usize, event: usize },
}

/// Runs the program that `bytes` encodes on simulated devices that differ in when they run queued
/// work, and in whether they keep bytes.
///
/// # Panics
/// If two devices differ in results or final contents, if the oracle reports a race-free program,
/// or if something is not freed.
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
        // Programs copy across registrations on purpose. The oracle reports this in addition to the
        // error.
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
    /// Creates the program of a seed. The same seed always gives the same program.
    #[must_use]
    pub fn from_seed(seed: u64) -> Self {
        // More bytes than any program has choices.
        Self::from_bytes(&seeded(seed, 16 << 10))
    }

    /// Creates the program that `bytes` encode. Any bytes are valid.
    #[must_use]
    pub fn from_bytes(bytes: &[u8]) -> Self {
        generate::generate(bytes)
    }

    /// Returns the number of streams.
    #[must_use]
    pub fn streams(&self) -> usize {
        self.streams
    }

    /// Returns the operations, in order.
    #[must_use]
    pub fn operations(&self) -> &[Operation] {
        &self.operations
    }

    /// Returns the same program without waits between streams. It usually has races, so it is for
    /// simulated devices only.
    #[must_use]
    pub fn careless(&self) -> Self {
        let kept = |operation: &&Operation| !matches!(operation, Operation::Wait { .. });
        Self {
            streams: self.streams,
            operations: self.operations.iter().filter(kept).copied().collect(),
        }
    }
}

/// A driver call of a program.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Made {
    /// The index of its operation. Calls of the set-up and of the end have indices beyond all
    /// operations.
    pub operation: usize,
    /// The name of the trait's method.
    pub call: &'static str,
}

/// The result of a program.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Outcome {
    /// A digest of eight bytes of the final contents of each block, each mapping and each host
    /// buffer.
    pub bytes: Vec<u8>,
    /// The code of each driver call: 0 for success, and [`SKIPPED`](Self::SKIPPED) if an earlier
    /// failure made the call impossible.
    pub codes: Vec<u32>,
    /// The call of each code.
    pub made: Vec<Made>,
}

impl Outcome {
    /// The code of a call that was not made.
    pub const SKIPPED: u32 = u32::MAX;

    /// Returns the calls of two runs of `program` whose codes differ, and how many contents differ.
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
    /// The operation of the call, unless it belongs to the set-up or the end.
    pub operation: Option<Operation>,
    /// The code in this run, or `None` if it made fewer calls.
    pub ours: Option<u32>,
    /// The code in the other run.
    pub theirs: Option<u32>,
}

/// The differences between two runs of one program. Displayed as a table.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Differences {
    /// The calls.
    pub codes: Vec<Difference>,
    /// The number of blocks, mappings and buffers whose contents differ.
    pub contents: usize,
}

impl Differences {
    /// Returns whether there are no differences.
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
