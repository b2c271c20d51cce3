//! The peak of a pool's live bytes: of all streams together, at no cost where a cache serves a
//! request.
//!
//! The *parts* of a pool are its caches, the memory of its plan, and what is live outside of them.
//! Each part has two numbers beside its live bytes:
//!
//! - its *highest*: the maximum of its live bytes since the last settlement. No other part changes
//!   it;
//! - its *limit*: how far its live bytes may rise. A settlement sets it, and the part itself
//!   changes it together with the *reserve*, a number of bytes that all parts share.
//!
//! An allocation compares the live bytes of its cache with a window. Within it there is nothing
//! else to do.
//!
//! - Above the highest, the highest rises. Above the limit, the cache takes bytes out of the
//!   reserve and raises its limit by them. Where the reserve has too little, the request leaves
//!   the fast path, and all parts settle before the caller gets the block. Threads that come
//!   together for that settle once.
//! - Far below the limit, the cache lowers its limit and gives the bytes to the reserve. So does a
//!   free, since a stream may free all that it has and allocate nothing for a while.
//!
//! After both, the limit exceeds the live bytes by a 32nd of the reserve, or by half of [`SLACK`].
//! This is the demarcation protocol (D. Barbará-Millá and H. Garcia-Molina, The VLDB Journal 3,
//! 1994): each part keeps to a limit of its own, so the sum keeps to the sum of the limits, and no
//! part has to know another one.
//!
//! A *settlement* locks all parts at once, so that it reads one instant, and
//!
//! 1. sums the live bytes of all parts, which the pool has at this instant;
//! 2. raises the *known* peak to this sum;
//! 3. sets each highest to the live bytes of its part;
//! 4. sets the *allowed* sum: the known peak, and [`SLACK`] for each cache and the plan in use. A
//!    part is in use if it has live bytes, or had some since the last settlement;
//! 5. sets the limits: the live bytes, and an equal share of half of what the sum lacks to the
//!    known peak. A cache and the plan get half of [`SLACK`] at least. A part that is not in use
//!    gets a limit of 0;
//! 6. sets the reserve to the rest of the allowed sum.
//!
//! # What is reported, and its error
//!
//! The reported peak is the maximum of the known peak and of the sum of the highest, this being at
//! most the allowed sum, now and at each settlement since the last reset. With `n` streams that
//! have live blocks, a plan with live blocks counted as one more,
//!
//! > true peak ≤ reported peak ≤ true peak + `n` × 1 MiB.
//!
//! A block counts as live from an instant within the call that allocates it: where it is counted in
//! its cache, or, if that took the cache above its limit, where this is raised or all parts settle.
//!
//! - *Not below.* Between two settlements, no part is above its highest, so the sum is not above
//!   theirs. No part is above its limit either, and limits and reserve together have the allowed
//!   sum: a part lowers its limit before it gives bytes, and raises it after it has taken them. At
//!   a settlement the sum itself is taken.
//! - *Not above.* The known peak is a sum of one instant, and the allowed sum exceeds it by `n` ×
//!   [`SLACK`].
//!
//! Neither needs that the threads agree on an order: what a thread allocates or frees meanwhile, it
//! does before or after the instant in which all parts are locked.
//!
//! If a single part is in use, it has no limit, and the reserve has nothing: its highest is the
//! peak, without an error, and another part settles. So one stream settles once, at its first
//! block. A cache whose stream is gone may keep its limit until the next settlement: no block takes
//! it there. After a reset the known peak is the sum at that instant, and the same holds.
//!
//! # Which memory
//!
//! | pool | parts |
//! |---|---|
//! | caches serve blocks | each cache; a plan; stable, parkable, reserved and graph memory |
//! | [bypass](crate::PoolConfig::bypass) | the driver's allocations and the same memory |
//! | [debugging](crate::PoolConfig::debug) | what users have, and the same memory |
//!
//! In the last two, blocks outside of caches are all that counts, and the peak is exact.

use crate::{
    base::{
        part_bounds::{LimitReserve, PartBounds, SLACK},
        usage::{JointPeak, LiveBytes},
    },
    stream_cache::{CacheLock, CacheState, StreamCache},
};
use aquifer_stream::Spin;
use std::{
    mem,
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, RwLock, Weak},
};

/// All caches of a pool, also idle ones.
pub(crate) type CacheList = RwLock<Vec<&'static StreamCache>>;

/// A part of a pool that counts under a lock of its own, outside of the caches. It settles by
/// [`PoolPeaks::settle`], which it calls without that lock. Its drop takes no lock and makes no
/// driver call: the last reference may be dropped under the lock of an owner of
/// [`LiveUsage`](crate::base::usage::LiveUsage).
pub(crate) trait PeakPart: Send + Sync {
    /// Calls `visit` under the lock of the part, with its live bytes.
    fn with_bounds(&self, visit: &mut dyn FnMut(LiveBytes, &mut PartBounds));
}

/// The peak of the live bytes of all parts of a pool together.
///
/// Locks in this order: an owner of [`LiveUsage`](crate::base::usage::LiveUsage), this, the part
/// with a lock of its own, the list of caches, caches.
pub(crate) struct PoolPeaks {
    /// The part with a lock of its own, if there is one.
    part: OnceLock<Weak<dyn PeakPart>>,
    /// The caches of the pool.
    caches: Arc<CacheList>,
    /// Whether blocks in caches are the pool's live blocks.
    counts_caches: bool,
    reserve: LimitReserve,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// A sum that the pool had at one instant since the last reset: the true peak is not below.
    known: LiveBytes,
    /// What was reported at the last settlement: the true peak until then is not above.
    reported: LiveBytes,
    /// What is live outside of the caches.
    outside: LiveBytes,
    outside_bounds: PartBounds,
    /// What limits and reserve have together since the last settlement, or [`LiveBytes::MAX`] if
    /// there was at most one part: the sum of the highest is exact since then.
    allowed: LiveBytes,
    /// The locks of the caches during a settlement; empty between two of them.
    locks: Vec<&'static CacheLock>,
    #[cfg(test)]
    settlements: u64,
}

/// How far parts may rise after a settlement.
#[derive(Default)]
struct Rises {
    /// A cache, or the plan. `None` if there is one part or none: it has no limit.
    of_part: Option<LiveBytes>,
    /// What is outside of them.
    of_outside: Option<LiveBytes>,
    /// The reserve of all.
    reserve: LiveBytes,
}

/// Sums over the parts of a pool.
#[derive(Default)]
struct Sums {
    now: LiveBytes,
    highest: LiveBytes,
    /// The number of parts in use.
    parts: u64,
}

impl PoolPeaks {
    /// Creates the peaks of a pool without memory. Without `counts_caches`, all that is live is
    /// counted by [`JointPeak::add`].
    pub(crate) fn new(caches: Arc<CacheList>, counts_caches: bool) -> Arc<Self> {
        Arc::new(Self {
            part: OnceLock::new(),
            caches,
            counts_caches,
            reserve: LimitReserve::default(),
            state: Mutex::default(),
        })
    }

    /// Adds the part with a lock of its own, which has no live bytes yet. A pool has at most one.
    pub(crate) fn add_part(&self, part: Weak<dyn PeakPart>) {
        let added = self.part.set(part);
        debug_assert!(added.is_ok(), "a second part");
    }

    /// Returns the part with a lock of its own.
    fn part(&self) -> Option<Arc<dyn PeakPart>> {
        self.part.get().and_then(Weak::upgrade)
    }

    /// Returns what the parts take the rises of their limits from.
    pub(crate) fn reserve(&self) -> &LimitReserve {
        &self.reserve
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the sum of all parts into account. To be called with no lock of a part.
    pub(crate) fn settle(&self) {
        let part = self.part();
        self.settle_with(&mut self.state(), part.as_deref(), false);
    }

    /// Takes what is live in a cache into account. To be called with no lock of a part, by each
    /// thread that may have taken the cache above its limit, before it hands the block out. Settles
    /// only if the cache is above its limit and the reserve has too little.
    pub(crate) fn settle_cache(&self, cache: &StreamCache) {
        self.settle_unless(|| cache.with(CacheState::admit));
    }

    /// As [`PoolPeaks::settle_cache`], for the part with a lock of its own.
    pub(crate) fn settle_part(&self) {
        let part = self.part();
        self.settle_unless(|| {
            let mut is_within = false;
            if let Some(part) = &part {
                part.with_bounds(&mut |now, bounds| {
                    is_within = bounds.admit(now, &self.reserve);
                });
            }
            is_within
        });
    }

    fn settle_unless(&self, admit: impl Fn() -> bool) {
        if admit() {
            return;
        }
        let part = self.part();
        let mut state = self.state();
        // Several threads come here when the reserve ends, and one settlement is enough for all.
        if !admit() {
            self.settle_with(&mut state, part.as_deref(), false);
        }
    }

    /// Sets the peak to what is live now.
    pub(crate) fn reset(&self) {
        let part = self.part();
        self.settle_with(&mut self.state(), part.as_deref(), true);
    }

    fn settle_with(&self, state: &mut State, part: Option<&dyn PeakPart>, is_reset: bool) {
        match part {
            Some(part) => part.with_bounds(&mut |now, bounds| {
                self.settle_locked(state, Some((now, bounds)), is_reset);
            }),
            None => self.settle_locked(state, None, is_reset),
        }
    }

    /// `part` is locked.
    fn settle_locked(
        &self,
        state: &mut State,
        part: Option<(LiveBytes, &mut PartBounds)>,
        is_reset: bool,
    ) {
        let caches = self.caches.read().unwrap_or_else(PoisonError::into_inner);
        // The list keeps its memory, so that a settlement allocates none.
        let mut locks = mem::take(&mut state.locks);
        locks.extend(caches.iter().map(|cache| cache.lock()));
        let mut locked = Spin::lock_all(&locks);
        let mut sums = Sums::default();
        sums.add(state.outside, &state.outside_bounds);
        let outside_parts = sums.parts;
        if let Some((now, bounds)) = &part {
            sums.add(*now, bounds);
        }
        if self.counts_caches {
            locked.for_each(|cache| {
                cache.flush_last();
                sums.add(cache.live_bytes(), &cache.bounds);
            });
        }
        sums.highest = sums.highest.min(state.allowed);
        let rises = state.settle(&sums, outside_parts, is_reset);
        self.reserve.set(rises.reserve);
        state.outside_bounds.settle(state.outside, rises.of_outside);
        if let Some((now, bounds)) = part {
            bounds.settle(now, rises.of_part);
        }
        locked.for_each(|cache| {
            let now = cache.live_bytes();
            if self.counts_caches {
                cache.bounds.settle(now, rises.of_part);
            } else {
                cache.bounds.lift();
            }
        });
        drop(locked);
        locks.clear();
        state.locks = locks;
    }

    /// Returns the peak. Calls `visit` for each cache under its lock. The last freed block may not
    /// be in the heap.
    pub(crate) fn peak_with(&self, mut visit: impl FnMut(&mut CacheState)) -> LiveBytes {
        let part = self.part();
        let state = self.state();
        let mut highest = state.outside_bounds.highest;
        if let Some(part) = &part {
            part.with_bounds(&mut |_, bounds| highest += bounds.highest);
        }
        for cache in self.caches.read().unwrap_or_else(PoisonError::into_inner).iter() {
            cache.with_unflushed(|cache| {
                if self.counts_caches {
                    highest += cache.bounds.highest;
                }
                visit(cache);
            });
        }
        state.reported.max(highest.min(state.allowed))
    }

    /// Returns the number of settlements so far.
    #[cfg(test)]
    pub(crate) fn settlements(&self) -> u64 {
        self.state().settlements
    }
}

impl JointPeak for PoolPeaks {
    fn add(&self, bytes: LiveBytes) {
        let mut state = self.state();
        state.outside += bytes;
        let now = state.outside;
        if !state.outside_bounds.admit(now, &self.reserve) {
            self.settle_with(&mut state, self.part().as_deref(), false);
        }
    }

    fn remove(&self, bytes: LiveBytes) {
        let mut state = self.state();
        state.outside -= bytes;
        let now = state.outside;
        if state.outside_bounds.has_surplus(now) {
            state.outside_bounds.admit(now, &self.reserve);
        }
    }

    fn peak(&self) -> LiveBytes {
        self.peak_with(|_| ())
    }
}

impl Sums {
    fn add(&mut self, now: LiveBytes, bounds: &PartBounds) {
        self.now += now;
        self.highest += bounds.highest;
        self.parts += u64::from(bounds.is_in_use(now));
    }
}

impl State {
    /// Takes the sums of all parts into account, of which `outside_parts` are outside of the caches
    /// and the plan.
    fn settle(&mut self, sums: &Sums, outside_parts: u64, is_reset: bool) -> Rises {
        let &Sums { now, highest, parts } = sums;
        if is_reset {
            (self.known, self.reported) = (now, now);
        } else {
            let is_exact = self.allowed == LiveBytes::MAX;
            let exact = if is_exact { highest.max(now) } else { now };
            self.known = self.known.max(exact);
            self.reported = self.reported.max(highest).max(now);
        }
        debug_assert!(now.is_within(self.known), "the pool has more than its peak");
        debug_assert!(self.known.is_within(self.reported), "reports less than is known");
        #[cfg(test)]
        {
            self.settlements += 1;
        }
        if parts <= 1 {
            self.allowed = LiveBytes::MAX;
            return Rises::default();
        }
        let slack_parts = parts - outside_parts;
        let lacking = self.known.above(now);
        let share = lacking.map(|bytes| bytes / 2 / parts);
        let of_part = share.map(|bytes| bytes.max(SLACK / 2));
        let given =
            of_part.map(|bytes| bytes * slack_parts) + share.map(|bytes| bytes * outside_parts);
        self.allowed = self.known.map(|bytes| bytes + SLACK * slack_parts);
        debug_assert!((now + given).is_within(self.allowed), "the limits exceed what is allowed");
        let reserve = self.allowed.above(now + given);
        Rises { of_part: Some(of_part), of_outside: Some(share), reserve }
    }
}

#[cfg(test)]
mod tests {
    use crate::{Block, DevicePool, PoolConfig, Request};
    use aquifer_core::{Result, random::SplitMix64};
    use aquifer_driver::{DeviceId, sim::Sim};
    use aquifer_stream::Stream;

    const MIB: u64 = 1 << 20;

    fn pool(streams: usize) -> Result<(DevicePool, Vec<Stream>)> {
        let driver = Sim::h200(1).symbolic().driver();
        let pool = DevicePool::open(driver, DeviceId(0), PoolConfig::default())?;
        let streams = (0..streams).map(|_| pool.stream()).collect::<Result<_>>()?;
        Ok((pool, streams))
    }

    fn settlements(pool: &DevicePool) -> u64 {
        pool.core().peaks.settlements()
    }

    #[test]
    fn a_single_stream_settles_once() -> Result<()> {
        let (pool, streams) = pool(1)?;
        let mut live = Vec::new();
        for n in 0..1000 {
            live.push(pool.alloc(&streams[0], Request::bytes(1 + n * 1000))?);
        }
        assert_eq!((settlements(&pool), pool.stats().peak_requested), (1, 499_501_000));
        Ok(())
    }

    #[test]
    fn streams_that_grow_by_small_blocks_settle_once_a_mebibyte() -> Result<()> {
        let (pool, streams) = pool(4)?;
        let mut live: Vec<Block> = Vec::new();
        for _ in 0..4096 {
            for stream in &streams {
                live.push(pool.alloc(stream, Request::bytes(4096))?);
            }
        }
        // 16 MiB a stream.
        let settled = settlements(&pool);
        assert!(settled <= 4 * 16 + 8, "{settled} settlements");
        Ok(())
    }

    #[test]
    fn streams_whose_blocks_come_and_go_rarely_settle() -> Result<()> {
        let (pool, streams) = pool(16)?;
        let mut random = SplitMix64::new(7);
        let mut below = |end: u64| random.next_u64() % end;
        let mut live: Vec<Vec<Block>> = streams.iter().map(|_| Vec::new()).collect();
        let mut rounds = Vec::new();
        for _ in 0..8 {
            let before = settlements(&pool);
            for _ in 0..10_000 {
                let at = below(16) as usize;
                let blocks = &mut live[at];
                // About 100 blocks live on each stream.
                if below(200) < 200_u64.saturating_sub(blocks.len() as u64) {
                    let bytes = 1 + below(MIB);
                    blocks.push(pool.alloc(&streams[at], Request::bytes(bytes))?);
                } else {
                    let gone = below(blocks.len() as u64) as usize;
                    drop(blocks.swap_remove(gone));
                }
            }
            rounds.push(settlements(&pool) - before);
        }
        assert!(rounds[3..].iter().all(|&settled| settled <= 4), "{rounds:?}");
        Ok(())
    }

    #[test]
    fn streams_below_the_peak_do_not_settle() -> Result<()> {
        let (pool, streams) = pool(4)?;
        let mut high = Vec::new();
        for stream in &streams {
            for _ in 0..64 {
                high.push(pool.alloc(stream, Request::bytes(MIB))?);
            }
        }
        drop(high);
        let mut settled = Vec::new();
        for _ in 0..20 {
            let before = settlements(&pool);
            for stream in &streams {
                let blocks: Vec<_> = (0..200)
                    .map(|_| pool.alloc(stream, Request::bytes(MIB)))
                    .collect::<Result<_>>()?;
                drop(blocks);
            }
            settled.push(settlements(&pool) - before);
        }
        assert_eq!(settled[4..].iter().sum::<u64>(), 0, "{settled:?}");
        Ok(())
    }
}
