//! Traces that nobody recorded: workloads made from a seed to break a policy for memory.
//!
//! `made:NAME` stands where a file's name would, with options behind commas:
//! `made:pinned,seed=7,scale=0.5`. `made:` alone asks for the list. Equal names and options make
//! equal traces, on every machine; each workload's rows go through the same checks as a file's.
//!
//! | option | means | default |
//! |---|---|---|
//! | `seed=N` | other sizes and lifetimes of the same kind | 1 |
//! | `scale=X` | sizes, and with them the peak, times X: 0.001 to 64 | 1 |
//! | `length=X` | as many steps, times X: 0.001 to 64 | 1 |
//!
//! A size never becomes less than one byte, and a step remains of every loop.

mod maker;
mod workloads;

use super::{Fault, Format, Trace, TraceError};
use crate::layout::wrap;
use maker::Maker;
use serde_json::json;
use std::{error, fmt, ops::RangeInclusive, path::Path, str::FromStr};

/// What stands before the name of a workload.
const PREFIX: &str = "made:";
/// What sizes and lengths may be multiplied by.
const FACTORS: RangeInclusive<f64> = 0.001..=64.0;

/// A kind of made trace.
#[derive(Debug)]
pub(crate) struct Workload {
    /// As on the command line.
    pub(crate) name: &'static str,
    /// What it does, and what it is made to break.
    pub(crate) about: &'static str,
    play: fn(&mut Maker) -> Result<(), Fault>,
}

/// Every kind.
pub(crate) const WORKLOADS: [Workload; 8] = [
    Workload {
        name: "growing-kv",
        about: "caches of sequences move into blocks 1.25 to 2 times larger while others end: breaks reuse by \
                 equal size, and what is sized for one copy when two are live",
        play: workloads::growing_kv,
    },
    Workload {
        name: "near-limit",
        about: "random sizes of 512 B to 256 MiB that keep the live bytes close to the peak: breaks placement \
                 that needs slack",
        play: workloads::near_limit,
    },
    Workload {
        name: "phases",
        about: "many small blocks, a few huge ones, then middle ones on four streams, with survivors: breaks \
                 segments kept for a class of sizes or for a stream",
        play: workloads::phases,
    },
    Workload {
        name: "pinned",
        about: "a small block that lives long behind every large one: breaks what gives back or reuses whole \
                 segments only",
        play: workloads::pinned,
    },
    Workload {
        name: "idle-streams",
        about: "sixteen streams that fill their caches in turn and then idle: breaks memory that belongs to the \
                 stream that had it",
        play: workloads::idle_streams,
    },
    Workload {
        name: "dying-streams",
        about: "streams that free all they have and never come back: breaks caches that wait for their stream to \
                 ask again",
        play: workloads::dying_streams,
    },
    Workload {
        name: "edge",
        about: "a loop that frees and allocates just beyond what is held: breaks growth and trimming without \
                 hysteresis",
        play: workloads::edge,
    },
    Workload {
        name: "steady",
        about: "one training step again and again: breaks whatever still calls the driver when nothing new is \
                 asked",
        play: workloads::steady,
    },
];

/// A made trace as it was asked for.
#[derive(Debug)]
pub(crate) struct Made {
    workload: &'static Workload,
    seed: u64,
    scale: f64,
    length: f64,
}

/// Why a name means no made trace.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum MadeError {
    /// No such workload.
    Name {
        /// The name.
        found: String,
    },
    /// No such option.
    Option {
        /// What stands there.
        found: String,
    },
    /// An option with a value that it cannot have.
    Value {
        /// The option.
        option: &'static str,
        /// The value.
        found: String,
        /// What it may be.
        expected: &'static str,
    },
}

impl fmt::Display for MadeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Name { found } => {
                write!(f, "no workload is called {found:?}; `aquifer replay made:` lists them")
            }
            Self::Option { found } => {
                write!(
                    f,
                    "{found:?} is no option of a made trace; there are seed=, scale= and length="
                )
            }
            Self::Value { option, found, expected } => {
                write!(f, "{option} is {found:?}, not {expected}")
            }
        }
    }
}

impl error::Error for MadeError {}

/// What comes behind `made:`, if the name begins so. A file of such a name is found as `./made:…`.
fn asked(path: &Path) -> Option<&str> {
    path.to_str()?.strip_prefix(PREFIX)
}

/// Whether the name asks for the list of workloads.
pub(crate) fn asks_for_list(path: &Path) -> bool {
    asked(path) == Some("")
}

/// The list of workloads, for a person or in JSON.
pub(crate) fn list(as_json: bool) -> String {
    if as_json {
        let rows = WORKLOADS.iter().map(|w| json!({ "name": w.name, "about": w.about }));
        return serde_json::Value::from_iter(rows).to_string();
    }
    let mut lines = vec!["aquifer replay made:NAME[,seed=N][,scale=X][,length=X]".to_owned()];
    for workload in &WORKLOADS {
        lines.push(format!("  {}", workload.name));
        lines.extend(wrap(workload.about, 74).into_iter().map(|line| format!("      {line}")));
    }
    lines.push("next  aquifer replay made:steady".to_owned());
    lines.join("\n")
}

/// The made trace that a path means, if it means one.
pub(super) fn trace(path: &Path) -> Option<Result<Trace, TraceError>> {
    let asked = asked(path)?;
    let made = asked.parse::<Made>().map_err(Fault::Made).and_then(|made| made.trace());
    Some(made.map_err(TraceError::whole))
}

impl FromStr for Made {
    type Err = MadeError;

    fn from_str(text: &str) -> Result<Self, MadeError> {
        let mut parts = text.split(',');
        let name = parts.next().unwrap_or_default();
        let workload = WORKLOADS
            .iter()
            .find(|workload| workload.name == name)
            .ok_or_else(|| MadeError::Name { found: name.to_owned() })?;
        let mut made = Self { workload, seed: 1, scale: 1.0, length: 1.0 };
        for part in parts {
            match part.split_once('=') {
                Some(("seed", value)) => {
                    made.seed = value.parse().map_err(|_| MadeError::Value {
                        option: "seed",
                        found: value.to_owned(),
                        expected: "a whole number",
                    })?;
                }
                Some(("scale", value)) => made.scale = factor("scale", value)?,
                Some(("length", value)) => made.length = factor("length", value)?,
                _ => return Err(MadeError::Option { found: part.to_owned() }),
            }
        }
        Ok(made)
    }
}

fn factor(option: &'static str, text: &str) -> Result<f64, MadeError> {
    let value = text.parse().ok().filter(|value| FACTORS.contains(value));
    value.ok_or_else(|| MadeError::Value {
        option,
        found: text.to_owned(),
        expected: "a factor from 0.001 to 64",
    })
}

impl Made {
    fn trace(&self) -> Result<Trace, Fault> {
        let mut maker = Maker::new(self.seed, self.scale, self.length);
        (self.workload.play)(&mut maker)?;
        maker.finish(Format::Made)
    }
}

#[cfg(test)]
mod tests;
