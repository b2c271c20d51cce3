//! The figures of one pool, as its slow paths publish them.

use crate::{
    layout::{SLOT_WORDS, SLOTS, header, slot, words_of},
    region::Region,
    sequence, state,
    text::{cut, write_text},
};
use aquifer_core::{Budget, PoolStats};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

/// What a pool's memory is.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize), serde(rename_all = "lowercase"))]
#[non_exhaustive]
pub enum PoolKind {
    /// Device memory in caches of streams.
    Device,
    /// Pinned host memory.
    Pinned,
    /// Device memory of a source other than a pool, such as the driver.
    Source,
    /// The program's global allocator.
    Global,
}

impl PoolKind {
    const ALL: [Self; 4] = [Self::Device, Self::Pinned, Self::Source, Self::Global];

    /// Returns the kind with this number.
    pub(crate) fn numbered(number: u64) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.number() == number)
    }

    /// Returns the name of the kind in lower case, as in JSON and metrics.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Device => "device",
            Self::Pinned => "pinned",
            Self::Source => "source",
            Self::Global => "global",
        }
    }

    pub(crate) fn number(self) -> u64 {
        self as u64 + 1
    }
}

/// What readers are told of a pool besides its figures.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SlotDescription {
    /// What its memory is.
    pub kind: PoolKind,
    /// Its name: of the device, the source or the allocator. Cut after 160 bytes.
    pub name: String,
    /// The ordinal of its device.
    pub device: Option<u32>,
    /// The PCI address of its device. Cut after 56 bytes.
    pub address: Option<String>,
    /// The NUMA node of its memory.
    pub node: Option<u32>,
}

/// The figures of a pool that its slow paths publish.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct PoolFigures {
    /// The statistics, without what caches count in [lines](crate::CacheLine). `cached` includes
    /// the bytes of blocks in such caches.
    pub stats: PoolStats,
    /// The limit of the tightest budget.
    pub limit: Option<u64>,
    /// The largest free extent in bytes.
    pub largest_free: Option<u64>,
}

/// Returns the lowest limit of a budget and those above it, or `None` if none of them has one.
///
/// ```
/// use aquifer_core::Budget;
/// use aquifer_status::tightest_limit;
///
/// let machine = Budget::new("machine", 8 << 30);
/// let job = machine.child("job", 16 << 30);
/// assert_eq!(tightest_limit(&job), Some(8 << 30));
/// assert_eq!(tightest_limit(&Budget::unlimited("all")), None);
/// ```
#[must_use]
pub fn tightest_limit(budget: &Budget) -> Option<u64> {
    let mut limit = budget.limit();
    let mut above = budget.parent();
    while let Some(budget) = above {
        limit = limit.min(budget.limit());
        above = budget.parent();
    }
    (limit < u64::MAX).then_some(limit)
}

/// Which slots are in use by this process. Kept here, since another process may write to the file.
static IN_USE: [AtomicBool; SLOTS] = [const { AtomicBool::new(false) }; SLOTS];
/// One more than the highest number that was in use.
static USED: AtomicUsize = AtomicUsize::new(0);
/// Numbers the openings of slots, so that a line of an earlier pool is not taken for one of a
/// later.
static OPENINGS: AtomicU64 = AtomicU64::new(1);

/// Returns the number of slots of the file that were in use.
pub(crate) fn used() -> usize {
    USED.load(Ordering::Relaxed)
}

/// A pool's slot in the file, or the slot of a part of a pool. Freed when it is dropped.
///
/// ```
/// use aquifer_status::{PoolFigures, PoolKind, PoolSlot, SlotDescription};
/// let slot = PoolSlot::open(SlotDescription {
///     kind: PoolKind::Source,
///     name: "carved".to_owned(),
///     device: Some(0),
///     address: None,
///     node: None,
/// });
/// slot.publish(PoolFigures::default);
/// ```
#[derive(Debug)]
pub struct PoolSlot {
    /// `None` if all slots are in use. The pool is not shown then.
    number: Option<usize>,
    id: u64,
    part_of: u64,
    opened_ns: u64,
    description: SlotDescription,
    /// Requests to publish since the running one began, and the process in the upper half.
    requests: AtomicU64,
}

impl PoolSlot {
    /// Takes a free slot. Makes no system call and never fails: without a free slot the pool is not
    /// shown.
    #[must_use]
    pub fn open(description: SlotDescription) -> Self {
        Self::open_part(description, 0)
    }

    /// Takes a slot for a part of this pool. Readers add its figures to those of the pool.
    #[must_use]
    pub fn part(&self) -> Self {
        Self::open_part(self.description.clone(), self.id)
    }

    fn open_part(description: SlotDescription, part_of: u64) -> Self {
        let claim = |used: &AtomicBool| {
            !used.load(Ordering::Relaxed) && !used.swap(true, Ordering::Acquire)
        };
        let number = IN_USE.iter().position(claim);
        let id = number.map_or(0, |number| {
            USED.fetch_max(number + 1, Ordering::Relaxed);
            let opening = OPENINGS.fetch_add(1, Ordering::Relaxed) & u64::from(u32::MAX);
            opening << 32 | (number as u64 + 1)
        });
        debug_assert_eq!(number.is_some(), id != 0, "a slot that is shown has an identity");
        debug_assert!(part_of == 0 || part_of != id, "no slot is a part of itself");
        let (opened_ns, requests) = (state::now_ns(), AtomicU64::new(0));
        Self { number, id, part_of, opened_ns, description, requests }
    }

    /// Returns the identity of this slot, which lines of the pool's caches name as their owner. 0
    /// if the pool is not shown.
    #[must_use]
    pub fn id(&self) -> u64 {
        self.id
    }

    /// Publishes the figures that `gather` returns, if this process publishes. Makes no system
    /// call, and never blocks: if another thread is publishing this slot, that thread gathers once
    /// more.
    pub fn publish(&self, mut gather: impl FnMut() -> PoolFigures) {
        /// How often one call gathers for others. What comes later waits for the next call.
        const ROUNDS: u32 = 16;
        let Some(words) = self.words() else { return };
        let process = u64::from(state::generation()) << 32;
        let mut seen = self.requests.load(Ordering::Relaxed);
        loop {
            // A thread of the parent of a fork does not publish here any more.
            let running = if seen & !u64::from(u32::MAX) == process { seen - process } else { 0 };
            let next = process | (running + 1);
            let swapped = self.requests.compare_exchange_weak(
                seen,
                next,
                Ordering::AcqRel,
                Ordering::Relaxed,
            );
            match swapped {
                Ok(_) if running > 0 => return,
                Ok(_) => {
                    seen = next;
                    break;
                }
                Err(now) => seen = now,
            }
        }
        for _ in 0..ROUNDS {
            let figures = gather();
            sequence::update(words, |words| self.write(words, &figures));
            let ended =
                self.requests.compare_exchange(seen, process, Ordering::AcqRel, Ordering::Acquire);
            match ended {
                Ok(_) => return,
                Err(now) => seen = now,
            }
        }
        debug_assert!(seen & u64::from(u32::MAX) > 0, "this thread is publishing");
        self.requests.store(process, Ordering::Release);
    }

    /// Returns the words of the slot if this process publishes.
    fn words(&self) -> Option<&'static [AtomicU64]> {
        if !state::is_published() {
            return None;
        }
        Region::get()?.slot(self.number?)
    }

    fn write(&self, words: &[AtomicU64], figures: &PoolFigures) {
        debug_assert!(words.len() == SLOT_WORDS && self.id != 0);
        let description = &self.description;
        let set = |at: usize, value: u64| words[at].store(value, Ordering::Relaxed);
        let optional = |value: Option<u32>| value.map_or(0, |value| u64::from(value) + 1);
        set(slot::ID, self.id);
        set(slot::PART_OF, self.part_of);
        set(slot::KIND, description.kind.number());
        set(slot::DEVICE, optional(description.device));
        set(slot::NODE, optional(description.node));
        set(slot::OPENED, self.opened_ns);
        set(slot::PUBLISHED, state::now_ns());
        set(slot::LIMIT, figures.limit.unwrap_or(slot::NONE));
        set(slot::LARGEST_FREE, figures.largest_free.unwrap_or(slot::NONE));
        for (at, value) in words_of(&figures.stats).into_iter().enumerate() {
            set(slot::STATS + at, value);
        }
        write_text(words, slot::NAME, cut(&description.name, slot::NAME_BYTES));
        let address = description.address.as_deref().unwrap_or_default();
        write_text(words, slot::ADDRESS, cut(address, slot::ADDRESS_BYTES));
        // The file may be younger than the slot.
        if let Some(region) = Region::get() {
            region.header()[header::SLOTS_USED].store(used() as u64, Ordering::Relaxed);
        }
    }
}

impl Drop for PoolSlot {
    fn drop(&mut self) {
        if let Some(words) = self.words() {
            sequence::update(words, |words| words[slot::ID].store(0, Ordering::Relaxed));
        }
        if let Some(used) = self.number.and_then(|number| IN_USE.get(number)) {
            let was_used = used.swap(false, Ordering::Release);
            debug_assert!(was_used, "a slot is freed by the one that took it");
        }
    }
}
