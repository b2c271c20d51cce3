//! What the commands that read trace files say of them.

use aquifer_console::foreign;
use aquifer_formats::trace::TraceError;
use std::{fmt, fs, path::Path};

/// Writes an error in a trace file with the file's name.
pub(crate) fn write_error(
    f: &mut fmt::Formatter<'_>,
    path: &Path,
    error: &TraceError,
) -> fmt::Result {
    let comma = if error.row().is_some() { ", " } else { ": " };
    write!(f, "{}{comma}{error}", foreign::path(path))
}

/// Writes why a gate refuses a file of which rows cannot be read.
pub(crate) fn write_unread(f: &mut fmt::Formatter<'_>, path: &Path, rows: u64) -> fmt::Result {
    write!(f, "{}: cannot check {rows} rows that cannot be read", foreign::path(path))
}

/// Returns whether an output is the file that is read.
pub(crate) fn is_same_file(output: &Path, input: &Path) -> bool {
    let real = |path: &Path| fs::canonicalize(path).ok().filter(|path| path.is_file());
    real(output).is_some_and(|output| real(input) == Some(output))
}
