//! Reading the kernel's text files below a root.

use super::IdSet;
use std::{
    error, fmt, fs, io,
    path::{Path, PathBuf},
};

/// A file that exists but cannot be parsed, or an invalid setting. A missing file is not an error:
/// its value is unknown. See [`Topology`](super::Topology) for an example.
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum TopologyError {
    /// A file exists but cannot be read.
    Unreadable {
        /// The file.
        path: PathBuf,
        /// Why.
        kind: io::ErrorKind,
    },
    /// A file, or a line of it, does not contain a number or a list of numbers.
    Number {
        /// The file.
        path: PathBuf,
        /// The text in its place.
        text: String,
    },
    /// An environment variable has a value that is not allowed.
    Setting {
        /// The variable.
        name: &'static str,
        /// Its value.
        value: String,
        /// The allowed values.
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
            Self::Number { path, text } => {
                write!(f, "{}: {text:?} where a number should be", path.display())
            }
            Self::Setting { name, value, expected } => {
                write!(f, "{name} is {value:?}; it can be {expected}")
            }
        }
    }
}

impl error::Error for TopologyError {}

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

/// Reads files below a root. Paths are given and reported as on a live system.
#[derive(Clone, Debug)]
pub(super) struct Files {
    root: PathBuf,
}

impl Files {
    pub(super) fn under(root: &Path) -> Self {
        Self { root: root.into() }
    }

    /// Returns the path below the root for a path of a live system.
    pub(super) fn real(&self, path: &Path) -> PathBuf {
        self.root.join(path.strip_prefix("/").unwrap_or(path))
    }

    /// Returns the text of a file, or `None` if it does not exist. A file without read permission
    /// counts as missing, since containers hide files in both ways.
    pub(super) fn text(&self, path: &Path) -> Result<Option<String>, TopologyError> {
        match fs::read_to_string(self.real(path)) {
            Ok(content) => Ok(Some(content)),
            Err(e) => match e.kind() {
                // Fixtures are plain files, and sysfs returns EINVAL and ENODEV for attributes that
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

    /// Reads a file that contains one unsigned number.
    pub(super) fn number(&self, path: &Path) -> Result<Option<u64>, TopologyError> {
        let Some(text) = self.text(path)? else { return Ok(None) };
        text.trim().parse().map(Some).map_err(|_| wrong_number(path, text.trim()))
    }

    /// Reads a file that contains a list of CPUs or nodes.
    pub(super) fn list(&self, path: &Path) -> Result<Option<IdSet>, TopologyError> {
        let Some(text) = self.text(path)? else { return Ok(None) };
        parse_list(path, &text).map(Some)
    }

    /// Reads a file that contains a mask of CPUs.
    pub(super) fn mask(&self, path: &Path) -> Result<Option<IdSet>, TopologyError> {
        let Some(text) = self.text(path)? else { return Ok(None) };
        IdSet::parse_mask(&text).map(Some).ok_or_else(|| wrong_number(path, text.trim()))
    }

    /// Returns the sorted names in a folder. Empty if there is no folder.
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

pub(super) fn parse_list(path: &Path, text: &str) -> Result<IdSet, TopologyError> {
    IdSet::parse_list(text).ok_or_else(|| wrong_number(path, text.trim()))
}

/// Returns a file as a source.
pub(super) fn file(path: impl AsRef<Path>) -> String {
    path.as_ref().display().to_string()
}
