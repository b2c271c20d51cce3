//! `aquifer metrics`: the figures of all processes in Prometheus' text format.
//!
//! | module | contents |
//! |---|---|
//! | `families` | the metrics: names, types, help, and figures |
//! | `exposition` | the text of one reading of all processes |
//! | `ledgers` | the text of the memories that processes share |
//! | `textfile` | a file that is replaced as a whole, for the textfile collector |
//! | `request` | parsing of HTTP requests |
//! | `connection` | one client, within bounds of time and size |
//! | `listener` | the socket, and its end |
//! | `server` | the loop over all clients |

mod connection;
mod exposition;
mod families;
mod ledgers;
mod listener;
mod request;
mod server;
mod textfile;

use crate::{cli, listen_address::AddressError};
use aquifer_console::foreign;
use aquifer_status::{StatusError, StatusFolder};
use exposition::Bounds;
use std::{fmt, io, path::PathBuf};

/// Why there are no metrics.
#[derive(Debug)]
pub(crate) enum MetricsError {
    /// The folder of the status files cannot be read.
    Status(StatusError),
    /// The output file cannot be written.
    Output { path: PathBuf, error: io::Error },
    /// The address is refused.
    Address(AddressError),
    /// The address cannot be listened on.
    Listen { address: String, error: io::Error },
}

impl fmt::Display for MetricsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Status(error) => error.fmt(f),
            Self::Output { path, error } => {
                write!(f, "{} cannot be written: {error}", foreign::path(path))
            }
            Self::Address(error) => error.fmt(f),
            Self::Listen { address, error } => {
                write!(f, "{address} cannot be listened on: {error}")
            }
        }
    }
}

impl std::error::Error for MetricsError {}

/// Runs the command. Returns the text to print, which is empty if it went elsewhere.
///
/// # Errors
/// [`MetricsError`].
pub(crate) fn run(args: &cli::Metrics) -> Result<String, MetricsError> {
    let folder = StatusFolder::open().map_err(MetricsError::Status)?;
    let bounds = Bounds { processes: args.most_processes, pools: args.most_pools };
    let text = || exposition::text(&folder, bounds).map(|text| text + &ledgers::text(bounds.pools));
    if let Some(address) = &args.listen {
        address.check(args.expose_to_network).map_err(MetricsError::Address)?;
        // An unreadable folder is an error now, and not only at the first request.
        text().map_err(MetricsError::Status)?;
        return server::serve(address, args.expose_to_network, text)
            .map(|()| String::new())
            .map_err(|error| MetricsError::Listen { address: address.to_string(), error });
    }
    let text = text().map_err(MetricsError::Status)?;
    match &args.output {
        None => Ok(text),
        Some(path) => textfile::replace(path, text.as_bytes())
            .map(|()| String::new())
            .map_err(|error| MetricsError::Output { path: path.clone(), error }),
    }
}
