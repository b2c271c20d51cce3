//! Call stacks of held blocks, from a random sample of all blocks.
//!
//! The bytes of each thread form a line with random points, `n` bytes apart on average (a Poisson
//! process). A block is sampled if a point falls into it. A block of `s` bytes is sampled with
//! probability `1 − e^(−s/n)`, and represents `1 / (1 − e^(−s/n))` such blocks. So sums over
//! samples are unbiased estimates for all sizes.
//!
//! ```text
//!   bytes of a thread   ├──────────────────×──────────────×───────────────────────────────×────
//!   its blocks          │ 64 │ 64 │ 4096    │ 64 │ 64 │ 1 MiB            │ 64 │ 64 │ 4096  │
//!                                 sampled            sampled                      sampled
//! ```
//!
//! The allocating thread walks its stack without using this allocator or its locks. Symbols are
//! resolved when a stack is printed.

mod record;
mod stack;

pub(crate) use crate::thread_state::paused;
pub(crate) use record::{free, tag};
pub use stack::{Stack, stacks};

#[cfg(feature = "stacks")]
use crate::not_installed::Warning;
use crate::{
    slots::{Clock, Slot},
    thread_state::{THREAD_STATE, ThreadState},
};
use record::FRAMES;
use std::sync::atomic::{AtomicU64, Ordering};

/// Average bytes between samples, or 0 without sampling.
static INTERVAL: AtomicU64 = AtomicU64::new(0);
/// Bytes after which a thread checks again whether sampling is enabled.
const CHECK_INTERVAL: i64 = 1 << 20;

/// Samples the call stack of one block in every `bytes` allocated bytes on average. 0 ends
/// sampling.
///
/// - It needs [`Tracked`](crate::Tracked) as the program's allocator, and the feature `stacks`. If
///   [`Global`](crate::Global) is not the program's global allocator, the first call prints a
///   warning to standard error.
/// - Each thread starts and stops within the next MiB that it allocates. Sampled blocks are tracked
///   until they are freed.
/// - A sample costs some microseconds, and 0.4 KiB from the system's allocator that are never
///   freed. The first sample of the process takes milliseconds, since the unwinder initialises
///   itself. A usual interval is 512 KiB.
/// - Walking the stack may wait for the dynamic loader.
///
/// ```
/// use aquifer::{Global, global, global::Tracked};
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
    static WARNING: Warning = Warning::new("no call stacks of other code are sampled");
    if bytes > 0 {
        WARNING.check_once();
    }
    INTERVAL.store(bytes, Ordering::Relaxed);
}

/// Samples a block if it is due, and returns the number of the sample. A thread without a slot
/// samples nothing.
#[inline]
pub(crate) fn maybe_sample(slot: Option<&Slot>, tag: u16, bytes: usize) -> Option<u32> {
    let clock = &slot?.clock;
    // Every block size fits.
    let remaining = clock.remaining.load(Ordering::Relaxed).wrapping_sub(bytes as i64);
    clock.remaining.store(remaining, Ordering::Relaxed);
    if remaining >= 0 {
        return None;
    }
    THREAD_STATE.with(|state| sample_if_due(state, clock, tag, bytes))
}

#[cold]
#[inline(never)]
fn sample_if_due(state: &ThreadState, clock: &Clock, tag: u16, bytes: usize) -> Option<u32> {
    let interval = INTERVAL.load(Ordering::Relaxed);
    if interval == 0 || state.sampling_paused.get() {
        clock.drawn_for.store(0, Ordering::Relaxed);
        clock.remaining.store(CHECK_INTERVAL, Ordering::Relaxed);
        return None;
    }
    if clock.drawn_for.swap(interval, Ordering::Relaxed) != interval {
        // No point had been drawn. Draw one, and check whether it falls into this block.
        let remaining = clock.draw(interval).saturating_sub(bytes as i64);
        if remaining >= 0 {
            clock.remaining.store(remaining, Ordering::Relaxed);
            return None;
        }
    }
    // The distance between two points is memoryless, so the next one may be counted from the end of
    // this block.
    clock.remaining.store(clock.draw(interval), Ordering::Relaxed);
    state.sampling_paused.set(true);
    let mut frames = [0; FRAMES];
    let depth = stack::walk(&mut frames);
    state.sampling_paused.set(false);
    let weight = bytes as f64 / -(-(bytes as f64) / interval as f64).exp_m1();
    record::store(tag, weight as u64, bytes as u64, frames.get(..depth)?)
}
