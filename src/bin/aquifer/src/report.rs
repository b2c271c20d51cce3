//! `aquifer report`: what held memory in a recorded history, as a page, as text or as JSON.
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

mod analysis;
mod bands;
mod curves;
mod data;
mod failure;
mod holders;
mod page;
mod selection;
mod text;

use crate::{cli, error::CommandError, output};
use analysis::{RunAnalysis, find_peak};
use aquifer_benches::console::{foreign, progress::ProgressLine};
use aquifer_core::Bytes;
use aquifer_formats::{
    history::MemoryHistory,
    trace::{TraceDevice, TraceError},
};
use data::{DevicePeak, ReportRun};
use page::ReportPage;
use std::{
    fs::File,
    io::{self, BufReader, Read},
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

/// The largest page, unless another size is asked for.
const MOST_PAGE: u64 = 32_000_000;

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
/// [`CommandError`]. No file is written before all inputs are read.
pub(crate) fn run(args: &cli::Report) -> Result<ReportResult, CommandError> {
    check_paths(args)?;
    let mut progress = ProgressLine::on_terminal();
    let mut inputs = Vec::new();
    for path in [Some(&args.trace), args.other.as_ref()].into_iter().flatten() {
        progress.phase("reading:");
        let histories =
            read(path, args.device_index, &mut progress).map_err(CommandError::in_trace(path))?;
        let rows = histories.first().map_or(0, |history| history.unreadable);
        if args.fail_over.is_some() && rows > 0 {
            return Err(CommandError::Unread { path: path.clone(), rows });
        }
        let name = match path.file_name().filter(|_| path.as_os_str() != "-") {
            Some(name) => name.to_string_lossy().into_owned(),
            None => path.display().to_string(),
        };
        inputs.push(ReportInput { name, histories });
    }
    let peaks: Vec<DevicePeak> = inputs.iter().flat_map(ReportInput::peaks).collect();
    let chosen = chosen(inputs)?;
    let mut runs = Vec::new();
    for (name, mut history) in chosen {
        progress.phase("analysing:");
        if args.other.is_none() {
            history.notes.splice(..0, note_on_devices(&history, &peaks));
        }
        let analysis = RunAnalysis::of(&history, &mut progress);
        runs.push(ReportRun { name, history, analysis });
    }
    let mut written = Vec::new();
    progress.phase("writing:");
    progress.at(0, 1);
    if let Some(path) = &args.output {
        let page = ReportPage::of(&runs, args.max_page.map_or(MOST_PAGE, |most| most.0))?;
        let bytes = save(path, |out| page.write_to(out))?;
        let merged = match page.merged {
            0 => String::new(),
            merged => format!(", {merged} of the smallest blocks merged"),
        };
        written.push(format!("{}  {}{merged}", foreign::path(path), Bytes(bytes)));
    }
    progress.clear();
    let limit = args.fail_over.map_or(u64::MAX, |limit| limit.0);
    let over = peaks.iter().filter(|peak| peak.live > limit);
    let exceeded: Vec<String> = over
        .map(|peak| {
            let device =
                peak.device.map_or_else(String::new, |device| format!(" on device {device}"));
            let name = text::printable(&peak.name);
            format!("the peak of {name}{device} is {}, above {}", Bytes(peak.live), Bytes(limit))
        })
        .collect();
    let mut parts = Vec::new();
    if args.json {
        parts.push(format!("{:#}", data::summary(&runs, &peaks)));
    } else {
        if args.text || written.is_empty() {
            parts.push(text::text(&runs));
        }
        parts.extend(written);
        parts.extend_from_slice(&exceeded);
    }
    Ok(ReportResult { text: parts.join("\n"), within_limit: exceeded.is_empty() })
}

/// The histories of an input: those of its devices, or of its pinned memory if it has no device.
/// The first is that of the device with the most events.
struct ReportInput {
    name: String,
    histories: Vec<MemoryHistory>,
}

impl ReportInput {
    fn peaks(&self) -> impl Iterator<Item = DevicePeak> {
        self.histories.iter().map(|history| {
            let (live, ..) = find_peak(history);
            DevicePeak { name: self.name.clone(), device: history.device, live }
        })
    }

    fn devices(&self) -> Vec<TraceDevice> {
        self.histories.iter().filter_map(|history| history.device).collect()
    }
}

/// Returns the histories to show: the first of one input, or pairs of two, one pair for each device
/// that both have.
fn chosen(inputs: Vec<ReportInput>) -> Result<Vec<(String, MemoryHistory)>, CommandError> {
    let [first, second] = match <[ReportInput; 2]>::try_from(inputs) {
        Ok(two) => two,
        Err(one) => {
            let first =
                |input: ReportInput| Some((input.name, input.histories.into_iter().next()?));
            return Ok(one.into_iter().filter_map(first).collect());
        }
    };
    let devices = [first.devices(), second.devices()];
    let mut others = second.histories;
    let mut pairs = Vec::new();
    let single = first.histories.len() == 1 && others.len() == 1;
    for history in first.histories {
        // An input that does not tell its device may be of any.
        let fits = |other: &MemoryHistory| {
            other.device == history.device
                || single && (history.device.is_none() || other.device.is_none())
        };
        if let Some(place) = others.iter().position(fits) {
            pairs
                .push([(first.name.clone(), history), (second.name.clone(), others.remove(place))]);
        }
    }
    if pairs.is_empty() {
        let [a, b] = devices;
        return Err(CommandError::NoCommonDevice([(first.name, a), (second.name, b)]));
    }
    pairs.sort_by_key(|[(_, history), _]| history.device);
    Ok(pairs.into_iter().flatten().collect())
}

/// Returns the note on the devices that a report of one of them does not show.
fn note_on_devices(history: &MemoryHistory, peaks: &[DevicePeak]) -> Option<String> {
    let (device, [_, _, ..]) = (history.device?, peaks) else { return None };
    let others = peaks.iter().filter(|peak| peak.device != history.device);
    let others = others.filter_map(|peak| {
        Some(format!("device {} with a peak of {}", peak.device?, Bytes(peak.live)))
    });
    let others: Vec<_> = others.collect();
    Some(format!(
        "this is the memory of device {device}; --device-index shows others: {}",
        others.join(", ")
    ))
}

/// Checks that no file is read twice or replaced by mistake.
fn check_paths(args: &cli::Report) -> Result<(), CommandError> {
    let inputs: Vec<&Path> =
        [Some(args.trace.as_path()), args.other.as_deref()].into_iter().flatten().collect();
    if inputs.iter().filter(|path| path.as_os_str() == "-").count() > 1 {
        return Err(CommandError::TwiceStandardInput);
    }
    match &args.output {
        Some(output) if inputs.iter().any(|input| output::is_same_file(output, input)) => {
            Err(CommandError::OutputIsInput(output.clone()))
        }
        _ => Ok(()),
    }
}

/// Reads histories and shows how much of the file is read.
fn read(
    path: &Path,
    device: Option<TraceDevice>,
    progress: &mut ProgressLine,
) -> Result<Vec<MemoryHistory>, TraceError> {
    let file = File::open(path).ok().filter(|_| path.as_os_str() != "-");
    let Some((file, bytes)) = file.and_then(|file| {
        let facts = file.metadata().ok().filter(|facts| facts.is_file())?;
        Some((file, facts.len()))
    }) else {
        // Something that has no length, a generated trace, or an error that the reader describes.
        return MemoryHistory::read_each(path, device).map(only_devices);
    };
    let counted = CountedFile { file, done: progress.count_to(bytes) };
    let reader = BufReader::with_capacity(1 << 16, counted);
    MemoryHistory::each_from_reader(reader, device).map(only_devices)
}

/// Leaves out pinned memory, unless there is nothing else.
fn only_devices(mut histories: Vec<MemoryHistory>) -> Vec<MemoryHistory> {
    let is_host = |history: &MemoryHistory| matches!(history.device, Some(TraceDevice::Host(_)));
    if histories.iter().any(|history| !is_host(history)) {
        histories.retain(|history| !is_host(history));
    }
    histories
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
) -> Result<u64, CommandError> {
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
    .map_err(|e| CommandError::Output(path.to_owned(), e))?;
    Ok(bytes)
}
