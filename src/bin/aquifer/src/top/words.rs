//! Text, amounts and rates, in few columns.

use console::{Alignment, pad_str, truncate_str};

/// Returns the text in exactly `columns` columns: cut, with an ellipsis, or filled with spaces.
pub(super) fn fit(text: &str, columns: usize, right: bool) -> String {
    let side = if right { Alignment::Right } else { Alignment::Left };
    // A wide character may not fit before the ellipsis.
    pad_str(&truncate_str(text, columns, if columns > 0 { "…" } else { "" }), columns, side, None)
        .into_owned()
}

/// Returns an amount with three digits: `0 B`, `1.50 GiB`, `141 GiB`. At most eight columns.
pub(super) fn bytes(bytes: u64) -> String {
    let (mut value, mut unit) = (bytes as f64, "B");
    for next in ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"] {
        if value < 999.5 {
            break;
        }
        (value, unit) = (value / 1024.0, next);
    }
    let digits = match value {
        _ if unit == "B" => 0,
        ..9.995 => 2,
        ..99.95 => 1,
        _ => 0,
    };
    format!("{value:.digits$} {unit}")
}

/// Returns a count in a second in at most five columns: `0`, `0.5`, `12`, `1.2k`.
pub(super) fn rate(rate: f64) -> String {
    match rate {
        ..0.0005 => "0".to_owned(),
        ..0.95 => format!("{rate:.1}").replace("0.0", "<0.1"),
        ..9.95 => format!("{rate:.1}"),
        ..999.5 => format!("{rate:.0}"),
        ..9_950.0 => format!("{:.1}k", rate / 1e3),
        ..999_500.0 => format!("{:.0}k", rate / 1e3),
        ..999_500_000.0 => format!("{:.0}M", rate / 1e6),
        _ => ">1G".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use console::measure_text_width as width;

    #[test]
    fn texts_fill_exactly_their_columns() {
        for text in ["", "a", "abc", "abcdef", "漢字漢字", "a漢字b"] {
            for columns in 0..10 {
                for right in [false, true] {
                    let fitted = fit(text, columns, right);
                    assert_eq!(width(&fitted), columns, "{text:?} in {columns}: {fitted:?}");
                }
            }
        }
        assert_eq!(fit("abcdef", 4, false), "abc…");
        assert_eq!((&*fit("ab", 4, true), &*fit("漢字x", 4, false)), ("  ab", "漢… "));
    }

    #[test]
    fn amounts_have_three_digits_and_eight_columns() {
        for (amount, text) in [
            (0, "0 B"),
            (999, "999 B"),
            (1000, "0.98 KiB"),
            (1536, "1.50 KiB"),
            (150_000_000_000, "140 GiB"),
            (u64::MAX, "16.0 EiB"),
        ] {
            assert_eq!(bytes(amount), text);
        }
        for shift in 0..64 {
            for amount in [1 << shift, (1_u64 << shift) - 1, (1 << shift) / 3 * 5 / 2] {
                assert!(bytes(amount).len() <= 8, "{amount}: {}", bytes(amount));
            }
        }
    }

    #[test]
    fn rates_have_five_columns() {
        for (value, text) in
            [(0.0, "0"), (0.01, "<0.1"), (0.5, "0.5"), (12.4, "12"), (1234.0, "1.2k")]
        {
            assert_eq!(rate(value), text);
        }
        let mut value = 1e-4;
        while value < 1e20 {
            assert!(rate(value).len() <= 5, "{value}: {}", rate(value));
            value *= 1.07;
        }
    }
}
