//! A run of a benchmark, read from the JSON that `aquifer bench --json` prints.

use crate::row::{Peer, Row, Unit};
use aquifer_console::foreign;
use serde_json::Value;
use std::{fmt, io, path::PathBuf};

/// The largest value that is drawn, in any unit. It is far above any time and rate.
const LARGEST: f64 = 1e15;

/// A run, with its machine and its rows.
#[derive(Clone, PartialEq, Debug)]
pub struct BenchRun {
    /// The benchmark: `device`.
    bench: String,
    /// The device's display name.
    device: String,
    /// Whether no GPU was there, so that the figures are the processor's.
    is_simulated: bool,
    driver: Option<String>,
    /// The release of the GPU's driver: `580.159.03`.
    driver_release: Option<String>,
    processor: Option<String>,
    processors: Option<u64>,
    date: Option<String>,
    version: Option<String>,
    quick: bool,
    /// What the run says of its circumstances.
    pub(super) note: Option<String>,
    pub(super) rows: Vec<Row>,
}

/// Why there is no picture.
#[derive(Debug)]
pub enum PlotError {
    /// The text is no JSON.
    Json(serde_json::Error),
    /// The JSON is not that of a run.
    NotARun {
        /// The missing or wrong field.
        field: &'static str,
    },
    /// A row of the run is wrong.
    BadRow {
        /// Its number, from 1.
        number: usize,
        /// The missing or wrong field.
        field: &'static str,
    },
    /// No row was measured, or none that is asked for.
    NoRow,
    /// The file of a run cannot be read.
    Unreadable(PathBuf, io::Error),
    /// The file of a run is larger than any run.
    TooLarge(PathBuf),
    /// The text in the file is not that of a run.
    BadFile(PathBuf, Box<Self>),
    /// The picture cannot be written.
    Unwritable(PathBuf, io::Error),
}

impl fmt::Display for PlotError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Json(e) => write!(f, "no JSON: {e}"),
            Self::NotARun { field } => write!(
                f,
                "not a run: `{field}` is missing or wrong; `aquifer bench … --json` prints a run"
            ),
            Self::BadRow { number, field } => {
                write!(f, "row {number}: `{field}` is missing or wrong")
            }
            Self::NoRow => f.write_str("there is no row to draw, so there is no picture"),
            Self::Unreadable(path, e) => write!(f, "{} cannot be read: {e}", foreign::path(path)),
            Self::TooLarge(path) => {
                write!(f, "{} is larger than 1 MiB, which no run is", foreign::path(path))
            }
            Self::BadFile(path, e) => write!(f, "{}: {e}", foreign::path(path)),
            Self::Unwritable(path, e) => {
                write!(f, "{} cannot be written: {e}", foreign::path(path))
            }
        }
    }
}

impl std::error::Error for PlotError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Json(e) => Some(e),
            Self::Unreadable(_, e) | Self::Unwritable(_, e) => Some(e),
            Self::BadFile(_, e) => Some(e),
            Self::NotARun { .. } | Self::BadRow { .. } | Self::NoRow | Self::TooLarge(_) => None,
        }
    }
}

impl BenchRun {
    /// Reads a run from its JSON.
    ///
    /// # Errors
    /// [`PlotError::Json`], [`PlotError::NotARun`] or [`PlotError::BadRow`].
    pub fn parse(json: &str) -> Result<Self, PlotError> {
        let value: Value = serde_json::from_str(json).map_err(PlotError::Json)?;
        let optional = |field: &'static str| match &value[field] {
            Value::Null => Ok(None),
            Value::String(text) => Ok(Some(text.clone())),
            _ => Err(PlotError::NotARun { field }),
        };
        let needed = |field: &'static str| optional(field)?.ok_or(PlotError::NotARun { field });
        let rows = value["rows"].as_array().ok_or(PlotError::NotARun { field: "rows" })?;
        let rows = rows.iter().enumerate().map(|(at, row)| {
            read_row(row).map_err(|field| PlotError::BadRow { number: at + 1, field })
        });
        Ok(Self {
            bench: needed("bench")?,
            device: needed("device_name")?,
            is_simulated: value["device"] == "sim",
            driver: optional("driver")?,
            driver_release: optional("driver_release")?,
            processor: optional("host_cpu")?,
            processors: value["host_cpus"].as_u64(),
            date: optional("date")?,
            version: optional("version")?,
            quick: value["quick"] == true,
            note: optional("note")?,
            rows: rows.collect::<Result<_, _>>()?,
        })
    }

    /// Keeps the rows whose name contains `pattern`, ignoring case.
    pub fn select(&mut self, pattern: &str) {
        let pattern = pattern.to_lowercase();
        self.rows.retain(|row| row.name.to_lowercase().contains(&pattern));
    }

    /// Returns the number of rows.
    pub fn row_count(&self) -> usize {
        self.rows.len()
    }

    /// Names the benchmark and the device.
    pub(super) fn title(&self) -> String {
        if self.is_simulated {
            format!("aquifer bench {}, without a GPU", self.bench)
        } else {
            format!("aquifer bench {}: {}", self.bench, self.device)
        }
    }

    /// Describes the machine, the date and the version in one paragraph.
    pub(super) fn machine(&self) -> String {
        let known = |text: &Option<String>, what: &str| {
            text.clone().unwrap_or_else(|| format!("an unknown {what}"))
        };
        let processor = known(&self.processor, "processor");
        let mut parts = vec![known(&self.driver, "driver")];
        if self.is_simulated {
            parts = vec![self.device.clone()];
        }
        parts.extend(self.driver_release.as_ref().map(|release| format!("release {release}")));
        parts.push(match self.processors {
            Some(count) => format!("{count} of {processor}"),
            None => processor,
        });
        parts.push(known(&self.date, "date"));
        parts.push(format!(
            "aquifer {}",
            self.version.as_deref().unwrap_or("of an unknown version")
        ));
        if self.quick {
            parts.push("a quick look: figures are rough".to_owned());
        }
        parts.join(", ")
    }
}

/// Reads a row, or returns the field that is wrong. A value that was not finite is `null` in JSON.
fn read_row(row: &Value) -> Result<Row, &'static str> {
    let figure = |value: &Value, field: &'static str| match value {
        Value::Null => Ok(f64::NAN),
        value => value.as_f64().filter(|figure| figure.abs() <= LARGEST).ok_or(field),
    };
    let unit = row["unit"].as_str().and_then(Unit::named).ok_or("unit")?;
    let value = row.get("value").ok_or("value")?;
    let peer = match &row["peer"] {
        Value::Null => None,
        Value::String(name) => {
            let ns = unit.ns(figure(&row["peer_value"], "peer_value")?);
            Some(Peer { name: name.clone(), ns })
        }
        _ => return Err("peer"),
    };
    let interval = match &row["interval"] {
        Value::Null => None,
        Value::Array(ends) if ends.len() == 2 => {
            let end = |at: usize| figure(&ends[at], "interval").map(|value| unit.ns(value));
            Some([end(0)?, end(1)?])
        }
        _ => return Err("interval"),
    };
    Ok(Row {
        name: row["name"].as_str().ok_or("name")?.to_owned(),
        ns: unit.ns(figure(value, "value")?),
        unit,
        peer,
        interval,
    })
}
