//! The share of a process: its claims, its wishes, and what it owes to others.

use crate::ledger::{
    error::{ClaimRefused, Holder, LedgerError},
    layout::{SLOTS, header, slot},
    open::Ledger,
    protocol::{
        self, Dead, LAPSES_AFTER_NS, MOST_CLAIMED, Others, Outcome, Rank, Terms, held, put, wish,
    },
    system,
    system::now_ns,
};
use crate::{
    StatusError,
    text::{cut, read_text, write_text},
};
use std::{
    env,
    hash::{DefaultHasher, Hash, Hasher},
    hint, process,
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{
            AtomicBool, AtomicU64,
            Ordering::{AcqRel, Acquire, Relaxed, Release},
        },
    },
    thread,
    time::{Duration, Instant},
};

/// How long joining waits for another process that joins.
const JOIN_WAIT: Duration = Duration::from_secs(1);
/// The longest wait between two attempts of a waiting claim. The death of a member wakes no other.
const RETRY: Duration = Duration::from_micros(500);
/// How long a claim is tried again that others' undecided claims stand in the way of. Then these
/// are cancelled: their processes may be stopped.
const CONFLICT_WAIT: Duration = Duration::from_millis(2);
/// How long it is tried again in all, while others cancel it.
const CANCELLED_WAIT: Duration = Duration::from_nanos(LAPSES_AFTER_NS);
/// Wishes that are older ask all members for all that is missing, whatever they seemed to have.
const PATIENCE_NS: u64 = 5_000_000;

/// The terms of a member. Bytes, unless noted.
#[derive(Clone, Debug)]
pub struct Share {
    guarantee: u64,
    reserve: bool,
    limit: u64,
    priority: i32,
}

impl Default for Share {
    fn default() -> Self {
        Self { guarantee: 0, reserve: false, limit: u64::MAX, priority: 0 }
    }
}

impl Share {
    /// Creates a share without a guarantee, limited by the capacity, of priority 0.
    ///
    /// ```
    /// use aquifer_status::ledger::Share;
    /// let server = Share::new().guarantee(60 << 30).limit(95 << 30).priority(1);
    /// ```
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Guarantees `bytes`: a claim up to this sum comes before others' claims beyond their own
    /// guarantees, and others are asked to give back what they hold beyond theirs. Bytes that are
    /// not in use are lent to others, unless [reserved](Self::reserve).
    #[must_use]
    pub fn guarantee(mut self, bytes: u64) -> Self {
        self.guarantee = bytes;
        self
    }

    /// Keeps the guarantee free for this member even while it does not use it.
    #[must_use]
    pub fn reserve(mut self) -> Self {
        self.reserve = true;
        self
    }

    /// Limits the claims of this member to `bytes` in all.
    #[must_use]
    pub fn limit(mut self, bytes: u64) -> Self {
        self.limit = bytes;
        self
    }

    /// Sets the priority. Among waiting claims beyond guarantees, higher priorities come first.
    #[must_use]
    pub fn priority(mut self, priority: i32) -> Self {
        self.priority = priority;
        self
    }

    /// Joins a ledger with these terms. Waits up to a second while other processes join. A ledger
    /// that was opened before a fork is opened again.
    ///
    /// # Errors
    /// [`LedgerError::GuaranteeAboveLimit`]; [`LedgerError::GuaranteesExceedCapacity`];
    /// [`LedgerError::Full`]; [`LedgerError::Busy`]; [`LedgerError::File`].
    pub fn join(self, ledger: Ledger) -> Result<Member, LedgerError> {
        let ledger = ledger.of_this_process()?;
        let limit = self.limit.min(ledger.asked().unwrap_or(u64::MAX));
        if self.guarantee > limit {
            return Err(LedgerError::GuaranteeAboveLimit { guarantee: self.guarantee, limit });
        }
        let refused = |error| StatusError::System { path: ledger.path().to_owned(), error };
        let begun = Instant::now();
        let membership = loop {
            if let Some(membership) = ledger.try_membership().map_err(refused)? {
                break membership;
            }
            if begun.elapsed() > JOIN_WAIT {
                let process = ledger.table().header[header::JOINING].load(Relaxed) as u32;
                return Err(LedgerError::Busy { path: ledger.path().to_owned(), process });
            }
            thread::sleep(Duration::from_micros(100));
        };
        // The header may be overwritten, so all slots are looked at.
        let live: Vec<usize> = (0..SLOTS).filter(|number| ledger.is_live(*number)).collect();
        let table = ledger.table();
        let guaranteed = |number: &usize| table.slot(*number)[slot::GUARANTEE].load(Relaxed);
        let others = live.iter().map(guaranteed).fold(0, u64::saturating_add);
        let capacity = match (live.is_empty(), ledger.asked()) {
            (true, Some(asked)) => asked,
            _ => table.header[header::CAPACITY].load(Relaxed),
        };
        let guarantee = self.guarantee;
        if guarantee > 0 && others.saturating_add(guarantee) > capacity {
            return Err(LedgerError::GuaranteesExceedCapacity { guarantee, others, capacity });
        }
        if live.is_empty() {
            put(&table.header[header::CAPACITY], capacity, Relaxed);
            put(&table.header[header::UNACCOUNTED], 0, Relaxed);
        }
        table.raise_used(live.last().map_or(0, |last| last + 1));
        let limit = limit.min(capacity).min(MOST_CLAIMED);
        let command: Vec<String> =
            env::args_os().map(|argument| argument.to_string_lossy().into_owned()).collect();
        let terms = |words: &[AtomicU64]| {
            self.write(words, limit);
            put(&words[slot::PROCESS], u64::from(process::id()), Relaxed);
            write_text(words, slot::COMMAND, cut(&command.join(" "), slot::COMMAND_BYTES));
        };
        let free = (0..SLOTS).filter(|number| !live.contains(number));
        let mut taken = None;
        for number in free {
            let lock = || ledger.take_slot(number);
            if protocol::join(&table, number, terms, lock).map_err(refused)? {
                taken = Some(number);
                break;
            }
        }
        let number = taken.ok_or(LedgerError::Full { slots: SLOTS })?;
        drop(membership);
        Ok(Member {
            ledger,
            slot: number,
            capacity,
            limit,
            share: self,
            claimed: Mutex::new(0),
            is_wishing: AtomicBool::new(false),
            measured_at: AtomicU64::new(0),
        })
    }

    /// Writes the terms into a slot.
    fn write(&self, words: &[AtomicU64], limit: u64) {
        let set = |at: usize, value: u64| put(&words[at], value, Release);
        set(slot::RESERVED, if self.reserve { self.guarantee } else { 0 });
        set(slot::GUARANTEE, self.guarantee);
        set(slot::LIMIT, limit);
        set(slot::PRIORITY, i64::from(self.priority).cast_unsigned());
    }
}

/// The membership of this process in a ledger: what it has claimed. It ends when it is dropped, or
/// by the kernel's hand when the process dies.
///
/// A forked child is no member. Its claims are refused, and its releases change nothing.
///
/// ```
/// use aquifer_status::ledger::{Ledger, Share};
/// # let folder = std::env::temp_dir().join(format!("aquifer-member-doc-{}", std::process::id()));
/// // Two members are two processes, or two parts of one.
/// let server = Share::new().guarantee(60).join(Ledger::open(&folder, "GPU-1", 100)?)?;
/// let trainer = Share::new().guarantee(40).join(Ledger::open(&folder, "GPU-1", 100)?)?;
/// trainer.claim(95)?;                                  // borrows what the server does not use
/// let refused = server.claim(60).unwrap_err();
/// assert_eq!((refused.room(), refused.others), (5, 95));
/// trainer.release(55);
/// server.claim(60)?;
/// # drop((server, trainer));
/// # std::fs::remove_dir_all(&folder)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
#[must_use = "a member that is dropped at once has left"]
pub struct Member {
    ledger: Ledger,
    slot: usize,
    capacity: u64,
    limit: u64,
    share: Share,
    /// What the slot says, if it is not overwritten. The slot is written under this lock.
    claimed: Mutex<u64>,
    /// Whether a thread has a wish in the slot.
    is_wishing: AtomicBool,
    /// A hash of all claims and of the others' part after the last [measurement](Self::measure).
    measured_at: AtomicU64,
}

impl Member {
    /// Claims `bytes`, or nothing. Does not wait for other members to release any; makes no system
    /// call if the bytes fit, and else one for each other member, to find those that are dead. Zero
    /// bytes always fit.
    ///
    /// # Errors
    /// [`ClaimRefused`], with what is in the way.
    pub fn claim(&self, bytes: u64) -> Result<(), ClaimRefused> {
        self.claim_as(bytes, u64::MAX)
    }

    /// Claims `bytes`, and waits for them until `deadline`: writes a wish, which asks the other
    /// members and keeps released bytes for this one.
    ///
    /// # Errors
    /// [`ClaimRefused`] of the last attempt, at once if it [is final](ClaimRefused::is_final).
    pub fn claim_by(&self, bytes: u64, deadline: Instant) -> Result<(), ClaimRefused> {
        self.claim_while(bytes, deadline, || true)
    }

    /// Like [`claim_by`](Self::claim_by), but waits only as long as `go_on` returns `true`. It is
    /// called before each attempt, at least every 500 µs, with no lock held.
    ///
    /// # Errors
    /// As [`claim_by`](Self::claim_by).
    pub fn claim_while(
        &self,
        bytes: u64,
        deadline: Instant,
        mut go_on: impl FnMut() -> bool,
    ) -> Result<(), ClaimRefused> {
        let mut refused = match self.claim(bytes) {
            Err(refused) if !refused.is_final() && Instant::now() < deadline => refused,
            decided => return decided,
        };
        let mut wish = None;
        while !refused.is_final() {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() || !go_on() {
                break;
            }
            // Another thread of this process may have one. Then this one takes what is left over.
            wish = wish.or_else(|| WrittenWish::write(self, bytes));
            let releases = self.ledger.futex(header::RELEASES);
            let seen = releases.load(Acquire);
            match self.claim_as(bytes, wish.as_ref().map_or(u64::MAX, |wish| wish.ticket)) {
                Ok(()) => return Ok(()),
                Err(again) => refused = again,
            }
            if let Some(wish) = &wish {
                wish.renew();
            }
            system::wait(releases, seen, left.min(RETRY));
        }
        Err(refused)
    }

    fn claim_as(&self, bytes: u64, ticket: u64) -> Result<(), ClaimRefused> {
        // Also where the others hold more than the capacity, as after a join with a reserve.
        if bytes == 0 && self.is_of_this_process() {
            return Ok(());
        }
        let (mut begun, mut attempt) = (None, 0_u32);
        let (mut dead, mut cancels) = (Vec::new(), false);
        loop {
            let (outcome, claimed) = self.try_claim(bytes, ticket, &dead, cancels);
            let (others, in_conflict) = match outcome {
                Outcome::Granted => return Ok(()),
                Outcome::Conflict(others) => (others, true),
                // What is undecided is not in the way.
                Outcome::Refused(others) => (Others { at_most: others.held, ..others }, false),
            };
            let mut refused = self.refusal(bytes, claimed, others);
            if refused.is_final() {
                return Err(refused);
            }
            if in_conflict && attempt < 4 {
                // A claim is decided within a microsecond. Different pauses let one of two go
                // first.
                let pause = 1 + ((self.slot as u32 * 7 + attempt * 13) & 31);
                (0..pause << attempt).for_each(|_| hint::spin_loop());
                attempt += 1;
                continue;
            }
            let found = self.ledger.dead();
            if found.iter().any(|found| !dead.contains(found)) {
                dead = found;
                continue;
            }
            let waited = begun.get_or_insert_with(Instant::now).elapsed();
            if !in_conflict || waited > CANCELLED_WAIT {
                self.name_holders(&mut refused, &dead);
                return Err(refused);
            }
            cancels = waited > CONFLICT_WAIT;
            let jitter = now_ns().wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 58;
            thread::sleep(Duration::from_micros(jitter));
        }
    }

    fn try_claim(&self, bytes: u64, ticket: u64, dead: &[Dead], cancels: bool) -> (Outcome, u64) {
        let forked = (Outcome::Refused(Others::default()), 0);
        if !self.is_of_this_process() {
            return forked;
        }
        let mut claimed = self.lock();
        let next = claimed.saturating_add(bytes);
        let rank = Rank::new(next <= self.share.guarantee, self.share.priority, ticket);
        let terms = Terms { own: self.slot, capacity: self.capacity, rank, dead, cancels };
        let table = self.ledger.table();
        let outcome = if next > self.limit {
            Outcome::Refused(protocol::others(&table, &terms, now_ns))
        } else {
            protocol::claim(&table, &terms, *claimed, bytes, now_ns)
        };
        if outcome == Outcome::Granted {
            *claimed = next;
        }
        self.check(*claimed);
        (outcome, *claimed)
    }

    /// Checks the member's own sum of claims, whatever its slot says.
    fn check(&self, claimed: u64) {
        debug_assert!(
            claimed <= self.limit,
            "{claimed} bytes claimed, {} are the limit",
            self.limit
        );
        debug_assert!(claimed <= self.capacity, "{claimed} bytes claimed of {}", self.capacity);
        debug_assert!(self.share.guarantee <= self.limit, "a guarantee above the limit");
        debug_assert!(self.slot < SLOTS, "a member without a slot");
    }

    fn refusal(&self, requested: u64, claimed: u64, others: Others) -> ClaimRefused {
        ClaimRefused {
            requested,
            claimed,
            limit: self.limit,
            capacity: self.capacity,
            others: others.at_most,
            reserved: 0,
            kept: others.kept,
            unaccounted: self.ledger.table().header[header::UNACCOUNTED].load(Relaxed),
            largest: None,
            is_forked: !self.is_of_this_process(),
        }
    }

    /// Adds to a refusal the other member that has claimed the most, and what is guaranteed to
    /// others and not claimed.
    fn name_holders(&self, refused: &mut ClaimRefused, dead: &[Dead]) {
        let table = self.ledger.table();
        let others = (0..table.used()).filter(|number| {
            *number != self.slot && dead.iter().all(|dead| dead.number != *number)
        });
        let mut most = (0, 0);
        for number in others {
            let words = table.slot(number);
            let pending = words[slot::PENDING].load(Acquire);
            let (_, at_most) = held(pending, words[slot::CLAIMED].load(Acquire));
            let unused = words[slot::RESERVED].load(Relaxed).saturating_sub(at_most);
            refused.reserved = refused.reserved.saturating_add(unused);
            most = most.max((at_most, number));
        }
        // Other members claim meanwhile.
        refused.reserved = refused.reserved.min(refused.others);
        let (bytes, number) = most;
        if bytes == 0 {
            return;
        }
        let words: Vec<u64> = table.slot(number).iter().map(|word| word.load(Relaxed)).collect();
        let command = read_text(&words, slot::COMMAND, slot::COMMAND_BYTES);
        refused.largest = Some(Holder { process: words[slot::PROCESS] as u32, command, bytes });
    }

    /// Releases claimed bytes, at most all. Wakes members that wait. Never blocks.
    pub fn release(&self, bytes: u64) {
        if !self.is_of_this_process() || bytes == 0 {
            return;
        }
        {
            let mut claimed = self.lock();
            *claimed = claimed.saturating_sub(bytes);
            put(&self.words()[slot::CLAIMED], *claimed, Release);
        }
        self.wake_waiting();
    }

    /// Returns the claimed bytes.
    #[must_use]
    pub fn claimed(&self) -> u64 {
        if self.is_of_this_process() { *self.lock() } else { 0 }
    }

    /// Returns the bytes that a claim could take now, with a system call for each other member that
    /// holds any. An estimate: other members claim too.
    #[must_use]
    pub fn room(&self) -> u64 {
        self.refusal_now(0).0.room()
    }

    /// Returns what a refused claim of `bytes` would return now, with a system call for each other
    /// member that holds any.
    #[must_use]
    pub fn shortage(&self, bytes: u64) -> ClaimRefused {
        let (mut refused, dead) = self.refusal_now(bytes);
        if !refused.is_forked {
            self.name_holders(&mut refused, &dead);
        }
        refused
    }

    fn refusal_now(&self, bytes: u64) -> (ClaimRefused, Vec<Dead>) {
        if !self.is_of_this_process() {
            return (self.refusal(bytes, 0, Others::default()), Vec::new());
        }
        let claimed = *self.lock();
        let rank = Rank::new(claimed < self.share.guarantee, self.share.priority, u64::MAX);
        let (dead, capacity) = (self.ledger.dead(), self.capacity);
        let terms = Terms { own: self.slot, capacity, rank, dead: &dead, cancels: false };
        let others = protocol::others(&self.ledger.table(), &terms, now_ns);
        (self.refusal(bytes, claimed, others), dead)
    }

    /// Returns the most that the member can ever have claimed: its limit, or the capacity.
    #[must_use]
    pub fn limit(&self) -> u64 {
        self.limit
    }

    /// Returns the ledger.
    #[must_use]
    pub fn ledger(&self) -> &Ledger {
        &self.ledger
    }

    /// Writes the slot anew from what this process knows, in case it was overwritten. Called now
    /// and then by the thread that answers wishes.
    pub fn refresh(&self) {
        if !self.is_of_this_process() {
            return;
        }
        let (table, words) = (self.ledger.table(), self.words());
        table.raise_used(self.slot + 1);
        put(&table.header[header::CAPACITY], self.capacity, Relaxed);
        let claimed = self.lock();
        put(&words[slot::CLAIMED], *claimed, Release);
        put(&words[slot::PENDING], 0, Release);
        self.share.write(words, self.limit);
        if !self.is_wishing.load(Acquire) {
            put(&words[slot::WANTED], 0, Release);
        }
    }

    /// Records what this member could give back soon, for the division of [what is
    /// owed](Self::owed).
    pub fn set_reclaimable(&self, bytes: u64) {
        if self.is_of_this_process() {
            self.words()[slot::RECLAIMABLE].store(bytes, Relaxed);
        }
    }

    /// Records the use of the memory as the driver counts it, of which what is not claimed belongs
    /// to processes that are no members. `read` returns the bytes in use, or `None` if they are
    /// unknown.
    ///
    /// Memory is claimed before it is taken, so while claims change, less is in use than is
    /// claimed, and the others' part seems smaller than it is. It is therefore raised at once, but
    /// lowered only if neither it nor a claim has changed since this member's measurement before.
    /// Returns whether the use is known.
    pub fn measure(&self, read: impl FnOnce() -> Option<u64>) -> bool {
        if !self.is_of_this_process() {
            return false;
        }
        let dead = self.ledger.dead();
        let table = self.ledger.table();
        let claimed = || -> Vec<u64> {
            let claimed = |number| {
                let is_dead = dead.iter().any(|dead| dead.number == number);
                if is_dead { 0 } else { table.slot(number)[slot::CLAIMED].load(Acquire) }
            };
            (0..table.used()).map(claimed).collect()
        };
        // What is released or claimed during the reading is not taken for others' use. Members that
        // join during it are in the second look.
        let before = claimed();
        let Some(in_use) = read() else { return false };
        let after = claimed();
        let others = &table.header[header::UNACCOUNTED];
        let known = others.load(Relaxed);
        let hash = |others: u64| {
            let mut hasher = DefaultHasher::new();
            (&after, others).hash(&mut hasher);
            hasher.finish()
        };
        let is_still = before == after && self.measured_at.load(Relaxed) == hash(known);
        let most = after
            .iter()
            .enumerate()
            .map(|(number, after)| before.get(number).map_or(*after, |before| *after.max(before)));
        let measured = in_use.saturating_sub(most.fold(0, u64::saturating_add));
        // A value that is too large is noise of another program.
        let is_right = is_still || measured > known || known > self.capacity;
        let unaccounted = if is_right { measured } else { known };
        self.measured_at.store(hash(unaccounted), Relaxed);
        if unaccounted != known {
            // What another measurement or a refusal has written meanwhile is newer.
            let _newer = others.compare_exchange(known, unaccounted, Relaxed, Relaxed);
        }
        true
    }

    /// Records that a driver has refused `bytes`. Of the room that the ledger has for them, so much
    /// counts as others' use that they do not fit, until a [measurement](Self::measure) lowers it.
    /// Without measurements that is for good.
    pub fn count_refused(&self, bytes: u64) {
        let (refused, _) = self.refusal_now(bytes);
        let free = ClaimRefused { limit: u64::MAX, ..refused }.room();
        if bytes > 0 && self.is_of_this_process() && free >= bytes {
            let others = &self.ledger.table().header[header::UNACCOUNTED];
            let known = others.load(Relaxed);
            put(others, known.saturating_add(free - bytes).saturating_add(1), Relaxed);
        }
    }

    /// Returns the bytes that this member is asked to give back for the wishes of others: at most
    /// what it holds beyond its guarantee.
    ///
    /// Members with lower priorities are asked first, each for what it has said that it can give
    /// back. A wish that has waited for 5 ms asks each member for all that is missing.
    #[must_use]
    pub fn owed(&self) -> u64 {
        if !self.is_of_this_process() {
            return 0;
        }
        let table = self.ledger.table();
        let used = table.used();
        let wishes: Vec<_> = (0..used)
            .filter(|number| *number != self.slot)
            .filter_map(|number| wish(table.slot(number), now_ns))
            .collect();
        if wishes.is_empty() {
            return 0;
        }
        let unaccounted = table.header[header::UNACCOUNTED].load(Relaxed);
        let capacity = self.capacity.saturating_sub(unaccounted);
        let mut held = 0_u64;
        // What others could give back before this member is asked.
        let mut before = 0_u64;
        let own = (i64::from(self.share.priority), self.slot);
        for number in 0..used {
            let words = table.slot(number);
            let claimed = words[slot::CLAIMED].load(Acquire);
            held = held.saturating_add(claimed.max(words[slot::RESERVED].load(Relaxed)));
            let order = (words[slot::PRIORITY].load(Relaxed).cast_signed(), number);
            // A member that waits itself has nothing to give.
            if order < own && words[slot::WANTED].load(Relaxed) == 0 {
                let could = words[slot::RECLAIMABLE].load(Relaxed).min(excess(words));
                before = before.saturating_add(could);
            }
        }
        let wanted = wishes.iter().fold(0, |sum: u64, wish| sum.saturating_add(wish.bytes));
        let missing = held.saturating_add(wanted).saturating_sub(capacity);
        let oldest = wishes.iter().map(|wish| wish.since).min().unwrap_or_default();
        // Also if the clock was set back.
        let is_late = now_ns().abs_diff(oldest) > PATIENCE_NS;
        let part = if is_late { missing } else { missing.saturating_sub(before) };
        part.min(excess(self.words()))
    }

    /// Returns what the other members hold beyond their guarantees.
    #[must_use]
    pub fn lent_to_others(&self) -> u64 {
        let table = self.ledger.table();
        (0..table.used())
            .filter(|number| *number != self.slot)
            .map(|number| excess(table.slot(number)))
            .fold(0, u64::saturating_add)
    }

    /// Returns a number that changes with each wish, for [`Member::wait_for_wish`].
    #[must_use]
    pub fn wishes_seen(&self) -> u32 {
        self.ledger.futex(header::WISHES).load(Acquire)
    }

    /// Waits until there is another wish than were `seen`, or for `most`. May return early.
    pub fn wait_for_wish(&self, seen: u32, most: Duration) {
        system::wait(self.ledger.futex(header::WISHES), seen, most);
    }

    /// Ends the waits for wishes, of this process and of others.
    pub fn wake_answering(&self) {
        let wishes = self.ledger.futex(header::WISHES);
        wishes.fetch_add(1, AcqRel);
        system::wake_all(wishes);
    }

    fn wake_waiting(&self) {
        let table = self.ledger.table();
        let waits = |number| table.slot(number)[slot::WANTED].load(Acquire) != 0;
        if (0..table.used()).any(waits) {
            let releases = self.ledger.futex(header::RELEASES);
            releases.fetch_add(1, AcqRel);
            system::wake_all(releases);
        }
    }

    pub(crate) fn is_of_this_process(&self) -> bool {
        self.ledger.file.is_of_this_process()
    }

    fn words(&self) -> &[AtomicU64] {
        self.ledger.table().slot(self.slot)
    }

    fn lock(&self) -> MutexGuard<'_, u64> {
        self.claimed.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        if self.is_of_this_process() {
            // The lock ends with the file.
            self.ledger.clear(self.slot);
            self.wake_waiting();
        }
    }
}

/// Returns what the member of a slot holds beyond its guarantee.
fn excess(words: &[AtomicU64]) -> u64 {
    let claimed = words[slot::CLAIMED].load(Acquire);
    claimed.saturating_sub(words[slot::GUARANTEE].load(Relaxed))
}

/// A wish in the slot of a member, withdrawn when it is dropped.
struct WrittenWish<'a> {
    member: &'a Member,
    bytes: u64,
    ticket: u64,
}

impl<'a> WrittenWish<'a> {
    /// Writes a wish and asks the other members, unless another thread has one.
    fn write(member: &'a Member, bytes: u64) -> Option<Self> {
        if member.is_wishing.swap(true, AcqRel) {
            return None;
        }
        let tickets = &member.ledger.table().header[header::TICKETS];
        let wish = Self { member, bytes, ticket: tickets.fetch_add(1, Relaxed) };
        let words = member.words();
        put(&words[slot::TICKET], wish.ticket, Relaxed);
        put(&words[slot::WISHED], now_ns(), Relaxed);
        wish.renew();
        put(&words[slot::WANTED], bytes, Release);
        member.wake_answering();
        Some(wish)
    }

    fn renew(&self) {
        if !self.member.is_of_this_process() {
            return;
        }
        let Share { guarantee, priority, .. } = self.member.share;
        let is_within = self.member.claimed().saturating_add(self.bytes) <= guarantee;
        let words = self.member.words();
        put(&words[slot::RANK], Rank::new(is_within, priority, self.ticket).word, Relaxed);
        put(&words[slot::RENEWED], now_ns(), Relaxed);
    }
}

impl Drop for WrittenWish<'_> {
    fn drop(&mut self) {
        if !self.member.is_of_this_process() {
            return;
        }
        put(&self.member.words()[slot::WANTED], 0, Release);
        self.member.is_wishing.store(false, Release);
        // Wishes behind it may be served now.
        self.member.wake_waiting();
    }
}
