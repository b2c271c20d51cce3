//! The peak of a pool's live bytes: of all streams together, at no cost where a cache serves a
//! request.
//!
//! Each cache has its *highest*: the maximum of its live bytes since the last settlement. The sum
//! of the highest, with what is live outside of the caches, is never below what is live. It may
//! rise up to the *allowed* sum. What it lacks to that is the [room](PeakRoom), which all caches
//! share.
//!
//! An allocation compares the live bytes of its cache with the highest. Above it, the cache takes
//! the difference out of the room and raises its highest. Where the room has too little, the
//! request leaves the fast path, and all caches settle before the caller gets the block. Threads
//! that come together for that settle once.
//!
//! A *settlement* locks all caches at once, so that it reads one instant, and
//!
//! 1. sums the live bytes, which the pool has at this instant;
//! 2. raises the *known* peak to this sum;
//! 3. sets each highest to the live bytes of its cache;
//! 4. sets the allowed sum: the known peak, and [`PEAK_SLACK`] for each cache in use. A cache is in
//!    use if it has live bytes, or had some since the last settlement;
//! 5. sets the room to what the allowed sum has above the live bytes.
//!
//! So this is Linux's `percpu_counter`, in which each processor adds to a shared sum only now and
//! then, with a settlement before an error could exceed its bound.
//!
//! # What is reported, and its error
//!
//! The reported peak is the maximum, since the last reset, of the sum of the highest and of what is
//! live outside. With `n` streams that have live blocks, a plan with live blocks counted as one
//! more,
//!
//! > true peak ≤ reported peak ≤ true peak + `n` × 1 MiB.
//!
//! A block counts as live from an instant within the call that allocates it: where the room
//! suffices for it, or where all caches settle.
//!
//! - *Not below.* No cache is above its highest when a block is handed out.
//! - *Not above.* The known peak is a sum of one instant, and the allowed sum exceeds it by `n` ×
//!   [`PEAK_SLACK`].
//!
//! Neither needs that the threads agree on an order: what a thread allocates or frees meanwhile, it
//! does before or after the instant in which all caches are locked.
//!
//! If a single cache is in use, and nothing outside of it, its highest is the peak, without an
//! error: the room is unlimited, and whoever comes second settles. So one stream settles once, at
//! its first block. After a reset the known peak is the sum at that instant, and the same holds.
//!
//! # Which memory
//!
//! | pool | parts |
//! |---|---|
//! | caches serve blocks | each cache; a plan, within 1 MiB; stable, parkable, reserved and graph memory |
//! | [bypass](crate::PoolConfig::bypass) | the driver's allocations and the same memory |
//!
//! In bypass mode, blocks outside of caches are all that counts, and the peak is exact. Where
//! [debugging](crate::PoolConfig::debug) puts guards around blocks, blocks count with them, and
//! until they return to the pool.

use crate::{
    base::usage::{JointPeak, LiveBytes, PEAK_SLACK, PeakRoom},
    stream_cache::{CacheLock, CacheState, StreamCache},
};
use aquifer_stream::Spin;
use std::{
    mem,
    sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock},
};

/// All caches of a pool, also idle ones.
pub(crate) type CacheList = RwLock<Vec<&'static StreamCache>>;

/// The peak of the live bytes of all parts of a pool together.
///
/// Locks in this order: an owner of [`LiveUsage`](crate::base::usage::LiveUsage), this, the list of
/// caches, caches.
pub(crate) struct PoolPeaks {
    /// The caches of the pool.
    caches: Arc<CacheList>,
    /// Whether blocks in caches are the pool's live blocks.
    counts_caches: bool,
    room: PeakRoom,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// A sum that the pool had at one instant since the last reset: the true peak is not below.
    known: LiveBytes,
    /// The largest sum that was seen since the last reset: the true peak until then is not above.
    reported: LiveBytes,
    /// What is live outside of the caches.
    outside: LiveBytes,
    /// Whether anything was live there since the last settlement.
    outside_used: bool,
    /// What the sum may rise to, or [`LiveBytes::MAX`] if it is exact.
    allowed: LiveBytes,
    /// The locks of the caches during a settlement; empty between two of them.
    locks: Vec<&'static CacheLock>,
    #[cfg(test)]
    settlements: u64,
}

impl PoolPeaks {
    /// Creates the peaks of a pool without memory. Without `counts_caches`, all that is live is
    /// counted by [`JointPeak::add`].
    pub(crate) fn new(caches: Arc<CacheList>, counts_caches: bool) -> Arc<Self> {
        let (room, state) = (PeakRoom::default(), Mutex::default());
        Arc::new(Self { caches, counts_caches, room, state })
    }

    /// Returns what the caches take their rises from.
    pub(crate) fn room(&self) -> &PeakRoom {
        &self.room
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes what is live in a cache into account. To be called with no lock of a cache, by each
    /// thread that may have taken the cache above its highest, before it hands the block out.
    /// Settles only if the room has too little.
    pub(crate) fn settle_cache(&self, cache: &StreamCache) {
        let admit = || !self.counts_caches || cache.with(CacheState::admit);
        if admit() {
            return;
        }
        let mut state = self.state();
        // Several threads come here when the room ends, and one settlement is enough for all.
        if !admit() {
            self.settle(&mut state, false);
        }
    }

    /// Sets the peak to what is live now.
    pub(crate) fn reset(&self) {
        self.settle(&mut self.state(), true);
    }

    fn settle(&self, state: &mut State, is_reset: bool) {
        state.note_sum(&self.room);
        debug_assert!(state.locks.is_empty(), "two settlements at once");
        let caches = self.caches.read().unwrap_or_else(PoisonError::into_inner);
        // The list keeps its memory, so that a settlement allocates none.
        let mut locks = mem::take(&mut state.locks);
        locks.extend(caches.iter().filter(|_| self.counts_caches).map(|cache| cache.lock()));
        let mut locked = Spin::lock_all(&locks);
        let (mut now, mut in_use) = (state.outside, 0);
        locked.for_each(|cache| {
            cache.flush_last();
            let live = cache.live_bytes();
            in_use += u64::from(live.max(cache.highest) != LiveBytes::default());
            now += live;
            cache.highest = live;
        });
        self.room.set(state.settle(now, in_use, is_reset));
        drop(locked);
        locks.clear();
        state.locks = locks;
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
        let is_new = !mem::replace(&mut state.outside_used, true);
        if is_new || !self.room.take(bytes) {
            self.settle(&mut state, false);
        }
    }

    fn remove(&self, bytes: LiveBytes) {
        let mut state = self.state();
        state.note_sum(&self.room);
        debug_assert!(bytes.is_within(state.outside), "more is freed than is live outside");
        state.outside -= bytes;
        self.room.give(bytes);
    }

    fn peak(&self) -> LiveBytes {
        let mut state = self.state();
        state.note_sum(&self.room);
        state.reported
    }
}

impl State {
    /// Takes the sum of all parts into account, which may be lower afterwards.
    fn note_sum(&mut self, room: &PeakRoom) {
        self.reported = self.reported.max(self.allowed.above(room.left()));
    }

    /// Takes into account that `now` bytes are live, and that `in_use` caches are in use. Returns
    /// the room.
    fn settle(&mut self, now: LiveBytes, in_use: u64, is_reset: bool) -> LiveBytes {
        let is_exact = self.allowed == LiveBytes::MAX;
        self.reported = if is_reset { now } else { self.reported.max(now) };
        self.known = if is_reset || is_exact { self.reported } else { self.known.max(now) };
        debug_assert!(now.is_within(self.known), "the pool has more than its peak");
        debug_assert!(self.known.is_within(self.reported), "reports less than is known");
        #[cfg(test)]
        {
            self.settlements += 1;
        }
        let outside_used =
            mem::replace(&mut self.outside_used, self.outside != LiveBytes::default());
        self.allowed = if in_use == 0 || in_use == 1 && !outside_used {
            LiveBytes::MAX
        } else {
            self.known.map(|bytes| bytes + PEAK_SLACK * in_use)
        };
        self.allowed.above(now)
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
        assert!(rounds[3..].iter().all(|&settled| settled <= 40), "{rounds:?}");
        Ok(())
    }

    #[test]
    fn streams_that_rise_in_turn_below_the_peak_settle_once_a_turn() -> Result<()> {
        let (pool, streams) = pool(4)?;
        let mut high = Vec::new();
        for stream in &streams {
            for _ in 0..64 {
                high.push(pool.alloc(stream, Request::bytes(MIB))?);
            }
        }
        drop(high);
        for round in 0..20 {
            for stream in &streams {
                let before = settlements(&pool);
                let blocks: Vec<_> = (0..200)
                    .map(|_| pool.alloc(stream, Request::bytes(MIB)))
                    .collect::<Result<_>>()?;
                drop(blocks);
                assert!(settlements(&pool) - before <= 2, "round {round}");
            }
        }
        Ok(())
    }
}
