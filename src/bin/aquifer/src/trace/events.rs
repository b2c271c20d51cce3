//! Rows of the form `t_us,op,id,bytes,stream`.

use super::{
    Fault,
    builder::{Builder, size, whole},
    error::Name,
    source::fields,
};

/// The first row.
pub(super) const HEADER: &str = "t_us,op,id,bytes,stream";

/// Takes one row in.
pub(super) fn take(text: &str, row: u64, builder: &mut Builder) -> Result<(), Fault> {
    let [time, op, id, bytes, stream] = fields(text)?;
    // The time is not replayed, but a row without one is no row of a trace.
    whole("t_us", time, "microseconds, a whole number")?;
    if !matches!(op, "a" | "f" | "c") {
        return Err(Fault::Field { name: "op", found: op.to_owned(), expected: "a, f or c" });
    }
    let id = Name::Id(whole("id", id, "a whole number")?);
    let bytes = size(bytes)?;
    let stream = whole("stream", stream, "a whole number")?;
    match op {
        "a" => builder.allocate(row, id, bytes, stream),
        "f" => builder.free(row, id, bytes, stream),
        _ => builder.complete(id, bytes, stream),
    }
}
