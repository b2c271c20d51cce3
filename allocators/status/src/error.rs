//! What is wrong with a folder or a file of figures.

use std::{error, fmt, io, path::PathBuf};

/// An error of the reader, with the path it concerns.
pub enum StatusError {
    /// The folder is not safe to use: it is no folder, another user owns it, or others may enter
    /// it. Its figures could be those of another user.
    UnsafeFolder {
        /// The folder.
        path: PathBuf,
        /// What is wrong.
        reason: &'static str,
    },
    /// A setting names no folder.
    BadSetting {
        /// The value of `AQUIFER_STATUS`.
        value: String,
    },
    /// The system refused a call.
    System {
        /// The file or folder.
        path: PathBuf,
        /// The system's error.
        error: io::Error,
    },
    /// The file has no figures that can be read.
    BadFile {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        fault: FileFault,
    },
    /// The folder has more entries than are read. Those beyond are left out.
    TooManyEntries {
        /// The folder.
        path: PathBuf,
        /// The number that is read.
        most: usize,
    },
}

/// What is wrong with a file, as in the example of [`StatusFolder`](crate::StatusFolder).
#[derive(Clone, PartialEq, Eq, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub enum FileFault {
    /// It is a link, a pipe or something else that is no regular file.
    NotRegular,
    /// Another user owns it.
    OtherOwner {
        /// The owner's number.
        owner: u32,
    },
    /// It does not begin with the magic of a status file. A process that is just starting may not
    /// have written it yet.
    WrongMagic,
    /// Another version of the library has written it.
    OtherVersion {
        /// The version of its layout.
        found: u64,
        /// The version that this reader knows.
        known: u64,
    },
    /// It is shorter than its layout.
    Truncated {
        /// Its bytes.
        bytes: u64,
        /// The bytes of the layout.
        expected: u64,
    },
    /// A number in it is larger than its layout allows.
    BadCount {
        /// What is counted.
        name: &'static str,
        /// The number.
        found: u64,
        /// The largest number.
        most: u64,
    },
    /// The figures of a pool never were consistent while they were read. Their writer has died
    /// within an update.
    Torn {
        /// The number of the pool's slot.
        slot: usize,
    },
}

impl fmt::Display for FileFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotRegular => f.write_str("it is no regular file"),
            Self::OtherOwner { owner } => write!(f, "it belongs to user {owner}"),
            Self::WrongMagic => f.write_str("it is no status file"),
            Self::OtherVersion { found, known } => {
                write!(f, "its layout has version {found}, and this reader knows {known}")
            }
            Self::Truncated { bytes, expected } => {
                write!(f, "it has {bytes} bytes instead of {expected}")
            }
            Self::BadCount { name, found, most } => {
                write!(f, "it claims {found} {name}, and has room for {most}")
            }
            Self::Torn { slot } => {
                write!(f, "its writer has died within an update of slot {slot}")
            }
        }
    }
}

impl fmt::Display for StatusError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::UnsafeFolder { path, reason } => write!(f, "{}: {reason}", path.display()),
            Self::BadSetting { value } => {
                write!(f, "AQUIFER_STATUS is {value}, which is neither a path with a / nor off")
            }
            Self::System { path, error } => write!(f, "{}: {error}", path.display()),
            Self::BadFile { path, fault } => write!(f, "{}: {fault}", path.display()),
            Self::TooManyEntries { path, most } => write!(
                f,
                "{}: it has more than {most} entries, and the others are not read; remove those of \
                 dead processes with aquifer top --sweep",
                path.display()
            ),
        }
    }
}

aquifer_core::__debug_as_display!(StatusError);

impl error::Error for StatusError {
    fn source(&self) -> Option<&(dyn error::Error + 'static)> {
        match self {
            Self::System { error, .. } => Some(error),
            _ => None,
        }
    }
}
