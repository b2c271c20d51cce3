//! A result, and that of its peer.

use crate::console::figures::Nanoseconds;
use serde_json::{Value, json};

/// The unit of a result.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Unit {
    /// Nanoseconds per allocation and its free.
    NsPerPair,
    /// Nanoseconds per allocation or free.
    NsPerOperation,
    /// Nanoseconds per driver call.
    NsPerCall,
    /// Microseconds for a single operation.
    Us,
    /// Microseconds per physical handle.
    UsPerHandle,
    /// Microseconds per 2³⁰ bytes.
    UsPerGib,
    /// Milliseconds per 2³⁰ bytes.
    MsPerGib,
    /// Per cent. Not a time.
    Percent,
    /// 10⁹ bytes per second. Such a row stores the nanoseconds per 10⁹ bytes, so that its ratio is
    /// one of times as well.
    GbPerSecond,
    /// Seconds of processor time per 2³⁰ bytes.
    CpuPerGib,
}

impl Unit {
    /// Returns its name in JSON.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::NsPerPair => "ns/pair",
            Self::NsPerOperation => "ns/op",
            Self::NsPerCall => "ns/call",
            Self::Us => "µs",
            Self::UsPerHandle => "µs/handle",
            Self::UsPerGib => "µs/GiB",
            Self::MsPerGib => "ms/GiB",
            Self::Percent => "%",
            Self::GbPerSecond => "GB/s",
            Self::CpuPerGib => "CPU s/GiB",
        }
    }

    /// Returns the length of its unit of time in nanoseconds.
    fn nanoseconds(self) -> f64 {
        match self {
            Self::NsPerPair | Self::NsPerOperation | Self::NsPerCall | Self::Percent => 1.0,
            Self::Us | Self::UsPerHandle | Self::UsPerGib => 1e3,
            Self::MsPerGib => 1e6,
            Self::GbPerSecond | Self::CpuPerGib => 1e9,
        }
    }

    /// Converts a time to this unit.
    pub(crate) fn value(self, ns: f64) -> f64 {
        match self {
            Self::GbPerSecond => self.nanoseconds() / ns,
            _ => ns / self.nanoseconds(),
        }
    }

    /// Formats a time with a suitable prefix, keeping what this unit is per.
    pub(crate) fn of(self, ns: f64) -> String {
        if self == Self::Percent {
            return format!("{ns:.2} %");
        }
        if self == Self::GbPerSecond {
            return format!("{:.1} GB/s", self.value(ns));
        }
        if self == Self::CpuPerGib {
            return format!("{} CPU/GiB", Nanoseconds(ns));
        }
        let per = self.name().find('/').map_or("", |at| &self.name()[at..]);
        format!("{}{per}", Nanoseconds(ns))
    }
}

/// The result that a row is compared with.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Peer {
    /// The name of the peer.
    pub(crate) name: String,
    /// Nanoseconds, per the same quantity as the row's unit.
    pub(crate) ns: f64,
}

/// One result.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Row {
    /// The name of the row.
    pub(crate) name: String,
    /// Nanoseconds, per the quantity of the unit. If the unit is not a time, the value in that
    /// unit.
    pub(crate) ns: f64,
    /// The unit.
    pub(crate) unit: Unit,
    /// The peer in the same run.
    pub(crate) peer: Option<Peer>,
    /// The 95 % confidence interval, in the unit of `ns`.
    pub(crate) interval: Option<[f64; 2]>,
}

/// Rounds to six significant digits, more than the accuracy of any result. Small values keep six
/// digits too, so that the ratio agrees with the printed results.
fn rounded(figure: f64) -> Value {
    json!(format!("{figure:.5e}").parse::<f64>().unwrap_or(figure))
}

impl Row {
    /// Returns its JSON fields in order. The interval is included only if there is one.
    pub(crate) fn fields(&self) -> Vec<(&'static str, Value)> {
        let mut fields = vec![
            ("name", json!(self.name)),
            ("value", rounded(self.value())),
            ("unit", json!(self.unit.name())),
            ("peer", json!(self.peer.as_ref().map(|peer| &peer.name))),
            ("peer_value", json!(self.peer_value().map(rounded))),
            ("ratio", json!(self.ratio().map(rounded))),
        ];
        if let Some(interval) = self.interval {
            fields.push(("interval", json!(interval.map(|ns| rounded(self.unit.value(ns))))));
        }
        fields
    }

    /// Returns the result in its unit.
    pub(crate) fn value(&self) -> f64 {
        self.unit.value(self.ns)
    }

    /// Returns the peer's result in the same unit.
    pub(crate) fn peer_value(&self) -> Option<f64> {
        self.peer.as_ref().map(|peer| self.unit.value(peer.ns))
    }

    /// Returns the ratio of the time to the peer's: below 1 is faster, also for rates.
    pub(crate) fn ratio(&self) -> Option<f64> {
        let peer = self.peer.as_ref().filter(|peer| peer.ns > 0.0)?;
        Some(self.ns / peer.ns)
    }
}

/// Formats a size that is a whole multiple of a unit: `256 B`, `4 KiB`.
pub(crate) fn size(bytes: u64) -> String {
    let units = [(30, "GiB"), (20, "MiB"), (10, "KiB")];
    let unit = units.into_iter().find(|(shift, _)| bytes >= 1 << shift);
    unit.map_or_else(|| format!("{bytes} B"), |(shift, name)| format!("{} {name}", bytes >> shift))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(ns: f64, unit: Unit, peer: Option<f64>) -> Row {
        let peer = peer.map(|ns| Peer { name: "peer".into(), ns });
        Row { name: "row".into(), ns, unit, peer, interval: None }
    }

    #[test]
    fn a_value_is_in_its_unit_and_the_ratio_in_none() {
        let row = row(2_500_000.0, Unit::MsPerGib, Some(500_000.0));
        assert_eq!((row.value(), row.peer_value(), row.ratio()), (2.5, Some(0.5), Some(5.0)));
        assert_eq!(Row { unit: Unit::UsPerHandle, ..row.clone() }.value(), 2500.0);
        assert_eq!(Row { unit: Unit::NsPerPair, ..row }.ratio(), Some(5.0));
    }

    #[test]
    fn a_speed_is_told_as_one_and_its_ratio_is_of_times() {
        let row = row(1e9 / 35.0, Unit::GbPerSecond, Some(1e9 / 2.0));
        assert!(
            (row.value() - 35.0).abs() < 1e-9 && (row.peer_value().unwrap() - 2.0).abs() < 1e-9
        );
        assert!(row.ratio().unwrap() < 0.06, "below 1 is faster");
        assert_eq!(Unit::GbPerSecond.of(row.ns), "35.0 GB/s");
    }

    #[test]
    fn an_interval_is_told_where_there_is_one() {
        let row = Row { interval: Some([1.5, 2.5]), ..row(2.0, Unit::NsPerPair, None) };
        assert_eq!(row.fields().last(), Some(&("interval", json!([1.5, 2.5]))));
        assert_eq!(Row { interval: None, ..row }.fields().len(), 6);
    }

    #[test]
    fn small_figures_keep_their_digits() {
        let fields = row(4096.0 * 3.0e6, Unit::GbPerSecond, Some(2.0e12)).fields();
        let figure =
            |name| fields.iter().find(|(field, _)| *field == name).unwrap().1.as_f64().unwrap();
        assert_eq!((figure("value"), figure("peer_value")), (0.081_380_2, 0.000_5));
        assert!((figure("ratio") * figure("value") / figure("peer_value") - 1.0).abs() < 1e-4);
    }

    #[test]
    fn a_ratio_needs_a_peer_that_took_time() {
        assert_eq!(row(1.0, Unit::NsPerPair, None).ratio(), None);
        assert_eq!(row(1.0, Unit::NsPerPair, Some(0.0)).ratio(), None);
        assert_eq!(row(1.0, Unit::NsPerPair, None).peer_value(), None);
    }

    #[test]
    fn a_person_reads_it_in_the_unit_that_suits() {
        assert_eq!(Unit::NsPerPair.of(29.14), "29.1 ns/pair");
        assert_eq!(Unit::NsPerOperation.of(228_000.0), "228 µs/op");
        assert_eq!(Unit::Us.of(5_120.0), "5.12 µs");
        assert_eq!(Unit::Percent.of(2.106), "2.11 %");
    }
}
