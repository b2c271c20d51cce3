//! Compares two drivers by running the same program on both.
//!
//! The simulated GPU is useful only as far as it behaves like a real one. A [`Program`] is
//! generated from a seed, or from any bytes. It has some sixty operations on two or three streams:
//! fills, copies in all directions, events, mappings of one handle at several addresses, and pool
//! allocations. A program is *free of races by construction*: the generator keeps a vector clock
//! for each stream and the host, and inserts an event, a synchronisation or a poll where one is
//! needed. The final contents of memory are therefore determined on any driver and in any timing:
//! an [`Outcome`]. No call of a program is refused. What a driver answers to wrong calls, and
//! graphs, are compared in `allocators/driver/tests/gpu`.
//!
//! ```
//! use aquifer_driver::{DeviceId, sim::Sim};
//! use aquifer_programs::agree::Program;
//!
//! let outcome = Program::from_seed(7).run(&Sim::h200(1).driver(), DeviceId(0)).unwrap();
//! assert!(outcome.calls.contains("fill"));
//! ```
//!
//! [`Program::careless`] is the same program without its waits between streams. It is the negative
//! control: an oracle that accepts it detects nothing.
#![expect(clippy::panic, reason = "a broken promise is told by a panic")]

mod generate;
mod host;
mod machine;

use crate::program::seeded;
use aquifer_driver::{DeviceId, Driver, Result, sim::Sim};
use std::{collections::BTreeSet, sync::Arc};

/// The unit of physical memory and of mappings, in bytes. A device's own granularity must divide
/// it.
const GRANULE: u64 = 2 << 20;
/// The size in granules of the address range that a program maps into.
const RANGE: u64 = 12;
/// Number of events. A program records each repeatedly.
const EVENTS: usize = 6;
/// Sizes of the host buffers: two allocated by the driver, two halves of a range that are
/// registered separately, and one that is not pinned.
const HOSTS: [usize; 5] = [64 << 10, 64 << 10, 32 << 10, 32 << 10, 64 << 10];
/// The index of the first of the two halves. The next index is the second.
const FIRST_HALF: usize = 2;
/// The index of the host buffer that is not pinned.
const PAGEABLE: usize = 4;

/// A location on the device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Place {
    /// The block in this slot.
    Block(usize),
    /// The mapping that starts at this granule of the range.
    Mapping(u64),
}

/// A part of a block or mapping.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Part {
    /// The block or mapping.
    place: Place,
    /// First byte, from the start of the block or mapping.
    offset: u64,
    /// Bytes, at least one.
    bytes: u64,
}

/// A part of a host buffer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct HostPart {
    /// The index of the buffer in [`HOSTS`].
    host: usize,
    /// First byte.
    offset: usize,
    /// Bytes, at least one.
    bytes: usize,
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
        let violations = sim.violations();
        assert!(violations.is_empty(), "{how}: {}", violations[0]);
        assert!(sim.outstanding().is_empty(), "{how}: {}", sim.outstanding());
        outcome
    };
    let sim = || Sim::h200(1).capacity(1 << 30);
    let eager = run_on("eager", sim());
    for (how, sim) in [("seeded", sim().seeded(seed)), ("paced", sim().seeded(!seed).paced(64))] {
        assert_eq!(eager, run_on(how, sim), "eager and {how}");
    }
    assert_eq!(eager.calls, run_on("symbolic", sim().symbolic()).calls);
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
    /// An error of the set-up: streams, events, a pool, an address range and host buffers.
    ///
    /// # Panics
    /// If an operation is refused.
    pub fn run(&self, driver: &Arc<dyn Driver>, device: DeviceId) -> Result<Outcome> {
        generate::perform(&self.bytes, self.careless, driver, device)
    }
}

/// The result of a program.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Outcome {
    /// A digest of the final contents of each block, each mapping and each host buffer.
    pub contents: Vec<u64>,
    /// The calls that were made, by the names of the trait's methods.
    pub calls: BTreeSet<&'static str>,
}
