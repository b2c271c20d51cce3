//! Answers that say where they come from.

use std::{fmt, path::PathBuf};

/// Who was asked.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Source {
    /// A file of the kernel's, by its path below the root that was read.
    File(PathBuf),
    /// An environment variable.
    Variable(&'static str),
    /// The GPU driver, by the attribute's name.
    Driver(&'static str),
    /// A system call.
    SystemCall(&'static str),
    /// Nobody: there is no source for it on this machine.
    Nobody,
}

impl fmt::Display for Source {
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

/// What was found, and where. Unknown is an answer: the source is then the one that did not know.
///
/// ```
/// use aquifer_host::topology::{Found, Source};
/// let node: Found<u32> = Found::unknown(Source::Nobody);
/// assert_eq!(node.to_string(), "unknown (no source)");
/// ```
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Found<T> {
    /// The answer; `None` where the source does not know.
    pub value: Option<T>,
    /// Who gave it.
    pub source: Source,
}

impl<T> Found<T> {
    /// An answer.
    #[must_use]
    pub fn known(value: T, source: Source) -> Self {
        Self { value: Some(value), source }
    }

    /// No answer from `source`.
    #[must_use]
    pub fn unknown(source: Source) -> Self {
        Self { value: None, source }
    }

    /// The same with the answer borrowed.
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
