//! The slow path of an allocation, growing the pool, and releasing regions.

use super::{
    config::Grow,
    context::PoolContext,
    pool_core::{AllocatedBlock, PoolCore},
    thread::InsidePool,
};
use crate::{
    clock,
    region::{self, Cause, Region, RegionError, RegionRequest, window::GRANULE},
};
use aquifer_core::{Action, MemoryError, OutOfMemory, Result, Tag, error::Tried};
use std::{
    alloc::Layout,
    sync::{Arc, PoisonError},
    time::{Duration, Instant},
};

/// The exclusive right to grow a pool.
struct GrowGuard {
    core: &'static PoolCore,
}

impl Drop for GrowGuard {
    fn drop(&mut self) {
        *self.core.growing.lock().unwrap_or_else(PoisonError::into_inner) = false;
        self.core.grown.notify_all();
    }
}

/// Why a round of the slow path failed.
#[derive(Default)]
struct GrowFailure {
    refused: Option<RegionError>,
    tried: Vec<Tried>,
}

impl PoolCore {
    /// Allocates by the slow path (see the documentation of [`pool`](super)).
    #[cold]
    pub(super) fn allocate_by_slow_path(
        &'static self,
        generation: u64,
        layout: Layout,
    ) -> Result<AllocatedBlock> {
        let grow = self.with(|state| state.open_as(generation).map(|shared| shared.config.grow))?;
        if grow == Grow::Now {
            super::sweep();
        }
        let block = match self.try_slow_path(generation, layout)? {
            Ok(block) => Ok(block),
            Err(failure) => {
                let shared = self.with(|state| state.open_as(generation).cloned())?;
                self.fail(&shared, layout, failure)
            }
        };
        self.publish_now(generation);
        block
    }

    fn try_slow_path(
        &'static self,
        generation: u64,
        layout: Layout,
    ) -> Result<std::result::Result<AllocatedBlock, GrowFailure>> {
        let shared = loop {
            self.poll_all();
            if let Some(block) = self.try_allocate_block(generation, layout)? {
                return Ok(Ok(block));
            }
            let shared = self.with(|state| state.open_as(generation).cloned())?;
            if self.drain(&shared, false)
                && let Some(block) = self.try_allocate_block(generation, layout)?
            {
                return Ok(Ok(block));
            }
            let mut growing = self.growing.lock().unwrap_or_else(PoisonError::into_inner);
            if *growing {
                // The other thread's region may be enough. If not, this thread grows next.
                let _guard = self.grown.wait(growing).unwrap_or_else(PoisonError::into_inner);
                continue;
            }
            *growing = true;
            break shared;
        };
        let _guard = GrowGuard { core: self };
        // A gate that is waited for may allocate. It must not do so from this pool, where it would
        // wait for this thread.
        let _inside = InsidePool::enter();
        // Another thread may have grown the pool, or freed memory, since the last attempt.
        if let Some(block) = self.try_allocate_block(generation, layout)? {
            return Ok(Ok(block));
        }
        let patience = shared.config.patience;
        let until = clock::after(patience);
        let mut failure = GrowFailure::default();
        let GrowFailure { refused, tried } = &mut failure;
        if shared.config.grow == Grow::WhenWarmed {
            tried.push(Tried { step: "grow, but only when warmed", gave: 0 });
        } else {
            // Memory that the driver allocates may begin at any page, hence the second attempt with
            // slack.
            for with_slack in [false, true] {
                match self.grow_for(&shared, generation, layout, with_slack, until, tried) {
                    Ok(Some(block)) => return Ok(Ok(block)),
                    Ok(None) => {}
                    Err(error) => {
                        *refused = Some(error);
                        break;
                    }
                }
            }
        }
        let reclaimed = shared.reclaim_idle();
        if reclaimed > 0 {
            tried.push(Tried { step: "idle slots of stagers", gave: reclaimed });
            if let Some(block) = self.try_allocate_block(generation, layout)? {
                return Ok(Ok(block));
            }
        }
        if let Some(block) = self.wait_for_pending(patience, generation, layout, tried)? {
            return Ok(Ok(block));
        }
        Ok(Err(failure))
    }

    /// Makes a region for the request and allocates the block in it. Returns `None` if the block
    /// does not fit at the region's start address. The region has the chunk's size, else the
    /// request's size, else that size after other regions were released.
    fn grow_for(
        &'static self,
        shared: &Arc<PoolContext>,
        generation: u64,
        layout: Layout,
        with_slack: bool,
        until: Instant,
        tried: &mut Vec<Tried>,
    ) -> Result<Option<AllocatedBlock>, RegionError> {
        let grow = |bytes| self.grow(shared, generation, bytes, bytes, Some(layout));
        let needed = Self::region_size(layout, with_slack)?;
        let chunk = shared.config.chunk.max(needed);
        let first = grow(chunk);
        tried.push(Tried { step: "grow", gave: if first.is_ok() { chunk as u64 } else { 0 } });
        let mut error = match first {
            Ok(block) => return Ok(block),
            Err(error) if matches!(error.cause, Cause::UnknownNode(_)) => {
                return Err(error);
            }
            Err(error) => error,
        };
        if needed < chunk {
            let answer = grow(needed);
            tried.push(Tried {
                step: "grow less",
                gave: if answer.is_ok() { needed as u64 } else { 0 },
            });
            match answer {
                Ok(block) => return Ok(block),
                Err(e) => error = e,
            }
        }
        let released = self.reap(shared, 0, u64::MAX, None);
        tried.push(Tried { step: "give back free regions", gave: released });
        let again = if released == 0 { Err(error) } else { grow(needed) };
        again.or_else(|error| shared.reclaim_from_others(error, until, tried, || grow(needed)))
    }

    /// Returns the bytes of a region for one request, with slack for its alignment if `with_slack`.
    fn region_size(layout: Layout, with_slack: bool) -> Result<usize, RegionError> {
        let too_large = || RegionError::too_large(layout.size());
        // A mapped region begins at a huge page. A larger alignment needs slack in any case.
        let slack = if with_slack || layout.align() > GRANULE { layout.align() } else { 0 };
        let bytes = layout.size().checked_add(slack).ok_or_else(too_large)?;
        let huge = bytes.checked_next_multiple_of(GRANULE).ok_or_else(too_large)?;
        // Round up to whole huge pages where this adds little: only those can come from the huge
        // page pool.
        Ok(if huge - bytes <= bytes / 32 { huge } else { bytes })
    }

    /// Makes one region and adds it to the pool. Allocates a block of `layout` under the same lock,
    /// if it fits. Otherwise another thread could release the new region as free, and the request
    /// would be refused.
    fn grow(
        &'static self,
        shared: &Arc<PoolContext>,
        generation: u64,
        bytes: usize,
        registration: usize,
        layout: Option<Layout>,
    ) -> Result<Option<AllocatedBlock>, RegionError> {
        // The region's metadata must not be allocated from a pool either.
        let _inside = InsidePool::enter();
        let config = &shared.config;
        let mut request = RegionRequest::bytes(bytes);
        request.node = config.node;
        request.strict = config.strict;
        request.write_combined = config.write_combined;
        request.pinning = config.pinning;
        request.share_on_fork = config.share_on_fork;
        request.pages = config.pages;
        request.registration = registration.next_multiple_of(GRANULE);
        let region = Region::new(&shared.host, &shared.budget, &request)?;
        let (start, len) = (region.span().start as u64, region.span().len as u64);
        shared.report_limit();
        let mut region = Some(region);
        let added = self.with(|state| {
            state.open_as(generation).ok()?;
            region = region.take().and_then(|region| state.add(region));
            if region.is_some() {
                return None;
            }
            let ticket = config.recorder.as_ref().map(|recorder| recorder.ticket());
            Some((ticket, layout.and_then(|layout| self.allocate_from_heap(state, None, layout))))
        });
        let (ticket, block) = added.unwrap_or_default();
        self.record(&Some(shared.clone()), ticket, Action::Grow, start, len);
        match region {
            None => Ok(block),
            // The pool was closed in between, or its heap is full. The region is released.
            Some(region) => {
                drop(region);
                Err(RegionError::not_kept())
            }
        }
    }

    /// Waits for pending blocks, one after the other, until the request fits or `patience` ends.
    fn wait_for_pending(
        &'static self,
        patience: Duration,
        generation: u64,
        layout: Layout,
        tried: &mut Vec<Tried>,
    ) -> Result<Option<AllocatedBlock>> {
        let end = clock::after(patience);
        if patience.is_zero() {
            return Ok(None);
        }
        let mut waited = false;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() || !self.wait_oldest(left) {
                break;
            }
            waited = true;
            if let Some(block) = self.try_allocate_block(generation, layout)? {
                return Ok(Some(block));
            }
        }
        if waited {
            tried.push(Tried { step: "wait for pending blocks", gave: 0 });
        }
        Ok(None)
    }

    fn fail(
        &'static self,
        shared: &Arc<PoolContext>,
        layout: Layout,
        failure: GrowFailure,
    ) -> Result<AllocatedBlock> {
        let GrowFailure { refused: error, tried } = failure;
        let place =
            shared.config.node.map_or_else(|| "the host".to_owned(), |node| node.to_string());
        let mut full = Box::new(OutOfMemory::new(place, layout.size() as u64));
        full.tried = tried;
        let mut other = None;
        if let Some(error) = error {
            match error.cause {
                Cause::NotKept => other = Some(MemoryError::Closed),
                Cause::Budget(refused) => full.refused = Some(refused),
                Cause::Driver(refused) => full.driver = Some(refused),
                _ => other = Some(MemoryError::from(error)),
            }
        }
        let refused_by = full.refused.map(|refused| refused.budget);
        shared.report_limit();
        let (error, ticket) = self.with_tally(|state, tally| {
            state.count_failure();
            let ticket = shared.config.recorder.as_ref().map(|recorder| recorder.ticket());
            (other.unwrap_or_else(|| state.complete_error(full, tally)), ticket)
        });
        if let (Some(recorder), Some(ticket)) = (&shared.config.recorder, ticket) {
            let (place, bytes) = (shared.place(), layout.size() as u64);
            let event = recorder.event(Action::Fail, place, 0, 0, bytes, Tag::current());
            let refused = |by| event.refused(by, shared.budget.name());
            recorder.record(ticket, refused_by.map_or(event, refused));
        }
        Err(error)
    }

    /// Grows by one region, so that the pool holds `bytes`.
    pub(super) fn warm(&'static self, generation: u64, bytes: u64) -> Result<()> {
        let mut growing = self.growing.lock().unwrap_or_else(PoisonError::into_inner);
        while *growing {
            growing = self.grown.wait(growing).unwrap_or_else(PoisonError::into_inner);
        }
        *growing = true;
        drop(growing);
        let _guard = GrowGuard { core: self };
        let (shared, missing) = self.with(|state| {
            let shared = state.open_as(generation).cloned()?;
            Ok::<_, MemoryError>((shared, bytes.saturating_sub(state.physical())))
        })?;
        if missing == 0 {
            return Ok(());
        }
        let missing = usize::try_from(missing).unwrap_or(usize::MAX);
        let wanted = missing.max(shared.config.chunk);
        let grown = self.grow(&shared, generation, wanted, shared.config.registration, None);
        grown.map(drop).map_err(MemoryError::from)
    }

    /// Releases wholly free regions, largest first, until `enough` bytes are released or fewer than
    /// `keep` free bytes would stay. Returns the bytes released. The first error of a release goes
    /// into `failed`.
    pub(super) fn reap(
        &'static self,
        shared: &Arc<PoolContext>,
        keep: u64,
        enough: u64,
        mut failed: Option<&mut Option<RegionError>>,
    ) -> u64 {
        let mut released = 0;
        while released < enough
            && let Some(region) = self.with(|state| state.remove(shared, keep))
        {
            let (start, len) = (region.span().start as u64, region.span().len as u64);
            if let Err(error) = region.close() {
                if let Some(failed) = failed.as_deref_mut() {
                    failed.get_or_insert(error);
                }
                continue;
            }
            released += len;
            let ticket = self.with(|state| {
                // This may be the last region of a closed pool, and the core may already serve
                // another.
                if state.serves(shared) {
                    state.count_reaped(len);
                }
                shared.config.recorder.as_ref().map(|recorder| recorder.ticket())
            });
            self.record(&Some(shared.clone()), ticket, Action::Reap, start, len);
        }
        released
    }

    /// Releases the wholly free regions of a closed pool without waiting for devices: pinned
    /// regions are left for the next quiet point.
    pub(super) fn retire_unused(&'static self, shared: &Arc<PoolContext>) {
        while let Some(region) = self.with(|state| state.remove(shared, 0)) {
            let (start, len) = (region.span().start as u64, region.span().len as u64);
            if region.is_pinned() {
                region.retire();
            }
            let ticket = shared.config.recorder.as_ref().map(|recorder| recorder.ticket());
            self.record(&Some(shared.clone()), ticket, Action::Reap, start, len);
        }
    }

    /// Releases about `bytes` for another pool. A region that cannot be released is stranded and
    /// stays charged.
    pub(super) fn release_for_reclaim(&'static self, generation: u64, bytes: u64) {
        let Ok(shared) = self.with(|state| state.open_as(generation).cloned()) else { return };
        shared.reclaim_idle();
        self.poll_all();
        self.drain(&shared, false);
        self.reap(&shared, 0, bytes, None);
    }

    /// Releases wholly free regions at a quiet point. Returns the bytes released.
    pub(super) fn trim(&'static self, generation: u64, keep: u64) -> Result<u64> {
        region::end_retired();
        let shared = self.with(|state| state.open_as(generation).cloned())?;
        shared.report_limit();
        self.drain(&shared, false);
        let mut failed = None;
        let released = self.reap(&shared, keep, u64::MAX, Some(&mut failed));
        failed.map_or(Ok(released), |error| Err(MemoryError::from(error)))
    }
}
