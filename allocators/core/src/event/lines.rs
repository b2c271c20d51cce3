//! A file of lines, and a count of those that could not be written: what every sink that writes a log needs.

use std::{
    fmt,
    fs::File,
    io::{self, LineWriter, Write},
    path::Path,
};

/// Written a line at a time, so that the log of a program that is killed is whole as far as it goes.
#[derive(Debug)]
pub(super) struct Lines {
    file: LineWriter<File>,
    dropped: u64,
}

impl Lines {
    /// Creates or truncates the file at `path`, and writes its first line.
    pub(super) fn create(path: &Path, header: &str) -> io::Result<Self> {
        let mut file = LineWriter::new(File::create(path)?);
        writeln!(file, "{header}")?;
        file.flush()?;
        Ok(Self { file, dropped: 0 })
    }

    /// Writes a line, or counts it.
    pub(super) fn write(&mut self, line: fmt::Arguments<'_>) {
        let outcome = writeln!(self.file, "{line}");
        self.count(&outcome);
    }

    pub(super) fn flush(&mut self) {
        let outcome = self.file.flush();
        self.count(&outcome);
    }

    /// Lines that could not be written.
    pub(super) fn dropped(&self) -> u64 {
        self.dropped
    }

    fn count(&mut self, outcome: &io::Result<()>) {
        self.dropped += u64::from(outcome.is_err());
    }
}
