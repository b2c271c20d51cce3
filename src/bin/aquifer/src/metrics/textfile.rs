//! A file that is replaced as a whole, for the textfile collector of Prometheus' node exporter.

use std::{
    ffi::OsString,
    fs::{self, OpenOptions},
    io::{self, Write},
    os::unix::fs::OpenOptionsExt,
    path::Path,
    process,
};

/// Replaces the file. A reader sees the old text or the new one, and never a part. If it fails, the
/// old file stays.
pub(super) fn replace(path: &Path, text: &[u8]) -> io::Result<()> {
    let name = path.file_name().ok_or(io::ErrorKind::IsADirectory)?;
    if fs::metadata(path).is_ok_and(|found| !found.is_file()) {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is no regular file"));
    }
    // The collector reads names that end in `.prom` only.
    let mut part = OsString::from(".");
    part.push(name);
    part.push(format!(".{}.part", process::id()));
    let part = path.with_file_name(part);
    let written = write_new(&part, text).and_then(|()| fs::rename(&part, path));
    if written.is_err() {
        // What is left is of no use, and the error says more than that of its removal.
        let _ = fs::remove_file(&part);
    }
    written
}

fn write_new(path: &Path, text: &[u8]) -> io::Result<()> {
    // A process with this number may have been killed while it wrote.
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o644).open(path)?;
    file.write_all(text)?;
    // Without it a crash of the machine may leave an empty file under the name.
    file.sync_all()
}
