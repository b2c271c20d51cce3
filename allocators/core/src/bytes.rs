//! A count of bytes, written for a person.

use std::fmt;

/// A count of bytes whose `Display` picks the unit: `512 B`, `2.00 MiB`, `3.80 GiB`.
///
/// ```
/// use aquifer_core::Bytes;
/// assert_eq!(Bytes(512).to_string(), "512 B");
/// assert_eq!(Bytes(2 << 20).to_string(), "2.00 MiB");
/// ```
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Bytes(pub u64);

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [&str; 5] = ["KiB", "MiB", "GiB", "TiB", "PiB"];
        if self.0 < 1024 {
            return write!(f, "{} B", self.0);
        }
        let mut scaled = self.0 as f64;
        let mut name = "B";
        for unit in UNITS {
            scaled /= 1024.0;
            name = unit;
            if scaled < 1024.0 {
                break;
            }
        }
        write!(f, "{scaled:.2} {name}")
    }
}
