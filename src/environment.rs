//! What the environment says to every runtime of the process, besides what it says to [pools](aquifer_device) and to
//! [the topology](aquifer_host::topology).
//!
//! | variable | is | default |
//! |---|---|---|
//! | `AQUIFER_KEEP_FREE` | an amount like `20GiB` of each device that is kept free for others, where the program does not say; `0` or `off` for none | none |
//! | `AQUIFER_WATCH_HOST` | `1` or `on`: the host's memory is [watched](crate::RuntimeBuilder::watch_host) by the thresholds that are the default, where the program does not say | off |
//!
//! A value that cannot be followed is an error of whoever builds a runtime, never ignored.

use aquifer_core::{Bytes, MemoryError, Result};
use std::env;

/// The variables of this process.
#[derive(Debug, Default)]
pub(crate) struct Environment {
    pub(crate) keep_free: Option<u64>,
    pub(crate) watch_host: bool,
}

impl Environment {
    pub(crate) fn read() -> Result<Self> {
        Ok(Self { keep_free: amount("AQUIFER_KEEP_FREE")?, watch_host: switch("AQUIFER_WATCH_HOST")? })
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
        Err(MemoryError::BadSetting { name, value, expected: "an amount like 512MiB or 20GiB, or 0" })
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
