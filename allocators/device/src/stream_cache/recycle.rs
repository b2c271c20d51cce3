//! Recycling of caches whose stream is gone while their pool stays open.
//!
//! A cache can serve another stream when nothing refers to its last one any more:
//!
//! - all blocks have been returned, and the cache holds no memory;
//! - the [`Timeline`] has no other owner. A lease owns a reference to it. So does each shared free
//!   range whose work is not known to be done, each wait, and each walk over the cache that is
//!   under way.
//!
//! It is therefore enough to be the last owner of the timeline. A thread that still has the cache
//! from the pool's list finds it empty, or bound to another stream of the same pool. Both are
//! correct.

use super::{Binding, CacheHost, CacheUsage, StreamCache, UNBOUND};
use crate::base::{addresses::AddressDirectory, part_bounds::PartBounds};
use aquifer_stream::Timeline;
use std::sync::{Arc, PoisonError};

/// An idle cache, and its index in its pool.
pub(crate) struct IdleCache {
    pub(crate) cache: &'static StreamCache,
    pub(crate) number: usize,
}

impl StreamCache {
    /// Returns whether the stream has no lease while the cache has free memory.
    pub(crate) fn is_abandoned(&self) -> bool {
        self.with(|s| s.timeline().is_some_and(|t| !t.is_leased()) && s.heap.free_bytes() > 0)
    }

    /// Unbinds the cache from its stream if nothing refers to the stream any more. Returns the
    /// timeline, to be dropped where driver calls are allowed: the drop destroys its events, and
    /// the stream if the pool owns it.
    pub(crate) fn unbind_if_idle(&'static self) -> Option<(IdleCache, Timeline)> {
        let (number, timeline, binding) = self.with(|s| {
            let unleased = s.binding.as_ref().is_some_and(|v| v.open && !v.timeline.is_leased());
            if !unleased || s.heap.managed_bytes() > 0 || !s.pending.is_empty() || s.collecting > 0
            {
                return None;
            }
            debug_assert_eq!(s.blocks(), 0, "blocks without memory");
            debug_assert!(s.raw.is_empty() && s.unsettled.is_empty(), "a block outlives its cache");
            let Binding { pool, directory, number, timeline, open } = s.binding.take()?;
            match Arc::try_unwrap(timeline) {
                Ok(timeline) => {
                    (s.last_free, s.needs_follow_up) = (0, false);
                    Some((number, timeline, (pool, directory)))
                }
                Err(timeline) => {
                    s.binding = Some(Binding { pool, directory, number, timeline, open });
                    None
                }
            }
        })?;
        drop(binding);
        Some((IdleCache { cache: self, number }, timeline))
    }
}

impl IdleCache {
    /// Binds the cache to another stream of the same pool. Its counters are kept.
    pub(crate) fn bind(
        self,
        pool: Arc<dyn CacheHost>,
        directory: Arc<AddressDirectory>,
        timeline: &Arc<Timeline>,
    ) -> &'static StreamCache {
        self.cache.bind(pool, directory, timeline.clone(), self.number);
        self.cache
    }

    /// Makes the cache available to all pools, after its own pool was closed.
    pub(crate) fn retire(self) {
        self.cache.with(|s| {
            s.usage = CacheUsage::default();
            s.bounds = PartBounds::default();
            s.line_owner = 0;
            s.write_line();
        });
        UNBOUND.lock().unwrap_or_else(PoisonError::into_inner).push(self.cache);
    }
}

#[cfg(test)]
mod tests {
    use crate::{DevicePool, PoolConfig, Request};
    use aquifer_core::Result;
    use aquifer_driver::{
        DeviceId,
        sim::{DeviceConfig, Sim, SimConfig},
    };
    use aquifer_stream::{Stream, StreamLifetime};

    #[expect(unsafe_code, reason = "takes in a stream, and ends it")]
    fn with_retired_stream(
        pool: &DevicePool,
        work: impl FnOnce(&Stream) -> Result<()>,
    ) -> Result<()> {
        let raw = pool.driver().stream_create(DeviceId(0), 0)?;
        // SAFETY: 1. The stream was created just now. 2. It is retired below.
        let stream = unsafe { pool.streams().adopt(raw, StreamLifetime::Retired) }?;
        work(&stream)?;
        stream.retire()?;
        // SAFETY: 1. The stream was created above, and has been retired.
        unsafe { pool.driver().stream_destroy(raw) }?;
        Ok(())
    }

    #[test]
    fn caches_are_recycled_when_streams_retire() -> Result<()> {
        for device in [DeviceConfig::h200(), DeviceConfig::without_virtual_memory()] {
            let mut config = SimConfig::h200(1);
            config.devices = vec![device];
            let pool = DevicePool::open(
                Sim::new(config).symbolic().driver(),
                DeviceId(0),
                PoolConfig::default(),
            )?;
            let mut retained = Vec::new();
            for nth in 0..10_000 {
                with_retired_stream(&pool, |stream| {
                    let block = pool.alloc(stream, Request::bytes(1 + nth * 997 % 100_000))?;
                    if nth < 5 {
                        retained.push((block.into_raw(), stream.number()));
                    }
                    Ok(())
                })?;
            }
            // The caches with a block that is still out, the last cache, and the one before it.
            let caches = pool.core().caches(&pool.core().scratch.begin()).len();
            assert!(caches <= retained.len() + 2, "{caches} caches");
            // A block's cache is still found by its address.
            for (address, stream) in retained {
                assert_eq!(pool.from_raw(address)?.home().number(), stream);
            }
        }
        Ok(())
    }
}
