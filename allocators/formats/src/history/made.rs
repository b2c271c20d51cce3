//! Generated traces: workloads made from a seed to defeat an allocation policy.
//!
//! `made:NAME` takes the place of a file name, with options after commas:
//! `made:pinned,seed=7,scale=0.5`. `made:` alone prints the list. Equal names and options generate
//! equal traces on every machine. The rows of a workload pass the same checks as those of a file.
//!
//! | option | meaning | default |
//! |---|---|---|
//! | `seed=N` | other sizes and lifetimes of the same kind | 1 |
//! | `scale=X` | multiplies sizes, and with them the peak, by X: 0.001 to 64 | 1 |
//! | `length=X` | multiplies the number of steps by X: 0.001 to 64 | 1 |
//!
//! A size is at least one byte, and a loop has at least one step.

mod maker;
mod workloads;

use super::{
    HistoryClock,
    builder::{InputFacts, ReadDevice},
};
use crate::trace::{
    TraceError, TraceFormat,
    error::{Fault, MadeError},
};
use maker::Maker;
use std::{ops::RangeInclusive, path::Path, str::FromStr};

/// The prefix of a workload's name.
const PREFIX: &str = "made:";
/// The valid factors for sizes and lengths.
const FACTORS: RangeInclusive<f64> = 0.001..=64.0;

/// A kind of generated trace.
///
/// ```
/// use aquifer_formats::{history::made, trace::Trace};
/// for workload in &made::WORKLOADS {
///     let name = format!("made:{},length=0.01", workload.name);
///     let trace = Trace::read(name.as_ref(), None)?;
///     assert!(trace.peak_live > 0, "{}", workload.about);
/// }
/// # Ok::<(), aquifer_formats::trace::TraceError>(())
/// ```
#[derive(Debug)]
pub struct Workload {
    /// The name on the command line.
    pub name: &'static str,
    /// What it does, and which policy it defeats.
    pub about: &'static str,
    play: fn(&mut Maker) -> Result<(), Fault>,
}

/// All kinds.
pub const WORKLOADS: [Workload; 9] = [
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
    Workload {
        name: "sharded",
        about: "training steps that gather sharded layers on a second stream and free them there while the first \
                 still uses them: breaks reuse that waits for a stream, and grows caches of both without end",
        play: workloads::sharded,
    },
];

/// A generated trace with its options.
#[derive(Debug)]
pub(crate) struct GeneratedTrace {
    workload: &'static Workload,
    seed: u64,
    scale: f64,
    length: f64,
}

/// Returns the text after `made:`, if the path begins so. A file of such a name is reached as
/// `./made:…`.
fn asked(path: &Path) -> Option<&str> {
    path.to_str()?.strip_prefix(PREFIX)
}

/// Returns whether the path is `made:` alone, which requests the list of [`WORKLOADS`] on the
/// command line. See the example of [`Workload`].
#[must_use]
pub fn asks_for_list(path: &Path) -> bool {
    asked(path) == Some("")
}

/// Generates the trace that a path names, or `None` if it names a file.
pub(crate) fn read(path: &Path) -> Option<Result<ReadDevice, TraceError>> {
    let asked = asked(path)?;
    let made = asked.parse::<GeneratedTrace>().map_err(Fault::Made).and_then(|made| made.play());
    Some(made.map_err(TraceError::whole))
}

impl FromStr for GeneratedTrace {
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

impl GeneratedTrace {
    fn play(&self) -> Result<ReadDevice, Fault> {
        let mut maker = Maker::new(self.seed, self.scale, self.length);
        (self.workload.play)(&mut maker)?;
        // Its steps are its clock.
        let facts = InputFacts::new(TraceFormat::Made, HistoryClock::Events);
        Ok(ReadDevice { builder: maker.builder, facts })
    }
}

#[cfg(test)]
mod tests;
