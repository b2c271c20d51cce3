//! Files that appear whole or not at all, and rows of a result on the screen.
//!
//! The contents of a file go to a file without a name (`O_TMPFILE`), so that nothing stays behind
//! if the program is interrupted. When they are complete, the file gets a temporary name and is
//! renamed. Where the file system has no such files, the temporary name is there from the start.

use aquifer_benches::console::layout::wrap;
use nix::{
    fcntl::{AT_FDCWD, AtFlags, OFlag},
    unistd::linkat,
};
use std::{
    fs::{self, File, OpenOptions},
    io::{self, BufWriter, Write},
    os::{fd::AsRawFd, unix::fs::OpenOptionsExt},
    path::{Path, PathBuf},
    process,
};

/// Writes a file by `write`. The file is replaced when all of it is written. What is no regular
/// file, such as a pipe, is written directly.
///
/// # Errors
/// The error of `write` or of the operating system. The file is then as it was before.
pub(crate) fn write_whole(
    path: &Path,
    write: impl FnOnce(&mut dyn Write) -> io::Result<()>,
) -> io::Result<()> {
    if fs::metadata(path).is_ok_and(|there| !there.is_file() && !there.is_dir()) {
        let file = OpenOptions::new().write(true).open(path)?;
        return finish(&file, write);
    }
    if path.is_dir() || path.file_name().is_none() {
        return Err(io::Error::new(io::ErrorKind::IsADirectory, "it is a directory"));
    }
    // A link stays a link, and its target is replaced.
    let path = fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    let folder = match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    };
    let temporary = TemporaryName::beside(&path);
    let unnamed = OpenOptions::new()
        .write(true)
        .mode(0o666)
        .custom_flags(OFlag::O_TMPFILE.bits())
        .open(folder);
    if let Ok(file) = unnamed {
        fill(&file, write)?;
        let link = format!("/proc/self/fd/{}", file.as_raw_fd());
        linkat(AT_FDCWD, link.as_str(), AT_FDCWD, &temporary.0, AtFlags::AT_SYMLINK_FOLLOW)?;
    } else {
        let file = OpenOptions::new().write(true).create_new(true).open(&temporary.0)?;
        fill(&file, write)?;
    }
    fs::rename(&temporary.0, &path)
}

/// Fills a regular file. Without the synchronisation a crash of the machine may leave an empty file
/// under the name.
fn fill(file: &File, write: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> io::Result<()> {
    finish(file, write)?;
    file.sync_all()
}

fn finish(file: &File, write: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> io::Result<()> {
    let mut buffered = BufWriter::with_capacity(1 << 16, file);
    write(&mut buffered)?;
    buffered.flush()
}

/// A name that is removed when it goes out of scope, if it is still there.
struct TemporaryName(PathBuf);

impl TemporaryName {
    fn beside(path: &Path) -> Self {
        let mut name = std::ffi::OsString::from(".");
        name.push(path.file_name().unwrap_or_default());
        name.push(format!(".{}.tmp", process::id()));
        Self(path.with_file_name(name))
    }
}

impl Drop for TemporaryName {
    fn drop(&mut self) {
        // After the rename it is gone already.
        let _ = fs::remove_file(&self.0);
    }
}

/// Returns whether an output is the file that is read.
pub(crate) fn is_same_file(output: &Path, input: &Path) -> bool {
    let real = |path: &Path| fs::canonicalize(path).ok().filter(|path| path.is_file());
    real(output).is_some_and(|output| real(input) == Some(output))
}

/// Columns of the screen.
pub(crate) const WIDTH: usize = 80;
/// Columns before the remark of a row.
pub(crate) const REMARK: usize = 32;

/// Adds a row with a label, a figure and a remark. The remark may continue in the next line. It is
/// not broken at a no-break space.
pub(crate) fn row(lines: &mut Vec<String>, label: &str, figure: &str, remark: &str) {
    let mut remarks =
        wrap(remark, WIDTH - REMARK).into_iter().map(|line| line.replace('\u{a0}', " "));
    let first = remarks.next().unwrap_or_default();
    lines.push(format!("  {label:<15} {figure:>12}  {first}").trim_end().to_owned());
    lines.extend(remarks.map(|more| format!("{:REMARK$}{more}", "")));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_replaced_whole_or_stays_as_it_was_and_nothing_is_left_beside_it() {
        let folder = std::env::temp_dir().join(format!("aquifer-output-{}", process::id()));
        fs::create_dir_all(&folder).unwrap();
        let path = folder.join("page.html");
        write_whole(&path, |out| out.write_all(b"first")).unwrap();
        let error = write_whole(&path, |out| {
            out.write_all(b"half")?;
            Err(io::Error::other("no more"))
        });
        assert_eq!(error.unwrap_err().to_string(), "no more");
        assert_eq!(fs::read_to_string(&path).unwrap(), "first");
        write_whole(&path, |out| out.write_all(b"second")).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "second");
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 1);
        assert!(write_whole(&folder, |_| Ok(())).is_err());
        assert!(write_whole(&folder.join("no/such"), |_| Ok(())).is_err());
        assert!(write_whole(Path::new("/dev/full"), |out| out.write_all(b"x")).is_err());
        fs::remove_dir_all(folder).unwrap();
    }
}
