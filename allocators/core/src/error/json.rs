//! An error as JSON. Written by hand, so that this crate needs no serialiser as a dependency.

use super::{DriverError, HeldElsewhere, InUse, OutOfMemory, Stranded, TenantHolding, Tried};
use crate::{
    OutOfBudget, Tag,
    budget::{Holding, Raise},
};
use std::fmt::Write;

impl OutOfMemory {
    /// Returns the whole error as one JSON object on one line, for logs that a program reads.
    ///
    /// Every field has its name as key. Bytes are integers, and missing values are `null` or an
    /// empty list. Lists are complete, while the text shows the first few entries. The text of the
    /// [remedy](OutOfMemory::remedy) is under `do`.
    #[must_use]
    pub fn to_json(&self) -> String {
        let mut out = String::new();
        self.write(&mut out);
        debug_assert!(out.ends_with('}'), "an object without its end");
        out.pop();
        out.push_str(r#","do":"#);
        self.remedy().to_string().write(&mut out);
        out.push('}');
        out
    }
}

/// A value that can be written as JSON.
trait Json {
    fn write(&self, out: &mut String);
}

/// Writes each type as an object of the named fields.
macro_rules! objects {
    ($($type:ident { $($field:ident),+ $(,)? })+) => {$(
        impl Json for $type {
            fn write(&self, out: &mut String) {
                write_object(out, &[$((stringify!($field), &self.$field)),+]);
            }
        }
    )+};
}

objects! {
    OutOfMemory {
        place, requested, refused, of_live_bytes, of_whole_handles, driver, raise, capacity, live,
        cached, pending, physical, graphs, largest_free, available, stranded, in_use, holders,
        tenants, tried,
    }
    OutOfBudget { budget, requested, current, remaining, limit, elsewhere }
    DriverError { call, code, name }
    Raise { budget, by, to }
    Stranded { stream, cached, pending }
    InUse { stream, bytes }
    Holding { tag, bytes, blocks }
    TenantHolding { name, live, limit }
    Tried { step, gave }
}

impl Json for HeldElsewhere {
    fn write(&self, out: &mut String) {
        match self.bytes() {
            0 => out.push_str("null"),
            bytes => write_object(out, &[("bytes", &bytes), ("holder", &self.holder())]),
        }
    }
}

impl Json for Tag {
    fn write(&self, out: &mut String) {
        self.name().write(out);
    }
}

impl<T: Json> Json for Option<T> {
    fn write(&self, out: &mut String) {
        match self {
            Some(value) => value.write(out),
            None => out.push_str("null"),
        }
    }
}

impl<T: Json> Json for Vec<T> {
    fn write(&self, out: &mut String) {
        out.push('[');
        for (at, value) in self.iter().enumerate() {
            out.push_str(if at > 0 { "," } else { "" });
            value.write(out);
        }
        out.push(']');
    }
}

macro_rules! plain {
    ($($type:ident)+) => {$(
        impl Json for $type {
            fn write(&self, out: &mut String) {
                out.push_str(&self.to_string());
            }
        }
    )+};
}

plain! { u32 u64 bool }

impl Json for String {
    fn write(&self, out: &mut String) {
        self.as_str().write(out);
    }
}

/// Tags and tenant names come from the program, so every character is possible.
impl Json for &str {
    fn write(&self, out: &mut String) {
        out.push('"');
        for c in self.chars() {
            match c {
                '"' | '\\' => out.extend(['\\', c]),
                '\0'..='\x1f' => {
                    // Writing to a string cannot fail.
                    let _ = write!(out, "\\u{:04x}", u32::from(c));
                }
                _ => out.push(c),
            }
        }
        out.push('"');
    }
}

fn write_object(out: &mut String, fields: &[(&str, &dyn Json)]) {
    out.push('{');
    for (at, (name, value)) in fields.iter().enumerate() {
        out.push_str(if at > 0 { "," } else { "" });
        name.write(out);
        out.push(':');
        value.write(out);
    }
    out.push('}');
}
