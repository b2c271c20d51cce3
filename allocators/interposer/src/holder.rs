//! What is held of one memory: a device's, or pinned host memory. The budget that limits it, and
//! the figures that `aquifer top` shows.
#![expect(unsafe_code, reason = "calls the CUDA driver")]

use crate::{
    blocks::Memory,
    guest::{self, lock},
    log::{Log, Subject},
    nvml::{self, Own},
    pools::{Pools, Trimmer, make_room},
    real::Real,
    settings::Settings,
};
use aquifer_core::{
    Budget, Charge, DeviceId, PoolStats,
    budget::HookRegistration,
    event::{Action, MemoryLocation},
};
use aquifer_status::{
    PoolFigures, PoolKind, PoolSlot, SlotDescription,
    ledger::{Ledger, LedgerMemory, Share, SharedBudget},
    tightest_limit,
};
use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

/// The driver takes device memory in pages of this size, at multiples of it. Blocks share a page
/// that none of them fills.
pub(crate) const PAGE: u64 = 2 << 20;

/// What has been allocated so far.
#[derive(Default)]
struct Counts {
    live: AtomicU64,
    peak: AtomicU64,
    allocations: AtomicU64,
    frees: AtomicU64,
    failures: AtomicU64,
}

/// A page of the driver that blocks share.
struct SharedPage {
    blocks: u64,
    /// Charged until it is dropped.
    _charge: Charge,
}

/// What is held of one memory.
pub(crate) struct Holder {
    pub(crate) place: MemoryLocation,
    pub(crate) budget: Budget,
    /// The limit of the whole process, with the driver's own memory in it.
    pub(crate) limit: Option<u64>,
    own: Own,
    counts: Counts,
    pages: Mutex<HashMap<u64, SharedPage>>,
    /// Memory of graphs, as it was seen last, and its charge, if it fits.
    pub(crate) graphs: Mutex<(u64, Option<Charge>)>,
    slot: PoolSlot,
    /// What was held and what the driver had for itself when the trace was told last.
    told: Mutex<(u64, u64)>,
    shared: Option<SharedBudget>,
    /// Gives back what the driver's pools have cached, and the hook that calls it.
    _trimmer: Option<(Arc<Trimmer>, HookRegistration)>,
}

impl Holder {
    /// Opens a device. `own` is measured here, so this comes before its first allocation.
    pub(crate) fn device(
        real: &'static Real,
        settings: &Settings,
        pools: &'static Pools,
        device: u32,
    ) -> Self {
        let name = text_of(|text, len| {
            // SAFETY: 1. Room for `len` bytes.
            unsafe { (real.cuDeviceGetName)(text, len, device as i32) }
        });
        let address = text_of(|text, len| {
            // SAFETY: 1. Room for `len` bytes.
            unsafe { (real.cuDeviceGetPCIBusId)(text, len, device as i32) }
        });
        let own = Own::of(address.as_deref());
        let limit = settings.limits.of(device);
        let room = limit.map_or(u64::MAX, |limit| limit.saturating_sub(own.at_start));
        let shared = settings.share.as_ref().and_then(|(folder, guarantee)| {
            join(real, device, folder, *guarantee, room, address.as_deref())
        });
        let budget = match &shared {
            Some(shared) => shared.budget().child("the limit of aquifer run", room),
            None => Budget::new("the limit of aquifer run", room),
        };
        let place = MemoryLocation::Device(DeviceId(device));
        let trimmer = Arc::new(Trimmer { real, pools, place, budget: budget.clone() });
        let hook = budget.on_need(&trimmer);
        let slot = PoolSlot::open(SlotDescription {
            kind: PoolKind::Source,
            name: name.unwrap_or_default(),
            device: Some(device),
            address,
            node: None,
        });
        Self {
            own,
            shared,
            _trimmer: Some((trimmer, hook)),
            ..Self::new(place, budget, limit, slot)
        }
    }

    /// Opens pinned memory.
    pub(crate) fn pinned(settings: &Settings) -> Self {
        let limit = settings.pinned_limit;
        let budget = Budget::new("the pinned limit of aquifer run", limit.unwrap_or(u64::MAX));
        let slot = PoolSlot::open(SlotDescription {
            kind: PoolKind::Pinned,
            name: "CUDA".to_owned(),
            device: None,
            address: None,
            node: None,
        });
        Self::new(MemoryLocation::Host(None), budget, limit, slot)
    }

    fn new(place: MemoryLocation, budget: Budget, limit: Option<u64>, slot: PoolSlot) -> Self {
        Self {
            place,
            budget,
            limit,
            own: Own::default(),
            counts: Counts::default(),
            pages: Mutex::default(),
            graphs: Mutex::default(),
            slot,
            told: Mutex::default(),
            shared: None,
            _trimmer: None,
        }
    }

    /// Charges bytes. If they do not fit, the driver's pools are trimmed, and other processes are
    /// asked. Blocks for a quarter of a second at most.
    pub(crate) fn charge(&self, bytes: u64) -> Option<Charge> {
        if let Ok(charge) = self.budget.charge(bytes) {
            return Some(charge);
        }
        make_room(&self.budget, bytes);
        self.budget.charge(bytes).ok()
    }

    /// Returns whether anything may refuse a charge.
    pub(crate) fn is_limited(&self) -> bool {
        self.limit.is_some() || self.shared.is_some()
    }

    /// Charges what the driver took, by its own count, where that differs from what was `expected`.
    /// A count that others have moved meanwhile is not believed.
    pub(crate) fn match_taken(&self, mut expected: Charge, taken: u64) -> Charge {
        let bytes = expected.bytes();
        if taken < bytes {
            drop(expected.split(bytes - taken));
        } else if taken <= 2 * bytes
            && let Some(more) = self.charge(taken - bytes)
        {
            // Both are of one budget.
            let _merged = expected.merge(more);
        }
        expected
    }

    /// Charges the pages of a block that the driver has placed. `ahead` is what was charged for it.
    /// Returns `None` if a page that is new does not fit.
    pub(crate) fn add_pages(
        &self,
        address: u64,
        bytes: u64,
        ahead: Option<Charge>,
    ) -> Option<Memory> {
        let end = address.checked_add(bytes)?;
        let (first, last) = (address / PAGE, (end - 1) / PAGE);
        let starts_inside = !address.is_multiple_of(PAGE);
        let ends_inside = !end.is_multiple_of(PAGE) && (last > first || !starts_inside);
        let edges = [starts_inside.then_some(first), ends_inside.then_some(last)];
        let whole = (last + 1 - first) - edges.iter().flatten().count() as u64;
        let mut left = ahead;
        let mut charge = |bytes| match left.as_mut().and_then(|left| left.split(bytes)) {
            Some(part) => Some(part),
            None => self.charge(bytes),
        };
        let own = charge(whole * PAGE)?;
        for (at, page) in edges.iter().enumerate() {
            let Some(page) = *page else { continue };
            let is_charged = self.join_page(page)
                || charge(PAGE).map(|charge| self.add_page(page, charge)).is_some();
            if !is_charged {
                edges[..at].iter().flatten().for_each(|&page| self.leave_page(page));
                return None;
            }
        }
        Some(Memory::Pages { _own: own, edges })
    }

    /// Counts a block on a page that others lie on. Returns whether there are any.
    fn join_page(&self, page: u64) -> bool {
        let mut pages = lock(&self.pages);
        let Some(shared) = pages.get_mut(&page) else { return false };
        shared.blocks += 1;
        true
    }

    /// Adds a page with its first block. Another thread may have added it meanwhile.
    fn add_page(&self, page: u64, charge: Charge) {
        let mut pages = lock(&self.pages);
        pages.entry(page).or_insert(SharedPage { blocks: 0, _charge: charge }).blocks += 1;
    }

    /// Removes a block from a page.
    pub(crate) fn leave_page(&self, page: u64) {
        let mut pages = lock(&self.pages);
        let Some(shared) = pages.get_mut(&page) else { return };
        shared.blocks -= 1;
        if shared.blocks == 0 {
            let ended = pages.remove(&page);
            drop(pages);
            drop(ended);
        }
    }

    pub(crate) fn count_alloc(&self, bytes: u64) {
        let Counts { live, peak, allocations, .. } = &self.counts;
        let live = live.fetch_add(bytes, Relaxed) + bytes;
        if live > peak.load(Relaxed) {
            peak.fetch_max(live, Relaxed);
        }
        allocations.fetch_add(1, Relaxed);
    }

    pub(crate) fn count_free(&self, bytes: u64) {
        self.counts.live.fetch_sub(bytes, Relaxed);
        self.counts.frees.fetch_add(1, Relaxed);
    }

    pub(crate) fn count_failure(&self) {
        self.counts.failures.fetch_add(1, Relaxed);
    }

    /// Tells the trace the limit, and the driver's own memory before the first allocation.
    pub(crate) fn tell_start(&self, log: &Log) {
        let own = self.own.at_start;
        lock(&self.told).1 = own;
        if let Some(limit) = self.limit {
            log.add(Action::Limit, 0, Subject::figure(self.place, limit));
        }
        if own > 0 {
            log.add(Action::Outside, 0, Subject::figure(self.place, own));
        }
    }

    /// Publishes the figures, and tells the trace what was taken from the driver since.
    pub(crate) fn publish(&self, log: Option<&Log>) {
        let held = self.budget.used();
        if let Some(log) = log {
            let own = self.own.now(held);
            let mut told = lock(&self.told);
            let (held_before, own_before) = *told;
            *told = (held, own);
            let mark = |action, bytes| log.add(action, 0, Subject::figure(self.place, bytes));
            if own != own_before {
                mark(Action::Outside, own);
            }
            match held.cmp(&held_before) {
                std::cmp::Ordering::Greater => mark(Action::Grow, held - held_before),
                std::cmp::Ordering::Less => mark(Action::Reap, held_before - held),
                std::cmp::Ordering::Equal => {}
            }
        }
        let Counts { live, peak, allocations, frees, failures } = &self.counts;
        self.slot.publish(|| {
            let (live, physical) = (live.load(Relaxed), self.budget.used());
            let mut stats = PoolStats::default();
            (stats.live, stats.requested, stats.physical) = (live, live, physical);
            stats.cached = physical.saturating_sub(live);
            (stats.peak_live, stats.peak_requested) = (peak.load(Relaxed), peak.load(Relaxed));
            stats.peak_physical = self.budget.peak();
            // Frees are read first: no block is freed before it is counted.
            (stats.frees, stats.failures) = (frees.load(Relaxed), failures.load(Relaxed));
            stats.allocations = allocations.load(Relaxed);
            stats.blocks = stats.allocations.saturating_sub(stats.frees);
            PoolFigures { stats, limit: tightest_limit(&self.budget), largest_free: None }
        });
    }
}

/// Joins the ledger of a device. One that cannot be joined is reported, and nothing is claimed.
fn join(
    real: &'static Real,
    device: u32,
    folder: &std::path::Path,
    guarantee: u64,
    most: u64,
    address: Option<&str>,
) -> Option<SharedBudget> {
    let mut uuid = [0; 16];
    // SAFETY: 1. Room for the 16 bytes of a UUID.
    let has_uuid = unsafe { (real.cuDeviceGetUuid_v2)(uuid.as_mut_ptr(), device as i32) } == 0;
    let memory = LedgerMemory::gpu(has_uuid.then_some(uuid), address.map(str::to_owned), device);
    let mut capacity = 0;
    // SAFETY: 1. A local.
    unsafe { (real.cuDeviceTotalMem_v2)(&raw mut capacity, device as i32) };
    // Reserved: what others of these programs borrow, they cannot give back.
    let share = Share::new().guarantee(guarantee).limit(most).reserve();
    let capacity = capacity as u64;
    // What no process has claimed but is in use: the contexts of all, and programs beside these.
    let address = address.map(str::to_owned);
    let in_use = move || Some(capacity.saturating_sub(nvml::free(address.as_deref()?)?));
    let joined = Ledger::open(folder, &memory.to_string(), capacity)
        .and_then(|ledger| share.join(ledger))
        .and_then(|member| member.budget("the device of all processes", in_use));
    joined.inspect_err(|error| guest::report(&format!("memory is not shared: {error}"))).ok()
}

/// Reads a text of the driver's.
fn text_of(read: impl FnOnce(*mut std::ffi::c_char, i32) -> u32) -> Option<String> {
    let mut text = [0u8; 256];
    let code = read(text.as_mut_ptr().cast(), text.len() as i32);
    let text = std::ffi::CStr::from_bytes_until_nul(&text).ok()?;
    (code == 0).then(|| text.to_string_lossy().into_owned())
}
