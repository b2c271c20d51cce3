//! Rows of the form that this library writes, whose header names the fields.
//!
//! `t_us`, `op`, `id`, `bytes` and `stream` are required, and older files have no others. `kind`,
//! `device` and `tag` are optional. Other fields are ignored.
//! [`TraceFile`](aquifer_core::event::TraceFile) documents the format.

use super::{
    Device, Fault,
    builder::{Builder, size, whole},
    error::Name,
};
use aquifer_core::event::BlockKind;
use std::{borrow::Cow, collections::BTreeMap};

/// The maximum number of fields in a row.
const MOST: usize = 32;

/// The position of each field in a row.
#[derive(Debug)]
pub(super) struct Columns {
    count: usize,
    required: [usize; 5],
    kind: Option<usize>,
    device: Option<usize>,
    tag: Option<usize>,
    /// Names of fields that are ignored.
    pub(super) unknown: Vec<String>,
}

impl Columns {
    /// Parses a header. Returns `None` if it is not a header of this form.
    pub(super) fn of(header: &str) -> Option<Self> {
        let names: Vec<&str> = header.split(',').collect();
        let at = |wanted: &str| names.iter().position(|name| *name == wanted);
        let twice = names.iter().enumerate().any(|(place, name)| at(name) != Some(place));
        if names.len() > MOST || twice {
            return None;
        }
        let required = [at("t_us")?, at("op")?, at("id")?, at("bytes")?, at("stream")?];
        let (kind, device, tag) = (at("kind"), at("device"), at("tag"));
        let known =
            |place: usize| required.contains(&place) || [kind, device, tag].contains(&Some(place));
        let unknown = names.iter().enumerate().filter(|(place, _)| !known(*place));
        let unknown = unknown.map(|(_, name)| (*name).to_owned()).collect();
        Some(Self { count: names.len(), required, kind, device, tag, unknown })
    }

    /// Returns whether the rows name devices.
    pub(super) fn tells_devices(&self) -> bool {
        self.device.is_some()
    }

    /// Adds one row.
    pub(super) fn take(
        &self,
        text: &str,
        row: u64,
        builders: &mut BTreeMap<Device, Builder>,
    ) -> Result<(), Fault> {
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
        // The time is not replayed, but it must be valid.
        whole("t_us", time, "microseconds, a whole number")?;
        if !matches!(op, "a" | "f" | "c" | "g" | "s" | "x") {
            return Err(Fault::Field {
                name: "op",
                found: op.to_owned(),
                expected: "a, f, c, g, s or x",
            });
        }
        let id = Name::Id(whole("id", id, "a whole number")?);
        let bytes = size(bytes)?;
        let stream = whole("stream", stream, "a whole number")?;
        let device = self.device.map_or(Ok(Device::Gpu(0)), |place| device(fields[place]))?;
        let kind = self.kind.map_or(Ok(BlockKind::Cached), |place| kind(fields[place]))?;
        let tag = self.tag.map_or(Ok(Cow::Borrowed("")), |place| unescaped(fields[place]))?;
        let builder = builders.entry(device).or_insert_with(Builder::new);
        match op {
            "a" => builder.allocate_as(row, id, bytes, stream, kind, &tag),
            "f" => builder.free(row, id, bytes, stream),
            "c" => builder.complete(row, id, bytes, stream),
            _ => {
                builder.skip();
                Ok(())
            }
        }
    }
}

fn device(text: &str) -> Result<Device, Fault> {
    let expected = "the number of a device, host or host:N";
    let number = |text: &str| {
        whole("device", text, expected)
            .ok()
            .and_then(|number| u32::try_from(number).ok())
            .ok_or_else(|| Fault::Field { name: "device", found: text.to_owned(), expected })
    };
    match text.strip_prefix("host") {
        Some("") => Ok(Device::Host(None)),
        Some(node) => {
            number(node.strip_prefix(':').unwrap_or("")).map(|node| Device::Host(Some(node)))
        }
        None => number(text).map(Device::Gpu),
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
fn unescaped(text: &str) -> Result<Cow<'_, str>, Fault> {
    if !text.contains('%') {
        return Ok(text.into());
    }
    let bad =
        || Fault::Field { name: "tag", found: text.to_owned(), expected: "a name with % as %25" };
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
