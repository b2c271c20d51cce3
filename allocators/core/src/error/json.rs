//! An error as JSON. Written by hand, so that this crate needs no serialiser as a dependency.

use super::{HeldElsewhere, OutOfMemory};
use std::fmt::Write;

/// A JSON value.
enum Value<'a> {
    Null,
    Number(u64),
    Bool(bool),
    Text(&'a str),
    Object(&'a [(&'static str, Value<'a>)]),
    /// JSON text that is already serialised.
    Raw(String),
}

use Value::{Bool, Null, Number, Object, Raw, Text};

impl OutOfMemory {
    /// Returns the whole error as one JSON object on one line, for logs that a program reads.
    ///
    /// Every field has its name as key. Bytes are integers, and missing values are `null` or an
    /// empty list. Lists are complete, while the text shows the first few entries. The text of the
    /// [remedy](OutOfMemory::remedy) is under `do`.
    #[must_use]
    pub fn to_json(&self) -> String {
        serialise_error(self)
    }
}

fn held_elsewhere(held: HeldElsewhere) -> Value<'static> {
    if held.bytes() == 0 {
        return Null;
    }
    let holder = held.holder().map_or(Null, Text);
    Raw(serialise(&Object(&[("bytes", Number(held.bytes())), ("holder", holder)])))
}

fn serialise_error(error: &OutOfMemory) -> String {
    let refused = error.refused.as_ref().map_or(Null, |refused| {
        Raw(serialise(&Object(&[
            ("budget", Text(refused.budget)),
            ("requested", Number(refused.requested)),
            ("current", Number(refused.current)),
            ("remaining", Number(refused.remaining)),
            ("limit", Number(refused.limit)),
            ("elsewhere", held_elsewhere(refused.elsewhere)),
        ])))
    });
    let driver = error.driver.as_ref().map_or(Null, |driver| {
        Raw(serialise(&Object(&[
            ("call", Text(driver.call)),
            ("code", Number(driver.code.into())),
            ("name", Text(driver.name)),
        ])))
    });
    let raise = list(&error.raise, |raise| {
        serialise(&Object(&[
            ("budget", Text(raise.budget)),
            ("by", Number(raise.by)),
            ("to", Number(raise.to)),
        ]))
    });
    let stranded = list(&error.stranded, |stream| {
        serialise(&Object(&[
            ("stream", Number(stream.stream.into())),
            ("cached", Number(stream.cached)),
            ("pending", Number(stream.pending)),
        ]))
    });
    let in_use = list(&error.in_use, |user| {
        serialise(&Object(&[("stream", Number(user.stream.into())), ("bytes", Number(user.bytes))]))
    });
    let holders = list(&error.holders, |holder| {
        serialise(&Object(&[
            ("tag", Text(holder.tag.name())),
            ("bytes", Number(holder.bytes)),
            ("blocks", Number(holder.blocks)),
        ]))
    });
    let tenants = list(&error.tenants, |tenant| {
        serialise(&Object(&[
            ("name", Text(tenant.name)),
            ("live", Number(tenant.live)),
            ("limit", Number(tenant.limit)),
        ]))
    });
    let tried = list(&error.tried, |tried| {
        serialise(&Object(&[("step", Text(tried.step)), ("gave", Number(tried.gave))]))
    });
    let remedy = error.remedy().to_string();
    serialise(&Object(&[
        ("place", Text(&error.place)),
        ("requested", Number(error.requested)),
        ("refused", refused),
        ("of_live_bytes", Bool(error.of_live_bytes)),
        ("of_whole_handles", Bool(error.of_whole_handles)),
        ("driver", driver),
        ("raise", raise),
        ("capacity", Number(error.capacity)),
        ("live", Number(error.live)),
        ("cached", Number(error.cached)),
        ("pending", Number(error.pending)),
        ("physical", Number(error.physical)),
        ("graphs", Number(error.graphs)),
        ("largest_free", Number(error.largest_free)),
        ("available", Number(error.available)),
        ("stranded", stranded),
        ("in_use", in_use),
        ("holders", holders),
        ("tenants", tenants),
        ("tried", tried),
        ("do", Text(&remedy)),
    ]))
}

fn list<T>(all: &[T], one: impl Fn(&T) -> String) -> Value<'static> {
    let all: Vec<String> = all.iter().map(one).collect();
    Raw(format!("[{}]", all.join(",")))
}

fn serialise(value: &Value<'_>) -> String {
    let mut out = String::new();
    write_value(value, &mut out);
    out
}

fn write_value(value: &Value<'_>, out: &mut String) {
    match value {
        Null => out.push_str("null"),
        Number(number) => out.push_str(&number.to_string()),
        Bool(yes) => out.push_str(if *yes { "true" } else { "false" }),
        Text(text) => quote(text, out),
        Object(fields) => {
            out.push('{');
            for (at, (name, value)) in fields.iter().enumerate() {
                if at > 0 {
                    out.push(',');
                }
                quote(name, out);
                out.push(':');
                write_value(value, out);
            }
            out.push('}');
        }
        Raw(text) => out.push_str(text),
    }
}

/// Writes a quoted string. Tags and tenant names come from the program, so every character is
/// possible.
fn quote(text: &str, out: &mut String) {
    out.push('"');
    for c in text.chars() {
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
