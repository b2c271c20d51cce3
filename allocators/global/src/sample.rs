//! Where what is held was allocated: call stacks of a sample of all blocks.
//!
//! Each thread's bytes are a line on which points lie at random, so many bytes apart on average (a
//! Poisson process); the block that a point falls into is sampled. So a block of `s` bytes is, with
//! an interval of `n`, one of `1 / (1 − e^(−s/n))` like it, and stands for all of these: sums over
//! samples expect the truth, whatever the sizes.
//!
//! ```text
//!   bytes of a thread   ├──────────────────×──────────────×───────────────────────────────×────
//!   its blocks          │ 64 │ 64 │ 4096    │ 64 │ 64 │ 1 MiB            │ 64 │ 64 │ 4096  │
//!                                 sampled            sampled                      sampled
//! ```
//!
//! A stack is walked on the allocating thread without memory or locks of ours; names are looked up
//! when it is printed.

mod record;
mod stack;

pub(crate) use record::{forget, tag};
pub use stack::{Stack, stacks};

use crate::{
    account::Slot,
    here::{HERE, Here},
};
use record::FRAMES;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};

/// Bytes between samples on average; 0 if there are none.
static INTERVAL: AtomicU64 = AtomicU64::new(0);
/// Bytes after which a thread looks again whether it is to sample.
const LOOK: i64 = 1 << 20;

/// Takes the call stack of one block in every `bytes` allocated, on average; 0 ends that.
///
/// Needs [`Tracked`](crate::Tracked) as the program's allocator, and the feature `stacks`. A thread
/// begins, and ends, within the next MiB that it allocates. What has been sampled is followed until
/// it is freed. A sample costs some microseconds (and the process's first one milliseconds, since
/// the unwinder prepares itself) and 0.4 KiB, from the system's allocator and never given back; 512
/// KiB between samples is usual. Walking the stack may wait for the dynamic loader.
///
/// ```
/// use aquifer_global::{self as global, Global, Tracked};
/// #[global_allocator]
/// static GLOBAL: Global<std::alloc::System, Tracked> = Global::new();
///
/// global::sample_every(64 << 10);
/// let held: Vec<Vec<u8>> = (0..100).map(|_| vec![1; 256 << 10]).collect();
/// let stacks = global::stacks(1);
/// println!("{}", stacks[0]); // its live bytes, and the names of its functions
/// # drop(held);
/// ```
#[cfg(feature = "stacks")]
pub fn sample_every(bytes: u64) {
    INTERVAL.store(bytes, Ordering::Relaxed);
}

/// When a thread's next sample is due. Written by the owner of its slot alone, and read by nobody
/// else.
pub(crate) struct Clock {
    /// Bytes until then, or until the thread looks again.
    left: AtomicI64,
    /// The interval that `left` was drawn for; 0 if for none.
    drawn_for: AtomicU64,
    /// The state of the thread's random numbers.
    seed: AtomicU64,
}

impl Clock {
    pub(crate) const fn new() -> Self {
        Self { left: AtomicI64::new(0), drawn_for: AtomicU64::new(0), seed: AtomicU64::new(0) }
    }

    /// Bytes to the next point, at random with this mean (Steele, Lea and Flood, "Fast Splittable
    /// Pseudorandom Number Generators", 2014).
    fn draw(&self, interval: u64) -> i64 {
        // Clocks start alike, so their addresses tell them apart.
        let step = 0x9e37_79b9_7f4a_7c15u64;
        let seed = self.seed.load(Ordering::Relaxed).wrapping_add(step);
        self.seed.store(seed, Ordering::Relaxed);
        let mut word = seed ^ (std::ptr::from_ref(self).addr() as u64).wrapping_mul(step);
        word = (word ^ word >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ word >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        word ^= word >> 31;
        let unit = ((word >> 11) + 1) as f64 / (1u64 << 53) as f64; // in (0, 1]
        (-unit.ln() * interval as f64) as i64
    }
}

/// Samples a block, if it is its turn: answers with the number of the sample. Without a slot a
/// thread samples nothing.
#[inline]
pub(crate) fn consider(slot: Option<&Slot>, tag: u16, bytes: usize) -> Option<u32> {
    let clock = &slot?.clock;
    // No block has more.
    let left = clock.left.load(Ordering::Relaxed).wrapping_sub(bytes as i64);
    clock.left.store(left, Ordering::Relaxed);
    if left >= 0 {
        return None;
    }
    HERE.with(|here| due(here, clock, tag, bytes))
}

#[cold]
#[inline(never)]
fn due(here: &Here, clock: &Clock, tag: u16, bytes: usize) -> Option<u32> {
    let interval = INTERVAL.load(Ordering::Relaxed);
    if interval == 0 || here.sampling.get() {
        clock.drawn_for.store(0, Ordering::Relaxed);
        clock.left.store(LOOK, Ordering::Relaxed);
        return None;
    }
    if clock.drawn_for.swap(interval, Ordering::Relaxed) != interval {
        // No point had been drawn: does one fall into this block?
        let left = clock.draw(interval).saturating_sub(bytes as i64);
        if left >= 0 {
            clock.left.store(left, Ordering::Relaxed);
            return None;
        }
    }
    // What lies between two points has no memory, so the next one may be counted from the end of
    // this block.
    clock.left.store(clock.draw(interval), Ordering::Relaxed);
    here.sampling.set(true);
    let mut frames = [0; FRAMES];
    let depth = stack::walk(&mut frames);
    here.sampling.set(false);
    let stands_for = bytes as f64 / -(-(bytes as f64) / interval as f64).exp_m1();
    record::keep(tag, stands_for as u64, bytes as u64, frames.get(..depth)?)
}

/// Runs `work` without samples on this thread.
pub(crate) fn paused<R>(work: impl FnOnce() -> R) -> R {
    struct Resume(bool);
    impl Drop for Resume {
        fn drop(&mut self) {
            HERE.with(|here| here.sampling.set(self.0));
        }
    }
    let _resume = Resume(HERE.with(|here| here.sampling.replace(true)));
    work()
}
