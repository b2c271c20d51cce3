//! Rows of the form that this library writes, whose header names the fields.
//!
//! `t_us`, `op`, `id`, `bytes` and `stream` are required, and older files have no others. `kind`,
//! `device`, `tag`, `address`, `thread` and `refused_by` are optional. Other fields are ignored.
//! [`TraceFile`](aquifer_core::event::TraceFile) documents the format.

use super::{
    MAX_BLOCK, TraceDevice,
    error::{Fault, Name},
};
use aquifer_core::event::BlockKind;
use std::{borrow::Cow, fmt, str::FromStr};

/// The maximum number of fields in a row.
const MOST: usize = 32;

/// The position of each field in a row.
#[derive(Debug)]
pub(crate) struct Columns {
    count: usize,
    required: [usize; 5],
    kind: Option<usize>,
    device: Option<usize>,
    tag: Option<usize>,
    address: Option<usize>,
    thread: Option<usize>,
    refused_by: Option<usize>,
    /// Names of fields that are ignored.
    unknown: Vec<String>,
}

/// The operation of a row.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum RowAction {
    /// `a`
    Allocate,
    /// `f`
    Free,
    /// `c`
    Complete,
    /// `g`
    Grow,
    /// `s`
    Release,
    /// `m`
    Move,
    /// `x`
    Fail,
    /// `v`
    Finding,
    /// `l`
    Limit,
    /// `o`
    Outside,
    /// `p`
    DropPlan,
}

/// The fields of a valid row.
#[derive(Debug)]
pub(crate) struct EventRow<'a> {
    pub(crate) t_us: u64,
    pub(crate) action: RowAction,
    pub(crate) id: Name,
    pub(crate) bytes: u64,
    pub(crate) stream: u64,
    pub(crate) device: TraceDevice,
    pub(crate) kind: BlockKind,
    pub(crate) tag: Cow<'a, str>,
    /// The address, if the row has one.
    pub(crate) address: Option<u64>,
    /// The thread as written. Empty if the row has none.
    pub(crate) thread: &'a str,
    /// The budget that refused. Empty if the row has none.
    pub(crate) refused_by: Cow<'a, str>,
}

impl Columns {
    /// Parses a header. Returns `None` if it is not a header of this form.
    pub(crate) fn of(header: &str) -> Option<Self> {
        let names: Vec<&str> = header.split(',').collect();
        let at = |wanted: &str| names.iter().position(|name| *name == wanted);
        let twice = names.iter().enumerate().any(|(place, name)| at(name) != Some(place));
        if names.len() > MOST || twice {
            return None;
        }
        let required = [at("t_us")?, at("op")?, at("id")?, at("bytes")?, at("stream")?];
        let optional = ["kind", "device", "tag", "address", "thread", "refused_by"].map(at);
        let known = |place: usize| required.contains(&place) || optional.contains(&Some(place));
        let unknown = names.iter().enumerate().filter(|(place, _)| !known(*place));
        let unknown = unknown.map(|(_, name)| (*name).to_owned()).collect();
        let [kind, device, tag, address, thread, refused_by] = optional;
        let count = names.len();
        Some(Self { count, required, kind, device, tag, address, thread, refused_by, unknown })
    }

    /// Returns whether the rows name devices.
    pub(crate) fn tells_devices(&self) -> bool {
        self.device.is_some()
    }

    /// Returns whether the rows name kinds.
    pub(crate) fn tells_kinds(&self) -> bool {
        self.kind.is_some()
    }

    /// Returns a note on the fields that are ignored, if there are any.
    pub(crate) fn note(&self) -> Option<String> {
        let names = self.unknown.join(", ");
        (!names.is_empty())
            .then(|| format!("fields of the trace that mean nothing here are passed over: {names}"))
    }

    /// Parses and checks one row.
    pub(crate) fn parse<'a>(&self, text: &'a str) -> Result<EventRow<'a>, Fault> {
        let mut fields = [""; MOST];
        let mut found = 0;
        for field in text.split(',') {
            if let Some(place) = fields.get_mut(found) {
                *place = field;
            }
            found += 1;
        }
        if found != self.count {
            return Err(Fault::Fields { found, expected: self.count });
        }
        let [time, op, id, bytes, stream] = self.required.map(|place| fields[place]);
        let t_us = whole("t_us", time, "microseconds, a whole number")?;
        let action = match op {
            "a" => RowAction::Allocate,
            "f" => RowAction::Free,
            "c" => RowAction::Complete,
            "g" => RowAction::Grow,
            "s" => RowAction::Release,
            "m" => RowAction::Move,
            "x" => RowAction::Fail,
            "v" => RowAction::Finding,
            "l" => RowAction::Limit,
            "o" => RowAction::Outside,
            "p" => RowAction::DropPlan,
            _ => {
                return Err(Fault::Field {
                    name: "op",
                    found: op.to_owned(),
                    expected: "a, f, c, g, s, m, x, v, l, o or p",
                });
            }
        };
        let id = Name::Id(whole("id", id, "a whole number")?);
        let bytes = match (action, bytes) {
            (RowAction::Finding, "0") => 0,
            // 0 for none, and above the size of any block.
            (RowAction::Limit, bytes) => whole("bytes", bytes, "a limit, a whole number")?,
            (RowAction::Outside, bytes) => whole("bytes", bytes, "a whole number")?,
            (_, bytes) => size(bytes)?,
        };
        let stream = whole("stream", stream, "a whole number")?;
        let device = self.device.map_or(Ok(TraceDevice::Gpu(0)), |place| device(fields[place]))?;
        let kind = self.kind.map_or(Ok(BlockKind::Cached), |place| kind(fields[place]))?;
        let name = |name, place: Option<usize>| {
            place.map_or(Ok(Cow::Borrowed("")), |place| unescaped(name, fields[place]))
        };
        let tag = name("tag", self.tag)?;
        let address = self.address.map_or(Ok(None), |place| address(fields[place], bytes))?;
        let thread = self.thread.map_or("", |place| fields[place]);
        if !thread.is_empty() {
            whole("thread", thread, "the number of a thread")?;
        }
        let refused_by = name("refused_by", self.refused_by)?;
        Ok(EventRow {
            t_us,
            action,
            id,
            bytes,
            stream,
            device,
            kind,
            tag,
            address,
            thread,
            refused_by,
        })
    }
}

/// Why a text names no device of a trace.
///
/// See the example of [`MemoryHistory`](crate::history::MemoryHistory).
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct BadTraceDevice;

impl fmt::Display for BadTraceDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a device of a trace is a number, host or host:N")
    }
}

impl std::error::Error for BadTraceDevice {}

impl FromStr for TraceDevice {
    type Err = BadTraceDevice;

    fn from_str(text: &str) -> Result<Self, BadTraceDevice> {
        device(text).map_err(|_| BadTraceDevice)
    }
}

/// Parses an address and checks that a block of `bytes` ends within 64 bits.
fn address(text: &str, bytes: u64) -> Result<Option<u64>, Fault> {
    if text.is_empty() {
        return Ok(None);
    }
    let digits =
        text.strip_prefix("0x").filter(|digits| digits.bytes().all(|b| b.is_ascii_hexdigit()));
    let address = digits.and_then(|digits| u64::from_str_radix(digits, 16).ok());
    match address.filter(|address| address.checked_add(bytes).is_some()) {
        Some(address) => Ok(Some(address)),
        None => Err(Fault::Field {
            name: "address",
            found: text.to_owned(),
            expected: "a hexadecimal address with 0x",
        }),
    }
}

fn device(text: &str) -> Result<TraceDevice, Fault> {
    let expected = "the number of a device, host or host:N";
    let number = |text: &str| {
        whole("device", text, expected)
            .ok()
            .and_then(|number| u32::try_from(number).ok())
            .ok_or_else(|| Fault::Field { name: "device", found: text.to_owned(), expected })
    };
    match text.strip_prefix("host") {
        Some("") => Ok(TraceDevice::Host(None)),
        Some(node) => {
            number(node.strip_prefix(':').unwrap_or("")).map(|node| TraceDevice::Host(Some(node)))
        }
        None => number(text).map(TraceDevice::Gpu),
    }
}

fn kind(text: &str) -> Result<BlockKind, Fault> {
    let expected = "cached, stable, reserved, parkable, graph or pinned";
    BlockKind::from_name(text).ok_or_else(|| Fault::Field {
        name: "kind",
        found: text.to_owned(),
        expected,
    })
}

/// Returns the tag as its program named it.
fn unescaped<'a>(name: &'static str, text: &'a str) -> Result<Cow<'a, str>, Fault> {
    if !text.contains('%') {
        return Ok(text.into());
    }
    let bad = || Fault::Field { name, found: text.to_owned(), expected: "a name with % as %25" };
    let mut bytes = Vec::with_capacity(text.len());
    let mut parts = text.split('%');
    bytes.extend(parts.next().unwrap_or_default().bytes());
    for part in parts {
        let (digits, rest) = part.split_at_checked(2).ok_or_else(bad)?;
        if !digits.bytes().all(|digit| digit.is_ascii_hexdigit()) {
            return Err(bad());
        }
        bytes.push(u8::from_str_radix(digits, 16).map_err(|_| bad())?);
        bytes.extend(rest.bytes());
    }
    String::from_utf8(bytes).map(Into::into).map_err(|_| bad())
}

/// Parses an unsigned whole number.
fn whole(name: &'static str, text: &str, expected: &'static str) -> Result<u64, Fault> {
    decimal(text).ok_or_else(|| Fault::Field { name, found: text.to_owned(), expected })
}

/// Parses the size of a block.
pub(crate) fn size(text: &str) -> Result<u64, Fault> {
    let found = || text.to_owned();
    if let Some(digits) = text.strip_prefix('-')
        && !digits.is_empty()
        && digits.bytes().all(|b| b.is_ascii_digit())
    {
        return Err(Fault::NoBytes { found: found() });
    }
    match decimal(text) {
        Some(0) => Err(Fault::NoBytes { found: found() }),
        Some(bytes) if bytes <= MAX_BLOCK => Ok(bytes),
        // Digits that exceed 64 bits are still a size.
        _ if !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit()) => {
            Err(Fault::AbsurdSize { found: found() })
        }
        _ => Err(Fault::Field { name: "bytes", found: found(), expected: "a whole number" }),
    }
}

/// Parses like the standard library, without the plus sign that it allows.
fn decimal(text: &str) -> Option<u64> {
    if text.starts_with('+') { None } else { text.parse().ok() }
}
