//! A line-based log file, with a count of lines that could not be written. Used by every sink that
//! writes a log.

use std::{
    ffi::{OsStr, OsString},
    fmt::{self, Write as _},
    fs::{File, TryLockError},
    io::{self, Seek, SeekFrom, Write},
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    process,
    sync::{Mutex, MutexGuard, PoisonError},
};

/// The number of names that are tried.
const MAX_NAMES: u32 = 1000;

/// A file written line by line, so that the log is complete up to the last line even if the program
/// is killed.
///
/// The file ends with the last complete line: after a failure nothing is written any more, since
/// later lines may refer to the missing one.
#[derive(Debug)]
pub(super) struct LineFile {
    path: PathBuf,
    file: File,
    /// Its device and inode.
    identity: (u64, u64),
    /// The length of the file.
    bytes: u64,
    /// Lines that are not written yet: none between two calls, unless lines are held back.
    lines: String,
    holds_back: bool,
    failed: bool,
    dropped: u64,
}

impl LineFile {
    /// Creates or replaces the file and writes its first line. `%p` in `template` is replaced by
    /// the process id. A file that this or another process is writing is left alone, and the new
    /// one has the process id in its name.
    pub(super) fn create(template: &Path, header: &str) -> io::Result<Self> {
        let ((file, path), lines) = (open_file(template)?, String::with_capacity(128));
        let (failed, holds_back, identity) = (false, false, identity(&file)?);
        let mut this =
            Self { path, file, identity, bytes: 0, lines, holds_back, failed, dropped: 0 };
        this.try_write(format_args!("{header}"))?;
        Ok(this)
    }

    /// Returns the path of the file.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Holds lines back until [`write_held`](Self::write_held), which writes them in one call.
    pub(super) fn hold_back(&mut self) {
        self.holds_back = true;
    }

    /// Writes the lines that were held back. If that fails, the file ends before them. A program in
    /// which this is a guest may have closed the descriptor and opened another file by it, which is
    /// left alone.
    pub(super) fn write_held(&mut self) {
        self.holds_back = false;
        let held = self.lines.bytes().filter(|byte| *byte == b'\n').count() as u64;
        let written = match identity(&self.file) {
            _ if self.failed => return,
            Ok(identity) if identity == self.identity => self.write_lines(),
            Ok(_) => Err(io::Error::other("the program has closed its descriptor")),
            Err(error) => Err(error),
        };
        self.end_after(written);
        self.dropped += if self.failed { held } else { 0 };
    }

    /// Ends the file after a failure, which is reported.
    fn end_after(&mut self, written: io::Result<()>) {
        if let Err(error) = written {
            self.failed = true;
            report(&self.path, &error);
        }
    }

    /// Writes a line, or counts it as dropped.
    pub(super) fn write(&mut self, line: fmt::Arguments<'_>) {
        if !self.failed {
            let written = self.try_write(line);
            self.end_after(written);
        }
        self.dropped += u64::from(self.failed);
    }

    fn try_write(&mut self, line: fmt::Arguments<'_>) -> io::Result<()> {
        writeln!(self.lines, "{line}").map_err(io::Error::other)?;
        if self.holds_back { Ok(()) } else { self.write_lines() }
    }

    fn write_lines(&mut self) -> io::Result<()> {
        let written = self.file.write_all(self.lines.as_bytes());
        match &written {
            Ok(()) => self.bytes += self.lines.len() as u64,
            Err(_) => {
                // A part may have been written. Only a regular file can be truncated.
                let file = &mut self.file;
                let _ =
                    file.set_len(self.bytes).and_then(|()| file.seek(SeekFrom::Start(self.bytes)));
            }
        }
        self.lines.clear();
        written
    }

    /// Returns the number of lines that could not be written.
    pub(super) fn dropped(&self) -> u64 {
        self.dropped
    }
}

/// Returns the device and the inode of an open file.
fn identity(file: &File) -> io::Result<(u64, u64)> {
    let found = file.metadata()?;
    Ok((found.dev(), found.ino()))
}

/// Reports on the standard error stream that a file has ended.
fn report(path: &Path, error: &io::Error) {
    // If this fails too, only the count of dropped events shows it.
    let _ = writeln!(
        io::stderr().lock(),
        "aquifer: {} cannot be written: {error}; what happens from here on is not recorded",
        path.display()
    );
}

/// Opens the file for `template`, empty and locked against other writers.
fn open_file(template: &Path) -> io::Result<(File, PathBuf)> {
    let process = process::id().to_string();
    let named = expand_process_id(template.as_os_str(), &process);
    let is_unique_per_process = named.as_os_str() != template.as_os_str();
    if let Some(file) = open_exclusive(&named, is_unique_per_process)? {
        return Ok((file, named));
    }
    for number in 1..MAX_NAMES {
        let part = match (is_unique_per_process, number) {
            (false, 1) => process.clone(),
            (false, _) => format!("{process}.{number}"),
            (true, _) => format!("{}", number + 1),
        };
        let path = insert_part(&named, &part);
        if let Some(file) = open_exclusive(&path, true)? {
            return Ok((file, path));
        }
    }
    Err(io::Error::new(io::ErrorKind::AlreadyExists, "every name for it is in use"))
}

/// Opens and empties a file, unless it is being written. If files cannot be locked, only names that
/// are unique to this process (`is_unique`) are used.
fn open_exclusive(path: &Path, is_unique: bool) -> io::Result<Option<File>> {
    let file = File::options().write(true).create(true).truncate(false).open(path)?;
    if !file.metadata()?.is_file() {
        // A pipe or a terminal takes the lines of all processes.
        return Ok(Some(file));
    }
    match file.try_lock() {
        Ok(()) => {}
        Err(TryLockError::Error(_)) if is_unique => {}
        Err(TryLockError::WouldBlock | TryLockError::Error(_)) => return Ok(None),
    }
    file.set_len(0)?;
    Ok(Some(file))
}

/// Replaces every `%p` in `template` by the process id.
fn expand_process_id(template: &OsStr, process: &str) -> PathBuf {
    let bytes = template.as_encoded_bytes();
    if !bytes.windows(2).any(|two| two == b"%p") {
        return template.into();
    }
    match template.to_str() {
        Some(text) => text.replace("%p", process).into(),
        // The whole path is not valid text, but its file name may be.
        None => {
            let path = Path::new(template);
            match path.file_name().and_then(OsStr::to_str) {
                Some(name) => path.with_file_name(name.replace("%p", process)),
                None => template.into(),
            }
        }
    }
}

/// Inserts a part into a file name: `trace.csv` becomes `trace.PART.csv`.
fn insert_part(path: &Path, part: &str) -> PathBuf {
    let mut name = OsString::from(path.file_stem().unwrap_or_default());
    name.push(".");
    name.push(part);
    if let Some(extension) = path.extension() {
        name.push(".");
        name.push(extension);
    }
    path.with_file_name(name)
}

#[cfg(doc)]
use super::EventSink;

/// A log file for an [`EventSink`] that writes lines of text.
///
/// - A line is written by one system call, so the file is complete up to the last line even if the
///   program is killed.
/// - After a failed write the file ends with the last complete line. The failure is reported on the
///   standard error stream, and later lines are only counted as [`dropped`](LineLog::dropped).
///
/// ```
/// use aquifer::{Tag, event::{Action, Event, EventSink, LineLog, MemoryLocation, Recorder}};
/// use std::{fs, sync::Arc};
///
/// /// Writes the size of each allocation.
/// #[derive(Debug)]
/// struct Sizes(LineLog);
///
/// impl EventSink for Sizes {
///     fn record(&self, event: &Event) {
///         if event.action == Action::Allocate {
///             self.0.write(format_args!("{}", event.bytes));
///         }
///     }
///     fn dropped(&self) -> u64 {
///         self.0.dropped()
///     }
/// }
///
/// # if cfg!(miri) { return Ok(()); } // which opens no files
/// let template = std::env::temp_dir().join("sizes-%p.txt");
/// let sizes = Arc::new(Sizes(LineLog::create(&template, "bytes")?));
/// let recorder = Recorder::new(sizes.clone());
/// let event = recorder.event(Action::Allocate, MemoryLocation::Global, 0, 0x7f00, 512, Tag::NONE);
/// recorder.record(recorder.ticket(), event);
/// assert_eq!(fs::read_to_string(sizes.0.path())?, "bytes\n512\n");
/// # fs::remove_file(sizes.0.path())?;
/// # Ok::<(), std::io::Error>(())
/// ```
#[derive(Debug)]
pub struct LineLog(Mutex<LineFile>);

impl LineLog {
    /// Creates or replaces the file at `path` and writes `header` as its first line. The file is
    /// named as [`TraceFile::create`](super::TraceFile::create) documents.
    ///
    /// # Errors
    /// The operating system's error if the file cannot be created or its first line cannot be
    /// written.
    pub fn create(path: &Path, header: &str) -> io::Result<Self> {
        Ok(Self(Mutex::new(LineFile::create(path, header)?)))
    }

    /// Returns the path of the file.
    #[must_use]
    pub fn path(&self) -> PathBuf {
        self.file().path().to_owned()
    }

    /// Writes a line, to which the line feed is added, or counts it as dropped.
    pub fn write(&self, line: fmt::Arguments<'_>) {
        self.file().write(line);
    }

    /// Returns the number of lines that could not be written.
    #[must_use]
    pub fn dropped(&self) -> u64 {
        self.file().dropped()
    }

    fn file(&self) -> MutexGuard<'_, LineFile> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg(target_os = "linux")]
    #[cfg_attr(miri, ignore = "writes a file")]
    fn after_a_failed_write_the_file_ends_with_the_last_complete_line() {
        let path = std::env::temp_dir().join(format!("aquifer-lines-{}", process::id()));
        let mut lines = LineFile::create(&path, "first").unwrap();
        lines.write(format_args!("second"));
        let full = File::options().write(true).open("/dev/full").unwrap();
        let regular = std::mem::replace(&mut lines.file, full);
        lines.write(format_args!("third"));
        lines.file = regular;
        lines.write(format_args!("fourth"));
        assert_eq!(
            (std::fs::read_to_string(&path).unwrap().as_str(), lines.dropped()),
            ("first\nsecond\n", 2)
        );
        std::fs::remove_file(path).unwrap();
    }

    #[test]
    fn the_process_id_replaces_its_placeholder_in_the_file_name() {
        let table = [
            ("/tmp/trace.csv", "/tmp/trace.csv", "/tmp/trace.7.csv"),
            ("/tmp/%p/trace-%p.csv", "/tmp/7/trace-7.csv", "/tmp/7/trace-7.7.csv"),
            ("trace", "trace", "trace.7"),
            ("trace%p%", "trace7%", "trace7%.7"),
        ];
        for (template, expected, beside) in table {
            let path = expand_process_id(template.as_ref(), "7");
            assert_eq!(
                (path.as_path(), insert_part(&path, "7").as_path()),
                (expected.as_ref(), beside.as_ref())
            );
        }
    }
}
