//! The folder of the status files, and the checks that make it and its files safe. Ledgers use the
//! same folder and the same checks.
//!
//! The folder is `AQUIFER_STATUS` if that is a path, else `aquifer` in `XDG_RUNTIME_DIR` if the
//! user owns that, else `/tmp/aquifer-UID`. The user must own it, and no other user may enter it.

use crate::error::{FileFault, StatusError};
use nix::{libc, unistd::geteuid};
use std::{
    env,
    fs::{self, File, OpenOptions},
    io,
    os::unix::{
        ffi::OsStrExt,
        fs::{DirBuilderExt, MetadataExt, OpenOptionsExt},
    },
    path::{Path, PathBuf},
};

pub(crate) const VARIABLE: &str = "AQUIFER_STATUS";

/// The value of `AQUIFER_STATUS`.
pub(crate) enum StatusSetting {
    Off,
    Path(PathBuf),
    Default,
}

impl StatusSetting {
    /// Parses the variable. Returns the value if it is invalid.
    pub(crate) fn read() -> Result<Self, String> {
        let Some(value) = env::var_os(VARIABLE) else { return Ok(Self::Default) };
        match value.as_bytes() {
            b"" | b"on" | b"1" => Ok(Self::Default),
            b"off" | b"0" => Ok(Self::Off),
            // A path must contain a `/`, so that a typing error is not taken for a folder.
            bytes if bytes.contains(&b'/') => Ok(Self::Path(value.into())),
            _ => Err(value.to_string_lossy().into_owned()),
        }
    }
}

/// Returns the folder where `AQUIFER_STATUS` names none. See the example of [`create`].
#[must_use]
pub fn default_folder() -> PathBuf {
    let user = geteuid().as_raw();
    let runtime = env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from).filter(|path| {
        path.is_absolute()
            && fs::metadata(path).is_ok_and(|found| found.is_dir() && found.uid() == user)
    });
    match runtime {
        Some(runtime) => runtime.join("aquifer"),
        None => PathBuf::from(format!("/tmp/aquifer-{user}")),
    }
}

/// Creates the folder if it does not exist, and checks it. Without a path of its own, a program
/// passes [`default_folder`].
///
/// ```
/// use aquifer_status::folder;
/// let path = std::env::temp_dir().join(format!("aquifer-example-{}", std::process::id()));
/// folder::create(&path)?;
/// assert!(folder::check(&path)?);
/// # let _left = std::fs::remove_dir(&path);
/// # Ok::<(), aquifer_status::StatusError>(())
/// ```
///
/// # Errors
/// [`StatusError::UnsafeFolder`]; [`StatusError::System`].
pub fn create(path: &Path) -> Result<(), StatusError> {
    match fs::DirBuilder::new().mode(0o700).create(path) {
        Ok(()) => {}
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        Err(error) => return Err(StatusError::System { path: path.to_owned(), error }),
    }
    check(path).map(drop)
}

/// Checks that only this user can have put files into the folder. Returns whether it exists. See
/// the example of [`create`].
///
/// # Errors
/// As [`create`].
pub fn check(path: &Path) -> Result<bool, StatusError> {
    let found = match fs::symlink_metadata(path) {
        Ok(found) => found,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
        Err(error) => return Err(StatusError::System { path: path.to_owned(), error }),
    };
    let reason = if !found.is_dir() {
        "it is no folder"
    } else if found.uid() != geteuid().as_raw() {
        "another user owns it"
    } else if found.mode() & 0o077 != 0 {
        "others may enter it (its mode must be 0700)"
    } else {
        return Ok(true);
    };
    Err(StatusError::UnsafeFolder { path: path.to_owned(), reason })
}

/// Opens a regular file of this user. A pipe does not block the call, and no link is followed. See
/// the example of [`StatusFolder`](crate::StatusFolder), which opens its files so.
///
/// # Errors
/// [`StatusError::BadFile`] for what is no regular file or belongs to another user;
/// [`StatusError::System`].
pub fn open_own_file(path: &Path, options: &mut OpenOptions) -> Result<File, StatusError> {
    let system = |error: io::Error| StatusError::System { path: path.to_owned(), error };
    let bad = |fault| Err(StatusError::BadFile { path: path.to_owned(), fault });
    let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK | libc::O_NOCTTY;
    let file = match options.custom_flags(flags).open(path) {
        Err(error)
            if matches!(error.raw_os_error(), Some(libc::ELOOP | libc::ENXIO | libc::EISDIR)) =>
        {
            return bad(FileFault::NotRegular);
        }
        opened => opened.map_err(system)?,
    };
    let found = file.metadata().map_err(system)?;
    if !found.is_file() {
        return bad(FileFault::NotRegular);
    }
    if found.uid() != geteuid().as_raw() {
        return bad(FileFault::OtherOwner { owner: found.uid() });
    }
    Ok(file)
}
