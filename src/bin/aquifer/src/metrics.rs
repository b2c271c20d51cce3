//! `aquifer metrics`: the figures of all processes in Prometheus' text format.
//!
//! | module | contents |
//! |---|---|
//! | `families` | the metrics: names, types, help, and figures |
//! | `exposition` | the text of one reading of all processes |
//! | `ledgers` | the text of the memories that processes share |
//! | `server` | the server, and bounds for its clients |

mod exposition;
mod families;
mod ledgers;
mod server;

use crate::{cli, error::CommandError, output};
use aquifer_status::StatusFolder;
use exposition::Bounds;

/// Runs the command. Returns the text to print, which is empty if it went elsewhere.
///
/// # Errors
/// [`CommandError`].
pub(crate) fn run(args: &cli::Metrics) -> Result<String, CommandError> {
    let folder = StatusFolder::open().map_err(CommandError::Status)?;
    let bounds = Bounds { processes: args.most_processes, pools: args.most_pools };
    let text = || exposition::text(&folder, bounds).map(|text| text + &ledgers::text(bounds.pools));
    if let Some(address) = args.listen {
        if !address.ip().is_loopback() && !args.expose_to_network {
            return Err(CommandError::Exposed(address));
        }
        // An unreadable folder is an error now, and not only at the first request.
        text().map_err(CommandError::Status)?;
        return server::serve(address, args.expose_to_network, text)
            .map(|()| String::new())
            .map_err(|error| CommandError::Listen { address, error });
    }
    let text = text().map_err(CommandError::Status)?;
    match &args.output {
        None => Ok(text),
        Some(path) => output::write_whole(path, |out| out.write_all(text.as_bytes()))
            .map(|()| String::new())
            .map_err(|error| CommandError::Output(path.clone(), error)),
    }
}
