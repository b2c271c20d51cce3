//! Axes: where a value stands, and which values have a tick.

use crate::row::Unit;
use plotters::coord::{
    combinators::{IntoLogRange, LogCoord},
    ranged1d::{BoldPoints, Ranged},
    types::RangedCoordf64,
};

/// Values that differ by this factor or more stand on a logarithmic axis.
const DECADES: f64 = 50.0;
/// The widest logarithmic axis. Smaller values stand at its beginning.
const WIDEST: f64 = 1e12;

/// An axis.
pub(super) enum Scale {
    Linear(RangedCoordf64),
    Log(LogCoord<f64>),
}

impl Scale {
    /// Returns an axis for these values: logarithmic if they span decades, else linear from zero.
    pub(super) fn of(values: impl Iterator<Item = f64>) -> Self {
        let finite: Vec<f64> = values.filter(|value| value.is_finite()).collect();
        let least = finite.iter().copied().fold(f64::INFINITY, f64::min);
        let most = finite.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        if least > 0.0 && most / least >= DECADES && most.is_finite() {
            // A bar of the least value is visible too.
            let below = 10f64.powi((least * 0.7).log10().floor() as i32);
            return Self::log(below.max(most / WIDEST), most);
        }
        let (least, most) = (least.min(0.0), most.max(0.0));
        Self::Linear((least..if most > least { most } else { least + 1.0 }).into())
    }

    /// Returns an axis for numbers of threads, bytes and the like, which are positive.
    pub(super) fn of_quantities(least: f64, most: f64) -> Self {
        if most / least >= 8.0 {
            Self::log(least, most)
        } else {
            Self::Linear((least..most).into())
        }
    }

    fn log(least: f64, most: f64) -> Self {
        // A hair below, so that rounding takes no tick from the beginning.
        Self::Log((least * (1.0 - 1e-9)..most).log_scale().into())
    }

    /// Returns the place of a value between two places. A value off the axis stands at its end.
    pub(super) fn place(&self, value: f64, between: (i32, i32)) -> i32 {
        match self {
            Self::Linear(axis) => {
                let range = axis.range();
                axis.map(&value.clamp(range.start, range.end), between)
            }
            Self::Log(axis) => {
                let range = axis.range();
                axis.map(&value.clamp(range.start, range.end), between)
            }
        }
    }

    /// Returns the place where bars begin: at zero, or at the end of a logarithmic axis.
    pub(super) fn origin(&self, between: (i32, i32)) -> i32 {
        match self {
            Self::Linear(_) => self.place(0.0, between),
            Self::Log(_) => between.0,
        }
    }

    /// Returns the values with a tick, at most about `most`.
    pub(super) fn ticks(&self, most: usize) -> Vec<f64> {
        match self {
            Self::Linear(axis) => axis.key_points(BoldPoints(most)),
            Self::Log(axis) => axis.key_points(BoldPoints(most)),
        }
    }

    /// Returns whether it is logarithmic.
    pub(super) fn is_log(&self) -> bool {
        matches!(self, Self::Log(_))
    }
}

/// Returns the label of a tick: `10 µs`, `2.5 GB/s`. `value` is what [`Unit::on_axis`] returns.
pub(super) fn tick(unit: Unit, value: f64) -> String {
    let (mut value, mut name) = (value, "ns");
    match unit {
        Unit::Percent => name = "%",
        Unit::GbPerSecond => name = "GB/s",
        _ => {
            for next in ["µs", "ms", "s"] {
                // Rounding errors of ticks are below this.
                if value.abs() < 999.999 {
                    break;
                }
                (value, name) = (value / 1000.0, next);
            }
        }
    }
    if value.abs() < 1e-9 {
        return format!("0 {name}");
    }
    // Three significant digits, without zeros at the end.
    let digits = (2 - value.abs().log10().floor() as i32).clamp(0, 12) as usize;
    let text = format!("{value:.digits$}");
    let text =
        if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.') } else { &text };
    format!("{text} {name}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_that_span_decades_stand_on_a_logarithmic_axis() {
        let wide = Scale::of([5.0, 40_000.0].into_iter());
        assert!(wide.is_log());
        let ticks: Vec<_> =
            wide.ticks(8).into_iter().map(|value| tick(Unit::NsPerPair, value)).collect();
        assert_eq!(ticks, ["1 ns", "10 ns", "100 ns", "1 µs", "10 µs"]);
        assert!(!Scale::of([5.0, 100.0].into_iter()).is_log());
        assert!(!Scale::of([-1.0, 5.0, 4e6].into_iter()).is_log(), "no logarithm");
        assert!(!Scale::of([0.0, 5.0, 4e6].into_iter()).is_log(), "no logarithm");
    }

    #[test]
    fn a_place_is_always_on_the_axis() {
        let axes = [
            Scale::of([1.0, 1e300].into_iter()),
            Scale::of([1e-300, 1e300].into_iter()),
            Scale::of([-3.0, 7.0].into_iter()),
            Scale::of([0.0].into_iter()),
            Scale::of([].into_iter()),
        ];
        for axis in &axes {
            for value in [-1e300, -1.0, 0.0, 1.0, 1e300, f64::INFINITY] {
                let place = axis.place(value, (100, 200));
                assert!((100..=200).contains(&place), "{value}: {place}");
            }
            assert!(axis.ticks(8).len() <= 32, "{:?}", axis.ticks(8).len());
        }
    }

    #[test]
    fn bars_begin_at_zero_where_there_is_one() {
        assert_eq!(Scale::of([-1.0, 3.0].into_iter()).origin((0, 400)), 100);
        assert_eq!(Scale::of([1.0, 3.0].into_iter()).origin((0, 400)), 0);
    }

    #[test]
    fn ticks_are_written_shortly() {
        let table = [
            (Unit::NsPerPair, 0.0, "0 ns"),
            (Unit::NsPerPair, 0.05, "0.05 ns"),
            (Unit::Us, 2_500.0, "2.5 µs"),
            (Unit::MsPerGib, 1_000_000.000_000_1, "1 ms"),
            (Unit::MsPerGib, 999.999_999_9, "1 µs"),
            (Unit::GbPerSecond, 40.0, "40 GB/s"),
            (Unit::Percent, 2.5, "2.5 %"),
            (Unit::NsPerPair, -200.0, "-200 ns"),
        ];
        for (unit, value, text) in table {
            assert_eq!(tick(unit, value), text);
        }
    }
}
