//! Physical memory over the last minutes.

use std::{
    collections::{HashMap, VecDeque},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

/// How far the history goes back.
pub(super) const SPAN: Duration = Duration::from_secs(4 * 60);
/// Most samples of one process, whatever the interval.
const MOST_SAMPLES: usize = 2048;

const BARS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];

/// Samples of each process, by its file.
#[derive(Debug, Default)]
pub(super) struct Histories {
    of: HashMap<PathBuf, VecDeque<(Instant, u64)>>,
}

impl Histories {
    /// Adds a sample.
    pub(super) fn add(&mut self, path: &Path, at: Instant, bytes: u64) {
        let samples = self.of.entry(path.to_owned()).or_default();
        samples.push_back((at, bytes));
        while samples.len() > MOST_SAMPLES
            || samples.front().is_some_and(|(first, _)| at.duration_since(*first) > SPAN)
        {
            samples.pop_front();
        }
    }

    /// Forgets all processes but these.
    pub(super) fn retain(&mut self, is_shown: impl Fn(&Path) -> bool) {
        self.of.retain(|path, _| is_shown(path));
    }

    /// Returns a line of bars up to `now`: each is the maximum of its share of [`SPAN`], relative
    /// to the largest. A moment without a sample is a space, or the sample before it.
    pub(super) fn bars(&self, path: &Path, now: Instant, columns: usize) -> String {
        let mut cells: Vec<Option<u64>> = vec![None; columns];
        for (at, bytes) in self.of.get(path).into_iter().flatten() {
            let age = now.saturating_duration_since(*at);
            let back = (age.as_secs_f64() / SPAN.as_secs_f64() * columns as f64) as usize;
            if let Some(cell) = columns.checked_sub(back + 1).and_then(|at| cells.get_mut(at)) {
                *cell = (*cell).max(Some(*bytes));
            }
        }
        let top = cells.iter().flatten().max().copied().unwrap_or(0).max(1);
        let mut last = None;
        let bars = cells.into_iter().map(|cell| {
            last = cell.or(last);
            last.map_or(' ', |bytes| {
                let step = u128::from(bytes) * (BARS.len() as u128 - 1) / u128::from(top);
                BARS[(step as usize).min(BARS.len() - 1)]
            })
        });
        bars.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bars_show_the_maximum_of_each_share_of_the_time() {
        let (mut all, path) = (Histories::default(), Path::new("p"));
        let start = Instant::now();
        let cell = SPAN / 4;
        assert_eq!(all.bars(path, start, 4), "    ");
        all.add(path, start, 0);
        all.add(path, start + cell / 2, 700);
        all.add(path, start + cell * 2, 350);
        let now = start + cell * 3 + cell / 2;
        assert_eq!(all.bars(path, now, 4), "██▄▄");
        // What is older than the span is forgotten.
        all.add(path, start + SPAN + cell, 700);
        assert_eq!(all.of[path].len(), 2);
        all.retain(|_| false);
        assert_eq!(all.bars(path, now, 2), "  ");
    }

    #[test]
    fn samples_are_bounded() {
        let (mut all, path, start) = (Histories::default(), Path::new("p"), Instant::now());
        for number in 0..10_000 {
            all.add(path, start + Duration::from_millis(number), u64::MAX);
        }
        assert_eq!(all.of[path].len(), MOST_SAMPLES);
        assert!(all.bars(path, start + Duration::from_secs(10), 8).ends_with('█'));
    }
}
