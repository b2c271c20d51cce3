//! The kernel's text files, below a root.

use super::{Bitmap, ListError, Source};
use std::{
    error, fmt, fs, io,
    path::{Path, PathBuf},
};

/// A file that is there and cannot be understood, or a setting that cannot be followed. What is
/// merely missing is not an error but unknown.
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum TopologyError {
    /// A file that is there and cannot be read.
    Unreadable {
        /// The file.
        path: PathBuf,
        /// Why.
        kind: io::ErrorKind,
    },
    /// A file whose list of CPUs or nodes is none.
    List {
        /// The file.
        path: PathBuf,
        /// Why.
        error: ListError,
    },
    /// A file, or a line of one, without the number it should hold.
    Number {
        /// The file.
        path: PathBuf,
        /// What stands there.
        text: String,
    },
    /// An environment variable that says neither of the things it may say.
    Setting {
        /// The variable.
        name: &'static str,
        /// What it is set to.
        value: String,
        /// What it may be set to.
        expected: &'static str,
    },
}

aquifer_core::__debug_as_display!(TopologyError);

impl fmt::Display for TopologyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unreadable { path, kind } => {
                write!(f, "{} cannot be read: {kind}", path.display())
            }
            Self::List { path, error } => write!(f, "{}: {error}", path.display()),
            Self::Number { path, text } => {
                write!(f, "{}: {text:?} where a number should be", path.display())
            }
            Self::Setting { name, value, expected } => {
                write!(f, "{name} is {value:?}; it can be {expected}")
            }
        }
    }
}

impl error::Error for TopologyError {
    fn source(&self) -> Option<&(dyn error::Error + 'static)> {
        match self {
            Self::List { error, .. } => Some(error),
            _ => None,
        }
    }
}

impl From<TopologyError> for aquifer_core::MemoryError {
    fn from(e: TopologyError) -> Self {
        match e {
            TopologyError::Setting { name, value, expected } => {
                Self::BadSetting { name, value, expected }
            }
            _ => Self::Unsupported { feature: "reading the topology from sysfs and procfs" },
        }
    }
}

/// Reads below a root; paths are given and reported as they are on a live system.
#[derive(Clone, Debug)]
pub(super) struct Files {
    root: PathBuf,
}

impl Files {
    pub(super) fn under(root: &Path) -> Self {
        Self { root: root.into() }
    }

    /// Where a path of a live system is to be opened.
    pub(super) fn real(&self, path: &Path) -> PathBuf {
        self.root.join(path.strip_prefix("/").unwrap_or(path))
    }

    /// The text of a file; `None` where there is none. A file that may not be read counts as not
    /// there: containers hide files both ways.
    pub(super) fn text(&self, path: &Path) -> Result<Option<String>, TopologyError> {
        Self::what_there_is(path, fs::read_to_string(self.real(path)))
    }

    /// The same for a file that is no text.
    pub(super) fn bytes(&self, path: &Path) -> Result<Option<Vec<u8>>, TopologyError> {
        Self::what_there_is(path, fs::read(self.real(path)))
    }

    fn what_there_is<T>(path: &Path, answer: io::Result<T>) -> Result<Option<T>, TopologyError> {
        match answer {
            Ok(content) => Ok(Some(content)),
            Err(e) => match e.kind() {
                // Fixtures are plain files, and sysfs answers EINVAL and ENODEV for attributes that
                // do not apply.
                io::ErrorKind::NotFound
                | io::ErrorKind::NotADirectory
                | io::ErrorKind::PermissionDenied
                | io::ErrorKind::InvalidInput => Ok(None),
                kind => match e.raw_os_error() {
                    Some(nix::libc::ENODEV | nix::libc::ENXIO | nix::libc::EOPNOTSUPP) => Ok(None),
                    _ => Err(TopologyError::Unreadable { path: path.into(), kind }),
                },
            },
        }
    }

    /// A file that holds one unsigned number.
    pub(super) fn number(&self, path: &Path) -> Result<Option<u64>, TopologyError> {
        let Some(text) = self.text(path)? else { return Ok(None) };
        text.trim().parse().map(Some).map_err(|_| wrong_number(path, text.trim()))
    }

    /// A file that holds a size, in bytes or, as caches' are, with a `K`, `M` or `G` behind it.
    pub(super) fn size(&self, path: &Path) -> Result<Option<u64>, TopologyError> {
        let Some(text) = self.text(path)? else { return Ok(None) };
        let text = text.trim();
        let (digits, shift) = match text.as_bytes().last() {
            Some(b'K') => (&text[..text.len() - 1], 10),
            Some(b'M') => (&text[..text.len() - 1], 20),
            Some(b'G') => (&text[..text.len() - 1], 30),
            _ => (text, 0),
        };
        let bytes = digits.parse::<u64>().ok().and_then(|number| number.checked_mul(1 << shift));
        bytes.map(Some).ok_or_else(|| wrong_number(path, text))
    }

    /// A file that holds a list of CPUs or nodes.
    pub(super) fn list(&self, path: &Path) -> Result<Option<Bitmap>, TopologyError> {
        let Some(text) = self.text(path)? else { return Ok(None) };
        parse_list(path, &text).map(Some)
    }

    /// The names in a folder, sorted; none where there is no folder.
    pub(super) fn names(&self, path: &Path) -> Vec<String> {
        let Ok(entries) = fs::read_dir(self.real(path)) else { return Vec::new() };
        let mut names: Vec<String> =
            entries.flatten().filter_map(|e| e.file_name().into_string().ok()).collect();
        names.sort_unstable();
        names
    }
}

pub(super) fn wrong_number(path: &Path, text: &str) -> TopologyError {
    TopologyError::Number { path: path.into(), text: text.into() }
}

pub(super) fn parse_list(path: &Path, text: &str) -> Result<Bitmap, TopologyError> {
    Bitmap::parse_list(text).map_err(|error| TopologyError::List { path: path.into(), error })
}

/// The source of what a file says.
pub(super) fn file(path: impl Into<PathBuf>) -> Source {
    Source::File(path.into())
}
