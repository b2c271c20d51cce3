//! Rows of the log of RAPIDS' memory manager: `Thread,Time,Action,Pointer,Size,Stream`.
//!
//! - Pointers and streams are hexadecimal, with or without `0x`. Null is `(nil)` or `0`, depending
//!   on the version.
//! - The seconds of the time have six decimal digits, after a point or, in older logs, a colon.
//! - A request of zero bytes returns null and is skipped. So is a failed request.
//! - The log has no completions. By the manager's rules, a free on a stream comes after every use,
//!   so a block is complete when it is freed.

use super::{
    Fault,
    builder::{Builder, size},
    error::Name,
    source::fields,
};

/// The fields of a valid row.
#[derive(Debug)]
pub(crate) struct RmmRow<'a> {
    pub(crate) thread: &'a str,
    /// The time of day in microseconds.
    pub(crate) time_us: u64,
    pub(crate) action: RmmAction,
    pub(crate) address: u64,
    pub(crate) bytes: u64,
    pub(crate) stream: u64,
}

/// The action of a row.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum RmmAction {
    Allocate,
    Free,
    Fail,
    /// A request of zero bytes, which changes nothing.
    Nothing,
}

/// Adds one row.
pub(super) fn take(text: &str, row: u64, builder: &mut Builder) -> Result<(), Fault> {
    let RmmRow { action, address, bytes, stream, .. } = parse(text)?;
    let id = Name::Pointer(address);
    match action {
        RmmAction::Nothing | RmmAction::Fail => {
            builder.skip();
            Ok(())
        }
        RmmAction::Allocate => builder.allocate(row, id, bytes, stream),
        RmmAction::Free => {
            builder.free(row, id, bytes, stream)?;
            builder.complete(row, id, bytes, stream)
        }
    }
}

/// Parses and checks one row.
pub(crate) fn parse(text: &str) -> Result<RmmRow<'_>, Fault> {
    let [thread, time, action, pointer, bytes, stream] = fields(text)?;
    let wrong =
        |name, found: &str, expected| Err(Fault::Field { name, found: found.to_owned(), expected });
    if thread.is_empty() || !thread.bytes().all(|b| b.is_ascii_hexdigit()) {
        return wrong("Thread", thread, "a number");
    }
    let Some(time_us) = time_of_day(time) else {
        return wrong("Time", time, "HH:MM:SS with microseconds behind a point or a colon");
    };
    let Some(address) = hexadecimal(pointer) else {
        return wrong("Pointer", pointer, "a hexadecimal address or (nil)");
    };
    let Some(stream) = hexadecimal(stream) else {
        return wrong("Stream", stream, "a hexadecimal handle");
    };
    if !matches!(action, "allocate" | "free" | "allocate failure") {
        return wrong("Action", action, "allocate, free or allocate failure");
    }
    let row = |action, bytes| RmmRow { thread, time_us, action, address, bytes, stream };
    if action == "allocate failure" {
        // A failed request may be of any size.
        return Ok(row(RmmAction::Fail, bytes.parse().unwrap_or(0)));
    }
    if bytes == "0" {
        return Ok(row(RmmAction::Nothing, 0));
    }
    let bytes = size(bytes)?;
    if address == 0 {
        return wrong("Pointer", pointer, "an address, since the size is not zero");
    }
    Ok(row(if action == "allocate" { RmmAction::Allocate } else { RmmAction::Free }, bytes))
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
