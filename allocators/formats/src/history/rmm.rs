//! Rows of the log of RAPIDS' memory manager.
//!
//! | since | header |
//! |---|---|
//! | 0.15 | `Thread,Time,Action,Pointer,Size,Stream` |
//! | before | `Event Type,Device ID,Address,Stream,Size (bytes),…,Start,End,Elapsed,Location` |
//!
//! - Pointers and streams are hexadecimal, with or without `0x`. Null is `(nil)` or `0`, depending
//!   on the version.
//! - The seconds of the time have six decimal digits, after a point or, in older logs, a colon.
//!   Before 0.15, times are seconds since the start.
//! - A request of zero bytes returns null and is skipped. So is a failed request.
//! - The log has no completions. By the manager's rules, a free on a stream comes after every use,
//!   so a block is complete when it is freed.
//!
//! # Logs as they end
//! | in the log | is read as |
//! |---|---|
//! | a free of an unknown address: the log began late, or its adaptor was put over a resource in use | passed over |
//! | a free with another size than the allocation | a free of the block |
//! | an allocation at the address of a live block | a free of that block, then the allocation |
//! | the header again: two runs | frees of all live blocks |
//! | a row that cannot be read, or is cut off | passed over |

use super::{
    HistoryMark, MarkKind,
    builder::{HistoryBuilder, Origin, StreamNames},
};
use crate::trace::{
    TraceDevice, TraceError,
    error::{Fault, Name},
    events::size,
    named_blocks::short,
    skips::{Skips, UNREADABLE},
    source::TraceSource,
};
use std::collections::BTreeMap;

/// The maximum number of columns.
const MOST: usize = 32;
/// Microseconds of a day.
const DAY_US: u64 = 24 * 60 * 60 * 1_000_000;

/// The position of each field in a row.
#[derive(Debug)]
pub(crate) struct RmmColumns {
    header: String,
    count: usize,
    action: usize,
    pointer: usize,
    bytes: usize,
    stream: usize,
    time: usize,
    thread: Option<usize>,
    device: Option<usize>,
    location: Option<usize>,
}

/// What a row tells.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum RmmAction {
    Allocate,
    Free,
    Fail,
    /// A request of zero bytes, which changes nothing.
    Nothing,
}

/// The fields of a valid row.
#[derive(Debug)]
struct RmmRow<'a> {
    action: RmmAction,
    address: u64,
    bytes: u64,
    stream: u64,
    time: RowTime,
    thread: &'a str,
    device: u32,
    location: &'a str,
}

/// The time of a row.
#[derive(Clone, Copy, Debug)]
enum RowTime {
    /// Microseconds of the day.
    OfDay(u64),
    /// Microseconds since the start of the program.
    OfRun(f64),
}

impl RmmColumns {
    /// Parses a header. Returns `None` if it is not one of this form.
    pub(crate) fn of(header: &str) -> Option<Self> {
        let names: Vec<&str> = header.split(',').collect();
        let at = |wanted: &str| names.iter().position(|name| *name == wanted);
        let count = Some(names.len()).filter(|count| *count <= MOST)?;
        let header = header.to_owned();
        let (thread, device, location) = (at("Thread"), at("Device ID"), at("Location"));
        let [action, pointer, bytes, stream, time] = if thread.is_some() {
            [at("Action")?, at("Pointer")?, at("Size")?, at("Stream")?, at("Time")?]
        } else {
            device?;
            let bytes = at("Size (bytes)")?;
            [at("Event Type")?, at("Address")?, bytes, at("Stream")?, at("Start")?]
        };
        Some(Self { header, count, action, pointer, bytes, stream, time, thread, device, location })
    }

    /// Returns whether the rows name devices.
    pub(crate) fn tells_devices(&self) -> bool {
        self.device.is_some()
    }

    /// Parses and checks one row.
    fn parse<'a>(&self, text: &'a str) -> Result<RmmRow<'a>, Fault> {
        let mut fields = [""; MOST];
        let mut found = 0;
        // Only the last field, the location, may contain commas.
        let most = if self.location.is_some() { self.count } else { usize::MAX };
        for field in text.splitn(most, ',') {
            if let Some(place) = fields.get_mut(found) {
                *place = field;
            }
            found += 1;
        }
        if found != self.count {
            return Err(Fault::Fields { found, expected: self.count });
        }
        let wrong = |name, found: &str, expected| {
            Err(Fault::Field { name, found: found.to_owned(), expected })
        };
        let thread = self.thread.map_or("", |place| fields[place]);
        if self.thread.is_some()
            && (thread.is_empty() || !thread.bytes().all(|b| b.is_ascii_hexdigit()))
        {
            return wrong("Thread", thread, "a number");
        }
        let time = fields[self.time];
        let time = match self.thread {
            Some(_) => match time_of_day(time) {
                Some(time) => RowTime::OfDay(time),
                None => {
                    let expected = "HH:MM:SS with microseconds behind a point or a colon";
                    return wrong("Time", time, expected);
                }
            },
            None => match time.parse().ok().filter(|time| (0.0..1e12).contains(time)) {
                Some(seconds) => RowTime::OfRun(f64::round(seconds * 1e6)),
                None => return wrong("Start", time, "seconds"),
            },
        };
        let pointer = fields[self.pointer];
        let Some(address) = hexadecimal(pointer) else {
            return wrong("Pointer", pointer, "a hexadecimal address or (nil)");
        };
        let Some(stream) = hexadecimal(fields[self.stream]) else {
            return wrong("Stream", fields[self.stream], "a hexadecimal handle");
        };
        let device = self.device.map_or("0", |place| fields[place]);
        let Ok(device) = device.parse() else {
            return wrong("Device ID", device, "the number of a device");
        };
        let action = match fields[self.action] {
            "allocate" | "Alloc" => RmmAction::Allocate,
            "free" | "Free" => RmmAction::Free,
            "allocate failure" => RmmAction::Fail,
            action => return wrong("Action", action, "allocate, free or allocate failure"),
        };
        let bytes = fields[self.bytes];
        let location = self.location.map_or("", |place| fields[place]);
        let row = |action, bytes| RmmRow {
            action,
            address,
            bytes,
            stream,
            time,
            thread,
            device,
            location,
        };
        match action {
            // A failed request may be of any size.
            RmmAction::Fail => Ok(row(action, bytes.parse().unwrap_or(0))),
            RmmAction::Allocate if bytes == "0" => Ok(row(RmmAction::Nothing, 0)),
            // Frees had no sizes before 0.15.
            RmmAction::Free if bytes == "0" => Ok(row(action, 0)),
            _ => {
                let bytes = size(bytes)?;
                if address == 0 {
                    return wrong("Pointer", pointer, "an address, since the size is not zero");
                }
                Ok(row(action, bytes))
            }
        }
    }
}

/// A log that is being read.
#[derive(Debug)]
pub(crate) struct RmmReader {
    columns: RmmColumns,
    clock: RunClock,
    /// The bytes and the stream of each live block, by device and address.
    live: BTreeMap<(u32, u64), (u64, u64)>,
    /// The blocks of each device.
    pub(crate) builders: BTreeMap<TraceDevice, HistoryBuilder>,
    pub(crate) skips: Skips,
}

impl RmmReader {
    /// Reads the rows after the header.
    pub(crate) fn read(columns: RmmColumns, source: &mut TraceSource) -> Result<Self, TraceError> {
        let (clock, live, builders) = (RunClock::default(), BTreeMap::new(), BTreeMap::new());
        let mut reader = Self { columns, clock, live, builders, skips: Skips::default() };
        loop {
            match source.next_row() {
                Ok(None) => return Ok(reader),
                Ok(Some((row, text))) => {
                    reader.take(row, text).map_err(|fault| TraceError { row: Some(row), fault })?;
                }
                Err(TraceError { row, fault: fault @ Fault::CutRow }) => {
                    reader.skips.add_error("rows cut off at the end", row, fault);
                }
                Err(TraceError { row, fault: fault @ Fault::NoText }) => {
                    reader.skips.add_error(UNREADABLE, row, fault);
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Takes one row.
    fn take(&mut self, row: u64, text: &str) -> Result<(), Fault> {
        if text == self.columns.header {
            self.skips.add("headers of later runs");
            self.clock.is_new_run = true;
            while let Some((block, (bytes, stream))) = self.live.pop_first() {
                self.skips.add("blocks that an earlier run left, taken as freed at its end");
                self.free((row, self.clock.now), block, bytes, stream)?;
            }
            return Ok(());
        }
        let parsed = match self.columns.parse(text) {
            Ok(parsed) => parsed,
            Err(fault) => {
                self.skips.add_error(UNREADABLE, Some(row), fault);
                return Ok(());
            }
        };
        let RmmRow { action, address, bytes, stream, device, .. } = parsed;
        let time = self.clock.advance(parsed.time);
        let (now, block) = ((row, time), (device, address));
        if action == RmmAction::Free && bytes != 0 && !self.live.contains_key(&block) {
            let fault = Fault::Unknown { id: Name::Pointer(address), done: "freed" };
            self.skips.add_error("frees of unknown blocks", Some(row), fault);
            return Ok(());
        }
        self.builder(device).at(time);
        match action {
            RmmAction::Allocate => {
                if let Some((held, stream)) = self.live.insert(block, (bytes, stream)) {
                    self.skips
                        .add("frees that are missing before their address is allocated again");
                    self.free(now, block, held, stream)?;
                }
                let (thread, location) = (parsed.thread, parsed.location);
                let builder = self.builder(device);
                let (tag, thread) = (builder.texts.intern(location), builder.texts.intern(thread));
                let address = Some(address);
                let origin = Origin {
                    address,
                    kind: None,
                    occupied: None,
                    tag,
                    thread,
                    stack: 0,
                    metadata: 0,
                };
                builder.allocate(now, Name::Pointer(block.1), bytes, stream, &origin)
            }
            RmmAction::Free => match self.live.remove(&block) {
                Some((held, _)) => {
                    if held != bytes && bytes != 0 {
                        self.skips.add("sizes of frees that differ from the allocation's");
                    }
                    self.free(now, block, held, stream)
                }
                None => Ok(()),
            },
            RmmAction::Fail => {
                let (address, device_free, text, refused_by) = (None, None, 0, 0);
                let (row, kind) = (short(row), MarkKind::Fail);
                let mark =
                    HistoryMark { time, row, kind, bytes, address, device_free, text, refused_by };
                self.builder(device).mark(mark)
            }
            RmmAction::Nothing => Ok(()),
        }
    }

    fn builder(&mut self, device: u32) -> &mut HistoryBuilder {
        let new = || HistoryBuilder::new(StreamNames::Handles);
        self.builders.entry(TraceDevice::Gpu(device)).or_insert_with(new)
    }

    /// Frees a block, whose last use is then over.
    fn free(
        &mut self,
        now: (u64, f64),
        (device, address): (u32, u64),
        bytes: u64,
        stream: u64,
    ) -> Result<(), Fault> {
        let (builder, id) = (self.builder(device), Name::Pointer(address));
        builder.free(now, id, bytes, stream)?;
        builder.complete(now, id, bytes, stream)
    }
}

/// Microseconds since the first row, over all runs of a log.
#[derive(Default, Debug)]
struct RunClock {
    now: f64,
    /// The time of the first row, and of the latest one: the day and its microseconds in one.
    days: Option<(u64, u64)>,
    /// Where the current run's own times begin.
    origin: Option<f64>,
    is_new_run: bool,
}

impl RunClock {
    /// Returns the time of a row, which is never before that of the row before it.
    fn advance(&mut self, time: RowTime) -> f64 {
        let is_new_run = std::mem::take(&mut self.is_new_run);
        match time {
            RowTime::OfDay(time) => {
                // The log has the time of day alone. It goes back at midnight, and a little between
                // threads, also from just after midnight to just before.
                let (first, last) = *self.days.get_or_insert((time, time));
                let (today, clock) = (last - last % DAY_US, last % DAY_US);
                let at = if time < clock && (is_new_run || clock - time > DAY_US / 2) {
                    today + DAY_US + time
                } else if today > 0 && time > clock + DAY_US / 2 {
                    today - DAY_US + time
                } else {
                    today + time
                };
                let last = last.max(at);
                self.days = Some((first, last));
                self.now = (last - first) as f64;
            }
            RowTime::OfRun(time) => {
                if is_new_run || self.origin.is_none() {
                    self.origin = Some(time - self.now);
                }
                self.now = self.now.max(time - self.origin.unwrap_or_default());
            }
        }
        self.now
    }
}

/// Parses `1f`, `0x1f` or `(nil)`.
fn hexadecimal(text: &str) -> Option<u64> {
    if text == "(nil)" {
        return Some(0);
    }
    let digits = text.strip_prefix("0x").unwrap_or(text);
    // The standard parser would accept a sign.
    if !digits.bytes().all(|b| b.is_ascii_hexdigit()) {
        return None;
    }
    u64::from_str_radix(digits, 16).ok()
}

/// Parses `13:05:59.000001` or `13:05:59:000001` to microseconds.
fn time_of_day(text: &str) -> Option<u64> {
    let below = |tens: u8, ones: u8, limit: u64| {
        let digits = tens.is_ascii_digit() && ones.is_ascii_digit();
        let number = digits.then(|| u64::from(tens - b'0') * 10 + u64::from(ones - b'0'));
        number.filter(|number| *number < limit)
    };
    match text.as_bytes() {
        [h0, h1, b':', m0, m1, b':', s0, s1, b'.' | b':', micros @ ..] => {
            let hours = below(*h0, *h1, 24)?;
            let minutes = below(*m0, *m1, 60)?;
            let seconds = below(*s0, *s1, 61)?;
            if micros.len() != 6 || !micros.iter().all(u8::is_ascii_digit) {
                return None;
            }
            let micros = micros.iter().fold(0, |sum, digit| sum * 10 + u64::from(digit - b'0'));
            Some(((hours * 60 + minutes) * 60 + seconds) * 1_000_000 + micros)
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_ways_to_write_a_time_are_read() {
        for good in ["00:00:00.000000", "23:59:60:999999", "13:05:59.123456"] {
            assert!(time_of_day(good).is_some(), "{good}");
        }
        for bad in [
            "24:00:00.000000",
            "13:60:00.000000",
            "1:05:59.123456",
            "13:05:59",
            "13:05:59.12345",
            "",
            "::.",
        ] {
            assert_eq!(time_of_day(bad), None, "{bad}");
        }
        assert_eq!(time_of_day("01:02:03.000004"), Some(3_723_000_004));
    }

    #[test]
    fn every_way_to_write_a_handle_is_read() {
        assert_eq!(hexadecimal("0x7f04c0000200"), Some(0x7f04_c000_0200));
        assert_eq!(hexadecimal("7f04c0000200"), Some(0x7f04_c000_0200));
        assert_eq!(hexadecimal("(nil)"), Some(0));
        assert_eq!(hexadecimal("0"), Some(0));
        for bad in ["", "0x", "+1", "-1", "0xg", "nil", "11112222333344445"] {
            assert_eq!(hexadecimal(bad), None, "{bad}");
        }
    }
}
