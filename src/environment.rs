//! Environment variables that each runtime of the process reads, besides those of
//! [pools](aquifer_device) and [the topology](aquifer_host::topology).
//!
//! - `AQUIFER_KEEP_FREE`: an amount like `20GiB` of each device that is kept free for other
//!   processes, unless the program sets one; `0` or `off` for none. Default: none.
//! - `AQUIFER_WATCH_HOST`: with `1` or `on`, the host's memory is
//!   [watched](crate::RuntimeBuilder::watch_host) with the default thresholds, unless the program
//!   sets a watch. Default: off.
//! - `AQUIFER_SIM_FALLBACK`: with `tell`, a fall-back to a [simulated
//!   GPU](crate::RuntimeBuilder::or_sim) is reported once on standard error, with the reason; with
//!   `quiet`, it is not reported. Default: `tell`.
//! - `AQUIFER_SIM_VIOLATIONS`: what happens with violations that a simulated GPU finds and the
//!   program does not take: `report` at the end, `now`, `panic`, `exit` or `exit=STATUS`, or
//!   `quiet`, see [`OnViolation`]. Default: `report`.
//!
//! An invalid value makes building a runtime fail. It is never ignored.

use aquifer_core::{Bytes, MemoryError, NoGpu, Result};
use aquifer_driver::sim::{BadOnViolation, OnViolation};
use std::{
    env,
    io::{self, Write},
    sync::Once,
};

/// Whether a fall-back to a simulated GPU is reported.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(crate) enum Fallback {
    /// Reported once, on standard error.
    #[default]
    Report,
    /// Not reported.
    Quiet,
}

/// The variables of this process, parsed.
#[derive(Debug, Default)]
pub(crate) struct Environment {
    pub(crate) keep_free: Option<u64>,
    pub(crate) watch_host: bool,
    pub(crate) fallback: Fallback,
}

impl Environment {
    pub(crate) fn read() -> Result<Self> {
        // The simulator reads this variable itself. Here an invalid value becomes an error.
        if let Err(BadOnViolation { value }) = OnViolation::from_env() {
            let (name, expected) = ("AQUIFER_SIM_VIOLATIONS", BadOnViolation::EXPECTED);
            return Err(MemoryError::BadSetting { name, value, expected });
        }
        Ok(Self {
            keep_free: read_amount("AQUIFER_KEEP_FREE")?,
            watch_host: read_switch("AQUIFER_WATCH_HOST")?,
            fallback: read_fallback()?,
        })
    }
}

/// Reports once per process that a simulated GPU is used, and why.
pub(crate) fn report_fallback(why: &NoGpu) {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // A failed write is ignored: there is no other place to report it.
        let text = format!(
            "aquifer: a simulated GPU is used, since {why} (AQUIFER_SIM_FALLBACK=quiet hides this)\n"
        );
        let _ = io::stderr().lock().write_all(text.as_bytes());
    });
}

fn read_fallback() -> Result<Fallback> {
    let name = "AQUIFER_SIM_FALLBACK";
    let text = env::var_os(name).unwrap_or_default();
    match &*text.to_string_lossy() {
        "" | "tell" => Ok(Fallback::Report),
        "quiet" => Ok(Fallback::Quiet),
        other => Err(MemoryError::BadSetting {
            name,
            value: other.to_owned(),
            expected: "tell or quiet",
        }),
    }
}

fn read_switch(name: &'static str) -> Result<bool> {
    let invalid = |value: String| Err(MemoryError::BadSetting { name, value, expected: "0 or 1" });
    match env::var(name).as_deref() {
        Err(env::VarError::NotPresent) | Ok("" | "0" | "off") => Ok(false),
        Ok("1" | "on") => Ok(true),
        Ok(text) => invalid(text.to_owned()),
        Err(env::VarError::NotUnicode(other)) => invalid(other.to_string_lossy().into_owned()),
    }
}

fn read_amount(name: &'static str) -> Result<Option<u64>> {
    let invalid = |value: String| {
        Err(MemoryError::BadSetting {
            name,
            value,
            expected: "an amount like 512MiB or 20GiB, or 0",
        })
    };
    match env::var(name).as_deref() {
        Err(env::VarError::NotPresent) | Ok("" | "off") => Ok(None),
        Ok(text) => match Bytes::parse(text) {
            Some(Bytes(0)) => Ok(None),
            Some(Bytes(bytes)) => Ok(Some(bytes)),
            None => invalid(text.to_owned()),
        },
        Err(env::VarError::NotUnicode(other)) => invalid(other.to_string_lossy().into_owned()),
    }
}
