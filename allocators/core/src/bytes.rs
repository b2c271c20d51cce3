//! A number of bytes, formatted and parsed with binary units.

use std::fmt;

/// A number of bytes whose `Display` chooses the unit: `512 B`, `2.00 MiB`, `3.80 GiB`.
///
/// ```
/// use aquifer::Bytes;
/// assert_eq!(Bytes(512).to_string(), "512 B");
/// assert_eq!(Bytes(2 << 20).to_string(), "2.00 MiB");
/// ```
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Bytes(pub u64);

impl Bytes {
    /// Returns the smallest number that is not less and that `Display` writes exactly. For amounts
    /// that users read and then set.
    ///
    /// ```
    /// use aquifer::Bytes;
    /// let exact = Bytes((28 << 20) + 1).rounded_up();
    /// assert_eq!((exact.to_string(), exact.0 / 10_486), ("28.01 MiB".to_owned(), 2800));
    /// assert_eq!(Bytes(28 << 20).rounded_up(), Bytes(28 << 20));
    /// ```
    #[must_use]
    pub fn rounded_up(self) -> Self {
        if self.0 < 1024 {
            return self;
        }
        // `Display` writes hundredths of the unit. PiB is the largest unit.
        let unit = 1u128 << (self.0.ilog2() / 10 * 10).min(50);
        let hundredths = (u128::from(self.0) * 100).div_ceil(unit);
        Self(u64::try_from(hundredths * unit / 100).unwrap_or(self.0))
    }

    /// Returns the largest number that is not more and that `Display` writes exactly.
    ///
    /// ```
    /// use aquifer::Bytes;
    /// assert_eq!(Bytes((28 << 20) - 1).rounded_down().to_string(), "27.99 MiB");
    /// ```
    #[must_use]
    pub fn rounded_down(self) -> Self {
        if self.0 < 1024 {
            return self;
        }
        let unit = 1u128 << (self.0.ilog2() / 10 * 10).min(50);
        let hundredths = u128::from(self.0) * 100 / unit;
        Self(u64::try_from(hundredths * unit / 100).unwrap_or(self.0))
    }

    /// Parses an amount of a setting: `512`, `4096B`, `64MiB`, `1GiB`. Returns `None` for anything
    /// else, and on overflow.
    ///
    /// ```
    /// use aquifer::Bytes;
    /// assert_eq!(Bytes::parse("64MiB"), Some(Bytes(64 << 20)));
    /// assert_eq!(Bytes::parse("64MB"), None);
    /// ```
    #[must_use]
    pub fn parse(amount: &str) -> Option<Self> {
        let digits = amount.trim_end_matches(|c: char| !c.is_ascii_digit());
        let unit: u64 = match &amount[digits.len()..] {
            "" | "B" => 1,
            "KiB" => 1 << 10,
            "MiB" => 1 << 20,
            "GiB" => 1 << 30,
            "TiB" => 1 << 40,
            _ => return None,
        };
        if digits.is_empty() || !digits.bytes().all(|b| b.is_ascii_digit()) {
            return None;
        }
        digits.parse::<u64>().ok()?.checked_mul(unit).map(Self)
    }
}

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parse_accepts_binary_units_and_rejects_everything_else() {
        let read = ["7", "7B", "7KiB", "7MiB", "7GiB", "7TiB"].map(Bytes::parse);
        assert_eq!(read, [0, 0, 10, 20, 30, 40].map(|shift| Some(Bytes(7 << shift))));
        for wrong in
            ["", "MiB", "7MB", "7 MiB", "-7", "+7", "7mib", "0x7", "1.5GiB", "99999999TiB", "7é"]
        {
            assert_eq!(Bytes::parse(wrong), None, "{wrong}");
        }
    }
}
