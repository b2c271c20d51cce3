//! Snapshots of a pool's history and state, for PyTorch's memory viewer.

use crate::DevicePool;
use aquifer_core::{Event, event::MemoryLocation};
use aquifer_formats::{HeldBlock, MemorySnapshot};

impl DevicePool {
    /// Returns a memory snapshot of this pool: its history as recorded in `events`, and the blocks
    /// that are live after the last of them. [`MemorySnapshot::save`] writes it for PyTorch's
    /// memory viewer, `_memory_viz.py` and `aquifer replay`.
    ///
    /// Blocks that are older than the first event are included if they are raw
    /// [addresses](DevicePool::alloc_raw), of which a pool has a list, or if
    /// [`Debugging::leaks`](crate::Debugging::leaks) is enabled, with the source lines of their
    /// allocations. Without it the pool has no list of its other blocks, nor of graphs' blocks, and
    /// those without an event are missing. Never blocks on the driver.
    ///
    /// ```
    /// use aquifer::{
    ///     DeviceId, DevicePool, PoolConfig, Request, event::{Recorder, RingSink}, sim::Sim,
    /// };
    /// use std::sync::Arc;
    /// let ring = Arc::new(RingSink::new(1 << 10));     // the last thousand events, 64 bytes each
    /// let mut config = PoolConfig::default();
    /// config.recorder = Some(Arc::new(Recorder::new(ring.clone())));
    /// let pool = DevicePool::open(Sim::h200(1).driver(), DeviceId(0), config)?;
    /// let stream = pool.stream()?;
    /// let _kept = pool.alloc(&stream, Request::bytes(1 << 20))?;
    ///
    /// # if cfg!(miri) { return Ok(()); }
    /// let path = std::env::temp_dir().join(format!("memory-{}.pickle", std::process::id()));
    /// pool.snapshot(ring.take()).save(&path)?;         // drop it on https://pytorch.org/memory_viz
    /// # std::fs::remove_file(path)?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn snapshot(&self, events: impl IntoIterator<Item = Event>) -> MemorySnapshot {
        let place = MemoryLocation::Device(self.device());
        let mut snapshot =
            MemorySnapshot::of(events.into_iter().filter(|event| event.place == place));
        for block in self.raw_blocks() {
            snapshot.hold(self.device(), block);
        }
        let leaks = self.leaks().unwrap_or_default();
        for block in leaks.groups().iter().flat_map(|group| &group.blocks) {
            let held = HeldBlock {
                address: block.address,
                bytes: block.bytes,
                stream: block.of_pool,
                tag: block.tag,
                at: Some(block.allocated_at),
            };
            snapshot.hold(self.device(), held);
        }
        let stats = self.stats();
        snapshot.set("budget", self.budget().limit());
        snapshot.set("physical", stats.physical);
        snapshot.set("peak physical", stats.peak_physical);
        snapshot.set("cached", stats.cached);
        snapshot
    }
}
