//! Curves over time as pyramids: a level of single changes or of short runs of them, and levels of
//! four merged points each above it.

/// The most points of the finest level if each is a single change.
const MOST_SINGLE: u64 = 1 << 18;
/// The most points of the finest level if changes are merged.
const MOST_MERGED: u64 = 1 << 17;
/// Points that a level merges into one of the next level.
const BY: usize = 4;
/// A level of at most as many points has none above it.
const COARSEST: usize = 256;

/// What a curve shows.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Series {
    /// Requested bytes of allocated blocks.
    Live,
    /// Bytes of freed blocks whose last use is not over.
    Pending,
    /// Physical bytes that no block occupies.
    Cached,
    /// Physical bytes.
    Physical,
    /// The limit of physical bytes. Not a number while there is none.
    Limit,
    /// What the device has in use outside of the pool.
    Outside,
    /// Pinned host memory, which is not part of the device's.
    Pinned,
    /// Free bytes between blocks.
    Free,
    /// The largest free extent.
    LargestFree,
}

impl Series {
    /// Returns the name in reports.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Live => "live",
            Self::Pending => "pending",
            Self::Cached => "cached",
            Self::Physical => "physical",
            Self::Limit => "limit",
            Self::Outside => "outside",
            Self::Pinned => "pinned",
            Self::Free => "free",
            Self::LargestFree => "largest_free",
        }
    }
}

/// One level of all curves.
#[derive(Debug)]
pub(crate) struct CurveLevel {
    /// The time of the first merged point, for all curves.
    pub(crate) times: Vec<f64>,
    /// The columns of each curve.
    pub(crate) columns: Vec<LevelColumns>,
}

/// The values of one curve in one level.
#[derive(Default, Debug)]
pub(crate) struct LevelColumns {
    /// The least of the merged points. Empty if each point is a single change.
    pub(crate) min: Vec<f64>,
    /// The greatest of the merged points. Empty if each point is a single change.
    pub(crate) max: Vec<f64>,
    /// The last of the merged points.
    pub(crate) last: Vec<f64>,
}

impl LevelColumns {
    /// Returns the column of least values.
    pub(crate) fn least(&self) -> &[f64] {
        if self.min.is_empty() { &self.last } else { &self.min }
    }

    /// Returns the column of greatest values.
    pub(crate) fn greatest(&self) -> &[f64] {
        if self.max.is_empty() { &self.last } else { &self.max }
    }
}

/// Curves that share their times.
#[derive(Debug)]
pub(crate) struct CurveSet {
    /// What each curve shows.
    pub(crate) series: Vec<Series>,
    /// The levels, the finest first. At least one.
    pub(crate) levels: Vec<CurveLevel>,
    /// The changes that a point of the finest level stands for.
    pub(crate) merged: u64,
}

impl CurveSet {
    /// Returns the levels from one on. The last level is always among them.
    pub(crate) fn levels_from(&self, finest: usize) -> &[CurveLevel] {
        &self.levels[finest.min(self.levels.len() - 1)..]
    }

    /// Returns the bytes of these levels in a page, before compression.
    pub(crate) fn bytes_from(&self, finest: usize) -> usize {
        let numbers = |level: &CurveLevel| {
            let columns = level
                .columns
                .iter()
                .map(|column| column.min.len() + column.max.len() + column.last.len());
            level.times.len() + columns.sum::<usize>()
        };
        self.levels_from(finest).iter().map(numbers).sum::<usize>() * 8
    }

    /// Returns the first, the last, the least and the greatest value of a curve.
    pub(crate) fn ends(&self, curve: usize) -> Option<[f64; 4]> {
        let columns = self.levels.first()?.columns.get(curve)?;
        let fold = |values: &[f64], pick: fn(f64, f64) -> f64| values.iter().copied().reduce(pick);
        Some([
            *columns.last.first()?,
            *columns.last.last()?,
            fold(columns.least(), f64::min)?,
            fold(columns.greatest(), f64::max)?,
        ])
    }
}

/// Collects the points of curves.
#[derive(Debug)]
pub(crate) struct CurveBuilder {
    series: Vec<Series>,
    merged: u64,
    within: u64,
    finest: CurveLevel,
}

impl CurveBuilder {
    /// Creates a builder for this many points.
    pub(crate) fn new(series: Vec<Series>, points: u64) -> Self {
        let mut merged = 1;
        while points > MOST_SINGLE && points / merged > MOST_MERGED {
            merged *= BY as u64;
        }
        let columns = series.iter().map(|_| LevelColumns::default()).collect();
        Self { series, merged, within: 0, finest: CurveLevel { times: Vec::new(), columns } }
    }

    /// Adds a point: the value of each curve.
    pub(crate) fn push(&mut self, time: f64, values: impl IntoIterator<Item = f64>) {
        let begins = self.within == 0;
        if begins {
            self.finest.times.push(time);
        }
        let columns = self.finest.columns.iter_mut();
        for (column, value) in columns.zip(values) {
            if begins {
                column.last.push(value);
                if self.merged > 1 {
                    column.min.push(value);
                    column.max.push(value);
                }
            } else if let (Some(min), Some(max), Some(last)) =
                (column.min.last_mut(), column.max.last_mut(), column.last.last_mut())
            {
                (*min, *max, *last) = (min.min(value), max.max(value), value);
            }
        }
        debug_assert!(self.finest.columns.iter().all(|c| c.last.len() == self.finest.times.len()));
        self.within = (self.within + 1) % self.merged;
    }

    /// Builds the levels above the finest.
    pub(crate) fn finish(self) -> CurveSet {
        let mut levels = vec![self.finest];
        while let Some(below) = levels.last().filter(|level| level.times.len() > COARSEST) {
            let times = below.times.iter().step_by(BY).copied().collect();
            let columns = below.columns.iter().map(|column| LevelColumns {
                min: merge(column.least(), f64::min),
                max: merge(column.greatest(), f64::max),
                last: merge(&column.last, |_, last| last),
            });
            let columns = columns.collect();
            levels.push(CurveLevel { times, columns });
        }
        CurveSet { series: self.series, levels, merged: self.merged }
    }
}

fn merge(values: &[f64], pick: fn(f64, f64) -> f64) -> Vec<f64> {
    values.chunks(BY).filter_map(|part| part.iter().copied().reduce(pick)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_level_has_the_extremes_and_the_end_of_the_points_below() {
        for points in [1_u64, 1000, 300_000] {
            let mut builder = CurveBuilder::new(vec![Series::Live, Series::Free], points);
            let value = |n: u64| n.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 40;
            for n in 0..points {
                builder.push(n as f64, [value(n) as f64, n as f64]);
            }
            let set = builder.finish();
            let all: Vec<f64> = (0..points).map(|n| value(n) as f64).collect();
            let least = all.iter().copied().reduce(f64::min);
            let greatest = all.iter().copied().reduce(f64::max);
            assert_eq!(set.merged > 1, points > MOST_SINGLE);
            for level in &set.levels {
                let column = &level.columns[0];
                assert_eq!(level.times.len(), column.last.len());
                assert_eq!(column.least().iter().copied().reduce(f64::min), least);
                assert_eq!(column.greatest().iter().copied().reduce(f64::max), greatest);
                assert_eq!(column.last.last(), all.last());
                assert_eq!((level.times[0], level.columns[1].least()[0]), (0.0, 0.0));
            }
            assert!(set.levels.last().unwrap().times.len() <= COARSEST);
            assert_eq!(
                set.ends(1),
                Some([
                    set.levels[0].columns[1].last[0],
                    points as f64 - 1.0,
                    0.0,
                    points as f64 - 1.0
                ])
            );
        }
    }
}
