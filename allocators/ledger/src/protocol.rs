//! The protocol of claims: how members take bytes of one capacity without a lock.
//!
//! ```text
//!   pending ── fence ── sum of all slots ── fits ──────────▶ claimed, then pending is cleared
//!                            ├── exceeds by granted claims ─▶ pending is cleared: refused
//!                            └── exceeds by others' pending ▶ pending is cleared: in conflict
//! ```
//!
//! # Invariants
//! 1. The sum of granted claims never exceeds the capacity. Of two members whose claims do not both
//!    fit, the one whose fence is second sees the other's bytes, as pending or as claimed.
//! 2. A slot is never seen with fewer bytes than it holds, from its claim to its release: its
//!    pending bytes are read before its claimed ones, and cleared after those have grown.
//! 3. A claim is refused only because of bytes that are granted, reserved or waited for. A claim
//!    that other pending claims alone stand in the way of is in conflict, and tried again.
//!
//! A slot has one writer, which serializes its own threads. Values are not trusted: sums saturate.
//!
//! A loom model tries every interleaving of two claims, and of a claim with a claim and a release:
//! `RUSTFLAGS="--cfg loom" cargo test -p aquifer-ledger --lib --release -- protocol::`.

use crate::layout::{header, slot};
use std::sync::atomic::{
    AtomicU64,
    Ordering::{self, Acquire, Relaxed, Release},
};

/// A wish that its member has not renewed for so long no longer counts: the member may be stopped.
pub(crate) const LAPSES_AFTER_NS: u64 = 100_000_000;

/// A word of a ledger: an atomic of the standard library, or one of loom's in the model.
pub(crate) trait LedgerWord {
    /// Returns the value.
    fn load(&self, order: Ordering) -> u64;
    /// Replaces the value.
    fn store(&self, value: u64, order: Ordering);
    /// Orders the stores of this thread before its later loads.
    fn full_fence();
}

impl LedgerWord for AtomicU64 {
    fn load(&self, order: Ordering) -> u64 {
        Self::load(self, order)
    }

    fn store(&self, value: u64, order: Ordering) {
        #[cfg(test)]
        tests::before_store();
        Self::store(self, value, order);
    }

    fn full_fence() {
        std::sync::atomic::fence(Ordering::SeqCst);
    }
}

/// Replaces a word. Every store of a member to its slot is one of these, and the tests let a
/// process die before each of them.
pub(crate) fn put<W: LedgerWord>(word: &W, value: u64, order: Ordering) {
    word.store(value, order);
}

/// The words of a ledger, and the number of words of a slot.
#[derive(Debug)]
pub(crate) struct Table<'a, W> {
    pub(crate) header: &'a [W],
    pub(crate) slots: &'a [W],
    pub(crate) stride: usize,
}

impl<'a, W> Table<'a, W> {
    pub(crate) fn slot(&self, number: usize) -> &'a [W] {
        let start = (number * self.stride).min(self.slots.len());
        &self.slots[start..(start + self.stride).min(self.slots.len())]
    }

    fn others(&self, own: usize, used: usize) -> impl Iterator<Item = &'a [W]> {
        self.slots
            .chunks_exact(self.stride)
            .take(used)
            .enumerate()
            .filter(move |(number, _)| *number != own)
            .map(|(_, slot)| slot)
    }
}

/// The order in which claims are served: those within their member's guarantee first, then by
/// priority, then by the number of the wish.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Rank {
    /// Greater ranks come first.
    pub(crate) word: u64,
    /// Among equal ranks, the smaller number comes first.
    pub(crate) ticket: u64,
}

impl Rank {
    pub(crate) fn new(within_guarantee: bool, priority: i32, ticket: u64) -> Self {
        let above_lowest = (i64::from(priority) - i64::from(i32::MIN)) as u64;
        Self { word: u64::from(within_guarantee) << 32 | above_lowest, ticket }
    }

    pub(crate) fn is_before(self, other: Self) -> bool {
        self.word > other.word || (self.word == other.word && self.ticket < other.ticket)
    }
}

/// A wish of a member, as another one reads it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Wish {
    pub(crate) bytes: u64,
    pub(crate) rank: Rank,
    /// When it began.
    pub(crate) since: u64,
}

/// Returns the wish of a slot, unless it has lapsed.
pub(crate) fn wish<W: LedgerWord>(slot: &[W], now: impl FnOnce() -> u64) -> Option<Wish> {
    let bytes = slot[slot::WANTED].load(Acquire);
    if bytes == 0 {
        return None;
    }
    let word = |at: usize| slot[at].load(Relaxed);
    // A wish that is renewed meanwhile is a little younger than `now`. A time far in the future is
    // none of this machine's clock.
    let age = now().abs_diff(word(slot::RENEWED));
    (age < LAPSES_AFTER_NS).then(|| Wish {
        bytes,
        rank: Rank { word: word(slot::RANK), ticket: word(slot::TICKET) },
        since: word(slot::WISHED),
    })
}

/// What others hold, and what is kept for those that come first.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(crate) struct Others {
    /// Granted and reserved bytes.
    pub(crate) held: u64,
    /// `held`, with the bytes of pending claims.
    pub(crate) at_most: u64,
    /// Bytes of wishes that come first.
    pub(crate) kept: u64,
}

/// The settings of one claim.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Terms {
    /// The claimant's slot.
    pub(crate) own: usize,
    /// The number of slots that may be in use.
    pub(crate) used: usize,
    pub(crate) capacity: u64,
    pub(crate) rank: Rank,
}

/// Sums what the other members hold.
pub(crate) fn others<W: LedgerWord>(
    table: &Table<'_, W>,
    terms: &Terms,
    now: impl Fn() -> u64,
) -> Others {
    let mut sum = Others::default();
    for slot in table.others(terms.own, terms.used) {
        // Invariant 2: in this order.
        let pending = slot[slot::PENDING].load(Acquire);
        let claimed = slot[slot::CLAIMED].load(Acquire);
        let reserved = slot[slot::RESERVED].load(Relaxed);
        sum.held = sum.held.saturating_add(claimed.max(reserved));
        sum.at_most = sum.at_most.saturating_add(claimed.saturating_add(pending).max(reserved));
        if let Some(wish) = wish(slot, &now)
            && wish.rank.is_before(terms.rank)
        {
            sum.kept = sum.kept.saturating_add(wish.bytes);
        }
    }
    sum
}

/// The outcome of a claim.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Outcome {
    /// The bytes are claimed.
    Granted,
    /// Only pending claims of others stand in the way. Nothing has changed.
    Conflict(Others),
    /// The bytes do not fit. Nothing has changed.
    Refused(Others),
}

/// Claims `bytes` on top of `claimed`, which the own slot has. The caller is the only writer of the
/// slot.
pub(crate) fn claim<W: LedgerWord>(
    table: &Table<'_, W>,
    terms: &Terms,
    claimed: u64,
    bytes: u64,
    now: impl Fn() -> u64,
) -> Outcome {
    let own = table.slot(terms.own);
    let Some(next) = claimed.checked_add(bytes) else {
        return Outcome::Refused(others(table, terms, now));
    };
    // Release: a thread that reads these bytes also reads the claims granted before.
    own[slot::PENDING].store(bytes, Release);
    W::full_fence();
    let sum = others(table, terms, now);
    let unaccounted = table.header[header::UNACCOUNTED].load(Relaxed);
    let capacity = terms.capacity.saturating_sub(unaccounted);
    let fits = |held: u64| held.saturating_add(sum.kept).saturating_add(next) <= capacity;
    let outcome = if fits(sum.at_most) {
        own[slot::CLAIMED].store(next, Release);
        Outcome::Granted
    } else if fits(sum.held) {
        Outcome::Conflict(sum)
    } else {
        Outcome::Refused(sum)
    };
    own[slot::PENDING].store(0, Release);
    outcome
}

#[cfg(all(test, loom))]
mod tests {
    pub(super) fn before_store() {}
}

#[cfg(test)]
#[cfg(not(loom))]
pub(crate) mod tests {
    use super::*;
    use crate::layout::{HEADER_WORDS, SLOT_WORDS};
    use nix::{
        sys::signal::{Signal, kill},
        unistd::Pid,
    };
    use std::{env, sync::OnceLock};

    pub(crate) const DIE_AT: &str = "AQUIFER_TEST_DIE_AT";

    /// Kills the process before its n-th store if the variable says so.
    pub(super) fn before_store() {
        static AT: OnceLock<Option<u64>> = OnceLock::new();
        static STORES: AtomicU64 = AtomicU64::new(0);
        let at = AT.get_or_init(|| env::var(DIE_AT).ok()?.parse().ok());
        if at.is_some_and(|at| STORES.fetch_add(1, Relaxed) == at) {
            kill(Pid::this(), Signal::SIGKILL).unwrap();
        }
    }

    struct Memory(Vec<AtomicU64>, Vec<AtomicU64>);

    impl Memory {
        fn new(slots: usize) -> Self {
            let zeros = |count: usize| (0..count).map(|_| AtomicU64::new(0)).collect();
            Self(zeros(HEADER_WORDS), zeros(slots * SLOT_WORDS))
        }

        fn table(&self) -> Table<'_, AtomicU64> {
            Table { header: &self.0, slots: &self.1, stride: SLOT_WORDS }
        }

        fn set(&self, number: usize, at: usize, value: u64) {
            self.table().slot(number)[at].store(value, Relaxed);
        }

        fn claim(&self, own: usize, bytes: u64, rank: Rank) -> Outcome {
            let terms = Terms { own, used: 3, capacity: 100, rank };
            let claimed = self.table().slot(own)[slot::CLAIMED].load(Relaxed);
            claim(&self.table(), &terms, claimed, bytes, || 1000)
        }
    }

    const PLAIN: Rank = Rank { word: 0, ticket: u64::MAX };

    #[test]
    fn a_claim_is_granted_up_to_what_others_hold_reserve_and_wait_for() {
        let memory = Memory::new(3);
        memory.set(1, slot::CLAIMED, 30);
        memory.set(2, slot::RESERVED, 20);
        assert!(matches!(memory.claim(0, 51, PLAIN), Outcome::Refused(_)));
        assert_eq!(memory.claim(0, 40, PLAIN), Outcome::Granted);
        // A wish of a higher rank keeps the rest, and one of a lower rank does not.
        memory.set(1, slot::RENEWED, 1000);
        memory.set(1, slot::RANK, Rank::new(false, 1, 0).word);
        memory.set(1, slot::WANTED, 5);
        assert!(matches!(memory.claim(0, 10, PLAIN), Outcome::Refused(Others { kept: 5, .. })));
        assert_eq!(memory.claim(0, 10, Rank::new(true, 0, u64::MAX)), Outcome::Granted);
        assert_eq!(memory.table().slot(0)[slot::CLAIMED].load(Relaxed), 50);
        memory.table().header[header::UNACCOUNTED].store(1, Relaxed);
        assert!(matches!(memory.claim(0, 0, Rank::new(true, 0, 0)), Outcome::Refused(_)));
    }

    #[test]
    fn pending_bytes_of_others_are_a_conflict_and_no_refusal() {
        let memory = Memory::new(3);
        memory.set(1, slot::PENDING, 60);
        assert!(matches!(memory.claim(0, 60, PLAIN), Outcome::Conflict(_)));
        assert_eq!(memory.claim(0, 40, PLAIN), Outcome::Granted);
    }

    #[test]
    fn wishes_that_are_not_renewed_or_of_another_clock_do_not_count() {
        let memory = Memory::new(3);
        memory.set(1, slot::RANK, u64::MAX);
        memory.set(1, slot::WANTED, 100);
        let slot = memory.table().slot(1);
        assert!(wish(slot, || LAPSES_AFTER_NS - 1).is_some());
        assert!(wish(slot, || LAPSES_AFTER_NS).is_none());
        memory.set(1, slot::RENEWED, 1000 + LAPSES_AFTER_NS);
        assert_eq!(memory.claim(0, 100, PLAIN), Outcome::Granted);
    }

    #[test]
    fn a_wish_that_is_renewed_while_it_is_read_counts() {
        let memory = Memory::new(3);
        memory.set(1, slot::RANK, u64::MAX);
        memory.set(1, slot::RENEWED, 1000);
        memory.set(1, slot::WANTED, 100);
        let renewed_after_the_clock_is_read = || {
            memory.set(1, slot::RENEWED, 1001);
            1000
        };
        assert!(wish(memory.table().slot(1), renewed_after_the_clock_is_read).is_some());
    }

    #[test]
    fn noise_in_other_slots_refuses_claims_and_overflows_nothing() {
        let memory = Memory::new(3);
        for at in 0..SLOT_WORDS {
            memory.set(1, at, u64::MAX);
            memory.set(2, at, u64::MAX - 1);
        }
        assert!(matches!(memory.claim(0, 1, PLAIN), Outcome::Refused(_)));
        assert!(matches!(memory.claim(0, u64::MAX, PLAIN), Outcome::Refused(_)));
    }

    #[test]
    fn ranks_are_ordered_by_guarantee_then_priority_then_arrival() {
        let ranks = [
            Rank::new(true, -5, 9),
            Rank::new(false, i32::MAX, 8),
            Rank::new(false, 0, 3),
            Rank::new(false, 0, 4),
            Rank::new(false, i32::MIN, 1),
        ];
        for (at, first) in ranks.iter().enumerate() {
            for (other, second) in ranks.iter().enumerate() {
                assert_eq!(first.is_before(*second), at < other, "{first:?} {second:?}");
            }
        }
    }
}

#[cfg(all(test, loom))]
mod models {
    use super::*;
    use loom::{model, sync::atomic, thread};
    use std::sync::Arc;

    impl LedgerWord for atomic::AtomicU64 {
        fn load(&self, order: Ordering) -> u64 {
            Self::load(self, order)
        }

        fn store(&self, value: u64, order: Ordering) {
            Self::store(self, value, order);
        }

        fn full_fence() {
            atomic::fence(Ordering::SeqCst);
        }
    }

    /// As few words as the protocol reads, since each is an object of the model.
    const STRIDE: usize = slot::WANTED + 1;

    struct Memory(Vec<atomic::AtomicU64>, Vec<atomic::AtomicU64>);

    impl Memory {
        fn new() -> Arc<Self> {
            let zeros = |count: usize| (0..count).map(|_| atomic::AtomicU64::new(0)).collect();
            Arc::new(Self(zeros(header::UNACCOUNTED + 1), zeros(2 * STRIDE)))
        }

        fn table(&self) -> Table<'_, atomic::AtomicU64> {
            Table { header: &self.0, slots: &self.1, stride: STRIDE }
        }

        fn claim(&self, own: usize, claimed: u64, bytes: u64) -> Outcome {
            let rank = Rank::new(false, 0, u64::MAX);
            let terms = Terms { own, used: 2, capacity: 100, rank };
            claim(&self.table(), &terms, claimed, bytes, || 0)
        }

        fn release(&self, own: usize, rest: u64) {
            self.table().slot(own)[slot::CLAIMED].store(rest, Release);
        }
    }

    #[test]
    fn of_two_claims_that_do_not_both_fit_at_most_one_is_granted() {
        model(|| {
            let memory = Memory::new();
            let other = thread::spawn({
                let memory = memory.clone();
                move || memory.claim(1, 0, 60) == Outcome::Granted
            });
            let own = memory.claim(0, 0, 60);
            let other = other.join().unwrap();
            assert!(own != Outcome::Granted || !other);
            // Neither has held any bytes when the other is refused for good.
            assert!(!matches!(own, Outcome::Refused(_)) || other);
        });
    }

    #[test]
    fn two_claims_one_after_the_other_are_never_seen_as_fewer_bytes() {
        model(|| {
            let memory = Memory::new();
            let other = thread::spawn({
                let memory = memory.clone();
                move || {
                    let first = memory.claim(1, 0, 30) == Outcome::Granted;
                    let held = if first { 30 } else { 0 };
                    let second = memory.claim(1, held, 40) == Outcome::Granted;
                    held + if second { 40 } else { 0 }
                }
            });
            let own = if memory.claim(0, 0, 50) == Outcome::Granted { 50 } else { 0 };
            assert!(own + other.join().unwrap() <= 100);
        });
    }

    #[test]
    fn released_bytes_are_claimed_once() {
        model(|| {
            let memory = Memory::new();
            assert_eq!(memory.claim(1, 0, 60), Outcome::Granted);
            let other = thread::spawn({
                let memory = memory.clone();
                move || {
                    memory.release(1, 0);
                    memory.claim(1, 0, 70) == Outcome::Granted
                }
            });
            let own = memory.claim(0, 0, 60) == Outcome::Granted;
            let other = other.join().unwrap();
            assert!(!(own && other));
        });
    }
}
