//! Compares two drivers by running the same program on both.
//!
//! The simulated GPU is useful only as far as it behaves like a real one. A [`Program`] is
//! generated from a seed, or from any bytes. It has some sixty operations on two or three streams:
//! fills, copies in all directions, whole and row by row, events, mappings of one handle at several
//! addresses, pool allocations, captures and their launches. Among them are mistakes that a driver
//! rejects or ignores. A program is *free of races by construction*: the generator
//! keeps a vector clock for each stream and the host, and inserts an event, a synchronisation or a
//! poll where one is needed. The final contents of memory and the code of each call are therefore
//! determined on any driver and in any timing: an [`Outcome`].
//!
//! ```
//! use aquifer_driver::{DeviceId, sim::Sim};
//! use aquifer_programs::agree::Program;
//!
//! let outcome = Program::from_seed(7).run(&Sim::h200(1).driver(), DeviceId(0)).unwrap();
//! assert!(outcome.codes.len() > 40);
//! ```
//!
//! [`Program::careless`] is the same program without its waits between streams. It is the negative
//! control: an oracle that accepts it detects nothing.
#![expect(clippy::panic, reason = "a broken promise is told by a panic")]

mod generate;
mod host;
mod machine;
mod mistakes;

use crate::program::seeded;
use aquifer_driver::{
    DeviceId, Driver, Result,
    sim::{Sim, ViolationKind},
};
use std::{fmt, sync::Arc};

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
        let differences = eager.differences(&late);
        assert!(differences.is_empty(), "eager and {how}:\n{differences}");
    }
    let symbolic = run_on("symbolic", sim().symbolic());
    assert_eq!(eager.codes, symbolic.codes, "{}", eager.differences(&symbolic));
}

/// A program for a driver.
#[derive(Clone, Debug)]
pub struct Program {
    bytes: Vec<u8>,
    careless: bool,
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
        Self { bytes: bytes.into(), careless: false }
    }

    /// Returns the same program without waits between streams. It usually has races, so it is for
    /// simulated devices only.
    #[must_use]
    pub fn careless(self) -> Self {
        Self { careless: true, ..self }
    }

    /// Runs the program in the given device's context and waits for its end. Frees everything that
    /// it allocated.
    ///
    /// # Errors
    /// An error of the set-up: streams, events, a pool, an address range and host buffers. Errors
    /// of the operations are part of the outcome.
    pub fn run(&self, driver: &Arc<dyn Driver>, device: DeviceId) -> Result<Outcome> {
        generate::perform(&self.bytes, self.careless, driver, device)
    }
}

/// A driver call of a program.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Made {
    /// The name of the trait's method.
    pub call: &'static str,
    /// The mistake that the call is a part of.
    pub mistake: Option<&'static str>,
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

    /// Returns the calls of two runs of one program whose codes differ, and how many contents differ.
    #[must_use]
    pub fn differences(&self, other: &Self) -> Differences {
        let mut codes = Vec::new();
        for (number, made) in self.made.iter().enumerate() {
            let (ours, theirs) =
                (self.codes.get(number).copied(), other.codes.get(number).copied());
            if ours != theirs {
                codes.push(Difference { number, made: *made, ours, theirs });
            }
        }
        let pairs = self.bytes.chunks(8).zip(other.bytes.chunks(8));
        let contents = pairs.filter(|(ours, theirs)| ours != theirs).count()
            + self.bytes.len().abs_diff(other.bytes.len()) / 8;
        Differences { codes, contents }
    }
}

/// A call whose codes differ.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Difference {
    /// How many calls were before it.
    pub number: usize,
    /// The call.
    pub made: Made,
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
            let Difference { number, made, ours, theirs } = difference;
            let (ours, theirs) = (shown(*ours), shown(*theirs));
            let mistake = made.mistake.unwrap_or_default();
            writeln!(f, "{ours:>5} {theirs:>5}  {:<16}  {number}  {mistake}", made.call)?;
        }
        if self.contents > 0 {
            writeln!(f, "{} contents differ", self.contents)?;
        }
        Ok(())
    }
}
