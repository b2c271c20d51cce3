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

/// Adds one row.
pub(super) fn take(text: &str, row: u64, builder: &mut Builder) -> Result<(), Fault> {
    let [thread, time, action, pointer, bytes, stream] = fields(text)?;
    let wrong =
        |name, found: &str, expected| Err(Fault::Field { name, found: found.to_owned(), expected });
    if thread.is_empty() || !thread.bytes().all(|b| b.is_ascii_hexdigit()) {
        return wrong("Thread", thread, "a number");
    }
    if !is_time_of_day(time) {
        return wrong("Time", time, "HH:MM:SS with microseconds behind a point or a colon");
    }
    let Some(address) = hexadecimal(pointer) else {
        return wrong("Pointer", pointer, "a hexadecimal address or (nil)");
    };
    let Some(stream) = hexadecimal(stream) else {
        return wrong("Stream", stream, "a hexadecimal handle");
    };
    if !matches!(action, "allocate" | "free" | "allocate failure") {
        return wrong("Action", action, "allocate, free or allocate failure");
    }
    if action == "allocate failure" || bytes == "0" {
        builder.skip();
        return Ok(());
    }
    let bytes = size(bytes)?;
    if address == 0 {
        return wrong("Pointer", pointer, "an address, since the size is not zero");
    }
    let id = Name::Pointer(address);
    if action == "allocate" {
        builder.allocate(row, id, bytes, stream)
    } else {
        builder.free(row, id, bytes, stream)?;
        builder.complete(row, id, bytes, stream)
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

/// Returns whether the text has the form `13:05:59.000001` or `13:05:59:000001`.
fn is_time_of_day(text: &str) -> bool {
    let below = |part: &[u8], limit: u8| match part {
        [tens @ b'0'..=b'9', ones @ b'0'..=b'9'] => (tens - b'0') * 10 + (ones - b'0') < limit,
        _ => false,
    };
    match text.as_bytes() {
        [h0, h1, b':', m0, m1, b':', s0, s1, b'.' | b':', micros @ ..] => {
            below(&[*h0, *h1], 24)
                && below(&[*m0, *m1], 60)
                && below(&[*s0, *s1], 61)
                && micros.len() == 6
                && micros.iter().all(u8::is_ascii_digit)
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_ways_to_write_a_time_are_read() {
        for good in ["00:00:00.000000", "23:59:60:999999", "13:05:59.123456"] {
            assert!(is_time_of_day(good), "{good}");
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
            assert!(!is_time_of_day(bad), "{bad}");
        }
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
