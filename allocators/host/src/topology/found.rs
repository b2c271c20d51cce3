//! Values with their sources.

use std::{fmt, path::PathBuf};

/// The source of a value.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Provenance {
    /// A file of the kernel, by its path below the root.
    File(PathBuf),
    /// An environment variable.
    Variable(&'static str),
    /// The GPU driver, by the attribute's name.
    Driver(&'static str),
    /// A system call.
    SystemCall(&'static str),
    /// There is no source on this machine.
    Nobody,
}

impl fmt::Display for Provenance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File(path) => write!(f, "{}", path.display()),
            Self::Variable(name) => write!(f, "environment variable {name}"),
            Self::Driver(attribute) => write!(f, "driver attribute {attribute}"),
            Self::SystemCall(call) => write!(f, "{call}()"),
            Self::Nobody => f.write_str("no source"),
        }
    }
}

/// A value with its source. The value may be unknown: the source is then the one that does not
/// provide it.
///
/// ```
/// use aquifer_host::topology::{Found, Provenance};
/// let node: Found<u32> = Found::unknown(Provenance::Nobody);
/// assert_eq!(node.to_string(), "unknown (no source)");
/// ```
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Found<T> {
    /// The value. `None` if the source does not provide it.
    pub value: Option<T>,
    /// The source of the value.
    pub source: Provenance,
}

impl<T> Found<T> {
    /// Creates a known value.
    #[must_use]
    pub fn known(value: T, source: Provenance) -> Self {
        Self { value: Some(value), source }
    }

    /// Creates an unknown value.
    #[must_use]
    pub fn unknown(source: Provenance) -> Self {
        Self { value: None, source }
    }

    /// Borrows the value.
    #[must_use]
    pub fn as_ref(&self) -> Found<&T> {
        Found { value: self.value.as_ref(), source: self.source.clone() }
    }
}

impl<T: fmt::Display> fmt::Display for Found<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.value {
            Some(value) => write!(f, "{value} ({})", self.source),
            None => write!(f, "unknown ({})", self.source),
        }
    }
}
