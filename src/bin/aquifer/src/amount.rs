//! Parsing of amounts of memory.

use std::{error, fmt};

/// An amount of memory: bytes, or a multiple of a trace's peak.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) enum Amount {
    /// Bytes.
    Bytes(u64),
    /// A multiple of the peak, above zero.
    OfPeak(f64),
}

/// Why a text is not an amount.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum AmountError {
    /// Zero, or less than one byte.
    Zero,
    /// Too large to be represented.
    TooMuch,
    /// A fraction of a byte: a decimal point without a unit.
    Fraction,
    /// Something else.
    NotAnAmount,
}

impl fmt::Display for AmountError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Zero => "a budget of zero bytes holds nothing",
            Self::TooMuch => "more bytes than can be counted",
            Self::Fraction => {
                "a decimal number needs a unit: 1.5GiB is an amount of memory, 1.5x a multiple of the trace's peak"
            }
            Self::NotAnAmount => {
                "an amount is bytes, as in 4076911904, 500M or 3.9GiB, or a multiple, as in 1.05x"
            }
        })
    }
}

impl error::Error for AmountError {}

/// Suffixes and their factors. A single letter is binary, as in most tools for memory.
const UNITS: [(&str, u64); 17] = [
    ("b", 1),
    ("k", 1 << 10),
    ("m", 1 << 20),
    ("g", 1 << 30),
    ("t", 1 << 40),
    ("kib", 1 << 10),
    ("mib", 1 << 20),
    ("gib", 1 << 30),
    ("tib", 1 << 40),
    ("ki", 1 << 10),
    ("mi", 1 << 20),
    ("gi", 1 << 30),
    ("ti", 1 << 40),
    ("kb", 1_000),
    ("mb", 1_000_000),
    ("gb", 1_000_000_000),
    ("tb", 1_000_000_000_000),
];

impl Amount {
    /// Parses an amount, such as `4076911904`, `500M`, `3.9GiB`, `4 GB` or `1.05x`.
    ///
    /// # Errors
    /// [`AmountError`].
    pub(crate) fn parse(text: &str) -> Result<Self, AmountError> {
        let end = text.find(|c: char| !(c.is_ascii_digit() || c == '.')).unwrap_or(text.len());
        let (number, suffix) = (&text[..end], text[end..].trim_start().to_ascii_lowercase());
        if !number.bytes().any(|b| b.is_ascii_digit()) {
            return Err(AmountError::NotAnAmount);
        }
        if suffix == "x" {
            let factor: f64 = number.parse().map_err(|_| AmountError::NotAnAmount)?;
            return if factor > 0.0 { Ok(Self::OfPeak(factor)) } else { Err(AmountError::Zero) };
        }
        let unit = if suffix.is_empty() {
            1
        } else {
            UNITS.iter().find(|(name, _)| *name == suffix).ok_or(AmountError::NotAnAmount)?.1
        };
        if number.matches('.').count() > 1 {
            return Err(AmountError::NotAnAmount);
        }
        if number.contains('.') && suffix.is_empty() {
            return Err(AmountError::Fraction);
        }
        let bytes = match number.split_once('.') {
            None => number
                .parse::<u64>()
                .ok()
                .and_then(|n| n.checked_mul(unit))
                .ok_or(AmountError::TooMuch)?,
            Some(_) => {
                let scaled =
                    number.parse::<f64>().map_err(|_| AmountError::NotAnAmount)? * unit as f64;
                // Beyond 2^53 the rounding to whole bytes does not matter.
                if scaled >= u64::MAX as f64 {
                    return Err(AmountError::TooMuch);
                }
                scaled as u64
            }
        };
        if bytes == 0 { Err(AmountError::Zero) } else { Ok(Self::Bytes(bytes)) }
    }

    /// Returns the amount in bytes for a trace with this peak. At least 1. Rounded up, so that `1x`
    /// holds the peak.
    pub(crate) fn bytes(self, peak: u64) -> u64 {
        match self {
            Self::Bytes(bytes) => bytes,
            // The cast saturates.
            Self::OfPeak(factor) => ((peak as f64 * factor).ceil() as u64).max(1),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_way_to_write_an_amount_is_read() {
        let table = [
            ("1", 1),
            ("4076911904", 4_076_911_904),
            ("500M", 500 << 20),
            ("500m", 500 << 20),
            ("4G", 4 << 30),
            ("4GiB", 4 << 30),
            ("4 GiB", 4 << 30),
            ("4GB", 4_000_000_000),
            ("1.5KiB", 1536),
            ("2b", 2),
        ];
        for (text, bytes) in table {
            assert_eq!(Amount::parse(text), Ok(Amount::Bytes(bytes)), "{text}");
        }
        assert_eq!(Amount::parse("1.05x"), Ok(Amount::OfPeak(1.05)));
        assert_eq!(Amount::parse("1x").map(|a| a.bytes(1000)), Ok(1000));
        assert_eq!(Amount::parse("1.05x").map(|a| a.bytes(1001)), Ok(1052));
    }

    #[test]
    fn what_is_no_amount_is_refused() {
        for text in [
            "", "x", "-1", "+1", "1.2.3", "1.2.3x", "1e9", "GiB", ".", ".x", "1xx", "1 x 2",
            "0x10", "1PB", "½",
        ] {
            assert_eq!(Amount::parse(text), Err(AmountError::NotAnAmount), "{text}");
        }
        for text in ["1.0", "1.", ".5", "0.0"] {
            assert_eq!(Amount::parse(text), Err(AmountError::Fraction), "{text}");
        }
        assert_eq!(Amount::parse("1.5GiB"), Ok(Amount::Bytes(3 << 29)));
        for text in ["0", "0x", "0.0x", "0G", "0.0001b"] {
            assert_eq!(Amount::parse(text), Err(AmountError::Zero), "{text}");
        }
        for text in ["18446744073709551616", "99999999T", "99999999.5T"] {
            assert_eq!(Amount::parse(text), Err(AmountError::TooMuch), "{text}");
        }
    }
}
