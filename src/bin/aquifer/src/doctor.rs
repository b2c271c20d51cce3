//! `aquifer doctor`: what this machine offers, what a program gets of it, and what to fix.
//!
//! | module | contents |
//! |---|---|
//! | `facts` | the data of the driver and the kernel |
//! | `probe` | tests of pinning and copying |
//! | `finding`, `diagnosis` | one conclusion, and all of a machine |
//! | `findings` | the conclusions: what a program gets, and warnings with their fixes |
//! | `places` | the conclusions on host memory of each node and device |
//! | `ledgers` | memory that processes share |
//! | `transports` | ways to other processes, devices and machines, by trying each |
//! | `screen` | the page, and JSON |

mod diagnosis;
mod facts;
mod finding;
mod findings;
mod ledgers;
mod places;
mod probe;
mod screen;
mod transports;

pub(crate) use diagnosis::Diagnosis;

use crate::cli;

impl Diagnosis {
    /// Returns the report in the requested format.
    pub(crate) fn text(&self, args: &cli::Doctor) -> String {
        if args.json { screen::json(self) } else { screen::page(self) }
    }
}
