//! A budget whose root claims from a ledger, and the thread that answers other members.
//!
//! ```text
//!   a charge that does not fit ──▶ the reclaimer "other processes": a wish, and a wait
//!                                        │ futex
//!   another process:   its answering thread ──▶ Budget::reclaim ──▶ releases ──▶ the wish is served
//! ```
//!
//! What a wish has obtained is kept as credit until the charge takes it. Credit that no charge
//! takes within two rounds of the thread is released.

use crate::ledger::{
    error::{ClaimRefused, Holder, LedgerError},
    member::Member,
};
use aquifer_core::{
    Budget, Tag,
    budget::{CapacitySource, ClaimShortage, HeldElsewhere, HookRegistration, Offer, Reclaim},
    panics::contain,
};
use std::{
    fmt,
    mem::ManuallyDrop,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

/// The longest wait for other processes in one call of the reclaimer, which is called again if they
/// have given back a part by then.
const WISH_WAIT: Duration = Duration::from_millis(200);
/// What is given back between two looks, so that whoever waits sees it become more: a driver under
/// load takes 0.45 s for a GiB.
const ANSWER_BYTES: u64 = 64 << 20;
/// The pause between two rounds of the answering thread while no member waits.
const IDLE_PAUSE: Duration = Duration::from_millis(50);
/// The same while a member waits: the first, which doubles up to [`IDLE_PAUSE`] while nothing is
/// gained.
const BUSY_PAUSE: Duration = Duration::from_millis(1);
/// How long reclaimers that wait for work may take in one round.
const ANSWER_WAIT: Duration = Duration::from_millis(5);
/// What it costs other processes to give back a MiB, as far as the order of reclaimers is concerned:
/// more than anything in this process, so that they are asked last.
const OTHERS_COST_PER_MIB: Duration = Duration::from_millis(10);

/// The claims of a budget.
struct BudgetClaims {
    member: Member,
    credit: Mutex<Credit>,
    in_use: Box<dyn Fn() -> Option<u64> + Send + Sync>,
}

/// Bytes that are claimed and not yet granted by the budget.
#[derive(Clone, Copy, Default)]
struct Credit {
    bytes: u64,
    /// It has not changed since the last round.
    is_old: bool,
}

impl BudgetClaims {
    /// Calls `work` with the credit. A forked child has none, and does not lock: another thread of
    /// its parent may have held the lock at the fork.
    fn with_credit<R: Default>(&self, work: impl FnOnce(&mut Credit) -> R) -> R {
        if !self.member.is_of_this_process() {
            return R::default();
        }
        work(&mut self.credit.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Measures what is in use, and returns whether it is known: if that panics, it is not.
    fn measure(&self) -> bool {
        self.member.measure(|| contain(&self.in_use).flatten())
    }

    fn add_credit(&self, bytes: u64) {
        self.with_credit(|credit| {
            *credit = Credit { bytes: credit.bytes.saturating_add(bytes), is_old: false };
        });
    }

    /// Takes at most `bytes` of the credit.
    fn take_credit(&self, bytes: u64) -> u64 {
        self.with_credit(|credit| {
            let taken = credit.bytes.min(bytes);
            credit.bytes -= taken;
            taken
        })
    }

    fn credit_bytes(&self) -> u64 {
        self.with_credit(|credit| credit.bytes)
    }

    /// Releases credit that was there in the last round already.
    fn expire_credit(&self) {
        let expired = self.with_credit(|credit| {
            let expired = if credit.is_old { credit.bytes } else { 0 };
            *credit = Credit { bytes: credit.bytes - expired, is_old: true };
            expired
        });
        self.member.release(expired);
    }
}

impl CapacitySource for BudgetClaims {
    fn claim(&self, bytes: u64) -> Result<(), ClaimShortage> {
        let taken = self.take_credit(bytes);
        self.member.claim(bytes - taken).map_err(|refused| {
            self.add_credit(taken);
            shortage(&refused, taken)
        })
    }

    fn release(&self, bytes: u64) {
        self.member.release(bytes);
    }

    fn room(&self) -> u64 {
        self.member.room().saturating_add(self.credit_bytes())
    }

    fn shortfall(&self, bytes: u64) -> u64 {
        if bytes <= self.room() { 0 } else { bytes - self.credit_bytes().min(bytes) }
    }

    /// The driver may have taken memory for itself since the last round, or counts parts of pages as
    /// free. Not recorded where no measurement would ever correct it.
    fn refused_by_driver(&self, bytes: u64) {
        if self.measure() {
            self.member.count_refused(bytes);
        }
    }

    fn shortage(&self, bytes: u64) -> ClaimShortage {
        shortage(&self.member.shortage(bytes), self.credit_bytes())
    }
}

/// Returns a refused claim as the budget tells it, where there is `credit`.
fn shortage(refused: &ClaimRefused, credit: u64) -> ClaimShortage {
    let held = refused.others.saturating_sub(refused.reserved);
    let holder =
        refused.largest.as_ref().map_or(Tag::NONE, |Holder { process, command, .. }| {
            // A command may have any characters, which `?` escapes.
            Tag::named(&format!("process {process} ({command:?})"))
        });
    let elsewhere = HeldElsewhere::new(held.saturating_add(refused.unaccounted), holder);
    ClaimShortage { room: refused.room().saturating_add(credit), elsewhere }
}

impl Reclaim for BudgetClaims {
    fn name(&self) -> &'static str {
        "other processes"
    }

    /// Returns what other members hold beyond their guarantees.
    fn offer(&self) -> Offer {
        let bytes = self.member.lent_to_others();
        let mib = u32::try_from(bytes.div_ceil(1 << 20)).unwrap_or(u32::MAX);
        Offer { bytes, cost: OTHERS_COST_PER_MIB.saturating_mul(mib) }
    }

    fn reclaim(&self, bytes: u64, deadline: Option<Instant>) {
        let most = Instant::now() + WISH_WAIT;
        let deadline = deadline.map_or(most, |deadline| deadline.min(most));
        if self.member.claim_by(bytes, deadline).is_ok() {
            self.add_credit(bytes);
        }
    }

    fn waits(&self) -> bool {
        true
    }
}

/// A root budget whose bytes are claimed from a ledger, as long as anything is charged to it.
///
/// While this exists, a thread answers other members: on their need it [reclaims](Budget::reclaim)
/// below the budget what they ask for. It sleeps while no member asks, apart from a round every
/// 50 ms. Dropping this ends the thread. What is charged stays claimed, and is no longer given back
/// on others' need.
///
/// ```
/// use aquifer_status::ledger::{Ledger, Share};
/// # let folder = std::env::temp_dir().join(format!("aquifer-shared-doc-{}", std::process::id()));
/// let member = Share::new().guarantee(40).join(Ledger::open(&folder, "GPU-1", 100)?)?;
/// let shared = member.budget("device 0", || None)?;
/// let charge = shared.budget().charge(70)?;
/// assert_eq!(shared.member().claimed(), 70);
/// # drop((charge, shared));
/// # std::fs::remove_dir_all(&folder)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[must_use = "without it other processes are not answered"]
pub struct SharedBudget {
    claims: Arc<BudgetClaims>,
    budget: Budget,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Member {
    /// Creates a root budget that claims from the ledger, and starts the thread that answers other
    /// members. `in_use` returns the bytes of the memory that all processes use, see
    /// [`Member::measure`]. It is called at once, every 50 ms, and where a driver has refused
    /// memory. A panic of it counts as `None`.
    ///
    /// # Errors
    /// [`LedgerError::NoThread`].
    pub fn budget(
        self,
        name: &'static str,
        in_use: impl Fn() -> Option<u64> + Send + Sync + 'static,
    ) -> Result<SharedBudget, LedgerError> {
        let limit = self.limit();
        let in_use = Box::new(in_use);
        let claims = Arc::new(BudgetClaims { member: self, credit: Mutex::default(), in_use });
        // The first claim may come before the thread's first round.
        claims.measure();
        let budget = Budget::shared(name, limit, claims.clone());
        let registration = budget.on_need(&claims);
        let stop = Arc::new(AtomicBool::new(false));
        let answering = Answering {
            claims: claims.clone(),
            budget: budget.clone(),
            registration,
            stop: stop.clone(),
        };
        let thread = thread::Builder::new()
            .name("aq-ledger".to_owned())
            .spawn(move || answering.run())
            .map_err(|error| LedgerError::NoThread { error })?;
        Ok(SharedBudget { claims, budget, stop, thread: Some(thread) })
    }
}

impl SharedBudget {
    /// Returns the root budget.
    #[must_use]
    pub fn budget(&self) -> &Budget {
        &self.budget
    }

    /// Returns the member that claims for it.
    pub fn member(&self) -> &Member {
        &self.claims.member
    }
}

impl fmt::Debug for SharedBudget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SharedBudget").field("budget", &self.budget).finish_non_exhaustive()
    }
}

impl Drop for SharedBudget {
    fn drop(&mut self) {
        let Some(thread) = self.thread.take() else { return };
        if !self.claims.member.is_of_this_process() {
            // A forked child does not have the thread, and a lock of the handle may be held.
            let _kept = ManuallyDrop::new(thread);
            return;
        }
        self.stop.store(true, Relaxed);
        self.claims.member.wake_answering();
        // What the thread itself drops must not wait for it.
        if thread.thread().id() != thread::current().id() {
            // A thread that has panicked has reported it.
            let _ended = thread.join();
        }
    }
}

/// The thread that answers other members.
struct Answering {
    claims: Arc<BudgetClaims>,
    budget: Budget,
    /// Of the claims as a reclaimer, which must not ask others on behalf of others.
    registration: HookRegistration,
    stop: Arc<AtomicBool>,
}

impl Answering {
    fn run(self) {
        let member = &self.claims.member;
        let (mut pause, mut last_round) = (BUSY_PAUSE, None::<Instant>);
        loop {
            let seen = member.wishes_seen();
            if self.stop.load(Relaxed) {
                return;
            }
            let owed = member.owed();
            let gained = owed > 0 && self.give_back(owed) > 0;
            // After the answer, since the measurement may call a driver.
            if last_round.is_none_or(|last| last.elapsed() >= IDLE_PAUSE) {
                last_round = Some(Instant::now());
                member.refresh();
                self.claims.measure();
                self.claims.expire_credit();
                member.set_reclaimable(self.budget.offered(Some(&self.registration)));
            }
            self.budget.serve_waiters();
            pause = match (gained, owed > 0 || self.budget.waiting() > 0) {
                (true, _) if owed > ANSWER_BYTES => continue,
                (true, _) => BUSY_PAUSE,
                (false, true) => (pause * 2).min(IDLE_PAUSE),
                (false, false) => {
                    pause = BUSY_PAUSE;
                    member.wait_for_wish(seen, IDLE_PAUSE);
                    continue;
                }
            };
            member.wait_for_wish(seen, pause);
        }
    }

    /// Reclaims what others ask for. Returns the bytes that were released.
    fn give_back(&self, owed: u64) -> u64 {
        let before = self.budget.used();
        let now = Instant::now();
        let own = Some(&self.registration);
        let _reclaimed = self.budget.reclaim(owed.min(ANSWER_BYTES), Some(now + ANSWER_WAIT), own);
        self.claims.member.set_reclaimable(self.budget.offered(own));
        before.saturating_sub(self.budget.used())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ledger::{Ledger, Share};
    use nix::{
        libc,
        sys::{
            signal::{Signal, kill},
            wait::{WaitPidFlag, WaitStatus, waitpid},
        },
        unistd::Pid,
    };
    use std::{env, fs, process};

    #[test]
    #[expect(unsafe_code, reason = "forks")]
    fn a_forked_child_does_not_wait_for_the_credit_that_was_locked_at_the_fork() {
        let folder = env::temp_dir().join(format!("aquifer-ledger-credit-{}", process::id()));
        let ledger = Ledger::open(&folder, "gpu", 100).unwrap();
        let shared = Share::new().join(ledger).unwrap().budget("device 0", || None).unwrap();
        let claims = &shared.claims;
        let locked = claims.credit.lock().unwrap();
        // SAFETY: 1. The child calls what is allowed in a child of a process with threads: atomics
        // and system calls.
        let child = unsafe { libc::fork() };
        if child == 0 {
            claims.add_credit(1);
            claims.expire_credit();
            let refused = claims.claim(1).is_err_and(|short| short.room == 0);
            let well = refused && (claims.room(), claims.shortfall(1)) == (0, 1);
            // SAFETY: 1. It ends the process.
            unsafe { libc::_exit(i32::from(!well)) };
        }
        let (child, until) = (Pid::from_raw(child), Instant::now() + Duration::from_secs(10));
        let mut ended = waitpid(child, Some(WaitPidFlag::WNOHANG)).unwrap();
        while ended == WaitStatus::StillAlive {
            if Instant::now() > until {
                kill(child, Signal::SIGKILL).unwrap();
            }
            thread::sleep(Duration::from_millis(1));
            ended = waitpid(child, Some(WaitPidFlag::WNOHANG)).unwrap();
        }
        drop(locked);
        assert!(matches!(ended, WaitStatus::Exited(_, 0)), "{ended:?}");
        drop(shared);
        fs::remove_dir_all(folder).unwrap();
    }
}
