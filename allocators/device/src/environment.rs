//! Environment variables for all pools of the process.
//!
//! - `AQUIFER_TRACE` names a file for the events of every block, also of pinned pools, which
//!   `aquifer replay` reads. [`TraceFile`](aquifer_core::event::TraceFile) describes its name and
//!   format. The pool's own recorder gets all events as well. Default: none.
//! - `AQUIFER_BYPASS=1` makes each block an allocation of its own from the driver, which memory
//!   checkers can see. Default: `0`.
//! - `AQUIFER_DEBUG` lists the checks of every pool: any of `poison`, `canaries`, `leaks` and
//!   `backtraces`, or `all` for all but the last. Default: nothing.
//! - `AQUIFER_PLAN` names a plan file for every pool without a plan of its own
//!   ([`PoolConfig::plan`](crate::PoolConfig::plan)). Default: none.
//!
//! With `AQUIFER_DEBUG`, findings are also written to the standard error stream, unless the program
//! has a hook.
//!
//! An invalid value is an error of the call that opens a pool. It is never ignored.

use crate::{Debugging, Finding};
use aquifer_core::{MemoryError, Result};
use std::{
    env,
    io::{self, Write},
    path::PathBuf,
};

/// The settings from the environment.
#[derive(Debug, Default)]
pub(crate) struct Environment {
    pub(crate) bypass: bool,
    pub(crate) debug: Debugging,
    pub(crate) plan: Option<PathBuf>,
}

impl Environment {
    pub(crate) fn read() -> Result<Self> {
        let bypass = switch("AQUIFER_BYPASS")?;
        let plan = env::var_os("AQUIFER_PLAN").filter(|path| !path.is_empty()).map(PathBuf::from);
        Ok(Self { bypass, debug: debug()?, plan })
    }
}

fn switch(name: &'static str) -> Result<bool> {
    match env::var(name).as_deref() {
        Err(env::VarError::NotPresent) | Ok("" | "0" | "off") => Ok(false),
        Ok("1" | "on") => Ok(true),
        Ok(other) => {
            Err(MemoryError::BadSetting { name, value: other.to_owned(), expected: "0 or 1" })
        }
        Err(env::VarError::NotUnicode(other)) => {
            let value = other.to_string_lossy().into_owned();
            Err(MemoryError::BadSetting { name, value, expected: "0 or 1" })
        }
    }
}

fn debug() -> Result<Debugging> {
    const NAME: &str = "AQUIFER_DEBUG";
    let refuse = |value: String| {
        let expected =
            "poison, canaries, leaks, backtraces or all, or several with commas between them";
        Err(MemoryError::BadSetting { name: NAME, value, expected })
    };
    match env::var(NAME).as_deref() {
        Err(env::VarError::NotPresent) | Ok("" | "0" | "off") => Ok(Debugging::default()),
        Ok(list) => match Debugging::parse(list) {
            Some(debug) => Ok(debug.on_finding(write_finding)),
            None => refuse(list.to_owned()),
        },
        Err(env::VarError::NotUnicode(other)) => refuse(other.to_string_lossy().into_owned()),
    }
}

/// Writes findings to the standard error stream, since debugging was enabled from outside the
/// program.
fn write_finding(finding: &Finding) {
    // A failed write cannot be reported anywhere.
    let _ = writeln!(io::stderr().lock(), "aquifer: {finding}");
}
