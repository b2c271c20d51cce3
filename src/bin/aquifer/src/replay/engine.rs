//! Plays a trace, step by step.
//!
//! | row | what happens |
//! |---|---|
//! | `a` on s | allocate for s; s writes the whole block |
//! | `f` | s reads the block; so does U, after s, if there is a U; the block is freed |
//! | `c`, or the end | U reads it again, and its use ends |
//!
//! - U is a second stream that uses the block: the one after s. The allocator makes it wait for s.
//! - Only blocks that linger have a U: those whose `c` row is not directly after their `f` row.
//! - A block freed on a stream other than its own is also read on that stream.
//! - When the allocator would have to wait for memory, the oldest open use may be ended before its
//!   `c` row: see [`EndOldest`](super::uses::EndOldest).
//!
//! ```text
//!   host   a(s)        f(s)                                  c
//!   s      write ───── read │ free: the next block may begin on s
//!   U                       └─wait─ read ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ read │ only now may another block have the bytes
//! ```

use super::{
    uses::{OpenUse, OpenUses},
    work::{Spot, Work},
};
use aquifer_benches::console::progress::ProgressLine;
use aquifer_core::{MemoryError, Result};
use aquifer_device::{Block, Request, Resource};
use aquifer_driver::Access;
use aquifer_formats::trace::{Trace, TraceAction, TraceBlock};
use aquifer_stream::{Stream, Use};
use std::time::{Duration, Instant};

/// Whether the allocator learns about uses by other streams.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Order {
    /// The allocator is informed which streams use a block.
    Told,
    /// The allocator is not informed.
    Ignored,
}

/// How far a trace was played.
#[derive(Debug)]
pub(crate) struct Played {
    /// Successful allocations and frees.
    pub(crate) operations: u64,
    /// Blocks that another stream used.
    pub(crate) crossings: u64,
    /// Time from the first step to the last.
    pub(crate) took: Duration,
    /// The error that stopped it.
    pub(crate) failure: Option<MemoryError>,
}

/// Returns the second stream that uses blocks of `stream`. `streams` is the result of
/// [`streams_needed`].
fn other_stream(stream: u32, streams: u32) -> u32 {
    (stream + 1) % streams.max(2)
}

/// Returns how many streams are needed to play a trace: those of the trace, but at least two if
/// blocks linger.
pub(crate) fn streams_needed(trace: &Trace) -> u32 {
    if trace.blocks.iter().any(|block| block.lingers) {
        trace.streams.max(2)
    } else {
        trace.streams
    }
}

/// Plays one trace with one allocator.
pub(crate) struct Engine<'a, R: Resource + ?Sized, W: Work> {
    trace: &'a Trace,
    streams: &'a [Stream],
    allocator: &'a R,
    work: &'a W,
    uses: &'a OpenUses,
    order: Order,
    live: Vec<Option<Block>>,
    /// For each block that lingers, the number under which its use is held.
    numbers: Vec<u64>,
    crossings: u64,
}

impl<'a, R: Resource + ?Sized, W: Work> Engine<'a, R, W> {
    /// Creates an engine at the first step. `streams` has [`streams_needed`] entries.
    pub(crate) fn new(
        trace: &'a Trace,
        streams: &'a [Stream],
        allocator: &'a R,
        work: &'a W,
        uses: &'a OpenUses,
        order: Order,
    ) -> Self {
        let mut live = Vec::new();
        live.resize_with(trace.blocks.len(), || None);
        let numbers = vec![0; trace.blocks.len()];
        Self { trace, streams, allocator, work, uses, order, live, numbers, crossings: 0 }
    }

    /// Plays the whole trace, or as much of it as there is memory for. Remaining uses and blocks
    /// stay as they are: see [`Engine::clear`].
    pub(crate) fn play(&mut self, progress: &mut ProgressLine) -> Played {
        /// Steps between two progress updates.
        const STRIDE: usize = 1024;
        let trace = self.trace;
        let (mut operations, mut failure) = (0, None);
        let begun = Instant::now();
        'steps: for (number, steps) in trace.steps.chunks(STRIDE).enumerate() {
            for (place, step) in steps.iter().enumerate() {
                self.work.at(*step);
                let taken = match step.action {
                    TraceAction::Allocate => self.allocate(step.block),
                    TraceAction::Free => self.free(step.block, (number * STRIDE + place) as u64),
                    TraceAction::Complete => self.complete(step.block),
                };
                match taken {
                    Ok(()) => operations += u64::from(step.action != TraceAction::Complete),
                    Err(error) => {
                        failure = Some(error);
                        break 'steps;
                    }
                }
            }
            progress.at(((number + 1) * STRIDE) as u64, trace.steps.len() as u64);
        }
        Played { operations, crossings: self.crossings, took: begun.elapsed(), failure }
    }

    /// Ends open uses and frees live blocks, as the end of the program would.
    pub(crate) fn clear(&mut self) -> Result<()> {
        while let Some(held) = self.uses.take_oldest() {
            held.end(self.work)?;
        }
        for (index, slot) in (0_u32..).zip(self.live.iter_mut()) {
            if let Some(block) = slot.take() {
                let home = &self.streams[self.trace.blocks[index as usize].stream as usize];
                self.work.read(index, Spot::of(&block), home)?;
                drop(block);
            }
        }
        Ok(())
    }

    #[inline]
    fn allocate(&mut self, index: u32) -> Result<()> {
        let facts = self.trace.blocks[index as usize];
        let home = &self.streams[facts.stream as usize];
        let block = self.allocator.allocate(home, Request::bytes(facts.bytes))?;
        self.work.write(index, Spot::of(&block), home)?;
        self.live[index as usize] = Some(block);
        Ok(())
    }

    #[inline]
    fn free(&mut self, index: u32, number: u64) -> Result<()> {
        // The trace frees each block once, after its allocation.
        let Some(block) = self.live[index as usize].take() else { return Ok(()) };
        let facts = self.trace.blocks[index as usize];
        self.work.read(index, Spot::of(&block), &self.streams[facts.stream as usize])?;
        if facts.crosses() {
            self.cross(index, &block, facts, number)?;
        }
        drop(block);
        Ok(())
    }

    /// Performs the uses of other streams before the free.
    fn cross(&mut self, index: u32, block: &Block, facts: TraceBlock, number: u64) -> Result<()> {
        self.crossings += 1;
        let spot = Spot::of(block);
        let begin = |stream: &Stream| -> Result<Option<Use>> {
            let open = match self.order {
                Order::Told => Some(block.prepare(stream, Access::Read)?),
                Order::Ignored => None,
            };
            self.work.read(index, spot, stream)?;
            Ok(open)
        };
        let elsewhere = facts.freed_on.filter(|stream| *stream != facts.stream);
        let elsewhere =
            elsewhere.map(|stream| begin(&self.streams[stream as usize])).transpose()?;
        if let Some(open) = elsewhere.flatten() {
            open.finish()?;
        }
        if facts.lingers {
            let stream =
                self.streams[other_stream(facts.stream, self.trace.streams) as usize].clone();
            let open = begin(&stream)?;
            self.numbers[index as usize] = number;
            self.uses.hold(number, OpenUse { block: index, spot, stream, open });
        }
        Ok(())
    }

    fn complete(&mut self, index: u32) -> Result<()> {
        match self.uses.take(self.numbers[index as usize]) {
            Some(held) => held.end(self.work),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::replay::{
        bench::at_rest,
        uses::EndOldest,
        work::{Idle, Verdict},
    };
    use aquifer_core::Budget;
    use aquifer_device::{DevicePool, PoolConfig};
    use aquifer_driver::{DeviceId, sim::Sim};
    use std::sync::{Arc, Mutex};

    /// Work that records each call: operation, block and stream.
    #[derive(Debug, Default)]
    struct Notes(Mutex<Vec<(char, u32, u32)>>);

    impl Work for Notes {
        fn write(&self, block: u32, _: Spot, stream: &Stream) -> Result<()> {
            self.0.lock().unwrap().push(('w', block, stream.number()));
            Ok(())
        }
        fn read(&self, block: u32, _: Spot, stream: &Stream) -> Result<()> {
            self.0.lock().unwrap().push(('r', block, stream.number()));
            Ok(())
        }
        fn verdict(&self) -> Result<Verdict> {
            Ok(Verdict::default())
        }
    }

    /// Plays rows. Returns the recorded work, how far it went and how many uses ended early.
    fn played(rows: &str, budget: u64, order: Order) -> (Vec<(char, u32, u32)>, Played, u64) {
        let trace = crate::replay::trace_of(rows);
        let sim = Sim::h200(1).symbolic();
        let (uses, work) = (Arc::new(OpenUses::new()), Arc::new(Notes::default()));
        let mut config = PoolConfig::with_budget(Budget::new("a test", budget));
        config.wait = Duration::from_millis(1);
        let pool = DevicePool::open(sim.driver(), DeviceId(0), config).unwrap();
        let relief = Arc::new(EndOldest { uses: uses.clone(), work: work.clone() });
        let _registration = pool.budget().on_need(&relief);
        let streams: Vec<_> = (0..streams_needed(&trace)).map(|_| pool.stream().unwrap()).collect();
        let mut engine = Engine::new(&trace, &streams, &pool, &*work, &uses, order);
        let played = engine.play(&mut ProgressLine::silent());
        work.0.lock().unwrap().push(('|', 0, 0));
        engine.clear().unwrap();
        drop(engine);
        let left = at_rest(&pool, &streams).unwrap();
        assert_eq!(
            (left.blocks, left.pending, left.physical),
            (0, 0, 0),
            "no use is open any more"
        );
        let done = std::mem::take(&mut *work.0.lock().unwrap());
        (done, played, uses.early())
    }

    const AMPLE: u64 = 1 << 30;
    const END: (char, u32, u32) = ('|', 0, 0);

    #[test]
    fn a_block_is_written_after_its_allocation_and_read_before_its_free() {
        let rows = "0,a,1,100,0\n0,a,2,100,0\n0,f,1,100,0\n0,c,1,100,0\n";
        let (done, played, _) = played(rows, AMPLE, Order::Told);
        assert_eq!(done, [('w', 0, 0), ('w', 1, 0), ('r', 0, 0), END, ('r', 1, 0)]);
        assert_eq!((played.operations, played.crossings), (3, 0));
    }

    #[test]
    fn a_block_that_lingers_is_used_on_the_next_stream_until_its_completion() {
        let rows = "0,a,1,100,0\n0,f,1,100,0\n0,a,2,100,0\n0,c,1,100,0\n";
        let (done, played, early) = played(rows, AMPLE, Order::Told);
        // Stream 1 exists for this use only: the trace has only stream 0.
        assert_eq!(
            done,
            [('w', 0, 0), ('r', 0, 0), ('r', 0, 1), ('w', 1, 0), ('r', 0, 1), END, ('r', 1, 0)]
        );
        assert_eq!((played.operations, played.crossings, early), (3, 1, 0));
    }

    #[test]
    fn the_last_stream_lends_to_the_first() {
        let rows = "0,a,1,100,0\n0,a,2,100,1\n0,a,3,100,2\n0,f,3,100,2\n";
        let (done, ..) = played(rows, AMPLE, Order::Told);
        assert_eq!(done[3..5], [('r', 2, 2), ('r', 2, 0)]);
        // A block without a completion row is completed at the end.
        assert_eq!(done[5..7], [END, ('r', 2, 0)]);
    }

    #[test]
    fn a_block_freed_on_another_stream_is_read_there_too() {
        let rows = "0,a,1,100,0\n0,f,1,100,1\n0,c,1,100,1\n";
        let (done, played, _) = played(rows, AMPLE, Order::Told);
        assert_eq!(done, [('w', 0, 0), ('r', 0, 0), ('r', 0, 1), END]);
        assert_eq!(played.crossings, 1);
    }

    #[test]
    fn a_pool_that_would_have_to_wait_ends_the_oldest_use_early() {
        let size = 4 << 20;
        let rows = format!(
            "0,a,1,{size},0\n0,f,1,{size},0\n0,a,2,{size},0\n0,f,2,{size},0\n0,a,3,{size},0\n\
             0,c,2,{size},0\n0,c,1,{size},0\n"
        );
        let (done, now, early) = played(&rows, size * 2, Order::Told);
        assert!(now.failure.is_none(), "{:?}", now.failure);
        assert_eq!(early, 1);
        // Block 0, the older one, is read once more before block 2 gets its bytes. At its own
        // completion row nothing is left to do.
        let third = done.iter().position(|&note| note == ('w', 2, 0)).unwrap();
        assert_eq!(done[third - 1], ('r', 0, 1));
        assert_eq!(done.iter().filter(|&&note| note == ('r', 0, 1)).count(), 2);
    }

    #[test]
    fn a_trace_that_does_not_fit_stops_and_leaves_nothing_behind() {
        let size = 4 << 20;
        let rows = format!("0,a,1,{size},0\n0,a,2,{size},0\n0,a,3,{size},0\n");
        let (done, now, _) = played(&rows, size * 2, Order::Told);
        assert_eq!(now.operations, 2);
        assert!(matches!(now.failure, Some(MemoryError::OutOfMemory(_))), "{:?}", now.failure);
        assert_eq!(done, [('w', 0, 0), ('w', 1, 0), END, ('r', 0, 0), ('r', 1, 0)]);
    }

    #[test]
    fn without_order_the_allocator_is_told_nothing() {
        let rows = "0,a,1,100,0\n0,f,1,100,0\n0,a,2,100,0\n0,c,1,100,0\n";
        let trace = crate::replay::trace_of(rows);
        let sim = Sim::h200(1).symbolic();
        let pool = DevicePool::open(sim.driver(), DeviceId(0), PoolConfig::default()).unwrap();
        let streams: Vec<_> = (0..2).map(|_| pool.stream().unwrap()).collect();
        let uses = OpenUses::new();
        let mut engine = Engine::new(&trace, &streams, &pool, &Idle, &uses, Order::Ignored);
        assert!(engine.play(&mut ProgressLine::silent()).failure.is_none());
        engine.clear().unwrap();
        assert_eq!(pool.stats().fences, 0);
        assert_eq!(pool.driver().calls().get(aquifer_driver::Call::StreamWaitEvent), 0);
    }
}
