//! The figures of all processes of the user on this machine.

pub(crate) mod file;
pub(crate) mod pools;
#[cfg(test)]
mod tests;

use crate::{
    error::StatusError,
    folder::{self, StatusSetting},
    layout::SUFFIX,
};
use std::{
    ffi::OsStr,
    fs::{self, ReadDir},
    io,
    os::unix::ffi::OsStrExt,
    path::{Path, PathBuf},
    time::Duration,
};

pub use pools::{PoolStatus, ProcessStatus};

/// The most entries of a folder that are read, whatever they are: a process of the user may have
/// put any number there, and readers wait for no more than this.
const MOST_ENTRIES: usize = 4096;

/// A folder of status files, which only the user can have written.
///
/// ```
/// use aquifer_status::StatusFolder;
/// for process in StatusFolder::open()?.processes()? {
///     match process {
///         Ok(process) => {
///             let live: u64 = process.pools.iter().map(|pool| pool.stats.live).sum();
///             println!("{} {}: {live} bytes", process.process, process.command);
///         }
///         Err(error) => println!("{error}"),
///     }
/// }
/// # Ok::<(), aquifer_status::StatusError>(())
/// ```
#[derive(Clone, Debug)]
pub struct StatusFolder {
    path: PathBuf,
}

/// An iterator over the processes of a [`StatusFolder`], which reads each file when it comes to it.
#[derive(Debug)]
pub struct StatusFiles {
    folder: PathBuf,
    /// `None` if the folder does not exist, or no more of it is read.
    entries: Option<ReadDir>,
    /// Entries seen so far.
    seen: usize,
}

impl StatusFolder {
    /// Opens the folder that processes with the same environment publish in. A folder that does not
    /// exist has no processes.
    ///
    /// # Errors
    /// [`StatusError::BadSetting`] for an `AQUIFER_STATUS` that is invalid;
    /// [`StatusError::UnsafeFolder`]; [`StatusError::System`].
    pub fn open() -> Result<Self, StatusError> {
        match StatusSetting::read() {
            Ok(StatusSetting::Path(path)) => Self::at(path),
            Ok(StatusSetting::Off | StatusSetting::Default) => Self::at(folder::default_folder()),
            Err(value) => Err(StatusError::BadSetting { value }),
        }
    }

    /// Opens this folder.
    ///
    /// # Errors
    /// [`StatusError::UnsafeFolder`] if another user could have written to it;
    /// [`StatusError::System`].
    pub fn at(path: impl Into<PathBuf>) -> Result<Self, StatusError> {
        let path = path.into();
        folder::check(&path)?;
        Ok(Self { path })
    }

    /// Returns the path of the folder.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns an iterator over the processes, dead ones included, in no particular order. A file
    /// that cannot be read is an error of its own. Of a folder with more than 4096 entries the last
    /// item is [`StatusError::TooManyEntries`].
    ///
    /// # Errors
    /// [`StatusError::System`] if the folder cannot be listed.
    pub fn processes(&self) -> Result<StatusFiles, StatusError> {
        let entries = match fs::read_dir(&self.path) {
            Ok(entries) => Some(entries),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => return Err(StatusError::System { path: self.path.clone(), error }),
        };
        Ok(StatusFiles { folder: self.path.clone(), entries, seen: 0 })
    }

    /// Removes the files of dead processes. Removes only regular files of this user that begin with
    /// the magic of a status file and that no process has locked. Returns how many were removed.
    ///
    /// # Errors
    /// [`StatusError::System`] if the folder cannot be listed, or a file cannot be removed.
    pub fn sweep(&self) -> Result<usize, StatusError> {
        self.sweep_older_than(Duration::ZERO)
    }

    /// As [`StatusFolder::sweep`], only files that have not been written for so long.
    ///
    /// # Errors
    /// As [`StatusFolder::sweep`].
    pub fn sweep_older_than(&self, age: Duration) -> Result<usize, StatusError> {
        let mut swept = 0;
        for path in self.processes()?.paths() {
            swept += usize::from(file::sweep(&path?, age)?);
        }
        Ok(swept)
    }
}

impl StatusFiles {
    /// Returns the path of the next file that has the name of a status file.
    fn next_path(&mut self) -> Option<Result<PathBuf, StatusError>> {
        loop {
            let entry = self.entries.as_mut()?.next()?;
            self.seen += 1;
            if self.seen > MOST_ENTRIES {
                self.entries = None;
                let path = self.folder.clone();
                return Some(Err(StatusError::TooManyEntries { path, most: MOST_ENTRIES }));
            }
            match entry {
                Ok(entry) if is_status_name(&entry.file_name()) => return Some(Ok(entry.path())),
                Ok(_) => {}
                Err(error) => {
                    // The listing cannot go on.
                    self.entries = None;
                    return Some(Err(StatusError::System { path: self.folder.clone(), error }));
                }
            }
        }
    }

    fn paths(mut self) -> impl Iterator<Item = Result<PathBuf, StatusError>> {
        std::iter::from_fn(move || self.next_path())
    }
}

impl Iterator for StatusFiles {
    type Item = Result<ProcessStatus, StatusError>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            match self.next_path()?.and_then(|path| file::read(&path)) {
                // The process has ended since the folder was listed.
                Err(StatusError::System { error, .. })
                    if error.kind() == io::ErrorKind::NotFound => {}
                read => return Some(read),
            }
        }
    }
}

fn is_status_name(name: &OsStr) -> bool {
    name.as_bytes().ends_with(SUFFIX.as_bytes())
}
