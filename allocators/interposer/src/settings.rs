//! What `aquifer run` has asked for: environment variables, which children of the program inherit.
//!
//! They are written by `aquifer run` and are no interface. One that cannot be read leaves the
//! program as it is without this library, and is reported.

use aquifer_status::ledger::folder_of_environment;
use std::{env, ffi::OsString, path::PathBuf};

/// How much of one kind of memory may be held.
#[derive(Clone, Default)]
pub(crate) struct Limits {
    all: Option<u64>,
    /// Of single devices, by ordinal.
    of: Vec<(u32, u64)>,
}

impl Limits {
    /// Parses `BYTES` or `N=BYTES`, separated by commas.
    fn parse(text: &str) -> Option<Self> {
        let mut limits = Self::default();
        for part in text.split(',').filter(|part| !part.is_empty()) {
            match part.split_once('=') {
                Some((device, bytes)) => {
                    limits.of.push((device.parse().ok()?, bytes.parse().ok()?));
                }
                None => limits.all = Some(part.parse().ok()?),
            }
        }
        Some(limits)
    }

    /// Returns the limit of a device.
    pub(crate) fn of(&self, device: u32) -> Option<u64> {
        let own = self.of.iter().rfind(|(number, _)| *number == device);
        own.map(|(_, bytes)| *bytes).or(self.all)
    }

    fn is_some(&self) -> bool {
        self.all.is_some() || !self.of.is_empty()
    }
}

#[derive(Default)]
pub(crate) struct Settings {
    pub(crate) record: Option<PathBuf>,
    pub(crate) limits: Limits,
    pub(crate) pinned_limit: Option<u64>,
    pub(crate) stacks: bool,
    /// The folder of the ledgers that memory is claimed in, with the guarantee.
    pub(crate) share: Option<(PathBuf, u64)>,
    pub(crate) serve: bool,
}

impl Settings {
    /// Reads the environment.
    ///
    /// # Errors
    /// The name and the value of a variable that makes no sense.
    pub(crate) fn read() -> Result<Self, (&'static str, String)> {
        let text = |name| env::var_os(name).filter(|value: &OsString| !value.is_empty());
        let parsed = |name: &'static str| match text(name).map(OsString::into_string) {
            None => Ok(None),
            Some(Ok(value)) => Ok(Some(value)),
            Some(Err(value)) => Err((name, value.to_string_lossy().into_owned())),
        };
        let bytes = |name: &'static str| {
            let value = parsed(name)?;
            value.map(|value| value.parse::<u64>().map_err(|_| (name, value))).transpose()
        };
        let limits = parsed("AQUIFER_RUN_LIMIT")?.unwrap_or_default();
        let limits = Limits::parse(&limits).ok_or(("AQUIFER_RUN_LIMIT", limits))?;
        let share = match bytes("AQUIFER_RUN_SHARE")? {
            None => None,
            Some(guarantee) => {
                let folder = folder_of_environment();
                let folder = folder.map_err(|error| ("AQUIFER_LEDGER", error.to_string()))?;
                folder.map(|folder| (folder, guarantee))
            }
        };
        Ok(Self {
            record: text("AQUIFER_RUN_RECORD").map(PathBuf::from),
            limits,
            pinned_limit: bytes("AQUIFER_RUN_PINNED_LIMIT")?,
            stacks: text("AQUIFER_RUN_STACKS").is_some(),
            share,
            serve: text("AQUIFER_RUN_SERVE").is_some(),
        })
    }

    /// Returns whether anything limits the program.
    pub(crate) fn limits_anything(&self) -> bool {
        self.limits.is_some() || self.pinned_limit.is_some()
    }
}
