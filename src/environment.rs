//! What the environment says to every runtime of the process, besides what it says to
//! [pools](aquifer_device) and to [the topology](aquifer_host::topology).
//!
//! | variable | is | default |
//! |---|---|---|
//! | `AQUIFER_KEEP_FREE` | an amount like `20GiB` of each device that is kept free for others, where the program does not say; `0` or `off` for none | none |
//! | `AQUIFER_WATCH_HOST` | `1` or `on`: the host's memory is [watched](crate::RuntimeBuilder::watch_host) by the thresholds that are the default, where the program does not say | off |
//! | `AQUIFER_SIM_FALLBACK` | `quiet`: that a runtime falls back to a [simulated GPU](crate::RuntimeBuilder::or_sim) is not said on standard error; `tell`: it is, once, with the reason | `tell` |
//! | `AQUIFER_SIM_VIOLATIONS` | what happens with violations that a simulated GPU finds and the program does not take: `report` at the end, `now`, `panic`, `exit` or `exit=STATUS`, or `quiet`: see [`OnViolation`] | `report` |
//!
//! A value that cannot be followed is an error of whoever builds a runtime, never ignored.

use aquifer_core::{Bytes, MemoryError, NoGpu, Result};
use aquifer_driver::sim::{BadOnViolation, OnViolation};
use std::{
    env,
    io::{self, Write},
    sync::Once,
};

/// Whether a fall-back to a simulated GPU is said.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(crate) enum Fallback {
    /// Once, on standard error.
    #[default]
    Tell,
    /// Not at all.
    Quiet,
}

/// The variables of this process.
#[derive(Debug, Default)]
pub(crate) struct Environment {
    pub(crate) keep_free: Option<u64>,
    pub(crate) watch_host: bool,
    pub(crate) fallback: Fallback,
}

impl Environment {
    pub(crate) fn read() -> Result<Self> {
        // The simulator reads it itself. Here a value that names nothing is an error.
        if let Err(BadOnViolation { value }) = OnViolation::from_env() {
            let (name, expected) = ("AQUIFER_SIM_VIOLATIONS", BadOnViolation::EXPECTED);
            return Err(MemoryError::BadSetting { name, value, expected });
        }
        Ok(Self {
            keep_free: amount("AQUIFER_KEEP_FREE")?,
            watch_host: switch("AQUIFER_WATCH_HOST")?,
            fallback: fallback()?,
        })
    }
}

/// Says once a process that a simulated GPU stands in, and why.
pub(crate) fn tell_fallback(why: &NoGpu) {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // There is no way to tell of a refusal.
        let text = format!(
            "aquifer: a simulated GPU is used, since {why} (AQUIFER_SIM_FALLBACK=quiet hides this)\n"
        );
        let _ = io::stderr().lock().write_all(text.as_bytes());
    });
}

fn fallback() -> Result<Fallback> {
    let name = "AQUIFER_SIM_FALLBACK";
    let text = env::var_os(name).unwrap_or_default();
    match &*text.to_string_lossy() {
        "" | "tell" => Ok(Fallback::Tell),
        "quiet" => Ok(Fallback::Quiet),
        other => Err(MemoryError::BadSetting {
            name,
            value: other.to_owned(),
            expected: "tell or quiet",
        }),
    }
}

fn switch(name: &'static str) -> Result<bool> {
    let refuse = |value: String| Err(MemoryError::BadSetting { name, value, expected: "0 or 1" });
    match env::var(name).as_deref() {
        Err(env::VarError::NotPresent) | Ok("" | "0" | "off") => Ok(false),
        Ok("1" | "on") => Ok(true),
        Ok(text) => refuse(text.to_owned()),
        Err(env::VarError::NotUnicode(other)) => refuse(other.to_string_lossy().into_owned()),
    }
}

fn amount(name: &'static str) -> Result<Option<u64>> {
    let refuse = |value: String| {
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
            None => refuse(text.to_owned()),
        },
        Err(env::VarError::NotUnicode(other)) => refuse(other.to_string_lossy().into_owned()),
    }
}
