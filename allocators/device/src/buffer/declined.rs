//! Values that a conversion returns with its error.

use aquifer_core::MemoryError;
use std::{error, fmt};

/// A value that could not be adopted or returned, with the error.
///
/// See [`Adopted`](crate::Adopted) for an example.
pub struct Declined<V> {
    /// The value that was handed in.
    pub value: V,
    /// The reason.
    pub error: MemoryError,
}

impl<V> fmt::Debug for Declined<V> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl<V> fmt::Display for Declined<V> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}

impl<V> error::Error for Declined<V> {}

impl<V> From<Declined<V>> for MemoryError {
    fn from(declined: Declined<V>) -> Self {
        declined.error
    }
}
