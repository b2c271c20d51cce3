//! Environment variables that each runtime of the process reads, besides those of
//! [pools](aquifer_device) and [the topology](aquifer_host::topology).
//!
//! - `AQUIFER_KEEP_FREE`: an amount like `20GiB` of each device that is kept free for other
//!   processes, unless the program sets one; `0` or `off` for none. Default: none.
//! - `AQUIFER_WATCH_HOST`: with `1` or `on`, the host's memory is
//!   [watched](crate::RuntimeBuilder::watch_host), unless the program sets a watch. Default: off.
//! - `AQUIFER_SIM_FALLBACK`: with `tell`, a fall-back to a [simulated
//!   GPU](crate::RuntimeBuilder::or_sim) is reported once on standard error, with the reason; with
//!   `quiet`, it is not reported. Default: `tell`.
//! - `AQUIFER_SIM_VIOLATIONS`: what happens with violations that a simulated GPU finds and the
//!   program does not take: `exit` or `exit=STATUS`, `report`, or `quiet`, see [`OnViolation`].
//!   Default: `exit`.
//!
//! An invalid value makes building a runtime fail. It is never ignored. A name that is nearly one
//! of [`KNOWN`] is reported.

use aquifer_core::{Bytes, MemoryError, NoGpu, Result};
use aquifer_driver::sim::{BadOnViolation, OnViolation};
use std::{
    env,
    io::{self, Write},
    sync::Once,
};

const PREFIX: &str = "AQUIFER_";
/// The variables of [the guide's page](crate::guide::environment) that begin so.
const KNOWN: [&str; 32] = [
    "AQUIFER_AGREE_PROGRAMS",
    "AQUIFER_AGREE_SEED",
    "AQUIFER_BIN",
    "AQUIFER_BLESS",
    "AQUIFER_BYPASS",
    "AQUIFER_CACHE",
    "AQUIFER_DATA",
    "AQUIFER_DEBUG",
    "AQUIFER_GLOBAL_REPORT",
    "AQUIFER_KEEP_FREE",
    "AQUIFER_LEDGER",
    "AQUIFER_LIB",
    "AQUIFER_NIXL",
    "AQUIFER_NUMA",
    "AQUIFER_PLAN",
    "AQUIFER_PLANT",
    "AQUIFER_REPLAYS",
    "AQUIFER_REQUIRE_GPU",
    "AQUIFER_RUN_LIMIT",
    "AQUIFER_RUN_PINNED_LIMIT",
    "AQUIFER_RUN_RECORD",
    "AQUIFER_RUN_SERVE",
    "AQUIFER_RUN_SHARE",
    "AQUIFER_RUN_STACKS",
    "AQUIFER_SIM_FALLBACK",
    "AQUIFER_SIM_VIOLATIONS",
    "AQUIFER_SOAK_SECONDS",
    "AQUIFER_SOAK_SEED",
    "AQUIFER_STATUS",
    "AQUIFER_TORCH",
    "AQUIFER_TRACE",
    "AQUIFER_WATCH_HOST",
];

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

/// Reports variables whose names are nearly those that aquifer reads, each time a runtime is built:
/// a program may open its log only then, and a runtime without the setting is what surprises.
pub(crate) fn report_misspelt() {
    for name in env::vars_os().filter_map(|(name, _)| name.into_string().ok()) {
        if let Some(known) = nearly(&name) {
            let text = format!(
                "aquifer: the environment variable {name} has no effect; did you mean {known}?\n"
            );
            // A failed write is ignored: there is no other place to report it.
            let _ = io::stderr().lock().write_all(text.as_bytes());
        }
    }
}

/// Returns the known name that a name is nearest to, if it is not known itself and differs in at
/// most a third of the letters. Names of other programs that begin alike are further away.
fn nearly(name: &str) -> Option<&'static str> {
    let rest = name.strip_prefix(PREFIX).filter(|_| !KNOWN.contains(&name))?;
    let edits = |known: &&str| edits(rest, known.strip_prefix(PREFIX).unwrap_or(known));
    let nearest = KNOWN.into_iter().min_by_key(|known| edits(known))?;
    (edits(&nearest) <= rest.len().div_ceil(3)).then_some(nearest)
}

/// Returns how many bytes must be inserted, removed or replaced to turn one text into the other
/// (Levenshtein).
fn edits(from: &str, to: &str) -> usize {
    let mut row: Vec<usize> = (0..=to.len()).collect();
    for (above, a) in from.bytes().enumerate() {
        let mut diagonal = std::mem::replace(&mut row[0], above + 1);
        for (at, b) in to.bytes().enumerate() {
            let replaced = diagonal + usize::from(a != b);
            diagonal = row[at + 1];
            row[at + 1] = replaced.min(diagonal + 1).min(row[at] + 1);
        }
    }
    row[to.len()]
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn every_variable_of_the_guide_is_known_and_no_other() {
        let page = include_str!("guide/environment.md");
        let is_name = |word: &&str| word.starts_with(PREFIX);
        let words = page.split(|c: char| !c.is_ascii_uppercase() && c != '_');
        let listed: BTreeSet<&str> = words.filter(is_name).collect();
        assert_eq!(listed, KNOWN.into_iter().collect());
    }

    #[test]
    fn a_misspelt_name_is_nearest_to_the_one_that_was_meant() {
        for (name, meant) in [
            ("AQUIFER_KEEPFREE", Some("AQUIFER_KEEP_FREE")),
            ("AQUIFER_TRCE", Some("AQUIFER_TRACE")),
            ("AQUIFER_TRACES", Some("AQUIFER_TRACE")),
            ("AQUIFER_PLANS", Some("AQUIFER_PLAN")),
            ("AQUIFER_GUARANTEE", None),
            ("AQUIFER_FLOW_SENSOR", None),
            ("AQUIFER_", None),
            ("AQUIFER", None),
            ("TRACE", None),
        ] {
            assert_eq!(nearly(name), meant, "{name}");
        }
        assert!(KNOWN.into_iter().all(|known| nearly(known).is_none()));
        assert_eq!((edits("", "abc"), edits("kitten", "sitting"), edits("ab", "ab")), (3, 3, 0));
    }
}
