//! The command line: its commands and flags, and the errors of parsing it.

use crate::amount::{Amount, AmountError};
use aquifer_benches::console::place::DeviceChoice;
use aquifer_benches::{Benchmark, RowSelection, StageOptions};
use aquifer_device::PoolConfig;
use aquifer_formats::trace::TraceDevice;
use aquifer_host::StagerConfig;
use clap::{Args, CommandFactory, Parser, Subcommand, ValueEnum, error::ErrorKind};
use clap_complete::Shell;
use std::{ffi::OsString, fmt, net::SocketAddr, path::PathBuf, str::FromStr, time::Duration};

/// How many operations of the trace the simulated device runs behind in `replay`, unless `--lag`
/// says otherwise.
pub(crate) const DEFAULT_LAG: u32 = 64;

/// The arguments of the program.
#[derive(Parser, Debug)]
#[command(
    name = "aquifer",
    version,
    about,
    max_term_width = 80,
    after_help = "\
Exit status: 0 all is well; 1 the trace does not fit, or a check or limit failed;
2 the request or the trace makes no sense (one line on stderr says why)."
)]
pub(crate) struct Cli {
    /// The command to run
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// The commands.
#[derive(Subcommand, Debug)]
pub(crate) enum Command {
    /// Run any CUDA program: record its memory, limit it, share a GPU with others
    #[command(after_help = "\
The program needs no change: its calls of the CUDA driver pass through a library that is
preloaded. The trace is one that `report`, `plan` and `replay` read; its tags are the
functions of the driver, with --stacks also the callers. A further process of the
program that takes memory has its process id in the name of its trace. A limit holds
for the memory that NVML counts for a process; a request beyond it fails as on a smaller
GPU. Without --limit the variable CUDA_DEVICE_MEMORY_LIMIT is one, and with _N at its
end that of device N.
Exit status: that of the program; 126 or 127 if it cannot be started; with --limit or
--pinned-limit 2, if it has opened the driver past the library.")]
    Run(Run),
    /// Replay a recorded allocation trace and check every memory access
    #[command(after_help = "\
The trace is CSV with the header `t_us,op,id,bytes,stream` and more fields, as AQUIFER_TRACE=FILE makes any program that uses the library
write it, the log of RAPIDS' memory manager, or what
torch.cuda.memory._dump_snapshot() writes; plain, or compressed by xz, gzip or zstd,
whatever the file is called. `-` is the standard input. `made:NAME` is a workload
made to break a policy, `made:` lists them. Without a GPU a simulated one is used.")]
    Replay(Replay),
    /// Show what held memory in a recorded trace: at its peak, over time, by address
    #[command(after_help = "\
The trace is one of those that `replay` reads: what AQUIFER_TRACE=FILE makes any
program that uses the library write, the log of RAPIDS' memory manager, or a memory
snapshot of PyTorch; plain, or compressed by xz, gzip or zstd. Two traces are compared
at their peaks, device by device. The page is one file that needs no network. Without
any output flag text is printed. Exit status 1: the peak of a device is above
--fail-over, which checks each device of each trace, or the one of --device-index.
Exit status 2: a trace cannot be read, or two have no device in common.")]
    Report(Report),
    /// Place the blocks of a recorded trace in as little memory as possible, and say what fits
    #[command(after_help = "\
The trace is one of those that `replay` reads. Each block gets an offset in one range,
whose size is printed beside the lower bound: the most bytes that are live at once.
The search ends at the lower bound, or after --seconds; without them after 64 tries or
4 s. A limit counts the bytes of the range: a device maps whole handles of 2 MiB.
Exit status 1: --check, and the plan is above --limit. Exit status 2: the trace cannot
be planned, or has several devices and --device-index names none.")]
    Plan(PlanArgs),
    /// Measure the cost of calls, compared with other allocators
    #[command(arg_required_else_help = false)]
    Bench(BenchArgs),
    /// Measure loading a file to the device: with a cold page cache, a warm one, and direct I/O
    #[command(after_help = "\
Every byte is read back and compared. Beside it stands the driver's own copy of the
same bytes from pageable memory, and the copy from pinned memory, which is the limit.")]
    Stage(Stage),
    /// Show the memory of all processes of this user that use the library, live in the terminal
    #[command(after_help = "\
PHYSICAL      held from the driver or the kernel
LIVE          in live blocks, in rounded sizes
CACHED        free, can be allocated again
PEAK          maximum of PHYSICAL; of several pools, their sum
LIMIT         the tightest budget of the only pool
PENDING       freed, waits for queued work
LARGEST FREE  largest free extent at the last slow path, of CACHED
WAIT/s        waits of streams and of the host
GROW/s        growths by the driver or the kernel
MOVE/s        physical handles moved

A process stands for its device memory, or for its host memory if it has no other.
outside: what the driver counts on a GPU beyond these pools. shared: a memory that
processes share by a ledger, with its members. other: what is in use there and claimed
by none of them. A process that dies is shown for 10 s. AQUIFER_STATUS names the folder
that processes publish in, and AQUIFER_LEDGER that of the ledgers.")]
    Top(Top),
    /// Write the figures of all processes of this user as metrics for Prometheus
    #[command(after_help = "\
Without a flag the text is printed. --listen answers GET /metrics until it is
interrupted. Processes and pools beyond the bounds are counted and left out. The
memories that processes share are included, by the ledgers in AQUIFER_LEDGER.")]
    Metrics(Metrics),
    /// Report what this machine offers, what a program gets, and what to fix
    Doctor(Doctor),
    /// Write shell completions to standard output
    Completions(Completions),
    /// Write the manual page to standard output
    Man,
}

/// Arguments of `completions`.
#[derive(Args, Debug)]
pub(crate) struct Completions {
    /// The shell
    #[arg(value_enum)]
    pub(crate) shell: Shell,
}

/// Flags of `run`.
#[derive(Args, Debug)]
pub(crate) struct Run {
    /// Write a trace
    #[arg(long, value_name = "FILE")]
    pub(crate) record: Option<PathBuf>,
    /// Write a page for the browser when the program has ended
    #[arg(long, value_name = "PAGE.html")]
    pub(crate) report: Option<PathBuf>,
    /// Name the callers of each allocation
    #[arg(long)]
    pub(crate) stacks: bool,
    /// Most memory of each GPU, or of GPU N, that the program gets; may be repeated
    #[arg(long, value_name = "BYTES|N=BYTES")]
    pub(crate) limit: Vec<DeviceLimit>,
    /// Most pinned memory that the program gets
    #[arg(long, value_name = "BYTES")]
    pub(crate) pinned_limit: Option<Size>,
    /// Claim memory of GPUs in the ledgers of a folder (default: that of `AQUIFER_LEDGER`), so that
    /// all programs that do so divide them
    #[arg(long, value_name = "FOLDER", require_equals = true)]
    pub(crate) share: Option<Option<PathBuf>>,
    /// Bytes of each shared GPU that this program can always claim
    #[arg(long, value_name = "BYTES", requires = "share")]
    pub(crate) guarantee: Option<Size>,
    /// Serve stream-ordered allocations (cuMemAllocAsync) from a pool of this library
    #[arg(long)]
    pub(crate) serve: bool,
    /// The program and its arguments
    #[arg(required = true, trailing_var_arg = true, value_name = "PROGRAM")]
    pub(crate) program: Vec<OsString>,
}

/// A limit of one GPU, or of each: `10GiB`, `1=8GiB`. Its text has bytes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct DeviceLimit {
    device: Option<u32>,
    bytes: u64,
}

impl FromStr for DeviceLimit {
    type Err = AmountError;

    fn from_str(text: &str) -> Result<Self, AmountError> {
        let (device, amount) = match text.split_once('=') {
            Some((device, amount)) => {
                (Some(device.parse().map_err(|_| AmountError::NotAnAmount)?), amount)
            }
            None => (None, text),
        };
        amount.parse().map(|Size(bytes)| Self { device, bytes })
    }
}

impl fmt::Display for DeviceLimit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.device {
            Some(device) => write!(f, "{device}={}", self.bytes),
            None => write!(f, "{}", self.bytes),
        }
    }
}

/// Flags of `replay`.
#[derive(Args, Debug)]
pub(crate) struct Replay {
    /// Trace to replay: a file, - for standard input, or made:NAME
    pub(crate) trace: PathBuf,
    /// Device to run on: auto, sim, cuda or cuda:N
    #[arg(long, value_name = "DEVICE", default_value = "auto")]
    pub(crate) device: DeviceChoice,
    /// Let the simulated device run N allocations and frees of the trace behind (default: 64); with
    /// 0, its work is done when the next one begins
    #[arg(long, value_name = "N")]
    pub(crate) lag: Option<u32>,
    /// Distribute the blocks over N streams in turn; uses across streams are kept
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=64))]
    pub(crate) streams: Option<u32>,
    /// Device to replay, from 0, if the trace or snapshot has several (default: the one with the
    /// most events)
    #[arg(long, value_name = "N")]
    pub(crate) device_index: Option<u32>,
    /// Allocator to replay with
    #[arg(long, value_enum, default_value_t = Allocator::Pool)]
    pub(crate) allocator: Allocator,
    /// Memory limit of the allocator: bytes (4076911904, 4GiB, 500M) or a multiple of the trace's
    /// peak (1.05x)
    #[arg(long, value_name = "BYTES|1.05x", conflicts_with = "fit")]
    pub(crate) budget: Option<Amount>,
    /// Search for the smallest budget that completes the trace, and verify it
    #[arg(long)]
    pub(crate) fit: bool,
    /// Plan that the pool follows, made by `aquifer plan`
    #[arg(long, value_name = "FILE", conflicts_with_all = ["fit", "streams"])]
    pub(crate) plan: Option<PathBuf>,
    /// Change N of 100 allocations: one more, one less, another size, or later
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100))]
    pub(crate) change: Option<u32>,
    /// Let the pool hold PERCENT more than the peak of live bytes (default: 17); 6 packs tightly
    #[arg(
        long,
        value_name = "PERCENT",
        value_parser = clap::value_parser!(u32).range(..=i64::from(PoolConfig::MAX_SLACK)),
    )]
    pub(crate) slack: Option<u32>,
    /// Number of timed rounds with the same allocator; the first one fills it
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub(crate) repeat: u32,
    /// Also write the allocator's history as a memory snapshot for PyTorch's memory viewer
    #[arg(long, value_name = "FILE")]
    pub(crate) snapshot: Option<PathBuf>,
    /// Also write what is replayed as rows of a CSV trace, for other programs to replay
    #[arg(long, value_name = "FILE")]
    pub(crate) save_trace: Option<PathBuf>,
    /// Hide from the allocator which streams use a block; the checks must report violations
    #[arg(long, conflicts_with = "fit")]
    pub(crate) ignore_order: bool,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

/// Flags of `plan`.
#[derive(Args, Debug)]
pub(crate) struct PlanArgs {
    /// Trace to plan: a file, - for standard input, or made:NAME
    pub(crate) trace: PathBuf,
    /// Plan to write
    #[arg(short, long, value_name = "FILE")]
    pub(crate) output: Option<PathBuf>,
    /// Memory that the plan has to fit into: bytes (79GiB, 500M) or a multiple of the trace's peak
    /// (1.05x)
    #[arg(long, value_name = "BYTES|1.05x")]
    pub(crate) limit: Option<Amount>,
    /// Exit with status 1 if the plan does not fit into --limit
    #[arg(long, requires = "limit")]
    pub(crate) check: bool,
    /// Search for this long, unless the lower bound is reached before
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=86_400))]
    pub(crate) seconds: Option<u32>,
    /// Device to plan, from 0: needed if the trace or snapshot has several
    #[arg(long, value_name = "N")]
    pub(crate) device_index: Option<u32>,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

/// Flags of `report`.
#[derive(Args, Debug)]
pub(crate) struct Report {
    /// Trace to report on: a file, - for standard input, or made:NAME
    pub(crate) trace: PathBuf,
    /// Another trace to compare it with
    #[arg(value_name = "TRACE2")]
    pub(crate) other: Option<PathBuf>,
    /// Write a page for the browser: one HTML file
    #[arg(short, long, value_name = "PAGE.html")]
    pub(crate) output: Option<PathBuf>,
    /// Largest size of the page; above it the smallest blocks are merged [default: 32MB]
    #[arg(long, value_name = "BYTES")]
    pub(crate) max_page: Option<Size>,
    /// Print text: at most 60 lines of 80 columns
    #[arg(long, conflicts_with = "json")]
    pub(crate) text: bool,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
    /// Exit with status 1 if the peak of live bytes of any device is above this
    #[arg(long, value_name = "BYTES")]
    pub(crate) fail_over: Option<Size>,
    /// Device to report on and to check, if the trace has several: its number, host or host:N for
    /// pinned memory (default: show the one with the most events, or compare each; check all)
    #[arg(long, value_name = "DEVICE")]
    pub(crate) device_index: Option<TraceDevice>,
}

impl Report {
    /// The arguments that write a page of a trace.
    pub(crate) fn page(trace: PathBuf, page: PathBuf) -> Self {
        Self {
            trace,
            other: None,
            output: Some(page),
            max_page: None,
            text: false,
            json: false,
            fail_over: None,
            device_index: None,
        }
    }
}

/// Arguments of `bench`.
#[derive(Args, Debug)]
pub(crate) struct BenchArgs {
    /// The benchmark to run
    #[command(subcommand)]
    pub(crate) what: Benched,
}

/// The benchmarks.
#[derive(Subcommand, Debug)]
pub(crate) enum Benched {
    /// Arenas, compared with bumpalo, bump-scope and the host's malloc
    #[command(after_help = "\
A ratio is the arena's time over the peer's in the same run: below 1 is faster.
Without a GPU pinned memory is pageable, and the pool is the same. Takes most of a
minute. bump-scope is there if the program was built with the feature `peers`.")]
    Arena(OnDevice),
    /// The caching device pool, compared with the driver's allocator and the host's malloc
    #[command(after_help = "\
A ratio is the pool's time over the peer's in the same run: below 1 is faster. On a
GPU the peer is the driver's stream-ordered allocator. Takes most of a minute.")]
    Device(BenchDevice),
    /// Pools of pinned host memory, compared with the host's malloc and the driver
    #[command(after_help = "\
A ratio is the pool's time over the peer's in the same run: below 1 is faster.
Without a GPU memory is pageable, and the pool is the same. Takes most of a minute.")]
    Pinned(OnDevice),
    /// Staging of pageable memory and files, compared with the driver's copy and the pinned limit
    #[command(after_help = "\
A ratio is the stager's time over the peer's in the same run: below 1 is faster. Takes some minutes, and with the largest transfers 20 GiB of host memory.")]
    Stage(BenchStage),
    /// The global allocator over the system's, mimalloc and jemalloc: the cost of counting, tags
    /// and routes
    #[command(after_help = "\
A ratio is the time over the peer's in the same run: below 1 is faster. `adds` is a
median of 21 turns, with the interval of 95 %. Takes some minutes. mimalloc, jemalloc
and similar crates are there if the program was built with the feature `peers`.")]
    Global(RowFlags),
    /// Charges to budgets: by level, by lease, and with 16 threads
    #[command(after_help = "\
A ratio is the budget's time over the host's malloc in the same run. No device is part
of it. Takes some seconds.")]
    Budget(RowFlags),
    /// Choosing a simulated device: by each policy, in groups, with 16 threads
    #[command(after_help = "\
A ratio is the placer's time over that of a vector of free bytes behind a lock in the
same run. No GPU is part of it. Takes most of a minute.")]
    Placement(RowFlags),
}

impl Benched {
    /// Returns the benchmark with its settings, and the flags that all benchmarks share.
    pub(crate) fn settings(self) -> (Benchmark, RowFlags) {
        match self {
            Self::Arena(args) => (Benchmark::Arena { device: args.device }, args.rows),
            Self::Device(BenchDevice { device, driver, rows }) => {
                (Benchmark::Device { device, driver }, rows)
            }
            Self::Pinned(args) => (Benchmark::Pinned { device: args.device }, args.rows),
            Self::Stage(args) => {
                let options = StageOptions {
                    device: args.device,
                    most: args.most.map(|Size(bytes)| bytes),
                    folder: args.folder,
                    stager: args.stager.config(),
                };
                (Benchmark::Stage(options), args.rows)
            }
            Self::Global(rows) => (Benchmark::Global, rows),
            Self::Budget(rows) => (Benchmark::Budget, rows),
            Self::Placement(rows) => (Benchmark::Placement, rows),
        }
    }
}

/// Flags that all benchmarks share.
#[derive(Args, Debug)]
pub(crate) struct RowFlags {
    /// Run only rows whose name contains PATTERN, ignoring case
    #[arg(long, value_name = "PATTERN")]
    pub(crate) only: Option<String>,
    /// Run everything within seconds, with rough figures
    #[arg(long)]
    pub(crate) quick: bool,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

impl RowFlags {
    /// Returns which rows are measured, and how precisely.
    pub(crate) fn selection(&self) -> RowSelection {
        RowSelection { only: self.only.clone(), quick: self.quick }
    }
}

/// Flags of `bench arena` and `bench pinned`.
#[derive(Args, Debug)]
pub(crate) struct OnDevice {
    /// Device that the pinned memory serves: auto, sim, cuda or cuda:N
    #[arg(long, value_name = "DEVICE", default_value = "auto")]
    pub(crate) device: DeviceChoice,
    /// Row selection and output format
    #[command(flatten)]
    pub(crate) rows: RowFlags,
}

/// Flags of `bench device`.
#[derive(Args, Debug)]
pub(crate) struct BenchDevice {
    /// Device to run on: auto, sim, cuda or cuda:N
    #[arg(long, value_name = "DEVICE", default_value = "auto")]
    pub(crate) device: DeviceChoice,
    /// Row selection and output format
    #[command(flatten)]
    pub(crate) rows: RowFlags,
    /// Also time the driver's own calls, on a GPU
    #[arg(long)]
    pub(crate) driver: bool,
}

/// Flags of `bench stage`.
#[derive(Args, Debug)]
pub(crate) struct BenchStage {
    /// Device to run on: auto, sim, cuda or cuda:N
    #[arg(long, value_name = "DEVICE", default_value = "auto")]
    pub(crate) device: DeviceChoice,
    /// Row selection and output format
    #[command(flatten)]
    pub(crate) rows: RowFlags,
    /// Largest transfer
    #[arg(long, value_name = "BYTES")]
    pub(crate) most: Option<Size>,
    /// Folder for the files that are written and read
    #[arg(long, value_name = "FOLDER")]
    pub(crate) folder: Option<PathBuf>,
    /// Settings of the stager
    #[command(flatten)]
    pub(crate) stager: StagerFlags,
}

/// Flags of `stage`.
#[derive(Args, Debug)]
pub(crate) struct Stage {
    /// File to load
    pub(crate) file: PathBuf,
    /// Device to run on: auto, sim, cuda or cuda:N
    #[arg(long, value_name = "DEVICE", default_value = "auto")]
    pub(crate) device: DeviceChoice,
    /// Settings of the stager
    #[command(flatten)]
    pub(crate) stager: StagerFlags,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

/// Settings of a stager. A flag that is not given leaves the library's default.
#[derive(Args, Clone, Debug)]
pub(crate) struct StagerFlags {
    /// Threads that fill slots for the device, and as many that empty them
    #[arg(long, value_name = "N")]
    pub(crate) workers: Option<usize>,
    /// Bytes per slot
    #[arg(long, value_name = "BYTES")]
    pub(crate) slot: Option<Size>,
    /// Slots per worker
    #[arg(long, value_name = "N")]
    pub(crate) slots: Option<usize>,
    /// Bytes of the smallest chunk
    #[arg(long, value_name = "BYTES")]
    pub(crate) chunk: Option<Size>,
    /// Largest transfer in bytes that one driver copy moves to the device
    #[arg(long, value_name = "BYTES", value_parser = size_or_none)]
    pub(crate) direct: Option<Size>,
}

impl StagerFlags {
    /// Returns the configuration that the flags describe.
    pub(crate) fn config(&self) -> StagerConfig {
        let mut config = StagerConfig::default();
        let bytes = |size: Option<Size>, usual| size.map_or(usual, |size| size.0 as usize);
        config.up_workers = self.workers.unwrap_or(config.up_workers);
        config.down_workers = self.workers.unwrap_or(config.down_workers);
        config.slots = self.slots.unwrap_or(config.slots);
        config.slot = bytes(self.slot, config.slot);
        config.least_chunk = bytes(self.chunk, config.least_chunk.min(config.slot));
        config.direct = bytes(self.direct, config.direct);
        config
    }
}

/// A number of bytes, written as on the command line.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Size(pub(crate) u64);

impl FromStr for Size {
    type Err = AmountError;

    fn from_str(text: &str) -> Result<Self, AmountError> {
        match Amount::parse(text)? {
            Amount::Bytes(bytes) => Ok(Self(bytes)),
            Amount::OfPeak(_) => Err(AmountError::NotAnAmount),
        }
    }
}

/// Parses a size. `0` is allowed and means none.
fn size_or_none(text: &str) -> Result<Size, AmountError> {
    match text.parse() {
        Err(AmountError::Zero) => Ok(Size(0)),
        size => size,
    }
}

/// Flags of `doctor`.
#[derive(Args, Debug)]
pub(crate) struct Doctor {
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
    /// Exit with status 1 if there is a warning
    #[arg(long)]
    pub(crate) strict: bool,
}

/// Flags of `top`.
#[derive(Args, Debug)]
pub(crate) struct Top {
    /// Interval between two readings: 500ms, 1s, 2.5s (at least 100ms)
    #[arg(long, value_name = "TIME", value_parser = interval)]
    pub(crate) interval: Option<Duration>,
    /// Print one table and end; with --interval, after two readings, with figures per second
    #[arg(long)]
    pub(crate) once: bool,
    /// Print JSON; implies --once
    #[arg(long)]
    pub(crate) json: bool,
    /// Also show dead processes, with their last figures
    #[arg(long)]
    pub(crate) dead: bool,
    /// Remove the files of dead processes
    #[arg(long)]
    pub(crate) sweep: bool,
}

/// Flags of `metrics`.
#[derive(Args, Debug)]
pub(crate) struct Metrics {
    /// Replace this file as a whole, for the textfile collector
    #[arg(short, long, value_name = "FILE", conflicts_with = "listen")]
    pub(crate) output: Option<PathBuf>,
    /// Answer GET /metrics at this address, such as 127.0.0.1:9464
    #[arg(long, value_name = "ADDRESS")]
    pub(crate) listen: Option<SocketAddr>,
    /// Also listen on an address that other machines can reach: all of them can then read the
    /// figures, without a password or encryption
    #[arg(long, requires = "listen")]
    pub(crate) expose_to_network: bool,
    /// Most processes with series of their own, the largest first
    #[arg(long, value_name = "N", default_value_t = 128)]
    pub(crate) most_processes: usize,
    /// Most pools, shared memories, and members of those, with series of their own
    #[arg(long, value_name = "N", default_value_t = 512)]
    pub(crate) most_pools: usize,
}

/// Parses an interval of at least 100 ms and at most a day.
fn interval(text: &str) -> Result<Duration, &'static str> {
    const BAD: &str = "an interval is a time such as 500ms, 1s or 2.5s, from 100ms to 1d";
    let end = text.find(|c: char| !(c.is_ascii_digit() || c == '.')).unwrap_or(text.len());
    let factor = match &text[end..] {
        "ms" => 0.001,
        "" | "s" => 1.0,
        "m" | "min" => 60.0,
        "h" => 3600.0,
        "d" => 86400.0,
        _ => return Err(BAD),
    };
    let seconds = text[..end].parse::<f64>().map_err(|_| BAD)? * factor;
    if (0.1..=86400.0).contains(&seconds) { Ok(Duration::from_secs_f64(seconds)) } else { Err(BAD) }
}

/// The allocator that serves the trace.
#[derive(ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Allocator {
    /// This library's caching pool
    Pool,
    /// The driver's stream-ordered allocator
    Async,
    /// One driver allocation per block
    Direct,
}

impl Allocator {
    /// Returns the name on the command line.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Pool => "pool",
            Self::Async => "async",
            Self::Direct => "direct",
        }
    }
}

/// Why parsing returned no command.
#[derive(Debug)]
pub(crate) enum Refused {
    /// Help or version: text for stdout.
    Words(String),
    /// An invalid command line, described in one line.
    Mistake(String),
}

/// Parses the command line.
///
/// # Errors
/// [`Refused`] if the command line is invalid, and for `--help` and `--version`.
pub(crate) fn parse<I>(arguments: I) -> Result<Cli, Refused>
where
    I: IntoIterator<Item = OsString>,
{
    Cli::try_parse_from(arguments).map_err(|e| match e.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => Refused::Words(e.to_string()),
        ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => Refused::Mistake(
            "a command is needed: replay, report, plan, bench, stage, top, metrics or doctor; aquifer --help says more"
                .to_owned(),
        ),
        _ => Refused::Mistake(one_line(&e.to_string())),
    })
}

/// Returns the completion script of a shell.
pub(crate) fn completions(shell: Shell) -> Vec<u8> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "aquifer", &mut script);
    script
}

/// Returns the manual page in roff: the command, followed by each of its subcommands.
///
/// # Errors
/// Only if memory cannot be allocated.
pub(crate) fn man() -> std::io::Result<Vec<u8>> {
    let mut page = Vec::new();
    let mut command = Cli::command();
    command.build();
    clap_mangen::Man::new(command.clone()).render(&mut page)?;
    let subcommands = |of: &clap::Command| {
        let mut found: Vec<_> = of.get_subcommands().cloned().collect();
        found.reverse();
        found
    };
    let mut open = subcommands(&command);
    while let Some(subcommand) = open.pop() {
        if subcommand.get_name() == "help" {
            continue;
        }
        // The display name is that of the whole command: `aquifer bench stage`.
        let name = subcommand.get_display_name().unwrap_or(subcommand.get_name()).replace('-', " ");
        page.extend(format!(".SH {}\n", name.to_uppercase()).bytes());
        let man = clap_mangen::Man::new(subcommand.clone());
        man.render_synopsis_section(&mut page)?;
        man.render_description_section(&mut page)?;
        man.render_options_section(&mut page)?;
        open.extend(subcommands(&subcommand));
    }
    Ok(page)
}

/// Returns the parser's message without its usage text, in one line.
fn one_line(message: &str) -> String {
    let mut line = String::new();
    for part in message.lines().map(str::trim).take_while(|part| !part.starts_with("Usage:")) {
        if part.is_empty() || part.starts_with("For more information") {
            continue;
        }
        if !line.is_empty() {
            line.push_str(if line.ends_with(':') { " " } else { "; " });
        }
        line.push_str(part.strip_prefix("error: ").unwrap_or(part));
    }
    line
}

impl FromStr for Amount {
    type Err = AmountError;

    fn from_str(text: &str) -> Result<Self, AmountError> {
        Amount::parse(text)
    }
}

#[cfg(test)]
mod tests;
