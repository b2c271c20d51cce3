//! A log file for sinks that write a text format.

use super::{line_file::LineFile, process::PerProcess};
use std::{
    fmt, io,
    path::{Path, PathBuf},
    sync::{Mutex, MutexGuard, PoisonError},
};

#[cfg(doc)]
use super::EventSink;

/// A log file for an [`EventSink`] that writes lines of text.
///
/// - A line is written by one system call, so the file is complete up to the last line even if the
///   program is killed.
/// - After a failed write the file ends with the last complete line. The failure is reported on the
///   standard error stream, and later lines are only counted as [`dropped`](LineLog::dropped).
/// - A child of a fork has its own file from its first line on.
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
pub struct LineLog {
    template: PathBuf,
    header: &'static str,
    file: PerProcess<Mutex<LineFile>>,
}

impl LineLog {
    /// Creates or replaces the file at `path` and writes `header` as its first line. The file is
    /// named as [`TraceFile::create`](super::TraceFile::create) documents.
    ///
    /// # Errors
    /// The operating system's error if the file cannot be created or its first line cannot be
    /// written.
    pub fn create(path: &Path, header: &'static str) -> io::Result<Self> {
        let file = PerProcess::new(Mutex::new(LineFile::create(path, header)?));
        Ok(Self { template: path.to_owned(), header, file })
    }

    /// Returns the path of this process's file.
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
        let child = |_: &_| Mutex::new(LineFile::in_child(&self.template, self.header));
        self.file.get(child).lock().unwrap_or_else(PoisonError::into_inner)
    }
}
