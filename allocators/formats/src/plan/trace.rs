//! The blocks of a trace.

use crate::plan::{block::PlanBlock, error::NEVER};
use crate::trace::{Trace, TraceAction};

impl PlanBlock {
    /// Returns the blocks of a trace, whose steps are those of the plan. A block that another
    /// stream still uses when it is freed lives until its completion.
    ///
    /// ```
    /// use aquifer_formats::trace::Trace;
    /// use aquifer_formats::plan::{NEVER, PlanBlock};
    /// let rows = "t_us,op,id,bytes,stream\n0,a,1,9,0\n1,a,2,7,1\n2,f,1,9,0\n2,c,1,9,0\n";
    /// let trace = Trace::from_reader(rows.as_bytes(), None)?;
    /// let block = PlanBlock { bytes: 9, first: 0, end: 2, stream: 0, shared: false };
    /// let other = PlanBlock { bytes: 7, first: 1, end: NEVER, stream: 1, shared: false };
    /// assert_eq!(PlanBlock::of_trace(&trace), [block, other]);
    /// # Ok::<(), aquifer_formats::trace::TraceError>(())
    /// ```
    #[must_use]
    pub fn of_trace(trace: &Trace) -> Vec<Self> {
        let mut blocks = Vec::with_capacity(trace.blocks.len());
        for (number, step) in trace.steps.iter().enumerate() {
            // A trace with more steps is refused, since two of its blocks begin at the last.
            let number = u32::try_from(number).unwrap_or(NEVER).min(NEVER - 1);
            let facts = trace.blocks[step.block as usize];
            match step.action {
                TraceAction::Allocate => blocks.push(Self {
                    bytes: facts.bytes,
                    first: number,
                    end: NEVER,
                    stream: facts.stream,
                    shared: facts.crosses(),
                }),
                TraceAction::Free if facts.lingers => {}
                TraceAction::Free | TraceAction::Complete => {
                    blocks[step.block as usize].end = number;
                }
            }
        }
        blocks
    }
}
