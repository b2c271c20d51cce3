//! Shells whose stream is gone while their pool goes on: they wait there for the next stream.
//!
//! A shell may serve another stream when nobody can come to it for the last one any more: its
//! blocks are home, its cache is empty, and nobody else holds the stream's account. A lease holds
//! that, and so does every range in the commons, every wait and every look at the cache which is
//! under way, as long as the stream's work is not known to be done. So it is enough to be the last
//! who holds it, and a thread that has met the shell in a list of the pool's finds it empty, or at
//! the service of another stream of the same pool, which is as good.

use super::{Account, Home, RETIRED, Serving};
use crate::{physical::Physical, pool::Inner};
use aquifer_core::scratch::{Bump, List, list};
use aquifer_stream::Timeline;
use std::sync::{Arc, PoisonError};

/// A shell without a stream, and its number among the caches of its pool.
pub(crate) struct Vacant {
    pub(crate) home: &'static Home,
    pub(crate) number: usize,
}

impl Home {
    /// Whether nobody leases its stream, while something is free here.
    pub(crate) fn is_abandoned(&self) -> bool {
        self.with(|s| s.timeline().is_some_and(|t| !t.is_leased()) && s.heap.free_bytes() > 0)
    }

    /// Lets go of its stream if nobody can come here for it any more. What was noted of the stream
    /// is answered, to be dropped where driver calls may be made: that destroys its events, and the
    /// stream if it is the pool's own.
    pub(crate) fn vacate(&'static self) -> Option<(Vacant, Timeline)> {
        let (number, timeline, pool) = self.with(|s| {
            let leaves = s.serving.as_ref().is_some_and(|v| v.open && !v.timeline.is_leased());
            if !leaves || s.heap.managed_bytes() > 0 || !s.pending.is_empty() || s.settling > 0 {
                return None;
            }
            let Serving { pool, number, timeline, open } = s.serving.take()?;
            match Arc::try_unwrap(timeline) {
                Ok(timeline) => {
                    (s.last_free, s.attention) = (0, false);
                    Some((number, timeline, pool))
                }
                Err(timeline) => {
                    s.serving = Some(Serving { pool, number, timeline, open });
                    None
                }
            }
        })?;
        drop(pool);
        Some((Vacant { home: self, number }, timeline))
    }
}

impl Vacant {
    /// Serves another stream of the same pool. What was counted goes on.
    pub(crate) fn serve(self, pool: &Arc<Inner>, timeline: &Arc<Timeline>) -> &'static Home {
        self.home.serve(pool.clone(), timeline.clone(), self.number);
        self.home
    }

    /// The pool is closed: any other may have it.
    pub(crate) fn retire(self) {
        self.home.with(|s| s.account = Account::default());
        RETIRED.lock().unwrap_or_else(PoisonError::into_inner).push(self.home);
    }
}

impl Inner {
    /// Lets go of streams that nobody leases any more and whose work is known to be done, so that
    /// there are never more caches than streams at once. Ends their events, and streams that are
    /// the pool's own.
    pub(crate) fn vacate(&self) {
        let pass = self.scratch.begin();
        let homes = self.homes(&pass);
        if homes.is_empty() {
            return;
        }
        if let Physical::Mapped(mapped) = &self.physical {
            mapped.pool_together(&abandoned(&pass, &homes), 0);
            mapped.forget_done();
        }
        for home in homes {
            if let Some((vacant, timeline)) = home.vacate() {
                self.vacant().push(vacant);
                drop(timeline);
            }
        }
    }

    /// Brings what is free in the caches of streams that nobody leases any more to all others; on
    /// devices that cannot map to `heir`. Answers with what that got, and how often memory was
    /// taken in hand. No driver call.
    pub(crate) fn share_abandoned(
        &self,
        bump: &Bump,
        homes: &[&'static Home],
        heir: &'static Home,
    ) -> (u64, u64) {
        let abandoned = abandoned(bump, homes);
        if abandoned.is_empty() {
            return (0, 0);
        }
        match &self.physical {
            Physical::Mapped(mapped) => {
                mapped.pool_together(&abandoned, 0);
                (0, 1)
            }
            Physical::Plain(plain) => (plain.inherit(heir, &abandoned), 0),
        }
    }
}

fn abandoned<'s>(bump: &'s Bump, homes: &[&'static Home]) -> List<'s, &'static Home> {
    list(bump, homes.iter().copied().filter(|home| home.is_abandoned()))
}

#[cfg(test)]
mod tests {
    use crate::{DevicePool, PoolConfig, Request};
    use aquifer_core::Result;
    use aquifer_driver::{
        DeviceId,
        sim::{DeviceConfig, Sim, SimConfig},
    };
    use aquifer_stream::{Life, Stream};

    #[expect(unsafe_code, reason = "takes in a stream, and ends it")]
    fn on_a_stream_of_its_own(
        pool: &DevicePool,
        work: impl FnOnce(&Stream) -> Result<()>,
    ) -> Result<()> {
        let raw = pool.driver().stream_create(DeviceId(0), 0)?;
        // SAFETY: 1. made just now. 2. retired below.
        let stream = unsafe { pool.streams().adopt(raw, Life::Retired) }?;
        work(&stream)?;
        stream.retire()?;
        // SAFETY: 1. made above, and retired.
        unsafe { pool.driver().stream_destroy(raw) }?;
        Ok(())
    }

    #[test]
    fn a_pool_has_no_more_caches_than_streams_at_once_however_many_have_lived() -> Result<()> {
        for device in [DeviceConfig::h200(), DeviceConfig::without_virtual_memory()] {
            let mut config = SimConfig::h200(1);
            config.devices = vec![device];
            let pool = DevicePool::open(
                Sim::new(config).symbolic().driver(),
                DeviceId(0),
                PoolConfig::default(),
            )?;
            let mut kept = Vec::new();
            for nth in 0..10_000 {
                on_a_stream_of_its_own(&pool, |stream| {
                    let block = pool.alloc(stream, Request::bytes(1 + nth * 997 % 100_000))?;
                    if nth < 5 {
                        kept.push((block.into_raw(), stream.number()));
                    }
                    Ok(())
                })?;
            }
            // Those of which a block is out, the last, and the one before it.
            let caches = pool.inner().homes(&pool.inner().scratch.begin()).len();
            assert!(caches <= kept.len() + 2, "{caches} caches");
            // A block finds its own by its address still.
            for (address, stream) in kept {
                assert_eq!(pool.from_raw(address)?.home().number(), stream);
            }
        }
        Ok(())
    }
}
