//! One pass over a trace that records a memory snapshot.

use super::{
    bench::ReplayBench,
    engine::Engine,
    uses::{EndOldest, OpenUses},
    work::Idle,
};
use aquifer_benches::console::progress::ProgressLine;
use aquifer_core::{Event, EventSink, Recorder, Result};
use aquifer_formats::MemorySnapshot;
use std::sync::{Arc, Mutex, PoisonError};

/// A sink that stores every event. A ring would lose the beginning of the trace.
#[derive(Default, Debug)]
struct Kept(Mutex<Vec<Event>>);

impl Kept {
    fn take(&self) -> Vec<Event> {
        std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl EventSink for Kept {
    fn record(&self, event: &Event) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(*event);
    }
}

impl ReplayBench<'_> {
    /// Plays the trace once, as far as it fits, and returns the allocator's history and its final
    /// state.
    ///
    /// # Errors
    /// If the allocator or its streams cannot be created, or cannot be brought to rest.
    pub(crate) fn record(
        &self,
        budget: Option<u64>,
        progress: &mut ProgressLine,
    ) -> Result<MemorySnapshot> {
        let session = self.place.begin();
        let (uses, work) = (Arc::new(OpenUses::new()), Arc::new(Idle));
        let relief = Arc::new(EndOldest { uses: uses.clone(), work: work.clone() });
        let kept = Arc::new(Kept::default());
        let recorder = Arc::new(Recorder::new(kept.clone()));
        let (placer, streams) = self.open(&session, budget, &relief, Some(recorder))?;
        let _relieved = placer.relieved_by(&relief);
        let mut engine =
            Engine::new(self.trace, &streams, placer.resource(), &*work, &uses, self.order);
        engine.play(progress);
        let mut snapshot = MemorySnapshot::of(kept.take());
        snapshot.set("replayed by", self.allocator.name());
        snapshot.set("held from the driver at the most", placer.resource().stats().peak_physical);
        engine.clear()?;
        Ok(snapshot)
    }
}
