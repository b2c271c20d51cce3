//! The door of a magazine: its owner goes in and out by plain stores, and others now and then,
//! without its help.
//!
//! The thread that a magazine belongs to takes from it and puts into it by plain loads and stores.
//! Somebody else may want what is in it, when memory is short, when a pool is trimmed or closed,
//! and must then come in although the owner may never call again:
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
//! The life is the generation of the pool that the magazine serves, so one look tells the owner
//! that it is the right magazine, that the pool is open, and that nobody else is at it.
//!
//! With the barrier between its two steps on one side, at least one of them sees the other's flag:
//! it is as if both had a full fence, and only the rare one pays. A kernel that has no such barrier
//! gets no magazines.
//!
//! # The key
//! An owner may also be at its magazine with the pool's lock, when it brings blocks from the books,
//! and may have to write the life then: it has come to a new magazine. Were the door not shut under
//! that lock as well, the owner could look, find it open, and open it again behind the back of the
//! one who had just shut it, and both would be inside. So all that is written of a door but the
//! owner's flag takes the [`Key`], which lies under the lock.
//!
//! The models below try every interleaving of it, and find two threads inside when either half of
//! the barrier, the wait, or the lock is left out: `RUSTFLAGS="--cfg loom" cargo test -p
//! aquifer-host --lib --release -- pool::door`.

#[cfg(loom)]
use loom::sync::atomic::{AtomicBool, AtomicU64, fence as light_fence};
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
#[cfg(not(loom))]
use std::sync::atomic::{AtomicBool, AtomicU64, compiler_fence as light_fence};

/// Lies under the lock of a pool: who has it has the lock.
#[derive(Debug)]
pub(super) struct Key(());

impl Key {
    /// The key of one lock, for whoever makes the lock.
    pub(super) const fn new() -> Self {
        Self(())
    }
}

/// The flags of one magazine.
#[derive(Debug)]
pub(super) struct Door {
    /// The owner is inside.
    busy: AtomicBool,
    /// Somebody else wants in, or is.
    wanted: AtomicBool,
    /// The generation of the pool that the magazine serves; zero for none, and while somebody else
    /// wants in.
    life: AtomicU64,
    /// The generation of the pool whose blocks and counts are behind it; zero when nothing is.
    of: AtomicU64,
}

/// The owner, inside. Its end lets others in.
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

    /// The owner's way in if the magazine serves the pool of this generation; `None` too while
    /// somebody else wants in. Never waits.
    #[inline(always)]
    pub(super) fn enter(&self, life: u64) -> Option<Inside<'_>> {
        self.busy.store(true, Relaxed);
        light_fence(SeqCst);
        let inside = Inside(self);
        (self.life.load(Acquire) == life).then_some(inside)
    }

    /// Whom it serves, for the owner's look.
    #[inline(always)]
    pub(super) fn life(&self) -> u64 {
        self.life.load(Relaxed)
    }

    /// The generation of the pool whose blocks and counts are behind it; zero when nothing is.
    pub(super) fn of(&self) -> u64 {
        self.of.load(Relaxed)
    }

    /// The first step of another thread's way in. One thread at a time may be on it.
    pub(super) fn want(&self, _: &mut Key) {
        self.wanted.store(true, Relaxed);
        self.life.store(0, Relaxed);
    }

    /// The third step, after a barrier on every thread: waits the few nanoseconds that the owner is
    /// inside.
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

    /// Whether another thread is on its way in. For that thread, and for the owner with the lock,
    /// who leaves everything as it is then.
    pub(super) fn is_wanted(&self) -> bool {
        self.wanted.load(Relaxed)
    }

    /// Lets the owner in again, if what is there is of `life`, which is the open pool's.
    pub(super) fn let_go(&self, _: &mut Key, life: u64) {
        if self.of() == life {
            self.life.store(life, Release);
        }
        self.wanted.store(false, Relaxed);
    }

    /// Says whose it is from now on, if it has been nobody's. For the owner, where nobody [wants
    /// in](Door::is_wanted).
    pub(super) fn serve(&self, _: &mut Key, life: u64) {
        self.life.store(life, Relaxed);
        self.of.store(life, Relaxed);
    }

    /// Serves nobody from now on, whatever is there.
    pub(super) fn void(&self, _: &mut Key) {
        self.life.store(0, Relaxed);
    }

    /// Says that nothing is there any more. For whoever has emptied it.
    pub(super) fn forget(&self, _: &mut Key) {
        self.of.store(0, Relaxed);
    }
}

#[cfg(all(test, loom))]
mod models {
    use super::*;
    use aquifer_stream::Spin;
    use loom::{cell::UnsafeCell, sync::Arc, sync::atomic::fence, thread};

    /// What may be left out.
    #[derive(Clone, Copy, PartialEq)]
    enum Without {
        Nothing,
        TheBarrier,
        TheWait,
        TheLock,
    }

    /// A door, and what is behind it: loom objects to two who are there at once.
    struct Room {
        lock: Spin<Key>,
        door: Door,
        inside: UnsafeCell<()>,
    }

    impl Room {
        fn visit(&self) {
            self.inside.with_mut(|_| ());
        }

        /// What an owner does for a block: the short way, or by the lock, as if to fetch more.
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

    /// One thread uses its magazine, which is new to it or not, while another empties it.
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
