//! Distributes a trace over another number of streams.
//!
//! # The rule
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

use super::{Trace, TraceAction};
use std::num::NonZeroU32;

impl Trace {
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
