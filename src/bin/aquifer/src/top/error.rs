//! Why nothing is shown.

use aquifer_console::foreign::printable;
use aquifer_status::StatusError;
use std::{fmt, io};

/// Why nothing is shown.
#[derive(Debug)]
pub(crate) enum TopError {
    /// The folder of the status files cannot be read.
    Status(StatusError),
    /// The terminal returned an error.
    Terminal(io::Error),
}

impl fmt::Display for TopError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            // A path may have any characters.
            Self::Status(error) => f.write_str(&printable(&error.to_string())),
            Self::Terminal(error) => write!(f, "the terminal cannot be used: {error}"),
        }
    }
}

impl std::error::Error for TopError {}

impl From<StatusError> for TopError {
    fn from(error: StatusError) -> Self {
        Self::Status(error)
    }
}
