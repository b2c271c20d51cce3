//! Formatting of numbers, and the median.

use std::fmt;

/// A count with thousands separators: `63,608`.
#[derive(Clone, Copy, Debug)]
pub struct Count(pub u64);

impl fmt::Display for Count {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let digits = self.0.to_string();
        let mut text = String::with_capacity(digits.len() * 4 / 3 + 1);
        for (place, digit) in digits.chars().enumerate() {
            if place > 0 && (digits.len() - place).is_multiple_of(3) {
                text.push(',');
            }
            text.push(digit);
        }
        f.pad(&text)
    }
}

/// A count with its noun in the singular or the plural: `1 stream`, `2 streams`.
#[derive(Clone, Copy, Debug)]
pub struct Of(pub u64, pub &'static str);

impl fmt::Display for Of {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(count, noun) = self;
        f.pad(&format!("{} {noun}{}", Count(*count), if *count == 1 { "" } else { "s" }))
    }
}

/// A time in nanoseconds, formatted in a suitable unit with three significant digits.
#[derive(Clone, Copy, Debug)]
pub struct Nanoseconds(pub f64);

impl fmt::Display for Nanoseconds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (mut value, mut unit) = (self.0, "ns");
        for next in ["µs", "ms", "s"] {
            // 999.5 would be written as 1000.
            if value < 999.5 {
                break;
            }
            (value, unit) = (value / 1000.0, next);
        }
        let digits = if value < 9.995 {
            2
        } else if value < 99.95 {
            1
        } else {
            0
        };
        f.pad(&format!("{value:.digits$} {unit}"))
    }
}

/// Returns the median: the middle value, or the mean of the two middle values.
pub fn median(mut all: Vec<f64>) -> Option<f64> {
    all.sort_by(f64::total_cmp);
    let (upper, lower) = (all.get(all.len() / 2)?, all.get((all.len() - 1) / 2)?);
    Some((upper + lower) / 2.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_in_the_middle() {
        assert_eq!(median(vec![]), None);
        assert_eq!(median(vec![3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median(vec![4.0, 1.0]), Some(2.5));
    }

    #[test]
    fn thousands_stand_apart() {
        for (n, text) in [
            (0, "0"),
            (999, "999"),
            (1000, "1,000"),
            (63_608, "63,608"),
            (4_076_911_904, "4,076,911,904"),
        ] {
            assert_eq!(Count(n).to_string(), text);
        }
        assert_eq!(format!("[{:>8}]", Count(1234)), "[   1,234]");
        assert_eq!(
            (Of(1, "stream").to_string(), Of(2000, "stream").to_string()),
            ("1 stream".into(), "2,000 streams".into())
        );
    }

    #[test]
    fn times_have_three_digits_and_their_unit() {
        let table = [
            (0.0, "0.00 ns"),
            (9.994, "9.99 ns"),
            (41.26, "41.3 ns"),
            (999.4, "999 ns"),
            (999.6, "1.00 µs"),
            (40_000.0, "40.0 µs"),
            (2.1e9, "2.10 s"),
        ];
        for (ns, text) in table {
            assert_eq!(Nanoseconds(ns).to_string(), text);
        }
    }
}
