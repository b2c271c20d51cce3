//! Memory whose release failed. Its release is retried.

use std::{
    any::Any,
    mem,
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

/// Something whose release failed. Dropping it tries again, and strands it again on failure.
type StrandedMemory = Box<dyn Any + Send>;

static STRANDED: Mutex<Vec<(u64, StrandedMemory)>> = Mutex::new(Vec::new());
static STRANDED_BYTES: AtomicU64 = AtomicU64::new(0);

fn stranded() -> MutexGuard<'static, Vec<(u64, StrandedMemory)>> {
    STRANDED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Keeps `memory` of this many bytes, whose drop retries its release.
pub(super) fn strand(bytes: u64, memory: impl Any + Send) {
    let memory: StrandedMemory = Box::new(memory);
    STRANDED_BYTES.fetch_add(bytes, Ordering::Relaxed);
    stranded().push((bytes, memory));
}

/// Returns the bytes of this process's regions that the driver or the kernel refused to release.
/// They stay charged.
///
/// See [`Region`](super::Region) for an example.
#[must_use]
pub fn stranded_bytes() -> u64 {
    STRANDED_BYTES.load(Ordering::Relaxed)
}

/// Tries again to release stranded memory, and returns the bytes that are still stranded.
///
/// Creating a region and every quiet point do this too. Blocks while devices are busy, if anything
/// is stranded.
///
/// See [`Region`](super::Region) for an example.
pub fn retry_stranded() -> u64 {
    if stranded_bytes() == 0 {
        return 0;
    }
    let waiting = mem::take(&mut *stranded());
    for (bytes, memory) in waiting {
        STRANDED_BYTES.fetch_sub(bytes, Ordering::Relaxed);
        // Its `Drop` tries again, without the lock.
        drop(memory);
    }
    stranded_bytes()
}
