//! One status file, which may be hostile: its checks, its copies, and its removal.
//!
//! The file is copied and never mapped, since a mapping of a file that another process shortens
//! raises a signal.

use super::pools::{self, ProcessStatus};
use crate::{
    error::{FileFault, StatusError},
    folder,
    layout::{
        FILE_BYTES, HEADER_BYTES, LINE_BYTES, LINES, LINES_AT, MAGIC, SLOT_BYTES, SLOTS, SLOTS_AT,
        VERSION, WORD, header,
    },
    text::read_text,
};
use std::{
    collections::VecDeque,
    fs::{self, File, OpenOptions, TryLockError},
    io,
    os::unix::fs::{FileExt, MetadataExt},
    path::Path,
    thread,
    time::Duration,
};

/// How often the slots of a living process that are not consistent are copied again, beyond once
/// each. An update of a slot takes less than a microsecond, and so does a copy. The bound is that
/// of a file, since a hostile one may have all its slots inconsistent for ever.
const ATTEMPTS: usize = 64;

/// The words of a part of a file.
struct Words(Vec<u64>);

impl Words {
    fn get(&self, at: usize) -> u64 {
        self.0.get(at).copied().unwrap_or(0)
    }
}

/// A file that has been opened and checked as far as its magic.
struct CheckedFile<'p> {
    path: &'p Path,
    file: File,
    header: Words,
}

impl<'p> CheckedFile<'p> {
    fn open(path: &'p Path) -> Result<Self, StatusError> {
        let system = |error: io::Error| StatusError::System { path: path.to_owned(), error };
        let bad = |fault| Err(StatusError::BadFile { path: path.to_owned(), fault });
        let file = folder::open_own_file(path, OpenOptions::new().read(true))?;
        let found = file.metadata().map_err(system)?;
        let mut checked = Self { path, file, header: Words(Vec::new()) };
        if found.len() < FILE_BYTES as u64 {
            // A file with another magic is no status file at all.
            let magic = if found.len() < WORD as u64 { 0 } else { checked.words(0, WORD)?.get(0) };
            let (bytes, expected) = (found.len(), FILE_BYTES as u64);
            return bad(if magic == MAGIC {
                FileFault::Truncated { bytes, expected }
            } else {
                FileFault::WrongMagic
            });
        }
        checked.header = checked.words(0, HEADER_BYTES)?;
        if checked.header.get(header::MAGIC) != MAGIC {
            return bad(FileFault::WrongMagic);
        }
        Ok(checked)
    }

    /// Copies a part of the file.
    fn words(&self, at: usize, bytes: usize) -> Result<Words, StatusError> {
        let mut copy = vec![0; bytes];
        match self.file.read_exact_at(&mut copy, at as u64) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                let bytes = self.file.metadata().map_or(0, |found| found.len());
                let fault = FileFault::Truncated { bytes, expected: FILE_BYTES as u64 };
                return Err(StatusError::BadFile { path: self.path.to_owned(), fault });
            }
            Err(error) => return Err(StatusError::System { path: self.path.to_owned(), error }),
        }
        let (words, _) = copy.as_chunks::<WORD>();
        Ok(Words(words.iter().map(|word| u64::from_ne_bytes(*word)).collect()))
    }

    /// Returns whether its process lives.
    fn is_locked(&self) -> Result<bool, StatusError> {
        match self.file.try_lock_shared() {
            // The lock ends with the file, which this reader closes.
            Ok(()) => {
                let _ = self.file.unlock();
                Ok(false)
            }
            Err(TryLockError::WouldBlock) => Ok(true),
            Err(TryLockError::Error(error)) => {
                Err(StatusError::System { path: self.path.to_owned(), error })
            }
        }
    }

    /// Returns a count in the header, if there is room for so many.
    fn count(&self, at: usize, name: &'static str, most: usize) -> Result<usize, StatusError> {
        let found = self.header.get(at);
        if found <= most as u64 {
            return Ok(found as usize);
        }
        let fault = FileFault::BadCount { name, found, most: most as u64 };
        Err(StatusError::BadFile { path: self.path.to_owned(), fault })
    }
}

/// Reads the figures of a process.
pub(crate) fn read(path: &Path) -> Result<ProcessStatus, StatusError> {
    let file = CheckedFile::open(path)?;
    let found = file.header.get(header::VERSION);
    if found != VERSION {
        let fault = FileFault::OtherVersion { found, known: VERSION };
        return Err(StatusError::BadFile { path: path.to_owned(), fault });
    }
    let is_alive = file.is_locked()?;
    let slots = file.count(header::SLOTS_USED, "slots", SLOTS)?;
    let lines = file.count(header::LINES_USED, "lines", LINES)?;
    let copy = || file.words(SLOTS_AT, slots * SLOT_BYTES);
    let mut copies = pools::Copies::new(&copy()?.0, &copy()?.0);
    if is_alive {
        settle(&mut copies, |number| file.words(SLOTS_AT + number * SLOT_BYTES, SLOT_BYTES))?;
    }
    let lines = file.words(LINES_AT, lines * LINE_BYTES)?.0;
    let (pools, faults) = copies.pools(&lines);
    let header = &file.header.0;
    Ok(ProcessStatus {
        process: file.header.get(header::PROCESS) as u32,
        command: read_text(header, header::COMMAND, header::COMMAND_BYTES),
        version: read_text(header, header::LIBRARY, header::LIBRARY_BYTES),
        started_ns: file.header.get(header::STARTED),
        is_alive,
        pools,
        faults,
        path: path.to_owned(),
    })
}

/// Copies the slots that are not consistent again, each by itself, since a pool may publish more
/// often than all slots can be copied.
fn settle(
    copies: &mut pools::Copies,
    copy: impl Fn(usize) -> Result<Words, StatusError>,
) -> Result<(), StatusError> {
    let mut left: VecDeque<usize> = copies.unsettled().into();
    let first = left.len();
    for attempt in 0..first + ATTEMPTS {
        let Some(number) = left.pop_front() else { break };
        if attempt >= first {
            thread::yield_now();
        }
        if !copies.settle(number, &copy(number)?.0, &copy(number)?.0) {
            left.push_back(number);
        }
    }
    Ok(())
}

/// Removes the file if its process is dead and it has not been written for `age`. Returns whether
/// it was removed. A file that is no status file stays.
pub(super) fn sweep(path: &Path, age: Duration) -> Result<bool, StatusError> {
    let file = match CheckedFile::open(path) {
        Ok(file) => file,
        // The beginning of a truncated file is enough to know it as one of ours, but nothing of it
        // can be trusted; it stays, as the others do.
        Err(StatusError::BadFile { .. }) => return Ok(false),
        Err(StatusError::System { error, .. }) if error.kind() == io::ErrorKind::NotFound => {
            return Ok(false);
        }
        Err(error) => return Err(error),
    };
    match file.file.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => return Ok(false),
        Err(TryLockError::Error(error)) => {
            return Err(StatusError::System { path: path.to_owned(), error });
        }
    }
    let system = |error: io::Error| StatusError::System { path: path.to_owned(), error };
    let opened = file.file.metadata().map_err(system)?;
    let is_young = opened.modified().ok().and_then(|written| written.elapsed().ok());
    if !age.is_zero() && is_young.is_none_or(|written| written < age) {
        return Ok(false);
    }
    // Under the lock: the name may meanwhile stand for another file.
    match fs::symlink_metadata(path) {
        Ok(named) if (named.dev(), named.ino()) == (opened.dev(), opened.ino()) => {}
        Ok(_) => return Ok(false),
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
        Err(error) => return Err(system(error)),
    }
    match fs::remove_file(path) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(system(error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::SLOT_WORDS;
    use std::cell::Cell;

    #[test]
    fn slots_that_never_are_consistent_cost_a_bounded_number_of_copies_and_hide_no_other() {
        // The first word of a slot is odd while it is written.
        let odd = vec![1; SLOTS * SLOT_WORDS];
        let mut copies = pools::Copies::new(&odd, &odd);
        let copied = Cell::new(0);
        let last = |number: usize| {
            copied.set(copied.get() + 1);
            Ok(Words(vec![u64::from(number < SLOTS - 1); SLOT_WORDS]))
        };
        assert!(settle(&mut copies, last).is_ok());
        assert_eq!(copied.get(), 2 * (SLOTS + ATTEMPTS));
        assert_eq!(copies.unsettled(), Vec::from_iter(0..SLOTS - 1));
    }
}
