//! The owner-biased lock of a magazine.
//!
//! The thread that owns a magazine enters it by plain loads and stores. Another thread can enter
//! too and drain the magazine, when memory is short or when a pool is trimmed or closed. It needs
//! no help from the owner, which may never call again:
//!
//! ```text
//!   owner                                             another thread
//!   owner_inside := true                              with the lock: revoked, generation := 0
//!   (compiler fence)                                  membarrier on every thread
//!   generation? ─ another's ─► owner_inside := false  wait while owner_inside
//!     └─ its pool's ─► pop or push                    with the lock: drain
//!   owner_inside := false                             with the lock: restore generation
//! ```
//!
//! `generation` is the generation of the pool that the magazine serves. One load of it shows the
//! owner that the magazine serves this pool, that the pool is open, and that no other thread is
//! inside.
//!
//! The membarrier acts as a full fence on both sides, so at least one side sees the other's flag.
//! Only the rare side pays for it. Without support of the kernel for this barrier there are no
//! magazines. A spin lock instead costs 11 to 16 ns more for each pair on the host of an H200.
//!
//! # The lock proof
//! An owner may also use its magazine while it holds the pool's lock, to refill it, and may have to
//! write `generation` then because the magazine is new. If the bias could be revoked without that
//! lock, the owner could read the old generation and restore it just after another thread has
//! revoked it. Both threads would be inside. So every write except that of the owner's flag needs
//! the [`LockProof`], which the pool's lock guards.
//!
//! The loom models below try every interleaving. They find two threads inside if either half of the
//! barrier, the wait, or the lock is omitted: `RUSTFLAGS="--cfg loom" cargo test -p aquifer-host
//! --lib --release -- pool::owner_biased_lock`.

#[cfg(loom)]
use loom::sync::atomic::{AtomicBool, AtomicU64, fence as light_fence};
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
#[cfg(not(loom))]
use std::sync::atomic::{AtomicBool, AtomicU64, compiler_fence as light_fence};

/// Proof that the caller holds the pool's lock, which guards this value.
#[derive(Debug)]
pub(super) struct LockProof(());

impl LockProof {
    /// Creates the proof of one lock. To be called only where the lock is made.
    pub(super) const fn new() -> Self {
        Self(())
    }
}

/// The owner-biased lock of one magazine.
#[derive(Debug)]
pub(super) struct OwnerBiasedLock {
    /// The owner is inside.
    owner_inside: AtomicBool,
    /// Another thread is inside or is entering.
    revoked: AtomicBool,
    /// The generation of the pool that the magazine serves. Zero if there is none, and while
    /// another thread is inside or entering.
    generation: AtomicU64,
    /// The generation of the pool whose blocks and counts the magazine holds. Zero if it holds
    /// none.
    contents_generation: AtomicU64,
}

/// Guard of the owner inside. Its drop lets other threads in.
pub(super) struct OwnerGuard<'a>(&'a OwnerBiasedLock);

impl Drop for OwnerGuard<'_> {
    #[inline(always)]
    fn drop(&mut self) {
        self.0.owner_inside.store(false, Release);
    }
}

impl OwnerBiasedLock {
    pub(super) fn new() -> Self {
        Self {
            owner_inside: AtomicBool::new(false),
            revoked: AtomicBool::new(false),
            generation: AtomicU64::new(0),
            contents_generation: AtomicU64::new(0),
        }
    }

    /// Enters as the owner. Returns `None` if the magazine does not serve the pool of this
    /// generation, or if another thread is entering. Never waits.
    #[inline(always)]
    pub(super) fn enter(&self, generation: u64) -> Option<OwnerGuard<'_>> {
        self.owner_inside.store(true, Relaxed);
        light_fence(SeqCst);
        let guard = OwnerGuard(self);
        (self.generation.load(Acquire) == generation).then_some(guard)
    }

    /// Returns the generation that the magazine serves. For the owner.
    #[inline(always)]
    pub(super) fn generation(&self) -> u64 {
        self.generation.load(Relaxed)
    }

    /// Returns the generation of the pool whose blocks and counts the magazine holds, or zero.
    pub(super) fn contents_generation(&self) -> u64 {
        self.contents_generation.load(Relaxed)
    }

    /// Step 1 of another thread's entry: keeps the owner from entering. One thread at a time may do
    /// this.
    pub(super) fn begin_revocation(&self, _: &mut LockProof) {
        debug_assert!(!self.is_revoked(), "two threads drain at once");
        self.revoked.store(true, Relaxed);
        self.generation.store(0, Relaxed);
    }

    /// Step 3 of another thread's entry, after a barrier on every thread: waits the few nanoseconds
    /// until the owner is outside.
    pub(super) fn wait_for_owner(&self) {
        #[cfg(not(loom))]
        let backoff = crossbeam_utils::Backoff::new();
        while self.owner_inside.load(Acquire) {
            #[cfg(not(loom))]
            backoff.snooze();
            #[cfg(loom)]
            loom::thread::yield_now();
        }
    }

    /// Returns whether another thread is inside or entering. For that thread, and for an owner that
    /// holds the lock. In that case the owner must not touch the magazine.
    pub(super) fn is_revoked(&self) -> bool {
        self.revoked.load(Relaxed)
    }

    /// Last step of another thread's entry: lets the owner in again if the contents belong to
    /// `generation`, the generation of the open pool.
    pub(super) fn end_revocation(&self, _: &mut LockProof, generation: u64) {
        if self.contents_generation() == generation {
            self.generation.store(generation, Release);
        }
        self.revoked.store(false, Relaxed);
    }

    /// Assigns an unassigned magazine to the pool of `generation`. For the owner, and only
    /// while [`OwnerBiasedLock::is_revoked`] is `false`.
    pub(super) fn assign(&self, _: &mut LockProof, generation: u64) {
        debug_assert!(!self.is_revoked(), "the owner must not touch the magazine now");
        self.generation.store(generation, Relaxed);
        self.contents_generation.store(generation, Relaxed);
    }

    /// Keeps the owner from entering, whatever the contents are.
    pub(super) fn disable(&self, _: &mut LockProof) {
        self.generation.store(0, Relaxed);
    }

    /// Marks the magazine as empty. For the thread that has emptied it.
    pub(super) fn mark_empty(&self, _: &mut LockProof) {
        self.contents_generation.store(0, Relaxed);
    }
}

#[cfg(all(test, loom))]
mod models {
    use super::*;
    use aquifer_stream::Spin;
    use loom::{cell::UnsafeCell, sync::Arc, sync::atomic::fence, thread};

    /// A part of the protocol that is omitted.
    #[derive(Clone, Copy, PartialEq)]
    enum Omitted {
        Nothing,
        Barrier,
        Wait,
        Lock,
    }

    /// A lock and what it guards. Loom reports two threads inside at once.
    struct Guarded {
        spin: Spin<LockProof>,
        lock: OwnerBiasedLock,
        inside: UnsafeCell<()>,
    }

    impl Guarded {
        fn access(&self) {
            self.inside.with_mut(|_| ());
        }

        /// The steps of an owner: the fast path, or else the path with the lock.
        fn access_as_owner(&self) {
            if let Some(_inside) = self.lock.enter(1) {
                self.access();
                return;
            }
            self.spin.with(|proof| {
                if !self.lock.is_revoked() {
                    if self.lock.generation() != 1 {
                        self.lock.assign(proof, 1);
                    }
                    self.access();
                }
            });
        }

        fn drain(&self, omitted: Omitted) {
            if omitted == Omitted::Lock {
                self.lock.begin_revocation(&mut LockProof::new());
            } else {
                self.spin.with(|proof| self.lock.begin_revocation(proof));
            }
            if omitted != Omitted::Barrier {
                fence(SeqCst);
            }
            if omitted != Omitted::Wait {
                self.lock.wait_for_owner();
            }
            self.spin.with(|_| self.access());
            self.spin.with(|proof| self.lock.end_revocation(proof, 1));
        }
    }

    /// Runs an owner against a thread that drains, with a new magazine and with one in use.
    fn check_exclusion(omitted: Omitted) {
        for served in [false, true] {
            loom::model(move || {
                let guarded = Arc::new(Guarded {
                    spin: Spin::new(LockProof::new()),
                    lock: OwnerBiasedLock::new(),
                    inside: UnsafeCell::new(()),
                });
                if served {
                    guarded.spin.with(|proof| guarded.lock.assign(proof, 1));
                }
                let owner = {
                    let guarded = guarded.clone();
                    thread::spawn(move || (0..2).for_each(|_| guarded.access_as_owner()))
                };
                guarded.drain(omitted);
                owner.join().unwrap();
                guarded.access_as_owner();
                assert_eq!(guarded.lock.generation(), 1, "the bias is restored");
            });
        }
    }

    #[test]
    fn owner_and_draining_thread_exclude_each_other() {
        check_exclusion(Omitted::Nothing);
    }

    #[test]
    #[should_panic = "Causality violation"]
    fn exclusion_needs_the_barrier() {
        check_exclusion(Omitted::Barrier);
    }

    #[test]
    #[should_panic = "Causality violation"]
    fn exclusion_needs_the_wait_for_the_owner() {
        check_exclusion(Omitted::Wait);
    }

    #[test]
    #[should_panic = "Causality violation"]
    fn exclusion_needs_revocation_under_the_lock() {
        check_exclusion(Omitted::Lock);
    }
}
