//! Values with their sources.

use std::fmt;

/// A value with its source. The value may be unknown: the source is then the one that does not
/// provide it.
///
/// ```
/// use aquifer_host::topology::Found;
/// let limit: Found<u64> = Found::unknown("/proc/self/cgroup");
/// assert_eq!(limit.to_string(), "unknown (/proc/self/cgroup)");
/// ```
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Found<T> {
    /// The value. `None` if the source does not provide it.
    pub value: Option<T>,
    /// The source of the value: a file of the kernel by its path below the root, or an environment
    /// variable.
    pub source: String,
}

impl<T> Found<T> {
    /// Creates a known value.
    #[must_use]
    pub fn known(value: T, source: impl Into<String>) -> Self {
        Self { value: Some(value), source: source.into() }
    }

    /// Creates an unknown value.
    #[must_use]
    pub fn unknown(source: impl Into<String>) -> Self {
        Self { value: None, source: source.into() }
    }
}

impl Found<u64> {
    /// Takes a value if it is less than this one, or if this one is unknown.
    pub(super) fn lower(&mut self, value: u64, source: impl FnOnce() -> String) {
        if self.value.is_none_or(|least| value < least) {
            *self = Self::known(value, source());
        }
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
