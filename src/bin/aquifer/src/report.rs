//! `aquifer report`: what held memory in a recorded history, as a page, as text, as JSON or for
//! Perfetto.
//!
//! | module | contents |
//! |---|---|
//! | `analysis` | one history: curves, the peak, where memory went |
//! | `curves` | curves as pyramids |
//! | `holders` | who holds memory, and comparison of two runs |
//! | `failure` | why a request failed |
//! | `selection` | which blocks a page shows one by one |
//! | `bands` | the others, as bands of the address map |
//! | `data` | the data of a page, and JSON |
//! | `page` | the page |
//! | `text` | text for logs |
//! | `perfetto`, `protobuf` | a trace for Perfetto's viewer |

mod analysis;
mod bands;
mod curves;
mod data;
mod failure;
mod holders;
mod page;
mod perfetto;
mod protobuf;
mod selection;
mod text;

use crate::{cli, output, trace_file};
use analysis::RunAnalysis;
use aquifer_console::{foreign, progress::ProgressLine};
use aquifer_core::Bytes;
use aquifer_formats::{
    history::MemoryHistory,
    trace::{TraceDevice, TraceError},
};
use data::ReportRun;
use page::{PageError, ReportPage};
use std::{
    fmt,
    fs::File,
    io::{self, BufReader, Read},
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

/// Why there is no report.
#[derive(Debug)]
pub(crate) enum ReportError {
    /// An input is invalid.
    Input {
        /// The file.
        path: PathBuf,
        /// The error in it.
        error: TraceError,
    },
    /// The standard input is named twice.
    TwiceStandardInput,
    /// A trace for Perfetto is of one input.
    PerfettoOfTwo,
    /// An output is one of the inputs.
    OutputIsInput(PathBuf),
    /// Both outputs are one file.
    OutputTwice(PathBuf),
    /// The page does not fit its limit.
    Page(PageError),
    /// A file cannot be written.
    Output(PathBuf, io::Error),
}

impl fmt::Display for ReportError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Input { path, error } => trace_file::write_error(f, path, error),
            Self::TwiceStandardInput => f.write_str("the standard input can be read once"),
            Self::PerfettoOfTwo => f.write_str("--perfetto writes one trace, and two are given"),
            Self::OutputIsInput(path) => {
                write!(f, "{} would replace the trace that is read", foreign::path(path))
            }
            Self::OutputTwice(path) => {
                write!(
                    f,
                    "{} cannot be both the page and the trace for Perfetto",
                    foreign::path(path)
                )
            }
            Self::Page(e) => e.fmt(f),
            Self::Output(path, e) => write!(f, "{} cannot be written: {e}", foreign::path(path)),
        }
    }
}

impl std::error::Error for ReportError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Input { error, .. } => Some(error),
            Self::Output(_, e) => Some(e),
            _ => None,
        }
    }
}

/// The result of the command.
#[derive(Debug)]
pub(crate) struct ReportResult {
    /// What is printed.
    pub(crate) text: String,
    /// Whether no peak is above the limit.
    pub(crate) within_limit: bool,
}

/// Runs the `report` command.
///
/// # Errors
/// [`ReportError`]. No file is written before all inputs are read.
pub(crate) fn run(args: &cli::Report) -> Result<ReportResult, ReportError> {
    check_paths(args)?;
    let mut progress = ProgressLine::on_terminal();
    let mut runs = Vec::new();
    for path in [Some(&args.trace), args.other.as_ref()].into_iter().flatten() {
        progress.phase("reading:");
        let history = read(path, args.device_index, &mut progress)
            .map_err(|error| ReportError::Input { path: path.clone(), error })?;
        progress.phase("analysing:");
        let analysis = RunAnalysis::of(&history, &mut progress);
        let name = match path.file_name().filter(|_| path.as_os_str() != "-") {
            Some(name) => name.to_string_lossy().into_owned(),
            None => path.display().to_string(),
        };
        runs.push(ReportRun { name, history, analysis });
    }
    let mut written = Vec::new();
    progress.phase("writing:");
    progress.at(0, 1);
    if let Some(path) = &args.output {
        let page = ReportPage::of(&runs, args.max_page.0).map_err(ReportError::Page)?;
        let bytes = save(path, |out| page.write_to(out))?;
        let merged = match page.merged {
            0 => String::new(),
            merged => format!(", {merged} of the smallest blocks merged"),
        };
        written.push(format!("{}  {}{merged}", foreign::path(path), Bytes(bytes)));
    }
    if let (Some(path), Some(run)) = (&args.perfetto, runs.first()) {
        let bytes = save(path, |out| perfetto::write(run, out))?;
        written.push(format!("{}  {}", foreign::path(path), Bytes(bytes)));
    }
    progress.clear();
    let exceeded = args.fail_over.and_then(|limit| {
        let over = |run: &&ReportRun| run.analysis.peak.live > limit.0;
        runs.iter().find(over).map(|run| {
            format!(
                "the peak of {} is {}, above {}",
                text::printable(&run.name),
                Bytes(run.analysis.peak.live),
                Bytes(limit.0)
            )
        })
    });
    let mut parts = Vec::new();
    if args.json {
        parts.push(format!("{:#}", data::summary(&runs)));
    } else {
        if args.text || written.is_empty() {
            parts.push(text::text(&runs));
        }
        parts.extend(written);
        parts.extend(exceeded.clone());
    }
    Ok(ReportResult { text: parts.join("\n"), within_limit: exceeded.is_none() })
}

/// Checks that no file is read twice or replaced by mistake.
fn check_paths(args: &cli::Report) -> Result<(), ReportError> {
    let inputs: Vec<&Path> =
        [Some(args.trace.as_path()), args.other.as_deref()].into_iter().flatten().collect();
    if inputs.iter().filter(|path| path.as_os_str() == "-").count() > 1 {
        return Err(ReportError::TwiceStandardInput);
    }
    if args.perfetto.is_some() && inputs.len() > 1 {
        return Err(ReportError::PerfettoOfTwo);
    }
    let outputs = [&args.output, &args.perfetto].into_iter().flatten();
    for output in outputs {
        if inputs.iter().any(|input| trace_file::is_same_file(output, input)) {
            return Err(ReportError::OutputIsInput(output.clone()));
        }
    }
    match (&args.output, &args.perfetto) {
        (Some(page), Some(trace)) if page == trace => Err(ReportError::OutputTwice(page.clone())),
        _ => Ok(()),
    }
}

/// Reads a history and shows how much of the file is read.
fn read(
    path: &Path,
    device: Option<TraceDevice>,
    progress: &mut ProgressLine,
) -> Result<MemoryHistory, TraceError> {
    let file = File::open(path).ok().filter(|_| path.as_os_str() != "-");
    let Some((file, bytes)) = file.and_then(|file| {
        let facts = file.metadata().ok().filter(|facts| facts.is_file())?;
        Some((file, facts.len()))
    }) else {
        // Something that has no length, a generated trace, or an error that the reader describes.
        return MemoryHistory::read(path, device);
    };
    let done = Arc::new(AtomicU64::new(0));
    let counted = BufReader::with_capacity(1 << 16, CountedFile { file, done: done.clone() });
    progress.during(&done, bytes, || MemoryHistory::from_reader(counted, device))
}

/// A file that counts the bytes read from it.
struct CountedFile {
    file: File,
    done: Arc<AtomicU64>,
}

impl Read for CountedFile {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let read = self.file.read(into)?;
        self.done.fetch_add(read as u64, Ordering::Relaxed);
        Ok(read)
    }
}

/// Writes a file whole, and returns its bytes.
fn save(
    path: &Path,
    write: impl FnOnce(&mut dyn io::Write) -> io::Result<()>,
) -> Result<u64, ReportError> {
    struct Counted<'a>(&'a mut dyn io::Write, u64);
    impl io::Write for Counted<'_> {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            let written = self.0.write(bytes)?;
            self.1 += written as u64;
            Ok(written)
        }
        fn flush(&mut self) -> io::Result<()> {
            self.0.flush()
        }
    }
    let mut bytes = 0;
    output::write_whole(path, |out| {
        let mut counted = Counted(out, 0);
        write(&mut counted)?;
        bytes = counted.1;
        Ok(())
    })
    .map_err(|e| ReportError::Output(path.to_owned(), e))?;
    Ok(bytes)
}
