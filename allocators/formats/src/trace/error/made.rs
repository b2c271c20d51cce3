//! The error in the name of a generated trace.

use std::{error, fmt};

/// Why a name is not a valid generated trace.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum MadeError {
    /// No such workload.
    Name {
        /// The name.
        found: String,
    },
    /// No such option.
    Option {
        /// The text found.
        found: String,
    },
    /// An option with an invalid value.
    Value {
        /// The option.
        option: &'static str,
        /// The value.
        found: String,
        /// The expected value.
        expected: &'static str,
    },
}

impl fmt::Display for MadeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Name { found } => {
                write!(f, "no workload is called {found:?}; `aquifer replay made:` lists them")
            }
            Self::Option { found } => {
                write!(
                    f,
                    "{found:?} is no option of a made trace; there are seed=, scale= and length="
                )
            }
            Self::Value { option, found, expected } => {
                write!(f, "{option} is {found:?}, not {expected}")
            }
        }
    }
}

impl error::Error for MadeError {}
