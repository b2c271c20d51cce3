//! The protocol of claims: how members take bytes of one capacity without a lock.
//!
//! ```text
//!   pending ── fence ── number of slots, sum of all ── fits ──▶ granted ── claimed ── cleared
//!      │                     ├── exceeds by granted claims ───▶ pending is cleared: refused
//!      │                     └── exceeds by others' pending ──▶ pending is cleared: in conflict
//!      └── another member cancels it ─────────────────────────▶ in conflict
//! ```
//!
//! # Invariants
//! 1. The sum of granted claims never exceeds the capacity. Of two members whose claims do not both
//!    fit, the one whose fence is second sees the other's bytes, as pending or as claimed. The
//!    number of slots is read after the fence too: a member that joins raises it before it claims.
//! 2. A slot is never seen with fewer bytes than it holds, from its claim to its release: its
//!    pending sum is read before its claimed one, and cleared after that has grown.
//! 3. A claim is refused only because of bytes that are granted, reserved or waited for. A claim
//!    that other pending claims alone stand in the way of is in conflict, and tried again.
//! 4. A member that stops with a pending claim stops no other: the pending word is changed from
//!    undecided to granted in one step, and until then any member may cancel it.
//! 5. The slot of a dead member is left out, whether it is cleared or not. A member that finds it
//!    dead notes how often it was joined, and counts it again if that has changed by the fence. A
//!    member that joins locks its slot, then changes that number, then claims.
//!
//! A slot has one writer, which serializes its own threads, apart from cancelled claims. Values are
//! not trusted: sums saturate.
//!
//! Loom models try every interleaving of claims with claims, releases, cancellations, and members
//! that join, and let a member stop or die before each of its stores:
//! `RUSTFLAGS="--cfg loom" cargo test -p aquifer-status --lib --release -- protocol::`.

use crate::ledger::layout::{SLOTS, header, slot};
use std::sync::atomic::{
    AtomicU64, AtomicUsize,
    Ordering::{self, AcqRel, Acquire, Relaxed, Release},
};

/// A wish that its member has not renewed for so long no longer counts: the member may be stopped.
pub(crate) const LAPSES_AFTER_NS: u64 = 100_000_000;

/// The flag of a pending sum that is granted, and no longer to be cancelled.
const GRANTED: u64 = 1 << 63;
/// The most that a member can claim.
pub(crate) const MOST_CLAIMED: u64 = GRANTED - 1;

/// A word of a ledger: an atomic of the standard library, or one of loom's in the model.
pub(crate) trait LedgerWord {
    /// Returns the value.
    fn load(&self, order: Ordering) -> u64;
    /// Replaces the value.
    fn store(&self, value: u64, order: Ordering);
    /// Replaces the value if it is `from`. Returns whether it was.
    fn exchange(&self, from: u64, to: u64) -> bool;
    /// Raises the value to this one if it is lower.
    fn raise(&self, value: u64);
    /// Orders the stores of this thread before its later loads.
    fn full_fence();
}

impl LedgerWord for AtomicU64 {
    fn load(&self, order: Ordering) -> u64 {
        Self::load(self, order)
    }

    fn store(&self, value: u64, order: Ordering) {
        before_store();
        Self::store(self, value, order);
    }

    fn exchange(&self, from: u64, to: u64) -> bool {
        before_store();
        self.compare_exchange(from, to, AcqRel, Relaxed).is_ok()
    }

    fn raise(&self, value: u64) {
        before_store();
        self.fetch_max(value, AcqRel);
    }

    fn full_fence() {
        std::sync::atomic::fence(Ordering::SeqCst);
    }
}

/// What tests and fuzz programs do between the stores of a member.
#[inline(always)]
fn before_store() {
    #[cfg(any(test, feature = "steps"))]
    crate::ledger::steps::before_store();
    #[cfg(all(test, not(loom)))]
    tests::before_store();
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
    /// The largest number of slots that this process has seen in use. The header may be
    /// overwritten.
    pub(crate) seen: &'a AtomicUsize,
}

impl<'a, W> Table<'a, W> {
    pub(crate) fn slot(&self, number: usize) -> &'a [W] {
        let start = (number * self.stride).min(self.slots.len());
        &self.slots[start..(start + self.stride).min(self.slots.len())]
    }

    fn others(&self, own: usize) -> impl Iterator<Item = (usize, &'a [W])>
    where
        W: LedgerWord,
    {
        let slots = self.slots.chunks_exact(self.stride).take(self.used()).enumerate();
        slots.filter(move |(number, _)| *number != own)
    }
}

impl<W: LedgerWord> Table<'_, W> {
    /// Returns the number of slots that may be in use. It is raised before a member of a higher
    /// slot claims: a claim that is to see all others' reads it after its fence.
    #[inline]
    pub(crate) fn used(&self) -> usize {
        let shown = self.header[header::SLOTS_USED].load(Acquire);
        let shown = usize::try_from(shown).unwrap_or(SLOTS).min(SLOTS);
        let seen = self.seen.load(Relaxed);
        if shown <= seen {
            return seen;
        }
        self.seen.fetch_max(shown, Relaxed);
        shown
    }

    /// Raises the number of slots that may be in use, here and in the header.
    pub(crate) fn raise_used(&self, used: usize) {
        debug_assert!(used <= SLOTS, "more slots in use than a file has");
        let used = self.seen.fetch_max(used, Relaxed).max(used);
        self.header[header::SLOTS_USED].raise(used as u64);
    }
}

/// Clears a slot, apart from how often it was joined. No other process may write to it.
pub(crate) fn clear<W: LedgerWord>(slot: &[W]) {
    let words = slot.iter().enumerate().filter(|(at, _)| *at != slot::JOINED);
    words.for_each(|(_, word)| put(word, 0, Relaxed));
}

/// Makes a slot that belongs to no member one of the caller's, who has the right to join: writes
/// the `terms` into it, and locks it. Returns what `lock` does: whether it is locked now.
///
/// A process that stops on the way leaves a slot without claims.
pub(crate) fn join<W: LedgerWord, E>(
    table: &Table<'_, W>,
    number: usize,
    terms: impl FnOnce(&[W]),
    lock: impl FnOnce() -> Result<bool, E>,
) -> Result<bool, E> {
    let slot = table.slot(number);
    clear(slot);
    terms(slot);
    table.raise_used(number + 1);
    let is_locked = lock()?;
    if is_locked {
        // Invariant 5.
        let joined = slot[slot::JOINED].load(Relaxed);
        put(&slot[slot::JOINED], joined.wrapping_add(1), Release);
    }
    Ok(is_locked)
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
        debug_assert!(above_lowest >> 32 == 0, "a priority would pass for a guarantee");
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

/// A slot whose member was found dead, and how often it had been joined before.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Dead {
    pub(crate) number: usize,
    pub(crate) joined: u64,
}

/// The settings of one claim.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Terms<'a> {
    /// The claimant's slot.
    pub(crate) own: usize,
    pub(crate) capacity: u64,
    pub(crate) rank: Rank,
    /// Slots that do not count, unless they were joined since.
    pub(crate) dead: &'a [Dead],
    /// Whether undecided claims of others are cancelled.
    pub(crate) cancels: bool,
}

impl Terms<'_> {
    fn leaves_out<W: LedgerWord>(&self, number: usize, slot: &[W]) -> bool {
        self.dead.iter().any(|dead| {
            // Invariant 5.
            dead.number == number && dead.joined == slot[slot::JOINED].load(Acquire)
        })
    }
}

/// What a slot holds, and what it holds if its pending claim is granted. `pending` was read before
/// `claimed`.
pub(crate) fn held(pending: u64, claimed: u64) -> (u64, u64) {
    let at_most = claimed.max(pending & !GRANTED);
    let held = if pending & GRANTED == 0 { claimed } else { at_most };
    debug_assert!(
        claimed <= held && held <= at_most,
        "a slot is seen with fewer bytes than it has"
    );
    (held, at_most)
}

/// Sums what the other members hold.
pub(crate) fn others<W: LedgerWord>(
    table: &Table<'_, W>,
    terms: &Terms<'_>,
    now: impl Fn() -> u64,
) -> Others {
    let mut sum = Others::default();
    for (number, slot) in table.others(terms.own) {
        if terms.leaves_out(number, slot) {
            continue;
        }
        // Invariant 2: in this order.
        let mut pending = slot[slot::PENDING].load(Acquire);
        while terms.cancels && pending != 0 && pending & GRANTED == 0 {
            // If this fails, the member has gone on.
            let is_cancelled = slot[slot::PENDING].exchange(pending, 0);
            pending = if is_cancelled { 0 } else { slot[slot::PENDING].load(Acquire) };
        }
        let (held, at_most) = held(pending, slot[slot::CLAIMED].load(Acquire));
        let reserved = slot[slot::RESERVED].load(Relaxed);
        sum.held = sum.held.saturating_add(held.max(reserved));
        sum.at_most = sum.at_most.saturating_add(at_most.max(reserved));
        if let Some(wish) = wish(slot, &now)
            && wish.rank.is_before(terms.rank)
        {
            sum.kept = sum.kept.saturating_add(wish.bytes);
        }
    }
    debug_assert!(sum.held <= sum.at_most, "pending claims take bytes away");
    sum
}

/// The outcome of a claim.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Outcome {
    /// The bytes are claimed.
    Granted,
    /// Only pending claims of others stand in the way, or another member has cancelled this one.
    /// Nothing has changed.
    Conflict(Others),
    /// The bytes do not fit. Nothing has changed.
    Refused(Others),
}

/// Claims `bytes` on top of `claimed`, which the own slot has. The caller is the only writer of the
/// slot.
pub(crate) fn claim<W: LedgerWord>(
    table: &Table<'_, W>,
    terms: &Terms<'_>,
    claimed: u64,
    bytes: u64,
    now: impl Fn() -> u64,
) -> Outcome {
    let own = table.slot(terms.own);
    debug_assert_eq!(own.len(), table.stride, "the own slot is outside of the file");
    debug_assert!(claimed <= MOST_CLAIMED, "a sum of claims has the flag of a grant");
    let next = claimed.checked_add(bytes).filter(|next| *next <= MOST_CLAIMED);
    let Some(next) = next else { return Outcome::Refused(others(table, terms, now)) };
    // Release: a thread that reads these bytes also reads the claims granted before.
    own[slot::PENDING].store(next, Release);
    W::full_fence();
    let sum = others(table, terms, now);
    let unaccounted = table.header[header::UNACCOUNTED].load(Relaxed);
    let capacity = terms.capacity.saturating_sub(unaccounted);
    let fits = |held: u64| held.saturating_add(sum.kept).saturating_add(next) <= capacity;
    let outcome = if fits(sum.at_most) && own[slot::PENDING].exchange(next, next | GRANTED) {
        debug_assert!(next <= terms.capacity, "invariant 1: a claim above the capacity");
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

#[cfg(test)]
#[cfg(not(loom))]
pub(crate) mod tests {
    use super::*;
    use crate::ledger::layout::{HEADER_WORDS, SLOT_WORDS};
    use nix::{
        sys::signal::{Signal, kill},
        unistd::Pid,
    };
    use std::{env, sync::OnceLock};

    pub(crate) const DIE_AT: &str = "AQUIFER_TEST_DIE_AT";
    pub(crate) const STOP_AT: &str = "AQUIFER_TEST_STOP_AT";

    /// Kills or stops the process before its n-th store if a variable says so.
    pub(super) fn before_store() {
        static AT: OnceLock<Option<(u64, Signal)>> = OnceLock::new();
        static STORES: AtomicU64 = AtomicU64::new(0);
        let of = |variable, signal| Some((env::var(variable).ok()?.parse().ok()?, signal));
        let at =
            AT.get_or_init(|| of(DIE_AT, Signal::SIGKILL).or_else(|| of(STOP_AT, Signal::SIGSTOP)));
        if let Some((at, signal)) = at
            && STORES.fetch_add(1, Relaxed) == *at
        {
            kill(Pid::this(), *signal).unwrap();
        }
    }

    struct Memory(Vec<AtomicU64>, Vec<AtomicU64>, AtomicUsize);

    impl Memory {
        fn new(slots: usize) -> Self {
            let zeros = |count: usize| (0..count).map(|_| AtomicU64::new(0)).collect();
            Self(zeros(HEADER_WORDS), zeros(slots * SLOT_WORDS), AtomicUsize::new(slots))
        }

        fn table(&self) -> Table<'_, AtomicU64> {
            Table { header: &self.0, slots: &self.1, stride: SLOT_WORDS, seen: &self.2 }
        }

        fn set(&self, number: usize, at: usize, value: u64) {
            self.table().slot(number)[at].store(value, Relaxed);
        }

        fn claim(&self, own: usize, bytes: u64, rank: Rank) -> Outcome {
            let terms = Terms { own, capacity: 100, rank, dead: &[], cancels: false };
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
    use loom::{
        model,
        sync::atomic::{self, AtomicBool},
        thread,
    };
    use std::{cell::Cell, convert::Infallible, sync::Arc};

    loom::thread_local! {
        /// The stores that this thread still makes, as a member that then stops or dies.
        static LEFT: Cell<u32> = Cell::new(u32::MAX);
    }

    /// Returns whether this member still runs, and counts one of its stores.
    fn runs() -> bool {
        LEFT.with(|left| {
            let now = left.get();
            left.set(now.saturating_sub(u32::from(now != u32::MAX)));
            now > 0
        })
    }

    /// A word that a member which has stopped changes no more.
    struct Word(atomic::AtomicU64);

    impl LedgerWord for Word {
        fn load(&self, order: Ordering) -> u64 {
            // What a stopped member reads is of no consequence.
            if LEFT.with(Cell::get) == 0 { 0 } else { self.0.load(order) }
        }

        fn store(&self, value: u64, order: Ordering) {
            if runs() {
                self.0.store(value, order);
            }
        }

        fn exchange(&self, from: u64, to: u64) -> bool {
            runs() && self.0.compare_exchange(from, to, AcqRel, Relaxed).is_ok()
        }

        fn raise(&self, value: u64) {
            if runs() {
                self.0.fetch_max(value, AcqRel);
            }
        }

        fn full_fence() {
            atomic::fence(Ordering::SeqCst);
        }
    }

    /// As few words as the protocol reads, since each is an object of the model.
    const STRIDE: usize = slot::JOINED + 1;
    const CAPACITY: u64 = 100;
    /// More stores than any model's member makes.
    const MOST_STORES: u32 = 11;

    /// The words of a ledger of two slots, and their locks.
    struct Memory {
        header: Vec<Word>,
        slots: Vec<Word>,
        locks: [AtomicBool; 2],
    }

    /// A process with a handle of its own.
    struct Handle<'a> {
        memory: &'a Memory,
        seen: AtomicUsize,
        own: usize,
        claimed: u64,
    }

    impl Memory {
        /// A ledger whose first `used` slots have members.
        fn new(used: usize) -> Arc<Self> {
            let zeros =
                |count| (0..count).map(|_| Word(atomic::AtomicU64::new(0))).collect::<Vec<_>>();
            let memory = Self {
                header: zeros(header::SLOTS_USED + 1),
                slots: zeros(2 * STRIDE),
                locks: [0, 1].map(|number| AtomicBool::new(number < used)),
            };
            memory.header[header::SLOTS_USED].store(used as u64, Relaxed);
            Arc::new(memory)
        }

        fn handle(&self, own: usize) -> Handle<'_> {
            Handle { memory: self, seen: AtomicUsize::new(0), own, claimed: 0 }
        }
    }

    impl Handle<'_> {
        fn table(&self) -> Table<'_, Word> {
            let Memory { header, slots, .. } = self.memory;
            Table { header, slots, stride: STRIDE, seen: &self.seen }
        }

        fn word(&self, at: usize) -> &Word {
            &self.memory.slots[self.own * STRIDE + at]
        }

        /// As `Share::join`, with the right to join.
        fn join(&self) {
            let lock = || {
                if runs() {
                    self.memory.locks[self.own].store(true, Release);
                }
                Ok::<_, Infallible>(true)
            };
            let _locked = join(&self.table(), self.own, |_| {}, lock);
        }

        /// As `Ledger::dead`.
        fn dead(&self) -> Vec<Dead> {
            let number = 1 - self.own;
            let joined = self.memory.slots[number * STRIDE + slot::JOINED].load(Acquire);
            let is_live = self.memory.locks[number].load(Acquire);
            if is_live { Vec::new() } else { vec![Dead { number, joined }] }
        }

        fn claim_as(&mut self, bytes: u64, dead: &[Dead], cancels: bool) -> Outcome {
            let rank = Rank::new(false, 0, u64::MAX);
            let terms = Terms { own: self.own, capacity: CAPACITY, rank, dead, cancels };
            let outcome = claim(&self.table(), &terms, self.claimed, bytes, || 0);
            if outcome == Outcome::Granted {
                self.claimed += bytes;
            }
            outcome
        }

        fn claim(&mut self, bytes: u64) -> Outcome {
            self.claim_as(bytes, &[], false)
        }

        fn release(&mut self, bytes: u64) {
            self.claimed -= bytes;
            self.word(slot::CLAIMED).store(self.claimed, Release);
        }
    }

    #[test]
    fn of_two_claims_that_do_not_both_fit_at_most_one_is_granted() {
        model(|| {
            let memory = Memory::new(2);
            let other = thread::spawn({
                let memory = memory.clone();
                move || memory.handle(1).claim(60) == Outcome::Granted
            });
            let own = memory.handle(0).claim(60);
            let other = other.join().unwrap();
            assert!(own != Outcome::Granted || !other);
            // Neither has held any bytes when the other is refused for good.
            assert!(!matches!(own, Outcome::Refused(_)) || other);
        });
    }

    #[test]
    fn two_claims_one_after_the_other_are_never_seen_as_fewer_bytes() {
        model(|| {
            let memory = Memory::new(2);
            let other = thread::spawn({
                let memory = memory.clone();
                move || {
                    let mut other = memory.handle(1);
                    other.claim(30);
                    other.claim(40);
                    other.claimed
                }
            });
            let mut own = memory.handle(0);
            own.claim(50);
            assert!(own.claimed + other.join().unwrap() <= CAPACITY);
        });
    }

    #[test]
    fn released_bytes_are_claimed_once() {
        model(|| {
            let memory = Memory::new(2);
            let mut other = memory.handle(1);
            assert_eq!(other.claim(60), Outcome::Granted);
            let other = thread::spawn({
                let memory = memory.clone();
                move || {
                    let mut other = Handle { claimed: 60, ..memory.handle(1) };
                    other.release(60);
                    other.claim(70) == Outcome::Granted
                }
            });
            let own = memory.handle(0).claim(60) == Outcome::Granted;
            let other = other.join().unwrap();
            assert!(!(own && other));
        });
    }

    #[test]
    fn a_member_that_joins_while_another_claims_is_seen_by_it_or_sees_it() {
        model(|| {
            let memory = Memory::new(1);
            let other = thread::spawn({
                let memory = memory.clone();
                move || {
                    let mut other = memory.handle(1);
                    other.join();
                    other.claim(60) == Outcome::Granted
                }
            });
            let own = memory.handle(0).claim(60) == Outcome::Granted;
            assert!(!(own && other.join().unwrap()));
        });
    }

    #[test]
    fn a_claim_that_is_cancelled_is_not_granted_and_goes_on_afterwards() {
        model(|| {
            let memory = Memory::new(2);
            let other = thread::spawn({
                let memory = memory.clone();
                move || {
                    let mut other = memory.handle(1);
                    other.claim(60);
                    other.claim(30);
                    other.claimed
                }
            });
            let mut own = memory.handle(0);
            let outcome = own.claim_as(60, &[], true);
            // A claim that is made after all others are cancelled can cancel none itself.
            assert!(!matches!(outcome, Outcome::Conflict(_)));
            assert!(own.claimed + other.join().unwrap() <= CAPACITY);
        });
    }

    #[test]
    fn of_two_that_cancel_each_others_claim_at_most_one_is_granted() {
        model(|| {
            let memory = Memory::new(2);
            let other = thread::spawn({
                let memory = memory.clone();
                move || memory.handle(1).claim_as(60, &[], true) == Outcome::Granted
            });
            let own = memory.handle(0).claim_as(60, &[], true) == Outcome::Granted;
            assert!(!(own && other.join().unwrap()));
        });
    }

    #[test]
    fn a_member_that_stops_at_any_store_leaves_others_what_it_does_not_hold() {
        for stores in 0..=MOST_STORES {
            model(move || {
                let memory = Memory::new(1);
                let other = thread::spawn({
                    let memory = memory.clone();
                    move || {
                        LEFT.with(|left| left.set(stores));
                        let mut other = memory.handle(1);
                        other.join();
                        other.claim(60);
                    }
                });
                let mut own = memory.handle(0);
                let outcome = own.claim_as(60, &[], true);
                assert!(!matches!(outcome, Outcome::Conflict(_)), "{stores}");
                other.join().unwrap();
                let word = |at: usize| memory.slots[STRIDE + at].load(Acquire);
                let (held, _) = held(word(slot::PENDING), word(slot::CLAIMED));
                assert!(own.claimed + held <= CAPACITY, "{stores}: {held}");
                assert!(own.claimed + held >= 60, "{stores}: none is granted");
                // What it does not hold is free at the next claim at the latest.
                let rest = CAPACITY - own.claimed - held;
                assert_eq!(own.claim_as(rest, &[], true), Outcome::Granted, "{stores}");
            });
        }
    }

    #[test]
    fn a_dead_member_is_left_out_and_the_next_one_in_its_slot_is_not() {
        // Without a bound on preemptions it does not end in minutes.
        let mut bounded = model::Builder::new();
        bounded.preemption_bound = Some(3);
        for stores in 0..=MOST_STORES {
            bounded.check(move || {
                let memory = Memory::new(1);
                let next = thread::spawn({
                    let memory = memory.clone();
                    move || {
                        LEFT.with(|left| left.set(stores));
                        let mut dies = memory.handle(1);
                        dies.join();
                        dies.claim(60);
                        LEFT.with(|left| left.set(u32::MAX));
                        memory.locks[1].store(false, Release);
                        let mut next = memory.handle(1);
                        next.join();
                        next.claim(60) == Outcome::Granted
                    }
                });
                let mut own = memory.handle(0);
                let dead = own.dead();
                let granted = own.claim_as(60, &dead, true) == Outcome::Granted;
                assert!(!(granted && next.join().unwrap()), "{stores}");
            });
        }
    }
}
