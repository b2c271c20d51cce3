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
    Fault, TraceDevice,
    builder::size,
    error::Name,
    log_event::{LogAction, LogEvent, LogSink, Skips, UNREADABLE},
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

/// The fields of a valid row.
#[derive(Debug)]
struct RmmRow<'a> {
    action: LogAction,
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
            "allocate" | "Alloc" => LogAction::Allocate,
            "free" | "Free" => LogAction::Release,
            "allocate failure" => LogAction::Fail,
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
            LogAction::Fail => Ok(row(action, bytes.parse().unwrap_or(0))),
            LogAction::Allocate if bytes == "0" => Ok(row(LogAction::Nothing, 0)),
            // Frees had no sizes before 0.15.
            LogAction::Release if bytes == "0" => Ok(row(action, 0)),
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
pub(super) struct RmmReader {
    columns: RmmColumns,
    clock: RunClock,
    /// The bytes and the stream of each live block, by device and address.
    live: BTreeMap<(u32, u64), (u64, u64)>,
}

impl RmmReader {
    pub(super) fn new(columns: RmmColumns) -> Self {
        Self { columns, clock: RunClock::default(), live: BTreeMap::new() }
    }

    /// Takes one row.
    pub(super) fn take(
        &mut self,
        row: u64,
        text: &str,
        skips: &mut Skips,
        sink: &mut LogSink<'_>,
    ) -> Result<(), Fault> {
        if text == self.columns.header {
            skips.add("headers of later runs");
            self.clock.is_new_run = true;
            while let Some((block, held)) = self.live.pop_first() {
                skips.add("blocks that an earlier run left, taken as freed at its end");
                sink(&released(row, self.clock.now, block, held))?;
            }
            return Ok(());
        }
        let parsed = match self.columns.parse(text) {
            Ok(parsed) => parsed,
            Err(fault) => {
                skips.add_error(UNREADABLE, Some(row), fault);
                return Ok(());
            }
        };
        let RmmRow { action, address, bytes, stream, device, .. } = parsed;
        let time = self.clock.advance(parsed.time);
        let block = (device, address);
        let mut event = LogEvent {
            device: TraceDevice::Gpu(device),
            address: Some(address),
            stream,
            thread: parsed.thread,
            tag: parsed.location,
            ..LogEvent::new(action, row, time, address, bytes)
        };
        match action {
            LogAction::Allocate => {
                if let Some(held) = self.live.insert(block, (bytes, stream)) {
                    skips.add("frees that are missing before their address is allocated again");
                    sink(&released(row, time, block, held))?;
                }
            }
            LogAction::Release => match self.live.remove(&block) {
                Some((held, _)) => {
                    if held != bytes && bytes != 0 {
                        skips.add("sizes of frees that differ from the allocation's");
                    }
                    event.bytes = held;
                }
                None if bytes == 0 => event.action = LogAction::Nothing,
                None => {
                    let fault = Fault::Unknown { id: Name::Pointer(address), done: "freed" };
                    skips.add_error("frees of unknown blocks", Some(row), fault);
                    return Ok(());
                }
            },
            LogAction::Fail | LogAction::Nothing => {}
        }
        sink(&event)
    }
}

/// The release of a block on its own stream.
fn released(
    row: u64,
    time: f64,
    (device, address): (u32, u64),
    (bytes, stream): (u64, u64),
) -> LogEvent<'static> {
    LogEvent {
        device: TraceDevice::Gpu(device),
        address: Some(address),
        stream,
        ..LogEvent::new(LogAction::Release, row, time, address, bytes)
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
