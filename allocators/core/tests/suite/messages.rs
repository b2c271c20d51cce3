//! Tests of the text of errors: every one is printed once, and the list is read as a whole.

use aquifer_core::{DeviceId, DriverError, MemoryError as Error, NoGpu, SystemError, Tag};
use std::{fmt::Write, panic::Location};

/// Every error that has a text of its own. Those of budgets and of memory that ran out are in
/// `explain`.
fn errors() -> Vec<Error> {
    let driver = |code, name| DriverError { call: "cuInit", code, name };
    let no_gpu = |why| Error::NoGpu { asked: 1, why: Box::new(why) };
    let address = 0x7000_0000;
    vec![
        Error::ZeroSize,
        Error::TooLarge { requested: 1 << 63, limit: (1 << 63) - 1 },
        Error::BadAlignment { align: 3 },
        Error::Driver(driver(2, "CUDA_ERROR_OUT_OF_MEMORY")),
        Error::System(SystemError { call: "mmap", errno: 12 }),
        Error::DeviceLost { device: DeviceId(1) },
        Error::NoDevice { asked: 1, count: 0 },
        Error::NoDevice { asked: 9, count: 8 },
        no_gpu(NoGpu::NotBuilt),
        no_gpu(NoGpu::NoLibrary),
        no_gpu(NoGpu::MissingSymbol { symbol: "cuMemCreate" }),
        no_gpu(NoGpu::Hidden),
        no_gpu(NoGpu::NoDevices),
        no_gpu(NoGpu::Start(driver(34, "CUDA_ERROR_STUB_LIBRARY"))),
        no_gpu(NoGpu::Start(driver(100, "CUDA_ERROR_NO_DEVICE"))),
        no_gpu(NoGpu::Start(driver(803, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"))),
        Error::OtherMachine { expected: 0, actual: 2 },
        Error::WrongDevice { expected: DeviceId(0), actual: DeviceId(1) },
        Error::ForeignBlock { address },
        Error::DoubleFree { address },
        Error::OutOfBounds { offset: 512, len: 1024, bytes: 1024 },
        Error::OutOfRange { start: 10, end: 30, len: 20 },
        Error::ReversedRange { start: 20, end: 10 },
        Error::Uncommitted { offset: 512, len: 1024 },
        Error::LengthMismatch { from: 512, to: 1024 },
        Error::Overlap { from: address, to: address + 512, bytes: 1024 },
        Error::Busy { address },
        Error::Parked { tag: Tag::named("weights") },
        Error::ListedTwice { address },
        Error::Closed,
        Error::Capacity { max: 64 },
        Error::Capturing { stream: 0x10 },
        Error::AlreadyAnnounced { stream: 0x10 },
        Error::CaptureInvalidated { stream: 0x10 },
        Error::UnknownId,
        Error::OtherProcess,
        Error::OtherThread { stream: 2 },
        Error::Unsupported { feature: "virtual memory" },
        Error::Registration { address: 0x7000_0000, bytes: 2 << 20, code: 5 },
        Error::TimedOut,
        Error::NotSet { what: "the pool of routes", by: "staging::install" },
        Error::BadSetting { name: "AQUIFER_BYPASS", value: "yes".to_owned(), expected: "0 or 1" },
    ]
}

/// With `AQUIFER_BLESS` the list is written anew.
#[test]
#[cfg_attr(miri, ignore = "the system's own text is not emulated")]
fn the_text_of_every_error_is_the_committed_one() {
    let printed = errors().iter().fold(String::new(), |mut text, error| {
        writeln!(text, "{error}").unwrap();
        text
    });
    if std::env::var_os("AQUIFER_BLESS").is_some() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/errors.txt");
        std::fs::write(path, &printed).unwrap();
        return;
    }
    assert_eq!(printed, include_str!("../golden/errors.txt"));
    let here = Location::caller();
    let set = Error::AlreadySet { what: "the pool of routes", by: here }.to_string();
    assert_eq!(set, format!("the pool of routes can be set once, and was set at {here}"));
}
