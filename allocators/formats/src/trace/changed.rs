//! A trace that differs from the recorded one: of a changed program, or over other streams.
//!
//! # A changed program
//! Of the allocations, a share changes, each in one of four ways with equal odds: another block of
//! the same size and stream comes before it and lives as long; it is left out; its size grows by up
//! to 32 KiB; it comes up to eight steps later, but before its free. All else stays in its order.
//!
//! # Over other streams
//! Blocks are assigned to streams in turn, in order of their allocation: the first to stream 0, the
//! next to stream 1, and after stream N − 1 to stream 0 again. Every stream therefore has its share
//! of every phase, and blocks allocated one after another belong to different streams. This is the
//! hardest case for ranges that streams share. The order of the steps and the lifetimes do not
//! change.
//!
//! Uses across streams are preserved. A block that lingers is used by the stream after its own, and
//! one that was freed on another stream is freed on the stream after its own. Other blocks need no
//! ordering, as only their stream uses them. On a single stream nothing crosses: the stream's order
//! completes all uses before the free, so completions are removed.

use super::{Trace, TraceAction, TraceStep};
use aquifer_core::random::SplitMix64;
use std::num::NonZeroU32;

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
            debug_assert_ne!(*number, u32::MAX, "a block is allocated before its other steps");
            step.block = *number;
        }
        self.blocks = blocks;
    }

    /// Distributes the trace over `streams` streams, regardless of its original streams.
    pub fn split(mut self, streams: NonZeroU32) -> Self {
        let streams = streams.get();
        for (number, block) in (0_u32..).zip(&mut self.blocks) {
            let elsewhere = block.freed_on.is_some_and(|stream| stream != block.stream);
            block.stream = number % streams;
            let behind = (block.stream + 1) % streams;
            block.freed_on = block.freed_on.map(|_| if elsewhere { behind } else { block.stream });
            block.lingers &= streams > 1;
        }
        if streams == 1 {
            self.steps.retain(|step| step.action != TraceAction::Complete);
        }
        self.streams = streams;
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace::TraceBlock;

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
            changed.check();
            let same = trace.steps.iter().zip(&changed.steps).take_while(|(a, b)| a == b).count();
            assert!(same < trace.steps.len(), "nothing has changed");
            assert_eq!(changed, trace.clone().changed(per_cent, 3));
        }
    }

    /// A block used by its own stream only, one that lingers, and one that is freed on another
    /// stream.
    const ROWS: &str = "0,a,1,100,0\n0,a,2,200,0\n0,a,3,300,1\n0,f,2,200,0\n0,f,1,100,0\n0,c,1,100,0\n\
                        0,f,3,300,0\n0,c,3,300,0\n0,c,2,200,0\n";

    fn split(streams: u32) -> Trace {
        Trace::from_rows(ROWS).split(NonZeroU32::new(streams).unwrap())
    }

    #[test]
    fn blocks_go_to_the_streams_in_turn_and_keep_their_lives() {
        let whole = Trace::from_rows(ROWS);
        let trace = split(2);
        trace.check();
        let block = |bytes, stream, freed_on, lingers| TraceBlock {
            bytes,
            stream,
            freed_on: Some(freed_on),
            lingers,
        };
        assert_eq!(
            trace.blocks,
            [block(100, 0, 0, false), block(200, 1, 1, true), block(300, 0, 1, false)]
        );
        assert_eq!(
            (trace.streams, &trace.steps, trace.peak_live),
            (2, &whole.steps, whole.peak_live)
        );
        // Exactly the blocks that crossed before still cross.
        for streams in [2, 3, 4, 8] {
            let crosses =
                |trace: &Trace| trace.blocks.iter().map(TraceBlock::crosses).collect::<Vec<_>>();
            assert_eq!(crosses(&split(streams)), crosses(&whole), "{streams}");
        }
    }

    #[test]
    fn on_one_stream_nothing_crosses() {
        let trace = split(1);
        trace.check();
        assert_eq!((trace.streams, trace.crossings(), trace.operations()), (1, 0, 6));
        assert!(trace.steps.iter().all(|step| step.action != TraceAction::Complete));
        assert!(trace.blocks.iter().all(|block| block.stream == 0 && block.freed_on == Some(0)));
    }

    #[test]
    fn blocks_that_are_never_freed_are_not_freed_by_a_split() {
        let trace =
            Trace::from_rows("0,a,1,100,5\n0,a,2,100,5\n").split(NonZeroU32::new(4).unwrap());
        assert_eq!(
            trace.blocks.iter().map(|b| (b.stream, b.freed_on)).collect::<Vec<_>>(),
            [(0, None), (1, None)]
        );
        assert_eq!(trace.streams, 4, "also those that nothing falls to");
    }
}
