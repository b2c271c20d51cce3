//! The owner-biased lock of a magazine.
//!
//! The thread that owns a magazine enters it by plain loads and stores. Another thread can enter
//! too and drain the magazine, when memory is short or when a pool is trimmed or closed. It needs
//! no help from the owner, which may never call again:
//!
//! ```text
//!   owner                                      another thread
//!   busy := true                               with the lock: wanted, life := 0
//!   (compiler fence)                           membarrier on every thread
//!   life? ─ not its pool's ─► busy := false    wait while busy
//!     └─ as it was ─► take or put              with the lock: take all of it
//!   busy := false                              with the lock: life := the pool's again
//! ```
//!
//! `life` is the generation of the pool that the magazine serves. One load of it shows the owner
//! that the magazine serves this pool, that the pool is open, and that no other thread is inside.
//!
//! The membarrier acts as a full fence on both sides, so at least one side sees the other's flag.
//! Only the rare side pays for it. Without support of the kernel for this barrier there are no
//! magazines.
//!
//! # The key
//! An owner may also use its magazine while it holds the pool's lock, to refill it, and may have to
//! write `life` then because the magazine is new. If the door could be closed without that lock,
//! the owner could read it as open and then reopen it just after another thread has closed it. Both
//! threads would be inside. So every write except that of the owner's flag needs the [`Key`], which
//! the pool's lock guards.
//!
//! The loom models below try every interleaving. They find two threads inside if either half of the
//! barrier, the wait, or the lock is omitted: `RUSTFLAGS="--cfg loom" cargo test -p aquifer-host
//! --lib --release -- pool::door`.

#[cfg(loom)]
use loom::sync::atomic::{AtomicBool, AtomicU64, fence as light_fence};
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
#[cfg(not(loom))]
use std::sync::atomic::{AtomicBool, AtomicU64, compiler_fence as light_fence};

/// Proof that the caller holds the pool's lock, which guards this value.
#[derive(Debug)]
pub(super) struct Key(());

impl Key {
    /// Creates the key of one lock. To be called only where the lock is made.
    pub(super) const fn new() -> Self {
        Self(())
    }
}

/// The owner-biased lock of one magazine.
#[derive(Debug)]
pub(super) struct Door {
    /// The owner is inside.
    busy: AtomicBool,
    /// Another thread is inside or is entering.
    wanted: AtomicBool,
    /// The generation of the pool that the magazine serves. Zero if there is none, and while
    /// another thread is inside or entering.
    life: AtomicU64,
    /// The generation of the pool whose blocks and counts the magazine holds. Zero if it holds
    /// none.
    of: AtomicU64,
}

/// Guard of the owner inside. Its drop lets other threads in.
pub(super) struct Inside<'a>(&'a Door);

impl Drop for Inside<'_> {
    #[inline(always)]
    fn drop(&mut self) {
        self.0.busy.store(false, Release);
    }
}

impl Door {
    pub(super) fn new() -> Self {
        Self {
            busy: AtomicBool::new(false),
            wanted: AtomicBool::new(false),
            life: AtomicU64::new(0),
            of: AtomicU64::new(0),
        }
    }

    /// Enters as the owner. Returns `None` if the magazine does not serve the pool of this
    /// generation, or if another thread is entering. Never waits.
    #[inline(always)]
    pub(super) fn enter(&self, life: u64) -> Option<Inside<'_>> {
        self.busy.store(true, Relaxed);
        light_fence(SeqCst);
        let inside = Inside(self);
        (self.life.load(Acquire) == life).then_some(inside)
    }

    /// Returns the generation that the magazine serves. For the owner.
    #[inline(always)]
    pub(super) fn life(&self) -> u64 {
        self.life.load(Relaxed)
    }

    /// Returns the generation of the pool whose blocks and counts the magazine holds, or zero.
    pub(super) fn of(&self) -> u64 {
        self.of.load(Relaxed)
    }

    /// Step 1 of another thread's entry: closes the door to the owner. One thread at a time may do
    /// this.
    pub(super) fn want(&self, _: &mut Key) {
        self.wanted.store(true, Relaxed);
        self.life.store(0, Relaxed);
    }

    /// Step 3 of another thread's entry, after a barrier on every thread: waits the few nanoseconds
    /// until the owner is outside.
    pub(super) fn wait(&self) {
        #[cfg(not(loom))]
        let backoff = crossbeam_utils::Backoff::new();
        while self.busy.load(Acquire) {
            #[cfg(not(loom))]
            backoff.snooze();
            #[cfg(loom)]
            loom::thread::yield_now();
        }
    }

    /// Returns whether another thread is inside or entering. For that thread, and for an owner that
    /// holds the lock. In that case the owner must not touch the magazine.
    pub(super) fn is_wanted(&self) -> bool {
        self.wanted.load(Relaxed)
    }

    /// Last step of another thread's entry: lets the owner in again if the contents belong to
    /// `life`, the generation of the open pool.
    pub(super) fn let_go(&self, _: &mut Key, life: u64) {
        if self.of() == life {
            self.life.store(life, Release);
        }
        self.wanted.store(false, Relaxed);
    }

    /// Assigns an unassigned magazine to the pool of generation `life`. For the owner, and only
    /// while [`Door::is_wanted`] is `false`.
    pub(super) fn serve(&self, _: &mut Key, life: u64) {
        self.life.store(life, Relaxed);
        self.of.store(life, Relaxed);
    }

    /// Closes the door to the owner, whatever the contents are.
    pub(super) fn void(&self, _: &mut Key) {
        self.life.store(0, Relaxed);
    }

    /// Marks the magazine as empty. For the thread that has emptied it.
    pub(super) fn forget(&self, _: &mut Key) {
        self.of.store(0, Relaxed);
    }
}

#[cfg(all(test, loom))]
mod models {
    use super::*;
    use aquifer_stream::Spin;
    use loom::{cell::UnsafeCell, sync::Arc, sync::atomic::fence, thread};

    /// A part of the protocol that is omitted.
    #[derive(Clone, Copy, PartialEq)]
    enum Without {
        Nothing,
        TheBarrier,
        TheWait,
        TheLock,
    }

    /// A door and what it guards. Loom reports two threads inside at once.
    struct Room {
        lock: Spin<Key>,
        door: Door,
        inside: UnsafeCell<()>,
    }

    impl Room {
        fn visit(&self) {
            self.inside.with_mut(|_| ());
        }

        /// The steps of an owner: the fast path, or else the path with the lock.
        fn go_in(&self) {
            if let Some(_inside) = self.door.enter(1) {
                self.visit();
                return;
            }
            self.lock.with(|key| {
                if !self.door.is_wanted() {
                    if self.door.life() != 1 {
                        self.door.serve(key, 1);
                    }
                    self.visit();
                }
            });
        }

        fn drain(&self, without: Without) {
            if without == Without::TheLock {
                self.door.want(&mut Key::new());
            } else {
                self.lock.with(|key| self.door.want(key));
            }
            if without != Without::TheBarrier {
                fence(SeqCst);
            }
            if without != Without::TheWait {
                self.door.wait();
            }
            self.lock.with(|_| self.visit());
            self.lock.with(|key| self.door.let_go(key, 1));
        }
    }

    /// Runs an owner against a thread that drains, with a new magazine and with one in use.
    fn one_is_inside_at_a_time(without: Without) {
        for served in [false, true] {
            loom::model(move || {
                let room = Arc::new(Room {
                    lock: Spin::new(Key::new()),
                    door: Door::new(),
                    inside: UnsafeCell::new(()),
                });
                if served {
                    room.lock.with(|key| room.door.serve(key, 1));
                }
                let owner = {
                    let room = room.clone();
                    thread::spawn(move || (0..2).for_each(|_| room.go_in()))
                };
                room.drain(without);
                owner.join().unwrap();
                room.go_in();
                assert_eq!(room.door.life(), 1, "it is let go");
            });
        }
    }

    #[test]
    fn an_owner_and_one_who_empties_its_magazine_are_never_inside_together() {
        one_is_inside_at_a_time(Without::Nothing);
    }

    #[test]
    #[should_panic = "Causality violation"]
    fn they_are_where_the_barrier_is_left_out() {
        one_is_inside_at_a_time(Without::TheBarrier);
    }

    #[test]
    #[should_panic = "Causality violation"]
    fn they_are_where_nobody_waits() {
        one_is_inside_at_a_time(Without::TheWait);
    }

    #[test]
    #[should_panic = "Causality violation"]
    fn they_are_where_the_door_is_shut_without_the_lock() {
        one_is_inside_at_a_time(Without::TheLock);
    }
}
