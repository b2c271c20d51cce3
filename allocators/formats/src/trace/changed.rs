//! A trace of a program that differs a little from the one that was recorded.
//!
//! # The rule
//! Of the allocations, a share changes, each in one of four ways with equal odds: another block of
//! the same size and stream comes before it and lives as long; it is left out; its size grows by up
//! to 32 KiB; it comes up to eight steps later, but before its free. All else stays in its order.

use super::{Trace, TraceAction, TraceStep};
use aquifer_core::random::SplitMix64;

/// The most steps by which an allocation comes later.
const LATEST: usize = 8;

impl Trace {
    /// Changes `per_cent` of the allocations. Equal seeds change the same ones.
    ///
    /// ```
    /// use aquifer_formats::trace::Trace;
    /// let rows = "t_us,op,id,bytes,stream\n0,a,1,4096,0\n0,a,2,512,0\n7,f,1,4096,0\n";
    /// let trace = Trace::from_reader(rows.as_bytes(), None)?;
    /// assert_eq!(trace.clone().changed(0, 1), trace);
    /// assert_ne!(trace.clone().changed(100, 1), trace);
    /// # Ok::<(), aquifer_formats::trace::TraceError>(())
    /// ```
    #[must_use]
    pub fn changed(mut self, per_cent: u32, seed: u64) -> Self {
        let mut random = SplitMix64::new(seed);
        let mut below = |end: u64| random.next_u64() % end;
        let recorded = self.blocks.len() as u32;
        // For each block, whether it is left out, and the number of its double.
        let mut is_gone = vec![false; self.blocks.len()];
        let mut doubles = vec![None; self.blocks.len()];
        // Steps by their places. A step that comes later gets the place of another one, behind it.
        let mut placed: Vec<(usize, TraceStep)> = Vec::with_capacity(self.steps.len());
        for (place, &step) in self.steps.iter().enumerate() {
            let block = step.block as usize;
            if is_gone[block] {
                continue;
            }
            if step.action != TraceAction::Allocate {
                placed.push((place, step));
                if let Some(double) = doubles[block] {
                    placed.push((place, TraceStep { block: double, ..step }));
                }
                continue;
            }
            if below(100) >= u64::from(per_cent) {
                placed.push((place, step));
                continue;
            }
            match below(4) {
                0 => {
                    let double = self.blocks.len() as u32;
                    self.blocks.push(self.blocks[block]);
                    doubles[block] = Some(double);
                    placed.extend([(place, TraceStep { block: double, ..step }), (place, step)]);
                }
                1 => is_gone[block] = true,
                2 => {
                    self.blocks[block].bytes += 512 * (1 + below(64));
                    placed.push((place, step));
                }
                _ => {
                    let next = &self.steps[place + 1..(place + LATEST).min(self.steps.len())];
                    let own = next.iter().position(|other| other.block == step.block);
                    let most = own.unwrap_or(next.len()) as u64;
                    placed.push((place + below(most + 1) as usize, step));
                }
            }
        }
        // Stable: what comes later is behind the step whose place it has, or before it if that is
        // its own place.
        placed.sort_by_key(|(place, _)| *place);
        self.steps = placed.into_iter().map(|(_, step)| step).collect();
        self.renumber(recorded);
        self.count();
        self
    }

    /// Puts the blocks into the order of their allocations.
    fn renumber(&mut self, recorded: u32) {
        let mut numbers = vec![u32::MAX; self.blocks.len().max(recorded as usize)];
        let mut blocks = Vec::with_capacity(self.blocks.len());
        for step in &mut self.steps {
            let number = &mut numbers[step.block as usize];
            if step.action == TraceAction::Allocate {
                // There are at most twice as many as in the record.
                *number = blocks.len() as u32;
                blocks.push(self.blocks[step.block as usize]);
            }
            step.block = *number;
        }
        self.blocks = blocks;
    }

    /// Counts what the fields say about the steps.
    fn count(&mut self) {
        let (mut live, mut peak, mut frees) = (0_u64, 0, 0);
        for step in &self.steps {
            let bytes = self.blocks[step.block as usize].bytes;
            match step.action {
                TraceAction::Allocate => live += bytes,
                TraceAction::Free => {
                    live -= bytes;
                    frees += 1;
                }
                TraceAction::Complete => {}
            }
            peak = peak.max(live);
        }
        (self.peak_live, self.live_at_end, self.frees) = (peak, live, frees);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_changed_trace_is_valid_and_changes_as_much_as_was_asked() {
        let rows: String = (0..2000)
            .map(|n| {
                let bytes = 100 + n % 7 * 1000;
                let free = if n >= 5 {
                    format!("0,f,{0},{1},0\n", n - 4, 100 + (n - 5) % 7 * 1000)
                } else {
                    String::new()
                };
                format!("0,a,{},{bytes},0\n{free}", n + 1)
            })
            .collect();
        let trace = Trace::from_rows(&rows);
        for per_cent in [1, 20, 100] {
            let changed = trace.clone().changed(per_cent, 3);
            let (mut next, mut live) = (0, std::collections::BTreeSet::new());
            for step in &changed.steps {
                match step.action {
                    TraceAction::Allocate => {
                        assert_eq!(step.block, next);
                        next += 1;
                        assert!(live.insert(step.block));
                    }
                    TraceAction::Free => assert!(live.remove(&step.block)),
                    TraceAction::Complete => {}
                }
            }
            assert_eq!(next as usize, changed.blocks.len());
            let same = trace.steps.iter().zip(&changed.steps).take_while(|(a, b)| a == b).count();
            assert!(same < trace.steps.len(), "nothing has changed");
            assert_eq!(changed, trace.clone().changed(per_cent, 3));
        }
    }
}
