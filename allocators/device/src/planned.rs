//! Plans: blocks of a recorded program at places that were found for them before it runs.
//!
//! The feature registers one hook and one reason to take the full allocation path, so a pool
//! without a plan does not notice it. When the plan is dropped, the reason goes too.
//!
//! ```text
//!   request ──PlanCursor──▶ hit ──▶ its place, after waits on the device for recorded edges
//!                 │                   │ freed: its work is what a later block at the place follows
//!                 ▼                   ▼
//!               stray            still used by a stream that the record does not know: held
//!                 ▼
//!          caches of the pool
//! ```

mod memory;
#[cfg(test)]
mod tests;

use crate::{
    Block, PoolConfig, Request,
    backing::handle::Funds,
    base::released::Released,
    pool_core::{PoolCore, PoolHook, count},
};
use aquifer_core::{
    Action, MemoryError, PoolStats, Result, Tag, budget::Holding, event::BlockKind,
};
use aquifer_formats::plan::{Plan, PlanCursor};
use aquifer_stream::{Stream, Timeline};
use memory::PlannedMemory;
use std::{
    fs::File,
    io::BufReader,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

/// Takes the plan of a pool's settings out of them. `setting` names where it comes from.
///
/// # Errors
/// [`MemoryError::BadSetting`] for a file that is no valid plan, and beside settings that exclude
/// plans.
pub(crate) fn load(config: &mut PoolConfig, setting: &'static str) -> Result<Option<Arc<Plan>>> {
    let (loaded, path) = (config.loaded_plan.take(), config.plan.as_deref());
    if loaded.is_none() && path.is_none() {
        return Ok(None);
    }
    let bad =
        |value: String, expected| Err(MemoryError::BadSetting { name: setting, value, expected });
    let name =
        |path: Option<&Path>| path.map_or("a plan".into(), |path| path.display().to_string());
    if config.bypass {
        let expected = "none beside bypass, where every block is an allocation of its own";
        return bad(name(path), expected);
    }
    if config.debug.is_on() {
        return bad(name(path), "none beside debugging, which changes the sizes of blocks");
    }
    match (loaded, path) {
        (None, Some(path)) => {
            let opened = File::open(path).map_err(|error| error.to_string());
            let read = opened.and_then(|file| {
                Plan::read_from(BufReader::new(file)).map_err(|error| error.to_string())
            });
            match read {
                Ok(plan) => Ok(Some(Arc::new(plan))),
                Err(why) => bad(format!("{}: {why}", path.display()), "a plan of aquifer plan"),
            }
        }
        (loaded, _) => Ok(loaded),
    }
}

/// Maps the range of a plan, and lets the pool use it.
///
/// # Errors
/// [`MemoryError::OutOfMemory`] if there is no room for the range; the driver's.
pub(crate) fn open(core: &Arc<PoolCore>, plan: Arc<Plan>) -> Result<()> {
    let cursor = PlanCursor::new(Arc::unwrap_or_clone(plan));
    let (kind, dedicated) = (BlockKind::Cached, &core.dedicated);
    let bytes = dedicated.round_up(cursor.plan().top());
    let take = |funds: Funds<'_>| dedicated.allocate_span(kind, bytes, 0, dedicated.export, funds);
    let span = core.with_room(kind, bytes, Tag::NONE, None, take)?;
    count(&core.counters.growths, 1);
    let memory = PlannedMemory::new(core, span, cursor);
    core.add_last_hook(Box::new(PlanHook { memory, is_dropped: AtomicBool::new(false) }));
    Ok(())
}

/// The plan of a pool.
struct PlanHook {
    memory: Arc<PlannedMemory>,
    /// Whether the pool has left the plan.
    is_dropped: AtomicBool,
}

impl PlanHook {
    /// Leaves a plan that no longer matches. Called with no lock held.
    #[cold]
    fn leave(&self, core: &PoolCore) {
        if !self.is_dropped.swap(true, Ordering::Relaxed) {
            core.remove_reason_of_last_hook();
            self.memory.retire();
            core.report_pool(Action::DropPlan, self.memory.bytes(), Tag::NONE);
        }
    }
}

impl PoolHook for PlanHook {
    fn allocate(
        &self,
        core: &PoolCore,
        stream: &Stream,
        request: Request,
    ) -> Result<Option<Block>> {
        // Captured work is launched at other times than the plan knows.
        if self.is_dropped.load(Ordering::Relaxed)
            || core.dedicated.announced.load(Ordering::Relaxed) > 0
        {
            return Ok(None);
        }
        let found = self.memory.allocate(core, stream, &request);
        if found.is_none() && self.memory.is_dropped() {
            self.leave(core);
        }
        Ok(found)
    }

    fn add_to(&self, stats: &mut PoolStats) {
        self.memory.add_to(stats);
    }

    fn holdings(&self) -> Vec<Holding> {
        self.memory.holdings()
    }

    fn poll(&self) -> Result<()> {
        self.memory.poll()
    }

    fn freed_work(&self) -> Vec<(Arc<Timeline>, u64)> {
        self.memory.held_work()
    }

    fn free_bytes(&self) -> u64 {
        if self.memory.is_unused() { self.memory.bytes() } else { 0 }
    }

    fn release_free(&self) -> Released {
        self.memory.release_unused()
    }

    fn close(&self) {
        self.memory.close();
    }
}

impl Drop for PlanHook {
    fn drop(&mut self) {
        self.memory.close();
    }
}
