//! What the environment says.
//!
//! | variable | is | default |
//! |---|---|---|
//! | `AQUIFER_TRACE` | a file that the life of every device block is written to, for `aquifer replay` | none |
//! | `AQUIFER_BYPASS` | `1`: each block an allocation of its own from the driver, which memory checkers can see | `0` |
//! | `AQUIFER_NUMA` | `off`: the machine is taken as one node | `on` |
//!
//! A value that cannot be followed is an error of [`RuntimeBuilder::build`](crate::RuntimeBuilder::build), never ignored.

use aquifer_core::{MemoryError, Recorder, Result, event::TraceFile};
use std::{env, path::Path, sync::Arc};

/// The variables of this process.
#[derive(Debug, Default)]
pub(crate) struct Settings {
    pub(crate) recorder: Option<Arc<Recorder>>,
    pub(crate) bypass: bool,
}

impl Settings {
    pub(crate) fn from_environment() -> Result<Self> {
        let recorder = match env::var_os("AQUIFER_TRACE").filter(|path| !path.is_empty()) {
            Some(path) => Some(trace(Path::new(&path))?),
            None => None,
        };
        Ok(Self { recorder, bypass: switch("AQUIFER_BYPASS")? })
    }
}

fn trace(path: &Path) -> Result<Arc<Recorder>> {
    let file = TraceFile::create(path).map_err(|_| MemoryError::BadSetting {
        name: "AQUIFER_TRACE",
        value: path.display().to_string(),
        expected: "the path of a file that can be written",
    })?;
    Ok(Arc::new(Recorder::new(Arc::new(file))))
}

fn switch(name: &'static str) -> Result<bool> {
    match env::var(name).as_deref() {
        Err(env::VarError::NotPresent) | Ok("" | "0" | "off") => Ok(false),
        Ok("1" | "on") => Ok(true),
        Ok(other) => Err(MemoryError::BadSetting { name, value: other.to_owned(), expected: "0 or 1" }),
        Err(env::VarError::NotUnicode(other)) => {
            let value = other.to_string_lossy().into_owned();
            Err(MemoryError::BadSetting { name, value, expected: "0 or 1" })
        }
    }
}
