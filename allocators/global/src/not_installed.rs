//! Lines on standard error: the warning that the program uses another allocator.

use crate::route::is_installed;
use std::{
    io::{self, Write},
    sync::atomic::{AtomicBool, Ordering},
};

/// The message for programs in which figures stay at zero.
pub(crate) const NOT_INSTALLED: &str = "aquifer's Global is not this program's #[global_allocator]";

/// Warns once if a cap has little effect, because [`Global`](crate::Global) is not installed.
pub(crate) fn warn_once() {
    static CHECKED: AtomicBool = AtomicBool::new(false);
    if !cfg!(miri) && !CHECKED.swap(true, Ordering::Relaxed) && !is_installed() {
        print(&format!("{NOT_INSTALLED}: a cap refuses nothing that other code allocates"));
    }
}

/// Prints a line on standard error.
pub(crate) fn print(text: &str) {
    // A write error cannot be reported anywhere.
    let _ = writeln!(io::stderr().lock(), "aquifer: {text}");
}
