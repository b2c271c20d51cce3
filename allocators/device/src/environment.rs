//! What the environment says to every pool of the process.
//!
//! | variable | is | default |
//! |---|---|---|
//! | `AQUIFER_TRACE` | a file that the life of every block is written to, also of pinned pools, for `aquifer replay`: see [`TraceFile`](aquifer_core::event::TraceFile) for its name and format. The pool's own recorder gets all events as well | none |
//! | `AQUIFER_BYPASS` | `1`: each block an allocation of its own from the driver, which memory checkers can see | `0` |
//! | `AQUIFER_DEBUG` | what every pool checks: any of `poison`, `canaries`, `quarantine`, `overlap`, `leaks` and `backtraces` with commas between them, or `all` for the first five; `quarantine=AMOUNT` with an amount like `64MiB`, which is what it is without one | nothing |
//!
//! What is found where `AQUIFER_DEBUG` is set goes to the standard error stream as well, unless the
//! program has a hook.
//!
//! A value that cannot be followed is an error of whoever opens a pool, never ignored.

use crate::{Debugging, Finding};
use aquifer_core::{MemoryError, Result};
use std::{
    env,
    io::{self, Write},
};

/// The variables of this process.
#[derive(Debug, Default)]
pub(crate) struct Environment {
    pub(crate) bypass: bool,
    pub(crate) debug: Debugging,
}

impl Environment {
    pub(crate) fn read() -> Result<Self> {
        Ok(Self { bypass: switch("AQUIFER_BYPASS")?, debug: debug()? })
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
        let expected = "poison, canaries, quarantine, quarantine=64MiB, overlap, leaks, backtraces or all, or several with commas between them";
        Err(MemoryError::BadSetting { name: NAME, value, expected })
    };
    match env::var(NAME).as_deref() {
        Err(env::VarError::NotPresent) | Ok("" | "0" | "off") => Ok(Debugging::default()),
        Ok(list) => match Debugging::parse(list) {
            Some(debug) => Ok(debug.on_finding(tell)),
            None => refuse(list.to_owned()),
        },
        Err(env::VarError::NotUnicode(other)) => refuse(other.to_string_lossy().into_owned()),
    }
}

/// Who switches debugging on from outside listens from outside.
fn tell(finding: &Finding) {
    // Nobody is there to hear of a refusal.
    let _ = writeln!(io::stderr().lock(), "aquifer: {finding}");
}
