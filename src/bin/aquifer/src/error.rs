//! Why a command has no result.

use aquifer_benches::console::{foreign, place::NoPlace};
use aquifer_benches::{BenchError, LoadError};
use aquifer_core::{Bytes, MemoryError};
use aquifer_formats::plan::{PlanError, PlanFileError};
use aquifer_formats::trace::{TraceDevice, TraceError};
use aquifer_status::StatusError;
use std::{
    fmt, io,
    net::SocketAddr,
    path::{Path, PathBuf},
};

/// Why a command has no result. It is written in one line.
#[derive(Debug)]
pub(crate) enum CommandError {
    /// A trace is invalid.
    Trace {
        /// The file.
        path: PathBuf,
        /// The error in it.
        error: TraceError,
    },
    /// A gate cannot check rows that cannot be read.
    Unread {
        /// The file.
        path: PathBuf,
        /// The number of such rows.
        rows: u64,
    },
    /// An output is the trace that is read.
    OutputIsInput(PathBuf),
    /// An output cannot be written.
    Output(PathBuf, io::Error),
    /// The result cannot be written to standard output.
    Result(io::Error),
    /// The requested device does not exist.
    Place(NoPlace),
    /// `--lag` and a device that is not simulated.
    NeedsSim,
    /// The budget exceeds the device's memory.
    Budget {
        /// Bytes requested.
        asked: u64,
        /// Bytes of memory of the device.
        memory: u64,
        /// The device's display name.
        title: String,
    },
    /// A plan cannot be read.
    Plan {
        /// The file.
        path: PathBuf,
        /// The error in it.
        error: PlanFileError,
    },
    /// A flag for the pool and another allocator. Contains the flag.
    NeedsPool(&'static str),
    /// The allocator of a replay or its streams could not be created.
    Setup(MemoryError),
    /// The blocks of a trace cannot be planned.
    Blocks {
        /// The file.
        path: PathBuf,
        /// The error in it.
        error: PlanError,
    },
    /// A plan is for one device, and the trace has several.
    SeveralDevices {
        /// The file.
        path: PathBuf,
        /// Its devices.
        devices: Vec<u32>,
    },
    /// The standard input is named twice.
    TwiceStandardInput,
    /// Two inputs of a report have no device in common: their names and devices.
    NoCommonDevice([(String, Vec<TraceDevice>); 2]),
    /// Even without blocks a page is larger than its limit.
    PageTooLarge {
        /// Its bytes without blocks.
        least: u64,
        /// The limit.
        most: u64,
    },
    /// The data of a page cannot be compressed.
    Compress(io::Error),
    /// A bench cannot begin.
    Bench(BenchError),
    /// A file cannot be loaded to the device.
    Load(LoadError),
    /// The folder of the status files cannot be read.
    Status(StatusError),
    /// The library that `run` preloads is not installed.
    NoLibrary {
        /// Its file name.
        name: &'static str,
        /// Where it is expected.
        folder: PathBuf,
    },
    /// A variable that sets a limit has no amount.
    Variable {
        /// Its name.
        name: String,
        /// Its value.
        value: String,
    },
    /// `--share` and an environment that turns ledgers off.
    NoLedger,
    /// Signals cannot be passed on to the program.
    Signals(io::Error),
    /// The terminal returned an error.
    Terminal(io::Error),
    /// Other machines can reach the address of the server.
    Exposed(SocketAddr),
    /// The address cannot be listened on.
    Listen {
        /// The address.
        address: SocketAddr,
        /// The error of the system.
        error: io::Error,
    },
}

impl CommandError {
    /// Returns what makes an error in a trace one in this file.
    pub(crate) fn in_trace(path: &Path) -> impl FnOnce(TraceError) -> Self {
        |error| Self::Trace { path: path.to_owned(), error }
    }
}

impl fmt::Display for CommandError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Trace { path, error } => {
                let comma = if error.row().is_some() { ", " } else { ": " };
                write!(f, "{}{comma}{error}", foreign::path(path))
            }
            Self::Unread { path, rows } => {
                write!(f, "{}: cannot check {rows} rows that cannot be read", foreign::path(path))
            }
            Self::OutputIsInput(path) => {
                write!(f, "{} would replace the trace that is read", foreign::path(path))
            }
            Self::Output(path, e) => write!(f, "{} cannot be written: {e}", foreign::path(path)),
            Self::Result(e) => write!(f, "the result cannot be written: {e}"),
            Self::Place(e) => e.fmt(f),
            Self::NeedsSim => f.write_str("--lag is for the simulated device only: --device sim"),
            Self::Budget { asked, memory, title } => {
                write!(
                    f,
                    "a budget of {asked} bytes ({}) is more than the {} of the {title}",
                    Bytes(*asked),
                    Bytes(*memory)
                )
            }
            Self::Plan { path, error } => write!(f, "{}: {error}", foreign::path(path)),
            Self::NeedsPool(flag) => write!(f, "{flag} is for the pool only: --allocator pool"),
            Self::Setup(e) => write!(f, "the replay cannot begin: {e}"),
            Self::Blocks { path, error } => write!(f, "{}: {error}", foreign::path(path)),
            Self::SeveralDevices { path, devices } => {
                let names: Vec<_> = devices.iter().map(ToString::to_string).collect();
                write!(
                    f,
                    "{} has memory of devices {}, and a plan is for one: --device-index N chooses it",
                    foreign::path(path),
                    names.join(", ")
                )
            }
            Self::TwiceStandardInput => f.write_str("the standard input can be read once"),
            Self::NoCommonDevice(inputs) => {
                let [first, second] = inputs.each_ref().map(|(name, devices)| {
                    let name = foreign::printable(name);
                    let names: Vec<_> = devices.iter().map(ToString::to_string).collect();
                    match &names[..] {
                        [] => format!("{name} does not tell its device"),
                        [one] => format!("{name} has memory of device {one}"),
                        _ => format!("{name} has memory of devices {}", names.join(", ")),
                    }
                });
                write!(f, "{first} and {second}: only memory of the same device can be compared")
            }
            Self::PageTooLarge { least, most } => {
                write!(f, "the page has {least} bytes without any block; --max-page is {most}")
            }
            Self::Compress(e) => write!(f, "the data of the page cannot be compressed: {e}"),
            Self::Bench(e) => e.fmt(f),
            Self::Load(e) => e.fmt(f),
            Self::Status(e) => e.fmt(f),
            Self::NoLibrary { name, folder } => write!(
                f,
                "{name} is not in {}: install it beside the program, or build all with cargo build --release",
                foreign::path(folder)
            ),
            Self::Variable { name, value } => {
                write!(f, "{name} is {value:?}, which is no amount of memory, such as 10g")
            }
            Self::NoLedger => {
                f.write_str("--share needs a ledger, which AQUIFER_LEDGER=off turns off")
            }
            Self::Signals(e) => write!(f, "the program cannot be waited for: {e}"),
            Self::Terminal(e) => write!(f, "the terminal cannot be used: {e}"),
            Self::Exposed(address) => write!(
                f,
                "other machines can reach {address}, and nothing is asked of them; listen on \
                 127.0.0.1, or accept that by --expose-to-network"
            ),
            Self::Listen { address, error } => {
                write!(f, "{address} cannot be listened on: {error}")
            }
        }
    }
}

impl std::error::Error for CommandError {}

impl From<StatusError> for CommandError {
    fn from(error: StatusError) -> Self {
        Self::Status(error)
    }
}
