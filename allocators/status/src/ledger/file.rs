//! The files of ledgers: their folder, names, creation and checks.
//!
//! The folder is `AQUIFER_LEDGER` if that is a path, else that of the [status
//! files](crate). A file is complete before it gets its name, so that no process sees one
//! half written: a full disk is an error of the process that creates it.

use crate::ledger::{
    error::LedgerError,
    layout::{FILE_BYTES, MAGIC, SUFFIX, VERSION, WORD, header},
    system::now_ns,
};
use crate::{FileFault, StatusError, folder};
use nix::fcntl::posix_fallocate;
use std::{
    env,
    fs::{self, File, OpenOptions},
    io,
    os::unix::{ffi::OsStrExt, fs::FileExt, fs::OpenOptionsExt},
    path::{Path, PathBuf},
    process,
};

/// The environment variable of the folder.
pub const VARIABLE: &str = "AQUIFER_LEDGER";

/// Returns the folder of ledgers, or `None` if `AQUIFER_LEDGER` is `off`.
///
/// ```
/// use aquifer_status::ledger::{Ledger, folder_of_environment};
/// if let Some(folder) = folder_of_environment()? {
///     println!("{:?}", Ledger::names(&folder)?);
/// }
/// # Ok::<(), aquifer_status::ledger::LedgerError>(())
/// ```
///
/// # Errors
/// [`LedgerError::BadSetting`].
pub fn folder_of_environment() -> Result<Option<PathBuf>, LedgerError> {
    let Some(value) = env::var_os(VARIABLE) else { return Ok(Some(folder::default_folder())) };
    match value.as_bytes() {
        b"" | b"on" | b"1" => Ok(Some(folder::default_folder())),
        b"off" | b"0" => Ok(None),
        // A path must contain a `/`, so that a typing error is not taken for a folder.
        bytes if bytes.contains(&b'/') => Ok(Some(value.into())),
        _ => Err(LedgerError::BadSetting { value: value.to_string_lossy().into_owned() }),
    }
}

/// Returns the path of the ledger with this name.
pub(crate) fn path_of(folder: &Path, name: &str) -> Result<PathBuf, LedgerError> {
    let is_plain = |c: u8| c.is_ascii_alphanumeric() || matches!(c, b'.' | b'-' | b'_');
    if name.is_empty() || name.len() > 128 || !name.bytes().all(is_plain) {
        return Err(LedgerError::BadName { name: name.to_owned() });
    }
    Ok(folder.join(format!("{name}{SUFFIX}")))
}

/// Returns the names of the ledgers of a folder.
pub(crate) fn names(folder: &Path) -> Result<Vec<String>, LedgerError> {
    if !folder::check(folder)? {
        return Ok(Vec::new());
    }
    let refused = |error| StatusError::System { path: folder.to_owned(), error };
    let mut names = Vec::new();
    for entry in fs::read_dir(folder).map_err(refused)? {
        let name = entry.map_err(refused)?.file_name();
        names.extend(name.to_str().and_then(|name| name.strip_suffix(SUFFIX)).map(str::to_owned));
    }
    names.sort();
    Ok(names)
}

/// Opens a ledger, which must exist.
pub(crate) fn open(path: &Path) -> Result<File, StatusError> {
    let file = folder::open_own_file(path, OpenOptions::new().read(true).write(true))?;
    let refused = |error| StatusError::System { path: path.to_owned(), error };
    let bad = |fault| Err(StatusError::BadFile { path: path.to_owned(), fault });
    let bytes = file.metadata().map_err(refused)?.len();
    let word = |at: usize| -> io::Result<u64> {
        let mut word = [0; WORD];
        // A file that is too short has no such word.
        match file.read_exact_at(&mut word, (at * WORD) as u64) {
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(0),
            read => read.map(|()| u64::from_ne_bytes(word)),
        }
    };
    let (magic, version) =
        (word(header::MAGIC).map_err(refused)?, word(header::VERSION).map_err(refused)?);
    if magic != MAGIC {
        return bad(FileFault::WrongMagic);
    }
    if version != VERSION {
        return bad(FileFault::OtherVersion { found: version, known: VERSION });
    }
    if bytes != FILE_BYTES as u64 {
        return bad(FileFault::Truncated { bytes, expected: FILE_BYTES as u64 });
    }
    Ok(file)
}

/// Opens a ledger, and creates it before if there is none.
pub(crate) fn open_or_create(path: &Path, capacity: u64) -> Result<File, StatusError> {
    match open(path) {
        Err(StatusError::System { error, .. }) if error.kind() == io::ErrorKind::NotFound => {}
        opened => return opened,
    }
    create(path, capacity)?;
    open(path)
}

/// Creates a complete file under its final name, unless another process does so first.
fn create(path: &Path, capacity: u64) -> Result<(), StatusError> {
    // Processes of several containers may have the same number, hence the time.
    let unfinished = path.with_extension(format!("{}-{:x}.new", process::id(), now_ns()));
    let refused = |error: io::Error| StatusError::System { path: path.to_owned(), error };
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(&unfinished)
        .map_err(refused)?;
    let words = [(header::MAGIC, MAGIC), (header::VERSION, VERSION), (header::CAPACITY, capacity)];
    let written = posix_fallocate(&file, 0, FILE_BYTES as i64)
        .map_err(io::Error::from)
        .and_then(|()| {
            words.iter().try_for_each(|(at, value)| {
                file.write_all_at(&value.to_ne_bytes(), (at * WORD) as u64)
            })
        })
        .and_then(|()| match fs::hard_link(&unfinished, path) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(error),
            _ => Ok(()),
        });
    // It has its final name, or none is needed.
    let _left = fs::remove_file(&unfinished);
    written.map_err(refused)
}
