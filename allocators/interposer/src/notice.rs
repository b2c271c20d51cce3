//! Lines on standard error.

use std::io::{self, Write};

/// Writes a line.
pub(crate) fn report(text: &str) {
    // Where it cannot be written, nothing else can be done.
    let _written = writeln!(io::stderr(), "aquifer run: {text}");
}
