//! `aquifer stage FILE`: loads a file to the device with a cold page cache, with a warm one, and
//! with direct I/O.
//!
//! A file larger than a window is loaded through one window of device memory after the other. Only
//! loading is timed. After each window, every byte is read back and compared with the file.

use crate::console::{
    foreign, json,
    layout::{clip, wrap},
    place::{DeviceChoice, NoPlace, Place},
    progress::ProgressLine,
};
use crate::{
    bed::{Bed, Took},
    host,
    row::{Peer, Row, Unit},
};
use aquifer_core::{Bytes, MemoryError};
use aquifer_host::{FileSource, ReadMode, Source, StagerConfig};
use serde_json::{Value, json};
use std::{
    fmt, io,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

/// The size of a window: device memory that is loaded at a time.
const WINDOW: u64 = 2 << 30;
/// The size of the pieces that are compared.
const PIECE: usize = 16 << 20;
/// Columns of the page.
const WIDTH: usize = 80;

/// Why there is no report.
#[derive(Debug)]
pub enum LoadError {
    /// The requested device does not exist.
    Place(NoPlace),
    /// The file cannot be read.
    File(PathBuf, io::Error),
    /// The path is a directory.
    Directory(PathBuf),
    /// The file is empty.
    Empty(PathBuf),
    /// The device or pinned memory cannot be allocated, or a transfer failed.
    Memory(MemoryError),
}

impl fmt::Display for LoadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Place(e) => e.fmt(f),
            Self::File(path, e) => write!(f, "{}: {e}", foreign::path(path)),
            Self::Directory(path) => {
                write!(f, "{} is a directory; stage loads one file", foreign::path(path))
            }
            Self::Empty(path) => write!(f, "{} has no bytes", foreign::path(path)),
            Self::Memory(e) => write!(f, "the file cannot be staged: {e}"),
        }
    }
}

impl std::error::Error for LoadError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Place(e) => Some(e),
            Self::File(_, e) => Some(e),
            Self::Memory(e) => Some(e),
            Self::Empty(_) | Self::Directory(_) => None,
        }
    }
}

impl From<MemoryError> for LoadError {
    fn from(error: MemoryError) -> Self {
        Self::Memory(error)
    }
}

/// The result of loading a file.
#[derive(Debug)]
pub struct LoadReport {
    file: String,
    bytes: u64,
    device: String,
    device_title: String,
    date: String,
    rows: Vec<Row>,
    /// Rows that could not be measured here, and why.
    left_out: Vec<(&'static str, &'static str)>,
    /// Bytes that differ from the file.
    wrong: u64,
    /// Whether the device was simulated.
    simulated: bool,
}

/// Loads a file to a device with a cold page cache, with a warm one, and with direct I/O, through a
/// stager with these settings.
///
/// # Errors
/// [`LoadError`].
pub fn load_file(
    path: &Path,
    device: DeviceChoice,
    stager: StagerConfig,
) -> Result<LoadReport, LoadError> {
    let unreadable = |e| LoadError::File(path.to_owned(), e);
    let found = std::fs::metadata(path).map_err(unreadable)?;
    if found.is_dir() {
        return Err(LoadError::Directory(path.to_owned()));
    }
    let bytes = found.len();
    let cached = FileSource::open(path, ReadMode::Cached).map_err(unreadable)?;
    let direct = FileSource::open(path, ReadMode::Direct).map_err(unreadable)?;
    if bytes == 0 {
        return Err(LoadError::Empty(path.to_owned()));
    }
    let mut progress = ProgressLine::on_terminal();
    progress.phase("opening the device, and making slots ready");
    let place = Place::choose(device).map_err(LoadError::Place)?;
    let session = place.begin_with_bytes();
    let bed = Bed::open(&session, stager)?;
    let window = WINDOW.min(bytes).min(bed.room() / 2);
    let mut load = Load { path, bed: &bed, bytes, window, wrong: 0, done: Arc::default() };
    // Warm-up: device memory and the driver's copy paths are initialised before they are timed.
    progress.phase("copies of memory, to compare with:");
    load.done = progress.count_to(4 * COPIES);
    load.peers(true)?;
    let (driver, pinned, memory) = load.peers(false)?;
    let peer = || Some(Peer { name: "driver, pageable memory".to_owned(), ns: driver.wall });
    let row = |name: &str, took: Took, peer| Row {
        name: name.to_owned(),
        ns: took.wall,
        unit: Unit::GbPerSecond,
        peer,
        interval: None,
    };
    let mut rows = Vec::new();
    let mut left_out = Vec::new();
    progress.phase("the page cache is cold:");
    let mut dropped = true;
    let cold = load.each_window(&cached, &mut progress, || {
        dropped &= cached.drop_cache().is_ok();
    })?;
    if dropped {
        rows.push(row("file, cold page cache", cold, peer()));
    } else {
        left_out.push(("file, cold page cache", "the kernel would not forget the file"));
    }
    progress.phase("the page cache is warm:");
    let warm = load.each_window(&cached, &mut progress, || {})?;
    rows.push(row("file, warm page cache", warm, peer()));
    progress.phase("past the page cache:");
    if direct.mode() == ReadMode::Direct {
        let past = load.each_window(&direct, &mut progress, || {})?;
        if direct.mode() == ReadMode::Direct {
            rows.push(row("file, O_DIRECT", past, peer()));
        }
    }
    if direct.mode() == ReadMode::Cached {
        left_out.push(("file, O_DIRECT", "the file system refuses direct reads"));
    }
    rows.push(row("pageable memory", memory, peer()));
    rows.push(row("pinned memory, the limit", pinned, peer()));
    progress.clear();
    let simulated = matches!(place, Place::Sim(_));
    Ok(LoadReport {
        simulated,
        file: path.display().to_string(),
        bytes,
        device: place.name(),
        device_title: place.title(),
        date: host::date(),
        rows,
        left_out,
        wrong: load.wrong,
    })
}

/// The state of loading a file.
struct Load<'a> {
    path: &'a Path,
    bed: &'a Bed,
    bytes: u64,
    window: u64,
    wrong: u64,
    /// What is done of the current phase, for the display.
    done: Arc<AtomicU64>,
}

/// Copies of memory per round of the comparison.
const COPIES: u64 = 3;

/// A file that counts the bytes read from it.
struct Counted<'a>(&'a FileSource, &'a AtomicU64);

impl Source for Counted<'_> {
    fn read_at(&self, offset: u64, into: &mut [u8]) -> io::Result<usize> {
        let read = self.0.read_at(offset, into)?;
        self.1.fetch_add(read as u64, Ordering::Relaxed);
        Ok(read)
    }

    fn alignment(&self) -> usize {
        self.0.alignment()
    }
}

impl Load<'_> {
    /// Loads the whole file window by window and compares it. Returns the time per 10⁹ bytes.
    fn each_window(
        &mut self,
        source: &FileSource,
        progress: &mut ProgressLine,
        mut before: impl FnMut(),
    ) -> Result<Took, LoadError> {
        // Each byte is loaded, read back and compared.
        self.done = progress.count_to(self.bytes.saturating_mul(3));
        let mut all = Took::default();
        let mut offset = 0;
        while offset < self.bytes {
            let bytes = self.window.min(self.bytes - offset);
            let mut buffer = self.bed.buffer(bytes)?;
            before();
            let took = self.bed.read(&Counted(source, &self.done), offset, &mut buffer)?;
            all = Took { wall: all.wall + took.wall, cpu: all.cpu + took.cpu };
            let mut back = vec![0; bytes as usize];
            self.bed.download(&buffer, &mut back)?;
            self.done.fetch_add(bytes, Ordering::Relaxed);
            self.compare(offset, &back)?;
            offset += bytes;
        }
        Ok(all.per(self.bytes, 1_000_000_000))
    }

    /// Counts the bytes that differ from the file.
    fn compare(&mut self, offset: u64, back: &[u8]) -> Result<(), LoadError> {
        let unreadable = |e| LoadError::File(self.path.to_owned(), e);
        let file = FileSource::open(self.path, ReadMode::Cached).map_err(unreadable)?;
        let mut expected = vec![0; PIECE.min(back.len())];
        let mut wrong = 0;
        for (piece, loaded) in back.chunks(PIECE).enumerate() {
            let (from, mut read) = (offset + (piece * PIECE) as u64, 0);
            while read < loaded.len() {
                match file
                    .read_at(from + read as u64, &mut expected[read..loaded.len()])
                    .map_err(unreadable)?
                {
                    0 => return Err(unreadable(io::ErrorKind::UnexpectedEof.into())),
                    more => read += more,
                }
            }
            if expected[..loaded.len()] != *loaded {
                wrong += expected.iter().zip(loaded).filter(|(a, b)| a != b).count() as u64;
            }
            self.done.fetch_add(loaded.len() as u64, Ordering::Relaxed);
        }
        self.wrong += wrong;
        Ok(())
    }

    /// Returns the times per 10⁹ bytes of the driver's copy from pageable memory, of its copy from
    /// pinned memory, and of the stager's copy, for a transfer of the same size.
    fn peers(&self, warm_up: bool) -> Result<(Took, Took, Took), LoadError> {
        let bytes = self.window.min(1 << 30);
        let host = vec![1; bytes as usize];
        let mut buffer = self.bed.buffer(bytes)?;
        let limit = self.bed.limit(bytes)?;
        let rounds = if warm_up { 1 } else { 3 };
        let mut best = [None::<Took>; 3];
        for _ in 0..rounds {
            let took = [
                self.bed.driver_upload(&host, &mut buffer)?,
                self.bed.driver_upload(&limit, &mut buffer)?,
                self.bed.upload(&host, &mut buffer)?,
            ];
            self.done.fetch_add(COPIES, Ordering::Relaxed);
            for (best, took) in best.iter_mut().zip(took) {
                *best =
                    Some(best.map_or(took, |best| if took.wall < best.wall { took } else { best }));
            }
        }
        let [driver, pinned, staged] =
            best.map(|took| took.unwrap_or_default().per(bytes, 1_000_000_000));
        Ok((driver, pinned, staged))
    }
}

impl LoadReport {
    /// Returns whether every byte arrived.
    pub fn is_whole(&self) -> bool {
        self.wrong == 0
    }

    /// Returns one JSON object with one row per line.
    pub fn to_json(&self) -> String {
        let text = |value: Value| value.to_string();
        let rows = self.rows.iter().map(Row::fields);
        let left_out =
            self.left_out.iter().map(|(row, why)| [("row", json!(row)), ("why", json!(why))]);
        json::object(&[
            ("file", text(json!(self.file))),
            ("bytes", text(json!(self.bytes))),
            ("device", text(json!(self.device))),
            ("device_name", text(json!(self.device_title))),
            ("date", text(json!(self.date))),
            ("version", text(json!(env!("CARGO_PKG_VERSION")))),
            ("simulated", text(json!(self.simulated))),
            ("wrong_bytes", text(json!(self.wrong))),
            ("left_out", json::table(left_out)),
            ("rows", json::table(rows)),
        ])
    }

    /// Returns the page, without a newline after the last line.
    pub fn to_screen(&self) -> String {
        let mut lines =
            wrap(&format!("{}: {} to {}", self.file, Bytes(self.bytes), self.device_title), WIDTH);
        lines.push(String::new());
        for row in &self.rows {
            let ratio = row
                .ratio()
                .map_or(String::new(), |ratio| format!("{ratio:.2} × the driver's time"));
            let line = format!("{:<28}{:>14}   {ratio}", clip(&row.name, 28), row.unit.of(row.ns));
            lines.push(line.trim_end().to_owned());
        }
        if self.simulated {
            lines.extend(wrap(
                "simulated: the device is memory of this host, so these are not the rates of any link",
                WIDTH,
            ));
        }
        for (row, why) in &self.left_out {
            lines.extend(wrap(&format!("left out: {row}: {why}"), WIDTH));
        }
        lines.push(match self.wrong {
            0 => "every byte was read back and is right".to_owned(),
            wrong => format!("WRONG: {wrong} bytes are not those of the file"),
        });
        lines.join("\n")
    }
}
